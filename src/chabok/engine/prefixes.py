"""The prefix cache on disk, beside the one in memory: what goes there, when, and how it comes back.

A page that is used a second time is written soon after, so that it outlives even a kill; the others of a
sequence that ended are written while the engine has nothing to do, when their memory is taken for something
else, or at the end. One thread writes. It copies a page out of the cache without holding it, and sees
afterwards whether the page was taken meanwhile: the engine never waits for a disk.

A sequence whose next pages are on disk gets pages as any other, which other threads fill and check, while the
rest goes on. Only pages whose checksum is right are handed over.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from chabok.engine.kv import Key, PagePool
from chabok.engine.pagefiles import PageFiles
from chabok.engine.pagewriter import Kept, Writer

CLOSE_S = 5.0
"""How long the end may take."""

log = logging.getLogger(__name__)


class Load:
    """Pages on their way from disk.

    keys, pages: what is read, and into which pages. good: which of them were right. wanted: whether a
    sequence still waits for them; the pages are not to be used for anything else until it is collected.
    """

    __slots__ = ("began", "good", "keys", "left", "lock", "pages", "wanted")

    def __init__(self, keys: Sequence[Key], pages: Sequence[int]) -> None:
        self.keys, self.pages = keys, pages
        self.good = [False] * len(keys)
        self.left = len(keys)
        self.lock = threading.Lock()
        self.wanted = True
        self.began = perf_counter()

    @property
    def n_good(self) -> int:
        """Leading pages that are right: those after a gap are of no use."""
        return self.good.index(False) if False in self.good else len(self.good)


class Rates:
    """Whether reading a page is faster than computing it, as measured."""

    def __init__(self) -> None:
        self._read_s: float | None = None
        self._row_s: float | None = None
        self._refusals = 0

    def read(self, seconds: float, n_pages: int) -> None:
        """So many pages were read in that time."""
        self._read_s = _mean(self._read_s, seconds / n_pages)

    def computed(self, seconds: float, n_rows: int) -> None:
        """So many rows of prompts were computed in that time."""
        self._row_s = _mean(self._row_s, seconds / n_rows)

    def worth_reading(self, page_tokens: int) -> bool:
        """Unknown rates are worth a try, and so is every sixteenth time of those that seem not to be."""
        if self._read_s is None or self._row_s is None or self._read_s < self._row_s * page_tokens:
            return True
        self._refusals += 1
        return self._refusals % 16 == 0


def _mean(old: float | None, new: float) -> float:
    return new if old is None else 0.75 * old + 0.25 * new


class Prefixes:
    """The disk side of one engine's prefix cache.

    Its methods are for the thread that runs the engine's steps.
    """

    def __init__(
        self,
        files: PageFiles,
        page: Callable[[int], NDArray[np.uint8]],
        pool: PagePool,
        *,
        idle: Callable[[], bool] = lambda: True,
        readers: int | None = None,
    ) -> None:
        """page: the bytes of a page. idle: whether the engine has nothing to do."""
        self.files = files
        self.rates = Rates()
        self.loading: list[Load] = []
        self.failed = 0
        """Pages that were to be read and were not there any more, or not right."""
        self._page, self._pool = page, pool
        self._writer = Writer(files, self._copy, idle)
        self._reads: SimpleQueue[tuple[Load, int] | None] = SimpleQueue()
        self._arrived: deque[Load] = deque()
        self._arrival = threading.Event()
        self._n_readers = readers or min(4, os.cpu_count() or 1)
        self._readers: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._writer.run, name="chabok-prefixes", daemon=True)
        pool.on_evict = self._evicting

    def start(self) -> None:
        """Begin to write pages."""
        self._thread.start()

    @property
    def written(self) -> int:
        """Pages that were written."""
        return self._writer.written

    @property
    def dropped(self) -> int:
        """Pages that were to be written and were not: too many at once, or a disk that refused."""
        return self._writer.dropped

    # From disk.

    def on_disk(self, keys: Iterable[Key], page_tokens: int) -> list[Key]:
        """The leading ones of ``keys`` that are worth being read."""
        found = []
        for key in keys:
            if not self.files.has(key):
                self._writer.look()
                break
            found.append(key)
        return found if found and self.rates.worth_reading(page_tokens) else []

    def load(self, keys: Sequence[Key], pages: Sequence[int]) -> Load:
        """Begin to fill pages; see ``collect``."""
        while len(self._readers) < self._n_readers:
            thread = threading.Thread(target=self._read, name="chabok-prefix-reader", daemon=True)
            self._readers.append(thread)
            thread.start()
        load = Load(keys, pages)
        self.loading.append(load)
        for i in range(len(keys)):
            self._reads.put((load, i))
        return load

    def collect(self) -> list[Load]:
        """Loads that have come to an end, whether wanted or not."""
        self._arrival.clear()
        done = []
        while self._arrived:
            load = self._arrived.popleft()
            self.loading.remove(load)
            n_good = load.n_good
            if load.wanted:
                self.rates.read(perf_counter() - load.began, len(load.keys))
                self.failed += len(load.keys) - n_good
            done.append(load)
        return done

    @property
    def arrived(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._arrived)

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to collect, or the time is up."""
        self._arrival.wait(timeout_s)

    def _read(self) -> None:
        while (task := self._reads.get()) is not None:
            load, i = task
            if load.wanted:
                try:
                    load.good[i] = self.files.read(load.keys[i], self._page(load.pages[i]).data)
                except Exception:  # nobody would get the rest
                    log.exception("Reading a page of the prefix cache failed")
            with load.lock:
                load.left -= 1
                last = load.left == 0
            if last:
                self._arrived.append(load)
                self._arrival.set()

    # To disk.

    def reused(self, kept: list[Kept]) -> None:
        """These pages were used again: they are to outlive whatever happens."""
        self._writer.put(kept, urgent=True)

    def left(self, kept: list[Kept]) -> None:
        """A sequence that had these pages ended."""
        self._writer.put(kept, urgent=False)

    def _evicting(self, page: int, key: Key) -> None:
        if self.files.has(key):
            return
        if self._writer.has_room_for_copy():
            data = np.array(self._page(page))
            self._writer.put([Kept(key, page, -1, 0, data)], urgent=True)
        else:
            self._writer.dropped += 1

    def _copy(self, kept: Kept, buffer: NDArray[np.uint8]) -> bool:
        """Copy a page out of the cache, in the writer's thread; False if it holds something else by now."""
        if self._pool.uses[kept.page] != kept.use:
            return False
        np.copyto(buffer, self._page(kept.page))
        return self._pool.uses[kept.page] == kept.use

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is not on disk yet, as far as the time goes. Call it when no more steps run."""
        until = perf_counter() + timeout_s
        self._pool.on_evict = None
        for load in self.loading:
            load.wanted = False
        for _ in self._readers:
            self._reads.put(None)
        for thread in self._readers:
            thread.join(max(until - perf_counter(), 0))
        self._writer.stop()
        self._thread.join(max(until - perf_counter(), 0))
        if not self._thread.is_alive():
            uses = self._pool.uses
            rest = [
                Kept(key, page, uses[page], depth)
                for depth, (page, key) in enumerate(self._pool.idle_prefixes())
            ]
            self._writer.finish(rest, until)
