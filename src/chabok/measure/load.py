"""Puts load on an endpoint and keeps the timelines; watches itself, so that a slow client is not taken for a
slow server."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter

from chabok.measure.endpoint import Endpoint, Messages, Target
from chabok.measure.failures import MeasureError
from chabok.measure.outcome import Outcome, Tally
from chabok.measure.prompts import Prompt, Synthetic, calibrate
from chabok.measure.schedule import Concurrent, Load, Rate
from chabok.measure.timeline import Failure, Timeline
from chabok.measure.trace import Trace, Turn

PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
"""A user whose request failed waits before the next, twice as long each time."""
MOST_IN_FLIGHT = 4096
"""Open-loop requests beyond this many at once are not sent, and counted as failures of the client."""
Prompts = Callable[[int], Prompt]
Sink = Callable[[Timeline], None]


class Stopwatch:
    """One run against one endpoint: several loads after each other, one clock, one pool of connections.

    An async context manager. ``sink`` takes each timeline as its request ends; without one they are kept in
    the outcomes. ``watch`` is told, too, for progress.
    """

    def __init__(
        self,
        endpoint: Target,
        prompts: Prompts,
        *,
        seed: int = 0,
        exact: bool = True,
        sink: Sink | None = None,
        watch: Sink | None = None,
    ) -> None:
        """``exact``: force the length of answers where the dialect can."""
        self.endpoint = endpoint
        self.prompts = prompts
        self.seed = seed
        self.exact = exact
        self.client = endpoint.client()
        self.start = perf_counter()
        self.started_at = time.time()
        self.outcomes: list[Outcome] = []
        self.in_flight = 0
        self.connect_s = 0.0
        self.stopping = ""
        self._sink = sink
        self._watch = watch
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Stopwatch:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        await asyncio.sleep(0)

    def now(self) -> float:
        """Seconds since the run's start."""
        return perf_counter() - self.start

    def stop(self, why: str = "stopped") -> None:
        """End the load that runs: what is in flight is given up, what was measured is kept."""
        self.stopping = self.stopping or why
        for task in self._tasks:
            task.cancel()

    async def run(self, load: Load, phase: str = "") -> Outcome:
        """Put a load on the endpoint until it ends. ExchangeError: not even a connection can be had."""
        streams = load.streams if isinstance(load, Concurrent) else 8
        connect_s = await self.client.warm(streams)
        self.connect_s = connect_s or self.connect_s
        outcome = Outcome(phase or str(load), load, self.now())
        self.outcomes.append(outcome)
        tally = Tally(outcome)
        gc.collect()
        gc.freeze()  # what is there already need not be looked at again while tokens come
        cpu = time.thread_time()
        try:
            if isinstance(load, Concurrent):
                await self._closed(load, tally)
            elif isinstance(load, Trace):
                await self._replay(load, tally)
            else:
                await self._open(load, tally)
        finally:
            outcome.ended = self.now()
            outcome.cpu_share = (time.thread_time() - cpu) / max(outcome.ended - outcome.began, 1e-9)
            gc.unfreeze()
            outcome.stopped = outcome.stopped or self.stopping
            tally.conclude()
        return outcome

    async def one(self, prompt: Prompt, phase: str) -> Timeline:
        """Time a single request now, outside of any load."""
        outcome = Outcome(phase, Concurrent(1, requests=1), self.now())
        number, self._number = self._number, self._number + 1
        return await self._one(number, self.now(), prompt, Tally(outcome))

    # -- closed loop

    async def _closed(self, load: Concurrent, tally: Tally) -> None:
        end = None if load.seconds is None else perf_counter() + load.seconds
        tally.streams = load.streams
        first = self._number
        last = None if load.requests is None else first + load.requests

        async def user() -> None:
            pause, free = PAUSE_S, self.now()
            while (
                not self._over(tally, end if self._number >= first + load.at_least else None)
                and (last is None or self._number < last)
            ):  # fmt: skip
                number, self._number = self._number, self._number + 1
                scheduled = self.now()
                timeline = await self._one(number, scheduled, self.prompts(number), tally)
                free = timeline.done or self.now()
                if timeline.failure is None:
                    pause = PAUSE_S
                else:
                    await asyncio.sleep(min(timeline.failure.retry_after_s or pause, LONGEST_PAUSE_S))
                    pause = min(2 * pause, LONGEST_PAUSE_S)
            tally.idle_from = min(tally.idle_from, free)

        await self._together([user() for _ in range(load.streams)])

    def _over(self, tally: Tally, end: float | None) -> bool:
        return bool(self.stopping or tally.outcome.stopped) or (end is not None and perf_counter() >= end)

    # -- open loop

    async def _open(self, load: Rate, tally: Tally) -> None:
        loop = asyncio.get_running_loop()
        began = perf_counter()
        origin = self.now()
        waiting: set[asyncio.Task[None]] = set()

        async def send(number: int, scheduled: float, prompt: Prompt) -> None:
            await self._one(number, scheduled, prompt, tally)

        async def arrivals() -> None:
            for due in load.due(self.seed):
                if self._over(tally, None):
                    break
                number, self._number = self._number, self._number + 1
                prompt = self.prompts(number)  # made while there is time, not when it is due
                await _until(began + due)
                scheduled = origin + due
                if self.in_flight >= MOST_IN_FLIGHT:
                    message = f"not sent: {MOST_IN_FLIGHT} requests were unanswered already"
                    timeline = Timeline(number, scheduled, tally.outcome.phase, done=self.now())
                    timeline.failure = Failure("overload", message)
                    self._keep(timeline, tally)
                    continue
                task = loop.create_task(send(number, scheduled, prompt))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                tally.idle_from = scheduled
            if load.seconds is not None and not self.stopping:
                await _until(began + load.seconds)
                tally.idle_from = self.now()

        await self._together([arrivals()])
        if waiting:
            await asyncio.gather(*waiting, return_exceptions=True)

    # -- a trace

    async def _replay(self, trace: Trace, tally: Tally) -> None:
        began, origin = perf_counter(), self.now()

        async def session(turns: Sequence[Turn]) -> None:
            said: list[dict[str, str]] = []
            due = (turns[0].at or 0.0) / trace.speed
            for turn in turns:
                await _until(began + due)
                if self._over(tally, None):
                    return
                tally.idle_from = max(tally.idle_from, origin + due)
                number, self._number = self._number, self._number + 1
                prompt = self._prompt_of(turn, number)
                said.append({"role": "user", "content": prompt.text})
                timeline = await self._one(
                    number, origin + due, prompt, tally, tuple(said) if len(said) > 1 else (), turn.session
                )
                if timeline.failure is not None:
                    return  # what would follow was never asked
                said.append({"role": "assistant", "content": timeline.text})
                due = self.now() - origin + (turns[min(len(said) // 2, len(turns) - 1)].pause or 0.0)

        await self._together([session(turns) for turns in trace.sessions])

    def _prompt_of(self, turn: Turn, number: int) -> Prompt:
        if turn.prompt is not None:
            return Prompt(turn.prompt, None, turn.output_tokens)
        ruler = self.prompts.ruler if isinstance(self.prompts, Synthetic) else None
        made = Synthetic(turn.prompt_tokens or 1, turn.output_tokens, seed=self.seed, ruler=ruler)
        return made(number)

    async def _together(self, jobs: Sequence[Coroutine[None, None, None]]) -> None:
        tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]
        self._tasks.update(tasks)
        try:
            results = await asyncio.gather(*tasks, return_exceptions=True)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        finally:
            self._tasks.difference_update(tasks)
        for result in results:
            if isinstance(result, Exception):
                raise result

    # -- one request

    async def _one(
        self,
        number: int,
        scheduled: float,
        prompt: Prompt,
        tally: Tally,
        messages: Messages = (),
        session: str = "",
    ) -> Timeline:
        timeline = Timeline(
            number,
            scheduled,
            tally.outcome.phase,
            session,
            asked_prompt=None if messages else prompt.tokens,
            asked_output=prompt.output_tokens,
        )
        ask = self.endpoint.ask(prompt.text, prompt.output_tokens, exact=self.exact, messages=messages)
        self.in_flight += 1
        try:
            await self.endpoint.time(self.client, ask, timeline, self.start)
        finally:
            self.in_flight -= 1
            self._keep(timeline, tally)
        return timeline

    def _keep(self, timeline: Timeline, tally: Tally) -> None:
        tally.take(timeline)
        if self._sink is not None:
            self._sink(timeline)
        else:
            tally.outcome.timelines.append(timeline)
        if self._watch is not None:
            self._watch(timeline)


async def _until(instant: float) -> None:
    """Sleep until a perf_counter instant, without ever waking up before it."""
    while (left := instant - perf_counter()) > 0:
        await asyncio.sleep(left)


def run_load(
    endpoint: Endpoint,
    load: Load,
    *,
    prompts: Prompts | None = None,
    prompt_tokens: int = 128,
    output_tokens: int = 128,
    shared_prefix: int = 0,
    seed: int = 0,
    warm_up: int | None = None,
    exact: bool = True,
    sink: Sink | None = None,
) -> Outcome:
    """Put one load on an endpoint and wait for its outcome; what a script needs.

    prompts: number -> Prompt; without it synthetic ones of ``prompt_tokens``, calibrated by asking the
    endpoint first. warm_up: requests before the load that do not count (default: one per stream, 8 at most).
    MeasureError: the endpoint cannot be measured, and why.
    """

    async def go() -> Outcome:
        made: Prompts
        if prompts is not None:
            made = prompts
        else:
            async with endpoint.client() as client:
                ruler = await calibrate(endpoint, client)
            made = Synthetic(prompt_tokens, output_tokens, seed=seed, shared=shared_prefix, ruler=ruler)
        async with Stopwatch(endpoint, made, seed=seed, exact=exact, sink=sink) as stopwatch:
            streams = load.streams if isinstance(load, Concurrent) else 1
            warm = min(streams, 8) if warm_up is None else warm_up
            if warm:
                keep, stopwatch._sink = stopwatch._sink, _forget
                outcome = await stopwatch.run(Concurrent(min(streams, warm), requests=warm), "warm-up")
                stopwatch._sink = keep
                if outcome.stopped:
                    raise MeasureError(f"{endpoint.url}: {outcome.stopped}")
            return await stopwatch.run(load)

    return asyncio.run(go())


def _forget(timeline: Timeline) -> None:
    pass
