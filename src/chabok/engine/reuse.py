"""What a sequence takes over from earlier ones, and leaves to later ones.

Full pages are shared. The next ones may be on disk, and are then filled while the sequence waits, which holds
up nobody else. Of the page after those, the part that it has in common with another one is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List

from chabok.engine.kv import Key, PagePool
from chabok.engine.pagewriter import Kept
from chabok.engine.prefixes import Prefixes
from chabok.engine.sequence import Sequence
from chabok.models.batch import PAGE_TOKENS


class Reuse:
    """Fills the first pages of sequences from what is known.

    copy_page: copies the contents of a page (from, to). prefixes: the pages on disk, if they are kept.
    """

    def __init__(
        self,
        pool: PagePool,
        copy_page: Callable[[int, int], None] | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.prefixes = prefixes
        self._pool = pool
        self._copy_page = copy_page

    def begin(self, sequence: Sequence, found: list[int]) -> None:
        """A sequence has its pages, the first of which were ``found`` in memory: fill others, as far as they
        are known. ``sequence.load`` says whether it has to wait for that."""
        sequence.n_kept = len(found)
        sequence.computed = len(found) * PAGE_TOKENS
        keys: list[Key] = []
        if self.prefixes is not None:
            if found:
                self.prefixes.reused(self._kept(sequence, found))
            following = range(len(found), sequence.reusable_pages)
            keys = self.prefixes.on_disk(map(sequence.key, following), PAGE_TOKENS)
        if keys and self.prefixes is not None:
            sequence.load = self.prefixes.load(keys, sequence.page_table()[len(found) :][: len(keys)])
        else:
            self._copy_part(sequence)
        if sequence.timeline.started is None:
            sequence.cached, sequence.cached_disk = sequence.computed, 0

    def collect(self, active: List[Sequence]) -> bool:
        """Hand pages that came from disk to the sequences that wait for them; whether there were any."""
        if self.prefixes is None or not self.prefixes.arrived:
            return False
        loads = self.prefixes.collect()
        for sequence in active:
            load = sequence.load
            if load is None or load not in loads:
                continue
            loads.remove(load)
            sequence.load = None
            n_good = load.n_good
            sequence.computed += n_good * PAGE_TOKENS
            self.keep_full(sequence)
            if n_good == len(load.keys):
                self._copy_part(sequence)
            if sequence.timeline.started is None:
                sequence.cached, sequence.cached_disk = sequence.computed, n_good * PAGE_TOKENS
        for load in loads:  # of sequences that ended meanwhile
            for page in reversed(load.pages):
                self._pool.release(page)
        return True

    def _copy_part(self, sequence: Sequence) -> None:
        """Copy what the first page that is to be computed has in common with one that is there."""
        page, start = sequence.n_kept, sequence.computed
        end = min(sequence.reusable_tokens, start + PAGE_TOKENS)
        if self._copy_page is None or end <= start:
            return
        source, n = self._pool.ends.longest(sequence.key_before(page), sequence.tokens[start:end])
        if n:
            self._copy_page(source, int(sequence.segment.pages[page]))
            sequence.computed += n

    def keep_full(self, sequence: Sequence) -> None:
        """Let others find the pages that are full now."""
        while (sequence.n_kept + 1) * PAGE_TOKENS <= sequence.computed:
            page, at = sequence.n_kept, sequence.n_kept * PAGE_TOKENS
            tokens = sequence.tokens[at : at + PAGE_TOKENS]
            number = int(sequence.segment.pages[page])
            self._pool.keep(number, sequence.key(page), sequence.key_before(page), tokens)
            sequence.n_kept += 1

    def leave(self, sequence: Sequence) -> None:
        """Take all pages of a sequence back; what is in them stays known."""
        pool, pages, n_kept = self._pool, sequence.page_table(), sequence.n_kept
        if sequence.load is not None:
            # They are still being filled; they come back when that has ended.
            sequence.load.wanted = False
            pages = [page for page in pages if page not in sequence.load.pages]
            sequence.load = None
        elif n_kept * PAGE_TOKENS < sequence.computed:
            part = sequence.tokens[n_kept * PAGE_TOKENS : sequence.computed]
            pool.keep_end(pages[n_kept], sequence.key_before(n_kept), part)
        if self.prefixes is not None and n_kept:
            self.prefixes.left(self._kept(sequence, pages[:n_kept]))
        for page in reversed(pages):
            pool.release(page)
        sequence.n_pages = sequence.n_kept = sequence.computed = 0

    def _kept(self, sequence: Sequence, pages: list[int]) -> list[Kept]:
        uses = self._pool.uses
        return [Kept(sequence.key(i), page, uses[page], i) for i, page in enumerate(pages)]

    def check_integrity(self, active: List[Sequence]) -> list[List[int]]:
        """Raise AssertionError if sequences and loads disagree; the pages of loads that no sequence has."""
        loads = [] if self.prefixes is None else self.prefixes.loading
        for sequence in active:
            load = sequence.load
            if load is not None and (load not in loads or not load.wanted):
                raise AssertionError("a sequence waits for pages that nobody reads")
            if load is not None and not set(load.pages) <= set(sequence.page_table()):
                raise AssertionError("pages are read for a sequence that does not have them")
        return [load.pages for load in loads if not load.wanted]
