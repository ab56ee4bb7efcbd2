"""The charts of a turn: what the model's speed gives, where the time goes, and which steps run when."""

from __future__ import annotations

import math
from collections.abc import Sequence

from chabok.choose.turn import PARTS, Gain, TurnReport
from chabok.measure.report.charts import Chart
from chabok.measure.report.numbers import number, seconds, share, tick
from chabok.measure.report.svg import HEIGHT, Axis, Plot, above

COLOURS = {
    "prefill": "s2",
    "reasoning": "s4",
    "answer": "s1",
    "model": "s1",
    "tool": "s3",
    "human": "s5",
    "other": "s0",
    "idle": "s0",
}
"""CSS class of each part."""
TITLES = {
    "prefill": "model: reading the prompt",
    "reasoning": "model: reasoning",
    "answer": "model: answer",
    "model": "model",
    "tool": "tools",
    "human": "people",
    "other": "other steps",
    "idle": "between steps",
}
MOST_BARS = 60
"""Steps that the chart of steps shows."""


def charts(report: TurnReport) -> list[Chart]:
    """All three."""
    return [curve(report), stacks(report), steps(report)]


def curve(report: TurnReport) -> Chart:
    """Times as fast as the turn is, against times as fast as the model is."""
    points = report.curve
    bounded = math.isfinite(report.ceiling)
    top = above(max([gain for _, gain in points] + ([report.ceiling] if bounded else [])))
    told = ", ".join(f"{gain.label}: {times(gain.speedup)}" for gain in report.gains)
    plot = Plot(
        "turn-curve",
        "What a faster model gives the turn",
        told,
        Axis(points[0][0], points[-1][0], "times the model's speed", lambda v: f"{v:g}x", True),
        Axis(0, top, "times as fast a turn", lambda v: f"{v:g}x"),
    )
    plot.line(points, "a")
    shown = [(gain.factor or 1.0, gain.speedup) for gain in report.gains if math.isfinite(gain.speedup)]
    shown = [point for point in shown if points[0][0] <= point[0] <= points[-1][0]]
    plot.dots(shown, "a", [f"model {x:g}x, turn {y:.2f}x" for x, y in shown])
    if bounded:
        plot.across(report.ceiling, f"ceiling: {times(report.ceiling)}")
    if points[0][0] < report.felt_up_to < points[-1][0]:
        plot.down(report.felt_up_to, "more is not felt", "middle")
    return Chart(
        "What a faster model gives the turn",
        f"The ceiling: a model that takes no time (Amdahl 1967). More is not felt where {report.threshold}.",
        plot.render(),
        headings=["Model", "Turn", "Times as fast"],
        cells=[[gain.label, seconds(gain.seconds), times(gain.speedup)] for gain in report.gains],
    )


def stacks(report: TurnReport) -> Chart:
    """Seconds by part, now and with faster or other models."""
    rows = [*report.gains, *report.swaps]
    parts = [part for part in PARTS if any(part in gain.parts for gain in rows)]
    width = max([gain.seconds for gain in rows] + [report.seconds])
    height = max(60 + 34 * len(rows) + 44, HEIGHT // 2)
    plot = Plot(
        "turn-parts",
        "Where the time of the turn goes",
        "; ".join(f"{gain.label}: {seconds(gain.seconds)}" for gain in rows),
        Axis(0, above(width), "seconds", tick),
        Axis(-0.5, len(rows) - 0.5, "", lambda v: _label(rows, v), marks=tuple(range(len(rows)))),
        height=height,
        left=110,
    )
    for place, gain in enumerate(rows):
        at = 0.0
        for part in parts:
            took = gain.parts.get(part, 0.0)
            if took:
                hint = f"{TITLES[part]}: {seconds(took)}, {share(took / gain.seconds)}"
                plot.bar(at, at + took, len(rows) - 1 - place, 20, COLOURS[part], hint)
            at += took
    return Chart(
        "Where the time of the turn goes",
        "Along the longest chain of steps that wait for each other; what runs beside it takes no time.",
        plot.render(),
        [(COLOURS[part], TITLES[part]) for part in parts],
        ["With", *(TITLES[part] for part in parts), "Turn"],
        [
            [gain.label, *(seconds(gain.parts.get(part, 0.0)) for part in parts), seconds(gain.seconds)]
            for gain in rows
        ],
    )


def steps(report: TurnReport) -> Chart:
    """Which step runs when; those that decide how long the turn takes are marked in the table."""
    walk = report.turn.walk()
    shown = report.turn.steps[:MOST_BARS]
    deciding = {step.id for step in walk.path}
    plot = Plot(
        "turn-steps",
        "The steps of the turn",
        f"{len(report.turn.steps)} steps, {len(deciding)} of them one after the other",
        Axis(0, max(report.seconds, 1e-9), "seconds since the turn began", tick),
        Axis(-0.5, len(shown) - 0.5, "", lambda v: "", marks=(-1.0,)),
        width=1120,
        height=max(80 + 16 * len(shown), 150),
    )
    cells = []
    for place, step in enumerate(shown):
        start, y = walk.start(step.id), len(shown) - 1 - place
        at = start
        for part, took in step.parts().items():
            if took:
                name = step.name or step.id
                plot.bar(at, at + took, y, 11, COLOURS[part], f"{name}: {TITLES[part]}, {seconds(took)}")
            at += took
        on = "yes" if step.id in deciding else "no"
        cells.append([step.name or step.id, step.kind, seconds(start), seconds(step.seconds), on])
    more = len(report.turn.steps) - len(shown)
    return Chart(
        "The steps of the turn",
        f"The first {len(shown)}; {more} more are not shown."
        if more
        else "All steps, as they were recorded.",
        plot.render(),
        headings=["Step", "Kind", "Begins", "Takes", "Decides"],
        cells=cells,
        wide=True,
    )


def times(value: float) -> str:
    """A factor: 2.0x, 15x."""
    return f"{value:.2f}x" if value < 9.95 else f"{number(value)}x" if math.isfinite(value) else "no ceiling"


def _label(rows: Sequence[Gain], value: float) -> str:
    return rows[len(rows) - 1 - round(value)].label[:14]
