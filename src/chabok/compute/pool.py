"""The threads that run a program.

Workers live in native code while there is work: they wait for the next program by spinning, then yielding,
and return to Python to sleep on a lock when nothing has come for about a millisecond, so an idle pool uses no
CPU. Between the steps of a program the threads meet at a barrier, which spins first and yields later.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from chabok.compute.emit import I64, PTR, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import flagged
from chabok.compute.memory import aligned

if TYPE_CHECKING:
    from chabok.compute.library import Library
    from chabok.compute.program import Program

# The control block: 64-bit fields, those that threads contend for on cache lines of their own.
EPOCH, ARRIVED, GENERATION, PROGRAM, STEPS, THREADS, YIELD, STOP = 0, 64, 128, 192, 200, 208, 216, 256
CONTROL_BYTES = 320

STEP_BYTES = 64
"""A step, 64-bit fields: address of the kernel, address of its operands, whether all threads meet afterwards,
and what to fetch while waiting: where the first thread's begins, and how much further on the next one's."""

FETCH_BYTES = 6144
"""What a thread asks memory for before it waits: the beginning of the weights it will read next."""

_SPIN = 2_000
"""Pauses at a barrier before the core is given away, each time from then on: the others may need it."""

_PATIENCE = 30_000
"""Pauses without work before a worker goes to sleep, about a millisecond, with the core offered to others
some thirty times: on a busy machine each offer can take long."""


@dataclass(frozen=True)
class _Run:
    """Run the current program as one of its threads; ``timed``: the first one notes the time after
    each step."""

    timed: bool = False

    @property
    def symbol(self) -> str:
        return flagged("pool_run", timed=self.timed)

    def emit(self, module: Module, isa: ISA) -> None:
        barrier = module.function("pool_barrier", [("control", PTR), ("threads", I64)])
        control, threads = barrier.args
        generation = control.at(GENERATION)
        now = generation.load_atomic()
        last = control.at(ARRIVED).fetch_add(1).eq(threads - 1)
        with barrier.either(last) as otherwise:
            control.at(ARRIVED).store_atomic(0)
            generation.store_atomic(now + 1)
            otherwise()
            count = barrier.variable(barrier.const(0, I64))
            with barrier.forever() as waiting:
                waiting.leave_if(generation.load_atomic().ne(now))
                with barrier.either(count.get() < _SPIN) as otherwise:
                    barrier.pause()
                    otherwise()
                    barrier.call_pointer(control.load(PTR, YIELD, align=8))
                count.set(count.get() + 1)

        arguments = [("control", PTR), ("thread", I64), *([("times", PTR)] if self.timed else [])]
        f = module.function(self.symbol, arguments)
        control, thread = f.args[:2]
        threads = control.load(I64, THREADS)
        program = control.load(PTR, PROGRAM, align=8)
        with f.loop(0, control.load(I64, STEPS)) as i:
            step = program.at(i, STEP_BYTES)
            f.call_pointer(step.load(PTR, align=8), step.load(PTR, 8, align=8), thread, threads)
            with f.when(step.load(I64, 16).ne(0)):
                following = step.load(PTR, 24, align=8).at(thread * step.load(I64, 32))
                for at in range(0, FETCH_BYTES, 64):
                    following.prefetch(at)
                f.invoke(barrier, control, threads)
            if self.timed:
                f.args[2].at(i, 8).store(f.call("llvm.readcyclecounter", I64))


@dataclass(frozen=True)
class _Wait:
    """Wait for an epoch other than the last; found[0] is the new one, or -1 when patience ran out."""

    @property
    def symbol(self) -> str:
        return "pool_wait"

    def emit(self, module: Module, isa: ISA) -> None:
        f = module.function(self.symbol, [("control", PTR), ("last", I64), ("found", PTR)])
        control, last, found = f.args
        count = f.variable(f.const(0, I64))
        found.store(f.const(-1, I64))
        with f.forever() as waiting:
            epoch = control.at(EPOCH).load_atomic()
            with f.when(epoch.ne(last)):
                found.store(epoch)
            waiting.leave_if(epoch.ne(last))
            waiting.leave_if(count.get() > _PATIENCE)
            f.pause()
            count.set(count.get() + 1)
            with f.when((count.get() & 1023).eq(0)):
                f.call_pointer(control.load(PTR, YIELD, align=8))


@dataclass(frozen=True)
class _Publish:
    """Announce a program: set its chunk counters back to zero, one each 64 bytes, and begin a new epoch."""

    @property
    def symbol(self) -> str:
        return "pool_publish"

    def emit(self, module: Module, isa: ISA) -> None:
        arguments = [("control", PTR), ("program", PTR), ("steps", I64), ("counters", PTR), ("n", I64)]
        f = module.function(self.symbol, arguments)
        control, program, steps, counters, n = f.args
        with f.loop(0, n) as i:
            counters.at(i, 64).store(f.const(0, I64))
        control.store(program, PROGRAM, align=8)
        control.store(steps, STEPS)
        control.at(EPOCH).fetch_add(1)


KERNELS = (_Run(), _Wait(), _Publish())
"""What a pool is made of; loaded together with a program's kernels, all that is missing is compiled at
once."""


def usable_cores() -> int:
    """Physical cores this process may use: its affinity and its cgroup's CPU quota taken into account."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:
        return max(1, (os.cpu_count() or 2) // (1 if platform.machine() in ("arm64", "aarch64") else 2))
    cores = set()
    for cpu in allowed:
        try:
            with open(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") as f:
                cores.add(f.read().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), int(cpu_quota() or len(cores))))


