"""Limits that requests should keep (service level objectives), and how many do."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from chabok.measure.failures import MeasureError
from chabok.measure.metrics import Request
from chabok.measure.outcome import Window

TIMES = {
    "ttft": "first token",
    "ttfvt": "first visible token",
    "itl": "every gap between tokens",
    "worst_gap": "worst gap",
    "tpot": "time per token",
    "e2e": "whole answer",
}
"""Metrics that may be at most so long, and what they are called."""
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Limit:
    """``percentile`` percent of requests keep ``metric`` at most ``bound`` seconds; ``speed``: at least
    ``bound`` tokens per second. For ``itl`` it is that share of the gaps, of a request or of all."""

    metric: str
    bound: float
    percentile: float = 95.0

    @classmethod
    def of(cls, text: str) -> Limit:
        """From ``ttft=500ms:p95``, ``itl=50ms:p99`` or ``speed=20``; MeasureError says what is wrong."""
        found = re.fullmatch(
            r"\s*(\w+)\s*(?:=|<=?|>=?)\s*([\d.]+)\s*(us|ms|s|)(?:/s)?\s*(?::\s*p?([\d.]+))?\s*", text
        )
        names = ", ".join([*TIMES, "speed"])
        if not found or (found[1] not in TIMES and found[1] != "speed"):
            raise MeasureError(f"{text!r} is no limit; one is ttft=500ms:p95 or speed=20, of {names}")
        try:
            bound, percentile = float(found[2]), float(found[4] or 95)
        except ValueError:
            raise MeasureError(f"{text!r}: a number is wrong; a limit is ttft=500ms:p95") from None
        if found[1] == "speed" and found[3]:
            raise MeasureError(f"{text!r}: speed is in tokens per second and has no unit; try speed=20")
        if found[1] != "speed":
            if not found[3]:
                raise MeasureError(f"{text!r}: the bound has no unit (us, ms, s); try {found[1]}=500ms")
            bound *= _UNITS[found[3]]
        if not bound > 0 or not 0 < percentile <= 100:
            raise MeasureError(f"{text!r}: the bound must be more than 0, the percentile in 1..100")
        return cls(found[1], bound, percentile)

    @property
    def text(self) -> str:
        """As it is typed, and read by ``of``."""
        unit = "" if self.metric == "speed" else "s"
        return f"{self.metric}={self.bound:g}{unit}:p{self.percentile:g}"

    def kept_by(self, request: Request) -> bool:
        """Whether a request keeps it; a failed one never does."""
        if not request.ok:
            return False
        if self.metric == "itl":
            return len(request.itl) == 0 or self._share_of_gaps([request]) * 100 >= self.percentile - 1e-9
        if self.metric == "speed":
            return request.speed is None or request.speed >= self.bound
        value = getattr(request, f"{self.metric}_s")
        # A request without a second token has no gap to be too long.
        return value is None or value <= self.bound

    def share(self, requests: Sequence[Request]) -> float:
        """Share of requests (of gaps, for ``itl``) that keep it; 0 of none."""
        if not requests:
            return 0.0
        if self.metric == "itl":
            good = [request for request in requests if request.ok]
            return self._share_of_gaps(good) * len(good) / len(requests)
        return sum(self.kept_by(request) for request in requests) / len(requests)

    def met(self, requests: Sequence[Request]) -> bool:
        """Whether so many keep it as it asks for."""
        return self.share(requests) * 100 >= self.percentile - 1e-9

    def _share_of_gaps(self, requests: Sequence[Request]) -> float:
        within = sum(int((request.itl <= self.bound).sum()) for request in requests)
        gaps = sum(len(request.itl) for request in requests)
        return within / gaps if gaps else 1.0

    def __str__(self) -> str:
        if self.metric == "speed":
            return f"{self.bound:g} tokens/s each"
        shown = f"{self.bound * 1000:g} ms" if self.bound < 1 else f"{self.bound:g} s"
        return f"{TIMES[self.metric]} < {shown}"


DEFAULT = (Limit("ttft", 0.5), Limit("speed", 20.0))
"""What a conversation needs."""


def goodput(requests: Sequence[Request], limits: Sequence[Limit], window: Window | None) -> float | None:
    """Requests per second of the window (or the whole run) that ended in it and kept every limit."""
    ends = [request.timeline.done for request in requests if request.timeline.done is not None]
    if not ends:
        return None
    if window is None:
        window = Window(min(request.timeline.scheduled for request in requests), max(ends))
    if window.seconds <= 0 or not math.isfinite(window.seconds):
        return None
    good = [
        request
        for request in requests
        if request.timeline.done is not None
        and window.start < request.timeline.done <= window.end
        and all(limit.kept_by(request) for limit in limits)
    ]
    return len(good) / window.seconds
