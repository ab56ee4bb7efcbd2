"""One HTTP request to a dialect's handler, which may answer as an ASGI application does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from contextvars import copy_context
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from chabok.server.bodies import INLINE_BYTES, Body, read_bytes
from chabok.server.errors import RefusedError, encode
from chabok.server.streaming import GoneError

if TYPE_CHECKING:
    from chabok.server.app import Server
    from chabok.server.roster import Served

T = TypeVar("T", bound=Struct)
R = TypeVar("R")

_threads = ThreadPoolExecutor(2, "chabok-bodies")
"""Few: each of them takes its share of the interpreter from all streams, and memory for its body."""

Handler = Callable[["Call"], Awaitable[None]]


class Call(Request):
    """A request with the server that received it. ``state.caller``: who asks; ``state.request_id``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send)
        self.server: Server = scope["chabok"]
        self.reply = send
        self.load_s = 0.0
        self.large = False
        self.arrived: float = getattr(self.state, "arrived", None) or perf_counter()

    @property
    def request_id(self) -> str:
        """Of the X-Request-Id header."""
        return str(self.state.request_id)

    @asynccontextmanager
    async def model(self, name: str, keep_alive: float | None = None) -> AsyncIterator[Served]:
        """Hold a model while it answers; loads it first if need be, for which ``load_s`` is the time.

        keep_alive: seconds it shall stay loaded afterwards, instead of what is set for it.
        """
        started = perf_counter()
        async with self.server.roster.use(name, keep_alive=keep_alive) as served:
            self.load_s = perf_counter() - started
            yield served

    async def parse(self, body: Body[T]) -> T:
        """The body, read within the server's limit. Raises GoneError if the client leaves meanwhile."""
        limit = self.server.settings.max_body
        coding = self.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            what = f"bodies are read as they are; send it without Content-Encoding: {coding[:40]}"
            raise RefusedError(415, what, "unsupported_encoding")
        try:
            data = await read_bytes(self.stream(), self.headers.get("content-length"), limit)
        except ClientDisconnect:
            raise GoneError from None
        self.large = len(data) > INLINE_BYTES
        return await self.convert(body.parse, data)

    async def convert(self, function: Callable[..., R], *arguments: object) -> R:
        """``function(*arguments)``, which takes as long as the body is large: then in a thread, so that other
        clients' streams go on.
        """
        if self.large:
            # With the context, which knows who asks.
            run = partial(copy_context().run, function, *arguments)
            return await asyncio.get_running_loop().run_in_executor(_threads, run)
        return function(*arguments)

    async def json(  # type: ignore[override]
        self, value: object, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Answer with JSON."""
        await self.answer(encode(value), "application/json", status, headers)

    async def answer(
        self, body: bytes, media_type: str, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        """Answer with a body that is whole."""
        lines = [(b"content-type", media_type.encode()), (b"content-length", b"%d" % len(body))]
        lines += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        await self.reply({"type": "http.response.start", "status": status, "headers": lines})
        await self.reply({"type": "http.response.body", "body": body})


class Endpoint:
    """Makes a handler of calls an ASGI application: ``Route("/v1/models", Endpoint(models))``.

    body: what the handler reads, for the description of the interface.
    """

    def __init__(self, handler: Handler, body: Body[Any] | None = None) -> None:
        self.handler = handler
        self.body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self.handler(Call(scope, receive, send))
