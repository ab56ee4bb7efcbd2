"""Runs side by side: what is better, what is worse, and what cannot be told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from chabok.measure.report.account import Found
from chabok.measure.report.definitions import METRICS, Metric
from chabok.measure.report.numbers import number
from chabok.measure.report.sample import Sample
from chabok.measure.stats import (
    RESAMPLES,
    Difference,
    Interval,
    Verdict,
    carried,
    difference,
    resampled_means,
    resampled_pooled,
    resampled_quantiles,
)

Floats = NDArray[np.float64]

COMPARED = (
    ("ttft", ("p50", "p95", "p99")),
    ("ttfvt", ("p50", "p95")),
    ("itl", ("p50", "p95", "p99")),
    ("worst_gap", ("p50", "p95")),
    ("tpot", ("p50",)),
    ("e2e", ("p50", "p95")),
    ("throughput", ("",)),
    ("request_rate", ("",)),
    ("goodput", ("",)),
    ("failed", ("",)),
)
"""What is compared: metrics and their statistics, in the order in which they are shown."""
ALIKE = 0.05
"""Lengths of prompts and answers that differ by less make no different load."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One statistic of one load, of the first run and of another. difference: None: one of them does not
    carry it, or there is too little to say. points: it is a share, and the interval is of the plain
    difference."""

    metric: Metric
    statistic: str
    before: float | None
    after: float | None
    difference: Difference | None
    points: bool = False

    @property
    def name(self) -> str:
        """As conditions name it."""
        return f"{self.metric.name}.{self.statistic}" if self.statistic else self.metric.name


@dataclass(frozen=True, slots=True)
class Pair:
    """One load of the first run and of another."""

    load: str
    comparisons: list[Comparison]


def common(runs: Sequence[Found]) -> list[str]:
    """Loads that all runs have, in the order of the first."""
    others = [{each.level.load for each in run.samples} for run in runs[1:]]
    names = dict.fromkeys(each.level.load for each in runs[0].samples)
    return [name for name in names if all(name in other for other in others)]


def of_load(run: Found, load: str) -> Sample | None:
    """A run's load by its name; where it came several times, the last."""
    return next((each for each in reversed(run.samples) if each.level.load == load), None)


def unlike(before: Found, after: Found) -> list[str]:
    """Why two runs' loads are not the same; empty: they are."""
    found = []
    for name, what in (("prompt_tokens", "prompts"), ("output_tokens", "answers")):
        old, new = getattr(before.report, name), getattr(after.report, name)
        if old and new and old != new:
            found.append(f"{what} of {old} tokens and of {new}")
    if not found:
        for load in common([before, after]):
            found += _lengths(of_load(before, load), of_load(after, load), load)
    if not common([before, after]):
        found.append(f"no load in common: {_loads(before)}; {_loads(after)}")
    return found


def asides(before: Found, after: Found) -> list[str]:
    """What to know when comparing two runs, though it forbids nothing."""
    found = []
    alone = [
        load
        for one, other in ((before, after), (after, before))
        for load in dict.fromkeys(each.level.load for each in one.samples)
        if of_load(other, load) is None
    ]
    if alone and common([before, after]):
        found.append(f"only one of the runs has: {', '.join(alone)}")
    for run in (before, after):
        name = run.report.timelines or run.report.url
        found += [f"{name}, {each.level.load}: {each.level.client_bound}"
                  for each in run.samples if each.level.client_bound]  # fmt: skip
        if not run.report.complete:
            found.append(f"{name} is not complete")
    return found


def pairs(before: Found, after: Found, *, seed: int = 0) -> list[Pair]:
    """Compare each load that both have."""
    found = []
    for load in common([before, after]):
        old, new = of_load(before, load), of_load(after, load)
        if old is not None and new is not None:
            found.append(Pair(load, compare_samples(old, new, seed=seed)))
    return found


def compare_samples(old: Sample, new: Sample, *, seed: int = 0) -> list[Comparison]:
    """Every statistic of a load; those that neither has are left out."""
    found = []
    for name, statistics in COMPARED:
        for each in compare_metric(old, new, METRICS[name], statistics, seed=seed):
            if each.before is None and each.after is None:
                continue
            if name != "failed" or each.before or each.after:
                found.append(each)
    seen = {each.statistic: each for each in found if each.metric.name == "ttft"}
    # A visible first token that is the first token says nothing new.
    return [
        each for each in found if each.metric.name != "ttfvt" or not _same(each, seen.get(each.statistic))
    ]


