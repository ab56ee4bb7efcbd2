"""What each metric is: its name, its unit, which direction is good, and the definition shown beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["s", "tokens/s", "requests/s", "share"]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as reports name it. of: what one value of its distribution belongs to; ``load``: it has none,
    there is one number for a whole load. lower: less is better."""

    name: str
    title: str
    unit: Unit
    of: Literal["request", "gap", "load"]
    lower: bool
    text: str


_ALL = (
    Metric("ttft", "TTFT", "s", "request", True,
           "Time to first token: from when the request was due to the first event with a token; "
           "reasoning counts, an empty or role-only event does not."),
    Metric("ttfvt", "Visible TTFT", "s", "request", True,
           "From when the request was due to the first token of the visible answer."),
    Metric("itl", "ITL", "s", "gap", True,
           "Inter-token latency: the gaps between consecutive tokens, of all requests together; an event "
           "of n tokens counts as n gaps of an n-th each."),
    Metric("event_gaps", "Event gaps", "s", "gap", True,
           "The gaps between consecutive events with tokens, as they came, of all requests together."),
    Metric("worst_gap", "Worst gap", "s", "request", True, "The longest gap between events of a request."),
    Metric("tpot", "TPOT", "s", "request", True,
           "Time per output token: (last token - first token) / (tokens - 1) of a request."),
    Metric("e2e", "E2E", "s", "request", True, "From when the request was due to its last event."),
    Metric("speed", "Speed", "tokens/s", "request", False, "1 / TPOT: the pace as one user feels it."),
    Metric("throughput", "Throughput", "tokens/s", "load", False,
           "Output tokens per second of the steady window, without ramp-up and drain."),
    Metric("prompt_throughput", "Prompt throughput", "tokens/s", "load", False,
           "Prompt tokens of the requests whose first token came in the steady window, per second of it."),
    Metric("request_rate", "Requests", "requests/s", "load", False,
           "Requests that ended in the steady window, per second of it."),
    Metric("goodput", "Goodput", "requests/s", "load", False,
           "Requests per second of the steady window that kept every stated limit."),
    Metric("failed", "Failed", "share", "load", True,
           "Requests that failed: an error inside a stream, a cut or an empty answer is a failure too."),
    Metric("lateness", "Lateness", "s", "request", True,
           "How far the load generator itself fell behind: actual send - due."),
    Metric("cached", "Cached", "share", "load", False,
           "Prompt tokens that the server took from its prefix cache, as it says itself."),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _ALL}
"""By name, in the order in which they are shown."""

COUNTED = {
    "usage": "tokens as the server counts them",
    "tokenizer": "tokens as a tokenizer counts them",
    "events": "tokens taken to be one per event, as the server tells no counts",
}
"""What ``Summary.sources`` mean."""