def cpu_quota() -> float | None:
    """CPUs this process's cgroup may use, None where nothing limits it."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        return None if quota == "max" else max(int(quota) / int(period), 1.0)
    except (OSError, ValueError):
        pass
    try:
        with open("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") as f:
            quota = f.read()
        with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us") as f:
            return max(int(quota) / int(f.read()), 1.0) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


class ThreadsError(RuntimeError):
    """The operating system does not give as many threads as are wanted."""


class _Crew:
    """What the threads of a pool share. Workers hold it, and with it the code they run, but never the pool: a
    forgotten pool can be collected, and then stops them."""

    def __init__(self, library: Library, threads: int) -> None:
        run, wait, publish = library.load(KERNELS).values()
        self.library = library
        self.run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(run)
        self.wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(wait)
        self.publish = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64
        )(publish)
        memory = aligned(CONTROL_BYTES)
        self.control = memory.view(np.int64)
        self.address = int(memory.ctypes.data)
        self.control[THREADS // 8] = threads
        self.control[YIELD // 8] = _yield_address()
        self.lock = threading.Lock()
        self.asleep: list[threading.Lock] = []
        self.pid = os.getpid()
        self.workers = [
            threading.Thread(target=self.work, args=(n,), name=f"chabok-worker-{n}", daemon=True)
            for n in range(1, threads)
        ]
        for n, worker in enumerate(self.workers):
            try:
                worker.start()
            except RuntimeError:
                # Those that are there would wait at the first barrier for ever.
                self.stop()
                raise ThreadsError(
                    f"this system lets the process have {n} more threads, but {threads - 1} are wanted"
                ) from None

    def work(self, thread: int) -> None:
        """A worker's life."""
        epoch, found = 0, ctypes.c_int64()
        alarm = threading.Lock()
        alarm.acquire()
        while True:
            self.wait(self.address, epoch, ctypes.addressof(found))
            if found.value < 0:
                if self.may_sleep(epoch, alarm):
                    alarm.acquire()
                continue
            epoch = found.value
            if self.control[STOP // 8]:
                return
            self.run(self.address, thread)

    def may_sleep(self, epoch: int, alarm: threading.Lock) -> bool:
        """Put a worker on the list of those to be woken, unless there is work after all.

        First on the list, then a last look at the epoch: whoever publishes does it the other way round, so
        that one of the two always sees the other.
        """
        with self.lock:
            self.asleep.append(alarm)
            if int(self.control[EPOCH // 8]) != epoch:
                self.asleep.remove(alarm)
                return False
            return True

    def wake(self) -> None:
        """Wake those who sleep, after something was published."""
        if self.asleep:
            with self.lock:
                for alarm in self.asleep:
                    alarm.release()
                self.asleep.clear()

    def stop(self) -> None:
        """Let the workers leave."""
        if self.pid == os.getpid():
            self.control[STOP // 8] = 1
            self.publish(self.address, 0, 0, 0, 0)
            self.wake()


class Pool:
    """``threads`` threads, the caller's among them, that run programs one after the other."""

    def __init__(self, library: Library, threads: int | None = None) -> None:
        self.threads = threads or usable_cores()
        self._library = library
        self._busy = threading.Lock()
        self._closed = False
        self._crew: _Crew | None = None

    def _hired(self) -> _Crew:
        """The workers, started on first use; and again in a process that was forked, where they do not live
        on."""
        if self._crew is None or self._crew.pid != os.getpid():
            self._crew = _Crew(self._library, self.threads)
            weakref.finalize(self, self._crew.stop)
        return self._crew

    def run(self, program: Program) -> None:
        """Run a program to its end on all threads."""
        self._go(program, lambda crew: crew.run(crew.address, 0))

    def profile(self, program: Program) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Run a program and tell the seconds that each step took the calling thread: float64[steps]."""
        address = self._library.load([_Run(timed=True)])[_Run(timed=True)]
        run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(address)
        cycles = np.zeros(program.length + 1, np.int64)
        took = [0.0]

        def lead(crew: _Crew) -> None:
            start = time.perf_counter()
            run(crew.address, 0, cycles[1:].ctypes.data)
            took[0] = time.perf_counter() - start

        self._go(program, lead)
        # The first step's start was not noted; it is taken to last as long as the second.
        cycles[0] = 2 * cycles[1] - cycles[2] if program.length > 1 else cycles[1] - 1
        spent = np.diff(cycles).astype(np.float64)
        seconds: np.ndarray[tuple[int], np.dtype[np.float64]] = spent * (took[0] / spent.sum())
        return seconds

    def _go(self, program: Program, lead: Callable[[_Crew], object]) -> None:
        """Publish a program, wake the workers, and take part."""
        with self._busy:
            if self._closed:
                raise RuntimeError("the pool is closed")
            crew = self._hired()
            crew.publish(crew.address, program.address, program.length, program.counters, program.n_counters)
            crew.wake()
            lead(crew)

    def close(self) -> None:
        """Stop the workers and wait for them."""
        with self._busy:
            self._closed = True
            if self._crew is not None and self._crew.pid == os.getpid():
                self._crew.stop()
                for worker in self._crew.workers:
                    worker.join()


def _yield_address() -> int:
    if platform.system() == "Windows":
        function = ctypes.WinDLL("kernel32").SwitchToThread  # type: ignore[attr-defined,unused-ignore]
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0
