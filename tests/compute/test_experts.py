"""Routing: which experts, in which order, and what becomes of their results."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.compute.harness import Array, Machine, count, place, same_bits

from chabok.compute.kernels.experts import Choose, Combine, Sort, Spread
from chabok.compute.kernels.matmul import ACTIVE_BYTES
from chabok.compute.memory import aligned

Ints = NDArray[np.int32]


def choose(
    machine: Machine,
    logits: Array,
    used: int,
    *,
    normalize: bool = True,
    private: bool = False,
    threads: int = 1,
) -> tuple[Ints, Array]:
    """Ids and weights, [copies, rows, used]; beyond the last expert a row holds what would win."""
    rows, experts = logits.shape
    width = -(-experts // 16) * 16
    held = place(np.full((rows, width), 1e30, np.float32))
    held[:, :experts] = logits
    copies, size = (threads, -(-rows * used * 4 // 64) * 64) if private else (1, rows * used * 4)
    ids, weights = aligned(copies * size), aligned(copies * size)
    machine.run(
        Choose(used, normalize, private), threads=threads,
        rows=count(rows), logits=held, logits_stride=4 * width, experts=experts, ids=ids, weights=weights,
        private=size if private else 0,
    )  # fmt: skip

    def shaped(raw: NDArray[np.uint8], kind: type) -> NDArray[np.generic]:
        return raw.view(kind).reshape(copies, -1)[:, : rows * used].reshape(copies, rows, used)

    return shaped(ids, np.int32), shaped(weights, np.float32)  # type: ignore[return-value]


def wanted(logits: Array, used: int, normalize: bool) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    wide = logits.astype(np.float64)
    p = np.exp(wide - wide.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, ids, axis=1)
    return ids, weights / weights.sum(axis=1, keepdims=True) if normalize else weights


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("experts", "used"), [(4, 2), (8, 8), (16, 1), (17, 3), (60, 4), (64, 8), (128, 8)])
def test_the_largest_experts_are_chosen_with_their_softmax(
    experts: int, used: int, normalize: bool, machine: Machine
) -> None:
    logits = 3 * np.random.default_rng(0).standard_normal((13, experts), dtype=np.float32)
    ids, weights = choose(machine, logits, used, normalize=normalize)
    best_ids, best_weights = wanted(logits, used, normalize)
    assert np.array_equal(ids[0], best_ids)
    assert np.allclose(weights[0], best_weights, rtol=2e-6)


def test_among_equals_the_lower_id_is_chosen_first(machine: Machine) -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 3, (40, 61)).astype(np.float32)
    logits[0] = 0
    ids, _ = choose(machine, logits, 6)
    assert np.array_equal(ids[0], wanted(logits, 6, True)[0])
    assert ids[0, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_logits_far_apart_give_all_the_weight_to_one(machine: Machine) -> None:
    logits = np.array([[-3e38, 3e38, 0.0, 3e37]], np.float32)
    ids, weights = choose(machine, logits, 3)
    assert ids[0, 0].tolist() == [1, 3, 2]
    assert weights[0, 0].tolist() == [1, 0, 0]


def test_each_thread_may_choose_for_itself(best: Machine) -> None:
    logits = np.random.default_rng(2).standard_normal((3, 20), dtype=np.float32)
    ids, weights = choose(best, logits, 4)
    own_ids, own_weights = choose(best, logits, 4, private=True, threads=3)
    for i, w in zip(own_ids, own_weights):
        assert same_bits(i, ids[0])
        assert same_bits(w, weights[0])


class Sorted:
    """Rows sorted by expert: the fields of ``Sort``."""

    def __init__(self, machine: Machine, ids: Ints, experts: int, private: bool = False, threads: int = 1):
        rows, used = ids.shape
        total = rows * used
        sizes = {
            "ids": 4 * total, "starts": 8 * experts, "source": 8 * total, "place": 4 * total,
            "active": ACTIVE_BYTES * experts, "n_active": 8, "n_sorted": 8,
        }  # fmt: skip
        offsets = np.cumsum([0] + [-(-size // 64) * 64 for size in sizes.values()])
        copies, copy = threads if private else 1, int(offsets[-1])
        memory = aligned(copies * copy)
        self.fields = {n: memory[at : at + size] for (n, size), at in zip(sizes.items(), offsets)}
        every = memory.reshape(copies, copy)
        every[:, : 4 * total] = ids.reshape(-1).view(np.uint8)
        machine.run(
            Sort(used, private), threads=threads,
            rows=count(rows), experts=experts, private=copy if private else 0, **self.fields,
        )  # fmt: skip
        self.copies = every
        self.copy = copy
        self.source = self.fields["source"].view(np.int64)
        self.place = self.fields["place"].view(np.int32).reshape(rows, used)
        n_active = int(self.fields["n_active"].view(np.int64)[0])
        self.active = self.fields["active"].view(np.int64).reshape(-1, ACTIVE_BYTES // 8)[:n_active, :3]
        self.n_sorted = int(self.fields["n_sorted"].view(np.int64)[0])


def random_ids(rows: int, used: int, experts: int, seed: int = 0) -> Ints:
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(experts)[:used] for _ in range(rows)]).astype(np.int32)


@pytest.mark.parametrize(("rows", "used", "experts"), [(1, 1, 1), (1, 8, 64), (33, 2, 5), (100, 8, 128)])
def test_rows_are_sorted_by_expert_and_stay_in_order(
    rows: int, used: int, experts: int, machine: Machine
) -> None:
    ids = random_ids(rows, used, experts)
    s = Sorted(machine, ids, experts, threads=2)
    order = np.argsort(ids.reshape(-1), kind="stable")
    assert s.n_sorted == rows * used
    assert np.array_equal(s.source, order // used)
    assert np.array_equal(s.source[s.place], np.arange(rows)[:, None].repeat(used, 1))
    numbers, first, counts = np.unique(np.sort(ids.reshape(-1)), return_index=True, return_counts=True)
    assert np.array_equal(s.active, np.stack([numbers, first, counts], axis=1))


def test_no_rows_give_no_active_expert(best: Machine) -> None:
    s = Sorted(best, np.zeros((0, 4), np.int32), 7)
    assert (s.n_sorted, len(s.active)) == (0, 0)


def test_each_thread_may_sort_for_itself(best: Machine) -> None:
    s = Sorted(best, random_ids(3, 4, 9), 9, private=True, threads=3)
    assert all(same_bits(copy, s.copies[0]) for copy in s.copies)


@pytest.mark.parametrize("private", [False, True])
def test_rows_are_spread_to_their_sorted_places(private: bool, best: Machine) -> None:
    s = Sorted(best, random_ids(9, 3, 6), 6, private=private, threads=2)
    x = np.random.default_rng(0).integers(0, 256, (9, 192), dtype=np.uint8)
    out = place(np.zeros((2 if private else 1, 27, 192), np.uint8))
    best.run(
        Spread(private), threads=2,
        rows=s.fields["n_sorted"].view(np.int64), source=s.fields["source"], x=place(x), x_stride=192,
        x_private=0, bytes=192, out=out, out_stride=192, out_private=27 * 192 if private else 0,
        private=s.copy if private else 0,
    )  # fmt: skip
    for copy in out:
        assert same_bits(copy, x[s.source])


@pytest.mark.parametrize("k", [32, 256, 288, 1024])
def test_results_are_summed_with_their_weights(k: int, machine: Machine) -> None:
    rng = np.random.default_rng(0)
    rows, used = 7, 3
    x, y = (rng.standard_normal((n, k), dtype=np.float32) for n in (rows, rows * used))
    weights = rng.uniform(0, 1, (rows, used)).astype(np.float32)
    to = rng.permutation(rows * used).reshape(rows, used).astype(np.int32)
    results = []
    for threads in (1, 3):
        out = place(x)
        machine.run(
            Combine(used), threads=threads,
            rows=count(rows), x=out, x_stride=4 * k, y=place(y), y_stride=4 * k, weights=place(weights),
            place=place(to), k=k,
        )  # fmt: skip
        results.append(out)
    exact = x + (y.astype(np.float64)[to] * weights[..., None]).sum(axis=1)
    assert np.abs(results[0] - exact).max() < 1e-6
    assert same_bits(results[0], results[1])
