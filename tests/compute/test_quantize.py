"""Activations as lines of bytes, plain or normalized."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.compute.harness import Array, Machine, same_bits
from tests.compute.quantizing import EPS, Lines, quantize

from chabok.compute.kernels import matmul


def normalized(x: Array, norm: Array) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPS) * norm


@pytest.fixture
def x() -> Array:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((11, 96)).astype(np.float32) * rng.choice([1e-3, 1, 50], (11, 1))
    return values.astype(np.float32)


def test_bytes_are_the_nearest_multiples_of_the_scale(x: Array, machine: Machine) -> None:
    lines = Lines(quantize(machine, x)[0])
    groups = x.reshape(11, -1, 32).astype(np.float64)
    scale = np.abs(groups).max(axis=2) / 127
    assert np.allclose(lines.floats(matmul.X_SCALE), scale, rtol=2e-7, atol=0)
    assert np.abs(lines.q - groups / scale[..., None]).max() <= 0.5001
    assert np.abs(lines.q).max(axis=2).min() == 127


def test_sums_are_those_of_the_bytes(x: Array, machine: Machine) -> None:
    lines = Lines(quantize(machine, x)[0])
    total = lines.q.sum(axis=2)
    assert same_bits(
        lines.floats(matmul.X_MIN),
        (lines.floats(matmul.X_SCALE) * total.astype(np.float32)).astype(np.float32),
    )
    for zero, at in matmul.ZERO_FIELD.items():
        assert np.array_equal(lines.integers(at), -zero * total)
    assert np.array_equal(lines.integers(matmul.X_LOW32), -32 * lines.q[..., :16].sum(axis=2))
    assert np.array_equal(lines.integers(matmul.X_HIGH32), -32 * lines.q[..., 16:].sum(axis=2))


def test_a_second_line_holds_what_the_first_one_lost(x: Array, machine: Machine) -> None:
    both = quantize(machine, x, terms=2)[0].reshape(11, 2, -1)
    assert same_bits(both[:, 0], quantize(machine, x)[0])
    lines = Lines(both)
    values = (lines.q * lines.floats(matmul.X_SCALE)[..., None].astype(np.float64)).sum(axis=1)
    groups = x.reshape(11, -1, 32).astype(np.float64)
    assert np.all(np.abs(values - groups).max(axis=2) <= np.abs(groups).max(axis=2) / 127 / 127 / 3.9)


def test_a_norm_is_applied_before_rounding(x: Array, machine: Machine) -> None:
    norm = np.random.default_rng(1).uniform(0.5, 2, 96).astype(np.float32)
    floats = quantize(machine, x, norm, to_bytes=False)[0].view(np.float32)
    assert np.allclose(floats, normalized(x, norm), rtol=3e-6, atol=1e-9)
    assert same_bits(quantize(machine, x, norm), quantize(machine, floats))


def test_without_a_norm_floats_are_copied(x: Array, machine: Machine) -> None:
    assert same_bits(quantize(machine, x, to_bytes=False)[0].view(np.float32), x)


@pytest.mark.parametrize("to_bytes", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_shared_out_or_done_by_each_thread_rows_are_the_same(
    normed: bool, to_bytes: bool, x: Array, best: Machine
) -> None:
    norm = np.linspace(-1, 1, 96, dtype=np.float32) if normed else None
    wanted = quantize(best, x, norm, to_bytes=to_bytes)[0]
    assert same_bits(quantize(best, x, norm, to_bytes=to_bytes, threads=3)[0], wanted)
    for copy in quantize(best, x, norm, to_bytes=to_bytes, private=True, threads=3):
        assert same_bits(copy, wanted)


def test_instruction_sets_agree_to_the_bit(x: Array, machines: dict[str, Machine]) -> None:
    norm = np.linspace(0.1, 3, 96, dtype=np.float32)
    lines = [quantize(machine, x, norm) for machine in machines.values()]
    assert all(same_bits(lines[0], other) for other in lines[1:])


def test_zeros_stay_zeros_and_denormals_do_no_harm(machine: Machine) -> None:
    x = np.zeros((4, 64), np.float32)
    x[1] = -0.0
    x[2] = 1e-40
    x[3, 7] = 1e-31
    lines = Lines(quantize(machine, x)[0])
    assert not lines.q.any()
    assert np.isfinite(lines.floats(matmul.X_SCALE)).all()
    assert not lines.floats(matmul.X_MIN).any()
    normed = quantize(machine, x, np.ones(64, np.float32), to_bytes=False)[0].view(np.float32)
    assert np.isfinite(normed).all()


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10, 1e18])
def test_the_size_of_a_row_changes_only_its_scale(size: float, x: Array, best: Machine) -> None:
    scaled = (x * np.float32(2.0 ** round(np.log2(size)))).astype(np.float32)
    small, big = Lines(quantize(best, x)[0]), Lines(quantize(best, scaled)[0])
    assert np.array_equal(small.q, big.q)


def test_halves_are_rounded_to_even(machine: Machine) -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :7] = [127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    assert Lines(quantize(machine, x)[0]).q[0, 0, :7].tolist() == [127, 0, 2, 2, 0, -2, -2]


def test_no_rows_are_no_work(best: Machine) -> None:
    assert quantize(best, np.zeros((0, 32), np.float32)).size == 0
