"""Runs compared: what is slower is called worse, what is alike is not, and conditions decide exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.measure.runs import answer, write_run

from chabok.measure import Concurrent, Failure, MeasureError, Outcome, Window, measure, summarize
from chabok.measure.conditions import Condition
from chabok.measure.cost import Price
from chabok.measure.diff import Comparison, asides, common, pairs, unlike
from chabok.measure.report import METRICS, Found, Level, Report, recompute
from chabok.measure.report.sample import sample
from chabok.measure.run import About, RunFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def base(folder: Path) -> Found:
    return recompute(write_run(folder / "base.jsonl", users=(1, 4, 8), rounds=8))


@pytest.fixture(scope="module")
def slow(folder: Path) -> Found:
    return recompute(write_run(folder / "slow.jsonl", users=(1, 4, 8), rounds=8, slow=1.3, seed=2))


def verdicts(before: Found, after: Found) -> dict[tuple[str, str], str]:
    return {
        (pair.load, each.name): each.difference.verdict
        for pair in pairs(before, after)
        for each in pair.comparisons
        if each.difference is not None
    }


def exact(path: Path, ttfts: list[float], *, failed: int = 0, users: int = 1) -> Found:
    """A run with just these times to first token."""
    with RunFile(path, About(url=path.stem, price=Price.machine(3.6))) as file:
        for number, ttft in enumerate(ttfts):
            failure = Failure("http 500", "x") if number < failed else None
            file(answer(number, float(number), ttft=ttft, failure=failure))
        ends = float(len(ttfts))
        file.load(Outcome("one user", Concurrent(users, 1), 0.0, ends, Window(0.0, ends)))
        file.known(complete=True)
    return recompute(path)


def test_a_slower_run_is_worse_and_the_other_way_round_better(base: Found, slow: Found) -> None:
    found, back = verdicts(base, slow), verdicts(slow, base)
    for name in ("itl.p50", "tpot.p50", "e2e.p50", "throughput"):
        assert found["8 users", name] == "worse", name
        assert back["8 users", name] == "better", name


def test_the_same_machine_measured_again_is_hardly_ever_called_different(base: Found, folder: Path) -> None:
    again = [
        recompute(write_run(folder / f"again{seed}.jsonl", users=(1, 4, 8), rounds=8, seed=seed))
        for seed in (5, 6)
    ]
    found = [verdict for each in again for verdict in verdicts(base, each).values()]
    assert len(found) > 50
    assert sum(verdict != "no measurable difference" for verdict in found) <= 0.12 * len(found)


def test_a_run_differs_in_nothing_from_itself(base: Found) -> None:
    assert set(verdicts(base, base).values()) == {"no measurable difference"}
    for pair in pairs(base, base):
        assert all(each.before == each.after for each in pair.comparisons)


def test_too_few_requests_are_too_little_to_tell(tmp_path: Path) -> None:
    one, other = exact(tmp_path / "a.jsonl", [0.1]), exact(tmp_path / "b.jsonl", [0.2])
    [pair] = pairs(one, other)
    found = {each.name: each for each in pair.comparisons}
    assert found["ttft.p50"].difference is None
    assert found["ttft.p50"].before == pytest.approx(0.1)
    assert "ttft.p99" not in found


def test_failures_are_compared_in_points(tmp_path: Path) -> None:
    few, many = (
        exact(tmp_path / "a.jsonl", [0.1] * 100, failed=1),
        exact(tmp_path / "b.jsonl", [0.1] * 100, failed=30),
    )
    found: Comparison = next(each for each in pairs(few, many)[0].comparisons if each.metric.name == "failed")
    assert found.points
    assert found.difference is not None
    assert found.difference.share == pytest.approx(0.29)
    assert found.difference.verdict == "worse"
    good = exact(tmp_path / "c.jsonl", [0.1] * 100)
    assert not any(each.metric.name == "failed" for each in pairs(good, good)[0].comparisons)


def test_different_loads_are_named(base: Found, folder: Path) -> None:
    long = recompute(write_run(folder / "long.jsonl", users=(1, 4, 8), rounds=8, prompt=512))
    assert unlike(base, base) == []
    assert "prompts of 128 tokens and of 512" in unlike(base, long)
    other = recompute(write_run(folder / "other.jsonl", users=(2,)))
    assert unlike(base, other)[-1].startswith("no load in common")
    part = recompute(write_run(folder / "part.jsonl", users=(1, 2)))
    assert unlike(base, part) == []
    assert common([base, part]) == ["one user"]
    assert asides(base, part) == ["only one of the runs has: 4 users, 8 users, 2 users"]


def test_lengths_that_turned_out_differently_are_named(folder: Path) -> None:
    known = {"prompt_tokens": "", "output_tokens": ""}
    one = recompute(write_run(folder / "l1.jsonl", users=(1,), **known))
    other = recompute(write_run(folder / "l2.jsonl", users=(1,), tokens=60, **known))
    assert unlike(one, other) == ["one user: answers of 48 and of 60 tokens on average"]


# -- conditions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft.p95 > +10%", ("ttft", "p95", "", ">", 0.1, "share")),
        ("ttft.p99.9>=500ms", ("ttft", "p99.9", "", ">=", 0.5, "value")),
        ("itl.mean @ 8 users > +2.5ms", ("itl", "mean", "8 users", ">", 0.0025, "change")),
        ("itl.p50 @ 2 requests/s, poisson > 1s", ("itl", "p50", "2 requests/s, poisson", ">", 1.0, "value")),
        ("throughput < -5%", ("throughput", "", "", "<", -0.05, "share")),
        ("throughput < 100 tokens/s", ("throughput", "", "", "<", 100.0, "value")),
        ("speed.p50 <= 20", ("speed", "p50", "", "<=", 20.0, "value")),
        ("failed > 1%", ("failed", "", "", ">", 0.01, "value")),
        ("failed > 0", ("failed", "", "", ">", 0.0, "value")),
        ("failed > +2%", ("failed", "", "", ">", 0.02, "change")),
        ("cost.output > $0.20", ("cost", "output", "", ">", 0.2, "value")),
        ("  cost.request > +20%  ", ("cost", "request", "", ">", 0.2, "share")),
    ],
)
def test_conditions_are_read_as_written(text: str, expected: tuple[object, ...]) -> None:
    found = Condition.of(text)
    read = (found.metric, found.statistic, found.load, found.sign, found.bound, found.kind)
    assert read == (*expected[:4], pytest.approx(expected[4]), expected[5])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "METRIC.STATISTIC > VALUE"),
        ("ttft", "METRIC.STATISTIC > VALUE"),
        ("ttft.p95 10%", "METRIC.STATISTIC > VALUE"),
        ("ttft.p95 > ten", "METRIC.STATISTIC > VALUE"),
        ("ttft.p95 > 1.2.3s", "METRIC.STATISTIC > VALUE"),
        ("ttft.p95 > 10%", "a change has a sign"),
        ("ttft.p95 > 10", "has a unit"),
        ("ttft.p95 > +10", "has a unit"),
        ("ttft.p95 > 10 parsecs", "has a unit"),
        ("ttft > 10ms", "needs a statistic"),
        ("ttft.p0 > 10ms", "no statistic 'p0'"),
        ("ttft.p100 > 10ms", "no statistic 'p100'"),
        ("ttft.median > 10ms", "no statistic 'median'"),
        ("tffv.p50 > 10ms", "no metric 'tffv'"),
        ("throughput.p50 > 10", "one number per load"),
        ("throughput > 10ms", "unit 'ms'"),
        ("failed > 3", "in percent"),
        ("cost > 3", "cost needs one of"),
        ("cost.output @ 8 users > 3", "takes no load"),
        ("ttft.p50 > $3", "belongs to cost"),
    ],
)
def test_what_is_wrong_with_a_condition_is_said(text: str, said: str) -> None:
    with pytest.raises(MeasureError, match=said):
        Condition.of(text)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_condition_or_refused_in_words(text: str) -> None:
    try:
        found = Condition.of(text)
    except MeasureError:
        return
    assert found.metric in {*METRICS, "cost"}


TIMES = [0.1 + 0.001 * n for n in range(100)]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft.p50 > 149ms", True),
        ("ttft.p50 > 150ms", False),
        ("ttft.max >= 198ms", True),
        ("ttft.mean < 149.6ms", True),
        ("ttft.p99 > 300ms", False),
        ("failed > 0", False),
        ("request_rate < 0.99", False),
        ("cost.request > 0.002", False),
        ("cost.request > 0.0009", True),
    ],
)
def test_absolute_conditions_hold_one_run_to_its_value(tmp_path: Path, text: str, met: bool) -> None:
    found = Condition.of(text).judge([exact(tmp_path / "a.jsonl", TIMES)])
    assert [each.met for each in found] == [met]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("ttft.p50 > +19%", True),
        ("ttft.p50 > +21%", False),
        ("ttft.mean > +29ms", True),
        ("ttft.mean > +31ms", False),
        ("ttft.p95 < -1%", False),
        ("ttft.p50 > 170ms", True),
        ("failed > +1%", False),
    ],
)
def test_changes_are_taken_from_the_first_run(tmp_path: Path, text: str, met: bool) -> None:
    runs = [exact(tmp_path / "a.jsonl", TIMES), exact(tmp_path / "b.jsonl", [time * 1.2 for time in TIMES])]
    assert [each.met for each in Condition.of(text).judge(runs)] == [met]


@settings(max_examples=15, deadline=None)
@given(st.floats(0.5, 2.0), st.floats(-0.6, 1.2))
def test_a_change_and_its_opposite_are_never_both_met(factor: float, bound: float) -> None:
    runs = [_fixed(1.0), _fixed(factor)]
    more = Condition.of(f"ttft.p50 > {bound * 100:+.3f}%").judge(runs)[0].met
    less = Condition.of(f"ttft.p50 <= {bound * 100:+.3f}%").judge(runs)[0].met
    assert more != less


def _fixed(factor: float) -> Found:
    made = [answer(n, float(n), ttft=time * factor) for n, time in enumerate(TIMES[:5])]
    level = Level("one user", "one user", 1, summarize(made))
    report = Report("u", "m", levels=[level])
    return Found(report, [sample(level, [measure(each) for each in made])], [])


def test_a_percentile_that_the_sample_does_not_carry_fails_no_build_silently(tmp_path: Path) -> None:
    run = exact(tmp_path / "a.jsonl", TIMES[:50])
    with pytest.raises(MeasureError, match=r"ttft.p99 is not known with one user"):
        Condition.of("ttft.p99 > 1s").judge([run])
    with pytest.raises(MeasureError, match="no load is called '7 users'"):
        Condition.of("ttft.p50 @ 7 users > 1s").judge([run])
    with pytest.raises(MeasureError, match="a change needs two runs"):
        Condition.of("ttft.p50 > +1%").judge([run])


def test_surely_lets_only_measurable_changes_count(base: Found, slow: Found, folder: Path) -> None:
    again = recompute(write_run(folder / "noise.jsonl", users=(1, 4, 8), rounds=8, seed=9))
    tiny = Condition.of("itl.p50 > +0.0001%")
    assert all(each.met for each in tiny.judge([base, slow], surely=True))
    noise = [each.met for each in Condition.of("ttft.p50 > -99%").judge([base, again], surely=True)]
    assert not any(noise)
    with pytest.raises(MeasureError, match="cannot be told"):
        Condition.of("ttft.max > -99%").judge([base, slow], surely=True)
