"""The text of one sequence: detokenized as it grows, and ended before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns token ids into text piece by piece, never half a character."""

    def push(self, token: int, /) -> str:
        """Take one token; the text that is complete with it, possibly none."""

    def finish(self) -> str:
        """What is left at the end."""


class StopStrings:
    """Looks for stop strings across the borders of the pieces that text arrives in.

    Text that may be the beginning of a stop string is held back until it is known not to be one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The stop string that was met."""

    def push(self, piece: str) -> str:
        """Take a piece of text; what of it (and of what was held back) may be shown."""
        text = self._held + piece
        first = len(text)
        for stop in self._stops:
            at = text.find(stop)
            # The one that begins first wins; among those, the one listed first.
            if 0 <= at < first:
                first, self.found = at, stop
        if self.found is not None:
            self._held = ""
            return text[:first]
        hold = self._overlap(text)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def _overlap(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def finish(self) -> str:
        """What was held back, when nothing more will come."""
        held, self._held = self._held, ""
        return held


class Text:
    """What a sequence says so far."""

    __slots__ = ("_detokenizer", "_pieces", "_stops")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._pieces: list[str] = []

    @property
    def stop(self) -> str | None:
        """The stop string that was met."""
        return self._stops.found if self._stops is not None else None

    def push(self, token: int) -> str:
        """Take a token; the text that is final with it."""
        piece = self._detokenizer.push(token)
        if piece and self._stops is not None:
            piece = self._stops.push(piece)
        if piece:
            self._pieces.append(piece)
        return piece

    def finish(self) -> str:
        """The text that was still incomplete or held back when the sequence ended."""
        piece = self._detokenizer.finish()
        if self._stops is not None:
            if self._stops.found is not None:
                return ""
            piece = self._stops.push(piece)
            if self._stops.found is None:
                piece += self._stops.finish()
        if piece:
            self._pieces.append(piece)
        return piece

    def whole(self) -> str:
        """Everything so far."""
        return "".join(self._pieces)
