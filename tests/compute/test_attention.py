"""Attention over pages: what numpy computes, the same bits however the work is cut."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.attending import SPAN, Heads, Sequence, no_turn, oracle, turn
from tests.compute.harness import Array, Machine, place, same_bits
from tests.compute.quantizing import fields, quantize

from chabok.compute.kernels.attention import PAGE

HEADS = [
    Heads(32, 8), Heads(64, 1), Heads(64, 3), Heads(96, 2), Heads(128, 4), Heads(128, 7), Heads(256, 4),
    Heads(64, 3, window=100), Heads(256, 2, window=512), Heads(64, 4, cap=5.0),
    Heads(128, 2, window=30, cap=20.0),
]  # fmt: skip
ERROR = 3e-5


def rows_of(heads: Heads, n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, heads.width)).astype(np.float32)


def table_of(heads: Heads, n: int) -> Array:
    angles = np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, heads.dim, 2) / heads.dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def prefill(machine: Machine, heads: Heads, qkv: Array, table: Array, scale: float) -> tuple[Sequence, Array]:
    sequence = Sequence(machine, heads, len(qkv))
    return sequence, sequence.store(qkv, 0, table, scale=scale)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_is_what_numpy_computes(heads: Heads, machine: Machine) -> None:
    n, scale = 2 * PAGE + 5, 1.5 / np.sqrt(heads.dim)
    qkv, table = rows_of(heads, n), table_of(heads, n)
    sequence, turned = prefill(machine, heads, qkv, table, scale)
    ours = sequence.attend(turned, 0)
    assert np.abs(ours - oracle(heads, qkv, table, scale, slice(0, n))).max() < ERROR


@pytest.mark.wide
@pytest.mark.parametrize("cap", [0.0, 8.0])
@pytest.mark.parametrize("window", [0, 1, 64, 200])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_every_shape_of_head_is_what_numpy_computes(
    dim: int, group: int, window: int, cap: float, machine: Machine
) -> None:
    heads = Heads(dim, group, window=window, cap=cap)
    n, scale = SPAN + PAGE + 7, 1 / np.sqrt(dim)
    qkv, table = rows_of(heads, n), table_of(heads, n)
    sequence, turned = prefill(machine, heads, qkv, table, scale)
    for start, size in [(0, 70), (PAGE - 1, 3), (SPAN - 9, 19), (n - 1, 1)]:
        ours = sequence.attend(turned[start : start + size], start)
        assert np.abs(ours - oracle(heads, qkv, table, scale, slice(start, start + size))).max() < ERROR


@pytest.mark.parametrize(
    "heads", [Heads(64, 3), Heads(32, 4, window=600), Heads(64, 2, window=50), Heads(32, 2, cap=9.0)], ids=str
)
def test_long_sequences_are_whole_across_pages_and_spans(heads: Heads, best: Machine) -> None:
    n, scale = 1100, 0.2
    qkv, table = rows_of(heads, n), table_of(heads, n)
    sequence, turned = prefill(best, heads, qkv, table, scale)
    for start, size in [(505, 17), (1015, 30), (n - 1, 1)]:
        ours = sequence.attend(turned[start : start + size], start)
        assert np.abs(ours - oracle(heads, qkv, table, scale, slice(start, start + size))).max() < ERROR


@pytest.mark.parametrize("heads", [Heads(64, 3), Heads(64, 2, window=300), Heads(96, 1, cap=4.0)], ids=str)
def test_spans_shared_out_give_the_bits_of_spans_taken_in_turn(heads: Heads, machine: Machine) -> None:
    n = 3 * max(SPAN, 4 * PAGE) + 11
    sequence, turned = prefill(machine, heads, rows_of(heads, n), table_of(heads, n), 0.3)
    for start in (SPAN, SPAN + 1, n - 1):
        row = turned[start : start + 1]
        whole = sequence.attend(row, start)
        assert same_bits(sequence.attend(row, start, split=True), whole)
        assert same_bits(sequence.attend(row, start, split=True, threads=3), whole)


@pytest.mark.parametrize(
    "heads", [Heads(64, 3), Heads(128, 1), Heads(64, 2, window=70), Heads(32, 8)], ids=str
)
def test_how_rows_are_cut_into_items_does_not_change_a_bit(heads: Heads, machine: Machine) -> None:
    start, size = max(SPAN, 2 * PAGE) - 20, 40
    n = start + size
    sequence, turned = prefill(machine, heads, rows_of(heads, n), table_of(heads, n), 0.3)
    rows = turned[start:]
    alone = sequence.attend(rows, start, blocks=[1] * size)
    for blocks in ([16, 16, 8], [1, 2, 3, 4, 5, 6, 7, 8, 4], [11, 13, 16]):
        assert same_bits(sequence.attend(rows, start, blocks=blocks), alone)
    assert same_bits(sequence.attend(rows, start, threads=2), alone)


def test_instruction_sets_agree_to_the_bit(machines: dict[str, Machine]) -> None:
    heads = Heads(64, 3, window=150, cap=7.0)
    n = 300
    results = []
    for machine in machines.values():
        sequence, turned = prefill(machine, heads, rows_of(heads, n), table_of(heads, n), 0.3)
        results.append(sequence.attend(turned, 0))
    assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize("heads", [Heads(64, 2), Heads(64, 2, window=20), Heads(64, 2, cap=3.0)], ids=str)
def test_what_lies_in_unwritten_slots_of_a_page_does_not_leak(heads: Heads, machine: Machine) -> None:
    n = PAGE + 3
    qkv, table = rows_of(heads, n), no_turn(n, heads.dim)
    results = []
    for junk in (0.0, 65504.0, -65504.0):
        sequence = Sequence(machine, heads, n, junk=junk)
        results.append(sequence.attend(sequence.store(qkv, 0, table), 0))
    assert all(same_bits(results[0], other) for other in results[1:])


def test_a_layer_does_not_touch_its_neighbours(best: Machine) -> None:
    heads = Heads(64, 2)
    sequence = Sequence(best, heads, PAGE, layers=3)
    before = sequence.memory.copy()
    sequence.store(rows_of(heads, PAGE), 0, no_turn(PAGE, 64))
    assert same_bits(sequence.memory[: sequence.layer], before[: sequence.layer])
    assert not np.array_equal(sequence.memory[sequence.layer :], before[sequence.layer :])


def test_storing_in_pieces_files_what_storing_at_once_files(machine: Machine) -> None:
    heads = Heads(96, 3)
    n = 3 * PAGE
    qkv, table = rows_of(heads, n), table_of(heads, n)
    at_once, in_pieces = Sequence(machine, heads, n), Sequence(machine, heads, n)
    turned = at_once.store(qkv, 0, table, threads=2)
    start = 0
    for size in (1, 62, 2, 16, 17, 94):
        part = in_pieces.store(qkv[start : start + size], start, table)
        assert same_bits(part, turned[start : start + size])
        start += size
    assert start == n
    assert same_bits(in_pieces.memory, at_once.memory)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_queries_are_turned_and_scaled_in_place(dim: int, machine: Machine) -> None:
    heads = Heads(dim, 2)
    qkv, table = rows_of(heads, 20), table_of(heads, 50)
    turned = Sequence(machine, heads, 64).store(qkv, 30, table, scale=0.25)
    queries = qkv.reshape(20, -1, dim)[:, : heads.queries].astype(np.float64)
    wanted = 0.25 * turn(queries, table[30:50])
    assert np.abs(turned.reshape(20, -1, dim)[:, : heads.queries] - wanted).max() < 2e-6
    assert same_bits(turned[:, heads.queries * dim :], qkv[:, heads.queries * dim :])


def test_heads_with_norms_are_normalized_before_they_turn(machine: Machine) -> None:
    heads, n = Heads(64, 2), 40
    rng = np.random.default_rng(3)
    qkv, table = 5 * rows_of(heads, n), table_of(heads, n)
    norms = rng.uniform(0.5, 2, 64).astype(np.float32), rng.uniform(0.5, 2, 64).astype(np.float32)
    sequence = Sequence(machine, heads, n)
    turned = sequence.store(qkv, 0, table, scale=0.1, norms=norms)
    parts = qkv.astype(np.float64).reshape(n, -1, 64)
    parts[:, : heads.queries + heads.kv] /= np.sqrt(
        (parts[:, : heads.queries + heads.kv] ** 2).mean(axis=2, keepdims=True) + 1e-6
    )
    parts[:, : heads.queries] *= norms[0]
    parts[:, heads.queries : heads.queries + heads.kv] *= norms[1]
    wanted = oracle(heads, parts.reshape(n, -1).astype(np.float32), table, 0.1, slice(0, n))
    assert np.abs(sequence.attend(turned, 0) - wanted).max() < 1e-3


def test_values_too_large_for_sixteen_bits_are_kept_finite(machine: Machine) -> None:
    heads = Heads(32, 1, kv=1)
    qkv = np.zeros((1, heads.width), np.float32)
    qkv[0, 32:64] = 1e30
    qkv[0, 64:80], qkv[0, 80:96] = 1e30, -np.inf
    sequence = Sequence(machine, heads, 1)
    ours = sequence.attend(sequence.store(qkv, 0, no_turn(1, 32)), 0)
    assert ours[0].tolist() == [65504.0] * 16 + [-65504.0] * 16


def test_scores_of_any_size_make_a_distribution(machine: Machine) -> None:
    """One key far above the others takes all; equal keys share alike."""
    heads, n = Heads(32, 1, kv=1), 70
    qkv = np.zeros((n, heads.width), np.float32)
    qkv[:, 0], qkv[:, 64] = 3000.0, np.arange(n)
    qkv[17, 32] = 1000.0
    sequence = Sequence(machine, heads, n)
    ours = sequence.attend(sequence.store(qkv, 0, no_turn(n, 32)), 0)[:, 0]
    assert np.allclose(ours[:17], np.arange(17) / 2, rtol=1e-5)
    assert (ours[17:] == 17).all()


def test_merged_rows_become_the_lines_of_the_next_product(machine: Machine) -> None:
    heads, n = Heads(64, 3), 33
    sequence, turned = prefill(machine, heads, rows_of(heads, n), table_of(heads, n), 0.3)
    floats = sequence.attend(turned, 0)
    lines = sequence.attend(turned, 0, to_bytes=True)
    assert same_bits(fields(lines), fields(quantize(machine, place(floats))[0]))
