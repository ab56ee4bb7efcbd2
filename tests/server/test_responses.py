"""The Responses interface, spoken with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.conftest import Running

from chabok import SamplingParams

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as one:
        yield one


def test_a_text_is_answered(client: openai.OpenAI, running: Running) -> None:
    answer = client.responses.create(
        model="tiny", instructions="be brief", input="hello there", max_output_tokens=12
    )
    want = running.llm.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
        SamplingParams(max_tokens=12),
    )
    assert answer.output_text == want.text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["output_tokens"] == 12


def test_a_stream_tells_of_every_step_and_ends_with_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hello there", max_output_tokens=12)
    events = list(
        client.responses.create(model="tiny", input="hello there", max_output_tokens=12, stream=True)
    )
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == text
    with client.responses.stream(model="tiny", input="hello there", max_output_tokens=12) as stream:
        for _ in stream:
            pass


def test_a_required_call_is_streamed_and_what_it_gave_can_be_sent_back(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "input": "hello",
        "max_output_tokens": 200,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    answer = client.responses.create(**asked)
    (call,) = answer.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    events = list(client.responses.create(**asked, stream=True))
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    back: Any = [
        {"role": "user", "content": "hello"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    final = client.responses.create(model="tiny", input=back, tools=[TOOL], max_output_tokens=8)
    assert final.usage is not None
    assert final.usage.output_tokens == 8


def test_text_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {**TOOL["parameters"]}
    answer = client.responses.create(
        model="tiny",
        input="hello",
        max_output_tokens=60,
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert json.loads(answer.output_text)["city"] in ("Rome", "Oslo")
    content: Any = answer.output[0].content[0]  # type: ignore[union-attr,index]
    assert "".join(each.token for each in content.logprobs) == answer.output_text


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("store", True), ("conversation", "c"), ("truncation", "auto")],
)
def test_what_needs_state_is_refused_by_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        client.responses.create(model="tiny", input="hello", **{field: value})
    assert caught.value.param == field


def test_an_item_that_is_wrong_is_named(client: openai.OpenAI) -> None:
    bad: Any = [{"role": "user", "content": "a"}, {"role": "ghost", "content": "b"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.role"):
        client.responses.create(model="tiny", input=bad)
