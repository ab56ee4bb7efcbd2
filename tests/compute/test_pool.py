"""Threads that run programs: all of them at every step, none of them when there is nothing to do."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.compute.harness import Machine, place

from chabok.compute import pool as pool_module
from chabok.compute.emit import I64, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks
from chabok.compute.memory import aligned
from chabok.compute.pool import Pool, usable_cores
from chabok.compute.program import Program

Longs = NDArray[np.int64]


@dataclass(frozen=True)
class Relay:
    """Each thread adds up what all threads wrote in the step before and writes the sum, plus its number, to
    its own cell: a thread that runs ahead or behind spoils everything after.

    before, after: int64[threads, 8].
    """

    fields = ("before", "after")
    symbol = "relay"

    def emit(self, module: Module, isa: ISA) -> None:
        f, ops = begin(module, self.symbol, self.fields)
        _, thread, threads = f.args
        total = f.variable(thread)
        with f.loop(0, threads) as i:
            total.set((total.get() + ops.ptr("before").at(i, 64).load(I64)) & ((1 << 40) - 1))
        ops.ptr("after").at(thread, 64).store(total.get())


@dataclass(frozen=True)
class Tally:
    """Marks each of ``n`` items as done once, and each thread as having been here."""

    fields = ("n", "size", "items", "visits", "counter")
    symbol = "tally"

    def emit(self, module: Module, isa: ISA) -> None:
        f, ops = begin(module, self.symbol, self.fields)
        ops.ptr("visits").at(f.args[1], 64).fetch_add(1)
        with (
            chunks(f, ops.ptr("counter"), ops.int("n"), ops.int("size")) as (start, stop),
            f.loop(start, stop) as i,
        ):
            ops.ptr("items").at(i, 8).fetch_add(1)


@dataclass(frozen=True)
class Spin:
    """Counts to ``n`` in every thread."""

    fields = ("n", "out")
    symbol = "spin"

    def emit(self, module: Module, isa: ISA) -> None:
        f, ops = begin(module, self.symbol, self.fields)
        with f.loop(0, ops.int("n")):
            ops.ptr("out").at(f.args[1], 64).fetch_add(1)


def relay(machine: Machine, threads: int, steps: int) -> tuple[Program, Longs]:
    """A program, and the cells its last step writes; it may be run again with the same result."""
    origin, *cells = (place(np.zeros((threads, 8), np.int64)) for _ in range(3))
    origin[:, 0] = np.arange(threads) + 1
    program = Program()
    for i in range(steps):
        program.step(Relay(), before=cells[i % 2] if i else origin, after=cells[1 - i % 2])
    program.seal(machine.library)
    return program, cells[steps % 2]


def relayed(threads: int, steps: int) -> list[int]:
    values = [i + 1 for i in range(threads)]
    for _ in range(steps):
        total = sum(values)
        values = [(i + total) & ((1 << 40) - 1) for i in range(threads)]
    return values


def tally(machine: Machine, threads: int, n: int, size: int) -> tuple[Program, Longs, Longs]:
    items, visits = place(np.zeros(max(n, 1), np.int64)), place(np.zeros((threads, 8), np.int64))
    program = Program()
    program.step(Tally(), n=n, size=size, items=items, visits=visits)
    program.seal(machine.library)
    return program, items[:n], visits[:, 0]


@pytest.fixture
def pools(best: Machine) -> Iterator[list[Pool]]:
    opened: list[Pool] = []
    yield opened
    for one in opened:
        one.close()


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_threads_meet_after_every_step(threads: int, best: Machine) -> None:
    program, cells = relay(best, threads, 300)
    best.pool(threads).run(program)
    assert cells[:, 0].tolist() == relayed(threads, 300)


def test_barriers_hold_with_more_threads_than_cores(best: Machine, pools: list[Pool]) -> None:
    threads = 2 * (os.cpu_count() or 1) + 3
    pool = Pool(best.library, threads)
    pools.append(pool)
    for steps in (1, 2, 500, 101):
        program, cells = relay(best, threads, steps)
        pool.run(program)
        assert cells[:, 0].tolist() == relayed(threads, steps)


@pytest.mark.wide
@pytest.mark.parametrize("threads", [2, 5, 16])
def test_barriers_hold_for_very_many_steps(threads: int, best: Machine, pools: list[Pool]) -> None:
    pool = Pool(best.library, threads)
    pools.append(pool)
    for _ in range(20):
        program, cells = relay(best, threads, 2000)
        pool.run(program)
        assert cells[:, 0].tolist() == relayed(threads, 2000)


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(("n", "size"), [(0, 1), (1, 1), (7, 3), (1000, 1), (1000, 7), (5, 100)])
def test_every_item_is_taken_once_and_every_thread_comes_by(
    n: int, size: int, threads: int, best: Machine
) -> None:
    program, items, visits = tally(best, threads, n, size)
    for times in (1, 2, 3):
        best.pool(threads).run(program)
        assert (items == times).all()
        assert (visits == times).all()


def test_one_pool_runs_many_programs_in_turn(best: Machine) -> None:
    programs = [relay(best, 3, steps) for steps in (1, 7, 20)]
    for _ in range(30):
        for (program, cells), steps in zip(programs, (1, 7, 20)):
            best.pool(3).run(program)
            assert cells[:, 0].tolist() == relayed(3, steps)


def test_runs_from_several_threads_wait_for_each_other(best: Machine) -> None:
    prepared = [relay(best, 3, 51) for _ in range(6)]

    def work(program: Program) -> None:
        for _ in range(40):
            best.pool(3).run(program)

    threads = [threading.Thread(target=work, args=(program,)) for program, _ in prepared]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, cells in prepared:
        assert cells[:, 0].tolist() == relayed(3, 51)


def test_a_pool_that_slept_wakes_again(best: Machine) -> None:
    program, items, _ = tally(best, 3, 100, 1)
    for times, pause in enumerate((0.0, 0.001, 0.05, 0.003, 0.02), 1):
        time.sleep(pause)
        best.pool(3).run(program)
        assert (items == times).all()


def test_an_idle_pool_uses_no_processor_time(best: Machine, pools: list[Pool]) -> None:
    pool = Pool(best.library, 4)
    pools.append(pool)
    pool.run(tally(best, 4, 100, 1)[0])
    # On a crowded machine the workers take a while to lose patience.
    deadline, used = time.monotonic() + 30, 1.0
    while used > 0.005 and time.monotonic() < deadline:
        before = time.process_time()
        time.sleep(0.5)
        used = time.process_time() - before
    assert used <= 0.005


def workers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("chabok-worker")}


def test_closing_ends_the_threads_and_may_be_repeated(best: Machine) -> None:
    others = workers()
    for pause in (0.0, 0.05):
        pool = Pool(best.library, 3)
        program = tally(best, 3, 10, 1)[0]
        pool.run(program)
        assert len(workers() - others) == 2
        time.sleep(pause)
        pool.close()
        assert workers() == others
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            pool.run(program)


def test_a_pool_never_used_has_no_threads_and_closes(best: Machine) -> None:
    others = workers()
    pool = Pool(best.library, 5)
    assert workers() == others
    pool.close()


def test_a_forgotten_pool_is_collected_and_its_threads_end(best: Machine) -> None:
    others = workers()
    pool = Pool(best.library, 3)
    pool.run(tally(best, 3, 10, 1)[0])
    mine = workers() - others
    assert len(mine) == 2
    del pool
    gc.collect()
    for worker in mine:
        worker.join(5)
    assert workers() == others


IN_A_PROCESS = """
import gc, threading, time
import numpy as np
from chabok.compute import isa
from chabok.compute.library import Library
from chabok.compute.pool import Pool
from chabok.compute.program import Program
from chabok.compute.kernels.rows import Gather

