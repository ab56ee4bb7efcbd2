"""The charts of a report: what each shows, its data as a table, and its SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chabok.measure.report.account import Found
from chabok.measure.report.data import Level
from chabok.measure.report.definitions import METRICS
from chabok.measure.report.numbers import at, number, seconds, tick
from chabok.measure.report.sample import Row, Sample
from chabok.measure.report.svg import Axis, Plot, above
from chabok.measure.slo import Limit
from chabok.measure.stats import Distribution, mean_interval

Floats = NDArray[np.float64]

LINES = 6
"""Loads that one chart of distributions shows."""
PIECES = 240
"""Points of a distribution's line."""
DOTS = 1500
"""Requests that the chart of gaps shows."""


@dataclass(slots=True)
class Chart:
    """A chart with its heading, what to see in it, legend (class, text), and the same as a table."""

    heading: str
    text: str
    svg: str
    legend: list[tuple[str, str]] = field(default_factory=list)
    headings: list[str] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    wide: bool = False


def charts(found: Found) -> list[Chart]:
    """All that the run has data for."""
    shown = _shown(found)
    made = [
        _against_load(found, "ttft"),
        _against_load(found, "itl"),
        _throughput(found),
        _distribution(found, "ttft"),
        _distribution(found, "itl"),
        _gaps(shown, found.limits) if shown is not None else None,
        _timeline(shown) if shown is not None else None,
    ]
    return [chart for chart in made if chart is not None]


def _shown(found: Found) -> Sample | None:
    """The load whose single requests are shown: that of the capacity, else the one with most throughput."""
    level = found.report.at_capacity or found.report.fastest
    return next((each for each in found.samples if each.level is level and each.rows), None)


# -- against load


def _loads(samples: Sequence[Sample]) -> tuple[Axis, list[tuple[float, Sample]]] | None:
    """The axis of loads, and where each lies; None where there are not two of a kind."""
    for name, label in (("users", "users at once"), ("per_s", "requests per second, due")):
        placed = sorted(
            ((float(value), each) for each in samples if (value := getattr(each.level, name))),
            key=lambda pair: pair[0],
        )
        places = sorted({place for place, _ in placed})
        if len(places) < 2:
            continue
        log = name == "users" or places[-1] / places[0] >= 4
        marks = tuple(places)
        if len(marks) > 9:
            marks = tuple(marks[i] for i in np.linspace(0, len(marks) - 1, 9).astype(int))
        low, high = (places[0] / 1.12, places[-1] * 1.12) if log else (0.0, places[-1] * 1.05)
        return Axis(low, high, label, lambda value: f"{value:g}", log, marks), placed
    return None


def _against_load(found: Found, name: str) -> Chart | None:
    loads = _loads(found.samples)
    if loads is None:
        return None
    axis, placed = loads
    metric = METRICS[name]
    of: list[tuple[float, Level, Distribution]] = [
        (place, each.level, values)
        for place, each in placed
        if (values := getattr(each.level.summary, name)) is not None
    ]
    if len(of) < 2:
        return None
    limits = [(_bound(limit), str(limit)) for limit in found.limits if _bears_on(limit, name)]
    series = [(50.0, "p50", "a"), (95.0, "p95", "b square")]
    values = [value for _, _, each in of for p, _, _ in series if (value := at(each, p)) is not None]
    top = above(max([*values, *(bound for bound, _ in limits if bound < 3 * max(values))]))
    plot = Plot(
        f"load-{name}",
        f"{metric.title} against load",
        _told(of, name),
        axis,
        Axis(0, top, metric.title, tick),
    )
    for p, label, kind in series:
        points = [(place, value) for place, _, each in of if (value := at(each, p)) is not None]
        sure = [
            (place, each.intervals[p].low, each.intervals[p].high)
            for place, _, each in of
            if p in each.intervals and at(each, p) is not None
        ]
        plot.band(sure, kind)
        plot.line(points, kind)
        hints = [f"{label} {seconds(value)} at {place:g} {axis.label}" for place, value in points]
        plot.dots(points, kind, hints)
    for bound, label in limits:
        if bound <= top:
            plot.across(bound, f"limit: {label}")
    cells = [
        [level.load, *(seconds(at(each, p)) for p, _, _ in series), _interval(each, 95.0)]
        for _, level, each in of
    ]
    text = f"{metric.text} The bands are 95 % confidence intervals; the dashed line is the limit."
    if not limits:
        text = f"{metric.text} The bands are 95 % confidence intervals."
    return Chart(
        f"{metric.title} against load",
        text,
        plot.render(),
        [(kind, label) for p, label, kind in series if any(at(each, p) is not None for _, _, each in of)],
        ["Load", "p50", "p95", "p95, 95 % interval"],
        cells,
    )


