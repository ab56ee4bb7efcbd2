"""Pages of the key-value cache: who holds which, and which hold a prefix that somebody may want again.

A page keeps the keys and values of 64 consecutive tokens. A full page is known by a hash of its tokens and of
all tokens before it, so that sequences with the same beginning share pages. Pages that nobody holds stay
known until their room is needed; the one unused for longest goes first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from chabok.models.batch import PAGE_TOKENS

Key = bytes


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
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
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

    def keep(self, page: int, key: Key) -> None:
        """Make a held, full page known by its key; the first page of a key stays the one that is found."""
        if key not in self._page_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def release(self, page: int) -> None:
        """Take a holder away. Release a sequence's last page first: prefixes are evicted from their end."""
        self._holders[page] -= 1
        if self._holders[page] == 0:
            if self._key_of[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def clear(self) -> None:
        """Forget every prefix that nobody holds."""
        while self._idle:
            page, _ = self._idle.popitem()
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        assert key is not None
        del self._page_of[key]
        self._key_of[page] = None

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
        if not idle <= set(known) or free & set(known):
            raise AssertionError("an idle page has no key, or a free page has one")


def pages_for(n_tokens: int) -> int:
    """Pages that n tokens need."""
    return -(-n_tokens // PAGE_TOKENS)
