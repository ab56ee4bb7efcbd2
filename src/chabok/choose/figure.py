"""The Pareto front as a chart: speed against quality (or price, where there is none), as SVG and as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chabok.choose.words import quality, share, size
from chabok.measure.report.numbers import money, number, seconds, tick
from chabok.measure.report.svg import Axis, Plot, above

if TYPE_CHECKING:
    from chabok.choose.compare import Comparison
    from chabok.choose.member import Member

STYLE = (
    "svg{font:12px system-ui,sans-serif;max-width:640px}.line,.axis,.grid{fill:none;stroke:#8f98a6}"
    ".grid{stroke:#eceef0}.line.a{stroke:#1a66c9;stroke-width:1.5}.dot.a{fill:#1a66c9}.dot.wait{fill:#9aa2ad}"
    ".line.wait{stroke:#c9ced6}text{fill:#5d636e}"
)


@dataclass(frozen=True, slots=True)
class Point:
    """A member in the chart. error: the ends of its interval in y, if it has one."""

    member: Member
    x: float
    y: float
    error: tuple[float, float] | None
    front: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """The points of a chart, and how its axes are called and written."""

    points: list[Point]
    x_label: str
    y_label: str
    x_text: Callable[[float], str]
    y_text: Callable[[float], str]


def scene(found: Comparison) -> Scene | None:
    """What is drawn; None: fewer than two members can be."""
    members = [member for member in found.members if member.answer_s is not None]
    judged = [member for member in members if member.quality is not None]
    if len(judged) > 1:
        points = [
            Point(m, m.answer_s or 0.0, m.quality.share, tuple(m.quality.interval), m.label in found.front)  # type: ignore[arg-type]
            for m in judged
            if m.quality is not None
        ]
        return Scene(points, "time to the whole answer", "quality", tick, share)
    paid = [member for member in members if member.cost is not None]
    if len(paid) > 1:
        currency = paid[0].currency
        points = [Point(m, m.answer_s or 0.0, m.cost or 0.0, None, m.label in found.front) for m in paid]
        return Scene(
            points, "time to the whole answer", "cost of 1000 answers", tick, lambda v: money(v, currency)
        )
    quick = [member for member in members if member.first_token_s]
    if len(quick) > 1:
        points = [
            Point(m, m.first_token_s or 0.0, m.pace or 0.0, None, m.label in found.front) for m in quick
        ]
        return Scene(points, "first token", "pace, tokens/s", tick, number)
    return None


def _ends(drawn: Scene) -> tuple[float, float, float]:
    xs = [max(point.x, 1e-4) for point in drawn.points]
    tops = [point.error[1] if point.error else point.y for point in drawn.points]
    high = min(above(max(tops)), 1.0) if drawn.y_label == "quality" else above(max(tops))
    return min(xs) / 1.6, max(xs) * 1.9, high


def svg(found: Comparison) -> str:
    """The chart as an SVG element in the classes of the report's page; empty if there is nothing to draw."""
    drawn = scene(found)
    if drawn is None:
        return ""
    low, high, top = _ends(drawn)
    told = "; ".join(
        f"{p.member.label}: {drawn.x_text(float(f'{p.x:.3g}'))}, {drawn.y_text(p.y)}" for p in drawn.points
    )
    plot = Plot(
        "front",
        f"{drawn.y_label} against {drawn.x_label}",
        told,
        Axis(low, high, drawn.x_label, drawn.x_text, log=True),
        Axis(0.0, top, drawn.y_label, drawn.y_text),
    )
    good = sorted((point for point in drawn.points if point.front), key=lambda point: point.x)
    plot.line([(point.x, point.y) for point in good], "a")
    for point in drawn.points:
        kind = "a" if point.front else "wait"
        if point.error:
            plot.line([(point.x, point.error[0]), (point.x, point.error[1])], kind)
        plot.dots([(point.x, point.y)], kind, [hint(point.member)], 5.0)
        plot.note(point.x, point.y, point.member.label)
    return plot.render()


def standalone(found: Comparison) -> str:
    """The chart as an SVG document with its own colours."""
    drawn = svg(found)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        "><title", f"><style>{STYLE}</style><title", 1
    )


def hint(member: Member) -> str:
    """What a point says when pointed at."""
    return (
        f"{member.label}: first token {seconds(member.first_token_s)}, {number(member.pace)} tokens/s, "
        f"answer {seconds(member.answer_s)}, quality {quality(member)}, {size(member.memory_bytes)}"
    )


def text(found: Comparison, width: int = 72, height: int = 12) -> list[str]:
    """The chart as lines of text: ``*`` on the front, ``o`` beside it."""
    drawn = scene(found)
    if drawn is None:
        return []
    low, high, top = _ends(drawn)
    left = max(len(drawn.y_text(top)), len(drawn.y_text(0.0))) + 1
    columns = width - left - 1
    rows = [[" "] * columns for _ in range(height)]
    for point in sorted(drawn.points, key=lambda each: each.front):
        across = round(
            (math.log(max(point.x, 1e-4)) - math.log(low)) / (math.log(high) - math.log(low)) * (columns - 1)
        )
        down = round((1 - min(point.y / top, 1.0)) * (height - 1))
        label = f"{'*' if point.front else 'o'} {point.member.label}"
        start = across
        if across + len(label) > columns:
            label, start = label[2:] + " " + label[0], max(across - len(label) + 1, 0)
        # A row that is taken there: the nearest that is free, so that no name covers another.
        for row in sorted(range(height), key=lambda each: abs(each - down)):
            if all(letter == " " for letter in rows[row][start : start + len(label)]):
                rows[row][start : start + len(label)] = list(label[: columns - start])
                break
    lines = [f"{drawn.y_label}  (* on the Pareto front)"]
    for place, cells in enumerate(rows):
        mark = drawn.y_text(top) if place == 0 else drawn.y_text(0.0) if place == height - 1 else ""
        lines.append(f"{mark:>{left}}│{''.join(cells).rstrip()}")
    ends = f"{seconds(low)}", f"{seconds(high)}"
    middle = f"{drawn.x_label} (log)"
    lines.append(" " * left + "└" + "─" * columns)
    lines.append(
        " " * (left + 1) + ends[0] + middle.center(max(columns - len(ends[0]) - len(ends[1]), 0)) + ends[1]
    )
    return lines
