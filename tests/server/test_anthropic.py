"""Anthropic's interface, as its own client and as bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from tests.models import model_path
from tests.server.conftest import Running, serving, tiny

from chabok.server.auth import Keys
from chabok.server.keyfile import new_key
from chabok.server.settings import ModelSettings, Settings

HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": HELLO}


@pytest.fixture(scope="module")
def client(running: Running) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0)


def post(running: Running, body: Any, path: str = "/v1/messages") -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers={"anthropic-version": "2023-06-01"}, timeout=60)


def events_of(running: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed answer; the names before them must be those inside."""
    response = post(running, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.strip().split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def test_an_answer_has_the_form_the_client_knows(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert message.content[0].type == "text"
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    assert message.model_extra is not None
    assert message.model_extra["timings"]["output_tokens"] == 12


def test_the_text_is_that_of_the_python_api(running: Running, client: anthropic.Anthropic) -> None:
    from chabok import SamplingParams

    expected = running.llm.chat(HELLO, SamplingParams(max_tokens=12)).text
    assert client.messages.create(**ASK).content[0].text == expected  # type: ignore[union-attr]


def test_a_streamed_answer_is_the_one_given_at_once(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    assert len(pieces) > 1
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def _answers(url: str) -> tuple[str, str]:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            return whole.content[0].text, await stream.get_final_text()  # type: ignore[union-attr]


def test_the_asynchronous_client_gets_the_same(running: Running) -> None:
    import asyncio

    whole, streamed = asyncio.run(_answers(running.url))
    assert whole == streamed != ""


def test_events_come_in_the_order_of_the_interface(running: Running) -> None:
    events = events_of(running, ASK)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, delta = events[0]["message"], events[-2]
    assert start["content"] == []
    assert start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 0
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 12
    assert delta["timings"]["output_tokens"] == 12
    tokens = start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"]
    assert tokens == delta["usage"]["input_tokens"] + delta["usage"]["cache_read_input_tokens"] > 0


def test_tokens_are_counted_as_they_are_used(running: Running, client: anthropic.Anthropic) -> None:
    question: dict[str, Any] = {"messages": HELLO, "system": [{"type": "text", "text": "Be kind."}]}
    counted = client.messages.count_tokens(model="tiny", **question).input_tokens
    usage = client.messages.create(model="tiny", max_tokens=1, **question).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert counted > client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens


def test_a_repeated_prompt_is_read_from_the_cache(client: anthropic.Anthropic) -> None:
    long: dict[str, Any] = {**ASK, "messages": [{"role": "user", "content": "sea " * 60}]}
    client.messages.create(**long)
    usage = client.messages.create(**long).usage
    assert (usage.cache_read_input_tokens or 0) >= 64


def test_a_stop_sequence_ends_the_answer_and_is_named(running: Running, client: anthropic.Anthropic) -> None:
    text = client.messages.create(**ASK).content[0].text  # type: ignore[union-attr]
    stop = text[3:5]
    message = client.messages.create(**ASK, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    assert events_of(running, {**ASK, "stop_sequences": [stop]})[-2]["delta"] == {
        "stop_reason": "stop_sequence",
        "stop_sequence": stop,
    }


def test_the_last_message_of_the_assistant_is_continued(running: Running) -> None:
    whole = post(running, ASK).json()["content"][0]["text"]
    start = {"role": "assistant", "content": whole[:4]}
    counted = post(running, {"model": "tiny", "messages": HELLO}, "/v1/messages/count_tokens").json()
    longer = post(running, {"model": "tiny", "messages": [*HELLO, start]}, "/v1/messages/count_tokens").json()
    # Continued, not followed by the beginning of another answer.
    expected = len(running.llm.tokenize(whole[:4], add_bos=False))
    assert longer["input_tokens"] == counted["input_tokens"] + expected


def test_cache_marks_and_metadata_change_nothing(running: Running) -> None:
    plain = post(running, ASK).json()["content"]
    mark = {"type": "ephemeral", "ttl": "1h"}
    block = {"type": "text", "text": "Hello", "cache_control": mark}
    body = {**ASK, "messages": [{"role": "user", "content": [block]}], "metadata": {"user_id": "me"}}
    assert post(running, body).json()["content"] == plain


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": "blue"}, "colour"),
        ({"container": "box"}, "container"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"system": 3}, "system"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "riddle"}]}]}, "riddle"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {}, "speed": 3}]}, "speed"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name",
        ),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]},
                ]
            },
            "tool_use_id",
        ),
        ({"output_format": {"type": "xml"}}, "output_format"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    running: Running, change: dict[str, Any], named: str
) -> None:
    response = post(running, {**ASK, **change})
    assert response.status_code == 400, response.text
    body = response.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]
    assert body["request_id"] == response.headers["x-request-id"]


