"""Recorded turns: lines of our own, and spans of OpenTelemetry."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.choose.agent_trace import parse_turn
from chabok.choose.turn import examine
from chabok.measure.failures import MeasureError

SECOND = 10**9
BEGIN = 1_790_000_000 * SECOND


def lines(*steps: dict[str, Any]) -> bytes:
    return "\n".join(json.dumps(step) for step in steps).encode()


def span(
    name: str, operation: str, start: float, end: float, parent: str = "root", **more: Any
) -> dict[str, Any]:
    attributes = {"gen_ai.operation.name": operation, **more}
    return {
        "traceId": "t1",
        "spanId": name,
        "parentSpanId": parent,
        "name": f"{operation} {name}",
        "startTimeUnixNano": str(BEGIN + round(start * SECOND)),
        "endTimeUnixNano": str(BEGIN + round(end * SECOND)),
        "attributes": [{"key": key, "value": _typed(value)} for key, value in attributes.items()],
    }


def _typed(value: Any) -> dict[str, Any]:
    if isinstance(value, int):
        return {"intValue": str(value)}
    return {"doubleValue": value} if isinstance(value, float) else {"stringValue": value}


def document(*spans: dict[str, Any]) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}).encode()


AGENT = (
    span("root", "invoke_agent", 0, 12, ""),
    span("m1", "chat", 0.5, 4.5, **{"gen_ai.usage.input_tokens": 900, "gen_ai.usage.output_tokens": 200,
         "gen_ai.usage.reasoning.output_tokens": 100, "gen_ai.response.time_to_first_chunk": 1.0}),
    span("t1", "execute_tool", 4.6, 6.6, **{"gen_ai.tool.name": "grep"}),
    span("t2", "execute_tool", 4.6, 8.6, **{"gen_ai.tool.name": "pytest"}),
    span("m2", "chat", 8.6, 11.6, **{"gen_ai.usage.input_tokens": 1500, "gen_ai.usage.output_tokens": 100}),
)  # fmt: skip


def test_lines_follow_each_other_where_nothing_else_is_said() -> None:
    turn = parse_turn(lines(
        {"kind": "model", "seconds": 2, "first_token_s": 0.5, "output_tokens": 100, "reasoning_tokens": 40},
        {"kind": "tool", "seconds": 1},
        {"kind": "human", "seconds": 4},
    ))  # fmt: skip
    assert turn.seconds() == 7
    assert turn.walk().parts() == pytest.approx(
        {"prefill": 0.5, "reasoning": 0.6, "answer": 0.9, "tool": 1, "human": 4}
    )


def test_said_dependencies_make_a_graph() -> None:
    turn = parse_turn(lines(
        {"id": "a", "kind": "model", "seconds": 2},
        {"id": "b", "kind": "tool", "seconds": 3, "after": ["a"]},
        {"id": "c", "kind": "tool", "seconds": 5, "after": ["a"]},
        {"id": "d", "kind": "model", "seconds": 1, "after": ["b", "c"]},
    ))  # fmt: skip
    assert turn.seconds() == 8


def test_recorded_instants_tell_what_waited_for_what() -> None:
    turn = parse_turn(lines(
        {"id": "a", "kind": "model", "start": 100, "end": 102},
        {"id": "b", "kind": "tool", "start": 102.1, "end": 105},
        {"id": "c", "kind": "tool", "start": 102.1, "end": 107},
        {"id": "d", "kind": "model", "start": 107.5, "end": 109},
    ))  # fmt: skip
    assert turn.seconds() == pytest.approx(9)
    after = {step.id: set(step.after) for step in turn.steps}
    assert after == {"a": set(), "b": {"a"}, "c": {"a"}, "d": {"b", "c"}}
    assert turn.walk().parts()["idle"] == pytest.approx(0.6)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=14))
def test_what_was_recorded_takes_as_long_as_it_did(spans: list[tuple[int, int]]) -> None:
    steps = [
        {"id": str(n), "kind": "tool" if n % 2 else "model", "start": start, "end": start + length}
        for n, (start, length) in enumerate(spans)
    ]
    turn = parse_turn(lines(*steps))
    first = min(start for start, _ in spans)
    walk = turn.walk()
    for n, (start, length) in enumerate(spans):
        assert walk.ends[str(n)] == pytest.approx(start + length - first)


def test_broken_lines_are_named_and_the_rest_goes_on() -> None:
    content = lines({"kind": "model", "seconds": 2}, {"kind": "toll", "seconds": 1}, {"kind": "tool"})
    turn = parse_turn(content + b'\n{"kind": "tool", "sec\n' + lines({"kind": "tool", "start": 3, "end": 1},
        {"kind": "model", "seconds": 1, "output_tokens": 5, "reasoning_tokens": 9},
        {"kind": "tool", "seconds": 3, "after": ["nobody"]}))  # fmt: skip
    assert len(turn.steps) == 2
    told = "\n".join(turn.notes)
    for said in (
        "line 2",
        "toll",
        "line 3",
        "line 4",
        "line 5",
        "before it starts",
        "line 6",
        "more than the 5",
        "nobody",
    ):
        assert said in told


def test_steps_that_wait_for_each_other_are_taken_as_written() -> None:
    turn = parse_turn(lines(
        {"id": "a", "kind": "tool", "seconds": 1, "after": ["b"]},
        {"id": "b", "kind": "tool", "seconds": 1, "after": ["a"]},
    ))  # fmt: skip
    assert turn.seconds() == 2
    assert "wait for each other" in turn.notes[0]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[1, 2]", b'{"kind": "model"}']
)
def test_a_file_without_steps_is_refused_in_a_sentence(content: bytes) -> None:
    with pytest.raises(MeasureError, match="no step"):
        parse_turn(content)


def test_spans_of_an_agent_make_its_turn() -> None:
    turn = parse_turn(document(*AGENT))
    assert turn.seconds() == pytest.approx(12)
    parts = turn.walk().parts()
    assert parts["prefill"] == pytest.approx(1.0)
    assert parts["reasoning"] == parts["answer"] == pytest.approx(1.5)
    assert parts["model"] == pytest.approx(3.0)  # the second call does not tell its first token
    assert parts["tool"] == pytest.approx(4.0)
    assert parts["idle"] == pytest.approx(1.0)
    assert {step.name for step in turn.steps} >= {"grep", "pytest"}
    assert examine(turn).hidden_s == pytest.approx(2.0)


def test_spans_may_come_line_by_line_as_a_list_or_as_the_sdk_prints_them() -> None:
    expected = parse_turn(document(*AGENT)).seconds()
    by_line = b"\n".join(document(each) for each in AGENT)
    assert parse_turn(by_line).seconds() == pytest.approx(expected)
    assert parse_turn(json.dumps(list(AGENT)).encode()).seconds() == pytest.approx(expected)
    printed = [
        {
            "name": each["name"],
            "context": {"trace_id": "0x1", "span_id": each["spanId"]},
            "parent_id": each["parentSpanId"] or None,
            "kind": "SpanKind.CLIENT",
            "start_time": _iso(each["startTimeUnixNano"]),
            "end_time": _iso(each["endTimeUnixNano"]),
            "attributes": {item["key"]: next(iter(item["value"].values())) for item in each["attributes"]},
        }
        for each in AGENT
    ]
    turn = parse_turn(json.dumps(printed).encode())
    assert turn.seconds() == pytest.approx(expected, abs=1e-3)
    assert next(step for step in turn.steps if step.id == "m1").prompt_tokens == 900


def _iso(nanoseconds: str) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(int(nanoseconds) / 1e9, UTC).isoformat().replace("+00:00", "Z")


def test_a_tool_that_runs_an_agent_is_counted_by_what_the_agent_does() -> None:
    turn = parse_turn(document(
        span("root", "invoke_agent", 0, 10, ""),
        span("t", "execute_tool", 0, 10),
        span("sub", "invoke_agent", 0, 10, "t"),
        span("m", "chat", 1, 8, "sub"),
    ))  # fmt: skip
    assert [step.id for step in turn.steps] == ["m"]
    assert turn.seconds() == pytest.approx(10)


def test_the_time_between_two_traces_is_the_persons() -> None:
    later = [{**span("n", "chat", 20, 22, ""), "traceId": "t2"}]
    turn = parse_turn(document(*AGENT, *later))
    assert turn.seconds() == pytest.approx(22)
    assert turn.walk().parts()["human"] == pytest.approx(8)


def test_broken_spans_are_named() -> None:
    backwards = span("x", "chat", 5, 4)
    nameless = {**span("y", "chat", 1, 2)}
    del nameless["spanId"]
    turn = parse_turn(document(backwards, *AGENT, nameless))
    assert turn.seconds() == pytest.approx(12)
    told = "\n".join(turn.notes)
    assert "span 1 is left out: it ends before it begins" in told
    assert "no span id" in told


def test_stages_are_estimated_from_tokens_where_enough_calls_tell_them() -> None:
    calls = [(100, 50), (1000, 10), (400, 200), (50, 300)]
    turn = parse_turn(lines(*(
        {"kind": "model", "seconds": p * 0.001 + n * 0.02, "prompt_tokens": p, "output_tokens": n}
        for p, n in calls
    )))  # fmt: skip
    assert all(step.estimated for step in turn.steps)
    for step, (prompt, _) in zip(turn.steps, calls):
        assert step.prefill_s == pytest.approx(prompt * 0.001, rel=1e-6)


NAMES = (
    *("kind", "seconds", "start", "end", "after", "id", "prompt_tokens", "output_tokens", "reasoning_tokens"),
    *("first_token_s", "spanId", "traceId", "parentSpanId", "startTimeUnixNano", "endTimeUnixNano"),
    *("attributes", "context", "resourceSpans"),
)
ODD = (None, True, 0, -1, 2.5, 1e300, 10**30, "", "5", "model", "tool", [], ["a"], [None], {}, {"a": 1},
       [{"key": "gen_ai.operation.name", "value": {}}], [{"value": {"intValue": "x"}}])  # fmt: skip
CHANGES = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD), max_size=5)


@given(st.lists(CHANGES, min_size=1, max_size=3))
def test_whatever_a_file_holds_it_is_read_or_refused(steps: list[dict[str, Any]]) -> None:
    try:
        turn = parse_turn(lines(*steps))
    except MeasureError:
        return
    assert 0 <= turn.seconds() < float("inf")


@given(CHANGES, st.integers(0, 4))
def test_a_span_with_anything_in_it_leaves_the_others_alone(changes: dict[str, Any], place: int) -> None:
    spans = [dict(each) for each in AGENT]
    spans[place] |= changes
    turn = parse_turn(document(*spans))
    assert 0 <= turn.seconds() < float("inf")
