from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.cli.processes import ROOT, environment
from tests.engine.mock import ByteTokenizer, continuation
from tests.server.faking import FakeLoader, serving, settings

from chabok.errors import ResourceError
from chabok.server.listening import check_exposure, holder_of, listen
from chabok.server.running import Server
from chabok.server.settings import Settings, SettingsError

ASK = {"prompt": "x", "max_tokens": 400, "stream": True}


@contextlib.contextmanager
def process(*options: str, row_s: float = 0.01) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """``chabok serve`` with a slow model, ready; its address, and the file of what it says."""
    said = Path(os.environ.get("TMPDIR", "/tmp")) / f"chabok-serve-{os.getpid()}-{time.monotonic_ns()}"
    with said.open("wb") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "tests.server.faking", str(row_s), "slow", "--port", "0", *options],
            stderr=out,
            cwd=ROOT,
            env=environment(),
        )
    try:
        until = time.monotonic() + 30
        address = ""
        while not address:
            assert all((running.poll() is None, time.monotonic() < until)), said.read_text()
            time.sleep(0.02)
            found = [line for line in said.read_text().splitlines() if "listens at" in line]
            address = found[0].split()[-1] if found else ""
        while httpx.get(address + "/ready").status_code != 200:
            assert all((running.poll() is None, time.monotonic() < until)), said.read_text()
            time.sleep(0.02)
        yield running, address, said
    finally:
        running.kill()
        running.wait()
        said.unlink()


class Streaming(threading.Thread):
    """A client that reads a stream: its events, and the instant it ended."""

    def __init__(self, address: str, body: dict[str, Any] = ASK) -> None:
        super().__init__(daemon=True)
        self.address, self.body = address, body
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.ended = 0.0
        self.error = ""
        self.start()
        assert self.begun.wait(10)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.address + "/v1/completions", json=self.body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.lines.append(line.removeprefix("data: "))
                        if len(self.lines) > 1:
                            self.begun.set()
        except httpx.HTTPError as error:
            self.error = repr(error)
        self.ended = time.monotonic()
        self.begun.set()


def test_sigterm_lets_a_stream_end_and_turns_others_away_meanwhile() -> None:
    with process() as (running, address, said):
        client = Streaming(address, {**ASK, "max_tokens": 80})
        running.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        with pytest.raises(httpx.ConnectError):
            httpx.get(address + "/ready")
        client.join(20)
        assert client.lines[-1] == "[DONE]"
        assert json.loads(client.lines[-2])["choices"][0]["finish_reason"] == "length"
        assert running.wait(10) == 0
        assert "stopping: 1 request has 30 s to end" in said.read_text()


def test_a_stream_that_takes_longer_than_the_time_to_stop_is_ended_with_an_error_that_says_so() -> None:
    with process("--shutdown-timeout", "0.3") as (running, address, _):
        client = Streaming(address)
        started = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0
        assert 0.3 <= time.monotonic() - started < 3
        client.join(5)
        assert "was stopped 0.3 s after it was asked to" in json.loads(client.lines[-1])["error"]["message"]


def test_a_second_signal_ends_the_server_at_once() -> None:
    with process() as (running, address, said):
        Streaming(address)
        running.send_signal(signal.SIGINT)
        running.send_signal(signal.SIGINT)  # such as from the terminal and from a wrapper: one Ctrl-C
        time.sleep(0.6)
        assert running.poll() is None
        started = time.monotonic()
        running.send_signal(signal.SIGINT)
        assert running.wait(10) == 128 + signal.SIGINT
        assert time.monotonic() - started < 5  # not the thirty seconds that a stream may take to end
        assert "stopped at once" in said.read_text()


def test_a_server_with_nothing_to_do_stops_at_once_with_exit_code_0() -> None:
    with process() as (running, address, _), httpx.Client() as idle:
        idle.get(address + "/health")  # a connection that is kept open does not hold it up
        started = time.monotonic()
        running.send_signal(signal.SIGTERM)
        assert running.wait(5) == 0
        assert time.monotonic() - started < 2


