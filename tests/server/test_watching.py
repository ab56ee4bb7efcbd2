"""What a server tells of itself: metrics, log lines, traces, health."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message, Receive, Scope, Send
from tests.server.faking import FakeLoader, record, serving, settings

from chabok.server.logs import JSONFormat, RequestLog, TextFormat, fields
from chabok.server.record import ABANDONED, Record, Watch

ASK = {"prompt": "a secret prompt", "max_tokens": 20}


def families(text: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    family = found.get(name) or found[name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")]
    values = [
        sample.value
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(values) == 1, (name, labels, values)
    return float(values[0])


def test_metrics_are_what_prometheus_reads_and_count_what_happened() -> None:
    with serving(settings("one", "two")) as (address, server):
        for _ in range(3):
            assert httpx.post(address + "/v1/completions", json=ASK).status_code == 200
        httpx.get(address + "/v1/models/one")
        httpx.get(address + "/v1/models/other")
        for n in range(50):
            httpx.get(f"{address}/scan/{n}")
        answer = httpx.get(address + "/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = families(answer.text)
        engine = server.roster.loaded()[0].llm.llm.engine
    assert value(found, "chabok_output_tokens_total", model="one") == 60
    assert value(found, "chabok_prompt_tokens_total", model="one") == 3 * len(ASK["prompt"])  # type: ignore[arg-type]
    assert value(found, "chabok_requests_finished_total", model="one", reason="length") == 3
    assert value(found, "chabok_time_to_first_token_seconds_count", model="one") == 3
    assert value(found, "chabok_inter_token_latency_seconds_count", model="one") == 57
    for name in ("queue_time", "prefill_time", "request_duration"):
        assert value(found, f"chabok_{name}_seconds_count", model="one") == 3
        assert value(found, f"chabok_{name}_seconds_sum", model="one") >= 0
    assert value(found, "chabok_batch_size_count", model="one") == engine.stats.steps
    assert value(found, "chabok_worst_gap_seconds", model="one") > 0
    assert value(found, "chabok_kv_pages", model="one") == engine.stats.pages_total
    for tier in ("memory", "disk"):
        value(found, "chabok_cached_tokens_total", model="one", tier=tier)
    for name in ("rejected", "submitted"):
        value(found, f"chabok_requests_{name}_total", model="one")
    assert value(found, "chabok_http_requests_total", route="/v1/completions", status="200") == 3
    assert value(found, "chabok_http_requests_total", route="/v1/models/{model:path}", status="404") == 1
    assert value(found, "chabok_http_requests_total", route="other", status="404") == 50
    assert value(found, "chabok_model_loaded", model="one") == 1
    assert value(found, "chabok_model_loads_total") == 1
    assert value(found, "chabok_ready") == 1
    assert found["process_resident_memory_bytes"].samples[0].value > 10**7


def test_every_metric_is_in_the_documentation_with_its_meaning() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    with serving(settings()) as (address, _):
        found = families(httpx.get(address + "/metrics").text)
    for family in found.values():
        if family.name.startswith("chabok_"):
            name = family.name + ("_total" if family.type == "counter" else "")
            assert f"| `{name}` | {family.documentation} |" in text


def test_histograms_are_cumulative_and_end_with_all_of_them() -> None:
    with serving(settings()) as (address, _):
        httpx.post(address + "/v1/completions", json=ASK)
        found = families(httpx.get(address + "/metrics").text)
    histograms = [family for family in found.values() if family.type == "histogram"]
    assert len(histograms) == 6
    for family in histograms:
        buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
        assert buckets[-1][0] == "+Inf"
        values = [count for _, count in buckets]
        assert values == sorted(values)
        assert values[-1] == next(s.value for s in family.samples if s.name.endswith("_count")) > 0


def test_openmetrics_is_spoken_to_those_who_ask_for_it() -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse

    with serving(settings()) as (address, _):
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        answer = httpx.get(address + "/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert {family.name for family in parse(answer.text)} >= {"chabok_steps", "chabok_ready"}


def test_metrics_can_be_switched_off() -> None:
    with serving(settings(metrics=False)) as (address, _):
        assert httpx.get(address + "/metrics").status_code == 404


# The log.


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.fields for record in caplog.records if hasattr(record, "fields")]


def test_every_request_is_one_line_with_what_it_took_but_not_what_was_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    with serving(settings(log_requests=True)) as (address, _):
        httpx.post(address + "/v1/completions", json=ASK, headers={"X-Request-Id": "mine"})
        httpx.post(address + "/v1/completions", json={**ASK, "stop": ["a secret stop", 5]})
        httpx.get(address + "/health")
        httpx.get(address + "/nowhere")
        until = time.monotonic() + 5
        while len(lines(caplog)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
    done, wrong, nowhere = lines(caplog)
    assert done["id"] == "mine"
    assert (done["status"], done["model"], done["finish"]) == (200, "one", "length")
    assert (done["prompt_tokens"], done["cached_tokens"], done["output_tokens"]) == (15, 0, 20)
    for name in ("queue_ms", "prefill_ms", "first_token_ms", "total_ms", "tokens_per_s"):
        assert done[name] >= 0
    assert (wrong["status"], wrong["error"]) == (400, "RequestError")
    assert (nowhere["status"], nowhere["path"], nowhere["error"]) == (404, "/nowhere", "not_found")
    assert "secret" not in "".join(TextFormat().format(record) for record in caplog.records)


def test_a_client_that_left_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(settings(log_requests=True), FakeLoader(row_s=0.002)) as (address, _):
        body = {**ASK, "max_tokens": 900}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(address + "/v1/completions", json=body, timeout=0.2)
        until = time.monotonic() + 5
        while not lines(caplog) and time.monotonic() < until:
            time.sleep(0.01)
    (left,) = lines(caplog)
    assert (left["status"], left["finish"]) == (ABANDONED, "cancelled")
    assert left["output_tokens"] > 0


def formatted(formatter: logging.Formatter, said: dict[str, Any] | None, message: str = "request") -> str:
    made = logging.LogRecord("chabok", logging.INFO, "", 0, message, (), None)
    if said is not None:
        made.fields = said
    return formatter.format(made)


def test_lines_are_json_or_text_of_one_line_that_nobody_can_forge() -> None:
    said = fields(record()) | {"path": '/a b\n2026 info id="x"', "model": "a\x1b[31m"}
    text = formatted(TextFormat(), said)
    assert "\n" not in text
    assert "\x1b" not in text
    assert 'path="/a b\\n2026 info id=\\"x\\""' in text
    assert "key=alice" in text
    one = json.loads(formatted(JSONFormat(), said))
    assert one["path"] == said["path"]
    assert (one["event"], one["level"], one["status"]) == ("request", "info", 200)
    assert one["time"].endswith("Z")
    assert "\n" not in formatted(TextFormat(), None, "a model\nnamed so")


def test_a_failure_of_the_application_is_recorded_with_its_kind() -> None:
    import asyncio

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("boom")

    async def nothing() -> Message:
        return {}

    async def send(message: Message) -> None:
        return None

    ended: list[Record] = []

    class Observer(RequestLog):
        def ended(self, record: Record) -> None:
            ended.append(record)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [], "client": None}
    with pytest.raises(ValueError, match="boom"):
        asyncio.run(Watch(app, [Observer()])(scope, nothing, send))
    assert ended[0].error == "ValueError"
    assert ended[0].client == "local"


@pytest.mark.parametrize(
    ("path", "status", "level"),
    [
        ("/v1/chat/completions", 200, "INFO"),
        ("/v1/chat/completions", 500, "ERROR"),
        ("/v1/chat/completions", 503, "WARNING"),
        ("/v1/chat/completions", 504, "WARNING"),
        ("/ready", 503, "INFO"),
    ],
)
def test_only_what_failed_is_logged_as_an_error(
    caplog: pytest.LogCaptureFixture, path: str, status: int, level: str
) -> None:
    one = record()
    one.path, one.status = path, status
    with caplog.at_level(logging.INFO):
        RequestLog().ended(one)
    assert [line.levelname for line in caplog.records] == [level]