def _throughput(found: Found) -> Chart | None:
    loads = _loads(found.samples)
    if loads is None:
        return None
    axis, placed = loads
    of = [(place, each, value) for place, each in placed if (value := each.level.summary.throughput)]
    if len(of) < 2:
        return None
    metric = METRICS["throughput"]
    sure = [
        (place, interval.low, interval.high)
        for place, each, _ in of
        if "throughput" in each.slices and (interval := mean_interval(each.slices["throughput"]))
    ]
    top = above(max([value for _, _, value in of] + [high for _, _, high in sure]))
    told = "; ".join(f"{each.level.load}: {number(value)} tokens/s" for _, each, value in of)
    plot = Plot("throughput", "Throughput against load", told, axis, Axis(0, top, "output tokens/s", number))
    plot.band(sure, "a")
    plot.line([(place, value) for place, _, value in of], "a")
    hints = [f"{number(value)} tokens/s with {each.level.load}" for _, each, value in of]
    plot.dots([(place, value) for place, _, value in of], "a", hints)
    capacity = found.report.capacity
    text = f"{metric.text} The band is a 95 % confidence interval"
    if capacity and axis.low < capacity < axis.high and axis.label.startswith("users"):
        plot.down(capacity, "limits met up to here", "middle")
        text += "; the dotted line is the most users for whom the limits were met"
    cells = [
        [each.level.load, f"{number(value)}{'' if each.level.summary.steady else '*'}",
         number(each.level.summary.request_rate), number(each.level.goodput)]
        for _, each, value in of
    ]  # fmt: skip
    return Chart(
        "Throughput against load",
        f"{text}.",
        plot.render(),
        headings=["Load", "Output tokens/s", "Requests/s", "Goodput, requests/s"],
        cells=cells,
    )


# -- distributions


def _distribution(found: Found, name: str) -> Chart | None:
    metric = METRICS[name]
    of = [(each.level, values) for each in found.samples if len(values := _values(each, name)) > 1]
    if not of:
        return None
    if len(of) > LINES:
        of = [of[place] for place in np.linspace(0, len(of) - 1, LINES).astype(int)]
    # A few gaps of nearly nothing (events that came together) must not stretch the axis.
    low = min(float(np.percentile(values, 1)) for _, values in of)
    high = max(float(values.max()) for _, values in of)
    low = max(min(low * 0.9, high / 3), high / 1e4, 1e-6)
    limits = [(_bound(limit), str(limit)) for limit in found.limits if _bears_on(limit, name)]
    high = max([high * 1.1, *(bound * 1.1 for bound, _ in limits if bound < 3 * high)])
    told = "; ".join(f"{level.load}: half within {seconds(float(np.median(values)))}" for level, values in of)
    high = max(high, low * 3)
    counted = "requests" if metric.of == "request" else "gaps"
    plot = Plot(
        f"ecdf-{name}",
        f"Distribution of {metric.title}",
        told,
        Axis(low, high, f"{metric.title} at most", tick, log=True),
        Axis(0, 1, f"share of {counted}", lambda share: f"{share:.0%}", marks=(0, 0.25, 0.5, 0.75, 0.95, 1)),
    )
    for place, (level, values) in enumerate(of):
        ordered = np.sort(values)
        if len(ordered) > PIECES:
            shares = np.linspace(0, 1, PIECES)
            points = list(zip(np.quantile(ordered, shares).tolist(), shares.tolist()))
        else:
            points = [(float(v), (i + 1) / len(ordered)) for i, v in enumerate(ordered)]
        plot.steps([(points[0][0], 0.0), *points, (high, 1.0)], _tone(place, len(of)), f"{level.load}")
    for row, (bound, label) in enumerate(limits):
        if low < bound < high:
            plot.down(bound, f"limit: {label}", row=row)
    cells = [
        [level.load, str(len(values))]
        + [seconds(at(getattr(level.summary, name), p)) for p in (50, 90, 95, 99)]
        + [seconds(float(values.max()))]
        for level, values in of
    ]
    return Chart(
        f"Distribution of {metric.title}",
        f"{metric.text} The higher a line at some time, the more {counted} were done by then.",
        plot.render(),
        [(_tone(place, len(of)), level.load) for place, (level, _) in enumerate(of)],
        ["Load", counted.capitalize(), "p50", "p90", "p95", "p99", "Longest"],
        cells,
    )


def _values(of: Sample, name: str) -> Floats:
    if name == "itl":
        return np.concatenate(of.itl) if of.itl else np.zeros(0)
    return of.values.get(name, np.zeros(0))


def _tone(place: int, of: int) -> str:
    return f"t{round(place / max(of - 1, 1) * (LINES - 1))}"


# -- single requests


