"""From the bytes of one response to its timeline, whatever dialect it speaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol

import msgspec

from chabok.measure.failures import (
    ExchangeError,
    ProtocolError,
    ServerSaidError,
    StatusError,
    TruncatedError,
)
from chabok.measure.timeline import Event, Failure, ServerTimings, Timeline
from chabok.measure.wire.framing import EventStream, LineStream

ERROR_BYTES = 64 * 1024
"""How much of an error's body is kept."""
SLACK_EVENTS = 1000
"""Token events beyond four times the asked ones after which a stream is taken for one that never ends."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What to ask of an endpoint, in no dialect yet.

    prompt: the text of one user turn; or messages, as in OpenAI's chat. output_tokens: the most that may
    come. exact: ask for just so many, where the dialect has a way (``ignore_eos``). extra: fields that are
    added to the body as they are.
    """

    model: str
    prompt: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()
    output_tokens: int = 128
    exact: bool = True
    temperature: float | None = 0.0
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The messages; the prompt as the only one where there are none."""
        return [dict(each) for each in self.messages] or [{"role": "user", "content": self.prompt}]

    @property
    def flat(self) -> str:
        """The prompt as one text; of several messages a transcript that the answer goes on from.

        For completions, which know no turns: ``User: ...``, ``Assistant: ...``, blank lines between.
        """
        if not self.messages:
            return self.prompt
        said = [f"{str(each['role']).capitalize()}: {each.get('content') or ''}" for each in self.messages]
        return "\n\n".join([*said, "Assistant:"])


class Parser(Protocol):
    """Turns the events of one dialect into those of a timeline; one per request."""

    finished: bool
    """Whether the stream said that it is complete."""

    def read(self, at: float, data: bytes, name: bytes) -> None:
        """Take one event; msgspec.MsgspecError if it is not of this dialect, ServerSaidError if an error."""


class Dialect(Protocol):
    """How one family of endpoints is spoken to."""

    name: str
    path: str
    """Below the base URL."""
    lines: bool
    """JSON in lines rather than server-sent events."""

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request; ``key``: the API key, or empty."""

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body of a request."""

    def parser(self, timeline: Timeline) -> Parser:
        """What reads the events of one response into ``timeline``."""


class Reader:
    """The receiver of one streamed response.

    start: perf_counter instant of the run's start, from which a timeline's instants count.
    """

    def __init__(self, dialect: Dialect, timeline: Timeline, start: float) -> None:
        self.timeline = timeline
        self._dialect = dialect
        self._start = start
        self._parser = dialect.parser(timeline)
        self._framing = (LineStream if dialect.lines else EventStream)(self._event)
        self._headers: Mapping[str, str] = {}
        self._whole: bytearray | None = None  # kept, because it is no stream
        self._most = 4 * (timeline.asked_output or 1_000_000) + SLACK_EVENTS

    @property
    def finished(self) -> bool:
        """Whether the stream said that it is complete."""
        parser = getattr(self, "_parser", None)  # gone once the response ended
        return parser is None or parser.finished

    def head(self, at: float, status: int, headers: Mapping[str, str]) -> None:
        """Take status and headers."""
        timeline = self.timeline
        timeline.headers = round(at - self._start, 7)
        timeline.status = status
        timeline.request_id = headers.get("x-request-id") or headers.get("request-id") or ""
        self._headers = headers
        stated = headers.get("content-type", "").partition(";")[0].strip().lower()
        streams = ("text/event-stream", "application/x-ndjson", "application/stream+json")
        if not 200 <= status < 300 or (stated and stated not in streams):
            self._whole = bytearray()
        if "server-timing" in headers:
            timeline.server = server_timing(headers["server-timing"])

    def body(self, at: float, data: bytes) -> None:
        """Take the next bytes of the body."""
        if self._whole is None:
            self._framing.feed(round(at - self._start, 7), data)
        elif len(self._whole) < ERROR_BYTES:
            self._whole += data[: ERROR_BYTES - len(self._whole)]

    def _event(self, at: float, data: bytes, name: bytes) -> None:
        try:
            self._parser.read(at, data, name)
        except msgspec.MsgspecError as error:
            shown = data[:80].decode("utf-8", "replace")
            raise ProtocolError(
                f"an event is not what {self._dialect.name} sends ({error}): {shown!r}; "
                "--dialect names another format"
            ) from None
        if len(self.timeline.events) > self._most:
            raise ProtocolError(
                f"the stream goes on past {self._most} events where "
                f"{self.timeline.asked_output} tokens were asked for; the endpoint ignores the limit"
            )

    def close(self, error: ExchangeError | None = None) -> None:
        """The response ended: conclude the timeline; ``error``: how the exchange failed, if it did."""
        timeline = self.timeline
        try:
            if error is None:
                self._conclude()
        except ExchangeError as found:
            error = found
        if error is not None:
            timeline.failure = Failure(error.kind, str(error), getattr(error, "retry_after_s", None))
            at = timeline.done if timeline.done is not None else perf_counter() - self._start
            timeline.events.append(Event(at, "error", str(error)))
        # They hold each other; apart they are freed at once, not when the collector next stops the clock.
        del self._framing, self._parser

    def _conclude(self) -> None:
        timeline = self.timeline
        status = timeline.status or 0
        if not 200 <= status < 300:
            raise refused(status, self._headers, bytes(self._whole or b""))
        if self._whole is not None:
            said = error_in(bytes(self._whole))
            if said:
                raise ServerSaidError(f"status {status}, but the body is an error: {said}")
            kind = self._headers.get("content-type", "")
            raise ProtocolError(
                f"a stream was asked for, {kind} came; tokens cannot be timed through this endpoint"
                if "json" in kind
                else f"{kind} came instead of a stream of tokens; is the URL that of an API?"
            )
        self._framing.finish(timeline.done or 0.0)
        if not self.finished and not timeline.finish:
            raise TruncatedError(
                "the stream ended without a finish reason or end mark; tokens may be missing"
            )


def refused(status: int, headers: Mapping[str, str], body: bytes) -> StatusError:
    """A status other than 2xx, in words."""
    said = error_in(body) or body[:200].decode("utf-8", "replace").strip().partition("\n")[0]
    remedy = {
        400: "if it is a parameter that is not taken, --dialect or --extra may help",
        401: "give a key with --api-key or the environment",
        403: "this key may not do that",
        404: "is the model's name right (--model), and the URL?",
        405: "is the URL that of an API?",
        413: "a shorter prompt may be taken",
        429: "the endpoint limits the rate; ask for less at once",
    }.get(status, "the server's own log may say more" if status >= 500 else "")
    after = _seconds(headers.get("retry-after", ""))
    wait = f" (try again in {after:g} s)" if after is not None else ""
    if 300 <= status < 400:
        said, remedy = f"redirects to {headers.get('location', 'elsewhere')}", "give that URL"
    message = f"status {status}{wait}" + (f": {said}" if said else "") + (f"; {remedy}" if remedy else "")
    return StatusError(status, message, after)


def error_in(body: bytes) -> str:
    """The message of an error body of any dialect; empty if it is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return error_text(found)


