"""Runs the attention kernels on one sequence, and says in numpy what they should give."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tests.compute.harness import NOTHING, Array, Machine, count, place

from chabok.compute.kernels import attention, matmul
from chabok.compute.kernels.attention import PAGE, SPAN_PAGES, Attention, Merge, head_bytes
from chabok.compute.kernels.rope import RopeStore
from chabok.compute.memory import aligned

SPAN = PAGE * SPAN_PAGES


@dataclass(frozen=True)
class Heads:
    """The shape of attention, and what it sees."""

    dim: int
    group: int
    kv: int = 2
    window: int = 0
    cap: float = 0.0

    @property
    def queries(self) -> int:
        return self.kv * self.group

    @property
    def width(self) -> int:
        """Of a row of queries, keys and values."""
        return (self.queries + 2 * self.kv) * self.dim


def no_turn(n: int, dim: int) -> Array:
    """A rotation table that turns nothing."""
    table = np.zeros((n, dim), np.float32)
    table[:, : dim // 2] = 1
    return table


class Sequence:
    """Pages of keys and values, in a shuffled order in memory and full of junk, and rows fed into them."""

    def __init__(self, machine: Machine, heads: Heads, n_tokens: int, *, junk: float = 3e4, layers: int = 2):
        self.machine, self.heads = machine, heads
        n_pages = -(-n_tokens // PAGE)
        page = layers * heads.kv * head_bytes(heads.dim)
        rng = np.random.default_rng(7)
        self.memory = aligned(n_pages * page)
        self.memory.view(np.float16)[:] = rng.choice([junk, -junk, junk / 3], n_pages * page // 2)
        self.page_bytes = page
        self.pages = place(rng.permutation(n_pages).astype(np.int32))
        self.addresses = self.pages.astype(np.int64) * page + self.memory.ctypes.data
        self.layer = (layers - 1) * heads.kv * head_bytes(heads.dim)

    def store(
        self,
        qkv: Array,
        start: int,
        table: Array,
        *,
        scale: float = 1.0,
        norms: tuple[Array, Array] | None = None,
        threads: int = 1,
    ) -> Array:
        """File rows' keys and values from position ``start`` on; the rows with their queries turned."""
        h, rows = self.heads, len(qkv)
        turned = place(qkv)
        positions = np.arange(start, start + rows)
        q_norm, k_norm = (place(n) for n in norms) if norms else (NOTHING, NOTHING)
        self.machine.run(
            RopeStore(h.dim, norms is not None), threads=threads,
            rows=count(rows), qkv=turned, qkv_stride=turned.strides[0], heads=h.queries, kv_heads=h.kv,
            positions=place(positions.astype(np.int32)), pages=place(self.addresses[positions // PAGE]),
            layer=self.layer, table=place(table), q_scale=scale, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
        )  # fmt: skip
        return turned

    def attend(
        self,
        turned: Array,
        start: int,
        *,
        blocks: list[int] | None = None,
        split: bool = False,
        threads: int = 1,
        to_bytes: bool = False,
    ) -> NDArray[np.generic]:
        """What rows at ``start`` and after see: float32[rows, queries * dim], or lines of bytes.

        blocks: rows of each item of work. split: each span of a row is an item of its own.
        """
        h, rows = self.heads, len(turned)
        items, slots, slot, row = [], [], 0, 0
        for size in blocks or [min(16, rows - at) for at in range(0, rows, 16)]:
            spans = (start + row + size - 1) // SPAN + 1
            runs = [(s, s + 1) for s in range(spans)] if split else [(0, spans)]
            slots += [(slot + i, len(runs)) for i in range(size)]
            for first, end in runs:
                at = self.pages.ctypes.data
                items.append((row, size, start + row, at, first, end, slot, 0))
                slot += size
            row += size
        kernel = Attention(h.dim, h.group, window=h.window > 0, cap=h.cap > 0)
        partials = place(np.full((slot, h.queries, attention.partial_floats(h.dim)), 1e30, np.float32))
        scratch = aligned(threads * max(kernel.scratch_bytes, 65536)).reshape(threads, -1)
        scratch.view(np.float32)[:] = -1e30
        qkv, layer = place(turned), self.layer
        self.machine.run(
            kernel, threads=threads,
            items=place(np.array(items, np.int64)), n_items=count(len(items)), qkv=qkv,
            qkv_stride=qkv.strides[0], kv_heads=h.kv, cache=count(self.memory.ctypes.data),
            page_bytes=self.page_bytes, layer=layer, window=h.window, cap=float(h.cap),
            partials=partials, scratch=scratch, scratch_stride=scratch.strides[0],
        )  # fmt: skip
        stride = h.queries * h.dim // 32 * matmul.LINE if to_bytes else 4 * h.queries * h.dim
        out = aligned(rows * stride)
        self.machine.run(
            Merge(h.dim, to_bytes), threads=threads,
            rows=count(rows), slots=place(np.array(slots, np.int64)), partials=partials, heads=h.queries,
            out=out, out_stride=stride, out_private=0, scratch=scratch, scratch_stride=scratch.strides[0],
        )  # fmt: skip
        return out.reshape(rows, -1).copy() if to_bytes else out.view(np.float32).reshape(rows, -1).copy()


def turn(x: NDArray[np.floating], table: Array) -> Array:
    """Heads [rows, heads, dim] turned by a table's rows [rows, dim], rounded where the kernel rounds: keys
    are about to lose most of their bits, and a different last one may change what is left."""
    half = x.shape[2] // 2
    cos, sin = table[:, None, :half].astype(np.float64), table[:, None, half:].astype(np.float64)
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    first, second = ((v * sin).astype(np.float32).astype(np.float64) for v in (b, a))
    return np.concatenate([a * cos - first, b * cos + second], axis=2).astype(np.float32)


def oracle(h: Heads, qkv: Array, table: Array, scale: float, rows: slice) -> NDArray[np.float64]:
    """Causal attention of some rows of a whole sequence, keys and values rounded to 16 bits."""
    heads = qkv.astype(np.float64).reshape(len(qkv), -1, h.dim)
    q = turn(heads[:, : h.queries], table)[rows].astype(np.float64) * scale
    k = turn(heads[:, h.queries : h.queries + h.kv], table).astype(np.float16).astype(np.float64)
    v = heads[:, h.queries + h.kv :].astype(np.float16).astype(np.float64)
    k, v = np.repeat(k, h.group, axis=1), np.repeat(v, h.group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k)
    if h.cap:
        scores = h.cap * np.tanh(scores / h.cap)
    behind = np.arange(len(qkv))[rows, None] - np.arange(len(qkv))
    hidden = (behind < 0) | ((behind >= h.window) if h.window else False)
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
