"""Kernels that measure the machine rather than compute anything."""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import I64, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks

PIECE = 1 << 20
"""Bytes a thread reads at a time."""


@dataclass(frozen=True)
class Read:
    """Reads ``pieces`` pieces of memory and keeps nothing but a sum, int64[threads] at ``out``, 64 bytes
    apart."""

    fields = ("data", "pieces", "out", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return "read"

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        sums = [f.variable(f.const(0, I64 * 8)) for _ in range(4)]
        with chunks(f, ops.ptr("counter"), ops.int("pieces"), 1) as (piece, _):
            at = ops.ptr("data").at(piece, PIECE)
            with f.loop(0, PIECE, 256) as i:
                for n, total in enumerate(sums):
                    total.set(total.get() + at.at(i).load(I64 * 8, 64 * n))
                    at.at(i).prefetch(4096 + 64 * n)
        every = (sums[0].get() + sums[1].get()) + (sums[2].get() + sums[3].get())
        ops.ptr("out").at(f.args[1], 64).store(f.reduce_add(every))