def test_ready_says_503_until_the_models_are_loaded_and_health_says_200() -> None:
    loader = FakeLoader()
    loader.go.clear()
    with serving(settings("one"), loader, ready=False) as (address, _):
        answer = httpx.get(address + "/ready")
        assert (answer.status_code, answer.json()) == (503, {"status": "loading one"})
        assert httpx.get(address + "/health").json()["status"] == "ok"
        loader.go.set()
        until = time.monotonic() + 5
        while httpx.get(address + "/ready").status_code != 200 and time.monotonic() < until:
            time.sleep(0.01)
        assert httpx.get(address + "/ready").json() == {"status": "ready"}


def test_ready_says_503_while_the_server_is_stopping() -> None:
    with serving(settings(), FakeLoader(row_s=0.005)) as (address, server), httpx.Client() as kept:
        assert kept.get(address + "/ready").status_code == 200
        server.roster.stopping = True
        assert kept.get(address + "/ready").json() == {"status": "stopping"}


def test_a_model_that_cannot_be_preloaded_ends_the_server_with_the_reason() -> None:
    from chabok.errors import CheckpointError

    loader = FakeLoader()
    loader.failing.add("one")
    asked = settings("one")
    from chabok.server.app import build
    from chabok.server.roster import Roster

    roster = Roster(asked, loader)
    server = Server(build(roster, asked), roster, asked, listen(asked))
    with pytest.raises(CheckpointError, match="tensor 'x' is damaged"):
        server.run_to_end()


def test_a_taken_port_is_told_with_who_has_it_and_what_to_do() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            ResourceError, match=rf"port {port} is taken by .*\(process {os.getpid()}\); .*--port"
        ):
            listen(Settings(port=port))
        assert f"(process {os.getpid()})" in holder_of(port)
        done = subprocess.run(
            [sys.executable, "-m", "chabok", "serve", "--port", str(port)],
            capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert done.stderr.startswith(f"chabok: port {port} is taken by")
        assert done.stderr.count("\n") == 1


def test_who_holds_a_port_that_nobody_holds_is_nobody() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert holder_of(free.getsockname()[1]) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.com"])
def test_listening_to_others_without_a_key_is_refused_unless_asked_for(host: str) -> None:
    with pytest.raises(SettingsError, match="without a key: give --api-keys FILE"):
        check_exposure(Settings(host=host), has_keys=False)
    check_exposure(Settings(host=host), has_keys=True)
    check_exposure(Settings(host=host, allow_remote_without_key=True), has_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_listening_to_this_machine_needs_no_key(host: str) -> None:
    check_exposure(Settings(host=host), has_keys=False)


def test_a_host_that_is_not_of_this_machine_is_told_so() -> None:
    with pytest.raises(ResourceError, match=r"192\.0\.2\.1 is not an address of this machine"):
        listen(Settings(host="192.0.2.1", port=0))
    with pytest.raises(SettingsError, match="is not an address of this machine"):
        listen(Settings(host="no such host.invalid", port=0))


def test_a_server_at_localhost_is_found_under_every_address_of_it() -> None:
    with serving(settings(host="localhost")) as (address, server):
        port = int(address.rpartition(":")[2])
        for sock in server._sockets:
            host = sock.getsockname()[0]
            at = f"[{host}]" if ":" in host else host
            assert httpx.get(f"http://{at}:{port}/health").status_code == 200


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_a_server_may_listen_at_an_ipv6_address() -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        with serving(settings(host="::1")) as (address, _):
            assert address.startswith("http://[::1]:")
            assert httpx.get(address + "/health").status_code == 200


def test_a_server_may_listen_at_a_unix_socket_that_only_its_owner_may_use(tmp_path: Path) -> None:
    path = tmp_path / "chabok.sock"
    with serving(settings(socket=path)) as (address, _):
        assert address == str(path)
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            assert client.get("http://localhost/health").status_code == 200
        with pytest.raises(ResourceError, match="another server listens at"):
            listen(settings(socket=path))
    assert not path.exists()


def test_a_socket_left_by_a_killed_server_is_replaced_but_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listen(settings(socket=path))[0].close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(SettingsError, match="is not a socket"):
        listen(settings(socket=path))
    assert path.read_text() == "precious"


def test_every_answer_has_the_date_and_a_request_id() -> None:
    with serving(settings()) as (address, _):
        for path in ("/health", "/nowhere"):
            answer = httpx.get(address + path)
            assert answer.headers["date"].endswith("GMT")
            assert answer.headers["x-request-id"].startswith("req-")
        given = httpx.get(address + "/health", headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"


@pytest.mark.wide
def test_an_idle_server_uses_no_processor_time() -> None:
    with process(row_s=0.0) as (running, address, _):
        clients = [httpx.Client() for _ in range(20)]
        for client in clients:
            client.get(address + "/health")

        def used() -> int:
            fields = Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])

        def switches() -> int:
            total = 0
            for status in Path(f"/proc/{running.pid}/task").glob("*/status"):
                total += int(status.read_text().partition("voluntary_ctxt_switches:")[2].split()[0])
            return total

        time.sleep(1)
        before, woken = used(), switches()
        time.sleep(10)
        assert used() - before <= 1  # hundredths of a second
        assert switches() - woken <= 10, "something ticks"
        for client in clients:
            client.close()


@pytest.mark.wide
def test_500_idle_connections_and_32_streams_live_together() -> None:
    with serving(settings(), FakeLoader(row_s=0.0005)) as (address, server):
        host, port = address.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(500)]
        streams = [
            Streaming(address, {**ASK, "prompt": f"stream {i}", "max_tokens": 100, "temperature": 0})
            for i in range(32)
        ]
        for i, stream in enumerate(streams):
            stream.join(60)
            assert stream.lines[-1] == "[DONE]", stream.error
            texts = [json.loads(line)["choices"][0]["text"] for line in stream.lines[:-1]]
            alone = ByteTokenizer().decode(continuation(list(f"stream {i}".encode()), 100))
            assert "".join(texts) == alone
        assert len(server.server_state.connections) >= 500
        for connection in idle:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for connection in idle:
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.close()


