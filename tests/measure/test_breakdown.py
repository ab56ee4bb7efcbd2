"""Where the time went, and what it costs."""

from __future__ import annotations

import random

import pytest

from chabok.measure import Event, ServerTimings, Timeline, Usage, Window, measure, summarize
from chabok.measure.breakdown import break_down, fit_prefill
from chabok.measure.cost import Price, cost
from chabok.measure.metrics import Request


def request(
    ttft: float, prompt: int = 128, gap: float = 0.01, tokens: int = 11, server: ServerTimings | None = None,
    cached: int = 0,
) -> Request:  # fmt: skip
    events = [Event(ttft + n * gap, "content", "x") for n in range(tokens)]
    usage = Usage(prompt, tokens, cached_tokens=cached)
    return measure(Timeline(0, 0.0, sent=0.0, done=events[-1].at, finish="length", events=events, usage=usage,
                            server=server))  # fmt: skip


def test_prefill_and_what_is_fixed_are_found_from_prompts_of_several_lengths() -> None:
    chance = random.Random(1)
    requests = [
        request(0.05 + n * 0.002 + chance.uniform(0, 0.004), n) for n in (32, 64, 128, 256) for _ in range(5)
    ]
    requests.append(request(9.0, 64))  # one delay bends nothing
    fit = fit_prefill(requests)
    assert fit is not None
    assert fit.per_token_s == pytest.approx(0.002, rel=0.05)
    assert fit.fixed_s == pytest.approx(0.052, abs=0.006)
    assert fit.interval.low <= 0.002 <= fit.interval.high
    assert fit.clear
    assert fit.tokens_per_s == pytest.approx(500, rel=0.05)


def test_cached_tokens_are_not_taken_for_computed_ones() -> None:
    requests = [request(0.01 * n, 100 + 10 * n, cached=100) for n in (1, 2, 4, 8)]
    fit = fit_prefill(requests)
    assert fit is not None
    assert fit.per_token_s == pytest.approx(0.001)


def test_prompts_of_one_length_tell_nothing_of_prefill() -> None:
    assert fit_prefill([request(0.1, 128) for _ in range(10)]) is None
    noise = [request(0.1 + (n % 3) * 0.01, length) for n, length in enumerate([32, 256] * 6)]
    fit = fit_prefill(noise)
    assert fit is None or not fit.clear


def test_what_the_server_tells_is_taken_from_it_and_the_rest_is_labelled_an_estimate() -> None:
    told = ServerTimings("llama.cpp", queue_ms=5.0, prefill_ms=80.0)
    found = break_down([request(0.1, server=told) for _ in range(5)], round_trip_s=0.001)
    stages = {stage.name: (stage.seconds, stage.origin) for stage in found.first_token}
    assert stages["prefill"] == (pytest.approx(0.08), "server")
    assert stages["queue"] == (pytest.approx(0.005), "server")
    assert stages["network"] == (0.001, "measured")
    assert stages["first step"] == (pytest.approx(0.01), "estimate")
    assert sum(seconds for seconds, _ in stages.values()) == pytest.approx(0.1, rel=0.06)


def test_prefill_is_estimated_from_the_fit_where_the_server_is_silent() -> None:
    fit = fit_prefill([request(0.02 + n * 0.001, n) for n in (32, 64, 128, 256) * 2])
    found = break_down([request(0.148, 128)], fit=fit)
    stages = {stage.name: (stage.seconds, stage.origin) for stage in found.first_token}
    assert stages["prefill"] == (pytest.approx(0.128, rel=0.01), "estimate")


def test_the_bottleneck_is_one_sentence_with_a_number_and_a_remedy() -> None:
    told = ServerTimings("chabok", prefill_ms=710.0, queue_ms=20.0)
    found = break_down([request(1.0, gap=0.02, server=told)] * 3)
    assert found.bottleneck == (
        "prefill (71% of the time to first token); a prompt half as long starts 355 ms sooner"
    )
    slow = break_down([request(0.1, gap=0.1, tokens=51)] * 3)
    assert slow.bottleneck.startswith("decode (98% of the whole answer)")
    assert break_down([]).bottleneck == ""


def steady() -> object:
    timelines = [
        Timeline(n, 0.0, sent=0.0, done=10.0, finish="length", usage=Usage(1000, 100, cached_tokens=400),
                 events=[Event((k + 1) / 10, "content", "x") for k in range(100)])
        for n in range(4)
    ]  # fmt: skip
    return summarize(timelines, Window(0.0, 10.0))


def test_a_machine_by_the_hour_costs_per_token_at_the_measured_load() -> None:
    found = cost(Price.machine(3.6), steady(), 4)  # type: ignore[arg-type]
    assert found.per_million_output == pytest.approx(0.001 / 40 * 1e6)  # 40 tokens/s
    assert found.per_request == pytest.approx(0.001 * 10 / 4)
    assert found.per_minute == pytest.approx(0.06 / 4)
    assert found.per_million_prompt is None
    own = Price.own(200, 0.30)
    assert own.per_hour == pytest.approx(0.06)


def test_token_prices_count_cached_tokens_at_their_own_price() -> None:
    price = Price("x", prompt=1.0, cached=0.1, output=10.0, request=0.001)
    found = cost(price, steady(), 1)  # type: ignore[arg-type]
    assert found.per_request == pytest.approx((600 * 1.0 + 400 * 0.1 + 100 * 10.0) / 1e6 + 0.001)
