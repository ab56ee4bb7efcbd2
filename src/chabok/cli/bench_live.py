"""What a run is at, while it runs: one line on a terminal, a line per phase elsewhere."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from chabok.cli.speed import milliseconds
from chabok.cli.terminal import harmless

if TYPE_CHECKING:
    from rich.live import Live as RichLive

    from chabok.measure.bench import Bench
    from chabok.measure.timeline import Timeline

EVERY_S = 0.25
"""Drawn no oftener: drawing takes the time of a few hundred tokens."""
RECENT_S = 3.0


class Live:
    """Draws phase, requests, and the latest first token, gap and throughput; a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._phase, self._since = "", perf_counter()
        self._done = 0
        self._failed = 0
        self._recent: deque[tuple[float, float, float, int]] = deque(maxlen=512)
        self._live: RichLive | None = None

    def __enter__(self) -> Live:
        if self._terminal and not self._quiet:
            from rich.console import Console
            from rich.live import Live as RichLive

            self._live = RichLive(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, phase: str) -> None:
        """A new phase begins."""
        self._phase, self._since = phase, perf_counter()
        if not self._quiet and not self._terminal:
            print(f"{phase} ...", file=sys.stderr, flush=True)

    def watch(self, timeline: Timeline) -> None:
        """A request ended."""
        self._done += 1
        if timeline.failure is not None:
            self._failed += 1
            return
        tokens = [event.at for event in timeline.events if event.kind in ("content", "reasoning", "tool")]
        if tokens:
            gap = (tokens[-1] - tokens[0]) / max(len(tokens) - 1, 1)
            self._recent.append((perf_counter(), tokens[0] - timeline.scheduled, gap, len(tokens)))

    async def draw(self, bench: Bench) -> None:
        """Draw again and again until cancelled."""
        while self._live is not None:
            self._live.update(self._line(bench), refresh=True)
            await asyncio.sleep(EVERY_S)

    def _line(self, bench: Bench) -> str:
        now = perf_counter()
        recent = [each for each in self._recent if now - each[0] < RECENT_S] or list(self._recent)[-1:]
        phase = f"{harmless(self._phase)} ({now - self._since:.0f} s)"
        parts = [phase, f"{self._done} request{'' if self._done == 1 else 's'}"]
        if bench.stopwatch is not None and bench.stopwatch.in_flight:
            parts.append(f"{bench.stopwatch.in_flight} running")
        if self._failed:
            parts.append(f"{self._failed} failed")
        if recent:
            middle = len(recent) // 2
            parts.append(f"first token {milliseconds(sorted(each[1] for each in recent)[middle])}")
            parts.append(f"gap {milliseconds(sorted(each[2] for each in recent)[middle])}")
        within = [each for each in recent if now - each[0] < RECENT_S]
        if within:
            parts.append(f"{sum(each[3] for each in within) / RECENT_S:.0f} tokens/s")
        return " · ".join(parts)
