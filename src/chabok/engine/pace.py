"""How many prompt rows fit into a step: foreseen from what rows have cost so far, and where they stood.

A prompt row costs its share of the weights' products, and attention to all that comes before it. Both are
learned, so that a chunk that begins at position 4000 is smaller from the start, not after it has made
somebody wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

ALONE_S = 0.25
"""Seconds that a step of prompts alone may take: a request that has just come, or a cancellation, waits for
its end."""

LEAST_CHUNK = 4
"""Prompt rows a step takes even when no time is left for them, so that prompts always advance."""

FIRST_CHUNK = 16
"""Prompt rows beside generating ones while nothing is known of their cost."""

FIRST_ALONE = 128
"""The same without generating ones: a large model may take a second for it."""

_AIM = 0.9  # of the budget; the rest is for what cannot be foreseen
_SHARE = 0.5  # of the generating rows' own time, where these use the budget up
_STEEP = 1 / 1000  # positions over which attention is expected to cost as much as all else, until measured
_BESIDE = 1.5  # how much dearer a row of a small chunk is expected to be than one of a large chunk


class Line:
    """A straight line through the latest observations, neither its start nor its slope below zero.

    kept: weight of what was known before, each time something is observed. steep: slope expected at first, as
    a share of the mean; spread: how far apart observations must lie before they say more than that.
    """

    __slots__ = ("_cxx", "_cxy", "_kept", "_n", "_prior", "_x", "_y", "slope", "start")

    def __init__(self, *, kept: float, steep: float, spread: float) -> None:
        self._kept, self._prior = kept, (steep * spread * spread, spread * spread)
        self._n = self._x = self._y = self._cxx = self._cxy = 0.0
        self.start = self.slope = 0.0

    @property
    def known(self) -> bool:
        """Whether anything was observed."""
        return self._n > 0

    def at(self, x: float) -> float:
        """The value at a place."""
        return self.start + self.slope * x

    def observe(self, x: float, y: float) -> None:
        """Learn that the value was y > 0 at x >= 0."""
        # Welford's update of means and sums of products, with all that came before it weighed less.
        kept = self._kept
        self._n = self._n * kept + 1
        dx, dy = x - self._x, y - self._y
        self._x += dx / self._n
        self._y += dy / self._n
        self._cxx = kept * self._cxx + dx * (x - self._x)
        self._cxy = kept * self._cxy + dx * (y - self._y)
        steep, spread = self._prior
        # The expected slope is a share of the value at 0, which is the mean less what the slope adds.
        expected = self._y * steep / (1 + steep / spread * self._x)
        slope = max((self._cxy + expected) / (self._cxx + spread), 0.0)
        start = max(self._y - slope * self._x, 0.1 * self._y)
        self.start = start
        self.slope = (self._y - start) / self._x if self._x > 0 else slope


class Pace:
    """Sizes the chunks of prompts, so that a step with generating rows takes ``budget_s`` at most, and one
    without ``ALONE_S``.

    Where the generating rows use the budget up by themselves, prompts get half as much time again.
    """

    def __init__(self, budget_s: float, max_rows: int) -> None:
        self.budget_s = budget_s
        self._max_rows = max_rows
        self._decode = Line(kept=0.95, steep=1 / 16, spread=1.0)  # seconds of a step, by generating rows
        # Seconds per prompt row by its position, in steps without and with generating rows.
        self._alone = Line(kept=0.97, steep=_STEEP, spread=500.0)
        self._beside = Line(kept=0.97, steep=_STEEP, spread=500.0)
        self._gain = [1.0, 1.0]  # how much dearer than the lines say the latest steps were
        self._most = FIRST_CHUNK

    def time(self, n_decode: int) -> float:
        """Seconds that prompts may take in a step with so many generating rows."""
        if n_decode == 0:
            return ALONE_S
        own = self._decode.at(n_decode)
        return max(_AIM * self.budget_s - own, _SHARE * own)

    def _costs(self, beside: bool) -> tuple[float, float]:
        """Seconds of a prompt row at position 0, and how many more for each position."""
        line, gain = (self._beside, self._gain[1]) if beside else (self._alone, self._gain[0])
        if not line.known:
            other, factor = (self._alone, _BESIDE) if beside else (self._beside, 1.0)
            return other.start * factor, other.slope * factor
        return line.start * gain, line.slope * gain

    def rows(self, position: int, seconds: float, beside: bool) -> int:
        """How many rows from a position on fit into a time; beside: beside generating ones."""
        most = min(2 * self._most, self._max_rows) if beside else self._max_rows
        start, slope = self._costs(beside)
        first = start + slope * position
        if first <= 0:
            return min(most, FIRST_CHUNK if beside else FIRST_ALONE)
        if seconds <= 0:
            return 0
        # n rows cost n * (first + slope * n / 2).
        return min(int(2 * seconds / (first + sqrt(first * first + 2 * slope * seconds))), most)

    def cost(self, position: int, n: int, beside: bool) -> float:
        """Seconds that n rows from a position on are expected to take."""
        start, slope = self._costs(beside)
        return n * (start + slope * (position + 0.5 * n))

    def observe(self, n_decode: int, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step of so many generating rows and chunks of prompts: (position, rows) each."""
        if not chunks:
            if self._decode.known:
                # A thread that lost its core for a moment says nothing about the next step.
                seconds = min(seconds, 2 * self._decode.at(n_decode))
            self._decode.observe(n_decode, seconds)
            return
        rows = sum(n for _, n in chunks)
        middle = sum(n * (position + 0.5 * n) for position, n in chunks) / rows
        beside = n_decode > 0
        line = self._beside if beside else self._alone
        own = self._decode.at(n_decode) if beside else 0.0
        each = max(seconds - own, 0.1 * seconds) / rows
        if line.known:
            foreseen = line.at(middle)
            each = min(max(each, foreseen / 2), foreseen * 2)
            gain, ratio = self._gain[beside], each / foreseen
            gain += (ratio - gain) * (0.5 if ratio > gain else 0.2)
            self._gain[beside] = gain
        line.observe(middle, each)
        if beside:
            self._most = max(self._most, rows)