def compare_metric(
    old: Sample, new: Sample, metric: Metric, statistics: Sequence[str], *, seed: int = 0
) -> list[Comparison]:
    """Compare statistics of a metric."""
    if metric.name == "failed":
        return [_shares(metric, old, new, seed)]
    befores, afters = _draws(old, metric, statistics, seed), _draws(new, metric, statistics, seed + 1)
    found = []
    for statistic in statistics:
        before, after = value(old, metric, statistic), value(new, metric, statistic)
        differs = None
        if before is not None and after is not None and statistic in befores and statistic in afters:
            differs = difference(
                before, befores[statistic], after, afters[statistic], lower_is_better=metric.lower
            )
        found.append(Comparison(metric, statistic, before, after, differs))
    return found


def value(of: Sample, metric: Metric, statistic: str) -> float | None:
    """A statistic (``mean``, ``min``, ``max``, ``p95``; "" of a metric with one number per load) of a load;
    None: not measured, or the sample does not carry it."""
    summary = of.level.summary
    if metric.of == "load":
        if metric.name == "failed":
            return summary.failed / summary.requests if summary.requests else None
        if metric.name == "cached":
            told = summary.cached_tokens is not None and summary.prompt_tokens
            return (summary.cached_tokens or 0) / (summary.prompt_tokens or 1) if told else None
        found = of.level.goodput if metric.name == "goodput" else getattr(summary, metric.name)
        return None if found is None else float(found)
    distribution = getattr(summary, metric.name)
    if distribution is None:
        return None
    if statistic in ("mean", "min", "max"):
        return float(getattr(distribution, {"mean": "mean", "min": "least", "max": "most"}[statistic]))
    p = float(statistic[1:])
    if not carried(p, distribution.requests):
        return None
    groups = _groups(of, metric)
    values = np.concatenate(groups) if groups is not None else of.values[metric.name]
    return float(np.percentile(values, p)) if len(values) else None


def _groups(of: Sample, metric: Metric) -> list[Floats] | None:
    return {"itl": of.itl, "event_gaps": of.event_gaps}.get(metric.name)


def _draws(of: Sample, metric: Metric, statistics: Sequence[str], seed: int) -> dict[str, Floats]:
    """Bootstrap draws of each statistic that there is enough for."""
    if metric.of == "load":
        slices = of.slices.get(metric.name)
        return {} if slices is None or len(slices) < 5 else {"": resampled_means(slices, seed=seed)}
    groups = _groups(of, metric)
    count = len(groups) if groups is not None else len(of.values[metric.name])
    wanted = {
        name: 0.0 if name == "mean" else float(name[1:]) for name in statistics if name not in ("min", "max")
    }
    wanted = {name: p for name, p in wanted.items() if carried(p, count)}
    if count < 2 or not wanted:
        return {}
    if groups is not None:
        drawn = resampled_pooled(groups, [p for p in wanted.values() if p], seed=seed)
        return {name: drawn[p] for name, p in wanted.items()}
    ordered = np.sort(of.values[metric.name])
    return {
        name: resampled_quantiles(ordered, p, seed=seed) if p else resampled_means(ordered, seed=seed)
        for name, p in wanted.items()
    }


def _shares(metric: Metric, old: Sample, new: Sample, seed: int) -> Comparison:
    """Failures: the plain difference of two shares, by draws from their posteriors (Jeffreys' prior)."""
    rng = np.random.default_rng(seed)
    drawn = []
    for summary in (old.level.summary, new.level.summary):
        good = summary.requests - summary.failed
        drawn.append(rng.beta(summary.failed + 0.5, good + 0.5, RESAMPLES))
    before, after = value(old, metric, "") or 0.0, value(new, metric, "") or 0.0
    low, high = np.percentile(drawn[1] - drawn[0], [2.5, 97.5])
    verdict: Verdict = "worse" if low > 0 else "better" if high < 0 else "no measurable difference"
    found = Difference(before, after, after - before, Interval(float(low), float(high)), verdict)
    return Comparison(metric, "", before, after, found, points=True)


def _same(one: Comparison, other: Comparison | None) -> bool:
    return other is not None and (one.before, one.after) == (other.before, other.after)


def _lengths(old: Sample | None, new: Sample | None, load: str) -> list[str]:
    found = []
    for name, what in (("prompt_tokens", "prompts"), ("output_tokens", "answers")):
        a, b = getattr(old, name), getattr(new, name)
        if len(a) and len(b) and abs(b.mean() - a.mean()) > ALIKE * max(a.mean(), 1):
            found.append(f"{load}: {what} of {number(a.mean())} and of {number(b.mean())} tokens on average")
    return found


def _loads(run: Found) -> str:
    return ", ".join(dict.fromkeys(each.level.load for each in run.samples)) or "none at all"
