"""Kernels that measure the machine rather than compute anything."""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import I8, I32, I64, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks
from chabok.compute.kernels.dot import Dot

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


@dataclass(frozen=True)
class Multiply:
    """Sums of 8-bit products from the first-level cache, as many at once as the registers hold.

    A pass multiplies a panel, ``weights`` uint8[STEPS, 2, lanes, 4] of 4 bits each, with ``x`` int8[STEPS,
    rows, 4]. ``pieces`` times PASSES passes are shared by the threads; each adds its own up at ``out``
    int32[threads, rows, 2, lanes], modulo 2**32.
    """

    fields = ("weights", "x", "pieces", "out", "counter")
    STEPS = 32
    PASSES = 32

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return "multiply"

    @staticmethod
    def rows(isa: ISA) -> int:
        """Rows of activations whose sums fit into the registers beside what is loaded."""
        return 6 if isa.dot == "vnni512" else 3

    def multiply_adds(self, isa: ISA) -> int:
        """Of one piece."""
        return self.PASSES * self.STEPS * self.rows(isa) * 2 * Dot(isa, 4).lanes * 4

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        dot, rows, run = Dot(isa, 4), self.rows(isa), 4
        lanes = dot.lanes
        sums = [f.variable(f.const(0, I32 * lanes)) for _ in range(rows * 2)]
        with (
            chunks(f, ops.ptr("counter"), ops.int("pieces"), 1),
            f.loop(0, self.PASSES),
            f.loop(0, self.STEPS, run) as step,
        ):
            w, x = ops.ptr("weights").at(step, 8 * lanes), ops.ptr("x").at(step, 4 * rows)
            strips = [
                [w.load(I8 * (4 * lanes), (2 * j + s) * 4 * lanes) for j in range(run)] for s in range(2)
            ]
            for r in range(rows):
                active = [x.load(I32, (j * rows + r) * 4) for j in range(run)]
                for s in range(2):
                    total = sums[2 * r + s]
                    total.set(dot.group(f, strips[s], active, total.get()))
        out = ops.ptr("out").at(f.args[1], rows * 2 * lanes * 4)
        for n, total in enumerate(sums):
            out.store(total.get(), n * lanes * 4)
