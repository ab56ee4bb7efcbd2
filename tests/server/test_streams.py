"""Streams and the clients at their other end: those that leave, that take nothing, and what they are told."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running, roomy, serving, tiny

from chabok import SamplingParams
from chabok.engine.delivery import Delivery
from chabok.server.settings import Settings


def soon(true: Callable[[], bool], within_s: float = 5.0) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.005)
    return False


def busy(running: Running) -> int:
    scheduler = running.llm.engine.scheduler
    return len(scheduler.active) + len(scheduler.waiting)


def post(running: Running, path: str, body: dict[str, Any]) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


LONG = {"model": "tiny", "prompt": "once upon", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(running: Running, stream: bool) -> None:
    connection = post(running, "/v1/completions", {**LONG, "stream": stream, "n": 3})
    assert soon(lambda: busy(running) == 3)
    if stream:
        assert connection.recv(10)
    connection.close()
    assert soon(lambda: busy(running) == 0, 2.0)


def test_a_stream_begins_with_its_times_and_each_event_stands_alone(running: Running) -> None:
    body = {"model": "tiny", "prompt": "once upon", "max_tokens": 8, "stream": True}
    with httpx.stream("POST", running.v1 + "/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert "prefill;dur=" in answer.headers["server-timing"]
        assert answer.headers["cache-control"] == "no-cache"
        text = answer.read().decode()
    events = text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    found = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    said = "".join(event["choices"][0]["text"] for event in found)
    assert said == running.llm.generate("once upon", SamplingParams(max_tokens=8)).text


def test_what_fails_in_the_middle_is_told_in_the_stream(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = Delivery._choose

    def failing(self: Delivery, sequence: Any, *arguments: Any) -> float:
        if len(sequence.tokens) == sequence.n_prompt + 500:
            raise RuntimeError("a bolt fell out")
        return choose(self, sequence, *arguments)

    monkeypatch.setattr(Delivery, "_choose", failing)
    for path, body in (
        ("completions", {**LONG, "stream": True}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True},
        ),
        ("responses", {"input": "x", "stream": True, "ignore_eos": True}),
    ):
        with httpx.stream("POST", f"{running.v1}/{path}", json=body) as answer:
            assert answer.status_code == 200
            last = answer.read().decode().strip().split("\n\n")[-1]
        event = json.loads(last.partition("data: ")[2])
        if path == "responses":
            assert event["type"] == "response.failed"
            assert event["response"]["error"]["message"]
        else:
            assert event["error"]["message"]
        assert "bolt" not in last  # that is for the log
    answer = httpx.post(f"{running.v1}/completions", json=LONG)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"


def test_a_deadline_that_passes_ends_the_answer(running: Running) -> None:
    body = {**LONG, "deadline_ms": 60}
    answer = httpx.post(running.v1 + "/completions", json=body)
    assert answer.status_code == 200
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] == "deadline"
    del body["deadline_ms"]
    answer = httpx.post(running.v1 + "/completions", json=body, headers={"X-Chabok-Deadline-Ms": "0.001"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.fixture
def slow(tmp_path: Any) -> Iterator[Running]:
    settings = Settings(
        models=(tiny("tiny", roomy("llama.gguf", tmp_path), kv_memory=64 << 20),),
        installed=False,
        prefix_disk=False,
        write_timeout=1.0,
    )
    with serving(settings) as one:
        yield one


def test_silence_is_broken_and_who_takes_nothing_is_dropped(
    slow: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chabok.server.streaming.FIRST_BYTE_S", 0.05)
    monkeypatch.setattr("chabok.server.streaming.KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr("chabok.server.streaming.TICK_S", 0.02)
    forward = slow.llm.engine.model.forward
    monkeypatch.setattr(slow.llm.engine.model, "forward", lambda batch: (time.sleep(0.3), forward(batch))[1])
    with httpx.stream(
        "POST", slow.v1 + "/completions", json={**LONG, "max_tokens": 2, "stream": True}
    ) as answer:
        text = answer.read().decode()
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")
    monkeypatch.undo()
    monkeypatch.setattr("chabok.server.streaming.TICK_S", 0.05)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    host, port = slow.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    body = json.dumps({**LONG, "n": 16, "logprobs": 20, "max_tokens": 3900, "stream": True}).encode()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    connection.sendall(body)
    assert soon(lambda: busy(slow) > 0)
    assert soon(lambda: busy(slow) == 0, 20.0)
    assert slow.llm.engine.stats.finished["cancelled"] > 0
    connection.close()
