"""What a model's text may do to a terminal (nothing), and small marks of style."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# ESC and the other C0 and C1 controls could move the cursor, rename the window, or answer for the user; they
# are shown as symbols. Newline and tab stay. A carriage return could overwrite what was read before.
_HARMLESS = {code: 0x2400 + code for code in range(0x20)} | {0x7F: 0x2421}
_HARMLESS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
del _HARMLESS[ord("\n")], _HARMLESS[ord("\t")]


def harmless(text: str) -> str:
    """Text without control characters that act on a terminal; works on any piece of a stream."""
    return text.translate(_HARMLESS)


class Answer:
    """Writes an answer to standard output as it comes; as it is to a pipe or file, made harmless to a
    terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stdout if out is None else out
        self._terminal = self._out.isatty()
        self._ends_line = True
        reconfigure = getattr(self._out, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a terminal that cannot show a character shows "?"

    def write(self, text: str) -> None:
        """Show a piece of text at once."""
        if text:
            self._out.write(harmless(text) if self._terminal else text)
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def end(self) -> None:
        """End the last line."""
        if not self._ends_line:
            self._out.write("\n")
            self._out.flush()
            self._ends_line = True


def console() -> Console:
    """Where tables are printed: as wide as the terminal; what reads a pipe gets whole lines."""
    from rich.console import Console

    out = Console()
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = 1000
    return out


def dim(text: str, stream: TextIO) -> str:
    """Text in a faint colour, where the stream is a terminal that has colours."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[2m{text}\x1b[0m"


def note(text: str) -> None:
    """A dim line on standard error, harmless whatever it quotes."""
    print(dim(harmless(text), sys.stderr), file=sys.stderr, flush=True)
