"""Steps: a batch goes into the model, its logits become tokens, tokens become text, and callers get them.

Whoever waits for tokens runs the steps, in its own thread: a single caller pays for no hand-over. If several
threads wait, one runs the steps for all. ``start()`` gives the engine a thread of its own that does so
always, for servers and async callers.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple, Protocol

from chabok.engine.delivery import Delivery
from chabok.engine.handle import Handle
from chabok.engine.interrupts import interrupts_after
from chabok.engine.kv import PagePool, pages_for, root_key
from chabok.engine.masks import Masks
from chabok.engine.pagefiles import PageFiles
from chabok.engine.prefixes import Prefixes
from chabok.engine.rate import Rate
from chabok.engine.request import Request, check
from chabok.engine.sampler import Sampler
from chabok.engine.scheduler import Scheduler
from chabok.engine.sequence import Sequence
from chabok.engine.stats import Stats
from chabok.engine.stops import Detokenizer, Text
from chabok.engine.timings import Timeline
from chabok.engine.turnstile import TURNS
from chabok.errors import BusyError, RequestError, ResourceError, StoppingError
from chabok.models.batch import PAGE_TOKENS, Batch, Model

LOADING_S = 0.002
"""How long a step waits for pages from disk when there is nothing else to do."""


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text."""

    def stream(self, *, visible: frozenset[int] = ...) -> Detokenizer:
        """A new detokenizer. visible: control tokens whose text is not left out."""


class Queue(NamedTuple):
    """Requests in an engine at an instant: how many have pages (running), how many wait, and their tokens."""

    running: int
    waiting: int
    waiting_tokens: int


