"""Ctrl-C between steps, never inside one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

_MAIN = threading.main_thread()


class interrupts_after:  # noqa: N801 - reads as a statement: with interrupts_after() as interrupted
    """Hold back KeyboardInterrupt until the block ends; calling what it yields tells whether one is due.

    An exception that strikes in the middle of a step would leave the cache half updated. Works in the main
    thread with Python's own handler in place; any other handler is left alone.
    """

    __slots__ = ("_due", "_previous")

    def __enter__(self) -> interrupts_after:
        self._due = False
        self._previous = None
        if (
            threading.current_thread() is _MAIN
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._previous = signal.default_int_handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._due = True

    def __call__(self) -> bool:
        """Whether an interrupt waits for the end of the block."""
        return self._due

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if self._due:
                raise KeyboardInterrupt
