"""Reads OpenTelemetry spans of agents, by the semantic conventions for generative AI.

Forms: OTLP as JSON (``resourceSpans``; one document, or one per line as collectors write files), a plain list
of OTLP spans, and what the Python SDK's console exporter prints (``context``, ``start_time`` as text).

Model calls are spans whose ``gen_ai.operation.name`` is chat, text_completion, generate_content or
embeddings; tool calls are ``execute_tool``; spans around them (``invoke_agent``, ``invoke_workflow``, a tool
that runs an agent) only say when the turn began and ended. Names of attributes:
https://github.com/open-telemetry/semantic-conventions-genai (docs/gen-ai), with the older names of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from chabok.choose.agent_trace import Recorded, checked
from chabok.choose.turn import Kind, Step
from chabok.measure.failures import MeasureError

MODEL = {"chat", "text_completion", "generate_content", "embeddings"}
TOOL = {"execute_tool"}
AROUND = {"invoke_agent", "create_agent", "invoke_workflow", "plan"}

OPERATION = "gen_ai.operation.name"
TOKENS = {
    "prompt_tokens": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output_tokens": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens",
                      "gen_ai.usage.input_tokens.cached"),
    "reasoning_tokens": ("gen_ai.usage.reasoning.output_tokens", "gen_ai.usage.reasoning_tokens",
                         "gen_ai.usage.output_tokens.reasoning"),
}  # fmt: skip
FIRST_TOKEN = ("gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token")
"""Seconds."""


@dataclass(slots=True)
class Span:
    """A span: instants in seconds since 1970."""

    id: str
    parent: str
    trace: str
    name: str
    start: float
    end: float
    attributes: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""

    @property
    def operation(self) -> str:
        """What of generative AI it is; empty if nothing."""
        return str(self.attributes.get(OPERATION, ""))


def is_spans(value: Any) -> bool:
    """Whether a JSON value looks like spans rather than a line of our own."""
    return isinstance(value, dict) and any(
        key in value
        for key in ("resourceSpans", "resource_spans", "spanId", "span_id", "startTimeUnixNano", "context")
    )


def read(
    values: Sequence[tuple[str, Any]], notes: list[str]
) -> tuple[list[Recorded], float | None, float | None]:
    """The steps in the spans, when the turn began, and when it was over.

    Several traces that follow each other are turns of one conversation: what lies between them is the
    person's. Of traces at the same time the longest is taken, and the others are named.
    """
    traces: dict[str, dict[str, Span]] = {}
    for place, raw in _raw(values, notes):
        try:
            span = _span(place, raw)
        except (MeasureError, ValueError, TypeError, KeyError, OverflowError) as error:
            told = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            notes.append(f"{place} is left out: {told}")
            continue
        traces.setdefault(span.trace, {})[span.id] = span
    groups = []
    for spans in traces.values():
        steps = _steps(spans, notes)
        if steps:
            around = [each for each in spans.values() if each.operation in AROUND]
            instants = [(each.start or 0.0, each.end or 0.0) for each in steps]
            instants += [(each.start, each.end) for each in around]
            groups.append((min(start for start, _ in instants), max(end for _, end in instants), steps))
    return _joined(groups, notes)


def _joined(
    groups: list[tuple[float, float, list[Recorded]]], notes: list[str]
) -> tuple[list[Recorded], float | None, float | None]:
    if not groups:
        return [], None, None
    kept: list[tuple[float, float, list[Recorded]]] = []
    for group in sorted(groups, key=lambda each: each[0] - each[1]):
        if any(group[0] < other[1] and other[0] < group[1] for other in kept):
            notes.append(
                f"a trace of {len(group[2])} steps ran at the same time as a longer one and is left out; "
                "to see it, give a file with its spans alone"
            )
        else:
            kept.append(group)
    kept.sort(key=lambda each: each[0])
    found: list[Recorded] = []
    over = kept[0][0]
    for number, (start, end, steps) in enumerate(kept):
        if number and start > over:
            pause = Step(f"pause {number}", "human", start - over, name="between turns")
            found.append(Recorded(pause, over))
        found += steps
        over = end
    return found, kept[0][0], over


def _steps(spans: dict[str, Span], notes: list[str]) -> list[Recorded]:
    """What is work in a trace: model calls, and tools that do not themselves consist of such."""
    working = {each.id for each in spans.values() if each.operation in MODEL | TOOL}
    around: set[str] = set()
    for at in working:
        seen = {at}
        parent = spans[at].parent
        while parent in spans and parent not in seen:
            around.add(parent)
            seen.add(parent)
            parent = spans[parent].parent
    found = []
    for span in sorted(spans.values(), key=lambda each: (each.start, each.end)):
        human = span.operation == "human" or span.attributes.get("chabok.kind") == "human"
        if not human and (span.id not in working or (span.id in around and span.operation in TOOL)):
            continue
        kind: Kind = "human" if human else "model" if span.operation in MODEL else "tool"
        try:
            found.append(_recorded(span, kind))
        except MeasureError as error:
            notes.append(f"{span.place}: {error}; its tokens are left out")
            found.append(Recorded(Step(span.id, kind, span.end - span.start, name=_title(span)), span.start))
    return found


def _recorded(span: Span, kind: Kind) -> Recorded:
    step = Step(span.id, kind, span.end - span.start, name=_title(span))
    first = None
    if kind == "model":
        step = replace(
            step,
            prompt_tokens=_count(span.attributes, TOKENS["prompt_tokens"]),
            output_tokens=_count(span.attributes, TOKENS["output_tokens"]),
            cached_tokens=_count(span.attributes, TOKENS["cached_tokens"]),
            reasoning_tokens=_count(span.attributes, TOKENS["reasoning_tokens"]),
        )
        first = next(
            (float(span.attributes[key]) for key in FIRST_TOKEN if _number(span.attributes, key)), None
        )
    return Recorded(checked(step, first), span.start, None, first)


def _title(span: Span) -> str:
    tool = span.attributes.get("gen_ai.tool.name")
    model = span.attributes.get("gen_ai.response.model") or span.attributes.get("gen_ai.request.model")
    return str(tool or model or span.name)


def _number(attributes: Mapping[str, Any], key: str) -> bool:
    value = attributes.get(key)
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )


def _count(attributes: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
            return int(value)
    return None


# -- the forms


def _raw(values: Sequence[tuple[str, Any]], notes: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place, value in values:
        if not isinstance(value, dict):
            notes.append(f"{place} is left out: it is not an object")
            continue
        resources = value.get("resourceSpans", value.get("resource_spans"))
        if resources is None:
            yield place, value
            continue
        number = 0
        for resource in _objects(resources):
            for scope in _objects(resource.get("scopeSpans", resource.get("instrumentationLibrarySpans"))):
                for span in _objects(scope.get("spans")):
                    number += 1
                    yield f"{place}, span {number}", span


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _span(place: str, raw: Mapping[str, Any]) -> Span:
    context = raw.get("context")
    context = context if isinstance(context, dict) else {}

    def first(*keys: str) -> Any:
        for key in keys:
            for where in (raw, context):
                if where.get(key) is not None:
                    return where[key]
        return None

    name = str(first("spanId", "span_id") or "")
    if not name:
        raise MeasureError("it has no span id")
    start = _instant(first("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime"))
    end = _instant(first("endTimeUnixNano", "end_time_unix_nano", "end_time", "endTime"))
    if start is None or end is None:
        raise MeasureError("it does not say when it began and ended")
    if end < start:
        raise MeasureError("it ends before it begins")
    parent = str(first("parentSpanId", "parent_span_id", "parent_id") or "")
    trace = str(first("traceId", "trace_id") or "")
    return Span(
        name, parent, trace, str(raw.get("name", "")), start, end, _attributes(raw.get("attributes")), place
    )


def _instant(value: Any) -> float | None:
    """Seconds since 1970 of nanoseconds (a number, or its digits) or of an ISO 8601 text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, str) and not value.isdecimal():
        return datetime.fromisoformat(value).timestamp()
    nanoseconds = int(value)
    if nanoseconds <= 0:
        return None
    return nanoseconds / 1e9


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as a mapping; OTLP writes a list of keys and typed values."""
    if isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for each in _objects(value):
        typed = each.get("value")
        if isinstance(typed, dict) and typed:
            kind, content = next(iter(typed.items()))
            if kind == "intValue":
                content = int(content)
            found[str(each.get("key"))] = content
        else:
            found[str(each.get("key"))] = typed
    return found
