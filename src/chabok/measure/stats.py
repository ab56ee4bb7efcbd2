"""Percentiles that the sample carries, intervals by bootstrap, and whether two runs differ at all.

Bootstrap intervals are percentile intervals (Efron 1979). Quantiles of resamples are drawn exactly, without
resampling: the j-th smallest of n uniform draws is Beta(j, n - j + 1) distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEEDED = {50.0: 1, 90.0: 10, 95.0: 20, 99.0: 100, 99.9: 1000}
"""Least sample for a percentile: fewer requests than this have no request beyond it."""
RESAMPLES = 2000
CONFIDENCE = 0.95
_BINS = 4096


class Interval(NamedTuple):
    """A confidence interval, in the unit of what it is about."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a sample says, in the unit of its values.

    n: how many values. requests: from how many requests they come, which decides what percentiles are shown.
    percentiles: p -> value, only those that the sample carries. intervals: of the mean (key 0) and of
    percentiles, 95 %; empty where there are fewer than two requests.
    """

    n: int
    requests: int
    mean: float
    least: float
    most: float
    percentiles: dict[float, float] = field(default_factory=dict)
    intervals: dict[float, Interval] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """The 50th percentile."""
        return self.percentiles[50.0]


def carried(p: float, requests: int) -> bool:
    """Whether so many requests carry percentile ``p``: at least one of them lies beyond it."""
    return p <= 50 or requests * (100 - p) >= 100 - 1e-6


def describe(values: Sequence[float] | Floats, *, seed: int = 0) -> Distribution | None:
    """A distribution of one value per request; None if there is none."""
    sample = np.sort(np.asarray(values, np.float64))
    n = len(sample)
    if not n:
        return None
    shown = [p for p in NEEDED if carried(p, n)]
    intervals = {}
    if n > 1:
        intervals = {p: quantile_interval(sample, p, seed=seed) for p in shown}
        intervals[0.0] = mean_interval(sample, seed=seed)
    found = np.percentile(sample, shown)
    return Distribution(
        n,
        n,
        float(sample.mean()),
        float(sample[0]),
        float(sample[-1]),
        dict(zip(shown, found.tolist())),
        intervals,
    )


def describe_pooled(groups: Sequence[Floats], *, seed: int = 0) -> Distribution | None:
    """A distribution of values pooled over requests (one array each); resampled by request, since the values
    of one request resemble each other."""
    groups = [group for group in groups if len(group)]
    if not groups:
        return None
    pooled = np.sort(np.concatenate(groups))
    shown = [p for p in NEEDED if carried(p, len(groups))]
    intervals = clustered_intervals(groups, shown, seed=seed) if len(groups) > 1 else {}
    found = np.percentile(pooled, shown)
    return Distribution(
        len(pooled),
        len(groups),
        float(pooled.mean()),
        float(pooled[0]),
        float(pooled[-1]),
        dict(zip(shown, found.tolist())),
        intervals,
    )


def resampled_quantiles(sample: Floats, p: float, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """float64[resamples]: percentile ``p`` of bootstrap resamples of a sorted sample."""
    n = len(sample)
    rng = np.random.default_rng(seed)
    place = p / 100 * (n - 1)  # as numpy interpolates: between the order statistics around it
    j, share = int(place) + 1, place - int(place)
    low = rng.beta(j, n - j + 1, resamples)
    high = low + (1 - low) * rng.beta(1, n - j, resamples) if j < n else low
    a = sample[np.minimum((low * n).astype(np.int64), n - 1)]
    b = sample[np.minimum((high * n).astype(np.int64), n - 1)]
    return np.asarray(a + (b - a) * share, np.float64)


def resampled_means(sample: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> Floats:
    """float64[resamples]: means of bootstrap resamples; of large samples their normal limit."""
    n = len(sample)
    rng = np.random.default_rng(seed)
    if n > 5000:
        return rng.normal(sample.mean(), sample.std() / np.sqrt(n), resamples)
    step = max(1, 2_000_000 // n)
    parts = [
        sample[rng.integers(0, n, (min(step, resamples - done), n))].mean(axis=1)
        for done in range(0, resamples, step)
    ]
    return np.concatenate(parts)


def quantile_interval(sample: Floats, p: float, *, seed: int = 0) -> Interval:
    """Confidence interval of a percentile of a sorted sample."""
    return _interval(resampled_quantiles(sample, p, seed=seed))


def mean_interval(sample: Floats, *, seed: int = 0) -> Interval:
    """Confidence interval of the mean."""
    return _interval(resampled_means(sample, seed=seed))


def clustered_intervals(
    groups: Sequence[Floats], ps: Sequence[float], *, seed: int = 0, resamples: int = 500
) -> dict[float, Interval]:
    """Intervals of the mean (key 0) and of percentiles of pooled values, resampling whole groups.

    Values are binned into at most 4096 bins of equal population, so that the cost does not grow with them.
    """
    drawn = resampled_pooled(groups, ps, seed=seed, resamples=resamples)
    return {p: _interval(values) for p, values in drawn.items()}


def resampled_pooled(
    groups: Sequence[Floats], ps: Sequence[float], *, seed: int = 0, resamples: int = 500
) -> dict[float, Floats]:
    """p -> float64[resamples]: the mean (key 0) and percentiles of pooled values; groups are resampled."""
    rng = np.random.default_rng(seed)
    pooled = np.concatenate(groups)
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, min(_BINS, len(pooled)) + 1), method="nearest"))
    counts = np.zeros((len(groups), len(edges)), np.float64)
    for row, group in enumerate(groups):
        counts[row] = np.bincount(np.searchsorted(edges, group), minlength=len(edges))[: len(edges)]
    n = len(groups)
    weights = rng.multinomial(n, np.full(n, 1 / n), resamples).astype(np.float64)
    cumulative = np.cumsum(weights @ counts, axis=1)
    totals = cumulative[:, -1:]
    sums = np.array([group.sum() for group in groups])
    found: dict[float, Floats] = {0.0: (weights @ sums) / totals[:, 0]}
    for p in ps:
        place = np.argmax(cumulative >= totals * (p / 100), axis=1)
        found[p] = edges[place]
    return found


def _interval(values: Floats) -> Interval:
    rest = (1 - CONFIDENCE) / 2 * 100
    low, high = np.percentile(values, [rest, 100 - rest])
    return Interval(float(low), float(high))


Verdict = Literal["better", "worse", "no measurable difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """How ``after`` differs from ``before``: shares, 0.1 is 10 % more; with its 95 % interval."""

    before: float
    after: float
    share: float
    interval: Interval
    verdict: Verdict


def compare(
    before: Sequence[Floats] | Sequence[float] | Floats,
    after: Sequence[Floats] | Sequence[float] | Floats,
    p: float | None = 50.0,
    *,
    lower_is_better: bool = True,
    seed: int = 0,
) -> Difference | None:
    """Compare a percentile (or the mean: None) of two samples.

    A sample is one value per request, or one array of values per request. A verdict other than "no measurable
    difference" needs an interval that excludes zero. None: a sample is too small for that percentile.
    """
    old, new = _drawn(before, p, seed), _drawn(after, p, seed + 1)
    if old is None or new is None:
        return None
    return difference(*old, *new, lower_is_better=lower_is_better)


def difference(
    before: float, befores: Floats, after: float, afters: Floats, *, lower_is_better: bool = True
) -> Difference:
    """How two values differ, by what bootstrap draws of each (float64[resamples]) say of their chance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = afters / befores - 1
    ratios = np.nan_to_num(ratios, nan=0.0, posinf=np.inf, neginf=-np.inf)
    interval = _interval(np.clip(ratios, -1e9, 1e9))
    share = after / before - 1 if before else (0.0 if after == before else float("inf"))
    verdict: Verdict = "no measurable difference"
    if interval.low > 0 or interval.high < 0:
        verdict = "worse" if (interval.low > 0) == lower_is_better else "better"
    return Difference(before, after, share, interval, verdict)


def _drawn(
    sample: Sequence[Floats] | Sequence[float] | Floats, p: float | None, seed: int
) -> tuple[float, Floats] | None:
    if len(sample) < 2 or (p is not None and not carried(p, len(sample))):
        return None
    if isinstance(sample[0], np.ndarray):
        groups = [np.asarray(each, np.float64) for each in sample if len(np.atleast_1d(each))]
        if len(groups) < 2:
            return None
        pooled = np.concatenate(groups)
        value = float(pooled.mean() if p is None else np.percentile(pooled, p))
        key = 0.0 if p is None else p
        return value, resampled_pooled(groups, [] if p is None else [p], seed=seed, resamples=RESAMPLES)[key]
    values = np.sort(np.asarray(sample, np.float64))
    if p is None:
        return float(values.mean()), resampled_means(values, seed=seed)
    return float(np.percentile(values, p)), resampled_quantiles(values, p, seed=seed)
