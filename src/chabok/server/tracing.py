"""OpenTelemetry traces, where its packages are installed and it is told where to send them.

``pip install chabok[otel]`` and ``OTEL_EXPORTER_OTLP_ENDPOINT`` switch them on. Spans are made after a
request has ended, from the times that were measured anyway, and sent by a thread of their own. Names are
those of the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai/).
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from chabok.server.record import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger("chabok.server")

SWITCHES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
}


def tracing() -> Tracer | None:
    """The tracer that the environment asks for; None if it does not, or the packages are missing (logged)."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or (
        os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none"
    )
    if off or not any(os.environ.get(name) for name in SWITCHES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        log.warning("traces are asked for, but OpenTelemetry is missing: pip install 'chabok[otel]'")
        return None
    return Tracer(OTLPSpanExporter())


class Tracer:
    """Turns records into spans: one of the request, below it queue, prefill and decode."""

    def __init__(self, exporter: SpanExporter, *, at_once: bool = False) -> None:
        """``at_once``: export in the calling thread, for tests."""
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        from chabok import __version__

        resource = Resource.create(
            {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "chabok"), SERVICE_VERSION: __version__}
        )
        self._provider = TracerProvider(resource=resource)
        processor = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("chabok", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def began(self, record: Record) -> None:
        """Nothing is known yet."""

    def ended(self, record: Record) -> None:
        """Make the spans of a request that asked a model."""
        if not record.model:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        start = int(record.at * 1e9)
        end = start + int(record.duration_s * 1e9)
        operation = OPERATIONS.get(record.path, "chat")
        span = self._tracer.start_span(
            f"{operation} {record.model}",
            context=self._propagator.extract(_carrier(record)),
            kind=SpanKind.SERVER,
            attributes=_attributes(record, operation),
            start_time=start,
        )
        if record.status >= 500 or record.error:
            span.set_status(Status(StatusCode.ERROR, record.error[:300]))
        self._stages(record, start, set_span_in_context(span))
        span.end(end)

    def _stages(self, record: Record, start: int, context: Any) -> None:
        timings = record.timings
        if timings is None:
            return
        # Backwards from the end of the answer, which is when the timings say that it was.
        ended = start + int(timings.total_s * 1e9)
        at = ended - int((timings.queue_s + timings.prefill_s + timings.decode_s) * 1e9)
        for name, seconds in (
            ("queue", timings.queue_s),
            ("prefill", timings.prefill_s),
            ("decode", timings.decode_s),
        ):
            stage = self._tracer.start_span(f"chabok.{name}", context=context, start_time=at)
            at += int(seconds * 1e9)
            stage.end(at)

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _carrier(record: Record) -> dict[str, str]:
    return {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in record.headers
        if name in (b"traceparent", b"tracestate")
    }


def _attributes(record: Record, operation: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "chabok",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.response.finish_reasons": tuple(record.reasons),
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "chabok.request_id": record.request_id,
    }
    if record.timings is not None:
        found["gen_ai.server.time_to_first_token"] = record.timings.first_token_s
    if record.error:
        found["error.type"] = record.error.partition(":")[0]
    return found
