"""What a load costs: by hand-reckoned examples, with what is missing named and nothing guessed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.runs import answer

from chabok.measure import MeasureError, Summary, Timeline, Window, measure, summarize
from chabok.measure.cost import Price, cost, find_price, prefill_share_of, read_prices

AMOUNTS = st.floats(0.001, 1000)


def load(**options: object) -> list[Timeline]:
    """Ten requests in ten seconds: 1000 prompt tokens, 100 output tokens each."""
    return [
        answer(n, float(n), ttft=0.1, gap=0.005, tokens=100, prompt=1000, **options)  # type: ignore[arg-type]
        for n in range(10)
    ]


@cache
def summary(**options: object) -> Summary:
    return summarize(load(**options), Window(0.0, 10.0))


def test_an_hours_price_is_put_on_output_tokens_where_the_server_tells_no_times() -> None:
    found = cost(Price.machine(3.6), summary(), 2)
    assert found.per_million_output == pytest.approx(0.001 / 100 * 1e6)
    assert found.per_million_prompt is None
    assert found.per_request == pytest.approx(0.001)
    assert found.per_minute == pytest.approx(0.06 / 2)
    assert "all of the machine's cost" in found.split
    assert any("prefill and decode" in text for text in found.missing)


def test_an_hours_price_is_divided_by_the_time_in_prefill_and_decode() -> None:
    found = cost(Price.machine(3.6), summary(), 2, 0.25)
    assert found.per_million_output == pytest.approx(0.75 * 0.001 / 100 * 1e6)
    assert found.per_million_prompt == pytest.approx(0.25 * 0.001 / 1000 * 1e6)
    assert "25 %" in found.split
    assert not found.missing


@settings(deadline=None)
@given(st.floats(0.01, 0.99), AMOUNTS)
def test_however_it_is_divided_the_parts_make_up_the_machines_cost(share: float, hour: float) -> None:
    measured = summary()
    found = cost(Price.machine(hour), measured, 1, share)
    assert found.per_million_output is not None
    assert found.per_million_prompt is not None
    assert measured.throughput is not None
    assert measured.prompt_throughput is not None
    second = (
        found.per_million_output * measured.throughput + found.per_million_prompt * measured.prompt_throughput
    ) / 1e6
    assert second == pytest.approx(hour / 3600)


def test_an_open_loop_answers_as_many_at_once_as_littles_law_says() -> None:
    measured = summary()
    assert measured.e2e is not None
    assert measured.request_rate is not None
    found = cost(Price.machine(3.6), measured, 0)
    assert found.per_minute == pytest.approx(0.06 / (measured.request_rate * measured.e2e.mean))


def test_the_prefill_share_is_of_what_the_server_tells() -> None:
    assert prefill_share_of([measure(each) for each in load()]) == pytest.approx(80 / (80 + 495))
    silent = load()
    for each in silent:
        each.server = None
    assert prefill_share_of([measure(each) for each in silent]) is None


def test_token_prices_take_cached_tokens_at_their_own_price() -> None:
    price = Price("p", prompt=2.0, cached=0.5, output=8.0, request=0.01)
    found = cost(price, summary(cached=400), 1)
    assert found.per_request == pytest.approx((600 * 2.0 + 400 * 0.5 + 100 * 8.0) / 1e6 + 0.01)
    assert (found.per_million_prompt, found.per_million_output) == (2.0, 8.0)
    assert not found.missing


@pytest.mark.parametrize(
    ("price", "cached", "missing"),
    [
        (Price("p", prompt=1.0, output=1.0), 400, "the price of cached prompt tokens"),
        (Price("p", output=1.0), 0, "the price of prompt tokens"),
        (Price("p", prompt=1.0), 0, "the price of output tokens"),
    ],
)
def test_a_missing_price_is_named_and_not_guessed(price: Price, cached: int, missing: str) -> None:
    found = cost(price, summary(cached=cached), 1)
    assert found.per_request is None
    assert found.per_minute is None
    assert found.missing == [missing]


def test_unknown_prompt_lengths_leave_the_cost_unknown() -> None:
    timelines = load()
    for each in timelines:
        each.usage.prompt_tokens = None
    found = cost(Price("p", prompt=1.0, output=1.0), summarize(timelines), 1)
    assert found.per_request is None
    assert found.missing == ["the number of prompt tokens"]


def test_a_price_per_request_needs_no_price_of_tokens() -> None:
    assert cost(Price("p", request=0.02), summary(), 1).per_request == pytest.approx(0.02)


def test_nothing_that_succeeded_costs_an_unknown_amount() -> None:
    for price in (Price("p", prompt=1.0, output=1.0), Price.machine(1.0)):
        found = cost(price, Summary(), 1)
        assert found.per_request is None


def test_watts_and_a_tariff_make_an_hours_price() -> None:
    assert Price.own(200, 0.30).per_hour == pytest.approx(0.06)
    for watts, tariff in ((0, 1), (1, -1), (float("nan"), 1)):
        with pytest.raises(MeasureError, match="must be more than 0"):
            Price.own(watts, tariff)


def test_the_list_states_dates_and_sources() -> None:
    prices = read_prices()
    assert len(prices) >= 4
    assert all(price.noted and price.source for price in prices.values())
    assert any(price.per_hour for price in prices.values())
    assert any(price.cached for price in prices.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a]\nprompts = 1", "no field 'prompts'"),
        ("[a]\nprompt = 'x'", "a.prompt must be a number"),
        ("[a]\nprompt = -1", "a.prompt must be a number"),
        ("[a]\nprompt = true", "a.prompt must be a number"),
        ("[a]\nprompt = nan", "a.prompt must be a number"),
        ("[a]\nwatts = 100", "both of watts and per_kwh"),
        ("[a]\nper_hour = 1\noutput = 1", "either of a machine"),
        ("[a]\ncurrency = '€'", "either of a machine"),
        ("a = 1", "a must be a table"),
        ("[", "is no TOML"),
    ],
)
def test_mistakes_in_a_list_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(MeasureError, match=said):
        read_prices(path)


def test_ones_own_list_is_found_by_name(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(
        "[mine]\ncurrency = '€'\nwatts = 50\nper_kwh = 0.4\nnoted = 2026-01-02\n", encoding="utf-8"
    )
    found = find_price("mine", path)
    assert (found.currency, found.noted) == ("€", "2026-01-02")
    assert found.per_hour == pytest.approx(0.02)
    with pytest.raises(MeasureError, match="there are 'mine'"):
        find_price("yours", path)
    with pytest.raises(MeasureError, match="No such file"):
        read_prices(tmp_path / "gone.toml")
