"""Prometheus metrics: what engines counted of themselves, and what the server counts of HTTP.

Nothing is measured here that the engine measures; ``chabok.engine.stats`` is only given its names and units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry
from starlette.routing import BaseRoute, Route

from chabok.server.record import Record

if TYPE_CHECKING:
    from chabok.engine.engine import Engine
    from chabok.server.roster import Roster

HISTOGRAMS = {
    "ttft_s": ("chabok_time_to_first_token_seconds", "From a request's arrival to its first token"),
    "itl_s": ("chabok_inter_token_latency_seconds", "Every gap between two tokens of an answer"),
    "queue_s": ("chabok_queue_time_seconds", "From a request's submission to its first computed row"),
    "prefill_s": ("chabok_prefill_time_seconds", "From there to the end of its prompt"),
    "e2e_s": ("chabok_request_duration_seconds", "From a request's arrival to the end of its answer"),
    "batch": ("chabok_batch_size", "Sequences in a step"),
}

COUNTERS = {
    "submitted": ("chabok_requests_submitted", "Requests taken by the engine"),
    "rejected": ("chabok_requests_rejected", "Requests refused because the queue was full"),
    "prompt_tokens": ("chabok_prompt_tokens", "Tokens of prompts, cached ones included"),
    "output_tokens": ("chabok_output_tokens", "Tokens generated"),
    "steps": ("chabok_steps", "Steps of the engine"),
    "step_s": ("chabok_step_seconds", "Time spent in steps"),
    "preemptions": ("chabok_preemptions", "Sequences that gave their pages up and were recomputed"),
}

GAUGES = {
    "running": ("chabok_requests_running", "Sequences being worked on"),
    "waiting": ("chabok_requests_waiting", "Requests in the queue"),
    "pages_used": ("chabok_kv_pages_used", "Pages of 64 tokens in use by running sequences"),
    "pages_cached": ("chabok_kv_pages_cached", "Pages kept for prefixes that come again"),
    "pages_total": ("chabok_kv_pages", "Pages of the key-value cache"),
}


class Metrics(Collector):
    """Counts requests (an observer of the watch) and renders everything when Prometheus asks."""

    def __init__(self, roster: Roster, routes: list[BaseRoute]) -> None:
        self._roster = roster
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._by_path: dict[str, str] = {}
        self._answered: Counter[tuple[str, str, int]] = Counter()
        self._seconds: Counter[str] = Counter()
        self._running = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def began(self, record: Record) -> None:
        """Count a request that came."""
        self._running += 1

    def ended(self, record: Record) -> None:
        """Count a request that is over."""
        self._running -= 1
        self._answered[(self.route(record.path), record.method, record.status)] += 1

    def route(self, path: str) -> str:
        """The path as the routes have it, "other" for one that none has: labels must not grow without end."""
        known = self._by_path.get(path)
        if known is None:
            found = next((route for route in self._routes if route.path_regex.match(path)), None)
            known = found.path if found is not None else "other"
            if found is not None and len(self._by_path) < 1000:
                self._by_path[path] = known
        return known

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their media type, in the format that is accepted."""
        encoder, media_type = choose_encoder(accept)
        data: bytes = encoder(self._registry)
        return data, media_type

    def collect(self) -> Iterator[Metric]:
        """All metrics but the process's own, which prometheus-client knows."""
        yield from self._server()
        engines = {served.name: served.llm.llm.engine for served in self._roster.loaded()}
        for field, (name, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(name, f"{text}.", labels=["model"])
            for model, engine in engines.items():
                found = getattr(engine.stats, field)
                buckets = [
                    ("+Inf" if bound == float("inf") else repr(bound), n) for bound, n in found.cumulative()
                ]
                histogram.add_metric([model], buckets, sum_value=found.total)
            yield histogram
        for field, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, f"{text}.", labels=["model"])
            for model, engine in engines.items():
                counter.add_metric([model], getattr(engine.stats, field))
            yield counter
        for field, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, f"{text}.", labels=["model"])
            for model, engine in engines.items():
                gauge.add_metric([model], getattr(engine.stats, field))
            yield gauge
        yield from _labelled(engines)

    def _server(self) -> Iterator[Metric]:
        from chabok import __version__

        roster = self._roster
        info = GaugeMetricFamily("chabok_build_info", "Which Chabok this is.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info
        requests = CounterMetricFamily(
            "chabok_http_requests",
            "HTTP requests answered; 499: the client left.",
            labels=["route", "method", "status"],
        )
        for (route, method, status), n in tuple(self._answered.items()):
            requests.add_metric([route, method, str(status)], n)
        yield requests
        yield _one("chabok_http_requests_in_progress", "HTTP requests being answered.", self._running)
        yield _one("chabok_ready", "1 if requests are welcome, as /ready says.", 0 if roster.unready else 1)
        yield _one("chabok_memory_budget_bytes", "Memory for all loaded models.", roster.budget)
        loads = CounterMetricFamily("chabok_model_loads", "Models loaded.")
        loads.add_metric([], roster.loads)
        yield loads
        failed = CounterMetricFamily("chabok_model_load_failures", "Models that could not be loaded.")
        failed.add_metric([], roster.load_failures)
        yield failed
        loaded = GaugeMetricFamily("chabok_model_loaded", "1 while a model is loaded.", labels=["model"])
        memory = GaugeMetricFamily("chabok_model_memory_bytes", "Memory of a model.", labels=["model"])
        took = GaugeMetricFamily("chabok_model_load_seconds", "How long loading took.", labels=["model"])
        for entry in roster.entries():
            if entry.loaded or entry.preloaded:
                loaded.add_metric([entry.name], int(entry.loaded))
            if entry.loaded:
                memory.add_metric([entry.name], entry.memory_bytes)
                took.add_metric([entry.name], entry.load_s)
        yield from (loaded, memory, took)


def _one(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _labelled(engines: dict[str, Engine]) -> Iterator[Metric]:
    """Those with a label beside the model's, and the worst gap, which is a question of when."""
    cached = CounterMetricFamily(
        "chabok_cached_tokens", "Tokens of prompts found in the prefix cache.", labels=["model", "tier"]
    )
    finished = CounterMetricFamily(
        "chabok_requests_finished", "Requests that ended, by reason.", labels=["model", "reason"]
    )
    worst = GaugeMetricFamily(
        "chabok_worst_gap_seconds", "Longest gap between tokens in the last minute.", labels=["model"]
    )
    now = perf_counter()
    for model, engine in engines.items():
        stats = engine.stats
        cached.add_metric([model, "memory"], stats.cached_tokens_memory)
        cached.add_metric([model, "disk"], stats.cached_tokens_disk)
        for reason, n in stats.finished.items():
            finished.add_metric([model, reason], n)
        worst.add_metric([model], stats.worst_gap_s(now))
    yield from (cached, finished, worst)
