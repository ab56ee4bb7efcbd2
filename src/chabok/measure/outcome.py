"""What a load did: counts kept while it runs, in little memory however long, and what they come to."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from chabok.measure.schedule import Concurrent, Load
from chabok.measure.timeline import Timeline

HOPELESS = frozenset(
    {"connect", "tls", "protocol", "http 400", "http 401", "http 403", "http 404", "http 405"}
)
"""Failures after which, where nothing ever succeeded, going on tells nothing new."""
BUSY_SHARE, LATE_S = 0.8, 0.010
"""Share of a core, and lateness p99, beyond which the client is the bottleneck."""

STEADY_SHARE = 0.2
"""A steady window shorter than this share of its load is none."""


@dataclass(frozen=True, slots=True)
class Window:
    """From when to when the load was steady, seconds since the run's start."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.start


@dataclass(slots=True)
class Outcome:
    """What one load did.

    window: ramp-up and drain excluded; None if the load was never steady. cpu_share: CPU time of this
    thread / wall time. lateness_p99_s: how far the client fell behind its schedule. timelines: empty if a
    sink took them. stopped: why it ended early, if it did.
    """

    phase: str
    load: Load
    began: float
    ended: float = 0.0
    window: Window | None = None
    cpu_share: float = 0.0
    lateness_p99_s: float = 0.0
    requests: int = 0
    failed: int = 0
    stopped: str = ""
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def client_bound(self) -> str:
        """A sentence if the client was the bottleneck; empty if it was not."""
        if self.lateness_p99_s > LATE_S:
            return (
                f"the client fell behind: 1 request in 100 was sent {self.lateness_p99_s * 1000:.0f} ms "
                "or more after it was due; these numbers are the client's, not the server's"
            )
        if self.cpu_share > BUSY_SHARE:
            return (
                f"the client used {self.cpu_share:.0%} of a core; "
                "these numbers are the client's as much as the server's"
            )
        return ""


class Tally:
    """Counts of a load that need little memory however long it runs."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.streams = 0  # of a closed loop
        self.idle_from = float("inf") if isinstance(outcome.load, Concurrent) else 0.0
        self._late = array("d")
        self._first_tokens = 0
        self._steady_from = 0.0
        self._first_end = float("inf")
        self._in_row = 0

    def take(self, timeline: Timeline) -> None:
        """Count a request that ended."""
        outcome = self.outcome
        outcome.requests += 1
        if timeline.sent is not None:
            self._late.append(timeline.sent - timeline.connect_s - timeline.scheduled)
        if timeline.failure is not None:
            outcome.failed += 1
            self._in_row += 1
            limit = max(5, self.streams)
            if outcome.failed == outcome.requests >= limit and timeline.failure.kind in HOPELESS:
                outcome.stopped = f"the first {outcome.requests} requests failed: {timeline.failure.message}"
            return
        if timeline.done is not None:
            self._first_end = min(self._first_end, timeline.done)
        if self._first_tokens < self.streams:
            # Full load begins when the last of the first round has its first token.
            first = next((e.at for e in timeline.events if e.kind in ("content", "reasoning", "tool")), None)
            if first is not None:
                self._first_tokens += 1
                self._steady_from = max(self._steady_from, first)

    def conclude(self) -> None:
        """Fill in what is known at the end."""
        outcome = self.outcome
        if len(self._late):
            late = sorted(self._late)
            outcome.lateness_p99_s = max(late[min(int(len(late) * 0.99), len(late) - 1)], 0.0)
        # An open loop is steady from the first answer to the last arrival.
        start = self._steady_from if isinstance(outcome.load, Concurrent) else self._first_end
        end = min(self.idle_from, outcome.ended)
        if isinstance(outcome.load, Concurrent) and outcome.load.streams == 1:
            start, end = outcome.began, outcome.ended
        # What is left of a short load between ramp-up and drain is too little to speak for it.
        enough = end - start >= STEADY_SHARE * (outcome.ended - outcome.began) and end > start
        if enough and outcome.requests > outcome.failed:
            outcome.window = Window(start, end)
