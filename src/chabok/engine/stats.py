"""What the engine counts while it runs: written by the thread that runs steps, read by anyone at any time.

A reader may meet a number of the step that is just ending; nothing is ever counted twice or lost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chabok.engine.timings import Timeline

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
"""Upper bounds of the buckets of durations that reach from a cached prompt to a long answer."""

GAPS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    1.0, 2.5, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of gaps between tokens, close together about the usual budgets."""

SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0, 256.0)
"""Upper bounds of the buckets of sequences in a step."""

WINDOW_S = 60
"""How far back the worst gap is looked for, in whole seconds."""


class Histogram:
    """Counts of values in fixed buckets, and their sum.

    bounds: upper bound of each bucket, inclusive, ascending; one more bucket holds what is above the last.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Values of each bucket alone (not of those below it)."""
        self.total = 0.0
        """Sum of all values."""

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Average value; 0 if there is none."""
        count = self.count
        return self.total / count if count else 0.0

    def cumulative(self) -> list[tuple[float, int]]:
        """(upper bound, values up to it) of each bucket, the last with an infinite bound, as Prometheus
        wants."""
        pairs: list[tuple[float, int]] = []
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), tuple(self.counts), strict=True):
            below += count
            pairs.append((bound, below))
        return pairs


class Stats:
    """Counters and histograms since the engine was made; durations in seconds.

    ttft_s: from the caller's call to the first token; itl_s: every gap between two tokens of a sequence;
    queue_s: from submission to the first row computed; prefill_s: from there to the last prompt row;
    e2e_s: from the caller's call to the end; batch: sequences in a step.
    prompt_tokens: of the prompts that began to be computed, of which cached_tokens_memory and
    cached_tokens_disk came from the prefix cache; output_tokens: generated.
    finished: requests that ended, by reason ("stop", "length", "cancelled", "deadline", "error").
    rejected: requests refused because the queue was full. step_s: seconds spent in steps.
    running, waiting, pages_used, pages_cached: at the end of the last step; pages_total: of the KV cache.
    """

    def __init__(self, pages_total: int = 0) -> None:
        self.ttft_s = Histogram(SECONDS)
        self.itl_s = Histogram(GAPS)
        self.queue_s = Histogram(SECONDS)
        self.prefill_s = Histogram(SECONDS)
        self.e2e_s = Histogram(SECONDS)
        self.batch = Histogram(SEQUENCES)
        self.submitted = self.rejected = 0
        self.prompt_tokens = self.output_tokens = 0
        self.cached_tokens_memory = self.cached_tokens_disk = 0
        self.steps = self.preemptions = 0
        self.step_s = 0.0
        self.finished = {"stop": 0, "length": 0, "cancelled": 0, "deadline": 0, "error": 0}
        self.running = self.waiting = 0
        self.pages_used = self.pages_cached = 0
        self.pages_total = pages_total
        self._gaps = [(0, 0.0)] * (WINDOW_S + 1)  # (second, worst gap in it), a ring

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache, whatever its tier."""
        return self.cached_tokens_memory + self.cached_tokens_disk

    def gap(self, now: float, worst: float) -> None:
        """Note the worst gap between tokens of a step that ended at an instant ``now``."""
        second = int(now)
        at = second % len(self._gaps)
        known, so_far = self._gaps[at]
        if known != second or worst > so_far:
            self._gaps[at] = (second, worst)

    def worst_gap_s(self, now: float | None = None) -> float:
        """The longest gap between two tokens of one sequence within the last minute; 0 if there was none."""
        second = int(perf_counter() if now is None else now)
        return max((gap for at, gap in tuple(self._gaps) if second - WINDOW_S < at <= second), default=0.0)

    def ended(self, reason: str, timeline: Timeline) -> None:
        """Count a request that ended."""
        self.finished[reason] += 1
        if timeline.finished is not None:
            self.e2e_s.observe(timeline.finished - timeline.arrived)