def test_an_error_is_the_exception_that_the_client_has_for_it(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="tiny") as caught:
        client.messages.create(**{**ASK, "model": "tinny"})
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index, call-overload]
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(**{**ASK, "messages": [{"role": "user", "content": "sea " * 20_000}]})


def test_models_are_listed_in_pages(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list(limit=1)] == ["tiny", "tiny-spm"]  # fetches both pages
    page = client.models.list(limit=1)
    assert ([model.id for model in page.data], page.has_more) == (["tiny"], True)
    assert [model.id for model in client.models.list(before_id="tiny-spm").data] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("none")


def test_the_clients_own_loop_over_tools_works_though_no_thread_is_kept(client: anthropic.Anthropic) -> None:
    @anthropic.beta_tool
    def now() -> str:
        """The time."""
        return "noon"

    runner = client.beta.messages.tool_runner(**ASK, tools=[now], max_iterations=1)
    (message,) = list(runner)
    assert message.content
    with pytest.raises(anthropic.BadRequestError, match="thread"):
        client.messages.create(**ASK, extra_body={"thread": {"type": "create"}})


WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_a_key_is_taken_from_the_header_that_the_client_sends(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    key = new_key("me", file)
    settings = Settings(
        models=(tiny("tiny", "llama.gguf"),), installed=False, prefix_disk=False, api_keys=file
    )
    with serving(settings, Keys(file)) as one:
        client = anthropic.Anthropic(base_url=one.url, api_key=key, max_retries=0)
        assert client.messages.create(**ASK).content
        stranger = anthropic.Anthropic(base_url=one.url, api_key="ck-none", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(**ASK)
        assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index, call-overload]
        with pytest.raises(anthropic.AuthenticationError):
            stranger.models.list()


@pytest.fixture(scope="module")
def qwen() -> Iterator[anthropic.Anthropic]:
    model = ModelSettings("qwen", str(model_path("qwen05")), preload=True, sampling={"temperature": 0.0})
    with serving(Settings(models=(model,), installed=False, prefix_disk=False)) as one:
        yield anthropic.Anthropic(base_url=one.url, api_key="none", max_retries=0)


@pytest.mark.wide
def test_a_real_model_calls_the_tool_it_is_given_and_reads_the_result(qwen: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "What is the weather in Tehran?"}
    ask: dict[str, Any] = {"model": "qwen", "max_tokens": 80, "tools": [WEATHER]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        whole = qwen.messages.create(**ask, messages=[question], tool_choice=choice)
        assert whole.stop_reason == "tool_use"
        (call,) = [block for block in whole.content if block.type == "tool_use"]
        assert call.name == "get_weather"
        assert "Tehran" in str(call.input["city"])
        with qwen.messages.stream(**ask, messages=[question], tool_choice=choice) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        assert "input_json" in kinds
        (same,) = [block for block in streamed.content if block.type == "tool_use"]
        assert (same.name, same.input) == (call.name, call.input)
        assert streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "31 degrees, sunny"}
    turns = [
        question,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Say it in one sentence."}]},
    ]
    answer = qwen.messages.create(**ask, messages=turns, tool_choice={"type": "none"})
    assert answer.content[0].type == "text"
    assert "31" in answer.content[0].text


@pytest.mark.wide
def test_a_real_model_answers_in_the_form_of_a_schema(qwen: anthropic.Anthropic) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    question: Any = [{"role": "user", "content": "Ali is thirty years old. Who is he?"}]
    parsed = qwen.messages.parse(model="qwen", max_tokens=60, messages=question, output_format=Person)
    assert parsed.parsed_output == Person(name="Ali", age=30)
