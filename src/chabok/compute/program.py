"""A forward pass as a flat list of steps: each the address of a kernel and of its operands.

The list is built once; running it involves no Python. What changes from run to run (how many rows there are,
where a sequence's pages lie) is read by the kernels from memory whose address is fixed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from chabok.compute.library import Library, Spec
from chabok.compute.memory import aligned
from chabok.compute.pool import STEP_BYTES


class Kernel(Spec, Protocol):
    """A kernel that can be a step: it names its operands."""

    @property
    def fields(self) -> Sequence[str]:
        """Names of the operands, 64 bits each, in order."""


Operand = int | float | NDArray[Any]


class Program:
    """Steps to run in order."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._operands: list[dict[str, Operand]] = []
        self._barriers: list[bool] = []
        self.address = 0
        self.length = 0
        self.counters = 0
        """Address of the chunk counters, 64 bytes apart; to be set to zero before a run."""
        self.n_counters = 0

    def step(self, kernel: Kernel, *, barrier: bool = True, **operands: Operand) -> None:
        """Append a step; ``barrier``: whether all threads meet after it.

        Operands are integers, floats (32 bits), or arrays, which stand for their address and are kept alive.
        Every field but ``counter``, which the program provides, must be named. Raises TypeError otherwise.
        """
        wanted = set(kernel.fields) - {"counter"}
        if wanted != set(operands):
            raise TypeError(f"{kernel.symbol} takes {sorted(wanted)}, not {sorted(operands)}")
        self.kernels.append(kernel)
        self._operands.append(operands)
        self._barriers.append(barrier)

    def seal(self, library: Library) -> None:
        """Load the kernels and lay the steps out in memory."""
        if not self._barriers:
            raise ValueError("a program needs a step")
        self._barriers[-1] = True
        addresses = library.load(self.kernels)
        self.length = len(self.kernels)
        self.n_counters = sum("counter" in k.fields for k in self.kernels)
        self._counters = aligned(64 * max(self.n_counters, 1))
        self.counters = int(self._counters.ctypes.data)
        self._memory = aligned(8 * sum(len(k.fields) for k in self.kernels))
        self._steps = aligned(STEP_BYTES * self.length)
        steps = self._steps.view(np.int64).reshape(self.length, -1)
        at = counter = 0
        for i, (kernel, operands, barrier) in enumerate(zip(self.kernels, self._operands, self._barriers)):
            steps[i, :3] = addresses[kernel], self._memory.ctypes.data + at, barrier
            for field in kernel.fields:
                value: Operand
                if field == "counter":
                    value = self.counters + 64 * counter
                    counter += 1
                else:
                    value = operands[field]
                self._memory[at : at + 8] = np.frombuffer(_encode(value), np.uint8)
                at += 8
        self._fetch_ahead(steps)
        self.address = int(self._steps.ctypes.data)

    def _fetch_ahead(self, steps: NDArray[np.int64]) -> None:
        """Tell each step before a barrier where the next stream of weights begins for each thread."""
        where, apart = int(self._steps.ctypes.data), 0
        for i in reversed(range(self.length)):
            steps[i, 3:5] = where, apart
            operands = self._operands[i]
            weights = operands.get("w")
            if isinstance(weights, np.ndarray) and "active" not in operands:
                where = weights.ctypes.data
                apart = int(operands["share"]) * 2 * int(operands["strip_bytes"])


def _encode(value: Operand) -> bytes:
    if isinstance(value, float | np.floating):
        return struct.pack("<fxxxx", float(value))
    if isinstance(value, np.ndarray):
        return struct.pack("<q", value.ctypes.data)
    return struct.pack("<q", int(value))
