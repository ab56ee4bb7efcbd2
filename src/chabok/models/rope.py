"""Rotary position embedding: which frequencies, and in which order a head's dimensions are stored.

The kernel turns dimension i with i + head_dim / 2. Other pairings are brought to that form when weights are
packed, by reordering the rows of the query and key products (scores do not change when both are reordered
alike).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from chabok.models.config import Rope


def order(rope: Rope, head_dim: int) -> NDArray[np.int64]:
    """For each stored dimension of a head, the dimension of the file it comes from: int64[head_dim]."""
    pairs, half = rope.n_rot // 2, head_dim // 2
    step = np.arange(pairs)
    first, second = (2 * step, 2 * step + 1) if rope.interleaved else (step, step + pairs)
    still = np.arange(rope.n_rot, head_dim)
    return np.concatenate([first, still[: half - pairs], second, still[half - pairs :]])


def frequencies(rope: Rope, factors: NDArray[np.float32] | None = None) -> tuple[NDArray[np.float64], float]:
    """Radians per token of each pair, float64[n_rot / 2], and the magnitude of the rotation.

    factors: divisors of the frequencies that a file may carry (Llama 3's scaling).
    """
    turning: NDArray[np.float64] = rope.base ** (-np.arange(0, rope.n_rot, 2, dtype=np.float64) / rope.n_rot)
    if factors is not None:
        turning = turning / factors
    if rope.scaling == "linear":
        return turning / rope.factor, 1.0
    if rope.scaling == "yarn":
        return _yarn(turning, rope), 1.0 + 0.1 * math.log(rope.factor)
    return turning, 1.0


def _yarn(turning: NDArray[np.float64], rope: Rope) -> NDArray[np.float64]:
    """Peng et al., "YaRN" (2023): fast pairs stay, slow ones are interpolated, with a ramp between."""

    def pair(turns: float) -> float:
        return rope.n_rot * math.log(rope.n_ctx / (turns * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = max(0.0, math.floor(pair(32.0))), min(rope.n_rot - 1.0, math.ceil(pair(1.0)))
    ramp = np.clip((np.arange(len(turning)) - low) / max(0.001, high - low), 0, 1)
    interpolated: NDArray[np.float64] = turning / rope.factor * ramp + turning * (1 - ramp)
    return interpolated


class RopeTable:
    """Cosines and sines by position: float32[n_positions, head_dim], half and half, filled as far as
    needed."""

    def __init__(
        self, rope: Rope, head_dim: int, n_positions: int, factors: NDArray[np.float32] | None = None
    ) -> None:
        self._turning, self._magnitude = frequencies(rope, factors)
        # Zeroed memory costs nothing until it is touched.
        self.values: NDArray[np.float32] = np.zeros((n_positions, head_dim), np.float32)
        self._filled = 0

    def ensure(self, n: int) -> int:
        """Fill the rows of the first n positions, and some more; how many are filled."""
        if n <= self._filled:
            return self._filled
        stop = min(max(n, self._filled + 1024), len(self.values))
        angles = np.arange(self._filled, stop, dtype=np.float64)[:, None] * self._turning
        pairs, half = len(self._turning), self.values.shape[1] // 2
        rows = self.values[self._filled : stop]
        rows[:, :half] = 1.0
        rows[:, :pairs] = np.cos(angles) * self._magnitude
        rows[:, half : half + pairs] = np.sin(angles) * self._magnitude
        self._filled = stop
        return stop
