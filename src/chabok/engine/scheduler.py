"""Which rows of which sequences the next step computes.

Every generating sequence's next token comes first; then prompts, as far as rows and the wall-clock budget go.
The order is that of priorities, then of fair shares between clients, and of a client's requests by deadline
and arrival. A sequence that finds no page takes those of the last in that order, which waits and is
recomputed; so does one that waits for its turn, if it has a higher priority or its client fewer at work.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import merge

from chabok.engine.kv import PagePool, pages_for
from chabok.engine.pace import LEAST_CHUNK, Pace
from chabok.engine.prefixes import Prefixes
from chabok.engine.reuse import Reuse
from chabok.engine.sequence import Sequence
from chabok.engine.shares import Shares
from chabok.models.batch import PAGE_TOKENS, Batch

LOGPROB_ROWS = 64
"""Prompt rows of a step whose logits are looked at: they take rows x vocabulary x 4 bytes."""


def _order(sequence: Sequence) -> tuple[int, float, float, int]:
    return sequence.order


class Scheduler:
    """Holds the sequences that wait and those that have pages.

    max_rows: most rows of a step; max_active: most sequences with pages; budget_s: how long a step may take
    while some sequence is generating. copy_page: copies a page (from, to). prefixes: the pages on disk.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_rows: int,
        max_active: int,
        budget_s: float,
        copy_page: Callable[[int, int], None] | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.pool = pool
        self.reuse = Reuse(pool, copy_page, prefixes)
        self.collected = False
        """Whether pages came from disk for the step that was planned."""
        self.pace = Pace(budget_s, max_rows)
        self.shares = Shares()
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []
        self.planned: list[Sequence] = []
        self.n_decode = 0
        self.n_prompt = 0
        self.chunks: list[tuple[int, int]] = []
        """Where each piece of a prompt in the planned step begins, and its rows."""
        self.preemptions = 0
        self.others_stream = False
        """Whether streams of other engines wait for the planned step, too."""
        self._max_rows = max_rows
        self.max_active = min(max_active, max_rows)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        request = sequence.request
        sequence.set_due(self.shares.enter(request.client, sequence.work))
        mine = [
            one
            for one in self.waiting
            if one.request.client == request.client
            and one.order[0] == sequence.order[0]
            and one.timeline.started is None
        ]
        insort(self.waiting, sequence, key=_order)
        if mine and (mine[-1].order[2:] > sequence.order[2:]):
            # Its deadline is earlier than another's of its client: the turns are the client's to give.
            mine.append(sequence)
            turns = sorted(one.order[1] for one in mine)
            for one, due in zip(sorted(mine, key=lambda one: one.order[2:]), turns, strict=True):
                one.set_due(due)
            self.waiting.sort(key=_order)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that ended, wherever it is, and take its pages back."""
        if sequence in self.active:
            self.active.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return
        used = len(sequence.tokens) - sequence.cached if sequence.timeline.started is not None else 0
        self.shares.leave(sequence.request.client, sequence.work - used)
        self.reuse.leave(sequence)

    def plan(self) -> Batch:
        """Choose the rows of the next step; ``planned`` holds their sequences, in the same order."""
        batch: Batch = []
        self.planned = planned = []
        self.chunks = []
        dictated: list[tuple[int, int]] = []
        prompts = False
        self.collected = self.reuse.collect(self.active)
        if self.waiting:
            self._settle()
            if self.active and self.waiting[0].order < self.active[-1].order:
                self._yield_to_waiting()
        for sequence in tuple(self.active):
            if sequence.n_pages == 0:
                continue  # pre-empted by one before it
            n = len(sequence.tokens) - sequence.computed
            if n > 1:
                if sequence.reading:
                    prompts = True
                    continue
                n = 1 + self._dictated(sequence, n - 1, dictated)
            if self._make_room(sequence, n):
                batch.append(sequence.place(n))
                planned.append(sequence)
                if n > 1:
                    dictated.append((sequence.computed, n - 1))
        self.n_decode = len(batch)
        self.n_prompt = 0
        if prompts or self.waiting:
            self._plan_prompts(batch, dictated)
        self.chunks += dictated
        self.n_prompt += sum(n for _, n in dictated)
        return batch

    def _dictated(self, sequence: Sequence, n: int, others: list[tuple[int, int]]) -> int:
        """How many of a sequence's n tokens that a grammar dictated are computed beside its chosen one."""
        rows = self._max_rows - len(self.active) - sum(rows for _, rows in others)
        if len(self.active) > 1:
            # They wait for nobody, but nobody's stream shall wait for many of them.
            start, pace = sequence.computed, self.pace
            left = pace.time(len(self.active)) - sum(pace.cost(at, rows, True) for at, rows in others)
            rows = min(rows, max(pace.rows(start, left, True), LEAST_CHUNK))
        return min(n, max(rows, 0))

    def _settle(self) -> None:
        """Bring turns forward where earlier requests of a client took less work than expected."""
        off = self.shares.settle()
        if off:
            for sequence in (*self.waiting, *self.active):
                if owed := off.get(sequence.request.client):
                    sequence.set_due(sequence.order[1] - owed)
            self.waiting.sort(key=_order)
            self.active.sort(key=_order)

    def _yield_to_waiting(self) -> None:
        """Take pages from the end of the order for the first that waits, where it is to have them."""
        first = next((sequence for sequence in self._prompts() if sequence.n_pages == 0), None)
        if first is None or self._room_for(first)[0]:
            return
        at_work = Counter(sequence.request.client for sequence in self.active)
        mine = first.request.client
        victims: list[Sequence] = []
        for sequence in reversed(self.active):
            if sequence.order < first.order:
                break
            theirs = sequence.request.client
            # A client's only stream is never stopped for the sake of fairness.
            if sequence.order[0] > first.order[0] or at_work[theirs] > at_work[mine] + 1:
                at_work[theirs] -= 1
                victims.append(sequence)
        pages = self.pool.available + sum(sequence.n_pages for sequence in victims)
        if pages < pages_for(len(first.tokens)):
            return
        for victim in victims:
            self._preempt(victim)
            if self._room_for(first)[0]:
                break

    def _make_room(self, sequence: Sequence, n: int) -> bool:
        """Give a generating sequence the pages its next n tokens need; False if it had to yield its own."""
        while sequence.computed + n > sequence.n_pages * PAGE_TOKENS:
            page = self.pool.take()
            if page is not None:
                sequence.add_page(page)
                continue
            # `active` is in order and is walked in order, so the last is not in the batch yet.
            last = self.active[-1]
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self.reuse.leave(sequence)
        sequence.timeline.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_order)

    def _plan_prompts(self, batch: Batch, dictated: list[tuple[int, int]]) -> None:
        rows = self._max_rows - len(batch) - sum(n for _, n in dictated)
        pace, beside = self.pace, self.n_decode > 0
        left = pace.time(self.n_decode) - sum(pace.cost(start, n, beside) for start, n in dictated)
        if self.others_stream and not beside:
            left = min(left, pace.budget_s)
        full = False
        for sequence in self._prompts():
            if rows <= 0 or (self.chunks and left < pace.cost(sequence.computed, LEAST_CHUNK, beside)):
                break
            if sequence.n_pages == 0 and (full or not self._admit(sequence)):
                full = True  # nobody overtakes it, but those with pages go on
                continue
            if sequence.load is not None:
                continue
            start = sequence.computed
            n = min(max(pace.rows(start, left, beside), LEAST_CHUNK), rows, sequence.pending)
            if sequence.all_rows:
                n = min(n, LOGPROB_ROWS)
            rows -= n
            left -= pace.cost(start, n, beside)
            batch.append(sequence.place(n))
            self.planned.append(sequence)
            self.chunks.append((start, n))
            self.n_prompt += n

    def _prompts(self) -> Iterator[Sequence]:
        """Sequences with prompt rows left, in order; those that wait for another's pages left out."""
        reading = [sequence for sequence in self.active if sequence.reading]
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

    def _room_for(self, sequence: Sequence) -> tuple[bool, list[int]]:
        """Whether a waiting sequence could be given pages now, and those of its beginning that are cached."""
        if len(self.active) >= self.max_active:
            return False, []
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
        return new + len(self.active) <= spare, found

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the cached pages of its beginning and new ones for the rest; False if there
        is no room."""
        room, found = self._room_for(sequence)
        if not room:
            return False
        pool = self.pool
        for page in found:
            pool.hold(page)
            sequence.add_page(page)
        for _ in range(pages_for(len(sequence.tokens)) - len(found)):
            taken = pool.take()
            assert taken is not None
            sequence.add_page(taken)
        self.reuse.begin(sequence, found)
        self.waiting.remove(sequence)
        insort(self.active, sequence, key=_order)
        return True

    def advance(self, sequence: Sequence) -> None:
        """Its planned rows are computed: let others find the pages that are full now."""
        sequence.computed += sequence.chunk
        if (sequence.n_kept + 1) * PAGE_TOKENS <= sequence.computed:
            self.reuse.keep_full(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError if pages and sequences disagree."""
        tables = [sequence.page_table() for sequence in self.active]
        self.pool.check_integrity([*tables, *self.reuse.check_integrity(self.active)])
        assert all(sequence.n_pages == 0 for sequence in self.waiting), "a waiting sequence holds pages"
        for sequence in self.active:
            assert sequence.computed <= sequence.n_pages * PAGE_TOKENS, (
                "a sequence computed more than its pages hold"
            )
