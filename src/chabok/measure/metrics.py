"""Every metric, derived from timelines exactly as defined in its docstring.

An event is a token event if it carries reasoning, content or tool text. How many tokens it carries: from the
server's running count where it gives one; else one each, where that agrees with the usage; else the usage
spread over the events by length of text. ``Request.spread`` says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from chabok.measure.outcome import Window
from chabok.measure.stats import Distribution, describe, describe_pooled
from chabok.measure.timeline import Event, Timeline

Floats = NDArray[np.float64]
Source = Literal["usage", "tokenizer", "events"]
Spread = Literal["one per event", "server", "by length"]
TOKEN_KINDS = frozenset({"reasoning", "content", "tool"})


@dataclass(slots=True)
class Request:
    """The metrics of one request; seconds and tokens. None: it did not get that far.

    ttft_s: first token event (reasoning counts) - scheduled. ttfvt_s: first content or tool event -
    scheduled. e2e_s: last event - scheduled. tpot_s: (last token - first token) / (tokens - 1).
    worst_gap_s: longest gap between token events. lateness_s: sent - scheduled, without the time a new
    connection took (connect_s). gaps: float64[token events - 1], raw gaps. itl: float64, gaps per token: an
    event of n tokens gives n gaps of gap / n. token_times, token_counts: when tokens came, and how many.
    output_tokens: all that were produced, reasoning among them, as ``source`` counts.
    """

    timeline: Timeline
    ttft_s: float | None
    ttfvt_s: float | None
    e2e_s: float | None
    tpot_s: float | None
    worst_gap_s: float | None
    lateness_s: float | None
    connect_s: float
    output_tokens: int
    reasoning_tokens: int | None
    source: Source
    spread: Spread
    gaps: Floats
    itl: Floats
    token_times: Floats
    token_counts: NDArray[np.int64]

    @property
    def ok(self) -> bool:
        """Whether it is complete, without an error, and produced at least one token."""
        return self.timeline.ok and len(self.token_times) > 0

    @property
    def speed(self) -> float | None:
        """1 / TPOT: tokens per second as one user feels it."""
        return 1 / self.tpot_s if self.tpot_s else None


def measure(timeline: Timeline) -> Request:
    """Derive the metrics of one request."""
    tokens = [event for event in timeline.events if event.kind in TOKEN_KINDS]
    times = np.array([event.at for event in tokens], np.float64)
    counts, spread = _counts(timeline, tokens)
    gaps = np.diff(times)
    scheduled = timeline.scheduled
    visible = next((event.at for event in tokens if event.kind != "reasoning"), None)
    last = next((event.at for event in reversed(timeline.events) if event.kind != "error"), None)
    total = int(counts.sum())
    # Tokens that came in the first event were all there at once; n tokens span n - 1 steps.
    tpot = float((times[-1] - times[0]) / (total - 1)) if total > 1 and len(times) > 1 else None
    usage = timeline.usage
    source: Source = "events"
    output = total
    if usage.output_tokens is not None:
        source, output = "usage", usage.output_tokens
    elif timeline.counted is not None:
        source, output = "tokenizer", timeline.counted
    reasoning = usage.reasoning_tokens
    if reasoning is None and any(event.kind == "reasoning" for event in tokens):
        reasoning = int(sum(n for n, event in zip(counts.tolist(), tokens) if event.kind == "reasoning"))
    return Request(
        timeline,
        ttft_s=float(times[0]) - scheduled if len(times) else None,
        ttfvt_s=None if visible is None else visible - scheduled,
        e2e_s=None if last is None else last - scheduled,
        tpot_s=tpot,
        worst_gap_s=float(gaps.max()) if len(gaps) else None,
        lateness_s=None if timeline.sent is None else timeline.sent - timeline.connect_s - scheduled,
        connect_s=timeline.connect_s,
        output_tokens=output,
        reasoning_tokens=reasoning,
        source=source,
        spread=spread,
        gaps=gaps,
        itl=_per_token(gaps, counts),
        token_times=times,
        token_counts=counts,
    )


def _per_token(gaps: Floats, counts: NDArray[np.int64]) -> Floats:
    """Gaps per token; the gap before an event without a whole token is added to the next one's."""
    if not len(gaps):
        return gaps
    following = counts[1:]
    if (following == 1).all():
        return gaps
    ends = np.flatnonzero(following > 0)
    joined = np.diff(np.concatenate(([0.0], np.cumsum(gaps)[ends])))
    return np.repeat(joined / following[ends], following[ends])


