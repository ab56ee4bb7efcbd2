"""How sure a share of right answers is, and whether two models differ on the same questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chabok.measure.stats import Interval

Z95 = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""
RESAMPLES = 4000


def wilson(right: int, n: int, z: float = Z95) -> Interval:
    """The score interval of a share (Wilson 1927); it stays within 0 and 1 and holds for few questions."""
    if not n:
        return Interval(0.0, 1.0)
    share, square = right / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    return Interval(max(middle - half, 0.0), min(middle + half, 1.0))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided exact p value (McNemar 1947, by the binomial): of the questions that just one of two models
    got right, how surprising so uneven a split would be if both were equally good."""
    n, few = only_a + only_b, min(only_a, only_b)
    if not n:
        return 1.0
    # Logarithms: with thousands of questions the terms themselves leave the range of floats.
    terms = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2)
        for k in range(few + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, terms)))


@dataclass(frozen=True, slots=True)
class Paired:
    """Two models on the same questions.

    questions: that both were asked. both, only_a, only_b, neither: how many each got right. difference: share
    of b - share of a, with its interval by paired bootstrap. p: exact McNemar.
    """

    a: str
    b: str
    questions: int
    both: int
    only_a: int
    only_b: int
    neither: int
    difference: float
    interval: Interval
    p: float

    @property
    def measurable(self) -> bool:
        """Whether the difference is more than chance, at 5 %."""
        return self.p < 0.05

    @property
    def words(self) -> str:
        """The comparison in a sentence."""
        on = f"on the same {self.questions} questions (McNemar p = {self.p:.2g})"
        if not self.measurable:
            return f"{self.a} and {self.b}: no measurable difference in quality {on}"
        better, worse, (low, high) = self.b, self.a, self.interval
        if self.difference < 0:
            better, worse, low, high = worse, better, -high, -low
        points = f"{abs(self.difference) * 100:.0f} points ({low * 100:.0f} to {high * 100:.0f})"
        return f"{better} is better than {worse} by {points} {on}"


def paired(a: str, right_a: Sequence[bool], b: str, right_b: Sequence[bool], *, seed: int = 0) -> Paired:
    """Compare two models: whether each was right, question by question, in the same order."""
    first, second = np.asarray(right_a, np.bool_), np.asarray(right_b, np.bool_)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} and {len(second)} answers: the questions must be the same")
    n = len(first)
    both, neither = int((first & second).sum()), int((~first & ~second).sum())
    only_a, only_b = int((first & ~second).sum()), int((~first & second).sum())
    interval = Interval(-1.0, 1.0)
    if n:
        # Resampling questions is drawing how many of each of the three kinds of difference there are.
        shares = np.array([only_a, only_b, n - only_a - only_b]) / n
        drawn = np.random.default_rng(seed).multinomial(n, shares, RESAMPLES)
        low, high = np.percentile((drawn[:, 1] - drawn[:, 0]) / n, [2.5, 97.5])
        interval = Interval(float(low), float(high))
    difference = (only_b - only_a) / n if n else 0.0
    return Paired(a, b, n, both, only_a, only_b, neither, difference, interval, mcnemar(only_a, only_b))
