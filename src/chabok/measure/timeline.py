"""What happened to one request, as it happened: raw instants from which every metric is derived."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, NamedTuple, Self

import msgspec

from chabok.measure.failures import MeasureError

SCHEMA = "chabok.timelines/1"
"""First line of a timelines file; the number changes when old readers would misread new files."""

OTHER_LINES = (b'{"load"', b'{"known"')
"""How lines of a run begin that are no timelines; see ``chabok.measure.run``."""

Kind = Literal["role", "reasoning", "content", "tool", "usage", "error"]


class Event(NamedTuple):
    """One event of a stream.

    at: seconds since the run's start, when the last of its bytes was read. kind: ``role`` is any event that
    carries no token (the role, an empty delta, a finish reason). text: what it added. tokens: output tokens
    so far, where the server says so.
    """

    at: float
    kind: Kind
    text: str = ""
    tokens: int | None = None


class Failure(NamedTuple):
    """Why a request counts as failed: the class it is counted under, and what was said."""

    kind: str
    message: str
    retry_after_s: float | None = None


@dataclass(slots=True)
class Usage:
    """Token counts that the server reported; None: it did not.

    reasoning_tokens are inside output_tokens, cached_tokens inside prompt_tokens.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(slots=True)
class ServerTimings:
    """Milliseconds that the server reported for its stages; None: it did not.

    source: where they come from, such as ``chabok``, ``llama.cpp``, ``ollama`` or ``server-timing``.
    """

    source: str = ""
    queue_ms: float | None = None
    load_ms: float | None = None
    tokenize_ms: float | None = None
    prefill_ms: float | None = None
    first_token_ms: float | None = None
    decode_ms: float | None = None
    sample_ms: float | None = None
    detokenize_ms: float | None = None
    total_ms: float | None = None
    worst_gap_ms: float | None = None


@dataclass(slots=True)
class Timeline:
    """One request. Instants are seconds since the run's start on the monotonic clock.

    number: its place in the run. phase: the part of the run it belongs to, such as ``warm-up`` or
    ``32 streams``. scheduled: when it should have been sent. sent: when it was given to the socket (None: it
    never was). connect_s: time spent on a new connection before that; 0 on a warm one. headers: end of the
    response headers. done: end of the response, or of the attempt.
    asked_prompt, asked_output: tokens that the load meant; what really was is in ``usage``. counted: output
    tokens counted with a tokenizer by whoever has one.
    """

    number: int
    scheduled: float
    phase: str = ""
    session: str = ""
    sent: float | None = None
    connect_s: float = 0.0
    headers: float | None = None
    done: float | None = None
    status: int | None = None
    request_id: str = ""
    finish: str = ""
    failure: Failure | None = None
    asked_prompt: int | None = None
    asked_output: int | None = None
    counted: int | None = None
    usage: Usage = field(default_factory=Usage)
    server: ServerTimings | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The visible answer."""
        return "".join(event.text for event in self.events if event.kind == "content")

    @property
    def ok(self) -> bool:
        """Whether it is complete and without an error."""
        return self.failure is None and self.done is not None


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Timeline)


def encode(timeline: Timeline) -> bytes:
    """One line of JSON, without its newline."""
    return _ENCODER.encode(timeline)


def decode(line: bytes) -> Timeline:
    """A timeline from its line; MeasureError if it is not one."""
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MeasureError(f"not a timeline: {error}") from None


class TimelineFile:
    """Appends timelines to a JSONL file as requests end, so that memory does not grow with the run."""

    def __init__(self, path: str | os.PathLike[str], about: dict[str, Any] | None = None) -> None:
        """``about``: what is known of the run before it begins; written into the first line."""
        self.path = os.fspath(path)
        self._file: BinaryIO = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        self._file.write(_ENCODER.encode({"schema": SCHEMA, **(about or {})}) + b"\n")

    def __call__(self, timeline: Timeline) -> None:
        """Append one."""
        self._file.write(_ENCODER.encode(timeline) + b"\n")

    def close(self) -> None:
        """Write what is buffered, and close."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_timelines(
    path: str | os.PathLike[str], timelines: Iterable[Timeline], about: dict[str, Any] | None = None
) -> None:
    """Write a whole file of timelines."""
    with TimelineFile(path, about) as file:
        for timeline in timelines:
            file(timeline)


def read_about(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The first line of a timelines file; MeasureError if it is none, or of a newer schema."""
    with open(path, "rb") as file:
        return _about(path, file.readline(1 << 20))


def read_timelines(path: str | os.PathLike[str]) -> Iterator[Timeline]:
    """The timelines of a file, one by one. A last line that was cut short by a crash is left out."""
    with open(path, "rb") as file:
        _about(path, file.readline())
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            if line.startswith(OTHER_LINES):
                continue
            try:
                yield decode(line)
            except MeasureError as error:
                raise MeasureError(f"{os.fspath(path)}, line {number}: {error}") from None


def _about(path: str | os.PathLike[str], line: bytes) -> dict[str, Any]:
    try:
        about = msgspec.json.decode(line)
    except msgspec.MsgspecError:
        about = None
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, str) or not schema.startswith("chabok.timelines/"):
        raise MeasureError(f"{os.fspath(path)} is not a file of timelines; `chabok bench` writes them")
    if schema != SCHEMA:
        raise MeasureError(f"{os.fspath(path)} is of schema {schema}; this version reads {SCHEMA}")
    assert isinstance(about, dict)
    return about
