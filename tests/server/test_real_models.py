"""Real models behind the server: calls they decide on themselves, many streams at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.models import model_path
from tests.server.conftest import Running, serving

from chabok import SamplingParams
from chabok.server.settings import ModelSettings, Settings

pytestmark = pytest.mark.wide

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city's name"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def real() -> Iterator[Running]:
    models = tuple(
        ModelSettings(name, str(model_path(name)), preload=True, sampling={"temperature": 0.0})
        for name in ("smollm2", "qwen05")
    )
    with serving(Settings(models=models, installed=False, prefix_disk=False)) as one:
        yield one


@pytest.fixture(scope="module")
def client(real: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.v1, api_key="none", max_retries=0) as one:
        yield one


def test_a_model_calls_a_function_and_answers_with_what_it_gave(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris right now?"}]
    asked: Any = {"model": "qwen05", "messages": messages, "tools": [WEATHER], "max_tokens": 100}
    asked["tool_choice"] = "required"  # the 0.5B coder alone writes calls without their tags
    answer = client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    assert answer.choices[0].finish_reason == "tool_calls"
    pieces = [
        part.function.arguments or ""
        for piece in client.chat.completions.create(**asked, stream=True)
        for part in piece.choices[0].delta.tool_calls or []
        if part.function is not None and part.index == 0
    ]
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 2
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"temperature": "18 degrees", "sky": "clear"}',
    }
    final = client.chat.completions.create(
        model="qwen05", messages=[*messages, message.model_dump(), result], tools=[WEATHER], max_tokens=60
    )
    assert "18" in (final.choices[0].message.content or "")


def test_thirty_two_streams_of_a_real_model_are_each_what_they_are_alone(real: Running) -> None:
    llm = real.llms["smollm2"]
    talks: list[Any] = [
        [{"role": "user", "content": f"Tell me a fact about the number {i}."}] for i in range(32)
    ]
    want = [llm.chat(talk, SamplingParams(max_tokens=32)).text for talk in talks]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=real.v1, api_key="none", max_retries=0) as client:

            async def one(talk: Any) -> str:
                stream = await client.chat.completions.create(
                    model="smollm2", messages=talk, max_tokens=32, stream=True
                )
                return "".join([piece.choices[0].delta.content or "" async for piece in stream])

            return await asyncio.gather(*map(one, talks))

    assert asyncio.run(all_of_them()) == want
