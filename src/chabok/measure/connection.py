"""One connection and one exchange on it at a time: time is taken where bytes arrive, before anything looks at
them.

Little happens per piece of a stream: the kernel's bytes are copied once, framed by httptools (llhttp, in C),
and handed to a receiver with the instant they arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import httptools

from chabok.measure.failures import DisconnectedError, ProtocolError, SlowError

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


class Connection(asyncio.BufferedProtocol):
    """One socket, one exchange at a time."""

    def __init__(self, patience: Patience, sizes: Sizes, forget: Callable[[Connection], None]) -> None:
        """``forget``: is called when the connection is lost."""
        self.reusable = True
        self.touched = False  # whether any byte of the current response came
        self._patience = patience
        self._sizes = sizes
        self._forget = forget
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
        """The socket is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes came: take the time first."""
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
                if self._fed > self._sizes.head:
                    self._end(self._too_long())

    def eof_received(self) -> bool:
        """The other side sends no more."""
        self._at = perf_counter()
        if self._receiver is not None and self._headed and not self._framed:
            self.reusable = False
            self._end(None)  # a body that only the end of the connection delimits
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is closed, for whatever reason."""
        self.reusable = False
        self._forget(self)
        if self._receiver is not None:
            when = "in the middle of the response" if self._headed else "before the response headers"
            self._end(DisconnectedError(f"the server closed the connection {when}"))

    # -- httptools

    def on_status(self, status: bytes) -> None:
        """The reason phrase, which says nothing."""

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > self._sizes.head:
            raise self._too_long()
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def _too_long(self) -> ProtocolError:
        return ProtocolError(f"the response headers exceed {self._sizes.head} bytes")

    def on_headers_complete(self) -> None:
        """All headers, also those of an interim response."""
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
        """A piece of the body, freed of its framing."""
        receiver = self._receiver
        if receiver is not None:
            receiver.body(self._at, data)
            if receiver.finished:
                self._watch_end()

    def on_message_complete(self) -> None:
        """The end of a response."""
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
        patience, now = self._patience, perf_counter()
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
