"""Reads what an agent did in a turn: lines of our own, or spans of OpenTelemetry.

Lines of JSON, one per step; ``seconds``, or ``start`` and ``end`` in seconds of any clock::

    {"id": "plan", "kind": "model", "seconds": 6.2, "prompt_tokens": 900, "reasoning_tokens": 200,
     "output_tokens": 300, "first_token_s": 0.4}
    {"id": "grep", "kind": "tool", "seconds": 1.1, "after": ["plan"]}
    {"id": "read", "kind": "human", "seconds": 4.0, "after": ["grep"]}

kind: model, tool, human or other. ``after``: what a step waits for. Where it is not said, a step with a start
waits for all that had ended when it began, and one without a start for the step before it. Reasoning tokens
are inside the output tokens.

Spans: see ``chabok.choose.spans``. A line or a span that is wrong is named in the notes; the rest goes on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from chabok.choose.turn import Kind, Step, Turn, in_order
from chabok.measure.failures import MeasureError

MOST_BYTES = 1 << 30
OVERLAP_S = 0.002
"""By how much a step may begin before what it waits for has ended: clocks are read in different places."""

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Instant = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=10**9)]


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """One step as it is written."""

    kind: Kind
    id: str = ""
    name: str = ""
    seconds: _Seconds | None = None
    start: _Instant | None = None
    end: _Instant | None = None
    after: list[str] | None = None
    first_token_s: _Seconds | None = None
    prompt_tokens: _Tokens | None = None
    cached_tokens: _Tokens | None = None
    reasoning_tokens: _Tokens | None = None
    output_tokens: _Tokens | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as recorded, before it is known what it waited for. after: None where that is not said."""

    step: Step
    start: float | None = None
    after: tuple[str, ...] | None = None
    first_token_s: float | None = None

    @property
    def end(self) -> float | None:
        """When it ended, if it is known when it began."""
        return None if self.start is None else self.start + self.step.seconds


def read_turn(path: str | os.PathLike[str]) -> Turn:
    """The turn that a file records; MeasureError if there is no step in it that can be read."""
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise MeasureError(f"{name}: the trace cannot be read: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise MeasureError(
            f"{name}: the trace has more than {MOST_BYTES >> 20} MB; give the spans of one turn"
        )
    return parse_turn(content, name)


def parse_turn(content: bytes, name: str = "turn") -> Turn:
    """As ``read_turn``, of bytes."""
    from chabok.choose import spans

    notes: list[str] = []
    values = _values(content, name, notes)
    if any(spans.is_spans(value) for _, value in values):
        recorded, begin, over = spans.read(values, notes)
    else:
        recorded, begin, over = _lines(values, notes), None, None
    if not recorded:
        told = f" ({notes[0]})" if notes else ""
        raise MeasureError(f"{name}: there is no step of an agent in this file{told}")
    steps = estimated(linked(recorded, notes, begin))
    turn = Turn(steps, name=os.path.basename(name), notes=tuple(notes))
    if begin is not None and over is not None:
        turn = replace(turn, tail_s=max(over - begin - turn.seconds(), 0.0))
    return turn


def _values(content: bytes, name: str, notes: list[str]) -> list[tuple[str, Any]]:
    """The JSON values of a file, each with its place: one document, or one per line."""
    try:
        whole = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass
    else:
        if isinstance(whole, list):
            return [(f"item {number}", value) for number, value in enumerate(whole, 1)]
        return [("line 1" if b"\n" not in content.strip() else "the document", whole)]
    found: list[tuple[str, Any]] = []
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            try:
                found.append((f"line {number}", msgspec.json.decode(line)))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                notes.append(f"line {number} is left out: {error}")
    return found


def _lines(values: Sequence[tuple[str, Any]], notes: list[str]) -> list[Recorded]:
    found: list[Recorded] = []
    taken: set[str] = set()
    for place, value in values:
        try:
            recorded = _step(value, f"step {len(found) + 1}")
            if recorded.step.id in taken:
                raise MeasureError(f"the id {recorded.step.id!r} is taken already")
        except (MeasureError, msgspec.MsgspecError) as error:
            notes.append(f"{place} is left out: {error}")
            continue
        taken.add(recorded.step.id)
        found.append(recorded)
    return found


def _step(value: Any, default: str) -> Recorded:
    line = msgspec.convert(value, Line)
    seconds = line.seconds
    if line.end is not None:
        if line.start is None:
            raise MeasureError("it has an `end` but no `start`")
        if line.end < line.start:
            raise MeasureError(f"it ends at {line.end:g} s, before it starts at {line.start:g} s")
        if seconds is None:
            seconds = line.end - line.start
    if seconds is None:
        raise MeasureError("it has neither `seconds` nor `start` and `end`")
    if line.kind != "model" and line.output_tokens is not None:
        raise MeasureError(f"only a model writes tokens, not a step of kind {line.kind!r}")
    step = Step(
        line.id or default,
        line.kind,
        seconds,
        name=line.name or line.id,
        prompt_tokens=line.prompt_tokens,
        cached_tokens=line.cached_tokens,
        reasoning_tokens=line.reasoning_tokens,
        output_tokens=line.output_tokens,
    )
    after = None if line.after is None else tuple(dict.fromkeys(line.after))
    return Recorded(checked(step, line.first_token_s), line.start, after, line.first_token_s)


