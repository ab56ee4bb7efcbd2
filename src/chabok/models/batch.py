"""What goes into a forward pass, and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

PAGE_TOKENS = 64
"""Tokens in one page of the KV cache."""

BLOCK = 64
"""Vocabulary entries that share one pre-computed maximum."""

RUN = 4096
"""Vocabulary entries that share one pre-computed sum."""


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one sequence.

    pages: int32[>= ceil((start + n) / PAGE_TOKENS)], the sequence's pages in order.
    start: position of the first row; keys 0..start-1 are in the cache already.
    tokens: int32[n].
    outputs: how many of the last rows want logits.
    scale: inverse of the temperature at which tokens will be drawn from their logits, or 1 if log
    probabilities are wanted; 0: only the best token will be asked for. What else may be asked takes longer.
    """

    pages: NDArray[np.int32]
    start: int
    tokens: Sequence[int] | NDArray[np.int32]
    outputs: int = 1
    scale: float = 1.0


Batch = list[Segment]


class Logits:
    """Scores of the next token, float32[n_out, vocab], valid until the next forward.

    The values may be changed in place before the questions below are asked; whoever does so for a row calls
    ``changed(row)``.
    """

    def __init__(
        self,
        values: NDArray[np.float32],
        block_max: NDArray[np.float32] | None = None,
        run_sums: NDArray[np.float64] | None = None,
        scales: NDArray[np.float32] | None = None,
        best: NDArray[np.int64] | None = None,
    ) -> None:
        """block_max: float32[n_out, ceil(vocab / BLOCK)]. run_sums: float64[n_out, ceil(vocab / RUN), 2], the
        peak and the sum of exp(scale * (logit - peak)). scales: float32[n_out]; 0: there is no sum."""
        self.values = values
        self._block_max = block_max
        self._run_sums = run_sums
        self._scales = scales
        self._best = best
        self._stale: set[int] = set()
        self._sums: dict[int, float] = {}  # log_sum_exp of rows in which tokens were ruled out

    def __len__(self) -> int:
        return len(self.values)

    def changed(self, row: int) -> None:
        """Forget what was pre-computed for a row whose values were edited."""
        self._stale.add(row)
        self._sums.pop(row, None)

    def exclude(self, row: int, ids: NDArray[np.intp]) -> None:
        """Rule tokens out of a row, int[n] in order: their logits become -inf. Costs little if they are few,
        as what was pre-computed is brought up to date."""
        if not len(ids):
            return
        values = self.values[row]
        if self._summed(row, 1.0) is not None:
            total = self.log_sum_exp(row)
            gone = float(np.exp(values[ids].astype(np.float64) - total).sum())
            if gone < 0.9:  # else too little is left for a difference to be exact
                self._sums[row] = total + math.log1p(-gone)
        values[ids] = -np.inf
        if row in self._sums and self._block_max is not None:
            blocks = ids // BLOCK
            blocks = blocks[np.concatenate(([True], blocks[1:] != blocks[:-1]))]
            if len(values) % BLOCK and blocks[-1] == len(values) // BLOCK:
                self._block_max[row, blocks[-1]] = values[blocks[-1] * BLOCK :].max()
                blocks = blocks[:-1]
            whole = len(values) // BLOCK * BLOCK
            self._block_max[row, blocks] = values[:whole].reshape(-1, BLOCK)[blocks].max(axis=1)
        else:
            self.changed(row)

    def _summed(self, row: int, scale: float) -> tuple[float, NDArray[np.float64]] | None:
        """A row's peak and the sum of exp(scale * (logit - peak)) of each run, if it was pre-computed."""
        if self._run_sums is None or self._scales is None or row in self._stale or row in self._sums:
            return None
        if float(self._scales[row]) != scale:
            return None
        peaks, sums = self._run_sums[row].T
        top = float(peaks.max())
        weights: NDArray[np.float64] = sums * np.exp((peaks - top) * scale)
        return top, weights

    def _maxima(self, row: int) -> NDArray[np.float32]:
        if self._block_max is not None and row not in self._stale:
            maxima: NDArray[np.float32] = self._block_max[row]
            return maxima
        return block_maxima(self.values[row])

    def argmax(self, row: int) -> int:
        """The best token of a row, the lowest id among equals."""
        if self._best is not None and row not in self._stale and row not in self._sums:
            return int(self._best[row])
        block = int(self._maxima(row).argmax())
        start = block * BLOCK
        return start + int(self.values[row, start : start + BLOCK].argmax())

    def log_sum_exp(self, row: int) -> float:
        """Logarithm of the row's sum of exponentials: log p(token) is its logit less this."""
        if row in self._sums and row not in self._stale:
            return self._sums[row]
        found = self._summed(row, 1.0)
        if found is not None:
            top, weights = found
            return top + math.log(float(weights.sum()))
        values = self.values[row]
        peak = float(values.max())
        return peak + float(np.log(np.exp(values - np.float32(peak)).sum(dtype=np.float64)))

    def draw(self, row: int, uniform: float, scale: float) -> int:
        """The token that ``uniform`` in [0, 1) falls on, where each, in order of their ids, is as wide as its
        share of the sum of exp(scale * logit). Costs least at the scale of the segment.

        Raises ValueError if a logit is not a number.
        """
        values = self.values[row]
        found = self._summed(row, scale)
        if found is None:
            top = float(values.max())
            powers = np.subtract(values, np.float32(top))
            powers *= np.float32(scale)
            np.exp(powers, out=powers)
            weights = np.add.reduceat(powers, np.arange(0, len(values), RUN), dtype=np.float64)
        else:
            top, weights = found
        ends = weights.cumsum()
        if not math.isfinite(ends[-1]):
            raise ValueError("a logit is not a number")
        target = uniform * float(ends[-1])
        run = min(int(ends.searchsorted(target, side="right")), len(ends) - 1)
        target -= float(ends[run - 1]) if run else 0.0
        part = values[run * RUN : (run + 1) * RUN].astype(np.float64)
        sums = np.exp((part - top) * scale).cumsum()
        # Two sums of the same run differ by their rounding: the target may lie a hair past the end.
        return run * RUN + int(sums.searchsorted(min(target, np.nextafter(sums[-1], 0)), side="right"))

    def reaching(self, row: int, floor: float) -> NDArray[np.intp]:
        """The tokens of a row whose logits are at least ``floor``, in order of their ids."""
        values, maxima = self.values[row], self._maxima(row)
        blocks = np.flatnonzero(maxima >= floor)
        if 4 * len(blocks) < len(maxima):
            ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            if len(ids) and ids[-1] >= len(values):
                ids = ids[ids < len(values)]
            reached: NDArray[np.intp] = ids[values[ids] >= floor]
            return reached
        return np.flatnonzero(values >= floor)

    def top(self, row: int, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """The k best tokens of a row and their logits, best first, equal ones by id, without sorting
        the row."""
        values = self.values[row]
        k = min(k, len(values))
        maxima = self._maxima(row)
        if k < len(maxima):
            # The k-th largest block maximum is a floor: at least k entries reach it.
            floor = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
            blocks = np.flatnonzero(maxima >= floor)
            ids = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            ids = ids[ids < len(values)]
            ids = ids[values[ids] >= floor]
        else:
            ids = np.arange(len(values))
        ids, chosen = best_first(ids, values[ids])
        return ids[:k], chosen[:k]


def best_first(
    ids: NDArray[np.intp], values: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Tokens and their logits, the highest first, equal ones by id; NaN anywhere."""
    if len(ids) < 512:
        order = np.lexsort((ids, -values))
        return ids[order].astype(np.int32), values[order]
    # One number holds both, the order of the bits being that of the logits: numpy sorts many such numbers
    # several times as fast as it finds their order.
    bits = (values + np.float32(0)).view(np.uint32)  # the sum makes -0 the zero that it equals
    falling = np.where(bits >> 31, bits, ~(bits | np.uint32(1 << 31)))
    keys = (falling.astype(np.uint64) << np.uint64(32)) | ids.astype(np.uint64)
    keys.sort()
    sorted_ids = (keys & np.uint64(0xFFFFFFFF)).astype(np.int32)
    falling = (keys >> np.uint64(32)).astype(np.uint32)
    return sorted_ids, np.where(falling >> 31, falling, ~falling & np.uint32(0x7FFFFFFF)).view(np.float32)


def block_maxima(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Maximum of each run of BLOCK entries: float32[vocab] -> float32[ceil(vocab / BLOCK)]."""
    whole = len(values) // BLOCK * BLOCK
    maxima: NDArray[np.float32] = values[:whole].reshape(-1, BLOCK).max(axis=1)
    if whole < len(values):
        maxima = np.append(maxima, values[whole:].max())
    return maxima


class Model(Protocol):
    """What the engine needs of a model."""

    name: str
    fingerprint: str
    vocab_size: int
    n_ctx_train: int
    page_bytes: int
    max_rows: int

    @property
    def page_layout(self) -> str:
        """What the bytes of a page mean depends on nothing but this, the fingerprint, and the tokens."""

    def new_cache(self, n_pages: int) -> None:
        """Allocate the page pool; pages are 0..n_pages-1 and read as zero until written."""

    def page(self, index: int) -> NDArray[np.uint8]:
        """The bytes of a page: uint8[page_bytes], a view."""

    def forward(self, batch: Batch) -> Logits:
        """Run one step over rows of any sequences; at most max_rows rows."""

    def close(self) -> None:
        """Stop threads and release memory."""
