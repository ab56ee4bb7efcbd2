"""Pages of the key-value cache: who holds which, and which hold a prefix that somebody may want again.

A page keeps the keys and values of 64 consecutive tokens. A full page is known by a hash of its tokens and of
all tokens before it, so that sequences with the same beginning share pages. Pages that nobody holds stay
known until their room is needed; the one unused for longest goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice

from chabok.models.batch import PAGE_TOKENS

Key = bytes

LEAST_PART = 4
"""Tokens of a page that are worth copying it for."""

MAX_PARTIAL = 32
"""Pages that are not full and kept nevertheless."""

MAX_COMPARED = 32
"""Pages after the same prefix that are looked at, the latest first."""


def root_key(fingerprint: str, salt: str = "") -> Key:
    """Where chains of page keys start: one root per model and salt."""
    return blake2b(f"{fingerprint}\0{salt}".encode(), digest_size=16).digest()


def next_key(key: Key, tokens: Sequence[int]) -> Key:
    """Key of the page of these tokens that follows the page of ``key``."""
    return blake2b(array("i", tokens).tobytes(), digest_size=16, key=key).digest()


class PagePool:
    """Reference-counted pages 0..n_pages-1, and the prefixes kept in them."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._free = list(
            range(n_pages - 1, -1, -1)
        )  # a stack: low pages first, so that few are ever touched
        self._holders = [0] * n_pages
        self._page_of: dict[Key, int] = {}
        self._key_of: list[Key | None] = [None] * n_pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # known, held by nobody, least recently used first
        self.ends = Ends(n_pages)
        self.uses = [0] * n_pages
        """How often each page was taken: its contents are the same as long as this is."""
        self.on_evict: Callable[[int, Key], None] | None = None
        """Is told before a known page is taken for something else."""

    @property
    def available(self) -> int:
        """Pages that can be taken now: the free ones, and those kept only for their prefix."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages known by a prefix, held or not."""
        return len(self._page_of)

    def take(self) -> int | None:
        """A page for its one holder, its contents stale; None if every page is held."""
        if self._free:
            page = self._free.pop()
        elif self._idle:
            page, _ = self._idle.popitem(last=False)
            key = self._key_of[page]
            if key is not None and self.on_evict is not None:
                self.on_evict(page, key)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        self.uses[page] += 1
        return page

    def find(self, key: Key) -> int | None:
        """The page kept under a key, without holding it."""
        return self._page_of.get(key)

    def is_idle(self, page: int) -> bool:
        """Whether a known page is held by nobody."""
        return page in self._idle

    def hold(self, page: int) -> None:
        """Add a holder to a known page."""
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def keep(self, page: int, key: Key, after: Key | None = None, tokens: Sequence[int] = ()) -> None:
        """Make a held, full page known by its key; the first page of a key stays the one that is found.

        after, tokens: key of the page before it, and its tokens, so that a part of it can be found, too.
        """
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key
            if after is not None:
                self.ends.add(page, after, tokens)

    def keep_end(self, page: int, after: Key, tokens: Sequence[int]) -> None:
        """Remember what a held page that is not full begins with, once nobody holds it."""
        if self._key_of[page] is None and self._holders[page] == 1:
            surplus = self.ends.add(page, after, tokens, partial=True)
            if surplus is not None:
                del self._idle[surplus]
                self._free.append(surplus)

    def release(self, page: int) -> None:
        """Take a holder away. Release a sequence's last page first: prefixes are evicted from their end."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._key_of[page] is None and page not in self.ends:
                self._free.append(page)
            else:
                self._idle[page] = None

    def idle_prefixes(self) -> list[tuple[int, Key]]:
        """Full pages that nobody holds, with their keys: the last used first, a prefix from its beginning."""
        return [(page, key) for page in reversed(self._idle) if (key := self._key_of[page]) is not None]

    def clear(self) -> None:
        """Forget every prefix that nobody holds."""
        while self._idle:
            page, _ = self._idle.popitem()
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        if key is not None:
            del self._page_of[key]
            self._key_of[page] = None
        self.ends.remove(page)

    def check_integrity(self, tables: Sequence[Sequence[int]] = ()) -> None:
        """Raise AssertionError unless every page is exactly one of free, idle, or held as often as ``tables``
        say.

        tables: the pages of each sequence that holds some.
        """
        held = [0] * self.n_pages
        for table in tables:
            for page in table:
                held[page] += 1
        if held != self._holders:
            wrong = [page for page in range(self.n_pages) if held[page] != self._holders[page]]
            raise AssertionError(f"pages {wrong[:8]} are counted as held by a wrong number of sequences")
        free, idle = set(self._free), set(self._idle)
        busy = {page for page, count in enumerate(held) if count}
        if len(free) != len(self._free) or free & idle or (free | idle) & busy:
            raise AssertionError("a page is in two places at once")
        if len(free) + len(idle) + len(busy) != self.n_pages:
            raise AssertionError("a page is lost")
        known = {page: key for key, page in self._page_of.items()}
        if known != {page: key for page, key in enumerate(self._key_of) if key is not None}:
            raise AssertionError("keys and pages disagree")
        partial = self.ends.check_integrity()
        if not idle <= set(known) | partial or free & (set(known) | partial):
            raise AssertionError("an idle page has no key, or a free page has one")
        if not partial <= idle or partial & set(known):
            raise AssertionError("a page that is not full is held, or has a key")


class Ends:
    """What pages begin with, by what comes before them, so that a sequence which has only a part of a page in
    common with another copies that part instead of computing it.

    Pages that are not full are kept for this purpose alone, a few of them.
    """

    def __init__(self, n_pages: int) -> None:
        self._most_partial = min(MAX_PARTIAL, n_pages // 8)
        self._pages_after: dict[Key, dict[int, tuple[int, ...]]] = {}
        self._after: dict[int, Key] = {}
        self._partial: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._after

    def add(self, page: int, after: Key, tokens: Sequence[int], *, partial: bool = False) -> int | None:
        """Note that ``page`` begins with ``tokens``; a partial page that has to be given up for it."""
        surplus = None
        if partial:
            if len(tokens) < LEAST_PART or self._most_partial == 0:
                return None
            # The same end again, or one that this one continues, is of no more use.
            for other, known in self._pages_after.get(after, {}).items():
                if other in self._partial and tokens[: len(known)] == list(known):
                    surplus = other
                    break
            else:
                if len(self._partial) >= self._most_partial:
                    surplus = next(iter(self._partial))
            if surplus is not None:
                self.remove(surplus)
            self._partial[page] = None
        self._pages_after.setdefault(after, {})[page] = tuple(tokens)
        self._after[page] = after
        return surplus

    def remove(self, page: int) -> None:
        """Forget a page."""
        after = self._after.pop(page, None)
        if after is not None:
            pages = self._pages_after[after]
            del pages[page]
            if not pages:
                del self._pages_after[after]
            self._partial.pop(page, None)

    def longest(self, after: Key, tokens: Sequence[int]) -> tuple[int, int]:
        """A page after ``after``, and how many of ``tokens`` it begins with; (-1, 0) if none is worth it."""
        best, most = -1, LEAST_PART - 1
        pages = self._pages_after.get(after)
        if pages:
            for page in islice(reversed(pages), MAX_COMPARED):
                n = 0
                for mine, its in zip(tokens, pages[page]):
                    if mine != its:
                        break
                    n += 1
                if n > most:
                    best, most = page, n
        return (best, most) if best >= 0 else (-1, 0)

    def check_integrity(self) -> set[int]:
        """Raise AssertionError if its tables disagree; the partial pages."""
        flat = {page: after for after, pages in self._pages_after.items() for page in pages}
        if flat != self._after or not all(self._pages_after.values()):
            raise AssertionError("pages and what they begin with disagree")
        if not set(self._partial) <= set(flat) or len(self._partial) > self._most_partial:
            raise AssertionError("there are partial pages that nobody knows, or too many")
        return set(self._partial)


def pages_for(n_tokens: int) -> int:
    """Pages that n tokens need."""
    return -(-n_tokens // PAGE_TOKENS)
