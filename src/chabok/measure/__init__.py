"""The stopwatch: what an endpoint feels like, what it carries, and where its time goes.

From a script::

    from chabok.measure import Concurrent, Endpoint, run_load, summarize

    endpoint = Endpoint.at("http://127.0.0.1:8000", model="smollm2")
    outcome = run_load(endpoint, Concurrent(16, requests=64), prompt_tokens=128, output_tokens=128)
    summary = summarize(outcome.timelines, outcome.window)
    print(summary.throughput, summary.ttft.median)
"""

from chabok.measure.connection import Patience
from chabok.measure.endpoint import Endpoint, detect
from chabok.measure.failures import ExchangeError, MeasureError
from chabok.measure.http import Client, Origin
from chabok.measure.load import Stopwatch, run_load
from chabok.measure.metrics import Request, Summary, measure, summarize
from chabok.measure.outcome import Outcome, Window
from chabok.measure.prompts import Lengths, Prompt, Ruler, Synthetic, calibrate
from chabok.measure.schedule import Concurrent, Rate
from chabok.measure.stats import Difference, Distribution, Interval, compare, describe
from chabok.measure.timeline import (
    Event,
    Failure,
    ServerTimings,
    Timeline,
    TimelineFile,
    Usage,
    read_about,
    read_timelines,
    write_timelines,
)
from chabok.measure.trace import Trace
from chabok.measure.wire import DIALECTS, Ask

__all__ = [
    "DIALECTS",
    "Ask",
    "Client",
    "Concurrent",
    "Difference",
    "Distribution",
    "Endpoint",
    "Event",
    "ExchangeError",
    "Failure",
    "Interval",
    "Lengths",
    "MeasureError",
    "Origin",
    "Outcome",
    "Patience",
    "Prompt",
    "Rate",
    "Request",
    "Ruler",
    "ServerTimings",
    "Stopwatch",
    "Summary",
    "Synthetic",
    "Timeline",
    "TimelineFile",
    "Trace",
    "Usage",
    "Window",
    "calibrate",
    "compare",
    "describe",
    "detect",
    "measure",
    "read_about",
    "read_timelines",
    "run_load",
    "summarize",
    "write_timelines",
]
