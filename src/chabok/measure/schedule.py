"""Loads: how many requests at once, or when each one is due."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from chabok.measure.failures import MeasureError
from chabok.measure.trace import Trace

Pattern = Literal["constant", "poisson", "bursty"]


@dataclass(frozen=True, slots=True)
class Concurrent:
    """A closed loop: ``streams`` users, each of whom asks again as soon as the answer is complete.

    Ends after so many ``requests`` in all or so many ``seconds``, whichever is first; what runs then is
    completed. One stream is one request after the other. at_least: goes on beyond ``seconds`` until so many
    requests were begun.
    """

    streams: int = 1
    requests: int | None = None
    seconds: float | None = None
    at_least: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.streams <= 10_000:
            raise MeasureError(f"{self.streams} streams at once: from 1 to 10000 are possible")
        _ends(self.requests, self.seconds)

    def __str__(self) -> str:
        return "one user" if self.streams == 1 else f"{self.streams} users"


@dataclass(frozen=True, slots=True)
class Rate:
    """An open loop: requests come when they are due, whether or not earlier ones are answered.

    per_s: requests per second; where ``until_per_s`` is given, the rate rises (or falls) evenly to that over
    ``seconds``. pattern: ``constant`` gaps; ``poisson``, as independent users come; ``bursty``: gaps of a
    gamma distribution of shape ``burstiness`` < 1, which has the same mean and more clumps.
    """

    per_s: float
    requests: int | None = None
    seconds: float | None = None
    pattern: Pattern = "poisson"
    burstiness: float = 0.25
    until_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = [self.per_s] + ([] if self.until_per_s is None else [self.until_per_s])
        if not all(math.isfinite(rate) and 0 <= rate <= 1e5 for rate in rates) or max(rates) <= 0:
            raise MeasureError(
                f"{self.per_s:g} requests per second: more than 0 and at most 100000 are possible"
            )
        if self.until_per_s is None and self.per_s <= 0:
            raise MeasureError("a rate of 0 never sends a request")
        if self.until_per_s is not None and self.seconds is None:
            raise MeasureError("a rate that rises needs the seconds over which it does")
        if self.pattern not in ("constant", "poisson", "bursty"):
            raise MeasureError(
                f"there is no pattern {self.pattern!r}; there are constant, poisson and bursty"
            )
        if not 0 < self.burstiness <= 100:
            raise MeasureError("burstiness must be more than 0; 1 is as Poisson, less comes in clumps")
        _ends(self.requests, self.seconds)

    def due(self, seed: int) -> Iterator[float]:
        """Seconds after the beginning at which requests are due; the same for the same seed."""
        chance = random.Random(f"{seed}:arrivals")
        number, expected = 0, 0.0  # how many came, and how many should have by then
        while self.requests is None or number < self.requests:
            at = self._when(expected)
            if at is None or (self.seconds is not None and at >= self.seconds):
                return
            yield at
            number += 1
            if self.pattern == "constant":
                expected += 1.0
            elif self.pattern == "poisson":
                expected += chance.expovariate(1.0)
            else:
                expected += chance.gammavariate(self.burstiness, 1.0 / self.burstiness)

    def _when(self, expected: float) -> float | None:
        """The time at which so many should have come: the inverse of the integral of the rate."""
        if self.until_per_s is None or self.seconds is None:
            return expected / self.per_s
        a, slope = self.per_s, (self.until_per_s - self.per_s) / self.seconds
        if slope == 0:
            return expected / a
        root = a * a + 2 * slope * expected
        return None if root < 0 else 2 * expected / (a + math.sqrt(root)) if expected else 0.0

    def __str__(self) -> str:
        rising = "" if self.until_per_s is None else f" to {self.until_per_s:g}"
        return f"{self.per_s:g}{rising} requests/s, {self.pattern}"


Load = Concurrent | Rate | Trace


def _ends(requests: int | None, seconds: float | None) -> None:
    if requests is None and seconds is None:
        raise MeasureError("a load needs an end: a number of requests, or of seconds")
    if requests is not None and requests < 1:
        raise MeasureError(f"{requests} requests: 1 at least are needed")
    if seconds is not None and not 0 < seconds < math.inf:
        raise MeasureError(f"{seconds:g} seconds: more than 0 are needed")
