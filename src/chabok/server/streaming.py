"""Streamed answers: events to bytes, one write per batch of them, for as long as the client is there."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from chabok.engine.timings import Timings
from chabok.server.errors import RefusedError
from chabok.server.events import Answer, Ended, Event

if TYPE_CHECKING:
    from chabok.server.call import Call
    from chabok.server.generation import Prepared

FIRST_BYTE_S = 1.0
"""The answer's head is sent with the first event, but no later than this: proxies and people want a sign."""

KEEP_ALIVE_S = 10.0
"""Longest silence on a stream."""

TICK_S = 1.0
"""How often a stream looks at the clock."""


class Writer(Protocol):
    """Writes one answer's events in the form of a dialect.

    media_type: of the answer. keep_alive: bytes that say nothing but that somebody is there.
    """

    media_type: str
    keep_alive: bytes

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events, possibly none."""

    def fail(self, error: BaseException) -> bytes:
        """The bytes that tell of an error, and end the stream."""

    def end(self) -> bytes:
        """The bytes that end the stream."""


class GoneError(Exception):
    """The client left, or takes nothing."""


async def stream(call: Call, prepared: Prepared, writer: Writer) -> None:
    """Send the events of ``prepared`` until their end; ends the requests if the client leaves."""
    await _Stream(call, prepared, writer).run()


async def whole(call: Call, prepared: Prepared) -> list[Answer]:
    """The whole answers; raises GoneError, and ends the requests, if the client leaves."""
    return prepared.put_together(await gather(call, prepared))


async def gather(call: Call, prepared: Prepared) -> list[Event]:
    """All events; raises GoneError, and ends the requests, if the client leaves."""
    watch = asyncio.create_task(_watch(call, prepared))
    found: list[Event] = []
    try:
        while (events := await prepared.next()) is not None:
            found += events
    finally:
        watch.cancel()
        prepared.close()
    if prepared.gone:
        raise GoneError
    if any(type(event) is Ended and event.reason == "deadline" and not event.usage.output for event in found):
        raise RefusedError(504, "the deadline passed before the answer began", "deadline_exceeded")
    return found


async def _watch(call: Call, prepared: Prepared) -> None:
    """Wait until the client leaves; then end the requests."""
    while (await call.receive())["type"] != "http.disconnect":
        pass
    prepared.gone = True
    prepared.close()


class _Stream:
    def __init__(self, call: Call, prepared: Prepared, writer: Writer) -> None:
        self._call = call
        self._prepared = prepared
        self._writer = writer
        self._begun = perf_counter()
        self._sent = self._begun  # when the last bytes were sent
        self._sending = False
        self._headed = False
        self._limit_s: float = call.server.settings.write_timeout
        self._slow = False

    async def run(self) -> None:
        watch = asyncio.create_task(_watch(self._call, self._prepared))
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._timer = loop.call_later(FIRST_BYTE_S, self._tick)
        try:
            await self._write()
        except asyncio.CancelledError:
            if not self._slow:
                raise
        finally:
            self._timer.cancel()
            watch.cancel()
            self._prepared.close()
        if self._slow:
            raise GoneError

    async def _write(self) -> None:
        prepared, writer = self._prepared, self._writer
        try:
            while (events := await prepared.next()) is not None:
                if events:
                    data = writer.write(events)
                    if data:
                        await self._send(data)
                elif not self._headed or perf_counter() - self._sent >= KEEP_ALIVE_S:
                    await self._send(writer.keep_alive)
        except Exception as error:
            if not self._headed:
                raise
            await self._send(writer.fail(error), last=True)
            return
        if prepared.gone:
            raise GoneError
        await self._send(writer.end(), last=True)

    async def _send(self, data: bytes, last: bool = False) -> None:
        self._sending = True
        reply = self._call.reply
        if not self._headed:
            self._headed = True
            await reply({"type": "http.response.start", "status": 200, "headers": self._head()})
        await reply({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending = False
        self._sent = perf_counter()

    def _head(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self._writer.media_type.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # proxies that collect answers would spoil it
            (b"server-timing", server_timing(self._prepared.timings).encode()),
        ]

    def _tick(self) -> None:
        """Once a second: a sign of life where it is due, an end to a client that takes nothing."""
        now = perf_counter()
        if self._sending:
            if now - self._sent > self._limit_s and self._task is not None:
                self._slow = True
                self._task.cancel()
                return
        elif not self._headed or now - self._sent >= KEEP_ALIVE_S:
            self._prepared.poke()
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)


def server_timing(timings: Timings) -> str:
    """The value of the Server-Timing header (W3C): names and milliseconds of the stages so far."""
    stages = (
        ("tokenize", timings.tokenize_s),
        ("queue", timings.queue_s),
        ("prefill", timings.prefill_s),
        ("first_token", timings.first_token_s),
        ("decode", timings.decode_s),
        ("total", timings.total_s),
    )
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in stages if seconds > 0)
