"""Charts as SVG text: axes, lines, bands, points. Colours are classes, so that the page decides for light and
dark. Everything that is drawn is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 18, 34, 44

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from ``low`` to ``high``, linear or logarithmic. text: how a value is written at it."""

    low: float
    high: float
    label: str
    text: Callable[[float], str]
    log: bool = False
    marks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one; outside values lie at the ends."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(max(value, self.low)) if self.log else value
        return min(max((value - low) / (high - low), 0.0), 1.0) if high > low else 0.5

    def ticks(self) -> list[float]:
        """Round values along it."""
        if self.marks:
            return list(self.marks)
        return log_ticks(self.low, self.high) if self.log else linear_ticks(self.low, self.high)


def linear_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within a range."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    step = next(power * each for each in (1, 2, 5, 10, 20) if span / (power * each) <= most)
    first = math.ceil(low / step - 1e-9)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten within a range; only the powers where those would be many."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 300 else (1,)
    found = [each * 10.0**power for power in decades for each in steps]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def above(highest: float) -> float:
    """A round value a little above all others, for the end of an axis."""
    if not highest > 0 or not math.isfinite(highest):
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest))
    return next(
        power * each
        for each in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12)
        if power * each >= highest * 1.04
    )


@dataclass(slots=True)
class Plot:
    """A chart under construction. name: unique on its page; title, text: for those who do not see it."""

    name: str
    title: str
    text: str
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    parts: list[str] = field(default_factory=list)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across = self.left + self.x.share(x) * (self.width - self.left - RIGHT)
        return across, self.height - BOTTOM - self.y.share(y) * (self.height - TOP - BOTTOM)

    def line(self, points: Points, kind: str, hint: str = "") -> None:
        """A line through points; ``kind``: its CSS classes."""
        if points:
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in (self.place(*each) for each in points))
            self.parts.append(f'<path class="line {kind}" d="{path}">{_hint(hint)}</path>')

    def steps(self, points: Points, kind: str, hint: str = "") -> None:
        """A staircase: each value holds until the next one."""
        stairs: list[tuple[float, float]] = []
        for x, y in points:
            if stairs:
                stairs.append((x, stairs[-1][1]))
            stairs.append((x, y))
        self.line(stairs, kind, hint)

    def band(self, points: Sequence[tuple[float, float, float]], kind: str) -> None:
        """What lies between (x, low, high)."""
        if len(points) > 1:
            edge = [self.place(x, high) for x, _, high in points]
            edge += [self.place(x, low) for x, low, _ in reversed(points)]
            path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in edge) + "Z"
            self.parts.append(f'<path class="band {kind}" d="{path}"/>')

    def dots(self, points: Points, kind: str, hints: Sequence[str] = (), size: float = 3.5) -> None:
        """A dot per point, and what it says when pointed at."""
        for place, point in enumerate(points):
            px, py = self.place(*point)
            hint = _hint(hints[place] if hints else "")
            if "square" in kind:
                shape = f'<rect class="dot {kind}" x="{px - size:.1f}" y="{py - size:.1f}" '
                shape += f'width="{2 * size:g}" height="{2 * size:g}">{hint}</rect>'
            else:
                shape = f'<circle class="dot {kind}" cx="{px:.1f}" cy="{py:.1f}" r="{size:g}">{hint}</circle>'
            self.parts.append(shape)

    def note(self, x: float, y: float, label: str) -> None:
        """A name beside a point, on the side where there is room."""
        px, py = self.place(x, y)
        end = px > self.width * 0.65
        self.parts.append(_text("note", px - 9 if end else px + 9, py - 6, label, ANCHOR_END if end else ""))

    def bar(self, x0: float, x1: float, y: float, height: float, kind: str, hint: str = "") -> None:
        """A bar from x0 to x1 in pixels ``height``, its middle at y."""
        (left, middle), (right, _) = self.place(x0, y), self.place(x1, y)
        self.parts.append(
            f'<rect class="bar {kind}" x="{left:.2f}" y="{middle - height / 2:.2f}" '
            f'width="{max(right - left, 0.5):.2f}" height="{height:.2f}">{_hint(hint)}</rect>'
        )

    def across(self, y: float, label: str, kind: str = "limit") -> None:
        """A line at a value of y, over the whole width."""
        (left, py), (right, _) = self.place(self.x.low, y), self.place(self.x.high, y)
        self.parts.append(f'<path class="line {kind}" d="M{left:.1f} {py:.1f}L{right:.1f} {py:.1f}"/>')
        up = py - 5 if py > TOP + 16 else py + 13
        self.parts.append(_text("note", left + 6, up, label))

    def down(self, x: float, label: str, kind: str = "limit", row: int = 0) -> None:
        """A line at a value of x, over the whole height; ``row``: where its label is."""
        (px, bottom), (_, top) = self.place(x, self.y.low), self.place(x, self.y.high)
        self.parts.append(f'<path class="line {kind}" d="M{px:.1f} {bottom:.1f}L{px:.1f} {top:.1f}"/>')
        end = px > self.width * 0.6
        at = px - 5 if end else px + 5
        self.parts.append(_text("note", at, bottom - 8 - 15 * row, label, ANCHOR_END if end else ""))

    def render(self) -> str:
        """The SVG element."""
        ids = f"{self.name}-title {self.name}-text"
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-labelledby="{ids}">'
            f'<title id="{self.name}-title">{escape(self.title)}</title>'
            f'<desc id="{self.name}-text">{escape(self.text)}</desc>'
            + self._axes()
            + "".join(self.parts)
            + "</svg>"
        )

    def _axes(self) -> str:
        bottom, right = self.height - BOTTOM, self.width - RIGHT
        found = []
        for value in self.y.ticks():
            _, py = self.place(self.x.low, value)
            found.append(f'<path class="grid" d="M{self.left} {py:.1f}H{right}"/>')
            found.append(_text("tick", self.left - 7, py + 4, self.y.text(value), ANCHOR_END))
        for value in self.x.ticks():
            px, _ = self.place(value, self.y.low)
            found.append(f'<path class="axis" d="M{px:.1f} {bottom}v4"/>')
            found.append(_text("tick", px, bottom + 17, self.x.text(value), ANCHOR_MIDDLE))
        found.append(f'<path class="axis" d="M{self.left} {bottom}H{right}"/>')
        found.append(_text("name", (self.left + right) / 2, self.height - 6, self.x.label, ANCHOR_MIDDLE))
        found.append(_text("name", 4, 14, self.y.label))
        return "".join(found)


ANCHOR_END, ANCHOR_MIDDLE = ' text-anchor="end"', ' text-anchor="middle"'


def _text(kind: str, x: float, y: float, text: str, anchor: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{anchor}>{escape(text)}</text>' if text else ""


def _hint(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