def test_a_request_that_waits_for_a_model_when_the_server_stops_is_told_so() -> None:
    loader = FakeLoader()
    with serving(settings("one", "two", shutdown_timeout=5.0), loader) as (address, server):
        loader.go.clear()
        answers: list[httpx.Response] = []
        body = {"model": "two", "prompt": "x", "max_tokens": 5}
        client = threading.Thread(
            target=lambda: answers.append(httpx.post(address + "/v1/completions", json=body))
        )
        client.start()
        while "two" not in loader.loads:
            time.sleep(0.01)
        server.stop()
        time.sleep(0.1)
        loader.go.set()
        client.join(10)
        assert answers[0].status_code == 503
        assert answers[0].json()["error"]["code"] == "server_stopping"


def test_systemd_is_told_when_the_models_are_there_and_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        loader = FakeLoader()
        loader.go.clear()
        with serving(settings(), loader, ready=False):
            systemd.setblocking(False)
            with pytest.raises(BlockingIOError):
                systemd.recv(100)
            systemd.settimeout(5)
            loader.go.set()
            assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100) == b"STOPPING=1"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_server_with_a_certificate_speaks_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    kind = [
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=localhost",
    ]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *kind, *files], check=True, capture_output=True)
    with serving(settings(tls_certificate=certificate, tls_key=key)) as (address, _):
        assert address.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(address + "/health", verify=context).status_code == 200


def test_sighup_reads_the_keys_again(tmp_path: Path) -> None:
    from chabok.server.keyfile import new_key

    path = tmp_path / "keys.toml"
    new_key("alice", path)
    with process("--api-keys", str(path), row_s=0.0) as (running, address, said):
        key = new_key("bob", path)
        running.send_signal(signal.SIGHUP)
        until = time.monotonic() + 5
        while "2 keys read from" not in said.read_text() and time.monotonic() < until:
            time.sleep(0.02)
        assert httpx.get(address + "/v1/models", headers={"x-api-key": key}).status_code == 200


@pytest.mark.wide
def test_a_thousand_requests_at_once_are_each_answered_or_told_when_to_come_again() -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 8}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"

    async def one(host: str, port: int) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head.encode() + body)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        writer.close()
        return int(answer.split()[1]), answer

    async def all_of_them(host: str, port: int) -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(one(host, port) for _ in range(1000)))

    with serving(settings(), FakeLoader(row_s=0.0002)) as (address, server):
        host, port = address.removeprefix("http://").split(":")
        answers = asyncio.run(all_of_them(host, int(port)))
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= 256
        assert all(b"retry-after" in answer.lower() for status, answer in answers if status == 429)
        assert httpx.post(address + "/v1/completions", content=body).status_code == 200
        assert not server.roster.entries()[0].in_use