def prepare(library):
    program = Program()
    x, out = np.ones((4, 16), np.float32), np.zeros((4, 16), np.float32)
    rows, index = np.array([4]), np.arange(4)
    program.step(Gather(), rows=rows, index=index, x=x, x_stride=64, k=16, out=out, out_stride=64)
    program.seal(library)
    return program
"""
FORGET = """
for i in range(8):
    library = Library(isa.choose())
    pool, program = Pool(library, 3), prepare(library)
    pool.run(program)
    time.sleep(0.05 * (i % 2))
    del library, pool, program
    gc.collect()
    time.sleep(0.05)
"""
DOZE = """
class Slow(list):
    def append(self, item):
        dozing.set()
        time.sleep(1)
        super().append(item)

dozing = threading.Event()
library = Library(isa.choose())
pool, program = Pool(library, 2), prepare(library)
pool._hired().asleep = Slow()
pool.run(program)
dozing.wait()
pool.run(program)
pool.close()
"""


def run_alone(code: str) -> int:
    """The exit code of a process that runs this; a hang is one too."""
    command = [sys.executable, "-c", IN_A_PROCESS + code]
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode
    except subprocess.TimeoutExpired:
        return -1


def test_a_worker_that_falls_asleep_does_not_miss_a_program() -> None:
    assert run_alone(DOZE) == 0


def test_a_pool_forgotten_together_with_its_library_ends_in_peace() -> None:
    assert run_alone(FORGET) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pool_works_on_in_a_forked_process_and_in_its_parent(best: Machine, pools: list[Pool]) -> None:
    pool = Pool(best.library, 3)
    pools.append(pool)
    program, items, _ = tally(best, 3, 50, 1)
    pool.run(program)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.run(program)
            pool.run(program)
            code = 0 if (items == 3).all() else 2
            pool.close()
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    pool.run(program)
    assert (items == 2).all()


def test_workers_and_finalizer_agree_on_their_lock(best: Machine, pools: list[Pool]) -> None:
    """A worker about to sleep must not miss the finalizer's call."""
    old_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        program = tally(best, 3, 10, 1)[0]
        for pause in np.random.default_rng(0).uniform(0, 0.003, 150):
            pool = Pool(best.library, 3)
            pool.run(program)
            time.sleep(pause)
            closing = threading.Thread(target=pool.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive()
    finally:
        sys.setswitchinterval(old_interval)


def test_a_profile_has_a_time_for_each_step(best: Machine) -> None:
    out = place(np.zeros((1, 8), np.int64))
    program = Program()
    for n in (1000, 1000, 400_000, 1000):
        program.step(Spin(), n=n, out=out)
    program.seal(best.library)
    seconds = best.pool(1).profile(program)
    assert seconds.shape == (4,)
    assert seconds.argmax() == 2
    assert (out[:, 0] == 403_000).all()


def test_memory_is_aligned_and_zero() -> None:
    for n in (1, 63, 64, 65, 100_000):
        memory = aligned(n)
        assert memory.size == n
        assert memory.ctypes.data % 64 == 0
        assert not memory.any()
    assert aligned(10, 4096).ctypes.data % 4096 == 0


def test_usable_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert usable_cores() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000, 1008)), raising=False)
    monkeypatch.setattr(pool_module, "cpu_quota", lambda: None)
    assert usable_cores() == 8
    monkeypatch.setattr(pool_module, "cpu_quota", lambda: 2.5)
    assert usable_cores() == 2


def test_a_system_that_gives_too_few_threads_is_an_error_and_leaves_none_behind(
    best: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def sparing(thread: threading.Thread) -> None:
        if threading.active_count() >= before + 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    pool = Pool(best.library, 5)
    program, _, _ = tally(best, 5, 10, 1)
    monkeypatch.setattr(threading.Thread, "start", sparing)
    with pytest.raises(pool_module.ThreadsError, match="2 more threads, but 4 are wanted"):
        pool.run(program)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
