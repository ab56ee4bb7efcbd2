"""What clients do that waste a server's time, over plain sockets, against a server with small limits."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
from tests.server.faking import FakeLoader, serving, settings

LIMITS = {
    "header_timeout": 0.4,
    "body_timeout": 0.6,
    "idle_timeout": 1.0,
    "write_timeout": 0.5,
    "max_body": 100_000,
    "max_headers": 4096,
    "max_connections": 40,
    "request_timeout": 5.0,
}


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with serving(settings(**LIMITS), FakeLoader(row_s=0.0002)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def url_of(address: tuple[str, int]) -> str:
    return f"http://{address[0]}:{address[1]}/health"


def connect(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address)
    sock.settimeout(10)
    return sock


def read_all(sock: socket.socket) -> bytes:
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def post(body: bytes = b"", *headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_a_connection_that_says_nothing_is_closed_in_time(address: tuple[str, int]) -> None:
    started = time.monotonic()
    assert read_all(connect(address)) == b""
    assert 0.9 < time.monotonic() - started < 3


def test_a_connection_is_kept_after_an_answer_and_closed_when_nothing_follows(
    address: tuple[str, int],
) -> None:
    with connect(address) as sock:
        for _ in range(2):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            time.sleep(0.3)
        started = time.monotonic()
        assert read_all(sock) == b""
        assert time.monotonic() - started < 3


def test_headers_sent_one_byte_at_a_time_are_ended_in_time(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        started = time.monotonic()
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: " + b"a" * 1000
        try:
            for byte in request:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
                if time.monotonic() - started > 5:
                    break
        except OSError:
            pass
        assert time.monotonic() - started < 3
        answer = read_all(sock)
        assert not answer or status_of(answer) == 408


def test_empty_lines_for_ever_do_not_keep_a_connection_open(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        started = time.monotonic()
        try:
            while time.monotonic() - started < 5:
                sock.sendall(b"\r\n")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - started < 3


def test_half_a_body_is_answered_408_in_time(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        started = time.monotonic()
        sock.sendall(post(b'{"mess', "Content-Length: 1000"))
        answer = read_all(sock)
        assert 0.5 < time.monotonic() - started < 3
        assert status_of(answer) == 408
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert json.loads(body)["error"]["message"] == "the body did not come within 0.6 seconds"


def test_a_body_sent_one_byte_at_a_time_is_answered_408_in_time(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        started = time.monotonic()
        sock.sendall(post(b"", "Content-Length: 1000", path="/v1/messages"))
        sock.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() - started < 5:
            sock.sendall(b" ")
            try:
                answer = sock.recv(65536)
            except TimeoutError:
                continue
        assert time.monotonic() - started < 3
        assert status_of(answer) == 408
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "error"
        )  # as Anthropic's clients read it


def test_half_a_body_and_a_closed_connection_harm_nobody(address: tuple[str, int]) -> None:
    for _ in range(20):
        with connect(address) as sock:
            sock.sendall(post(b'{"mess', "Content-Length: 1000"))
    assert httpx.get(url_of(address)).status_code == 200


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        sock.sendall(post(b"", "Content-Length: 99999999"))
        assert status_of(read_all(sock)) == 413


def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_large(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        sock.sendall(post(b"", "Transfer-Encoding: chunked"))
        piece = b"%x\r\n%s\r\n" % (50_000, b" " * 50_000)
        try:
            for _ in range(200):
                sock.sendall(piece)
        except OSError:
            pass  # hung up on, as it should be
        else:
            pytest.fail("10 MB were taken")


def test_headers_that_are_too_large_are_answered_431(address: tuple[str, int]) -> None:
    at_once = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 5000 + b"\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: 1\r\n" * 1000 + b"\r\n"
    never_ending = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 20_000
    long_target = b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for request in (at_once, many, never_ending, long_target):
        with connect(address) as sock:
            sock.sendall(request)
            assert status_of(read_all(sock)) == 431
    with connect(address) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 3500 + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")


def test_what_is_not_http_is_answered_400(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        sock.sendall(b"\x16\x03\x01\x02\x00hello\r\n\r\n")
        assert status_of(read_all(sock)) == 400


def test_a_client_that_takes_nothing_of_its_answer_is_dropped() -> None:
    with serving(settings(write_timeout=0.5)) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(5)
            sock.connect((host, int(port)))
            request = b"GET /page/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
            with contextlib.suppress(OSError):  # the server reads no more, or hung up
                for _ in range(2000):  # tens of megabytes of answers that nobody reads
                    sock.sendall(request)
            until = time.monotonic() + 5
            while server.server_state.connections and time.monotonic() < until:
                time.sleep(0.05)
            assert not server.server_state.connections
        assert httpx.get(url + "/health").status_code == 200


def test_too_many_connections_are_answered_503_and_the_others_go_on(address: tuple[str, int]) -> None:
    time.sleep(1.2)  # those of other tests are gone
    with httpx.Client() as kept:
        assert kept.get(url_of(address)).status_code == 200
        many = [connect(address) for _ in range(39)]
        try:
            time.sleep(0.1)
            with connect(address) as one_more:
                answer = read_all(one_more)
                assert status_of(answer) == 503
                assert b"retry-after: 1" in answer.lower()
            assert kept.get(url_of(address)).status_code == 200
        finally:
            for sock in many:
                sock.close()


def test_requests_sent_without_waiting_for_answers_are_answered_in_order(address: tuple[str, int]) -> None:
    with connect(address) as sock:
        request = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        sock.sendall(request % b"health" + request % b"ready" + request % b"nowhere")
        answers = b""
        while b"nowhere" not in answers:
            answers += sock.recv(65536)
        assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]


def test_vanished_clients_are_noticed_and_their_requests_ended() -> None:
    loader = FakeLoader(row_s=0.002)
    with serving(settings(**LIMITS), loader) as (url, server):
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x", "max_tokens": 900, "stream": True}).encode()

        def vanish() -> None:
            with connect((host, int(port))) as sock:
                sock.sendall(post(body, f"Content-Length: {len(body)}", path="/v1/completions"))
                assert sock.recv(100).startswith(b"HTTP/1.1 200")

        threads = [threading.Thread(target=vanish) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine = server.roster.loaded()[0].llm.llm.engine
        until = time.monotonic() + 2
        while engine.stats.finished["cancelled"] < 10 and time.monotonic() < until:
            time.sleep(0.01)
        assert engine.stats.finished["cancelled"] == 10


def test_a_request_that_takes_longer_than_a_request_may_is_ended() -> None:
    with serving(settings(request_timeout=0.3), FakeLoader(row_s=0.02)) as (url, _):
        body = {"prompt": "x", "max_tokens": 900}
        started = time.monotonic()
        answer = httpx.post(url + "/v1/completions", json=body).json()
        assert time.monotonic() - started < 2
        # What was written by then is there, marked as cut short.
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["choices"][0]["stop_reason"] == "deadline"
