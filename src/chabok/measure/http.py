"""HTTP/1.1 for a stopwatch: time is taken where bytes arrive, before anything looks at them.

Little happens per piece of a stream: the kernel's bytes are copied once, framed by httptools (llhttp, in C),
and handed to a receiver with the instant they arrived. Everything else (pool, TLS, limits, patience) is done
per request or per connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

import httptools

from chabok.measure.failures import (
    ConnectError,
    DisconnectedError,
    MeasureError,
    ProtocolError,
    SlowError,
    TlsError,
)

BUFFER_BYTES = 64 * 1024
AFTERTIME_S = 0.25
"""How long a stream that has said it is complete may take to end as HTTP."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits in seconds.

    connect_s: name, TCP and TLS together. headers_s: from sending to the end of the response headers.
    idle_s: silence between bytes of the body. total_s: from sending to the end.
    """

    connect_s: float = 10.0
    headers_s: float = 300.0
    idle_s: float = 120.0
    total_s: float = 900.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Limits in bytes on what an endpoint may send: headers, and a body that is kept as a whole."""

    head: int = 64 * 1024
    body: int = 16 * 1024 * 1024


class Origin(NamedTuple):
    """Where connections go: ``scheme``, ``host``, ``port``."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> tuple[Origin, str]:
        """The origin of a URL and its path without a slash at the end; MeasureError if it is not one."""
        text = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise MeasureError(f"{url!r} is not a URL: {error}; try http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise MeasureError(f"{url!r} is not an http:// or https:// URL; try http://127.0.0.1:8000")
        if parts.username is not None or parts.query or parts.fragment:
            raise MeasureError(f"{url!r}: give no user, query or fragment; a key goes into --api-key")
        if any(ord(letter) <= 32 or ord(letter) >= 127 for letter in parts.path):
            raise MeasureError(
                f"{url!r}: the path must be plain ASCII without spaces; percent-encode the rest"
            )
        chosen = port if port is not None else (443 if parts.scheme == "https" else 80)
        return cls(parts.scheme, parts.hostname, chosen), parts.path.rstrip("/")

    @property
    def authority(self) -> str:
        """The value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}"


