"""Exponentials and activations against float64, over the whole range of floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from tests.compute.harness import Array, Machine, place, same_bits

from chabok.compute.emit import F32, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels import common
from chabok.compute.kernels.common import begin


@dataclass(frozen=True)
class Apply:
    """Applies one function of ``common`` to floats, a multiple of 16 of them."""

    name: str

    fields = ("x", "n", "out")

    @property
    def symbol(self) -> str:
        return f"apply_{self.name}"

    def emit(self, module: Module, isa: ISA) -> None:
        f, ops = begin(module, self.symbol, self.fields)
        with f.loop(0, ops.int("n"), 16) as i:
            value = getattr(common, self.name)(f, ops.ptr("x").at(i, 4).load(F32 * 16))
            ops.ptr("out").at(i, 4).store(value)


def apply(machine: Machine, name: str, x: Array) -> Array:
    padded = np.zeros(-(-len(x) // 16) * 16, np.float32)
    padded[: len(x)] = x
    out = place(np.full(len(padded), np.nan, np.float32))
    machine.run(Apply(name), x=place(padded), n=len(padded), out=out)
    return out[: len(x)]


def floats(low: float, high: float, n: int = 200_000) -> Array:
    return np.random.default_rng(0).uniform(low, high, n).astype(np.float32)


def every_exponent() -> Array:
    """Floats of every sign and exponent, denormals among them."""
    bits = np.random.default_rng(1).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = bits.view(np.float32)
    return values[np.isfinite(values)]


def relative_error(ours: Array, exact: np.ndarray) -> float:
    return float(np.abs(ours.astype(np.float64) / exact - 1).max())


def test_exp_is_within_its_documented_error(machine: Machine) -> None:
    x = np.concatenate([floats(-87.3, 88.3), floats(-1, 1), floats(-1e-6, 1e-6)])
    assert relative_error(apply(machine, "exp", x), np.exp(x.astype(np.float64))) < 2e-7


def test_exp_of_zero_is_one_and_of_tiny_numbers_too(machine: Machine) -> None:
    x = np.array([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-30, 1e-9], np.float32)
    assert apply(machine, "exp", x).tolist() == [1.0] * 7


def test_exp_beyond_its_range_is_zero_or_large_but_never_infinite(machine: Machine) -> None:
    low = np.array([-87.4, -100, -1e10, -3.4e38, -np.inf], np.float32)
    assert not apply(machine, "exp", low).any()
    high = apply(machine, "exp", np.array([88.4, 100, 1e10, 3.4e38, np.inf], np.float32))
    assert ((high > 2e38) & (high < 2.5e38)).all()


def test_exp_never_falls_by_more_than_its_error(machine: Machine) -> None:
    x = np.sort(floats(-90, 90))
    y = apply(machine, "exp", x).astype(np.float64)
    assert (y[1:] >= y[:-1] * (1 - 4e-7)).all()


def silu(x: np.ndarray) -> np.ndarray:
    return np.where(x < -700, 0, x / (1 + np.exp(-np.maximum(x, -700))))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-np.clip(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), -700, 700)))


CURVES = [("silu", silu), ("gelu_tanh", gelu)]


@pytest.mark.parametrize(("name", "exact"), CURVES)
def test_activations_are_within_a_few_units_of_the_last_place(
    name: str, exact: Callable[[np.ndarray], np.ndarray], machine: Machine
) -> None:
    x = np.concatenate([floats(-8, 8), floats(-1e-3, 1e-3), every_exponent()])
    x = x[(np.abs(x) > 1e-37) & (np.abs(x) < 1e30)]
    wide = x.astype(np.float64)
    ours = apply(machine, name, x).astype(np.float64)
    large = wide > -8
    assert np.abs(ours[large] / exact(wide[large]) - 1).max() < 6e-6
    # Far below zero only the absolute error matters: the result is next to nothing.
    assert np.abs(ours[~large] - exact(wide[~large])).max() < 5e-8


@pytest.mark.parametrize(("name", "_"), CURVES)
def test_activations_of_the_largest_and_smallest_numbers_are_finite(
    name: str, _: object, machine: Machine
) -> None:
    x = np.array([3.4e38, 1e20, 1e-45, -1e-45, 0.0, -1e20, -1e25], np.float32)
    ours = apply(machine, name, x)
    assert np.isfinite(ours).all()
    assert ours[:2].tolist() == x[:2].tolist()
    assert np.abs(ours[2:]).max() < 1e-12


@pytest.mark.parametrize("name", ["exp", "silu", "gelu_tanh"])
def test_instruction_sets_agree_to_the_bit(name: str, machines: dict[str, Machine]) -> None:
    x = np.concatenate([floats(-90, 90), every_exponent()])
    results = [apply(machine, name, x) for machine in machines.values()]
    assert all(same_bits(results[0], other) for other in results[1:])
