"""Numbers as people read them: with a unit, three digits at most, and a dash for what is not known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.measure.report.numbers import UNKNOWN, change, money, number, seconds, share, shown
from chabok.measure.report.svg import Axis, above, linear_ticks, log_ticks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"),
        (0.00042, "0.42 ms"),
        (0.0031, "3.1 ms"),
        (0.00996, "10 ms"),
        (0.0432, "43 ms"),
        (0.9999, "1.00 s"),
        (2.13, "2.13 s"),
        (95.4, "95 s"),
        (754.0, "13 min"),
        (-0.002, "-2.0 ms"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (number(0.42), "0.42"),
        (number(9.71), "9.7"),
        (number(12_400), "12 400"),
        (share(0.0), "0 %"),
        (share(0.0041), "0.4 %"),
        (share(0.71), "71 %"),
        (change(0.123), "+12 %"),
        (change(-0.004), "-0.4 %"),
        (change(math.inf), "from nothing"),
        (money(0.11), "$0.11"),
        (money(0.0000034), "$0.0000034"),
        (money(1234.5, "€"), "€1 234"),
        (shown(0.5, "share"), "50 %"),
        (shown(20.0, "tokens/s"), "20 tokens/s"),
    ],
)
def test_rates_shares_and_amounts(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("write", [seconds, number, share, change, money])
def test_what_is_not_known_is_a_dash(write) -> None:  # type: ignore[no-untyped-def]
    assert write(None) == write(math.nan) == UNKNOWN


@given(st.floats(1e-7, 1e6))
def test_a_duration_that_is_shown_is_near_what_was_measured(value: float) -> None:
    text, unit = seconds(value).split()
    assert float(text) * {"ms": 1e-3, "s": 1, "min": 60}[unit] == pytest.approx(value, rel=0.51)
    assert float(text) > 0


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_even_and_within(low: float, span: float) -> None:
    ticks = linear_ticks(low, low + span)
    assert len(ticks) <= 8
    slack = span * 1e-6 + 4 * math.ulp(abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


@given(st.floats(1e-6, 1e3), st.floats(1.5, 1e6))
def test_logarithmic_ticks_are_within(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(ticks)
    assert all(low * 0.999 <= tick <= low * factor * 1.001 for tick in ticks)
    assert len(ticks) <= 12


@given(st.floats(1e-9, 1e9))
def test_an_axis_ends_a_little_above_its_highest_value(value: float) -> None:
    assert value < above(value) <= 1.6 * value


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.booleans())
def test_an_axis_keeps_the_order_of_values(one: float, other: float, log: bool) -> None:
    axis = Axis(1e-6, 1e6, "", str, log=log)
    assert (axis.share(one) <= axis.share(other)) == (one <= other) or axis.share(one) == axis.share(other)
    assert 0 <= axis.share(one) <= 1