class Receiver(Protocol):
    """Takes a response as it comes; ``at`` is the perf_counter instant at which the bytes were read."""

    @property
    def finished(self) -> bool:
        """Whether the body has said that nothing more will follow, as ``[DONE]`` does."""

    def head(self, at: float, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers (lower-case names; of repeated ones the last) are complete."""

    def body(self, at: float, data: bytes) -> None:
        """Take the next bytes of the body, cut anywhere."""


class Collected:
    """A receiver that keeps the whole body, up to a limit."""

    finished = False

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.content = bytearray()

    def head(self, at: float, status: int, headers: Mapping[str, str]) -> None:
        """Keep status and headers."""
        self.status = status
        self.headers = headers

    def body(self, at: float, data: bytes) -> None:
        """Keep the bytes."""
        if len(self.content) + len(data) > self.limit:
            raise ProtocolError(f"the response is larger than {self.limit} bytes")
        self.content += data


@dataclass(slots=True)
class Clock:
    """The instants of one exchange, perf_counter seconds; ``connect_s`` is 0 on a warm connection."""

    connect_s: float = 0.0
    sent: float | None = None
    headers: float | None = None
    done: float | None = None


class _Connection(asyncio.BufferedProtocol):
    """One socket, one exchange at a time."""

    def __init__(self, client: Client) -> None:
        self.reusable = True
        self.touched = False  # whether any byte of the current response came
        self._client = client
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._clock = Clock()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._at = 0.0
        self._ending = self._headed = self._framed = False
        self._head_bytes = self._fed = 0
        self._headers: dict[str, str] = {}
        self._parser = httptools.HttpResponseParser(self)

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._at = perf_counter()
        self.touched = True
        if self._receiver is None:
            self.close()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(self._view[:nbytes])
        except httptools.HttpParserError as error:
            # What a callback raised is in its context.
            self._end(error.__context__ or ProtocolError(f"what answers does not speak HTTP/1.1 ({error})"))
        except httptools.HttpParserUpgrade:
            self._end(ProtocolError("the server wants to switch protocols, which nobody asked for"))
        else:
            if not self._headed and self._receiver is not None:
                self._fed += nbytes  # a header without end is not given to on_header
                if self._fed > self._client.sizes.head:
                    self._end(self._too_long())

    def eof_received(self) -> bool:
        self._at = perf_counter()
        if self._receiver is not None and self._headed and not self._framed:
            self.reusable = False
            self._end(None)  # a body that only the end of the connection delimits
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._client._forget(self)
        if self._receiver is not None:
            when = "in the middle of the response" if self._headed else "before the response headers"
            self._end(DisconnectedError(f"the server closed the connection {when}"))

    # -- httptools

    def on_status(self, status: bytes) -> None:
        pass

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._client.sizes.head:
            raise self._too_long()
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"the response headers exceed {self._client.sizes.head} bytes")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self._headed = True
        headers = self._headers
        self._framed = (
            "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        )
        self._clock.headers = self._at
        self._watch()  # from now on silence counts
        coding = headers.get("content-encoding", "identity").lower()
        if coding not in ("", "identity"):
            raise ProtocolError(
                f"the response is {coding}-compressed although identity was asked for; "
                "a compressor holds tokens back, so they cannot be timed: turn it off in the server or proxy"
            )
        if self._receiver is not None:
            self._receiver.head(self._at, status, headers)

    def on_body(self, data: bytes) -> None:
        receiver = self._receiver
        if receiver is not None:
            receiver.body(self._at, data)
            if receiver.finished:
                self._watch_end()

    def on_message_complete(self) -> None:
        if self._headed:
            self.reusable = self.reusable and self._parser.should_keep_alive()
            self._end(None)
        else:  # 100 Continue and its like
            self._headers = {}

    # -- one exchange

    async def exchange(self, data: bytes, receiver: Receiver, clock: Clock) -> None:
        """Send a request and wait for the end of its response; closes the connection on failure."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        self.touched = self._headed = self._framed = False
        self._head_bytes = self._fed = 0
        self._headers = {}
        self._parser = httptools.HttpResponseParser(self)
        self._receiver, self._clock = receiver, clock
        self._waiter = loop.create_future()
        self._transport.write(data)
        self._at = clock.sent = perf_counter()
        self._ending = False
        self._watch()
        try:
            await self._waiter
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._receiver is not None:  # cancelled
                self._receiver = None
                self.reusable = False
            if not self.reusable:
                self.close()

    def _watch(self) -> None:
        """Look again when the nearest limit could pass; bytes only move the instant they came at."""
        patience, now = self._client.patience, perf_counter()
        sent = self._clock.sent or now
        if self._timer is not None:
            self._timer.cancel()
        limits = [(sent + patience.total_s, f"not complete after {patience.total_s:g} s")]
        if self._headed:
            limits.append((self._at + patience.idle_s, f"nothing came for {patience.idle_s:g} s"))
        else:
            limits.append((sent + patience.headers_s, f"no response headers within {patience.headers_s:g} s"))
        deadline, text = min(limits)
        if now >= deadline:
            self._end(SlowError(f"the response is {text}" if text.startswith("not") else text))
            return
        self._timer = asyncio.get_running_loop().call_later(deadline - now + 0.001, self._watch)

    def _watch_end(self) -> None:
        """The stream is complete; give HTTP a moment to say so, too."""
        if not self._ending:
            self._ending = True
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(AFTERTIME_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self.reusable = False
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        receiver, self._receiver = self._receiver, None
        waiter = self._waiter
        if receiver is None or waiter is None:
            return
        self._clock.done = self._at
        if error is not None:
            self.reusable = False
        if not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    @property
    def alive(self) -> bool:
        """Whether it can take another request."""
        return self.reusable and self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close at once."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()


class Client:
    """Connections to one origin, reused; an async context manager.

    Never follows redirects, never decompresses, keeps no cookies, knows no proxies: what it times is what the
    endpoint does.
    """

    def __init__(
        self,
        origin: Origin,
        *,
        patience: Patience | None = None,
        sizes: Sizes | None = None,
        verify: ssl.SSLContext | bool = True,
    ) -> None:
        """``verify``: False accepts any certificate; a context is used as it is."""
        self.origin = origin
        self.patience = patience or Patience()
        self.sizes = sizes or Sizes()
        self._verify = verify
        self._tls: ssl.SSLContext | None = None
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._addresses: list[tuple[int, str]] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)  # let transports say goodbye

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    async def warm(self, connections: int) -> float:
        """Open connections until so many are idle; the median time one took, s (0 if none was needed)."""
        self._idle = [each for each in self._idle if each.alive]
        took: list[float] = []

        async def one() -> None:
            began = perf_counter()
            self._idle.append(await self._connect())
            took.append(perf_counter() - began)

        missing = connections - len(self._idle)
        while missing > 0:  # a few at a time: a listen queue is short
            step = min(missing, 32)
            results = await asyncio.gather(*(one() for _ in range(step)), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            missing -= step
        return sorted(took)[len(took) // 2] if took else 0.0

    async def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes,
        receiver: Receiver,
        clock: Clock | None = None,
    ) -> Clock:
        """Send a request and let ``receiver`` have the response; the instants, also while it goes on.

        ExchangeError (a subclass says which): no complete response. Whatever came until then was received.
        """
        clock = clock if clock is not None else Clock()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.origin.authority}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        data = "\r\n".join([*lines, "\r\n"]).encode("latin-1") + body
        connection = self._take()
        if connection is not None:
            try:
                await self._exchange(connection, data, receiver, clock)
                return clock
            except DisconnectedError:
                # The server closed an idle connection just as it was used again; nothing was answered.
                if connection.touched:
                    raise
        began = perf_counter()
        connection = await self._connect()
        clock.connect_s = perf_counter() - began
        await self._exchange(connection, data, receiver, clock)
        return clock

    async def fetch(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Collected:
        """Send a request and collect its whole response."""
        collected = Collected(self.sizes.body)
        await self.send(method, path, headers or {}, body, collected)
        return collected

    async def _exchange(self, connection: _Connection, data: bytes, receiver: Receiver, clock: Clock) -> None:
        await connection.exchange(data, receiver, clock)
        if connection.alive:
            self._idle.append(connection)

    def _take(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        return None

    def _forget(self, connection: _Connection) -> None:
        self._all.discard(connection)

    async def _connect(self) -> _Connection:
        origin = self.origin
        try:
            async with asyncio.timeout(self.patience.connect_s):
                return await self._open()
        except TimeoutError:
            limit = self.patience.connect_s
            raise ConnectError(
                f"no connection to {origin} within {limit:g} s; is the host right, and a firewall in between?"
            ) from None
        except ssl.SSLCertVerificationError as error:
            raise TlsError(
                f"{origin}: the certificate is not trusted ({error.verify_message}); "
                "--insecure measures all the same"
            ) from None
        except ssl.SSLError as error:
            raise TlsError(
                f"{origin} does not speak TLS ({error.reason or error}); is it an http:// address?"
            ) from None
        except socket.gaierror as error:
            raise ConnectError(f"the host {origin.host!r} is not known ({error.strerror})") from None
        except ConnectionRefusedError:
            raise ConnectError(
                f"nothing listens at {origin}; is the server running, and on this port?"
            ) from None
        except OSError as error:
            raise ConnectError(f"no connection to {origin}: {error.strerror or error}") from None

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            found = await loop.getaddrinfo(self.origin.host, self.origin.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, str(address[0])) for family, _, _, _, address in found]
        secure = self.origin.scheme == "https"
        if secure and self._tls is None:
            self._tls = self._context()
        failure: OSError | None = None
        for place, (family, address) in enumerate(self._addresses):
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self),
                    address,
                    self.origin.port,
                    family=family,
                    ssl=self._tls if secure else None,
                    server_hostname=self.origin.host if secure else None,
                )
            except ssl.SSLError:
                raise
            except OSError as error:
                failure = failure or error
                continue
            if place:  # what answered once is asked first from now on
                self._addresses.insert(0, self._addresses.pop(place))
            self._all.add(connection)
            return connection
        raise failure or ConnectError(f"the host {self.origin.host!r} has no address")

    def _context(self) -> ssl.SSLContext:
        if isinstance(self._verify, ssl.SSLContext):
            return self._verify
        context = ssl.create_default_context()
        if not self._verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols(["http/1.1"])
        return context
