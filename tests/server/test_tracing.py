"""Traces; they need the packages of the extra "otel"."""

from __future__ import annotations

import pytest
from tests.server.faking import record

from chabok.server import tracing
from chabok.server.record import Record
from chabok.server.tracing import Tracer

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")


def test_a_request_becomes_a_span_with_its_stages_below_the_clients_own() -> None:
    exporter = memory.InMemorySpanExporter()
    tracer = Tracer(exporter, at_once=True)
    one = record()
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    one.headers = [(b"traceparent", f"00-{trace_id}-b7ad6b7169203331-01".encode())]
    tracer.ended(one)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["chat one"]
    assert f"{root.context.trace_id:032x}" == trace_id
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
    attributes = dict(root.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "one"
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert root.start_time is not None
    assert root.end_time is not None
    assert root.end_time - root.start_time == pytest.approx(1.25e9, rel=1e-6)
    at = None
    for name, seconds in (("queue", 0.1), ("prefill", 0.2), ("decode", 0.9)):
        span = spans[f"chabok.{name}"]
        assert span.parent is not None
        assert span.parent.span_id == root.context.span_id
        assert span.end_time - span.start_time == pytest.approx(seconds * 1e9, rel=1e-6)  # type: ignore[operator]
        assert at is None or span.start_time == at
        at = span.end_time
    assert root.start_time <= spans["chabok.queue"].start_time  # type: ignore[operator]
    assert spans["chabok.decode"].end_time <= root.end_time  # type: ignore[operator]


def test_without_an_endpoint_or_when_switched_off_there_are_no_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in tracing.SWITCHES:
        monkeypatch.delenv(name, raising=False)
    assert tracing.tracing() is None
    monkeypatch.setenv(tracing.SWITCHES[0], "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracing.tracing() is None


def test_requests_that_asked_no_model_make_no_span() -> None:
    exporter = memory.InMemorySpanExporter()
    Tracer(exporter, at_once=True).ended(Record("GET", "/health", "x", []))
    assert not exporter.get_finished_spans()