def _counts(timeline: Timeline, tokens: Sequence[Event]) -> tuple[NDArray[np.int64], Spread]:
    """int64[token events]: how many tokens each carries."""
    n = len(tokens)
    usage = timeline.usage
    total = usage.output_tokens if usage.output_tokens is not None else timeline.counted
    if not n:
        return np.zeros(0, np.int64), "one per event"
    hidden = 0
    if usage.reasoning_tokens and not any(event.kind == "reasoning" for event in tokens):
        hidden = usage.reasoning_tokens  # thought, counted, and never sent
    running = [(place, event.tokens) for place, event in enumerate(tokens) if event.tokens is not None]
    if total is None and not running:
        return np.ones(n, np.int64), "one per event"
    shown = None if total is None else max(total - hidden, 0)
    # The token that ends an answer is counted, and shown to nobody.
    if not running and (shown == n or (shown == n + 1 and timeline.finish not in ("length", "max_tokens"))):
        return np.ones(n, np.int64), "one per event"
    marks = [(place, max(count - hidden, 0)) for place, count in running]
    if shown is not None and (not marks or marks[-1][0] != n - 1):
        marks.append((n - 1, shown))
    counts = np.ones(n, np.int64)
    before, begin = 0, 0
    for place, count in marks:
        if place == begin:  # the usual case: a count with each event
            counts[place] = max(count - before, 0)
            before, begin = max(count, before), place + 1
            continue
        counts[begin : place + 1] = _share(
            count - before, [event.text for event in tokens[begin : place + 1]]
        )
        before, begin = max(count, before), place + 1
    if not counts[0]:
        counts[0] = 1  # text came, so a token did
    exact = len(running) >= n - 1
    return counts, "server" if exact else "by length"


def _share(total: int, texts: list[str]) -> NDArray[np.int64]:
    """Spread tokens over events by length of text: one each first, if they suffice."""
    n = len(texts)
    if total <= 0:
        return np.zeros(n, np.int64)
    least = 1 if total >= n else 0
    lengths = np.cumsum([max(len(text), 1) for text in texts], dtype=np.float64)
    ends = np.ceil(lengths / lengths[-1] * (total - n * least) - 1e-9).astype(np.int64)
    return np.diff(np.concatenate((np.zeros(1, np.int64), ends))) + least


@dataclass(slots=True)
class ErrorClass:
    """Failures of one class: how many, and what the first of them said."""

    kind: str
    count: int
    example: str


def by_length(requests: Iterable[Request]) -> str:
    """First tokens of a mix of prompt lengths apart, in words; empty if there is only one length.

    Lengths within a factor of two of each other count as one.
    """
    groups: dict[int, list[Request]] = {}
    for request in requests:
        length = request.timeline.asked_prompt or 0
        if request.ok and request.ttft_s is not None and length:
            groups.setdefault(length.bit_length(), []).append(request)
    told = []
    for _, group in sorted(groups.items()):
        lengths = [request.timeline.asked_prompt or 0 for request in group]
        tokens = str(min(lengths)) if min(lengths) == max(lengths) else f"{min(lengths)}-{max(lengths)}"
        middle = float(np.median([request.ttft_s for request in group if request.ttft_s is not None]))
        told.append(f"{middle * 1000:.0f} ms for {tokens} tokens ({len(group)} prompts)")
    return f"first token p50 {', '.join(told)}" if len(told) > 1 else ""


@dataclass(slots=True)
class Summary:
    """The metrics of many requests; failed ones count in ``errors`` alone.

    Distributions are None where nothing was measured; all are in seconds but ``speed`` (tokens/s).
    itl: pooled over requests; event_gaps: the raw gaps between events. throughput: output tokens per second
    of the steady window, whatever request they belong to; request_rate: requests per second that ended in it.
    window_s: its length; steady: False if there was none and the whole run was taken. sources, spreads: how
    tokens were counted and spread, with how many requests. cached_tokens: share of the prompt tokens that the
    server took from its cache, if it says so.
    """

    requests: int = 0
    failed: int = 0
    errors: list[ErrorClass] = field(default_factory=list)
    ttft: Distribution | None = None
    ttfvt: Distribution | None = None
    itl: Distribution | None = None
    event_gaps: Distribution | None = None
    worst_gap: Distribution | None = None
    tpot: Distribution | None = None
    e2e: Distribution | None = None
    speed: Distribution | None = None
    lateness: Distribution | None = None
    connect: Distribution | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    reasoning_tokens: int | None = None
    shortest_answer: int = 0
    longest_answer: int = 0
    throughput: float | None = None
    prompt_throughput: float | None = None
    request_rate: float | None = None
    window_s: float = 0.0
    steady: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    spreads: dict[str, int] = field(default_factory=dict)


