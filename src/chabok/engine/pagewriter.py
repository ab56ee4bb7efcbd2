"""The thread that writes pages of the prefix cache to disk, behind the engine's back."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic, perf_counter, time_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chabok.engine.kv import Key
from chabok.engine.pagefiles import PageFiles

QUEUED = 4096
"""Pages, or lists of them, that may wait to be written; more are dropped."""

LATER = 16384
"""Pages that may wait until there is nothing else to do; the oldest are forgotten."""

COPIED_BYTES = 16 * 2**20
"""Of pages whose memory was taken before they were written, as much may wait to be written."""

BURST_BYTES = 2e9
BYTES_PER_S = 2e6
"""Disks wear: on average this much is written at most, 170 GB in a day, and BURST_BYTES at once. Pages that
were used only once leave half of the burst to those that were used again."""

PAUSE_S = 60.0
"""How long nothing is written after the disk refused."""

TOUCH_S = 600.0
"""How often a page that is used all the time is noted as used."""

LOOK_S = 1.0
"""How often to look for pages that other processes wrote."""

POLL_S = 0.05
"""How often to see whether a busy engine has nothing to do yet."""

SOON_S = 1.0
"""How long pages that were used again wait for a moment when the engine has nothing to do."""

PACE_S = 0.02
"""Time between two pages that are written while the engine is busy: it needs the cores."""

log = logging.getLogger(__name__)


class Kept(NamedTuple):
    """A full page: its key, where it is, ``PagePool.uses`` of it then, and its place in a sequence."""

    key: Key
    page: int
    use: int
    depth: int
    data: NDArray[np.uint8] | None = None
    """Its bytes, where the page itself was taken for something else."""


class Allowance:
    """How many bytes may still be written: a bucket that fills at a steady rate."""

    def __init__(self, burst: float = BURST_BYTES, per_s: float = BYTES_PER_S) -> None:
        self._burst, self._per_s = burst, per_s
        self._left, self._at = burst, monotonic()

    def take(self, n_bytes: int, *, important: bool) -> bool:
        """Whether so much may be written now; if it is not important, half of the burst is left alone."""
        now = monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left - n_bytes < (0 if important else self._burst / 2):
            return False
        self._left -= n_bytes
        return True


class Writer:
    """Writes pages to their files. ``put`` and ``look`` never wait; ``run`` is for a thread of its own."""

    def __init__(
        self,
        files: PageFiles,
        copy: Callable[[Kept, NDArray[np.uint8]], bool],
        idle: Callable[[], bool],
        *,
        allowance: Allowance | None = None,
    ) -> None:
        """copy: fills an array with the bytes of a page; False if the page holds something else by now.
        idle: whether the engine has nothing to do."""
        self.dropped = 0
        """Pages that were not written, because there were too many, or the disk refused."""
        self.written = 0
        self._files, self._copy, self._idle = files, copy, idle
        self._allowance = allowance or Allowance()
        self._queue: SimpleQueue[tuple[list[Kept], bool] | None] = SimpleQueue()
        self._soon: deque[tuple[float, Kept]] = deque()
        self._later: deque[Kept] = deque(maxlen=LATER)
        self._buffer = np.empty(files.page_bytes, np.uint8)
        self._copies_put = self._copies_done = 0
        self._touched: dict[Key, float] = {}
        self._looked = monotonic()
        self._paused_until = 0.0
        self._warned: set[int | None] = set()
        self._stopping = False
        self._try(files.open)

    # For the engine's thread.

    def put(self, kept: list[Kept], *, urgent: bool) -> None:
        """Have pages written: soon, or when the engine has nothing to do."""
        kept = [each for each in kept if not self._done(each)]
        if not kept:
            return
        if self._queue.qsize() + len(self._soon) >= QUEUED:
            self.dropped += len(kept)
            return
        if kept[0].data is not None:
            self._copies_put += 1
        self._queue.put((kept, urgent))

    def _done(self, kept: Kept) -> bool:
        """Whether a page is on disk, and was noted as used lately."""
        at = self._touched.get(kept.key)
        return at is not None and monotonic() - at < TOUCH_S and self._files.has(kept.key)

    def has_room_for_copy(self) -> bool:
        """Whether the copy of a page may be put."""
        waiting = self._copies_put - self._copies_done
        return monotonic() >= self._paused_until and (
            waiting == 0 or (waiting + 1) * self._files.page_bytes <= COPIED_BYTES
        )

    def look(self) -> None:
        """See what other processes wrote, at times."""
        now = monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            self._queue.put(([], True))

    def stop(self) -> None:
        """Let ``run`` return after the page it is at."""
        self._stopping = True
        self._queue.put(None)

    # In a thread of its own.

    def run(self) -> None:
        """Write until stopped."""
        while not self._stopping:
            try:
                self._next()
            except Exception:  # whatever it was, the service is worth more than its cache
                log.exception("Writing the prefix cache failed; nothing more will be kept on disk.")
                self._paused_until = inf
                return

    def _next(self) -> None:
        """Take messages, or write one page if it is time for that."""
        idle = self._idle()
        wait: float | None = None
        if self._soon or self._later:
            due = bool(self._soon) and monotonic() - self._soon[0][0] >= SOON_S
            wait = 0.0 if idle else PACE_S if due else POLL_S
            if idle or due:
                self._write_one()
        try:
            message = self._queue.get(timeout=wait) if wait != 0 else self._queue.get_nowait()
        except Empty:
            return
        if message is None:
            return
        kept, urgent = message
        if not kept:
            self._try(self._files.look)
        elif urgent:
            now = monotonic()
            self._soon.extend((now, each) for each in kept)
        else:
            self._later.extend(kept)

    def _write_one(self) -> None:
        if self._soon:
            _, kept = self._soon.popleft()
            self._write(kept, important=kept.data is None)
        elif self._later:
            self._write(self._later.popleft(), important=False)

    def _write(self, kept: Kept, *, important: bool, bounded: bool = True) -> None:
        if kept.data is not None:
            self._copies_done += 1
        used_ns = time_ns() - kept.depth * 1000  # the end of a prefix goes before its beginning
        if self._files.has(kept.key):
            self._touch(kept.key, used_ns)
            return
        if monotonic() < self._paused_until:
            self.dropped += 1
            return
        data = kept.data
        if data is None:
            if not self._copy(kept, self._buffer):
                return
            data = self._buffer
        if bounded and not self._allowance.take(self._files.file_bytes, important=important):
            self.dropped += 1
            return
        page = data.data

        def write() -> None:
            if self._files.write(kept.key, page, used_ns):
                self.written += 1
                self._note(kept.key)
            else:
                self.dropped += 1

        self._try(write)

    def _touch(self, key: Key, used_ns: int) -> None:
        if monotonic() - self._touched.get(key, -TOUCH_S) >= TOUCH_S:
            self._note(key)
            self._files.touch(key, used_ns)

    def _note(self, key: Key) -> None:
        if len(self._touched) > LATER:
            self._touched.clear()
        self._touched[key] = monotonic()

    def _try(self, action: Callable[[], None]) -> None:
        """Do something with the disk; if it refuses, say so once and leave it alone for a while."""
        try:
            try:
                action()
            except FileNotFoundError:  # somebody removed the folders
                self._files.open()
                action()
        except OSError as error:
            self.dropped += 1
            self._paused_until = monotonic() + PAUSE_S
            known = error.errno in self._warned
            self._warned.add(error.errno)
            log.log(
                logging.INFO if known else logging.WARNING,
                "Prompts are not kept in %s: %s. What runs goes on; trying again in %.0f s.",
                self._files.root,
                error.strerror or error,
                PAUSE_S,
            )

    def finish(self, kept: list[Kept], until: float) -> None:
        """Write these pages and those that still wait, up to an instant of ``perf_counter``.

        For the caller's thread, when ``run`` has returned.
        """
        kept = [*(each for _, each in self._soon), *kept]
        while True:
            try:
                message = self._queue.get_nowait()
            except Empty:
                break
            kept = [*(message[0] if message else ()), *kept]
        left = len(kept)
        for each in kept:
            if perf_counter() >= until:
                break
            self._write(each, important=True, bounded=False)
            left -= 1
        if left:
            self.dropped += left
            log.info("The prefix cache was closed before %d pages could be written.", left)
