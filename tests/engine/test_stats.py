"""Counted once, and exactly."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.mock import mock_engine

from chabok.engine.request import Request, SamplingParams
from chabok.engine.stats import WINDOW_S, Histogram, Stats


def request(text: str, n: int = 10) -> Request:
    return Request(list(text.encode()), SamplingParams(max_tokens=n))


@given(st.lists(st.floats(0, 20)))
def test_a_histogram_counts_each_value_in_every_bucket_that_reaches_it(values: list[float]) -> None:
    bounds = (0.5, 1.0, 5.0)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))
    assert [count for _, count in histogram.cumulative()] == [
        sum(value <= bound for value in values) for bound in (*bounds, float("inf"))
    ]


def test_the_worst_gap_is_that_of_the_last_minute() -> None:
    stats = Stats()
    assert stats.worst_gap_s(1000.0) == 0
    stats.gap(1000.0, 0.5)
    stats.gap(1000.9, 0.2)
    stats.gap(1030.0, 0.3)
    assert stats.worst_gap_s(1031.0) == 0.5
    assert stats.worst_gap_s(1000.0 + WINDOW_S) == 0.3
    stats.gap(1000.0 + WINDOW_S + 1, 0.1)
    assert stats.worst_gap_s(1095.0) == 0.1
    assert stats.worst_gap_s(2000.0) == 0


def test_what_the_engine_counts_agrees_with_what_its_callers_saw() -> None:
    engine = mock_engine(max_batch=3, n_pages=40, row_s=0.0001)
    handles = [
        engine.submit(request("a shared beginning of two pages " * 5 + f"{i}", 5 + i)) for i in range(6)
    ]
    for _ in range(4):
        engine.step()
    handles[0].cancel()
    late = request("too late", 500)
    late.deadline = time.perf_counter() + 0.02
    handles.append(engine.submit(late))
    while engine.has_work:
        engine.step()
    ends = [handle.result() for handle in handles]
    stats = engine.stats
    assert {reason: n for reason, n in stats.finished.items() if n} == {
        reason: sum(end.finish_reason == reason for end in ends)
        for reason in ("length", "cancelled", "deadline")
    }
    started = [end for end in ends if end.timings.prefill_s > 0]
    assert stats.submitted == stats.e2e_s.count == 7
    assert stats.output_tokens == sum(len(end.tokens) for end in ends)
    assert stats.ttft_s.count == sum(bool(end.tokens) for end in ends)
    assert stats.itl_s.count == sum(max(len(end.tokens) - 1, 0) for end in ends)
    assert stats.queue_s.count == len(started)
    assert stats.prompt_tokens == sum(end.timings.prompt_tokens for end in started)
    assert stats.cached_tokens == sum(end.timings.cached_tokens for end in ends) > 0
    assert stats.itl_s.total == pytest.approx(sum(end.timings.decode_s for end in ends))
    assert stats.worst_gap_s() == max(end.timings.worst_gap_s for end in ends) > 0
    assert stats.batch.count == stats.steps
    assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
    assert stats.pages_cached == engine.scheduler.pool.cached > 0
    assert stats.pages_total == 40


def test_counting_a_token_takes_a_microsecond_at_most() -> None:
    stats = Stats()
    n = 20_000
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(n):
            stats.itl_s.observe(0.0123)
        best = min(best, (time.perf_counter() - start) / n)
    # A third of one on an idle machine; the bound leaves room for a busy one.
    assert best < 3e-6