def error_text(found: object) -> str:
    """The message inside ``{"error": ...}`` and its like; empty if there is none."""
    if not isinstance(found, dict):
        return ""
    error = found.get("error", found if found.get("object") == "error" or "detail" in found else None)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("type") or error
    return str(error)[:500] if error else ""


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None  # a date, or nothing
    return value if 0 <= value < 1e6 else None


def server_timing(header: str) -> ServerTimings:
    """Durations of a ``Server-Timing`` header (https://www.w3.org/TR/server-timing/) by common names."""
    names = {"queue": "queue_ms", "prefill": "prefill_ms", "load": "load_ms", "tokenize": "tokenize_ms",
             "first": "first_token_ms", "first_token": "first_token_ms", "decode": "decode_ms",
             "total": "total_ms"}  # fmt: skip
    timings = ServerTimings("server-timing")
    for entry in header.split(","):
        name, *attributes = (part.strip() for part in entry.split(";"))
        for attribute in attributes:
            key, _, value = attribute.partition("=")
            if key.strip().lower() == "dur" and name.lower().replace("-", "_") in names:
                duration = _seconds(value.strip().strip('"'))
                setattr(timings, names[name.lower().replace("-", "_")], duration)
    return timings


def merge(old: ServerTimings | None, new: ServerTimings) -> ServerTimings:
    """``new``, with what only ``old`` says."""
    if old is not None:
        for name in ServerTimings.__dataclass_fields__:
            if getattr(new, name) is None:
                setattr(new, name, getattr(old, name))
    return new
