"""How fast this machine reads memory."""

from __future__ import annotations

import mmap
import time

import numpy as np

from chabok.compute.kernels.probe import PIECE, Read
from chabok.compute.library import Library
from chabok.compute.memory import aligned, anonymous
from chabok.compute.pool import Pool
from chabok.compute.program import Program


def read_bandwidth(library: Library, threads: int, *, n_bytes: int = 512 << 20, rounds: int = 5) -> float:
    """Bytes per second that ``threads`` threads read together from memory no cache holds: the best of some
    rounds.

    n_bytes should be several times the last cache's size; it is allocated for the time of the measurement.
    """
    data = np.frombuffer(anonymous(n_bytes), np.uint8)
    data[:: mmap.PAGESIZE] = 1  # untouched pages would all be the same page of zeros
    program = Program()
    program.step(Read(), data=data, pieces=n_bytes // PIECE, out=aligned(64 * threads))
    return n_bytes // PIECE * PIECE / best_time(library, threads, program, rounds)


def best_time(library: Library, threads: int, program: Program, rounds: int) -> float:
    """Seconds of the fastest of some runs of a program, after one that does not count."""
    program.seal(library)
    pool = Pool(library, threads)
    try:
        pool.run(program)
        best = float("inf")
        for _ in range(rounds):
            start = time.perf_counter()
            pool.run(program)
            best = min(best, time.perf_counter() - start)
    finally:
        pool.close()
    return best
