"""One client's connection: httptools' parser with a limit on every way of wasting the server's time.

What is limited, and how it ends: a connection on which nothing is asked (closed), headers or a body that take
too long (408), headers that are too large (431), too many connections (503), an answer that nobody takes
(dropped).
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from chabok.server.errors import RefusedError, answer
from chabok.server.settings import Settings


class _Unchunked(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: what has no length ends with the connection."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message.get("headers", ())):
                self.chunked_encoding = self._sized = False
        elif not self._sized:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    _sized = True


class Connection(HttpToolsProtocol):
    """An HTTP connection; one timer runs for whatever is being waited for from the client."""

    settings: Settings
    """Set by ``connections``."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._in_headers = self._in_body = self._completed = False
        self._refused = False

    # What the transport tells.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client, or turn it away if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.settings.max_connections:
            limit = self.settings.max_connections
            message = f"this server takes {limit} connections at a time; try again in a moment"
            self._refuse(RefusedError(503, message, "too_many_connections", {"Retry-After": "1"}))
            return
        self._wait(self.settings.idle_timeout, self._idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop every timer."""
        self._settle()
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._refused:
            return
        in_body, self._completed = self._in_body, False
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            why = error.__context__ or error  # of what our own callbacks raise, such as for a URL
            what = f"this is not a valid HTTP request ({str(why) or type(why).__name__})"
            self._refuse(RefusedError(400, what, "invalid_http"))
            return
        # All of it is headers, or was and they are complete, unless several requests came at once.
        if not in_body and not self._completed:
            self._header_bytes += len(data)
        if self._in_headers and self._header_bytes > self.settings.max_headers:
            self._too_large()

    def _go_on(self, rest: bytes) -> None:
        """Ignore that the client offers another protocol, as Java's does with every request (RFC 9110, 7.8):
        parse the request again without the offer, since the parser takes what follows for that protocol.
        """
        if self._refused:
            return
        kept = [
            line for line in self.headers if line[0] not in (b"connection", b"upgrade", b"http2-settings")
        ]
        lines = [b"%s %s HTTP/1.1" % (self.parser.get_method(), self.url), *map(b": ".join, kept), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + rest)

    def pause_writing(self) -> None:
        """The client takes less than it is given: it has so long to take it."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.settings.write_timeout, self._drop)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # What the parser tells.

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self._wait(self.settings.header_timeout, self._slow_headers)

    def on_headers_complete(self) -> None:
        """All headers are there; a body may follow."""
        self._in_headers, self._in_body = False, True
        if self._refused:
            return
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.settings.max_headers:
            self._too_large()
            return
        problem = self._problem()
        if problem:
            self._refuse(RefusedError(400, problem, "invalid_http"))
            return
        if self.parser.should_upgrade():
            return  # it is parsed again, see _go_on
        self._wait(self.settings.body_timeout, self._slow_body)
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _Unchunked

    def _problem(self) -> str:
        """What is wrong with the headers, if anything is: servers must not guess (RFC 9112, 3.2)."""
        if self.parser.get_method() == b"CONNECT":
            return "this server is no proxy"
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1:
            return "the request has more than one Host header"
        if not hosts and self.parser.get_http_version() == "1.1":
            return "the request has no Host header"
        return ""

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_body, self._completed = False, True
        self._settle()
        if not self._refused and not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer is written: the next request may come."""
        unread = self.cycle is not None and self.cycle.more_body
        super().on_response_complete()
        if unread and not self.pipeline:
            self._close()  # answered before its body was read, which is then not worth reading
        elif not self.pipeline and not self._in_headers:
            self._wait(self.settings.idle_timeout, self._idle)

    # What happens when the time is up.

    def _idle(self) -> None:
        self._close()

    def _slow_headers(self) -> None:
        limit = self.settings.header_timeout
        self._refuse(
            RefusedError(408, f"the headers did not come within {limit:g} seconds", "request_timeout")
        )

    def _slow_body(self) -> None:
        limit = self.settings.body_timeout
        self._refuse(RefusedError(408, f"the body did not come within {limit:g} seconds", "request_timeout"))

    def _drop(self) -> None:
        self._write_timer = None
        self.logger.info("a client took nothing for %g seconds and was dropped", self.settings.write_timeout)
        self.transport.abort()

    def _too_large(self) -> None:
        limit = self.settings.max_headers
        self._refuse(RefusedError(431, f"the headers take more than {limit} bytes", "headers_too_large"))

    def _refuse(self, refusal: RefusedError) -> None:
        """Answer, if nothing was answered yet, and hang up."""
        self._settle()
        self._refused = True
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_raw(refusal, (self.url or b"").decode("latin-1") if self.scope else ""))
        self._close()

    def _close(self) -> None:
        """Hang up; at once if the client does not even take what is written already."""
        if self.transport.is_closing():
            return
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()

    def _wait(self, seconds: float, then: Any) -> None:
        self._settle()
        self._timer = self.loop.call_later(seconds, then)

    def _settle(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _raw(refusal: RefusedError, path: str) -> bytes:
    """An answer as bytes, for a request that never reaches the application."""
    from http import HTTPStatus

    response = answer(refusal, path)
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])


def connections(settings: Settings) -> type[Connection]:
    """The class of the connections of a server with these settings."""
    return type("Connection", (Connection,), {"settings": settings})
