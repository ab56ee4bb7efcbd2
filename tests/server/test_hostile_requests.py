"""Requests that are malformed, ambiguous, enormous or abandoned, against a server process on a tiny model."""

from __future__ import annotations

import gzip
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.breaking import Process, greedy, read_all, request, serving, sized, status_of, streamed

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODY = json.dumps(greedy("x", 1)).encode()
GET = b"GET /v1/models HTTP/1.1\r\n"
UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with serving(tmp_path_factory.mktemp("server") / "cache") as process:
        yield process
        process.unharmed()


def explained(answer: bytes, status: int) -> str:
    """The message of an error's answer, which must have this status."""
    assert status_of(answer) == status, answer
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return str(error["message"])


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (request(b"0\r\n\r\nGET /ready HTTP/1.1\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked"),
         "Content-Length"),
        (request(b"0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5"), "Content-Length"),
        (request(BODY, f"Content-Length: {len(BODY)}", "Content-Length: 3"), "Content-Length"),
        (request(BODY, "Content-Length: -5"), "Content-Length"),
        (request(BODY, f"Content-Length: +{len(BODY)}"), "Content-Length"),
        (request(BODY, "Content-Length: 99999999999999999999999"), "Content-Length"),
        (request(BODY, "Content-Length: 0x10"), "Content-Length"),
        (request(BODY, "Transfer-Encoding: gzip"), "Transfer-Encoding"),
        (request(BODY, "Transfer-Encoding: chunked, identity"), "Transfer-Encoding"),
        (request(b"-5\r\nabc", "Transfer-Encoding: chunked"), "chunk"),
        (request(b"f" * 20 + b"\r\nabc", "Transfer-Encoding: chunked"), "overflow"),
        (GET + b"Host: localhost\r\nX: a\r\n b\r\n\r\n", "header"),
        (GET + b"Host: localhost\r\nX: a\0b\r\n\r\n", "header"),
        (GET + b"\r\n", "no Host header"),
        (GET + b"Host: localhost\r\nHost: evil.example\r\n\r\n", "more than one Host"),
        (GET + b"Host: evil.example\r\nHost: localhost\r\n\r\n", "more than one Host"),
        (b"GET http://[::bad/ HTTP/1.1\r\nHost: localhost\r\n\r\n", "url"),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", "url"),
        (b"GET /health HTTP/9.9\r\nHost: localhost\r\n\r\n", "version"),
        (b"GET /health HTTP/1.1\nHost: localhost\n\n", ""),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", "no proxy"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"x" * 200, "method"),
    ],
)  # fmt: skip
def test_a_request_that_could_be_read_in_two_ways_is_refused_and_nothing_after_it_is_read(
    server: Process, data: bytes, said: str
) -> None:
    answer = server.raw(data + b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
    message = explained(answer, 400)
    assert said.lower() in message.lower()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answer


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost@evil.example",
        "localhost.evil.example:80",
        "127.0.0.1.evil.example",
        "0x7f.1",
    ],
)
def test_a_name_that_a_web_page_could_have_made_point_here_is_refused(server: Process, host: str) -> None:
    end = f"Host: {host}\r\nConnection: close\r\n\r\n".encode()
    assert "not called" in explained(server.raw(GET + end), 403)
    # The target may be written with a name of its own, which is no way around.
    assert "not called" in explained(server.raw(b"GET http://localhost/v1/models HTTP/1.1\r\n" + end), 403)


