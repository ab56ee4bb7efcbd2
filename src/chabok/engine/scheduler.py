"""Which rows of which sequences the next step computes.

Every generating sequence's next token comes first; then prompts, in order of priority and arrival, as far as
rows and the wall-clock budget go. A sequence that finds no page takes those of the last in that order, which
waits and is recomputed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from heapq import merge

from chabok.engine.kv import PagePool, pages_for
from chabok.engine.sequence import Sequence
from chabok.models.batch import PAGE_TOKENS, Batch

LEAST_CHUNK = 16
"""Prompt rows a step takes even when the budget is used up, so that prompts always advance."""


def _order(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.order


class Pace:
    """How many prompt rows fit beside generating ones into the wall-clock budget, learned from the steps so
    far.

    A step's cost is neither proportional to its rows nor the same for long; so the number follows what the
    last step took, by at most half of itself at a time, and a single slow step is soon forgotten.
    """

    def __init__(self, budget_s: float, max_rows: int) -> None:
        self.budget_s = budget_s
        self._max_rows = max_rows
        self._rows = 4.0 * LEAST_CHUNK
        self._tried = False

    @property
    def rows(self) -> int:
        """Prompt rows that the next step may take."""
        return int(self._rows)

    def observe(self, n_decode: int, n_prompt: int, seconds: float) -> None:
        """Learn from a step of so many generating and prompt rows."""
        if n_prompt == 0:
            return
        ratio = min(max(self.budget_s / seconds, 0.5), 1.5)
        if n_decode == 0:
            if not self._tried:
                # Prompts alone are cheaper: begin with half of what would fit.
                self._rows = 0.5 * n_prompt * self.budget_s / seconds
        elif ratio < 1:
            self._rows = n_prompt * ratio
        elif n_prompt >= self._rows / 2:
            self._rows = max(self._rows, n_prompt * ratio)
        self._tried = self._tried or n_decode > 0
        self._rows = min(max(self._rows, LEAST_CHUNK), self._max_rows)


class Scheduler:
    """Holds the sequences that wait and those that have pages.

    max_rows: most rows of a step; max_active: most sequences with pages; budget_s: how long a step may take
    while some sequence is generating.
    """

    def __init__(self, pool: PagePool, *, max_rows: int, max_active: int, budget_s: float) -> None:
        self.pool = pool
        self.pace = Pace(budget_s, max_rows)
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.planned: list[Sequence] = []
        self.n_decode = 0
        self.n_prompt = 0
        self.preemptions = 0
        self._max_rows = max_rows
        self.max_active = min(max_active, max_rows)

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(self.waiting, sequence, key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and take its pages back."""
        if sequence in self.active:
            self.active.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)

    def plan(self) -> Batch:
        """Choose the rows of the next step; ``planned`` holds their sequences, in the same order."""
        batch: Batch = []
        self.planned = planned = []
        prompts = False
        for sequence in tuple(self.active):
            if sequence.n_pages == 0:
                continue  # pre-empted by one before it
            if len(sequence.tokens) - sequence.computed > 1:
                prompts = True
            elif self._make_room(sequence):
                batch.append(sequence.place(1))
                planned.append(sequence)
        self.n_decode = len(batch)
        self.n_prompt = 0
        if prompts or self.waiting:
            self._plan_prompts(batch)
        return batch

    def _make_room(self, sequence: Sequence) -> bool:
        """Give a generating sequence the page its next token needs; False if it had to yield its own."""
        if sequence.computed < sequence.n_pages * PAGE_TOKENS:
            return True
        while True:
            page = self.pool.take()
            if page is not None:
                sequence.add_page(page)
                return True
            # `active` is in order and is walked in order, so the last is not in the batch yet.
            last = self.active[-1]
            self._preempt(last)
            if last is sequence:
                return False

    def _preempt(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._release(sequence)
        sequence.timeline.preemptions += 1
        self.preemptions += 1
        self.add(sequence)

    def _plan_prompts(self, batch: Batch) -> None:
        rows = self._max_rows - len(batch)
        if self.n_decode:
            rows = min(rows, self.pace.rows)
        full = False
        for sequence in self._prompts():
            if rows <= 0:
                break
            if sequence.n_pages == 0 and (full or not self._admit(sequence)):
                full = True  # nobody overtakes it, but those with pages go on
                continue
            n = min(rows, sequence.pending)
            rows -= n
            batch.append(sequence.place(n))
            self.planned.append(sequence)
            self.n_prompt += n

    def _prompts(self) -> Iterator[Sequence]:
        """Sequences with prompt rows left, in order; those that wait for another's pages left out."""
        reading = [sequence for sequence in self.active if sequence.pending > 1]
        coming = {key for sequence in reading for key in self._keys_to_come(sequence)}
        for sequence in merge(reading, tuple(self.waiting), key=_order):
            if sequence.n_pages == 0:
                # A prefix that another sequence is computing right now is worth waiting for: then it is
                # shared.
                if coming and self._next_key_in(sequence, coming):
                    continue
                coming.update(self._keys_to_come(sequence))
            yield sequence

    @staticmethod
    def _keys_to_come(sequence: Sequence) -> Iterable[bytes]:
        return (sequence.key(page) for page in range(sequence.n_kept, sequence.reusable_pages))

    def _next_key_in(self, sequence: Sequence, coming: set[bytes]) -> bool:
        for page in range(sequence.reusable_pages):
            key = sequence.key(page)
            if self.pool.find(key) is None:
                return key in coming
        return False

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the cached pages of its beginning and new ones for the rest; False if there
        is no room."""
        if len(self.active) >= self.max_active:
            return False
        pool = self.pool
        found: list[int] = []
        for i in range(sequence.reusable_pages):
            page = pool.find(sequence.key(i))
            if page is None:
                break
            found.append(page)
        new = pages_for(len(sequence.tokens)) - len(found)
        # Leave those that generate a page each, or they would soon take these back.
        spare = pool.available - sum(pool.is_idle(page) for page in found)
        if new + (len(self.active) if self.active else 0) > spare:
            return False
        for page in found:
            pool.hold(page)
            sequence.add_page(page)
        for _ in range(new):
            taken = pool.take()
            assert taken is not None
            sequence.add_page(taken)
        sequence.n_kept = len(found)
        sequence.computed = len(found) * PAGE_TOKENS
        if sequence.timeline.started is None:
            sequence.cached = sequence.computed
        self.waiting.remove(sequence)
        insort(self.active, sequence, key=_order)
        return True

    def advance(self, sequence: Sequence) -> None:
        """Its planned rows are computed: let others find the pages that are full now."""
        computed = sequence.computed = sequence.computed + sequence.chunk
        while (sequence.n_kept + 1) * PAGE_TOKENS <= computed:
            page = sequence.n_kept
            self.pool.keep(int(sequence.segment.pages[page]), sequence.key(page))
            sequence.n_kept += 1

    def _release(self, sequence: Sequence) -> None:
        for page in reversed(sequence.page_table()):
            self.pool.release(page)
        sequence.n_pages = sequence.n_kept = sequence.computed = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if pages and sequences disagree."""
        self.pool.check_integrity([sequence.page_table() for sequence in self.active])
        assert all(sequence.n_pages == 0 for sequence in self.waiting), "a waiting sequence holds pages"
        for sequence in self.active:
            assert sequence.computed <= sequence.n_pages * PAGE_TOKENS, (
                "a sequence computed more than its pages hold"
            )
