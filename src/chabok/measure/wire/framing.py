"""Bytes cut anywhere -> events: server-sent events and lines of JSON, with little work for each.

Server-sent events as in https://html.spec.whatwg.org/multipage/server-sent-events.html: lines end with LF,
CR LF or CR, a blank line ends an event, lines that begin with a colon are comments.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chabok.measure.failures import ProtocolError

EVENT_BYTES = 8 * 1024 * 1024
"""Longest event that is taken; a stream without any line end would fill memory otherwise."""

Sink = Callable[[float, bytes, bytes], None]
"""Takes (arrival of the last byte, data, name of the event if it has one)."""

_LINE = re.compile(rb"\r\n|\n|\r")


class EventStream:
    """Server-sent events from bytes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rest: list[bytes] = []  # a line whose end has not come
        self._waiting = 0
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0
        self._begun = False
        self._after_cr = False

    def feed(self, at: float, piece: bytes) -> None:
        """Take the next bytes, read at ``at``; gives every event that they complete."""
        # Nearly always a piece is one whole event, or a few, of one line each.
        plain = piece[:6] == b"data: " and piece[-2:] == b"\n\n" and b"\r" not in piece
        if plain and piece.count(b"\n") == 2 and not (self._rest or self._data or self._after_cr):
            self._begun = True
            name, self._name = self._name, b""
            self._sink(at, piece[6:-2], name)
            return
        if self._after_cr and piece:
            # The CR ended the line; a LF after it is the other half of a CR LF.
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        self._waiting += len(piece)
        if self._waiting + self._size > EVENT_BYTES:
            raise ProtocolError(f"an event is longer than {EVENT_BYTES} bytes; this is no stream of tokens")
        self._rest.append(piece)
        if b"\n" not in piece and b"\r" not in piece:
            return
        self._after_cr = piece.endswith(b"\r")
        lines = _LINE.split(b"".join(self._rest))
        last = lines.pop()
        self._rest, self._waiting = ([last] if last else []), len(last)
        if not self._begun and lines:
            self._begun = True
            lines[0] = lines[0].removeprefix(b"\xef\xbb\xbf")
        for line in lines:
            self._line(at, line)

    def finish(self, at: float) -> None:
        """The stream ended: give an event that lacks its blank line, as some servers send the last one."""
        if self._rest:
            self._line(at, b"".join(self._rest))
            self._rest = []
        self._line(at, b"")

    def _line(self, at: float, line: bytes) -> None:
        if not line:
            if self._data:
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                self._data, self._size = [], 0
                name, self._name = self._name, b""
                self._sink(at, data, name)
            self._name = b""
        elif line.startswith(b"data:"):
            self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            self._size += len(line)
            if self._size > EVENT_BYTES:
                raise ProtocolError(f"an event is longer than {EVENT_BYTES} bytes")
        elif line.startswith(b"event:"):
            self._name = line[6:].strip()


class LineStream:
    """Lines of JSON (application/x-ndjson) from bytes."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._rest: list[bytes] = []  # a line whose end has not come
        self._waiting = 0

    def feed(self, at: float, piece: bytes) -> None:
        """Take the next bytes, read at ``at``; gives every line that they complete."""
        self._waiting += len(piece)
        if self._waiting > EVENT_BYTES:
            raise ProtocolError(f"a line is longer than {EVENT_BYTES} bytes; this is no stream of tokens")
        self._rest.append(piece)
        if b"\n" not in piece:
            return
        lines = b"".join(self._rest).split(b"\n")
        self._waiting = len(lines[-1])
        self._rest = [lines.pop()]
        for line in lines:
            if stripped := line.strip():
                self._sink(at, stripped, b"")

    def finish(self, at: float) -> None:
        """The stream ended: give a last line without a line end."""
        if stripped := b"".join(self._rest).strip():
            self._rest = []
            self._sink(at, stripped, b"")
