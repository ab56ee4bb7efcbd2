"""How long work tells whoever waits for it; the command line draws bars, a server may log."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a download or of packing, one after another; no two calls at a time."""

    def begin(self, what: str, total: int | None, unit: str = "bytes") -> None:
        """A stage starts; ``total`` is None where the amount of work is not known, else that many of
        ``unit``."""

    def advance(self, n: int) -> None:
        """That much more of the stage is done."""

    def end(self) -> None:
        """The stage is over, finished or failed."""

    def say(self, message: str) -> None:
        """Something to know while waiting, e.g. for another process."""


class Silent:
    """Progress that nobody watches."""

    def begin(self, what: str, total: int | None, unit: str = "bytes") -> None:
        """Ignore it."""

    def advance(self, n: int) -> None:
        """Ignore it."""

    def end(self) -> None:
        """Ignore it."""

    def say(self, message: str) -> None:
        """Ignore it."""
