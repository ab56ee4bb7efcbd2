"""The memory that programs work in: one set of buffers per model, at addresses that never change."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chabok.compute.blocks import PAIR
from chabok.compute.kernels import attention, matmul
from chabok.compute.kernels.rows import SUMMARY_BLOCK, SUMMARY_RUN
from chabok.compute.memory import aligned
from chabok.models.config import Config

FEW_ROWS = 4
"""Up to this many rows, each thread prepares the rows' activations for itself rather than wait for the
others."""

EXTRA_SLOTS = 512
"""Partial results of attention beyond one per row, for sequences whose keys are shared out between
threads."""

Array = NDArray[np.float32]


def _floats(rows: int, width: int) -> Array:
    """Zeroed, aligned floats [rows, width]; memory is taken only when touched.

    A row is followed by a line of padding: rows a multiple of 4096 bytes apart would all compete for the same
    few places of the first-level cache.
    """
    padded = round_up(width, 16) + 16
    return aligned(4 * rows * padded).view(np.float32).reshape(rows, padded)[:, :width]


def _integers(*shape: int) -> NDArray[np.int64]:
    n = int(np.prod(shape))
    return aligned(8 * n).view(np.int64).reshape(shape)


def _lines(rows: int, k: int) -> NDArray[np.uint8]:
    """Lines of 8-bit activations for k values a row, padded like floats."""
    return aligned(rows * (2 * k + 64)).reshape(rows, -1)[:, : 2 * k]


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


class Workspace:
    """Buffers for up to ``max_rows`` rows on ``threads`` threads.

    Buffers that each thread fills for itself when rows are few have room for ``threads`` copies of FEW_ROWS
    rows.
    """

    def __init__(self, c: Config, max_rows: int, threads: int) -> None:
        self.threads, self.max_rows = threads, max_rows
        copies = max(max_rows, threads * FEW_ROWS)
        # The batch: what Python writes before each run.
        self.n_rows, self.n_out, self.n_items = _integers(1), _integers(1), _integers(1)
        self.tokens = np.zeros(max_rows, np.int32)
        self.positions = np.zeros(max_rows, np.int32)
        self.pages = _integers(max_rows)
        self.slots = _integers(max_rows, 2)
        self.items = _integers(max_rows + EXTRA_SLOTS, attention.ITEM_BYTES // 8)
        self.out_rows = _integers(max_rows)
        self.scales = np.zeros(max_rows, np.float32)
        self.cache_base = _integers(1)
        # The residual stream, and what products read and write.
        self.x = _floats(copies, c.dim)
        self.lines = _lines(copies, max(c.dim, c.q_dim))
        self.fine_lines = _lines(2 * copies, c.dim)
        self.floats = _floats(copies, max(c.dim, c.q_dim))
        self.qkv = _floats(max_rows, c.q_dim + 2 * c.kv_dim)
        self.y = _floats(max_rows, c.dim)
        n_slots = max_rows + EXTRA_SLOTS
        n_floats = n_slots * c.n_heads * attention.partial_floats(c.head_dim)
        self.partials = aligned(4 * n_floats).view(np.float32).reshape(n_slots, -1)
        # The feed-forward block; with experts, a row for each choice.
        used = c.n_experts_used or 1
        ff = max(c.ff, c.expert_ff)  # a model of experts may have dense layers, too
        self.gate, self.up = _floats(max_rows * used, ff), _floats(max_rows * used, ff)
        self.hidden_lines = _lines(copies * used, ff)
        self.hidden_floats = _floats(copies * used, ff)
        if c.n_experts:
            self.router = _floats(max_rows, round_up(c.n_experts, PAIR))
            self.expert_lines = _lines(copies * used, c.dim)
            self.expert_floats = _floats(copies * used, c.dim)
            self.expert_out = _floats(max_rows * used, c.dim)
            self.routes = Routes(c, copies, threads)
        # The head.
        self.out_x = _floats(max_rows, c.dim)
        self.logits = _floats(max_rows, round_up(c.vocab, SUMMARY_BLOCK))
        self.best = _integers(max_rows)
        self.maxima = _floats(max_rows, -(-c.vocab // SUMMARY_BLOCK))
        self.sums = (
            aligned(max_rows * -(-c.vocab // SUMMARY_RUN) * 16).view(np.float64).reshape(max_rows, -1, 2)
        )
        group = c.n_heads // c.n_kv_heads
        need = max(
            matmul.scratch_bytes(max_rows * max(used, 2)),
            attention.Attention(c.head_dim, group).scratch_bytes,
            4 * attention.partial_floats(c.head_dim),
        )
        self.scratch = aligned(threads * round_up(need, 4096)).reshape(threads, -1)


class Routes:
    """Which experts rows go to; ``copy`` bytes further on lies the next thread's own version."""

    def __init__(self, c: Config, rows: int, threads: int) -> None:
        used = c.n_experts_used
        sizes = {
            "ids": 4 * rows * used,
            "weights": 4 * rows * used,
            "starts": 8 * c.n_experts,
            "source": 8 * rows * used,
            "place": 4 * rows * used,
            "active": matmul.ACTIVE_BYTES * c.n_experts,
            "n_active": 8,
            "n_sorted": 8,
        }
        self.copy = sum(round_up(size, 64) for size in sizes.values())
        memory = aligned(self.copy * threads)
        at = 0
        self.fields: dict[str, NDArray[np.uint8]] = {}
        for name, size in sizes.items():
            self.fields[name] = memory[at : at + size]
            at += round_up(size, 64)
