"""What is known of one request when it has ended, for log, counters and trace; never what was said."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from chabok.engine.timings import Timings

ABANDONED = 499
"""The status of a request whose client left before it was answered, as nginx writes it."""


@dataclass(eq=False)
class Record:
    """One request. at: seconds since the epoch when it came; duration_s: until its answer was written."""

    method: str
    path: str
    client: str
    headers: list[tuple[bytes, bytes]] = field(repr=False)
    at: float = field(default_factory=time.time)
    arrived: float = field(default_factory=perf_counter)
    duration_s: float = 0.0
    request_id: str = ""
    key: str = ""
    status: int = ABANDONED
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    timings: Timings | None = None
    """Of its first answer."""
    reasons: list[str] = field(default_factory=list)
    """Why each of its answers ended."""
    error: str = ""

    def begin(self, model: str, prompt_tokens: int) -> None:
        """A prompt was handed to a model."""
        self.model = model
        self.prompt_tokens += prompt_tokens

    def took(self, timings: Timings, reason: str) -> None:
        """One of its answers ended."""
        self.timings = self.timings or timings
        self.cached_tokens = max(self.cached_tokens, timings.cached_tokens)
        self.output_tokens += timings.output_tokens
        self.reasons.append(reason)


class Observer(Protocol):
    """Is told of requests."""

    def began(self, record: Record) -> None:
        """A request came."""

    def ended(self, record: Record) -> None:
        """It is over."""


class Watch:
    """Passes requests on and tells observers of them; the outermost layer, so that nothing is missed.

    ``scope["state"]["record"]`` is the record.
    """

    def __init__(self, app: ASGIApp, observers: list[Observer]) -> None:
        self._app, self._observers = app, observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client")
        record = Record(scope["method"], scope["path"], client[0] if client else "local", scope["headers"])
        state = scope.setdefault("state", {})
        state["record"] = record
        for observer in self._observers:
            observer.began(record)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, reply)
        except Exception as error:
            record.error = record.error or type(error).__name__
            raise
        finally:
            record.duration_s = perf_counter() - record.arrived
            record.request_id = state.get("request_id", "")
            for observer in self._observers:
                observer.ended(record)
