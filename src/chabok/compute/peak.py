"""How many 8-bit products this machine adds up in a second."""

from __future__ import annotations

import numpy as np

from chabok.compute.bandwidth import best_time
from chabok.compute.kernels.dot import Dot
from chabok.compute.kernels.probe import Multiply
from chabok.compute.library import Library
from chabok.compute.memory import aligned
from chabok.compute.program import Program


def multiply_add_peak(library: Library, threads: int, *, pieces: int = 4000, rounds: int = 5) -> float:
    """Multiply-adds per second of bytes that ``threads`` threads reach together where nothing has to come
    from memory: the best of some rounds, each of some milliseconds."""
    kernel, isa = Multiply(), library.isa
    lanes, rows = Dot(isa, 4).lanes, Multiply.rows(isa)
    weights = aligned(kernel.STEPS * 2 * lanes * 4)
    x = aligned(kernel.STEPS * rows * 4)
    weights[:] = np.arange(len(weights)) % 16
    x[:] = np.arange(len(x)) % 100
    program = Program()
    program.step(kernel, weights=weights, x=x, pieces=pieces, out=aligned(threads * rows * 2 * lanes * 4))
    return pieces * kernel.multiply_adds(isa) / best_time(library, threads, program, rounds)
