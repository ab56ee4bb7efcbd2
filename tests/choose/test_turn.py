"""What a faster model gives a turn: the law on chains, the law on graphs."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chabok.choose.turn import Speed, Step, Threshold, Turn, amdahl, examine, felt_up_to, few
from chabok.measure.failures import MeasureError

TIMES = st.floats(0, 100).map(lambda value: round(value, 3))
FACTORS = st.floats(1, 1000)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    """Graphs of up to a dozen steps, in some order."""
    steps = []
    for n in range(draw(st.integers(1, 12))):
        before = draw(st.lists(st.sampled_from(range(n)), unique=True, max_size=3)) if n else []
        kind = draw(st.sampled_from(("model", "tool", "human", "other")))
        prefill, reasoning, answer, rest = (draw(TIMES) if kind == "model" else 0.0 for _ in range(4))
        seconds = prefill + reasoning + answer + rest if kind == "model" else draw(TIMES)
        after = tuple(str(each) for each in before)
        steps.append(Step(str(n), kind, seconds, after, draw(TIMES), "", prefill, reasoning, answer))
    steps[0] = Step("0", "tool", steps[0].seconds + 0.5)
    return Turn(tuple(draw(st.permutations(steps))), draw(TIMES))


def chain(*steps: Step) -> Turn:
    linked = [steps[0]]
    for step in steps[1:]:
        linked.append(Step(step.id, step.kind, step.seconds, (linked[-1].id,), step.lag_s))
    return Turn(tuple(linked))


def test_five_times_the_model_speed_is_twice_the_turn_where_five_eighths_are_the_models() -> None:
    # 50 -> 250 tokens/s, a turn of 10 s: 1 / (0.375 + 0.625 / 5) = 2.
    turn = few(tokens=312.5, speed=50, tools=2.5, human=1.25)
    assert turn.seconds() == pytest.approx(10)
    assert turn.seconds() / turn.seconds(250 / 50) == pytest.approx(2)
    assert examine(turn).ceiling == pytest.approx(1 / 0.375)


@given(turns(), FACTORS, FACTORS)
def test_a_faster_model_never_makes_a_turn_slower_and_never_beats_the_ceiling(
    turn: Turn, one: float, other: float
) -> None:
    slow, fast = sorted((one, other))
    assert turn.seconds(fast) <= turn.seconds(slow) * (1 + 1e-9)
    assert turn.seconds(fast) >= turn.seconds(math.inf) * (1 - 1e-9)
    assert turn.seconds() / turn.seconds(fast) <= fast * (1 + 1e-9)


@given(turns())
def test_the_same_speed_changes_nothing(turn: Turn) -> None:
    assert turn.seconds(1.0) == pytest.approx(turn.walk().seconds)
    assert examine(turn, [1.0]).gains[0].speedup == pytest.approx(1.0)


@given(turns())
def test_a_turn_takes_as_long_as_its_longest_chain(turn: Turn) -> None:
    by_id = {step.id: step for step in turn.steps}

    def longest(name: str) -> float:
        step = by_id[name]
        return max((longest(each) for each in step.after), default=0.0) + step.lag_s + step.seconds

    expected = max(longest(step.id) for step in turn.steps) + turn.tail_s
    assert turn.seconds() == pytest.approx(expected)


@given(turns())
def test_parts_sum_to_the_turn(turn: Turn) -> None:
    for factor in (1.0, 3.0):
        walk = turn.walk(Speed.of(factor))
        assert sum(walk.parts().values()) == pytest.approx(walk.seconds)


@given(
    st.lists(st.tuples(st.sampled_from(("model", "tool", "human")), TIMES), min_size=1, max_size=8), FACTORS
)
def test_a_chain_is_a_sum_and_follows_amdahls_law(parts: list[tuple[str, float]], factor: float) -> None:
    steps = [Step(str(n), kind, seconds) for n, (kind, seconds) in enumerate(parts)]  # type: ignore[arg-type]
    turn = chain(Step("start", "other", 1.0), *steps)
    total = 1.0 + sum(seconds for _, seconds in parts)
    share = sum(seconds for kind, seconds in parts if kind == "model") / total
    assert turn.seconds() == pytest.approx(total)
    assert turn.seconds() / turn.seconds(factor) == pytest.approx(amdahl(share, factor))


@given(turns(), st.floats(0.01, 0.4), st.floats(0.001, 5))
def test_beyond_the_point_no_doubling_is_felt_and_before_it_each_is(
    turn: Turn, share: float, seconds: float
) -> None:
    threshold = Threshold(share, seconds)
    point = felt_up_to(turn, threshold)
    if 2**-20 < point < 2**40:
        for factor in (point * 1.01, point * 3, point * 50):
            assert not threshold.felt(turn.seconds(factor), turn.seconds(2 * factor))
        for factor in (point * 0.99, point / 3, point / 50):
            assert threshold.felt(turn.seconds(factor), turn.seconds(2 * factor))


def test_tools_that_run_side_by_side_take_the_time_of_the_longest() -> None:
    steps = (
        Step("plan", "model", 2.0),
        Step("grep", "tool", 3.0, ("plan",)),
        Step("test", "tool", 5.0, ("plan",)),
        Step("sum", "model", 1.0, ("grep", "test")),
    )
    report = examine(Turn(steps))
    assert report.seconds == 8.0
    assert [step.id for step in report.turn.walk().path] == ["plan", "test", "sum"]
    assert report.hidden_s == pytest.approx(3.0)
    assert report.parts == {"model": 3.0, "tool": 5.0}


def test_another_chain_decides_once_the_model_is_fast() -> None:
    steps = (
        Step("think", "model", 6.0),
        Step("search", "tool", 4.0),
        Step("answer", "model", 1.0, ("think", "search")),
    )
    turn = Turn(steps)
    assert turn.seconds() == 7.0
    assert turn.seconds(2) == pytest.approx(4.5)  # the search now takes longer than the thinking
    assert turn.seconds(math.inf) == 4.0


def test_only_what_the_model_writes_is_faster_if_so_asked() -> None:
    step = Step("a", "model", 3.0, prefill_s=1.0, reasoning_s=1.0, answer_s=1.0)
    assert Turn((step,)).walk(Speed(1.0, 2.0)).seconds == 2.0


def test_steps_may_come_in_any_order_but_not_in_a_circle() -> None:
    late, early = Step("b", "tool", 1.0, ("a",)), Step("a", "model", 1.0)
    assert [step.id for step in Turn((late, early)).steps] == ["a", "b"]
    with pytest.raises(MeasureError, match="wait for each other"):
        Turn((Step("a", "tool", 1.0, ("b",)), Step("b", "tool", 1.0, ("a",))))
    with pytest.raises(MeasureError, match="not there"):
        Turn((Step("a", "tool", 1.0, ("b",)),))
    with pytest.raises(MeasureError, match="two steps"):
        Turn((Step("a", "tool", 1.0), Step("a", "tool", 1.0)))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(MeasureError, match="0 or more"):
        Step("a", "tool", -1.0)
    with pytest.raises(MeasureError, match="stages"):
        Step("a", "model", 1.0, prefill_s=2.0)
    with pytest.raises(MeasureError, match="no time"):
        examine(Turn((Step("a", "tool", 0.0),)))
    with pytest.raises(MeasureError, match="times as fast"):
        examine(few(model_seconds=1), [0.0])
    with pytest.raises(MeasureError, match="leave one"):
        few(model_seconds=1, tokens=500, speed=50)


def test_a_turn_of_the_model_alone_has_no_ceiling() -> None:
    report = examine(few(model_seconds=4.0))
    assert report.ceiling == math.inf
    assert report.to_dict()["ceiling"] is None
    assert report.felt_up_to == pytest.approx(4.0 / 2 / 0.1, rel=1e-3)  # 4 s / f, half of it saved: 100 ms


def test_a_report_is_plain_data_and_shows_itself_in_notebooks() -> None:
    report = examine(few(tokens=100, speed=50, tools=1))
    assert json.loads(json.dumps(report.to_dict()))["tokens_per_s"] == pytest.approx(50)
    assert report._repr_svg_().startswith("<svg")
    assert "xmlns" in report._repr_svg_()
    assert "<table>" in report._repr_html_()
