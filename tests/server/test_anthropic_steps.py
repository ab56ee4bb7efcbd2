"""The events of Anthropic's stream, from made-up answers: whatever a model does, they keep their order."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.engine.request import Completion
from chabok.engine.timings import Timings
from chabok.errors import RequestError
from chabok.server import thinking
from chabok.server.anthropic import MessageWriter, Steps, whole
from chabok.server.anthropic_bodies import MessageBody
from chabok.server.events import (
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reason,
    Reasoning,
    Started,
    Text,
    Usage,
)


def head(max_tokens: int = 100) -> Any:
    from chabok.server.anthropic import _Head

    call: Any = SimpleNamespace(request_id="req-1", load_s=0.0)
    body: Any = SimpleNamespace(max_tokens=max_tokens)
    served: Any = SimpleNamespace(name="tiny")
    return _Head(call, body, served)


def ended(reason: Reason = "stop", stopped_by: str | int | None = None, output: int = 9) -> Ended:
    completion = Completion("", [], "stop", Timings())
    return Ended(0, reason, stopped_by, completion, Usage(prompt=70, output=output, cached=64))


def message_of(*events: Event, shown: bool = True) -> dict[str, Any]:
    steps = Steps(head(), shown)
    all_ = [Started(0, 70, 64), *events]
    if not isinstance(all_[-1], Ended):
        all_.append(ended())
    return whole(step for event in all_ for step in steps.of(event))


def test_thoughts_come_in_a_block_of_their_own_with_a_signature() -> None:
    message = message_of(Reasoning(0, "Let me "), Reasoning(0, "see."), Text(0, "Four."))
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "unsigned"},
        {"type": "text", "text": "Four."},
    ]


def test_thoughts_that_are_not_to_be_shown_leave_an_empty_block() -> None:
    message = message_of(Reasoning(0, "secret"), Text(0, "Four."), shown=False)
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": "unsigned"}
    assert "secret" not in json.dumps(message)


def test_calls_keep_their_place_among_the_text_and_the_space_around_them_goes() -> None:
    message = message_of(
        Text(0, "\n"),
        CallStart(0, 0, "a", "add"),
        CallArguments(0, 0, '{"x": '),
        CallArguments(0, 0, "1}"),
        Text(0, "\n"),
        CallStart(0, 1, "b", "now"),
        Text(0, "\n\n"),
        Text(0, "Done."),
        ended("tool_calls"),
    )
    assert message["content"] == [
        {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "now", "input": {}},
        {"type": "text", "text": "\n\nDone."},
    ]
    assert message["stop_reason"] == "tool_use"


def test_space_that_is_the_whole_answer_is_kept() -> None:
    assert message_of(Text(0, " "), Text(0, "\n"))["content"] == [{"type": "text", "text": " \n"}]
    assert message_of()["content"] == []


def test_input_that_was_cut_off_is_empty() -> None:
    message = message_of(
        CallStart(0, 0, "a", "add"), CallArguments(0, 0, '{"x": '), ended("length", output=100)
    )
    assert message["content"][0]["input"] == {}
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        (ended("stop", 7), "end_turn", None),
        (ended("stop", "END"), "stop_sequence", "END"),
        (ended("length", output=100), "max_tokens", None),
        (ended("length", output=99), "model_context_window_exceeded", None),
        (ended("tool_calls", 7), "tool_use", None),
        (ended("deadline"), "deadline", None),
    ],
)
def test_why_an_answer_ended_is_told_in_anthropics_words(
    end: Ended, reason: str, sequence: str | None
) -> None:
    message = message_of(Text(0, "x"), end)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_cached_tokens_are_not_counted_twice() -> None:
    usage = message_of(Text(0, "x"))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (6, 64, 9)


TEXTS = st.text(" \na{", max_size=3)
EVENTS = st.lists(
    st.one_of(
        TEXTS.map(lambda text: Text(0, text)),
        TEXTS.map(lambda text: Reasoning(0, text)),
        st.just("call"),
        TEXTS.map(lambda text: CallArguments(0, 0, text)),
    )
)


@given(EVENTS)
def test_every_block_is_begun_written_and_ended_in_turn(parts: list[Any]) -> None:
    events: list[Event] = [Started(0, 70, 64)]
    calling = False
    for part in parts:
        if part == "call":
            events.append(CallStart(0, 0, "id", "name"))
        elif not isinstance(part, CallArguments) or calling:
            events.append(part)
        calling = isinstance(events[-1], CallStart | CallArguments)
    events.append(ended())
    writer = MessageWriter(head())
    data = b"".join(writer.write([event]) for event in events) + writer.end()
    steps = [json.loads(block.split("\ndata: ")[1]) for block in data.decode().strip().split("\n\n")]
    assert [step["type"] for step in steps[:2]] == ["message_start", "ping"]
    assert [step["type"] for step in steps[-2:]] == ["message_delta", "message_stop"]
    open_, count = False, 0
    for step in steps[2:-2]:
        assert step["index"] == count - open_
        if step["type"] == "content_block_start":
            assert not open_
            open_, count = True, count + 1
            assert step["index"] == count - 1
        else:
            assert open_
            open_ = step["type"] == "content_block_delta"
    assert not open_


def test_all_events_at_once_say_what_they_say_one_by_one() -> None:
    events: list[Event] = [Started(0, 70, 64), Text(0, "a"), CallStart(0, 0, "i", "n"), ended()]
    one, all_ = MessageWriter(head()), MessageWriter(head())
    assert b"".join(one.write([event]) for event in events) == all_.write(events)


def test_an_error_within_a_stream_is_an_event_of_its_own() -> None:
    data = MessageWriter(head()).fail(RequestError("no")).decode()
    name, rest = data.strip().split("\n")
    assert name == "event: error"
    error = json.loads(rest.removeprefix("data: "))
    assert error["error"] == {"type": "invalid_request_error", "message": "no"}
    assert error["request_id"] == "req-1"


# Thinking.


def served(source: str) -> Any:
    return SimpleNamespace(
        name="m", llm=SimpleNamespace(llm=SimpleNamespace(template=SimpleNamespace(source=source)))
    )


QWEN = "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{%- endif %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ '<think></think>' }}"
ALWAYS = "{{ '<think>' }}"
NEVER = "{{ message.thinking }} enable_thinking {{ message['thinking'] }}"
HARMONY = "{{ 'Reasoning: ' + reasoning_effort }}"


def test_a_template_is_told_to_think_by_the_name_it_knows() -> None:
    assert thinking.variables(served(QWEN), True, None, "think") == {"enable_thinking": True}
    assert thinking.variables(served(QWEN), False, None, "think") == {"enable_thinking": False}
    assert thinking.variables(served(DEEPSEEK), True, None, "think") == {"thinking": True}
    assert thinking.variables(served(QWEN), None, None, "think") == {}
    assert thinking.variables(served(HARMONY), None, "low", "think") == {"reasoning_effort": "low"}
    assert thinking.variables(served(QWEN), None, "low", "think") == {}
    assert thinking.asked(served(HARMONY), "high", "reasoning_effort") == {"reasoning_effort": "high"}
    assert thinking.asked(served(QWEN), "none", "reasoning_effort") == {"enable_thinking": False}
    assert thinking.asked(served(QWEN), None, "reasoning_effort") == {}
    with pytest.raises(RequestError, match="always thinks"):
        thinking.asked(served(ALWAYS), "none", "reasoning_effort")


def test_what_a_model_cannot_do_is_refused_and_what_it_does_anyway_is_not() -> None:
    with pytest.raises(RequestError, match="does not think"):
        thinking.variables(served(NEVER), True, None, "think")
    with pytest.raises(RequestError, match="always thinks"):
        thinking.variables(served(ALWAYS), False, None, "think")
    assert thinking.variables(served(NEVER), False, None, "think") == {}
    assert thinking.variables(served(ALWAYS), True, None, "think") == {}


def test_unknown_fields_are_forbidden_in_every_part_of_a_body() -> None:
    import msgspec

    for kind in (MessageBody, *MessageBody.__subclasses__()):
        assert kind.__struct_config__.forbid_unknown_fields
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x", "name": "y"}]}
    with pytest.raises(msgspec.ValidationError, match="name"):
        msgspec.convert(body, MessageBody)