def test_thousands_of_requests_sent_at_once_on_one_connection_are_all_answered(server: Process) -> None:
    with server.connect() as sock:
        n, answers = 3000, b""
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * n
        sender = threading.Thread(target=sock.sendall, args=(data,))
        sender.start()
        while answers.count(b"HTTP/1.1 200 OK") < n or not answers.endswith(b"}"):
            piece = sock.recv(65536)
            assert piece, answers[-500:]
            answers += piece
        sender.join()
        assert answers.count(b"HTTP/1.1 ") == n


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_to_speak_another_protocol_is_ignored_and_the_body_is_not(
    server: Process, chunked: bool
) -> None:
    data = sized(greedy("x", 1), *UPGRADE)
    if chunked:
        data = request(b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), "Transfer-Encoding: chunked", *UPGRADE)
    with server.connect() as sock:
        for step in (len(data), 11):  # at once, and in pieces
            for at in range(0, len(data), step):
                sock.sendall(data[at : at + step])
            answer = b""
            while not answer.endswith(b"}}"):
                answer += sock.recv(65536)
            assert status_of(answer) == 200
            assert b'"completion_tokens":1' in answer
        # The connection goes on as HTTP/1.1, also for what was sent along.
        offer = (
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        sock.sendall(offer + b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = read_all(sock)
        assert [status_of(b"HTTP/1.1 " + each) for each in answers.split(b"HTTP/1.1 ")[1:]] == [200, 404]


def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on_or_not_to(server: Process) -> None:
    with server.connect() as sock:
        sock.sendall(request(b"", "Expect: 100-continue", f"Content-Length: {len(BODY)}"))
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(BODY)
        assert status_of(sock.recv(65536)) == 200
    large = request(b"", "Expect: 100-continue", "Content-Length: 99999999999")
    assert "the body is larger than" in explained(server.raw(large), 413)


def test_http_1_0_gets_whole_answers_and_streams_that_end_with_the_connection(server: Process) -> None:
    whole = server.raw(sized(greedy("x", 2)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert status_of(whole) == 200
    stream = server.raw(sized(greedy("x", 2, stream=True)).replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = stream.partition(b"\r\n\r\n")
    assert b"chunked" not in head
    text, end = streamed(body.decode())
    assert (text, end) == (json.loads(whole.partition(b"\r\n\r\n")[2])["choices"][0]["text"], "[DONE]")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH"])
def test_a_method_that_makes_no_sense_is_refused_with_those_that_do(server: Process, method: str) -> None:
    data = request(b"", "Connection: close", path=CHAT, method=method)
    answer = server.raw(data)
    assert status_of(answer) == 405
    assert b"allow: POST" in answer
    assert answer.endswith(b"\r\n\r\n") == (method == "HEAD")


def test_a_compressed_body_is_refused_with_what_to_do(server: Process) -> None:
    body = gzip.compress(json.dumps({"messages": HI}).encode())
    answer = httpx.post(server.address + CHAT, content=body, headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415
    assert "without Content-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "tools", "token_limit", "self"])
def test_a_variable_of_a_template_cannot_stand_for_what_the_request_has(server: Process, name: str) -> None:
    for path in (CHAT, "/v1/messages", "/api/chat"):
        body = {"model": "tiny", "messages": HI, "max_tokens": 1, "template_variables": {name: 1}}
        if path == "/api/chat":
            del body["max_tokens"]
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert name in answer.text


@pytest.mark.parametrize(
    "variables",
    [
        {"documents": 5},
        {"add_generation_prompt": [1]},
        {"a b": {"": None}},
        {"bos_token": {}},
        {"raise_exception": "x"},
    ],
)
def test_odd_variables_of_a_template_harm_nobody(server: Process, variables: Any) -> None:
    answer = server.post(CHAT, {"messages": HI, "max_tokens": 1, "template_variables": variables})
    assert answer.status_code in (200, 400)


def test_many_values_and_many_biases_are_refused_before_they_take_time(server: Process) -> None:
    started = time.monotonic()
    answer = server.post("/v1/completions", b'{"prompt": [' + b"1," * 5_000_000 + b"1]}")
    assert answer.status_code == 413
    assert "300000 commas" in answer.text
    answer = server.post(CHAT, {"messages": HI, "logit_bias": {str(i): 1 for i in range(100_000)}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "logit_bias"
    assert time.monotonic() - started < 5


def test_clients_that_leave_at_any_byte_leave_nothing_behind(server: Process) -> None:
    data = sized(greedy("leaving " * 100, 500, stream=True, ignore_eos=True))
    files, before = server.n_files, server.metric("chabok_requests_submitted_total")
    for at in [*range(1, len(data), 97), *[len(data)] * 5]:
        sock = server.connect()
        sock.sendall(data[:at])
        if at % 2:  # a reset instead of an end
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    with server.connect() as sock:
        sock.sendall(data)
        sock.recv(1)
    assert server.settled(10)
    assert server.metric("chabok_requests_submitted_total") > before
    until = time.monotonic() + 5
    while server.n_files > files and time.monotonic() < until:
        time.sleep(0.02)
    assert server.n_files <= files
    server.unharmed()


def test_what_a_person_reads_in_the_log_of_all_this_is_lines_without_tracebacks(server: Process) -> None:
    server.raw(sized(b"{", path="/v1/messages")[:-1], timeout=0.1)
    server.raw(request(b"zz\r\n", "Transfer-Encoding: chunked"))
    time.sleep(0.1)
    server.unharmed()
    lines = [line for line in server.said.splitlines() if re.match(r"\d{4}-", line)]
    assert not [line for line in lines if " status=500" in line]


def test_a_reader_of_one_byte_at_a_time_gets_its_stream_and_others_do_not_wait(server: Process) -> None:
    body = greedy("slow", 300, stream=True, ignore_eos=True)
    with server.connect() as slow:
        slow.sendall(sized(body, "Connection: close"))
        data = b""
        reading = threading.Event()

        def read() -> None:
            nonlocal data
            while piece := slow.recv(1 if len(data) < 500 else 65536):
                data += piece
                if len(data) < 500:
                    time.sleep(0.001)
                reading.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert reading.wait(10)
        started = time.monotonic()
        text = server.post("/v1/completions", {**body, "stream": False}).json()["choices"][0]["text"]
        assert time.monotonic() - started < 5
        thread.join(30)
    parts = re.findall(rb"data: (\{.*\})\n", data)
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert "".join(choice["text"] for part in parts for choice in json.loads(part)["choices"]) == text
