"""From the raw lines of a run to its report: the one way, while it goes on and ever after."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from chabok.measure.breakdown import Breakdown, Effect, break_down, fit_prefill
from chabok.measure.cost import Price, cost
from chabok.measure.metrics import Request, measure
from chabok.measure.outcome import Outcome
from chabok.measure.report.data import Level, Report, level_of_requests
from chabok.measure.report.sample import Sample, sample
from chabok.measure.run import About, Loaded, Run
from chabok.measure.schedule import Concurrent
from chabok.measure.slo import Limit
from chabok.measure.timeline import Timeline

WARM_UP, LENGTHS, AGAIN = "warm-up", "prompt lengths", "repeated prompt"
"""Phases of single requests, which belong to no load: the first calls, and the probes for the breakdown."""


@dataclass(slots=True)
class Found:
    """A report, and the samples of its levels for charts and comparisons; ``limits`` as numbers."""

    report: Report
    samples: list[Sample]
    limits: list[Limit]


class Account:
    """Takes timelines and loads in the order in which they end; gives the report.

    Holds no event longer than it takes to measure it: of each token two or three numbers remain.
    """

    def __init__(self, limits: list[Limit], *, seed: int = 0) -> None:
        self.limits = limits
        self._seed = seed
        self._open: dict[str, list[Request]] = {}
        self._probes: dict[str, list[Request]] = {}
        self._one: list[Request] = []
        self.samples: list[Sample] = []

    def take(self, timeline: Timeline) -> None:
        """A request ended."""
        request = measure(timeline)
        timeline.events = []
        single = timeline.phase in (WARM_UP, LENGTHS, AGAIN)
        (self._probes if single else self._open).setdefault(timeline.phase, []).append(request)

    def load(self, loaded: Loaded) -> Level:
        """A load is over, and with it the requests of its phase."""
        taken = self._open.pop(loaded.phase, [])
        level, requests = level_of_requests(
            _outcome(loaded, taken), taken, self.limits, loaded.users, seed=self._seed
        )
        level.load, level.per_s = loaded.load, loaded.per_s
        self.samples.append(sample(level, requests, self.limits))
        if level.users == 1 and not self._one:
            self._one = requests
        return level

    def conclude(self, about: About, price: Price | None = None, *, cut: bool = False) -> Report:
        """The report of all that was taken. cut: the file ended in the middle of a line."""
        lost = list(self._open)
        for phase in lost:
            self.load(
                Loaded(phase, phase, _at_once(self._open[phase]), stopped="the run ended before the load did")
            )
        report = Report(
            about.url,
            about.model,
            about.dialect,
            about.server,
            about.started_at,
            about.command,
            about.seed,
            about.prompt_tokens,
            about.output_tokens,
            about.lengths,
            [str(limit) for limit in self.limits],
            about.round_trip_s,
            about.connect_s,
            [each.level for each in self.samples],
            capacity_of([each.level for each in self.samples]) if about.looked else None,
            self._breakdown(about),
            notes=list(about.notes),
            complete=about.complete and not cut,
            rate_capacity=about.rate_capacity,
        )
        if cut or lost:
            report.notes.append("the file of the run ends too early: this is what can be read of it")
        level = report.at_capacity or report.fastest
        price = price or about.price
        if price is not None and level is not None:
            report.cost = cost(price, level.summary, level.users, level.prefill_share)
        return report

    def _breakdown(self, about: About) -> Breakdown:
        one = next((each.level for each in self.samples if each.level.users == 1), None)
        if one is None or one.summary.ttft is None:
            return Breakdown()
        first = next(iter(self._probes.get(WARM_UP, [])), None)
        cold = None
        if first is not None and first.ok and first.ttft_s is not None:
            cold = Effect(one.summary.ttft.median, first.ttft_s)
        lengths = self._probes.get(LENGTHS)
        return break_down(
            self._one,
            round_trip_s=about.round_trip_s,
            fit=fit_prefill(lengths, seed=self._seed) if lengths else None,
            cache=_gain(self._probes.get(AGAIN, [])),
            cold_start=cold,
        )


def recompute(
    path: str | os.PathLike[str], *, limits: list[Limit] | None = None, price: Price | None = None
) -> Found:
    """The report of a saved run, from its raw lines. limits, price: others than those of the run.

    MeasureError: it is no run, or damaged; names the line.
    """
    run = Run(path)
    account = Account(
        [Limit.of(text) for text in run.about.limits] if limits is None else limits, seed=run.about.seed
    )
    for line in run:
        if isinstance(line, Timeline):
            account.take(line)
        else:
            account.load(line)
    report = account.conclude(run.about, price, cut=run.cut)
    report.timelines = run.path.name
    return Found(report, account.samples, account.limits)


def capacity_of(levels: list[Level]) -> int | None:
    """Most users that kept the limits while no smaller number missed them; None: none were tried. A load that
    was stopped says nothing."""
    closed = [level for level in levels if level.users and level.kept and not level.stopped]
    if not closed:
        return None
    missed = min((level.users for level in closed if not level.met), default=np.inf)
    return max((level.users for level in closed if level.met and level.users < missed), default=0)


def _outcome(loaded: Loaded, requests: list[Request]) -> Outcome:
    """What ``level_of`` takes; lateness as the load computes it, from all that were sent."""
    outcome = Outcome(
        loaded.phase, Concurrent(max(loaded.users, 1), 1), loaded.began, loaded.ended, loaded.window
    )
    outcome.cpu_share, outcome.stopped = loaded.cpu_share, loaded.stopped
    late = sorted(each.lateness_s for each in requests if each.lateness_s is not None)
    if late:
        outcome.lateness_p99_s = max(late[min(int(len(late) * 0.99), len(late) - 1)], 0.0)
    return outcome


def _gain(asked: list[Request]) -> Effect | None:
    """What a prompt gains that is asked again: of pairs, the median."""
    pairs = [
        (new.ttft_s, again.ttft_s)
        for place, (new, again) in enumerate(pairwise(asked))
        if place % 2 == 0 and new.ok and again.ok and new.ttft_s and again.ttft_s
    ]
    pairs.sort(key=lambda pair: pair[1] / pair[0])
    return Effect(*pairs[len(pairs) // 2]) if pairs else None


def _at_once(requests: list[Request]) -> int:
    """Most requests that were unanswered at the same time."""
    timelines = [each.timeline for each in requests]
    steps = [(each.scheduled, 1) for each in timelines]
    steps += [(each.done if each.done is not None else np.inf, -1) for each in timelines]
    running = np.cumsum([step for _, step in sorted(steps)])
    return int(running.max()) if len(running) else 0
