"""More of everything than a server is made for: requests, connections, work; and what others notice of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.breaking import Alone, Process, greedy, serving, sized, streamed, tiny
from tests.server.costly import CHAT, FORMATS, HI, bodies


class Streams:
    """Streams of /v1/completions that run for as long as they may; when each event came."""

    def __init__(self, process: Process, bodies: list[dict[str, Any]]) -> None:
        self.texts = [""] * len(bodies)
        self.ends = [""] * len(bodies)
        self.errors: list[str] = []
        self.times: list[list[float]] = [[] for _ in bodies]
        self._process = process
        self._threads = [threading.Thread(target=self._run, args=each) for each in enumerate(bodies)]
        for thread in self._threads:
            thread.start()

    def _run(self, i: int, body: dict[str, Any]) -> None:
        url = self._process.address + "/v1/completions"
        text = ""
        try:
            with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as answer:
                assert answer.status_code == 200, answer.read()
                for piece in answer.iter_text():
                    self.times[i].append(time.monotonic())
                    text += piece
        except (httpx.HTTPError, AssertionError) as error:
            self.errors.append(repr(error))
        self.texts[i], self.ends[i] = streamed(text)

    def begun(self) -> Streams:
        until = time.monotonic() + 60
        while not all(self.times):
            assert time.monotonic() < until
            time.sleep(0.01)
        return self

    def join(self) -> Streams:
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive()
        assert self.errors == []
        return self

    def worst_gap(self, since: float) -> float:
        """The longest time in which one of them got nothing."""
        gaps = [0.0]
        for times in self.times:
            late = [at for at in times if at >= since]
            gaps += [after - before for before, after in pairwise(late)]
        return max(gaps)


async def all_at_once(url: str, asked: list[dict[str, Any]]) -> list[httpx.Response]:
    return await sent_at_once([(url, json.dumps(body).encode()) for body in asked])


async def sent_at_once(asked: list[tuple[str, bytes]]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        return await asyncio.gather(*(client.post(url, content=data) for url, data in asked))


@pytest.mark.wide
def test_a_thousand_requests_at_once_are_each_answered_or_told_when_to_come_again(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    with serving(tmp_path / "cache", f"tiny={path}", "--max-queue", "200", "--itl-budget-ms", "10") as server:
        long = [greedy(f"stream {i}", 2000, ignore_eos=True) for i in range(4)]
        for _ in range(3):  # what the first of many needs, buffers and threads, is not growth
            asyncio.run(all_at_once(server.address + "/v1/completions", [greedy("warm", 5)] * 300))
        before = server.rss, server.n_files, server.n_threads
        streams = Streams(server, long).begun()
        asked = [greedy(f"request {i}", 10 + i % 7) for i in range(1000)]
        answers = asyncio.run(all_at_once(server.address + "/v1/completions", asked))
        assert {answer.status_code for answer in answers} == {200, 429}
        for body, answer in zip(asked, answers, strict=True):
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == alone(body)
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "server_busy"
        streams.join()
        for body, text, end in zip(long, streams.texts, streams.ends, strict=True):
            assert (text, end) == (alone(body), "[DONE]")
        assert server.settled()
        server.unharmed()
        # Waiting as told leads to an answer.
        assert server.post("/v1/completions", greedy("later", 1)).status_code == 200
        until = time.monotonic() + 20
        while server.n_files > before[1] and time.monotonic() < until:
            time.sleep(0.1)
        assert server.n_files <= before[1]
        assert server.n_threads <= before[2] + 2
        assert server.rss - before[0] < 30e6


def test_more_requests_than_may_wait_are_told_when_to_come_again_and_none_is_lost(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", "--max-queue", "8", "--max-batch", "4") as server:
        asked = [greedy(f"request {i}", 30, ignore_eos=True) for i in range(60)]
        answers = asyncio.run(all_at_once(server.address + "/v1/completions", asked))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 12
        assert all(int(answer.headers.get("retry-after", 1)) >= 1 for answer in answers)
        assert server.metric("chabok_requests_rejected_total") == codes.count(429)
        server.unharmed()


@pytest.mark.wide
def test_500_idle_connections_beside_32_streams_lose_nothing(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    with serving(tmp_path / "cache", f"tiny={path}") as server:
        idle = [server.connect() for _ in range(500)]
        asked = [greedy(f"stream {i}", 200, ignore_eos=True) for i in range(32)]
        streams = Streams(server, asked).join()
        for body, text, end in zip(asked, streams.texts, streams.ends, strict=True):
            assert (text, end) == (alone(body), "[DONE]")
        for connection in idle:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for connection in idle:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.close()
        server.unharmed()


@pytest.mark.wide
def test_bodies_and_grammars_made_to_take_long_hold_nobody_up(tmp_path: Path) -> None:
    heavy = bodies()
    with serving(tmp_path / "cache", "--kv-memory", "64MB") as server:
        for name, (path, data) in heavy.items():
            streams = Streams(server, [greedy("calm", 3000, ignore_eos=True)]).begun()
            started = time.monotonic()
            answers = [server.post(path, data) for _ in range(2)]
            took = time.monotonic() - started
            gap = streams.worst_gap(started)
            print(f"{name}: {took:.2f} s, worst gap {gap * 1000:.0f} ms, {server.rss >> 20} MB")
            assert {answer.status_code for answer in answers} <= {200, 400, 413}, (
                name,
                answers[0].text[:300],
            )
            assert "error" in answers[0].json() or answers[0].status_code == 200
            assert took < 30, name
            assert gap < 1.5, name
            streams.join()
        before = server.rss
        for shape in FORMATS:
            streams = Streams(server, [greedy("calm", 1500, ignore_eos=True)]).begun()
            started = time.monotonic()
            body = {"messages": HI, "max_tokens": 100, "temperature": 1, "seed": 1, "response_format": shape}
            answer = server.post(CHAT, body)
            took = time.monotonic() - started
            gap = streams.worst_gap(started)
            print(f"{str(shape)[:90]}: {answer.status_code}, {took:.2f} s, worst gap {gap * 1000:.0f} ms")
            assert answer.status_code in (200, 400), (shape, answer.text[:300])
            assert took < 20, shape
            assert gap < 1.5, shape
            streams.join()
        assert server.rss - before < 300e6
        for path, data in heavy.values():  # a second time, nothing is added
            server.post(path, data)
        once = server.rss
        for path, data in heavy.values():
            server.post(path, data)
        assert server.rss - once < 50e6
        server.unharmed()


@pytest.mark.wide
def test_many_of_them_at_once_do_not_either(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", "--kv-memory", "64MB") as server:
        formed = [
            {"messages": HI, "max_tokens": 150, "temperature": 1, "response_format": f} for f in FORMATS
        ]
        heavy = [(server.address + path, data) for path, data in bodies().values()]
        for asked in ([(server.address + CHAT, json.dumps(body).encode()) for body in formed * 3], heavy * 2):
            streams = Streams(server, [greedy("calm", 3900, ignore_eos=True)]).begun()
            started = time.monotonic()
            answers = asyncio.run(sent_at_once(asked))
            print(f"worst gap {streams.worst_gap(started) * 1000:.0f} ms")
            assert {answer.status_code for answer in answers} <= {200, 400, 413}
            assert streams.worst_gap(started) < 2.5
            streams.join()
        server.unharmed()


@pytest.mark.wide
def test_answers_that_nobody_reads_are_not_collected_without_bound(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", "--write-timeout", "3") as server:
        server.post("/v1/completions", greedy("warm", 100, n=20, logprobs=20))
        before = server.rss
        body = greedy("unread", 3500, stream=True, ignore_eos=True, n=8, logprobs=20)  # tens of megabytes
        silent = []
        for _ in range(8):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((server.host, server.port))
            sock.sendall(sized(body))
            silent.append(sock)
        most = 0
        until = time.monotonic() + 90
        while time.monotonic() < until:
            most = max(most, server.rss)
            if server.metric("chabok_http_requests_in_progress") <= 1:  # this one
                break
            time.sleep(0.1)
        assert server.settled(5)
        assert most - before < 400e6
        for sock in silent:
            sock.close()
        server.unharmed()


@pytest.mark.wide
def test_sequences_that_outgrow_the_cache_wait_and_are_not_changed_by_it(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = Alone(path)
    with serving(tmp_path / "cache", f"tiny={path}", "--kv-memory", "9MB", "--context", "4096") as server:
        asked = [greedy(f"number {i}: " + "word " * (40 * (i % 7)), 900, ignore_eos=True) for i in range(24)]
        streams = Streams(server, asked).join()
        assert server.metric("chabok_preemptions_total") > 0
        for body, text, end in zip(asked, streams.texts, streams.ends, strict=True):
            assert (text, end) == (alone(body), "[DONE]")
        server.unharmed()
