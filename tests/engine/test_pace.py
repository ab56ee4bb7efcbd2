"""Chunks that fit into the time there is, foreseen from what rows cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chabok.engine.pace import ALONE_S, LEAST_CHUNK, Pace

BUDGET_S = 0.03


class Machine:
    """Steps that take a known time."""

    def __init__(self, step_s: float, decode_s: float, row_s: float, key_s: float) -> None:
        self.step_s, self.decode_s, self.row_s, self.key_s = step_s, decode_s, row_s, key_s

    def seconds(self, n_decode: int, position: int, n: int) -> float:
        keys = n * (position + n / 2)
        return self.step_s + self.decode_s * n_decode + self.row_s * n + self.key_s * keys


def read(machine: Machine, pace: Pace, n_decode: int, prompt: int, start: int = 0) -> list[tuple[float, int]]:
    """Read a prompt from a position on; seconds and rows of each step."""
    steps = []
    while start < prompt:
        time = pace.time(n_decode)
        n = min(max(pace.rows(start, time, n_decode > 0), LEAST_CHUNK), prompt - start)
        took = machine.seconds(n_decode, start, n)
        pace.observe(n_decode, [(start, n)], took)
        steps.append((took, n))
        start += n
    return steps


def generate(machine: Machine, pace: Pace, n_decode: int) -> None:
    for _ in range(5):
        pace.observe(n_decode, [], machine.seconds(n_decode, 0, 0))


SMALL = Machine(0.004, 0.0004, 0.0005, 4e-7)  # much like a model of 135 million weights on two cores


@pytest.mark.parametrize("n_decode", [1, 8])
def test_steps_stay_within_the_budget_as_attention_grows(n_decode: int) -> None:
    pace = Pace(BUDGET_S, 512)
    read(SMALL, pace, 0, 200)
    generate(SMALL, pace, n_decode)
    steps = read(SMALL, pace, n_decode, 4000)
    assert max(took for took, _ in steps) < 1.1 * BUDGET_S
    full = [took for took, _ in steps[5:-1]]
    assert sum(full) / len(full) > 0.75 * BUDGET_S


def test_a_prompt_that_begins_late_in_its_text_does_not_overrun() -> None:
    """The rest of a cached conversation: rows cost four times as much there as any that were seen."""
    pace = Pace(BUDGET_S, 512)
    generate(SMALL, pace, 1)
    for _ in range(10):
        read(SMALL, pace, 1, 300)
    assert max(took for took, _ in read(SMALL, pace, 1, 4200, 3900)) < 1.4 * BUDGET_S
    read(SMALL, pace, 1, 4000)
    for _ in range(20):
        read(SMALL, pace, 1, 300)
    assert max(took for took, _ in read(SMALL, pace, 1, 4200, 3900)) < 1.1 * BUDGET_S


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0, 0.01),
    st.floats(1e-5, 1e-3),
    st.floats(2e-5, 2e-3),
    st.floats(0, 1e-6),
    st.lists(st.tuples(st.integers(1, 8), st.integers(20, 3000), st.booleans()), min_size=1, max_size=5),
)
def test_no_step_takes_twice_the_budget_whatever_rows_cost(
    step_s: float, decode_s: float, row_s: float, key_s: float, prompts: list[tuple[int, int, bool]]
) -> None:
    machine, pace = Machine(step_s, decode_s, row_s, key_s), Pace(BUDGET_S, 512)
    read(machine, pace, 0, 100)
    for n_decode, prompt, alone in prompts:
        if alone:
            read(machine, pace, 0, prompt)
        generate(machine, pace, n_decode)
        for took, n in read(machine, pace, n_decode, prompt):
            assert took < 2 * BUDGET_S or n <= LEAST_CHUNK


def test_where_generating_takes_the_budget_prompts_get_half_as_much_again() -> None:
    pace = Pace(BUDGET_S, 512)
    slow = Machine(0.05, 0.0, 0.001, 0.0)
    generate(slow, pace, 1)
    steps = read(slow, pace, 1, 500)
    assert steps[-2][0] == pytest.approx(0.075, rel=0.1)


def test_steps_of_prompts_alone_are_short_enough_to_be_waited_for() -> None:
    pace = Pace(BUDGET_S, 512)
    slow = Machine(0.05, 0.0, 0.005, 1e-6)
    steps = read(slow, pace, 0, 3000)
    assert max(took for took, _ in steps[1:]) < 1.2 * ALONE_S
    assert sum(took for took, _ in steps[1:-1]) / len(steps[1:-1]) > 0.8 * ALONE_S


def test_one_slow_step_is_soon_forgotten_and_a_slower_machine_soon_noticed() -> None:
    pace = Pace(BUDGET_S, 512)
    generate(SMALL, pace, 1)
    for _ in range(3):
        read(SMALL, pace, 1, 500)
    before = pace.rows(0, 0.02, True)
    pace.observe(1, [(0, before)], 5.0)
    assert pace.rows(0, 0.02, True) >= before / 2
    read(SMALL, pace, 1, 1000)
    assert pace.rows(0, 0.02, True) >= 0.8 * before
    half = Machine(0.008, 0.0008, 0.001, 8e-7)
    steps = read(half, pace, 1, 1500)
    assert max(took for took, _ in steps[2:]) < 1.4 * BUDGET_S
