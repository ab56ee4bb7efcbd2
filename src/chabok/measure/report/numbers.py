"""Numbers for people: three digits at most, with their unit; what is unknown is a dash."""

from __future__ import annotations

import math

from chabok.measure.report.definitions import Unit
from chabok.measure.stats import Distribution

UNKNOWN = "–"


def seconds(value: float | None) -> str:
    """A duration: 0.42 ms, 3.1 ms, 43 ms, 2.1 s, 95 s, 12 min."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    sign, value = ("-" if value < 0 else ""), abs(value)
    if value < 0.9995:
        ms = value * 1000
        return f"{sign}{ms:.0f} ms" if ms >= 9.95 else f"{sign}{_digits(ms)} ms"
    if value < 119.5:
        return f"{sign}{value:.0f} s" if value >= 9.95 else f"{sign}{value:.2f} s"
    return f"{sign}{value / 60:.0f} min"


def tick(value: float) -> str:
    """A duration at an axis: 5 ms, 1.5 s."""
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def number(value: float | None) -> str:
    """A rate or a count: 0.42, 9.7, 203, 12 400."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if abs(value) >= 9.95:
        return f"{value:,.0f}".replace(",", " ")
    return _digits(value)


def share(value: float | None) -> str:
    """A share: 0 %, 0.4 %, 71 %."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = value * 100
    if percent == 0 or abs(percent) >= 9.95:
        return f"{percent:.0f} %"
    return f"{percent:.1f} %" if abs(percent) >= 0.095 else f"{percent:.1g} %"


def change(value: float | None) -> str:
    """A change as a share of what was: +12 %, -0.4 %."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value) or abs(value) > 99:
        return "from nothing" if math.isinf(value) else f"x {1 + value:.0f}"
    text = share(abs(value))
    return text if text == "0 %" else ("+" if value > 0 else "-") + text


def money(value: float | None, currency: str = "$") -> str:
    """An amount: $0.0042, $0.11, $15.00."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value >= 1000:
        return f"{currency}{value:,.0f}".replace(",", " ")
    if value >= 0.1 or value == 0:
        return f"{currency}{value:.2f}"
    if value < 1e-8:
        return f"less than {currency}0.00000001"
    return f"{currency}{value:.{1 - math.floor(math.log10(value))}f}"


def shown(value: float | None, unit: Unit) -> str:
    """A value of a metric, with its unit."""
    if unit == "s":
        return seconds(value)
    if unit == "share":
        return share(value)
    text = number(value)
    return text if text == UNKNOWN else f"{text} {unit}"


def at(distribution: Distribution | None, p: float) -> float | None:
    """A percentile, if the sample carries it."""
    return None if distribution is None else distribution.percentiles.get(float(p))


def _digits(value: float) -> str:
    """Two digits that count, at most two of them behind the point."""
    return (
        f"{value:.1f}" if abs(value) >= 0.95 else f"{value:.2g}" if abs(value) >= 0.0095 else f"{value:.1g}"
    )
