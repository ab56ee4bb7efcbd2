"""What happens to rows between products, against numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.compute.harness import (
    Array,
    Machine,
    count,
    dequantized,
    format_of,
    packed,
    place,
    raw_bytes,
    same_bits,
)
from tests.compute.quantizing import fields, quantize

from chabok.compute.blocks import FORMATS
from chabok.compute.kernels import matmul
from chabok.compute.kernels.rows import SUMMARY_RUN, AddNorm, Embed, Gate, Gather, Pick, Summarize
from chabok.compute.memory import aligned

Wide = NDArray[np.float64]


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# -- embedding ----------------------------------------------------------------------------------------------


def embed(
    machine: Machine, table: Array, name: str, tokens: list[int], scale: float, private: bool, threads: int
) -> tuple[Array, Array]:
    """Rows as they come out, [copies, rows, k], and as the gguf package reads them."""
    k, fmt, rows = table.shape[1], format_of(name), len(tokens)
    raw = raw_bytes(table, name)
    copies = threads if private else 1
    out = place(np.full((copies, rows, k), np.nan, np.float32))
    machine.run(
        Embed(name, private), threads=threads,
        rows=count(rows), tokens=place(np.array(tokens, np.int32)), table=packed(raw, name, k),
        strip_bytes=fmt.strip_bytes(k), units=k // fmt.unit, scale=scale, out=out, out_stride=4 * k,
        out_private=4 * k * rows if private else 0,
    )  # fmt: skip
    return out, dequantized(raw, name, k)[tokens]


@pytest.mark.parametrize("name", list(FORMATS))
def test_embedded_rows_are_the_dequantized_ones_to_the_bit(name: str, machine: Machine) -> None:
    tokens = [0, 76, 15, 16, 17, 31, 32, 0, 63, 64]
    out, wanted = embed(machine, normal(77, 256), name, tokens, 1.0, private=False, threads=1)
    assert np.array_equal(out[0], wanted)


@pytest.mark.parametrize("name", ["F32", "Q4_1", "Q6_K"])
def test_embedded_rows_are_scaled(name: str, best: Machine) -> None:
    out, wanted = embed(best, normal(40, 256), name, [39, 3], 25.2982, private=False, threads=2)
    assert np.array_equal(out[0], wanted * np.float32(25.2982))


def test_each_thread_embeds_into_its_own_copy(best: Machine) -> None:
    out, wanted = embed(best, normal(40, 256), "Q5_K", [5, 6, 7], 1.0, private=True, threads=3)
    for copy in out:
        assert np.array_equal(copy, wanted)


# -- residual sums ------------------------------------------------------------------------------------------


def add(machine: Machine, x: Array, y: Array, norm: Array, private: bool, threads: int) -> Array:
    rows, k = x.shape
    copies = threads if private else 1
    streams = place(np.stack([x] * copies))
    machine.run(
        AddNorm(private), threads=threads,
        rows=count(rows), x=streams, x_stride=4 * k, x_private=4 * rows * k if private else 0, y=place(y),
        y_stride=4 * k, k=k, norm=place(norm), eps=1e-6,
    )  # fmt: skip
    return streams


@pytest.mark.parametrize("private", [False, True])
def test_rows_are_normalized_before_they_are_added(private: bool, machine: Machine) -> None:
    x, y, norm = normal(9, 96), 30 * normal(9, 96, seed=1), normal(96, seed=2)
    wide = y.astype(np.float64)
    wanted = x + wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    for copy in add(machine, x, y, norm, private, threads=2):
        assert np.abs(copy - wanted).max() < 3e-6


# -- gates --------------------------------------------------------------------------------------------------


def silu(x: Wide) -> Wide:
    return x / (1 + np.exp(-x))


def gelu(x: Wide) -> Wide:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gate(
    machine: Machine, activation: str, g: Array, u: Array, to_bytes: bool, private: bool = False
) -> Array:
    rows, k = g.shape
    stride = k // 32 * matmul.LINE if to_bytes else 4 * k
    copies = 2 if private else 1
    out = aligned(copies * rows * stride)
    machine.run(
        Gate(activation, to_bytes, private), threads=2,
        rows=count(rows), gate=place(g), up=place(u), stride=4 * k, k=k, out=out, out_stride=stride,
        out_private=rows * stride if private else 0,
    )  # fmt: skip
    return out.view(np.float32).reshape(copies, rows, -1)


@pytest.mark.parametrize(("activation", "wanted"), [("silu", silu), ("gelu", gelu)])
def test_gates_are_what_numpy_computes(
    activation: str, wanted: Callable[[Wide], Wide], machine: Machine
) -> None:
    g, u = 6 * normal(7, 160), normal(7, 160, seed=1)
    out = gate(machine, activation, g, u, to_bytes=False)[0]
    assert np.abs(out - wanted(g.astype(np.float64)) * u).max() < 1e-5


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gates_as_bytes_are_the_rounded_floats(activation: str, machine: Machine) -> None:
    g, u = 3 * normal(7, 96), normal(7, 96, seed=1)
    floats = gate(machine, activation, g, u, to_bytes=False)[0]
    lines = gate(machine, activation, g, u, to_bytes=True, private=True)
    for copy in lines:
        assert same_bits(fields(copy.view(np.uint8)), fields(quantize(machine, floats)[0]))


# -- choosing rows and summing up ---------------------------------------------------------------------------


def test_chosen_rows_are_copied(best: Machine) -> None:
    x, index = normal(20, 48), np.array([19, 0, 0, 7, 3, 12], np.int64)
    out = place(np.zeros((6, 48), np.float32))
    best.run(
        Gather(), threads=2, rows=count(6), index=place(index), x=place(x), x_stride=4 * 48, k=48, out=out,
        out_stride=4 * 48,
    )  # fmt: skip
    assert same_bits(out, x[index])


def summarize(
    machine: Machine, logits: Array, cap: float = 0.0, threads: int = 1, scale: float = 1.0
) -> tuple[Array, Array, NDArray[np.float64]]:
    """Logits as they are afterwards, maxima of blocks, peaks and sums of runs."""
    rows, n = logits.shape
    width = -(-n // 32) * 32
    held = place(np.full((rows + 1, width), 1e9, np.float32))
    held[:rows, :n] = logits
    maxima = place(np.full((rows, -(-n // 64)), np.nan, np.float32))
    sums = place(np.full((rows, -(-n // SUMMARY_RUN), 2), np.nan))
    machine.run(
        Summarize(cap > 0), threads=threads,
        rows=count(rows), logits=held, stride=4 * width, n=n, cap=float(cap), maxima=maxima,
        maxima_stride=maxima.strides[0], sums=sums, sums_stride=sums.strides[0],
        scales=place(np.full(rows, scale, np.float32)),
    )  # fmt: skip
    return held[:rows, :n].copy(), maxima, sums


SIZES = [1, 15, 16, 17, 63, 64, 65, 269, 4095, 4096, 4097, 4161, 9000, 32003]


@pytest.mark.parametrize("scale", [1.0, 0.4, 20.0])
@pytest.mark.parametrize("n", SIZES)
def test_a_summary_says_what_numpy_finds(n: int, scale: float, machine: Machine) -> None:
    logits = 8 * normal(3, n)
    logits[0] -= 50
    after, maxima, sums = summarize(machine, logits, threads=2, scale=scale)
    assert same_bits(after, logits)
    for row in range(3):
        blocks = [logits[row, i : i + 64].max() for i in range(0, n, 64)]
        assert maxima[row].tolist() == blocks
        for run, (peak, total) in enumerate(sums[row]):
            part = logits[row, run * SUMMARY_RUN : (run + 1) * SUMMARY_RUN].astype(np.float64)
            assert peak == part.max()
            assert total == pytest.approx(np.exp(np.float32(scale) * (part - peak)).sum(), rel=2e-6)


def test_where_no_sum_is_wanted_none_is_made(best: Machine) -> None:
    _, maxima, sums = summarize(best, normal(2, 300), scale=0.0)
    assert np.isfinite(maxima).all()
    assert (sums[:, :, 1] == 0).all()


@pytest.mark.parametrize("n", [17, 269, 4161])
def test_a_cap_bends_logits_in_place_and_the_summary_follows(n: int, machine: Machine) -> None:
    logits = 40 * normal(2, n)
    after, maxima, sums = summarize(machine, logits, cap=30.0)
    assert np.abs(after - 30 * np.tanh(logits.astype(np.float64) / 30)).max() < 1e-4
    plain = summarize(machine, after)
    assert same_bits(maxima, plain[1])
    assert same_bits(sums, plain[2])


def pick(machine: Machine, logits: Array, threads: int = 1) -> list[int]:
    rows, n = logits.shape
    _, maxima, sums = summarize(machine, logits)
    best = place(np.full(rows, -1, np.int64))
    machine.run(
        Pick(), threads=threads,
        rows=count(rows), logits=place(logits), stride=4 * n, n=n, maxima=place(maxima),
        maxima_stride=maxima.strides[0], sums=place(sums), sums_stride=sums.strides[0], best=best,
    )  # fmt: skip
    return best.tolist()


@pytest.mark.parametrize("n", SIZES)
def test_the_best_is_picked_and_the_lowest_among_equals(n: int, machine: Machine) -> None:
    logits = 8 * normal(9, n)
    logits[4:] = np.rint(logits[4:] / 8)
    logits[7] = 0
    logits[8] = -np.inf
    logits[8, -1] = -1e30
    assert pick(machine, logits, threads=2) == logits.argmax(axis=1).tolist()


def test_logits_that_are_ruled_out_do_not_disturb_the_summary(best: Machine) -> None:
    logits = normal(2, 300)
    logits[0, 64:128] = -np.inf
    logits[1, ::2] = -1e30
    _, maxima, sums = summarize(best, logits)
    assert maxima[0, 1] == -np.inf
    assert sums[0, 0, 1] == pytest.approx(
        np.exp(logits[0].astype(np.float64) - sums[0, 0, 0]).sum(), rel=2e-6
    )
    assert np.isfinite(sums).all()


def test_instruction_sets_agree_to_the_bit(machines: dict[str, Machine]) -> None:
    g, u, logits, norm = 3 * normal(5, 96), normal(5, 96, seed=1), 9 * normal(2, 5000), normal(96, seed=2)
    results = [
        (
            gate(m, "silu", g, u, to_bytes=False),
            gate(m, "gelu", g, u, to_bytes=True),
            add(m, g, u, norm, False, 1),
            *summarize(m, logits, cap=20.0),
        )
        for m in machines.values()
    ]
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))