def summarize(timelines: Iterable[Timeline], window: Window | None = None, *, seed: int = 0) -> Summary:
    """Summarize requests of one load. window: when it was steady; the whole run where it is None."""
    return summarize_requests([measure(timeline) for timeline in timelines], window, seed=seed)


def summarize_requests(found: list[Request], window: Window | None = None, *, seed: int = 0) -> Summary:
    """As ``summarize``, of requests whose metrics are known already."""
    good = [request for request in found if request.ok]
    summary = Summary(len(found), len(found) - len(good), _errors(found))

    def column(name: str) -> Distribution | None:
        values = [value for request in good if (value := getattr(request, name)) is not None]
        return describe(values, seed=seed)

    for name in ("ttft", "ttfvt", "worst_gap", "tpot", "e2e"):
        setattr(summary, name, column(f"{name}_s"))
    summary.speed = column("speed")
    late = [request.lateness_s for request in found if request.lateness_s is not None]
    summary.lateness = describe(late, seed=seed)
    summary.connect = describe([request.connect_s for request in found if request.connect_s > 0], seed=seed)
    summary.itl = describe_pooled([request.itl for request in good], seed=seed)
    summary.event_gaps = describe_pooled([request.gaps for request in good], seed=seed)
    usages = [request.timeline.usage for request in good]
    summary.prompt_tokens = _sum([usage.prompt_tokens for usage in usages])
    summary.cached_tokens = _sum([usage.cached_tokens for usage in usages])
    summary.reasoning_tokens = _sum([request.reasoning_tokens for request in good])
    outputs = [request.output_tokens for request in good]
    summary.output_tokens = sum(outputs)
    summary.shortest_answer, summary.longest_answer = min(outputs, default=0), max(outputs, default=0)
    summary.sources = dict(Counter(request.source for request in good))
    summary.spreads = dict(Counter(request.spread for request in good))
    _throughput(summary, found, good, window)
    return summary


def _throughput(summary: Summary, found: list[Request], good: list[Request], window: Window | None) -> None:
    if not good:
        return
    if window is None:
        starts = [request.timeline.scheduled for request in found]
        ends = [request.timeline.done for request in found if request.timeline.done is not None]
        window = Window(min(starts), max(ends))
    else:
        summary.steady = True
    summary.window_s = window.seconds
    if window.seconds <= 0:
        return
    times = np.concatenate([request.token_times for request in good])
    # Tokens that were counted but not seen (hidden reasoning, the end) come with those that were.
    scale = [request.output_tokens / max(int(request.token_counts.sum()), 1) for request in good]
    weights = np.concatenate([request.token_counts * factor for request, factor in zip(good, scale)])
    inside = (times > window.start) & (times <= window.end)
    summary.throughput = float(weights[inside].sum()) / window.seconds
    ended = [r for r in good if r.timeline.done is not None and window.start < r.timeline.done <= window.end]
    summary.request_rate = len(ended) / window.seconds
    begun = [r for r in good if r.ttft_s is not None and window.start < r.token_times[0] <= window.end]
    prompts = _sum([request.timeline.usage.prompt_tokens for request in begun])
    summary.prompt_throughput = None if prompts is None else prompts / window.seconds


def _errors(found: list[Request]) -> list[ErrorClass]:
    classes: dict[str, ErrorClass] = {}
    for request in found:
        failure = request.timeline.failure
        if request.ok:
            continue
        kind, message = ("no tokens", "the answer is complete and empty") if failure is None else failure[:2]
        known = classes.setdefault(kind, ErrorClass(kind, 0, message))
        known.count += 1
    return sorted(classes.values(), key=lambda each: -each.count)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
