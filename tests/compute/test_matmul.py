"""Products: what numpy computes of the dequantized weights and the rounded activations; the same bits however
a row is batched, whoever computes it, and with whichever instructions."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.compute.harness import (
    QUANTIZED,
    Array,
    Bytes,
    Machine,
    dequantized,
    expert_product,
    format_of,
    interleaved,
    product,
    raw_bytes,
    rounded,
    same_bits,
)

from chabok.compute.blocks import FORMATS

FORMAT_NAMES = list(FORMATS)
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33)
GATED = ("silu", "gelu")
ERROR = 4e-6
"""Of a sum, relative to the sum of the activations' magnitudes times the largest weight: float32 sums."""


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def case(format_name: str, rows: int, n: int, k: int, seed: int = 0) -> tuple[Bytes, Array]:
    """A matrix [n, k] as in a file, and activations [rows, k]."""
    rng = np.random.default_rng([seed, rows, n, k])
    return raw_bytes(normal(rng, n, k), format_name), normal(rng, rows, k)


def exact(format_name: str, raw: Bytes, x: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The product in float64, and how far float32 sums may stray from it."""
    weight = dequantized(raw, format_name, x.shape[1]).astype(np.float64)
    seen = rounded(x) if format_of(format_name).quantized else x.astype(np.float64)
    allowed = ERROR * np.abs(seen).sum(axis=1, keepdims=True) * np.abs(weight).max(axis=1) + 1e-30
    return seen @ weight.T, allowed


def activate(epilogue: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    if epilogue == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def check(
    machine: Machine, format_name: str, rows: int, epilogue: str, bias: bool, n: int = 48, k: int = 256
) -> None:
    rng = np.random.default_rng([rows, n, k])
    shift = normal(rng, n) if bias else None
    if epilogue in GATED:
        gate, x = case(format_name, rows, n, k)
        up, _ = case(format_name, rows, n, k, seed=1)
        x /= 8
        (g, g_error), (u, u_error) = exact(format_name, gate, x), exact(format_name, up, x)
        row_bytes = format_of(format_name).row_bytes(k)
        both = interleaved(gate.reshape(n, row_bytes), up.reshape(n, row_bytes)).reshape(-1)
        ours = product(machine, format_name, both, x, epilogue=epilogue)
        wanted = activate(epilogue, g) * u
        allowed = 1.2 * g_error * np.abs(u) + u_error * np.abs(g) + 1e-6 * np.abs(g * u) + 1e-6
    else:
        raw, x = case(format_name, rows, n, k)
        before = normal(rng, rows, n) if epilogue == "add" else None
        ours = product(machine, format_name, raw, x, epilogue=epilogue, bias=shift, onto=before)
        wanted, allowed = exact(format_name, raw, x)
        for term in (shift, before):
            if term is not None:
                wanted, allowed = wanted + term, allowed + 1e-6
    excess = np.abs(ours - wanted) / allowed
    assert excess.max() <= 1, (np.unravel_index(excess.argmax(), excess.shape), excess.max())


@pytest.mark.parametrize("rows", [1, 4, 9, 33])
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_a_product_is_what_numpy_computes(format_name: str, rows: int, machine: Machine) -> None:
    check(machine, format_name, rows, "store", bias=False)


@pytest.mark.parametrize(
    ("format_name", "epilogue", "bias"),
    [("Q4_1", "add", False), ("Q8_0", "store", True), ("Q4_0", "add", True), ("Q4_1", "silu", False),
     ("Q5_0", "gelu", False), ("F16", "silu", False), ("F32", "store", True), ("BF16", "add", True)],
)  # fmt: skip
def test_what_becomes_of_a_sum_is_what_numpy_computes(
    format_name: str, epilogue: str, bias: bool, machine: Machine
) -> None:
    for rows in (1, 3, 7, 13):
        check(machine, format_name, rows, epilogue, bias)


@pytest.mark.wide
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("epilogue", "bias"),
    [("store", False), ("store", True), ("add", False), ("add", True), ("silu", False), ("gelu", False)],
)
@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_every_format_epilogue_and_number_of_rows(
    format_name: str, epilogue: str, bias: bool, rows: int, machine: Machine
) -> None:
    check(machine, format_name, rows, epilogue, bias)


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_long_rows_and_odd_sizes_are_summed_whole(format_name: str, best: Machine) -> None:
    k_of = (256, 512, 768, 2304) if format_of(format_name).block == 256 else (32, 96, 544, 1568)
    for k, (rows, n) in itertools.product(k_of, [(1, 1), (7, 33), (21, 80)]):
        check(best, format_name, rows, "store", bias=False, n=n, k=k)


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_a_row_does_not_depend_to_the_bit_on_the_rest_of_the_batch(
    format_name: str, machine: Machine
) -> None:
    raw, x = case(format_name, 33, 40, 768)
    together = product(machine, format_name, raw, x)
    for rows in ROWS:
        assert same_bits(product(machine, format_name, raw, x[33 - rows :]), together[33 - rows :]), rows


@pytest.mark.parametrize("format_name", ["Q4_1", "Q6_K", "F16"])
def test_the_number_of_threads_does_not_change_a_bit(format_name: str, best: Machine) -> None:
    for rows in (1, 3, 33):
        raw, x = case(format_name, rows, 400, 256)
        one = product(best, format_name, raw, x)
        for threads in (2, 3):
            assert same_bits(product(best, format_name, raw, x, threads=threads), one)


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_instruction_sets_agree_to_the_bit(format_name: str, machines: dict[str, Machine]) -> None:
    for rows in (1, 4, 9):
        raw, x = case(format_name, rows, 48, 768)
        results = [product(machine, format_name, raw, x) for machine in machines.values()]
        assert all(same_bits(results[0], other) for other in results[1:])


def whole_blocks(format_name: str, q: str, n: int, k: int) -> Bytes:
    """Blocks whose scales are one and whose values are all the largest, the smallest, or by turns."""
    fmt = FORMATS[format_name]
    blocks = np.zeros((n * k // fmt.block, fmt.block_bytes), np.uint8)
    one = np.array([1], np.float16).view(np.uint8)
    low, high = (0x80, 0x7F) if format_name == "Q8_0" else (0x00, 0xFF)
    blocks[:] = {"largest": high, "smallest": low}.get(q, 0)
    if q == "by turns":
        blocks[0::2], blocks[1::2] = low, high
    if format_name == "Q6_K":
        blocks[:, 208:210] = one
        blocks[:, 192:208] = np.array([1, -1] * 8, np.int8).view(np.uint8)
    elif fmt.nested:
        blocks[:, 0:2], blocks[:, 2:4] = one, one
        blocks[:, 4:16] = np.array([1] * 8 + [0x11] * 4, np.uint8)
    else:
        blocks[:, 0:2] = one
        if fmt.minimum:
            blocks[:, 2:4] = np.array([-3], np.float16).view(np.uint8)
    return blocks.reshape(-1)


@pytest.mark.parametrize("q", ["largest", "smallest", "by turns"])
@pytest.mark.parametrize("format_name", QUANTIZED)
def test_the_largest_weights_and_activations_do_not_saturate(
    format_name: str, q: str, machine: Machine
) -> None:
    """Everything is an integer below 2**24, so the sums must be exact."""
    raw = whole_blocks(format_name, q, 32, 256)
    rng = np.random.default_rng(0)
    signs = np.concatenate([np.ones((1, 256)), -np.ones((1, 256)), rng.choice([-1, 1], (7, 256))])
    x = (127 * signs).astype(np.float32)
    wanted = x.astype(np.float64) @ dequantized(raw, format_name, 256).astype(np.float64).T
    for rows in (1, 2, 9):
        assert np.array_equal(product(machine, format_name, raw, x[:rows]), wanted[:rows])


@pytest.mark.parametrize("format_name", QUANTIZED)
def test_every_weight_meets_its_own_activation(format_name: str, machine: Machine) -> None:
    """One activation at a time: the product is that column of the matrix, exactly."""
    k = 256
    raw, _ = case(format_name, 1, 32, k)
    x = (127 * np.eye(k)).astype(np.float32)
    column = 127 * dequantized(raw, format_name, k).astype(np.float64).T
    ours = product(machine, format_name, raw, x)
    biggest = np.abs(dequantized(raw, format_name, k)).max()
    assert np.abs(ours - column).max() <= 127 * 40 * 1e-6 * biggest
    assert same_bits(product(machine, format_name, raw, x[200:201]), ours[200:201])


@pytest.mark.parametrize("format_name", FORMAT_NAMES)
def test_rows_of_zeros_give_zeros(format_name: str, machine: Machine) -> None:
    raw, x = case(format_name, 9, 32, 256)
    x[[0, 4]] = 0
    x[5, ::2] = -0.0
    x[5, 1::2] = 0
    ours = product(machine, format_name, raw, x)
    assert not ours[[0, 4, 5]].any()
    assert ours[1].all()


@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e12, 1e25])
@pytest.mark.parametrize("format_name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_activations_of_any_size_scale_the_result(format_name: str, size: float, best: Machine) -> None:
    raw, x = case(format_name, 3, 32, 256)
    x = (x * np.float32(size)).astype(np.float32)
    wanted, allowed = exact(format_name, raw, x)
    assert (np.abs(product(best, format_name, raw, x) - wanted) <= allowed).all()


@pytest.mark.parametrize("format_name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize(
    "rows_of", [[0, 1, 0, 7, 2], [1, 1, 1, 1, 1], [0, 0, 0, 0, 19], [40, 0, 3, 0, 0]], ids=str
)
def test_each_expert_takes_its_own_rows(format_name: str, rows_of: list[int], best: Machine) -> None:
    rng = np.random.default_rng(4)
    n, k = 40, 256
    raw = [raw_bytes(normal(rng, n, k), format_name) for _ in rows_of]
    x = normal(rng, sum(rows_of), k)
    ours = expert_product(best, format_name, raw, x, rows_of)
    ends = np.cumsum(rows_of)
    for weights, m, end in zip(raw, rows_of, ends):
        if m:
            alone = product(best, format_name, weights, x[end - m : end])
            assert same_bits(ours[end - m : end], alone)
    assert same_bits(expert_product(best, format_name, raw, x, rows_of, threads=2), ours)


def test_gated_experts_are_gated_products(machine: Machine) -> None:
    rng = np.random.default_rng(5)
    raw = [raw_bytes(normal(rng, 64, 256), "Q4_1") for _ in range(3)]
    x = normal(rng, 12, 256)
    ours = expert_product(machine, "Q4_1", raw, x, [4, 0, 8], epilogue="silu")
    assert same_bits(ours[:4], product(machine, "Q4_1", raw[0], x[:4], epilogue="silu"))
    assert same_bits(ours[4:], product(machine, "Q4_1", raw[2], x[4:], epilogue="silu"))


def test_no_active_expert_is_no_work(best: Machine) -> None:
    raw = [raw_bytes(np.ones((32, 32), np.float32), "Q8_0")]
    assert expert_product(best, "Q8_0", raw, np.zeros((0, 32), np.float32), [0]).shape == (0, 32)