def checked(step: Step, first_token_s: float | None) -> Step:
    """A model call with its stages, if its first token is known; MeasureError if its numbers disagree."""
    for part, of in (("reasoning_tokens", "output_tokens"), ("cached_tokens", "prompt_tokens")):
        less, more = getattr(step, part), getattr(step, of)
        if less is not None and more is not None and less > more:
            raise MeasureError(f"{part} is {less}, more than the {more} {of} it is part of")
    if first_token_s is None:
        return step
    if first_token_s > step.seconds * (1 + 1e-6):
        raise MeasureError(f"first_token_s is {first_token_s:g}, but it took {step.seconds:g} s in all")
    return staged(step, min(first_token_s, step.seconds))


def staged(step: Step, prefill_s: float, *, estimated: bool = False) -> Step:
    """A model call whose time until the first token is known; the rest is shared out by tokens."""
    writing = max(step.seconds - prefill_s, 0.0)
    share = (step.reasoning_tokens or 0) / step.output_tokens if step.output_tokens else 0.0
    reasoning = writing * share
    return replace(
        step, prefill_s=prefill_s, reasoning_s=reasoning, answer_s=writing - reasoning, estimated=estimated
    )


def linked(recorded: Sequence[Recorded], notes: list[str], begin: float | None = None) -> tuple[Step, ...]:
    """Steps that know what they wait for and how long after it they began.

    begin: when the turn began; else with its first step.
    """
    starts = [each.start for each in recorded if each.start is not None]
    zero = min(starts, default=0.0) if begin is None else begin
    ends = {each.step.id: each.end for each in recorded}
    found: list[Step] = []
    before: str | None = None
    by_time = _predecessors(recorded)
    for each in recorded:
        step = each.step
        after = each.after
        if after is not None:
            unknown = [name for name in after if name not in ends or name == step.id]
            if unknown:
                notes.append(
                    f"step {step.id!r} waits for {unknown[0]!r}, which is not there: that is ignored"
                )
            early = [name for name in after if name not in unknown and _overlaps(ends[name], each.start)]
            if early:
                notes.append(
                    f"step {step.id!r} began before {early[0]!r} had ended, which it is said to wait for: "
                    "that is ignored"
                )
            after = tuple(name for name in after if name not in unknown and name not in early)
        elif each.start is not None:
            after = by_time[step.id]
        else:
            after = () if before is None else (before,)
        lag = 0.0
        if each.start is not None:
            last = max((end for name in after if (end := ends[name]) is not None), default=zero)
            lag = max(each.start - last, 0.0)
        found.append(replace(step, after=after, lag_s=lag))
        before = step.id
    return _without_circles(found, notes)


def _overlaps(end: float | None, start: float | None) -> bool:
    return end is not None and start is not None and end > start + OVERLAP_S


def _predecessors(recorded: Sequence[Recorded]) -> dict[str, tuple[str, ...]]:
    """For each step with a start: those that had ended when it began, less those that these waited for."""
    import bisect

    timed = sorted((each.end, each.start, each.step.id) for each in recorded
                   if each.end is not None and each.start is not None)  # fmt: skip
    ends = [end for end, _, _ in timed]
    latest: list[float] = []  # the latest start among all that ended so far
    for _, start, _ in timed:
        latest.append(start if not latest else max(latest[-1], start))
    found: dict[str, tuple[str, ...]] = {}
    for each in recorded:
        if each.start is None:
            continue
        mine = (each.start, each.step.id)
        surely = bisect.bisect_left(ends, each.start)
        # Around its own start, what began later does not come before it, however short it was.
        near = [one for one in timed[surely : bisect.bisect_right(ends, each.start + OVERLAP_S)]
                if (one[1], one[2]) < mine]  # fmt: skip
        waited = max([start for _, start, _ in near] + ([latest[surely - 1]] if surely else []), default=0.0)
        names = [name for _, _, name in near]
        while surely and ends[surely - 1] >= waited:
            surely -= 1
            names.append(timed[surely][2])
        found[each.step.id] = tuple(names)
    return found


def _without_circles(steps: list[Step], notes: list[str]) -> tuple[Step, ...]:
    try:
        return in_order(steps)
    except MeasureError as error:
        notes.append(f"{error}: they are taken in the order in which they are written")
    place = {step.id: n for n, step in enumerate(steps)}
    return in_order(
        [
            replace(each, after=tuple(name for name in each.after if place[name] < n))
            for n, each in enumerate(steps)
        ]
    )


def estimated(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Fill in stages of model calls that tell no first token, where the tokens of enough calls allow a fit.

    The calls' seconds are fitted by ``a * new prompt tokens + b * output tokens`` (least squares, neither
    below zero); each call's seconds are then shared out in that proportion, and marked as an estimate.
    """
    import numpy as np

    calls = [
        step
        for step in steps
        if step.kind == "model"
        and not step.prefill_s
        and step.prompt_tokens is not None
        and step.output_tokens
    ]
    known = {step.id for step in calls}
    if len(calls) >= 4:
        tokens = np.array([[_new(step), step.output_tokens or 0] for step in calls], np.float64)
        seconds = np.array([step.seconds for step in calls])
        if np.linalg.matrix_rank(tokens) == 2:
            (a, b), *_ = np.linalg.lstsq(tokens, seconds, rcond=None)
            if a > 0 and b > 0:
                cost = {step.id: (a * _new(step), b * (step.output_tokens or 0)) for step in calls}
                return tuple(
                    staged(step, step.seconds * cost[step.id][0] / sum(cost[step.id]), estimated=True)
                    if step.id in known
                    else step
                    for step in steps
                )
    # Without a fit, the little that reading the prompt takes is counted as writing.
    untold = {
        step.id for step in steps if step.kind == "model" and step.reasoning_tokens and not step.prefill_s
    }
    return tuple(staged(step, 0.0, estimated=True) if step.id in untold else step for step in steps)


def _new(step: Step) -> int:
    return max((step.prompt_tokens or 0) - (step.cached_tokens or 0), 0)