def _gaps(of: Sample, limits: Sequence[Limit]) -> Chart | None:
    if len(of.stalls) < 2:
        return None
    stalls = of.stalls
    if len(stalls) > DOTS:  # the longest are what it is about
        stalls = stalls[np.sort(np.argsort(stalls[:, 1])[-DOTS:])]
    pooled = np.concatenate(of.event_gaps)
    median = float(np.median(pooled))
    low = max(min(median, float(stalls[:, 1].min())) / 1.5, 1e-6)
    high = max(float(stalls[:, 1].max()) * 1.3, low * 3)
    end = float(stalls[:, 0].max())
    worst = stalls[int(stalls[:, 1].argmax())]
    plot = Plot(
        "gaps",
        f"Worst gap of each request, {of.level.load}",
        f"The longest took {seconds(float(worst[1]))}, {seconds(float(worst[0]))} after the load began; "
        f"half of all gaps are within {seconds(median)}.",
        Axis(0, end * 1.02, "seconds since the load began", lambda value: f"{value:g}"),
        Axis(low, high, "worst gap", tick, log=True),
    )
    points = [(float(x), float(y)) for x, y in stalls]
    plot.dots(points, "c", [f"{seconds(y)} at {x:.2f} s" for x, y in points], 2.6)
    plot.across(median, f"half of all gaps: {seconds(median)}", "middle")
    for limit in limits:
        if _bears_on(limit, "itl") and low < _bound(limit) < high:
            plot.across(_bound(limit), f"limit: {limit}")
    order = np.argsort(-of.stalls[:, 1])[:8]
    return Chart(
        f"Worst gap of each request, {of.level.load}",
        f"{METRICS['worst_gap'].text} Stalls that several requests share stand above each other.",
        plot.render(),
        headings=["Ended after", "Gap"],
        cells=[[seconds(float(of.stalls[i, 0])), seconds(float(of.stalls[i, 1]))] for i in order],
    )


def _timeline(of: Sample) -> Chart | None:
    rows = of.rows
    ends = [_end(row) for row in rows]
    if not rows or max(ends) <= 0:
        return None
    pooled = np.concatenate(of.event_gaps) if of.event_gaps else np.zeros(0)
    usual = float(np.median(pooled)) if len(pooled) else 0.0
    long = max(4 * usual, 0.02)
    height = 78 + 15 * len(rows)
    plot = Plot(
        "timeline",
        f"The first {len(rows)} requests, {of.level.load}",
        "Each bar is a request, from when it was due until it ended: waiting, then tokens. "
        "The table has the same in numbers.",
        Axis(0, max(ends) * 1.01, "seconds since the load began", lambda value: f"{value:g}"),
        Axis(
            -0.5,
            len(rows) - 0.5,
            "request",
            lambda place: str(rows[len(rows) - 1 - round(place)].number),
            marks=tuple(range(len(rows))),
        ),
        width=2 * 560,
        height=height,
        left=52,
    )
    for place, row in enumerate(rows):
        _bar(plot, row, len(rows) - 1 - place, long)
    legend = [
        ("wait", "waiting for the first token"),
        ("flow", "tokens come"),
        ("stall", f"a gap of more than {seconds(long)}"),
    ]
    if any(row.failure for row in rows):
        legend.append(("fail", "failed"))
    cells = [
        [
            str(row.number),
            seconds(row.due),
            seconds(None if row.first is None else row.first - row.due),
            seconds(None if row.end is None else row.end - row.due),
            seconds(float(np.diff(row.tokens).max()) if len(row.tokens) > 1 else None),
            row.failure or "complete",
        ]
        for row in rows
    ]
    return Chart(
        f"The first {len(rows)} requests, {of.level.load}"
        if len(rows) > 1
        else f"One request, {of.level.load}",
        "Each bar is a request, from when it was due until it ended.",
        plot.render(),
        legend,
        ["Request", "Due after", "TTFT", "E2E", "Worst gap", "End"],
        cells,
        wide=True,
    )


def _bar(plot: Plot, row: Row, y: float, long: float) -> None:
    end = _end(row)
    first = end if row.first is None else row.first
    label = f"request {row.number}"
    if row.first is None or row.failure:
        plot.bar(
            row.due,
            end,
            y,
            9,
            "fail" if row.failure else "wait",
            f"{label}: {row.failure or 'no token came'}",
        )
        return
    plot.bar(row.due, first, y, 9, "wait", f"{label}: first token after {seconds(first - row.due)}")
    plot.bar(first, end, y, 9, "flow", f"{label}: {len(row.tokens)} events in {seconds(end - first)}")
    for before, after in zip(row.tokens[:-1].tolist(), row.tokens[1:].tolist()):
        if after - before > long:
            plot.bar(before, after, y, 9, "stall", f"{label}: nothing for {seconds(after - before)}")


def _end(row: Row) -> float:
    if row.end is not None:
        return row.end
    return float(row.tokens[-1]) if len(row.tokens) else row.sent or row.due


# -- shared


def _bears_on(limit: Limit, name: str) -> bool:
    return limit.metric == name or (name == "itl" and limit.metric in ("tpot", "speed"))


def _bound(limit: Limit) -> float:
    """Seconds; a speed as the gap that it allows."""
    return 1 / limit.bound if limit.metric == "speed" else limit.bound


def _told(of: Sequence[tuple[float, Level, Distribution]], name: str) -> str:
    return "; ".join(
        f"{level.load}: half within {seconds(each.median)}, 95 % within {seconds(at(each, 95))}"
        for _, level, each in of
    )


def _interval(of: Distribution, p: float) -> str:
    if p not in of.intervals or at(of, p) is None:
        return seconds(None)
    return f"{seconds(of.intervals[p].low)} to {seconds(of.intervals[p].high)}"
