"""Limits, and what keeps them."""

from __future__ import annotations

import pytest

from chabok.measure import Event, Failure, MeasureError, Timeline, Window, measure
from chabok.measure.metrics import Request
from chabok.measure.slo import Limit, goodput


def request(
    ttft: float, gap: float = 0.01, tokens: int = 11, failed: bool = False, begin: float = 0.0
) -> Request:
    events = [Event(begin + ttft + n * gap, "content", "x") for n in range(tokens)]
    timeline = Timeline(0, begin, sent=begin, done=events[-1].at, finish="length", events=events)
    timeline.failure = Failure("x", "x") if failed else None
    return measure(timeline)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=500ms:p95", Limit("ttft", 0.5, 95)),
        ("itl=50ms:p99", Limit("itl", 0.05, 99)),
        ("e2e=2s", Limit("e2e", 2.0, 95)),
        ("speed=20", Limit("speed", 20.0, 95)),
        ("worst_gap<1.5s", Limit("worst_gap", 1.5, 95)),
        ("ttft = 300us : 50", Limit("ttft", 0.0003, 50)),
    ],
)
def test_a_limit_is_read_as_people_write_it(text: str, expected: Limit) -> None:
    found = Limit.of(text)
    assert found.metric == expected.metric
    assert found.bound == pytest.approx(expected.bound)
    assert found.percentile == expected.percentile
    assert Limit.of(found.text) == found


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft=x", "tft=5ms", "ttft=0s", "ttft=500", "ttft=5ms:p101", "speed=5ms", "ttft=1.2.3"],
)
def test_what_is_no_limit_is_said_so(text: str) -> None:
    with pytest.raises(MeasureError, match=r"limit|bound|speed"):
        Limit.of(text)


def test_a_failed_request_keeps_no_limit() -> None:
    limit = Limit.of("ttft=1s:p50")
    assert limit.kept_by(request(0.5))
    assert not limit.kept_by(request(0.5, failed=True))
    assert not limit.kept_by(request(1.5))


def test_a_limit_is_met_by_its_share_of_requests() -> None:
    limit = Limit.of("ttft=1s:p90")
    assert limit.met([request(0.5)] * 9 + [request(2.0)])
    assert not limit.met([request(0.5)] * 8 + [request(2.0)] * 2)
    assert not limit.met([])


def test_a_limit_of_gaps_is_met_by_its_share_of_gaps() -> None:
    limit = Limit.of("itl=50ms:p95")
    smooth, rough = request(0.1, 0.01, 101), request(0.1, 0.08, 6)
    assert limit.met([smooth, rough])  # 5 of 105 gaps
    assert not limit.kept_by(rough)
    assert not limit.met([smooth, request(0.1, 0.08, 11)])


def test_speed_is_a_limit_from_below() -> None:
    assert Limit.of("speed=90").kept_by(request(0.1, 0.01))
    assert not Limit.of("speed=110").kept_by(request(0.1, 0.01))


def test_goodput_counts_requests_of_the_window_that_kept_every_limit() -> None:
    limits = [Limit.of("ttft=1s"), Limit.of("speed=50")]
    requests = [
        request(0.5, begin=1.0),
        request(0.5, begin=2.0),
        request(2.0, begin=2.0),
        request(0.5, 0.05, begin=2.0),
        request(0.5, begin=2.0, failed=True),
        request(0.5, begin=50.0),
    ]
    assert goodput(requests, limits, Window(0.0, 10.0)) == pytest.approx(0.2)
    assert goodput([], limits, None) is None
