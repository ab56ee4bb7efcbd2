"""The run that leads to a verdict: one user, probes of where the time goes, then users up to the knee."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

from chabok.measure.breakdown import Effect, PrefillFit, break_down, fit_prefill
from chabok.measure.cost import Price, cost, prefill_share_of
from chabok.measure.endpoint import Endpoint, Target
from chabok.measure.failures import MeasureError
from chabok.measure.load import Sink, Stopwatch
from chabok.measure.metrics import Request, by_length, measure
from chabok.measure.outcome import Outcome
from chabok.measure.prompts import FromFile, Lengths, Ruler, Synthetic, calibrate
from chabok.measure.report import Level, Report, level_of
from chabok.measure.run import About, RunFile
from chabok.measure.schedule import Concurrent, Load, Rate
from chabok.measure.slo import DEFAULT, Limit
from chabok.measure.timeline import Timeline

GAIN = 1.05
"""Throughput that grows less than this from level to level has reached its knee."""
ANSWER_S = 2.5
"""An answer is made so short, where nothing else is asked for, that one user waits no longer for it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and for about how long.

    seconds: of the whole run. prompt_tokens, output_tokens: lengths (output None: 128, or as many as come in
    2.5 s). shared: tokens of a shared prefix. loads: just these, instead of one user and rising concurrency.
    prompts: of a file, in place of synthetic ones. find_rate: look for the highest rate that meets the
    limits, not for the most users.
    """

    seconds: float = 60.0
    prompt_tokens: Lengths = field(default_factory=lambda: Lengths(128, 128))
    output_tokens: Lengths | None = None
    shared: int = 0
    limits: tuple[Limit, ...] = DEFAULT
    most_users: int = 64
    loads: tuple[Load, ...] = ()
    seed: int = 0
    exact: bool = True
    price: Price | None = None
    probes: bool = True
    prompts: FromFile | None = None
    find_rate: bool = False


QUICK, USUAL, THOROUGH = 20.0, 60.0, 300.0
"""Seconds of a run."""


class Bench:
    """One run of a plan. ``tell`` hears what it is at, ``watch`` of requests.

    log: where everything is kept, if it is set before the run.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan,
        *,
        watch: Sink | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.target = target
        self.plan = plan
        self.stopwatch: Stopwatch | None = None
        self.report = Report(target.url, target.model, seed=plan.seed, limits=[str(x) for x in plan.limits])
        self.report.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        if isinstance(target, Endpoint):
            self.report.dialect, self.report.server = target.dialect.name, target.server
            self.report.notes += target.notes
        self.log: RunFile | None = None
        self._shares: dict[int, float | None] = {}  # of prefill, by users
        self._watch = watch
        self._tell = tell or (lambda phase: None)
        self._kept: list[Timeline] = []
        self._stopping = ""
        self._began = perf_counter()
        self._answer_s = 0.0  # of the warm-up
        self._asking: asyncio.Task[Ruler] | None = None

    def stop(self, why: str = "stopped by Ctrl-C") -> None:
        """End now; the report holds what was measured."""
        self._stopping = self._stopping or why
        if self._asking is not None:
            self._asking.cancel()
        if self.stopwatch is not None:
            self.stopwatch.stop(why)

    async def run(self) -> Report:
        """Run the plan. MeasureError: nothing can be measured there, and why."""
        plan, report = self.plan, self.report
        self._tell("asking how long prompts are")
        async with self.target.client() as client:
            ruler = await self._ruler(client)
            report.round_trip_s = await self.target.round_trip(client)
        if ruler.source == "assumed":
            report.notes.append(
                "the length of prompts could not be made exact: they are about as long as asked"
            )
        report.lengths = ruler.source
        output = plan.output_tokens or Lengths(128, 128)
        prompts = Synthetic(plan.prompt_tokens, output, seed=plan.seed, shared=plan.shared, ruler=ruler)
        async with Stopwatch(
            self.target, prompts, seed=plan.seed, exact=plan.exact, sink=self._keep, watch=self._watch
        ) as stopwatch:
            self.stopwatch = stopwatch
            self._began = perf_counter()
            if self._stopping:
                stopwatch.stop(self._stopping)
            await self._measure(stopwatch, prompts, ruler)
            report.connect_s = stopwatch.connect_s or None
        report.prompt_tokens = self._prompt_length()
        report.complete = not self._stopping
        if self._stopping:
            report.notes.append(f"{self._stopping}: this is what was measured until then")
        self._conclude()
        if self.log is not None:
            self.log.known(
                round_trip_s=report.round_trip_s,
                connect_s=report.connect_s,
                output_tokens=report.output_tokens,
                lengths=report.lengths,
                notes=report.notes,
                complete=report.complete,
                rate_capacity=report.rate_capacity,
            )
        return report

    async def _ruler(self, client: Any) -> Ruler:
        """How long prompts are; the first answers of all, for which a server may load its model."""
        self._asking = asyncio.get_running_loop().create_task(calibrate(self.target, client))
        try:
            return await self._asking
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            raise MeasureError(f"{self._stopping} before anything was measured") from None
        finally:
            self._asking = None

    @property
    def about(self) -> About:
        """What is known of the run before it begins."""
        report, plan = self.report, self.plan
        return About(
            report.url,
            report.model,
            report.dialect,
            report.server,
            report.started_at,
            seed=plan.seed,
            prompt_tokens=self._prompt_length(),
            limits=[limit.text for limit in plan.limits],
            price=plan.price,
        )

    async def _measure(self, stopwatch: Stopwatch, prompts: Synthetic, ruler: Ruler) -> None:
        plan = self.plan
        self._tell("warming up")
        first, second = [await stopwatch.one(prompts(10**9 + n), "warm-up") for n in range(2)]
        if first.failure is not None and second.failure is not None and not self._stopping:
            raise MeasureError(f"{self.target.url}: {second.failure.message}")
        if not self._stopping and not any(len(measure(each).token_times) for each in (first, second)):
            raise MeasureError(
                f"{self.target.url}: answers are complete and empty; the endpoint may be of another kind "
                "(--dialect), or the model ends such answers at once (--prompts FILE asks it something)"
            )
        self._answer_s = second.done - second.scheduled if second.done is not None else 0.0
        output = plan.output_tokens or self._answer_length(measure(second))
        self.report.output_tokens = str(output)
        prompts = Synthetic(plan.prompt_tokens, output, seed=plan.seed, shared=plan.shared, ruler=ruler)
        stopwatch.prompts = plan.prompts or prompts
        if plan.loads:
            for load in plan.loads:
                await self._level(load)
            return
        one, requests = await self._level(self._users(1))
        cold = (
            Effect(one.summary.ttft.median, first_s)
            if one.summary.ttft and (first_s := _ttft(first))
            else None
        )
        fit, cache = (None, None)
        if plan.probes and not self._stopping and one.summary.ttft is not None:
            fit, cache = await self._probe(stopwatch, ruler, one.summary.ttft.median)
        self.report.breakdown = break_down(
            requests, round_trip_s=self.report.round_trip_s, fit=fit, cache=cache, cold_start=cold
        )
        if plan.find_rate:
            await self._rise_in_rate(one)
        else:
            await self._rise(one)

    def _prompt_length(self) -> str:
        prompts = self.plan.prompts
        return str(self.plan.prompt_tokens) if prompts is None else f"{prompts.path} ({len(prompts)})"

    def _answer_length(self, pilot: Request) -> Lengths:
        tokens = 128
        if pilot.speed and pilot.speed * ANSWER_S < tokens:
            tokens = max(16, 8 * math.floor(pilot.speed * ANSWER_S / 8))
            self.report.notes.append(f"answers of {tokens} tokens, so that slow ones fit into the time")
        return Lengths(tokens, tokens)

    async def _level(self, load: Load) -> tuple[Level, list[Request]]:
        assert self.stopwatch is not None
        self._tell(str(load))
        self._kept = []
        outcome: Outcome = await self.stopwatch.run(load)
        users = load.streams if isinstance(load, Concurrent) else 0
        level, requests = level_of(outcome, self._kept, list(self.plan.limits), users, seed=self.plan.seed)
        self._kept = []
        if self.log is not None:
            self.log.load(outcome)
        self._shares[users] = prefill_share_of(requests)
        if self.plan.prompt_tokens.mix and self.plan.prompts is None and (text := by_length(requests)):
            self.report.notes.append(f"{load}: {text}")
        self.report.levels.append(level)
        if level.client_bound:
            self.report.notes.append(f"{load}: {level.client_bound}")
        if level.stopped and level.stopped != self._stopping:
            self.report.notes.append(f"{load}: {level.stopped}")
        return level, requests

    async def _rise(self, one: Level) -> None:
        """Double the users until limits are missed and throughput grows no more; then look in between."""
        plan = self.plan
        self.report.capacity = 1 if one.met else 0
        if self.log is not None:
            self.log.known(looked=True)
        best = one.summary.throughput or 0.0
        users, missed = 1, 0 if one.met else 1
        while users < plan.most_users and not self._over():
            users = min(2 * users, plan.most_users)
            level, _ = await self._level(self._users(users))
            if self._stopping:
                return
            if level.met and not missed:
                self.report.capacity = users
            elif not missed:
                missed = users
            throughput = level.summary.throughput or 0.0
            if missed and throughput < GAIN * best:
                break
            best = max(best, throughput)
        low, high = self.report.capacity, missed
        while high - low > max(1, low // 8) and low and not self._over():
            middle = (low + high) // 2
            level, _ = await self._level(self._users(middle))
            if self._stopping:
                return
            low, high = (middle, high) if level.met else (low, middle)
        self.report.capacity = low
        if not missed and low == plan.most_users:
            self.report.notes.append(f"limits were still met with {low} users; --most-users looks further")
        elif not missed:
            self.report.notes.append(
                f"the time was up, limits still met with {Concurrent(low, 1)}; --thorough looks further"
            )

    async def _rise_in_rate(self, one: Level) -> None:
        """Double the rate until limits are missed, then halve the interval between met and missed."""
        report, length = self.report, one.summary.e2e.mean if one.summary.e2e is not None else 1.0
        seconds = max(self.plan.seconds * 0.1, 5 * length)
        low, high, rate = 0.0, 0.0, 1 / max(length, 1e-3)
        report.rate_capacity = 0.0
        while not self._over() and (not high or high - low > 0.1 * high):
            level, requests = await self._level(Rate(float(f"{rate:.3g}"), seconds=seconds))
            if self._stopping or not requests:
                return
            # A queue that only grows meets limits for a while: what came must have been answered, too.
            kept_up = (
                level.summary.request_rate is None
                or level.summary.request_rate > 0.8 * len(requests) / seconds
            )
            if level.met and kept_up and not level.client_bound:
                low = report.rate_capacity = rate
            else:
                high = rate
            rate = (low + high) / 2 if high else 2 * rate
            if high and not low and high < 0.05 / max(length, 1e-3):
                return
        if not high:
            report.notes.append(f"the time was up, limits still met at {low:.3g} requests/s")

    def _users(self, users: int) -> Concurrent:
        # All begin at once, as users never do; the second round shows how they really meet. A slow endpoint
        # gets one round, so that a run is not much longer than was asked for.
        seconds = self.plan.seconds * (0.2 if users == 1 else 0.1)
        slow = self._answer_s > seconds
        if users == 1:
            return Concurrent(1, seconds=seconds, at_least=2 if slow else 5)
        return Concurrent(users, seconds=seconds, at_least=users if slow else 2 * users)

    def _over(self) -> bool:
        return bool(self._stopping) or perf_counter() - self._began > self.plan.seconds * 1.2

    async def _probe(
        self, stopwatch: Stopwatch, ruler: Ruler, ttft_s: float
    ) -> tuple[PrefillFit | None, Effect | None]:
        """Prompts of several lengths, and one that is asked again."""
        self._tell("prompts of several lengths")
        usual = self.plan.prompt_tokens.high
        longest = min(4 * usual, max(usual, int(usual * 2.0 / max(ttft_s, 1e-3))))
        lengths = sorted({max(longest // share, ruler.overhead + 2) for share in (1, 2, 4, 8)})
        timelines: list[Timeline] = []
        budget = perf_counter() + self.plan.seconds * 0.2
        for turn in range(6):
            for length in lengths:
                if self._stopping or (turn > 1 and perf_counter() > budget):
                    break
                prompt = Synthetic(length, 2, seed=self.plan.seed + 1 + turn, ruler=ruler)(10**6 + length)
                timelines.append(await stopwatch.one(prompt, "prompt lengths"))
        self._tell("a prompt that is asked again")
        gains: list[tuple[float, float]] = []
        for turn in range(3):
            if self._stopping:
                break
            prompt = Synthetic(longest, 2, seed=self.plan.seed + 100 + turn, ruler=ruler)(10**7)
            new, again = [_ttft(await stopwatch.one(prompt, "repeated prompt")) for _ in range(2)]
            if new is not None and again is not None:
                gains.append((new, again))
        cache = None
        if gains:
            middle = sorted(gains, key=lambda pair: pair[1] / pair[0])[len(gains) // 2]
            cache = Effect(*middle)
        return fit_prefill([measure(timeline) for timeline in timelines], seed=self.plan.seed), cache

    def _keep(self, timeline: Timeline) -> None:
        self._kept.append(timeline)
        if self.log is not None:
            self.log(timeline)

    def _conclude(self) -> None:
        report, price = self.report, self.plan.price
        level = report.at_capacity or report.fastest
        if price is not None and level is not None:
            report.cost = cost(price, level.summary, level.users, self._shares.get(level.users))


def _ttft(timeline: Timeline) -> float | None:
    return measure(timeline).ttft_s if timeline.ok else None
