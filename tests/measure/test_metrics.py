"""Each metric by its definition, and each trap that it must not fall into."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.measure import Event, Failure, Timeline, Usage, Window, measure, summarize


def timeline(*events: Event, number: int = 0, scheduled: float = 0.0, **fields: object) -> Timeline:
    fields.setdefault("finish", "length")
    done = events[-1].at if events else scheduled
    return Timeline(number, scheduled, sent=scheduled, done=done, events=list(events), **fields)  # type: ignore[arg-type]


def said(at: float, text: str = "x", kind: str = "content", tokens: int | None = None) -> Event:
    return Event(at, kind, text, tokens)  # type: ignore[arg-type]


ROLE = Event(0.01, "role")


def test_first_token_is_not_the_role_and_counts_from_the_schedule() -> None:
    found = measure(timeline(Event(1.01, "role"), said(1.5), said(1.6), scheduled=1.0))
    assert found.ttft_s == pytest.approx(0.5)


def test_a_request_that_was_sent_late_is_timed_from_when_it_was_due() -> None:
    late = timeline(said(3.2), said(3.3), scheduled=1.0)
    late.sent, late.connect_s = 3.0, 0.5
    found = measure(late)
    assert found.ttft_s == pytest.approx(2.2)
    assert found.e2e_s == pytest.approx(2.3)
    assert found.lateness_s == pytest.approx(1.5)  # connecting is not the client's delay


def test_reasoning_is_a_first_token_but_no_visible_one() -> None:
    found = measure(
        timeline(ROLE, said(0.1, kind="reasoning"), said(0.2, kind="reasoning"), said(0.4), said(0.5))
    )
    assert found.ttft_s == pytest.approx(0.1)
    assert found.ttfvt_s == pytest.approx(0.4)
    assert found.reasoning_tokens == 2


def test_an_event_of_n_tokens_gives_n_gaps_of_an_nth() -> None:
    found = measure(timeline(said(0.1), said(0.3), said(0.6), Event(0.7, "usage", "", 5), usage=Usage(9, 5)))
    # five tokens in three events of equal text: one each, and the rest by length
    assert found.token_counts.sum() == 5
    exact = timeline(said(0.1, tokens=1), said(0.3, tokens=3), said(0.6, tokens=4), usage=Usage(9, 4))
    found = measure(exact)
    assert found.spread == "server"
    assert found.token_counts.tolist() == [1, 2, 1]
    assert found.itl.tolist() == pytest.approx([0.1, 0.1, 0.3])
    assert found.gaps.tolist() == pytest.approx([0.2, 0.3])
    assert found.worst_gap_s == pytest.approx(0.3)
    assert found.tpot_s == pytest.approx(0.5 / 3)
    assert found.speed == pytest.approx(6.0)


def test_tokens_that_the_server_counts_are_spread_by_length_where_events_are_fewer() -> None:
    found = measure(timeline(said(0.1, "ab"), said(0.2, "ab" * 4), usage=Usage(9, 10)))
    assert found.spread == "by length"
    assert found.token_counts.tolist() == [3, 7]  # one each, and 8 as 1 : 4


def test_the_token_that_ends_an_answer_is_counted_and_belongs_to_no_event() -> None:
    found = measure(timeline(said(0.1), said(0.2), said(0.3), usage=Usage(9, 4), finish="stop"))
    assert found.spread == "one per event"
    assert found.output_tokens == 4
    assert found.tpot_s == pytest.approx(0.1)


def test_fewer_tokens_than_events_leave_some_events_without_one() -> None:
    found = measure(timeline(*[said(0.1 * n) for n in range(1, 7)], usage=Usage(9, 3)))
    assert found.token_counts.sum() == 3
    assert found.token_counts[0] == 1
    assert len(found.itl) == 2
    assert found.itl.sum() <= found.gaps.sum() + 1e-9


def test_empty_usage_and_finish_events_are_no_tokens() -> None:
    found = measure(
        timeline(ROLE, said(0.1), Event(0.2, "role"), said(0.3), Event(0.9, "role"), Event(1.0, "usage"))
    )
    assert found.gaps.tolist() == pytest.approx([0.2])
    assert found.e2e_s == pytest.approx(1.0)
    assert found.output_tokens == 2
    assert found.source == "events"


def test_token_counts_come_from_usage_then_from_a_tokenizer_then_from_events() -> None:
    events = [said(0.1), said(0.2)]
    assert measure(timeline(*events, usage=Usage(1, 7), counted=5)).source == "usage"
    found = measure(timeline(*events, counted=5))
    assert (found.source, found.output_tokens) == ("tokenizer", 5)
    found = measure(timeline(*events))
    assert (found.source, found.output_tokens) == ("events", 2)


def test_reasoning_tokens_are_inside_the_output_not_added_to_it() -> None:
    hidden = measure(timeline(said(1.0), said(1.1), usage=Usage(9, 102, reasoning_tokens=100)))
    assert hidden.output_tokens == 102
    assert hidden.reasoning_tokens == 100
    assert hidden.token_counts.tolist() == [1, 1]  # what was thought unseen is no pace of what is seen
    assert hidden.tpot_s == pytest.approx(0.1)


def test_an_answer_with_an_error_event_is_a_failure_and_counts_nowhere_else() -> None:
    bad = timeline(said(0.1), said(0.2), Event(0.3, "error", "boom"))
    bad.failure = Failure("error event", "boom")
    summary = summarize([bad, timeline(said(0.5), said(0.6))])
    assert (summary.requests, summary.failed) == (2, 1)
    assert (summary.errors[0].kind, summary.errors[0].count, summary.errors[0].example) == (
        "error event",
        1,
        "boom",
    )
    assert summary.ttft is not None
    assert summary.ttft.n == 1
    assert summary.output_tokens == 2


def test_a_complete_answer_without_tokens_is_no_success() -> None:
    summary = summarize([timeline(ROLE)])
    assert summary.failed == 1
    assert summary.errors[0].kind == "no tokens"


def test_ramp_up_and_drain_do_not_count_in_throughput() -> None:
    steady = [timeline(*[said(10 + n / 10) for n in range(1, 101)], scheduled=10.0)]
    edges = [timeline(said(1.0), said(2.0)), timeline(said(25.0), said(40.0), scheduled=24.0)]
    summary = summarize(steady + edges, Window(10.0, 20.0))
    assert summary.steady
    assert summary.throughput == pytest.approx(10.0)
    assert summary.request_rate == pytest.approx(0.1)
    whole = summarize(steady + edges)
    assert not whole.steady
    assert whole.throughput == pytest.approx(104 / 40)


def test_gaps_are_pooled_so_that_a_stall_is_not_averaged_away() -> None:
    smooth = [timeline(*[said(n / 100) for n in range(1, 102)], number=n) for n in range(99)]
    stalled = timeline(*[said(n / 100 + (n > 50)) for n in range(1, 102)], number=99)
    summary = summarize([*smooth, stalled])
    assert summary.worst_gap is not None
    assert summary.itl is not None
    assert summary.worst_gap.most == pytest.approx(1.01)
    assert summary.itl.most == pytest.approx(1.01)
    assert summary.itl.median == pytest.approx(0.01)


def test_below_a_hundred_requests_there_is_no_99th_percentile() -> None:
    def run(n: int) -> object:
        return summarize([timeline(said(0.1), said(0.2), number=i) for i in range(n)])

    few, many = run(99), run(100)
    for name in ("ttft", "itl", "e2e", "worst_gap"):
        assert 99.0 not in getattr(few, name).percentiles
        assert 99.0 in getattr(many, name).percentiles
        assert 99.9 not in getattr(many, name).percentiles


def test_cached_tokens_are_summed_only_if_the_server_tells_them() -> None:
    first = timeline(said(0.1), said(0.2), usage=Usage(100, 2, cached_tokens=60))
    assert summarize([first]).cached_tokens == 60
    assert summarize([timeline(said(0.1), usage=Usage(100, 1))]).cached_tokens is None


EVENTS = st.lists(st.tuples(st.floats(0, 2), st.text(max_size=4), st.integers(0, 4)), min_size=1, max_size=30)


@given(EVENTS, st.integers(0, 100) | st.none(), st.booleans())
def test_gaps_per_token_add_up_to_the_time_between_first_and_last_token(
    parts: list[tuple[float, str, int]], total: int | None, running: bool
) -> None:
    at, so_far, events = 0.0, 0, []
    for wait, text, tokens in parts:
        at, so_far = at + wait, so_far + tokens
        events.append(said(at, text, "content" if text else "role", so_far if running else None))
    found = measure(timeline(*events, usage=Usage(1, total)))
    assert (found.token_counts >= 0).all()
    times = found.token_times
    if len(times) and found.token_counts[-1] > 0:
        assert found.itl.sum() == pytest.approx(times[-1] - times[0], abs=1e-9)
    if len(times):
        assert len(found.itl) == found.token_counts[1:].sum()
        assert found.token_counts[0] >= 1
    assert np.isfinite(found.itl).all()
