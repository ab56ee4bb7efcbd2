"""Where the time went: what the server tells of its stages, what can only be estimated from outside, and the
one thing that costs most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from chabok.measure.metrics import Request
from chabok.measure.stats import Interval

Origin = Literal["measured", "server", "estimate"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a request in seconds (a median), and how that is known."""

    name: str
    seconds: float
    origin: Origin


@dataclass(frozen=True, slots=True)
class PrefillFit:
    """Time to first token against prompt length, fitted by a line.

    per_token_s: the slope, what one more prompt token costs. fixed_s: the intercept: network, queue, first
    decode step. interval: of the slope, 95 %. points: how many requests. Meaningful only if ``clear``.
    """

    per_token_s: float
    fixed_s: float
    interval: Interval
    points: int

    @property
    def clear(self) -> bool:
        """Whether the slope is more than noise."""
        return self.interval.low > 0

    @property
    def tokens_per_s(self) -> float:
        """Speed of reading prompts."""
        return 1 / self.per_token_s if self.per_token_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Effect:
    """What a repeated prompt gains, or a first call costs: seconds without, and with."""

    without_s: float
    with_s: float

    @property
    def share(self) -> float:
        """``with_s`` as a share of ``without_s``."""
        return self.with_s / self.without_s if self.without_s > 0 else 1.0


@dataclass(slots=True)
class Breakdown:
    """Stages of the time to first token and of the whole answer of one user's requests, medians.

    bottleneck: one sentence that names what costs most and what to do about it.
    """

    first_token: list[Stage] = field(default_factory=list)
    answer: list[Stage] = field(default_factory=list)
    fit: PrefillFit | None = None
    cache: Effect | None = None
    cold_start: Effect | None = None
    bottleneck: str = ""


ADVICE = {
    "prefill": "a prompt half as long starts {half} sooner",
    "queue": "fewer requests at once, or another replica, shorten it",
    "load": "keep the model loaded (keep-alive, preload)",
    "network": "measure from nearer to the server, or keep connections open",
    "tokenize": "a shorter prompt, or a faster tokenizer",
    "first step": "the first token costs as much as any other; a smaller or more quantized model is faster",
    "other": "the server does not say what it does then; its own log may",
}


def fit_prefill(requests: Sequence[Request], *, seed: int = 0) -> PrefillFit | None:
    """Fit a line through (new prompt tokens, time to first token); None if all are of about one length.

    Theil and Sen's slope (the median of pairwise slopes), which single delays do not bend; its interval by
    bootstrap over requests.
    """
    points = [
        (float(r.timeline.usage.prompt_tokens or r.timeline.asked_prompt or 0) - _cached(r), r.ttft_s)
        for r in requests
        if r.ok and r.ttft_s is not None and (r.timeline.usage.prompt_tokens or r.timeline.asked_prompt)
    ]
    if len(points) < 4:
        return None
    x = np.array([point[0] for point in points])
    y = np.array([point[1] for point in points], np.float64)
    if x.max() < 2 * max(x.min(), 1):
        return None

    def slope(a: np.ndarray, b: np.ndarray) -> float:
        dx = a[:, None] - a[None, :]
        far = dx > 0
        return float(np.median((b[:, None] - b[None, :])[far] / dx[far])) if far.any() else float("nan")

    rng = np.random.default_rng(seed)
    draws = [slope(x[pick], y[pick]) for pick in rng.integers(0, len(x), (200, len(x)))]
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    found = slope(x, y)
    fixed = float(np.median(y - found * x))
    return PrefillFit(found, max(fixed, 0.0), Interval(float(low), float(high)), len(points))


def _cached(request: Request) -> int:
    return request.timeline.usage.cached_tokens or 0


def break_down(
    requests: Sequence[Request],
    *,
    round_trip_s: float | None = None,
    fit: PrefillFit | None = None,
    cache: Effect | None = None,
    cold_start: Effect | None = None,
) -> Breakdown:
    """Say where one user's time went. round_trip_s: of a trivial call; the others come from probes."""
    good = [request for request in requests if request.ok and request.ttft_s is not None]
    found = Breakdown(fit=fit, cache=cache, cold_start=cold_start)
    if not good:
        return found
    ttft = _median([request.ttft_s for request in good])
    e2e = _median([request.e2e_s for request in good])
    stages = [Stage("network", min(round_trip_s, ttft), "measured")] if round_trip_s is not None else []
    told = _told(good)
    for name, seconds in told.items():
        if name not in ("decode", "sample", "detokenize"):
            stages.append(Stage(name, seconds, "server"))
    if "prefill" not in told and fit is not None and fit.clear:
        new = _median([float((r.timeline.usage.prompt_tokens or 0) - _cached(r)) for r in good])
        stages.append(Stage("prefill", min(fit.per_token_s * new, ttft), "estimate"))
    tpot = _median([request.tpot_s for request in good if request.tpot_s is not None])
    rest = ttft - sum(stage.seconds for stage in stages)
    if rest > 0:
        # The step that gives the first token is a decode step like those that follow.
        step = min(tpot, rest)
        if step > 0:
            stages.append(Stage("first step", step, "estimate"))
        if rest - step > max(0.001, 0.02 * ttft):
            stages.append(Stage("other", rest - step, "estimate"))
    found.first_token = stages
    found.answer = [Stage("first token", ttft, "measured"), Stage("decode", max(e2e - ttft, 0), "measured")]
    found.answer += [Stage(name, told[name], "server") for name in ("sample", "detokenize") if name in told]
    found.bottleneck = _bottleneck(stages, ttft, e2e)
    return found


def _told(requests: Sequence[Request]) -> dict[str, float]:
    """Medians of what the server says, in seconds; stages that take no time to speak of are left out."""
    names = ("load", "tokenize", "queue", "prefill", "decode", "sample", "detokenize")
    found = {}
    for name in names:
        values = [
            value / 1000
            for request in requests
            if request.timeline.server is not None
            and (value := getattr(request.timeline.server, f"{name}_ms")) is not None
        ]
        if len(values) * 2 >= len(requests) and (seconds := _median(values)) > 1e-5:
            found[name] = seconds
    return found


def _bottleneck(stages: Sequence[Stage], ttft: float, e2e: float) -> str:
    if not stages or ttft <= 0:
        return ""
    decode = max(e2e - ttft, 0.0)
    if decode > 2 * ttft:
        share = decode / e2e
        return (
            f"decode ({share:.0%} of the whole answer); "
            "a smaller or more quantized model, or a shorter answer, is done sooner"
        )
    most = max(stages, key=lambda stage: stage.seconds)
    advice = ADVICE.get(most.name, "").format(half=_ms(most.seconds / 2))
    label = ", estimated" if most.origin == "estimate" else ""
    return f"{most.name} ({most.seconds / ttft:.0%} of the time to first token{label}); {advice}"


def _ms(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _median(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else 0.0
