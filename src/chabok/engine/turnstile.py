"""Engines of one process take turns by step: two that computed at once would fight for the same cores."""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import TracebackType


class Turnstile:
    """A lock that is handed over in the order in which it was asked for.

    ``streaming`` holds the engines that have running streams, so that the others know whom a long step would
    make wait.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Lock] = deque()
        self.streaming: set[int] = set()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        turn.acquire()  # released by the one whose turn ends, who leaves the turnstile taken

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._taken = False

    @property
    def contended(self) -> bool:
        """Whether somebody waits for a turn."""
        return bool(self._queue)


TURNS = Turnstile()
"""That of this process."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread of Python may keep others waiting. With the interpreter's own 5 ms, an engine whose step
has ended waits 5 ms for a busy event loop or tokenizer before it can begin the next one; with this, 0.7 ms,
for a few percent of the busy thread's speed."""


def take_quick_turns() -> None:
    """Let threads of this process hand over quickly; for servers, which run an event loop beside engines."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
