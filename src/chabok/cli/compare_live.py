"""What a comparison is at: one line on a terminal, a line per step elsewhere."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType

from chabok.cli.terminal import harmless

EVERY_S = 30.0
"""Where there is no terminal, a step that goes on is told of no oftener."""


class Live:
    """Draws who is measured and how far it is; a context manager."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._last = ("", "")
        self._told = 0.0

    def __enter__(self) -> Live:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def tell(self, label: str, step: str, done: int, of: int) -> None:
        """A step of a contestant."""
        if self._quiet:
            return
        text = harmless(f"{label}: {step}" + (f" {done}/{of}" if of else "")).replace("\n", " ")
        if step.startswith("failed"):
            print(f"\r\x1b[K{text}" if self._terminal else text, file=sys.stderr, flush=True)
        elif self._terminal:
            print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
        elif (label, step) != self._last or monotonic() - self._told > EVERY_S:
            print(f"{text} ...", file=sys.stderr, flush=True)
            self._told = monotonic()
        self._last = (label, step)
