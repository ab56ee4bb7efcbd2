"""What is kept of a load's requests for charts and comparisons, once their metrics are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chabok.measure.metrics import Request
from chabok.measure.outcome import Window
from chabok.measure.report.data import Level
from chabok.measure.slo import Limit

Floats = NDArray[np.float64]

ROWS = 40
"""Requests that a chart of single requests shows."""
SLICES = 20
"""Parts of the steady window, whose differences say how sure a throughput is."""
PER_REQUEST = ("ttft", "ttfvt", "tpot", "e2e", "worst_gap", "lateness")


@dataclass(slots=True)
class Row:
    """One request as a bar; seconds since the load began. first, end: None if it did not get that far."""

    number: int
    due: float
    sent: float | None
    first: float | None
    end: float | None
    failure: str
    tokens: Floats


@dataclass(slots=True)
class Sample:
    """One load's raw values.

    values: metric -> float64[requests that have it]. itl, event_gaps: one array per request. slices:
    ``throughput``, ``request_rate`` and ``goodput`` -> per second, of equal parts of the window. stalls:
    float64[requests, 2], when the worst gap of each request ended (seconds since the load began), and how
    long it was.
    """

    level: Level
    values: dict[str, Floats] = field(default_factory=dict)
    itl: list[Floats] = field(default_factory=list)
    event_gaps: list[Floats] = field(default_factory=list)
    slices: dict[str, Floats] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    stalls: Floats = field(default_factory=lambda: np.zeros((0, 2)))
    prompt_tokens: Floats = field(default_factory=lambda: np.zeros(0))
    output_tokens: Floats = field(default_factory=lambda: np.zeros(0))


def sample(level: Level, requests: Sequence[Request], limits: Sequence[Limit] = ()) -> Sample:
    """Keep what charts and comparisons need; ``limits``: what goodput asks for."""
    good = [request for request in requests if request.ok]
    found = Sample(level)
    for name in PER_REQUEST:
        # Lateness is the client's own, whatever became of the request.
        of = requests if name == "lateness" else good
        values = [value for each in of if (value := getattr(each, f"{name}_s")) is not None]
        found.values[name] = np.array(values, np.float64)
    found.values["speed"] = np.array([each.speed for each in good if each.speed is not None], np.float64)
    found.itl = [each.itl for each in good if len(each.itl)]
    found.event_gaps = [each.gaps for each in good if len(each.gaps)]
    prompts = [each.timeline.usage.prompt_tokens for each in good]
    found.prompt_tokens = np.array([count for count in prompts if count is not None], np.float64)
    found.output_tokens = np.array([each.output_tokens for each in good], np.float64)
    if not requests:
        return found
    began = min(each.timeline.scheduled for each in requests)
    found.rows = [
        _row(each, began) for each in sorted(requests, key=lambda each: each.timeline.scheduled)[:ROWS]
    ]
    worst = [
        (float(each.token_times[place + 1]) - began, float(each.gaps[place]))
        for each in good
        if len(each.gaps)
        for place in [int(each.gaps.argmax())]
    ]
    found.stalls = np.array(worst, np.float64).reshape(-1, 2)
    _slices(found, good, limits)
    return found


def _row(request: Request, began: float) -> Row:
    timeline = request.timeline
    times = request.token_times
    return Row(
        timeline.number,
        timeline.scheduled - began,
        None if timeline.sent is None else timeline.sent - began,
        float(times[0]) - began if len(times) else None,
        None if timeline.done is None else timeline.done - began,
        "" if timeline.failure is None else timeline.failure.kind,
        times - began,
    )


def _slices(found: Sample, good: Sequence[Request], limits: Sequence[Limit]) -> None:
    window = found.level.window
    ends = np.array([each.timeline.done or 0.0 for each in good], np.float64)
    kept = np.array([all(limit.kept_by(each) for limit in limits) for each in good], np.float64)
    if window is None and len(ends):
        window = Window(min(each.timeline.scheduled for each in good), float(ends.max()))
    if window is None or window.seconds < 1e-6 or not good:
        return
    times = np.concatenate([each.token_times for each in good])
    weights = np.concatenate(
        [each.token_counts * (each.output_tokens / max(int(each.token_counts.sum()), 1)) for each in good]
    )
    parts = {"throughput": (times, weights), "request_rate": (ends, np.ones(len(ends)))}
    if limits:
        parts["goodput"] = ends, kept
    for name, (instants, counts) in parts.items():
        inside = (instants > window.start) & (instants <= window.end)
        slices = min(SLICES, int(inside.sum()))
        if slices > 1:
            place = ((instants[inside] - window.start) / window.seconds * slices).astype(int)
            sums = np.bincount(np.minimum(place, slices - 1), counts[inside], slices)
            found.slices[name] = np.asarray(sums / (window.seconds / slices), np.float64)
