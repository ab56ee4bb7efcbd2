"""The client: limits, reuse, and errors that say what to do."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.measure.scripted import Script, ScriptedServer, Step

from chabok.measure import Client, MeasureError, Origin, Patience
from chabok.measure.connection import Collected, Sizes
from chabok.measure.failures import ConnectError, DisconnectedError, ProtocolError, SlowError, TlsError

PLAIN = {"Content-Type": "text/plain"}


def with_client(url: str, go: Callable[[Client, str], Awaitable[Any]], **options: Any) -> Any:
    origin, path = Origin.of(url)

    async def run() -> Any:
        async with Client(origin, **options) as client:
            return await go(client, path)

    return asyncio.run(run())


def get(url: str, **options: Any) -> Collected:
    return with_client(url, lambda client, path: client.fetch("GET", path), **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:1/v1/", (("http", "h", 1), "/v1")),
        ("h:8000", (("http", "h", 8000), "")),
        ("https://h", (("https", "h", 443), "")),
        ("http://[::1]:5", (("http", "::1", 5), "")),
    ],
)
def test_a_url_is_an_origin_and_a_path(url: str, expected: object) -> None:
    assert Origin.of(url) == expected


@pytest.mark.parametrize(
    "url",
    ["ftp://h", "http://", "http://u:p@h", "http://h:x", "http://h:99999", "http://h/a b", "http://h?q"],
)
def test_what_is_no_usable_url_is_said_so(url: str) -> None:
    with pytest.raises(MeasureError, match=r"URL|user|path"):
        Origin.of(url)


def test_a_host_header_names_only_an_unusual_port() -> None:
    assert Origin.of("http://[::1]:5")[0].authority == "[::1]:5"
    assert Origin.of("https://a.example:443")[0].authority == "a.example"


def test_connections_are_warmed_reused_and_their_time_is_told_apart(server: ScriptedServer) -> None:
    url = server.script(Script([Step(0, b"ok")], headers=PLAIN))

    async def go(client: Client, path: str) -> list[float]:
        first = await client.send("GET", path, {}, b"", Collected(100))
        again = await client.send("GET", path, {}, b"", Collected(100))
        await client.warm(3)
        warm = await asyncio.gather(*(client.send("GET", path, {}, b"", Collected(100)) for _ in range(3)))
        return [first.connect_s, again.connect_s, *(clock.connect_s for clock in warm)]

    found = with_client(url, go)
    assert found[0] > 0
    assert found[1:] == [0, 0, 0, 0]


def test_a_kept_connection_that_the_server_closed_is_replaced_without_a_failure(
    server: ScriptedServer,
) -> None:
    url = server.script(
        Script([Step(0, b"ok")], headers=PLAIN, framing="close"), Script([Step(0, b"again")], headers=PLAIN)
    )

    async def go(client: Client, path: str) -> bytes:
        await client.fetch("GET", path)
        await asyncio.sleep(0.05)
        return bytes((await client.fetch("GET", path)).content)

    assert with_client(url, go) == b"again"


def test_bytes_that_come_unasked_end_the_connection_not_the_next_request(server: ScriptedServer) -> None:
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
    url = server.script(Script([], raw=extra), Script([Step(0, b"good")], headers=PLAIN))

    async def go(client: Client, path: str) -> list[bytes]:
        return [bytes((await client.fetch("GET", path)).content) for _ in range(2)]

    assert with_client(url, go) == [b"ok", b"good"]


def test_an_interim_response_is_not_the_response(server: ScriptedServer) -> None:
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made\r\nContent-Length: 1\r\n\r\nx"
    found = get(server.script(Script([], raw=raw)))
    assert (found.status, bytes(found.content)) == (201, b"x")


def test_each_time_limit_ends_a_request_and_says_which(server: ScriptedServer) -> None:
    slow_head = server.script(Script([Step(0, b"x")], head_ms=2000))
    with pytest.raises(SlowError, match=r"no response headers within 0\.1 s"):
        get(slow_head, patience=Patience(headers_s=0.1))
    stalled = server.script(Script([Step(0, b"x"), Step(2000, b"y")]))
    with pytest.raises(SlowError, match=r"nothing came for 0\.1 s"):
        get(stalled, patience=Patience(idle_s=0.1))
    endless = server.script(Script([Step(20, b"x")] * 200))
    with pytest.raises(SlowError, match=r"not complete after 0\.2 s"):
        get(endless, patience=Patience(idle_s=0.15, total_s=0.2))


def test_a_stall_shorter_than_the_limit_is_waited_for(server: ScriptedServer) -> None:
    url = server.script(Script([Step(0, b"x")] + [Step(60, b"y")] * 4))
    assert get(url, patience=Patience(headers_s=0.15, idle_s=0.2)).content == b"xyyyy"


def test_sizes_are_limited(server: ScriptedServer) -> None:
    many = server.script(Script([], headers={f"X-{n}": "v" * 100 for n in range(100)}))
    with pytest.raises(ProtocolError, match="headers exceed 4096 bytes"):
        get(many, sizes=Sizes(head=4096))
    large = server.script(Script([Step(0, b"x" * 5000)]))
    with pytest.raises(ProtocolError, match="larger than 1000 bytes"):
        get(large, sizes=Sizes(body=1000))


def test_what_breaks_off_is_told_apart(server: ScriptedServer) -> None:
    with pytest.raises(DisconnectedError, match="before the response headers"):
        get(server.script(Script([], raw=b"HTTP/1.1 200 OK\r\n", end="reset")))
    with pytest.raises(DisconnectedError, match="in the middle"):
        get(server.script(Script([Step(0, b"x")], end="reset")))
    with pytest.raises(ProtocolError, match="does not speak HTTP"):
        get(server.script(Script([], raw=b"\x15\x03\x01\x00\x02\x02\x46")))


def test_nothing_listening_and_unknown_hosts_are_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectError, match="nothing listens at"):
        get(f"http://127.0.0.1:{port}")
    with pytest.raises(ConnectError, match="is not known"):
        get("http://no-such-host.invalid")


def test_a_proxy_that_is_not_asked_is_named_where_no_connection_is_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:3128")
    monkeypatch.setenv("no_proxy", "localhost")
    with pytest.raises(ConnectError, match="HTTP_PROXY is set, but is not used"):
        get("http://no-such-host.invalid")
    monkeypatch.setenv("no_proxy", ".invalid")
    with pytest.raises(ConnectError, match=r"known \([^)]*\)$"):
        get("http://no-such-host.invalid")


def test_tls_where_there_is_none_is_told(server: ScriptedServer) -> None:
    url = server.script(Script([], raw=b"HTTP/1.1 400 Bad\r\n\r\n"))
    with pytest.raises((TlsError, ConnectError), match=r"TLS|no connection"):
        get(url.replace("http://", "https://"), patience=Patience(connect_s=1))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "server.pem"
    made = shutil.which("openssl") and subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", f"{path}.crt"],
        capture_output=True,
    )  # fmt: skip
    if not made or made.returncode:
        pytest.skip("needs the openssl program")
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


def test_tls_is_spoken_and_an_untrusted_certificate_is_told_with_the_remedy(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                    secure.recv(65536)
                    secure.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TlsError, match=r"not trusted.*--insecure"):
            get(url)
        assert get(url, verify=False).content == b"ok"
        trusting = ssl.create_default_context(cafile=str(certificate) + ".crt")
        assert get(url, verify=trusting).content == b"ok"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_cancelled_request_closes_its_connection(server: ScriptedServer) -> None:
    url = server.script(Script([Step(0, b"x"), Step(5000, b"y")]), Script([Step(0, b"next")]))

    async def go(client: Client, path: str) -> bytes:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.fetch("GET", path), 0.1)
        return bytes((await client.fetch("GET", path)).content)

    assert with_client(url, go) == b"next"
