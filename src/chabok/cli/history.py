"""What a user types, and typed before."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import ModuleType, TracebackType

LINES = 2000
"""Lines of history that are kept."""


def history_path() -> Path:
    """Where typed lines are kept: ``$CHABOK_HISTORY``, or the platform's folder for state."""
    chosen = os.environ.get("CHABOK_HISTORY")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_state_path

    return user_state_path("chabok", appauthor=False) / "history"


class History:
    """Asks for a text with line editing, and remembers each line the moment it is entered.

    Where lines cannot be kept (a read-only home), asking works all the same.
    """

    def __init__(self) -> None:
        self._path = history_path()
        self._readline: ModuleType | None = None
        self._keeps = False

    def __enter__(self) -> History:
        try:
            import readline
        except ImportError:
            return self
        self._readline = readline
        readline.set_auto_history(False)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Nobody else's business: others could read along in a shared home.
            os.close(os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
            readline.read_history_file(self._path)
            self._keeps = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._readline is not None and self._keeps:
            with contextlib.suppress(OSError):
                if len(self._path.read_bytes().splitlines()) > LINES:
                    self._readline.set_history_length(LINES)
                    part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                    self._readline.write_history_file(part)
                    part.replace(self._path)

    def ask(self) -> str | None:
        """The next text, None at the end of the input; a text of several lines where the user asks for it."""
        try:
            line = self._line("> ")
            if line.lstrip().startswith('"""'):
                return self._quoted(line.lstrip()[3:])
            lines = []
            while line.endswith("\\"):
                lines.append(line[:-1])
                line = self._line(". ")
            return "\n".join([*lines, line])
        except EOFError:
            return None

    def _quoted(self, line: str) -> str:
        lines = []
        while not line.rstrip().endswith('"""'):
            lines.append(line)
            line = self._line(". ")
        return "\n".join([*lines, line.rstrip()[:-3]])

    def _line(self, prompt: str) -> str:
        line = input(prompt)
        readline = self._readline
        if readline is not None and line.strip() and line != self._previous():
            # A locale may lack its characters: then the line is answered, but not remembered.
            with contextlib.suppress(OSError, UnicodeError):
                readline.add_history(line)
                if self._keeps:
                    readline.append_history_file(1, self._path)
        return line.encode(sys.stdin.encoding or "utf-8", "surrogateescape").decode("utf-8", "replace")

    def _previous(self) -> str | None:
        assert self._readline is not None
        n = self._readline.get_current_history_length()
        return self._readline.get_history_item(n) if n else None
