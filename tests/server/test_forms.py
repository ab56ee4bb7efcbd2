"""Answers of a form that was asked for, and calls of functions, spoken with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.conftest import Running

HELLO: Any = [{"role": "user", "content": "hello there"}]

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]

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


def test_an_answer_is_json_of_the_schema_that_is_asked_for(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=100,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert set(value) == {"n", "ok"}
    assert 0 <= value["n"] <= 99
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=20,
        response_format={"type": "regex", "pattern": "[0-9]{3}-x"},  # type: ignore[call-overload]
    )
    text = answer.choices[0].message.content
    assert text[:3].isdigit()
    assert text[3:] == "-x"
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=20,
        response_format={"type": "lark", "grammar": 'start: "yes" | "no"'},  # type: ignore[call-overload]
    )
    assert answer.choices[0].message.content in ("yes", "no")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_is_required_is_made_and_streamed_in_pieces(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    if choice != "required":
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    name, arguments, ids = "", "", []
    for piece in client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=200,
        tools=TOOLS,
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=True,
    ):
        for part in piece.choices[0].delta.tool_calls or []:
            assert part.index == 0
            assert part.function is not None
            name += part.function.name or ""
            arguments += part.function.arguments or ""
            ids += [part.id] if part.id else []
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert len(ids) == 1


def test_calls_and_what_they_gave_go_back_into_the_conversation(client: openai.OpenAI) -> None:
    messages: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "a",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, tools=TOOLS)
    without = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, tool_choice="none"
    )
    assert answer.usage is not None
    assert without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens > 0


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
