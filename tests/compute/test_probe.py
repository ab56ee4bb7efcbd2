"""Kernels that measure the machine: that what they time is really done."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.harness import Machine, place

from chabok.compute.kernels.dot import Dot
from chabok.compute.kernels.probe import Multiply
from chabok.compute.peak import multiply_add_peak


@pytest.mark.parametrize("threads", [1, 2])
def test_the_peak_is_of_sums_that_are_right_to_the_bit(machine: Machine, threads: int) -> None:
    kernel, isa = Multiply(), machine.isa
    lanes, rows, pieces = Dot(isa, 4).lanes, Multiply.rows(machine.isa), 5
    rng = np.random.default_rng(0)
    weights = rng.integers(0, 16, (kernel.STEPS, 2, lanes, 4)).astype(np.uint8)
    x = rng.integers(-127, 128, (kernel.STEPS, rows, 4)).astype(np.int8)
    out = place(np.zeros((threads, rows, 2, lanes), np.int32))
    machine.run(kernel, threads=threads, weights=place(weights), x=place(x), pieces=pieces, out=out)
    once = np.einsum("kslj,krj->rsl", weights.astype(np.int64), x.astype(np.int64))
    expected = (once * pieces * kernel.PASSES).astype(np.int32)
    np.testing.assert_array_equal(out.sum(axis=0, dtype=np.int32), expected)


def test_its_count_of_multiply_adds_is_that_of_its_panel(machine: Machine) -> None:
    lanes, rows = Dot(machine.isa, 4).lanes, Multiply.rows(machine.isa)
    assert Multiply().multiply_adds(machine.isa) == Multiply.PASSES * Multiply.STEPS * 4 * rows * 2 * lanes


def test_a_peak_is_a_rate(best: Machine) -> None:
    assert multiply_add_peak(best.library, 1, pieces=20, rounds=2) > 1e8