class Engine:
    """Runs many requests at once on one model.

    context: most tokens of a sequence, prompt and answer. n_pages: size of the key-value cache, in pages of
    64 tokens.
    max_batch: most sequences that have pages at a time. budget_s: how long a step may take while something is
    being generated, which bounds how large a piece of a prompt it takes. prefix_files: where prefixes outlive
    the engine; None keeps them in memory only.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        context: int,
        n_pages: int,
        max_batch: int = 64,
        budget_s: float = 0.03,
        max_queue: int = 256,
        prefix_files: PageFiles | None = None,
    ) -> None:
        if context > n_pages * PAGE_TOKENS:
            raise ResourceError(
                f"a context of {context} tokens needs {pages_for(context)} cache pages, "
                f"but there are {n_pages}"
            )
        self.model = model
        self.context = context
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(tokenizer.eos_ids)
        model.new_cache(n_pages)
        pool = PagePool(n_pages)
        self.prefixes: Prefixes | None = None
        if prefix_files is not None:
            # The writer's thread must not keep an engine alive that nobody uses any more.
            one = weakref.ref(self)
            self.prefixes = Prefixes(
                prefix_files, model.page, pool, idle=lambda: (engine := one()) is None or not engine.has_work
            )
        self.scheduler = Scheduler(
            pool,
            max_rows=model.max_rows,
            max_active=max_batch,
            budget_s=budget_s,
            copy_page=self._copy_page,
            prefixes=self.prefixes,
        )
        self.stats = Stats(n_pages)
        self.max_queue = max_queue
        self._rate = Rate()
        self.delivery = Delivery(self.scheduler, self.stats, self._rate)
        self._stopping = False
        self._given_up: BaseException | None = None
        self._masks = Masks(model.vocab_size)
        self._inbox: deque[Sequence] = deque()
        self._cancelled: deque[Handle] = deque()
        self._n_submitted = 0
        self._driver = threading.Lock()  # held by the thread that runs steps
        self._news = threading.Condition()
        self._waiters = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._deadlines = False  # whether a sequence in here has one
        self._pid = os.getpid()
        _open_engines.add(self)
        if self.prefixes is not None:
            self.prefixes.start()

    # The caller's side, any thread.

    def submit(
        self, request: Request, wake: Callable[[], None] | None = None, *, bounded: bool = True
    ) -> Handle:
        """Queue a request.

        wake: see ``Handle.wake``. bounded: refuse it if the queue is full; a caller who waits for all its own
        requests anyway may do without.
        Raises RequestError if it cannot be served, BusyError if the queue is full, StoppingError while
        draining.
        """
        self._check_usable()
        if self._stopping:
            raise StoppingError("this model is being stopped and takes no more requests")
        check(request, self.model.vocab_size, self.context)
        if bounded:
            self._check_queue()
        params = request.params
        n_prompt = len(request.prompt)
        limit = self.context if params.max_tokens is None else min(self.context, n_prompt + params.max_tokens)
        end_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        handle = Handle(self, wake)
        with self._news:
            self._n_submitted += 1
            number = self.stats.submitted = self._n_submitted
        sequence = Sequence(
            request,
            handle,
            number=number,
            limit=limit,
            end_ids=end_ids,
            root=root_key(self.model.fingerprint, request.salt),
            sampler=Sampler(
                params,
                request.prompt,
                self.model.vocab_size,
                end_ids,
                self._eos_ids if params.ignore_eos else (),
            ),
            text=Text(self._detokenizer(request), params.stop),
            timeline=Timeline(request.arrived, request.tokenize_s),
            work=n_prompt + self._rate.expected(limit - n_prompt),
            matcher=None if request.constraint is None else request.constraint.matcher(),
        )
        handle.timings = sequence.timings
        self._inbox.append(sequence)
        if self._waiters:
            self._notify()
        return handle

    def _detokenizer(self, request: Request) -> Detokenizer:
        stream = self._tokenizer.stream
        return stream(visible=request.visible) if request.visible else stream()

    @property
    def queue(self) -> Queue:
        """What is in the engine now."""
        waiting = (*self.scheduler.waiting, *self._inbox)
        return Queue(len(self.scheduler.active), len(waiting), sum(sequence.pending for sequence in waiting))

    def expected_wait_s(self) -> float:
        """Seconds after which a request that came now would begin to be computed, by the speed measured so
        far; 0 if it would begin at once or nothing was measured yet."""
        scheduler, rate = self.scheduler, self._rate
        waiting = (*scheduler.waiting, *self._inbox)
        work = float(sum(sequence.pending for sequence in waiting))
        if len(scheduler.active) + len(waiting) >= scheduler.max_active:
            # Its turn comes when others have ended, answers included.
            work += sum(rate.expected(sequence.limit - len(sequence.tokens)) for sequence in waiting)
        return work * rate.row_s

    def _check_queue(self) -> None:
        scheduler = self.scheduler
        free = scheduler.max_active - len(scheduler.active)
        waiting = len(scheduler.waiting) + len(self._inbox)
        if waiting - free >= self.max_queue:
            with self._news:
                self.stats.rejected += 1
            # In half the time until all of them have begun, there is room for others who were told the same.
            retry_s = max(1.0, self.expected_wait_s() / 2)
            raise BusyError(
                f"{waiting} requests are waiting, and the queue holds {self.max_queue}; "
                f"try again in {retry_s:.0f} s",
                retry_s,
            )

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests and return when all have ended (True) or the time is up (False).

        Those that are left then fail with a StoppingError.
        """
        self._check_usable()
        self._stopping = True
        until = perf_counter() + timeout_s
        self.wait(lambda: not self.has_work or perf_counter() >= until, until)
        if not self.has_work:
            return True
        self._given_up = StoppingError(
            f"the model was stopped {timeout_s:g} s after it was asked to, before this request ended"
        )
        if self._waiters:
            self._notify()
        self.wait(lambda: not self.has_work)
        return False

    def _check_usable(self) -> None:
        if self._closed:
            raise RequestError("this model was closed; open it again to use it")
        if self._pid != os.getpid():
            raise RequestError(
                "this model was opened before the process forked, and its threads are not in this child; "
                "open it in the process that uses it"
            )

    def cancel(self, handle: Handle) -> None:
        """End a request at the next step."""
        self._cancelled.append(handle)
        if self._waiters:
            self._notify()

    def wait(self, ready: Callable[[], bool], until: float | None = None) -> None:
        """Return when ``ready()``, running steps meanwhile unless another thread does.

        until: instant of ``perf_counter`` at which ``ready()`` is asked again, whether there is news or not.
        """
        while not ready():
            self._check_usable()
            if self._driver.acquire(blocking=False):
                try:
                    with interrupts_after() as interrupted:
                        while not ready() and not interrupted() and not self._closed:
                            self.step()
                finally:
                    self._driver.release()
                    if self._waiters:
                        self._notify()  # one of those that wait takes over
            else:
                with self._news:
                    self._waiters += 1
                    try:
                        if not ready() and self._driver.locked():
                            self._news.wait(None if until is None else max(until - perf_counter(), 0))
                    finally:
                        self._waiters -= 1

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()

    # Life.

    def start(self) -> None:
        """Run steps in a thread of the engine's own from now on; it sleeps while there is nothing to do."""
        self._check_usable()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chabok-engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        with self._driver:
            while not self._closed:
                if self.has_work:
                    self.step()
                    continue
                with self._news:
                    self._waiters += 1
                    if not self.has_work and not self._closed:
                        self._news.wait()
                    self._waiters -= 1

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        scheduler = self.scheduler
        return bool(scheduler.active or scheduler.waiting or self._inbox or self._cancelled or self._loading)

    @property
    def _loading(self) -> bool:
        """Whether pages are on their way from disk."""
        return self.prefixes is not None and bool(self.prefixes.loading)

    def close(self) -> None:
        """End after the current step; requests that have not ended fail."""
        if self._closed:
            return
        self._closed = True
        if self._pid != os.getpid():
            return  # a forked child: threads and memory are the parent's
        self._notify()
        if self._thread is not None:
            self._thread.join()
        with self._driver:
            self._take_messages()
            error = RequestError("the model was closed before this request ended")
            for sequence in (*self.scheduler.active, *self.scheduler.waiting):
                self.delivery.fail(sequence, error)
            if self.prefixes is not None:
                self.prefixes.close()
            self.model.close()
        self._notify()
        TURNS.streaming.discard(id(self))
        _open_engines.discard(self)

    # One step, in the thread that holds the driver lock.

    def step(self) -> None:
        """Compute one batch and deliver its tokens."""
        scheduler = self.scheduler
        try:
            if self._inbox or self._cancelled:
                self._take_messages()
            if self._deadlines:
                self._expire()
            if self._given_up is not None:
                for sequence in (*scheduler.active, *scheduler.waiting):
                    self.delivery.fail(sequence, self._given_up)
            scheduler.others_stream = bool(TURNS.streaming - {id(self)})
            batch = scheduler.plan()
            if not batch and scheduler.waiting and not self._loading:
                raise RuntimeError("the scheduler found no room for a request in an empty cache")
        except Exception as error:
            # Who is to blame cannot be known; nobody must be left waiting.
            for sequence in (*scheduler.active, *scheduler.waiting):
                self.delivery.fail(sequence, error)
            batch = []
        if batch:
            self._compute(batch)
        elif self.prefixes is not None and self._loading:
            self.prefixes.wait(LOADING_S)
        self._look_around()
        if self._waiters:
            self._notify()

    def _compute(self, batch: Batch) -> None:
        scheduler, stats, delivery = self.scheduler, self.stats, self.delivery
        planned = scheduler.planned
        started = perf_counter()
        if scheduler.n_prompt or scheduler.collected:
            for sequence in planned:
                if sequence.timeline.started is None:
                    delivery.begin(sequence, started)
        delivery.worst_gap = 0.0
        try:
            with TURNS:
                started = perf_counter()  # the wait for other engines is not this step's cost
                logits = self.model.forward(batch)
            now = perf_counter()
            scheduler.pace.observe(scheduler.n_decode, scheduler.chunks, now - started)
            scheduler.shares.advance(scheduler.n_decode + scheduler.n_prompt)
            if self.prefixes is not None and scheduler.n_decode == 0 and scheduler.n_prompt >= PAGE_TOKENS:
                self.prefixes.rates.computed(now - started, scheduler.n_prompt)
            if any(sequence.matcher is not None for sequence in planned):
                self._masks.fill(planned)
                now = perf_counter()
            row = 0
            for sequence in planned:
                n_out = sequence.segment.outputs
                scheduler.advance(sequence)
                if n_out:
                    now = delivery.take(sequence, logits, row, now)
                row += n_out
        except BaseException as error:
            # The step is half done: whoever was in it has no valid state.
            for sequence in planned:
                if not sequence.handle.done:
                    self.delivery.fail(sequence, error)
            if not isinstance(error, Exception):
                raise
        finally:
            took = perf_counter() - started
            self._rate.step(scheduler.n_decode + scheduler.n_prompt, took)
            stats.steps += 1
            stats.step_s += took
            stats.batch.observe(len(planned))
            if delivery.worst_gap:
                stats.gap(started, delivery.worst_gap)

    def _look_around(self) -> None:
        """Note how full everything is, at the end of a step."""
        stats, scheduler, pool = self.stats, self.scheduler, self.scheduler.pool
        stats.running, stats.waiting = len(scheduler.active), len(scheduler.waiting)
        stats.pages_used, stats.pages_cached = pool.n_pages - pool.available, pool.cached
        stats.preemptions = scheduler.preemptions
        if any(sequence.timeline.first is not None for sequence in scheduler.active):
            TURNS.streaming.add(id(self))
        else:
            TURNS.streaming.discard(id(self))

    def _copy_page(self, source: int, to: int) -> None:
        self.model.page(to)[:] = self.model.page(source)

    def _take_messages(self) -> None:
        inbox, scheduler = self._inbox, self.scheduler
        while inbox:
            sequence = inbox.popleft()
            scheduler.add(sequence)
            self._deadlines = self._deadlines or sequence.request.deadline is not None
        while self._cancelled:
            handle = self._cancelled.popleft()
            for sequence in (*scheduler.active, *scheduler.waiting):
                if sequence.handle is handle:
                    sequence.text.finish()
                    self.delivery.finish(sequence, "cancelled")

    def _expire(self) -> None:
        now, self._deadlines = perf_counter(), False
        for sequence in (*self.scheduler.active, *self.scheduler.waiting):
            deadline = sequence.request.deadline
            if deadline is not None and deadline <= now:
                sequence.text.finish()
                self.delivery.finish(sequence, "deadline")
            else:
                self._deadlines = self._deadlines or deadline is not None


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Stop the threads before the interpreter takes their modules apart."""
    for engine in tuple(_open_engines):
        engine.close()
