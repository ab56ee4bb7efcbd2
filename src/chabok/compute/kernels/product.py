"""What products with quantized and with float weights share: the walk over chunks, and what becomes of
sums."""

from __future__ import annotations

from collections.abc import Callable

from chabok.compute.blocks import FORMATS, STRIP, Format
from chabok.compute.emit import I64, Function, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import Operands, begin, chunks, gelu_tanh, silu
from chabok.compute.kernels.matmul import ACTIVE_BYTES, FEW_ROWS, MatMul


class Chunk:
    """A pair of strips and the rows it is multiplied with: addresses of weights, first row, first output,
    bias."""

    def __init__(self, w: Value, rows: Value, x: Value, out: Value) -> None:
        self.w, self.rows, self.x, self.out, self.bias = w, rows, x, out, out


class Product:
    """What products of quantized and of float weights share: the epilogue and the walk over chunks."""

    def __init__(self, spec: MatMul, module: Module, isa: ISA, lanes: int) -> None:
        self.spec, self.module, self.isa, self.lanes = spec, module, isa, lanes
        self.format: Format = FORMATS[spec.format]
        self.gated = spec.epilogue in ("silu", "gelu")

    def finish(self, f: Function, sums: list[Value], out: Value, bias: Value) -> None:
        """Store the sums of a row: vectors of ``lanes`` outputs in order, strip by strip.

        out, bias: addresses of the pair's first output. Gated pairs have half as many outputs.
        """
        width = self.lanes * 4
        if self.gated:
            act: Callable[[Function, Value], Value] = silu if self.spec.epilogue == "silu" else gelu_tanh
            half = len(sums) // 2
            sums = [act(f, gate) * up for gate, up in zip(sums[:half], sums[half:])]
        for i, total in enumerate(sums):
            if self.spec.bias:
                total = total + bias.load(total.type, i * width)
            if self.spec.epilogue == "add":
                total = out.load(total.type, i * width) + total
            out.store(total, i * width)

    def finish_rows(
        self, f: Function, sums: list[list[Value]], out: Value, out_stride: Value, bias: Value
    ) -> None:
        """Store the sums of all rows of a tile; ``sums`` has an entry for each line, in order."""
        terms = self.spec.terms
        for r in range(len(sums) // terms):
            total = sums[r * terms]
            for more in sums[r * terms + 1 : (r + 1) * terms]:
                total = [a + b for a, b in zip(total, more)]
            self.finish(f, total, out.at(f.const(r, I64) * out_stride) if r else out, bias)

    @property
    def out_bytes(self) -> int:
        """Bytes of a pair's outputs in a row."""
        return (STRIP if self.gated else 2 * STRIP) * 4

    def kernel(self, pair: Callable[[Function, Operands, Chunk], None]) -> None:
        """The kernel: takes chunks of pairs and hands each pair with its rows to ``pair``."""
        f, ops = begin(self.module, self.spec.symbol, self.spec.fields)
        thread = f.args[1]
        x, out = ops.ptr("x").at(thread * ops.int("x_private")), ops.ptr("out")
        pairs, strip_bytes = ops.int("pairs"), ops.int("strip_bytes")
        if self.spec.experts:
            copy = thread * ops.int("active_private")
            active = ops.ptr("active").at(copy)
            total = ops.ptr("n_active").at(copy).load(I64) * pairs
            share, size = f.const(0, I64), ops.int("chunk")
        else:
            rows, total = ops.ptr("rows").load(I64) * self.spec.terms, pairs
            few, one, none = rows <= FEW_ROWS, f.const(1, I64), f.const(0, I64)
            share, size = few.select(ops.int("share"), none), few.select(ops.int("chunk"), one)
        with chunks(f, ops.ptr("counter"), total, size, share) as (start, stop), f.loop(start, stop) as i:
            if self.spec.experts:
                entry, at = active.at(i // pairs, ACTIVE_BYTES), i % pairs
                expert, first, rows = (entry.load(I64, 8 * n) for n in range(3))
                w = ops.ptr("w").at(expert * ops.int("expert_bytes")).at(at * strip_bytes, 2)
                chunk = Chunk(
                    w, rows, x.at(first * ops.int("x_stride")), out.at(first * ops.int("out_stride"))
                )
            else:
                at = i
                chunk = Chunk(ops.ptr("w").at(at * strip_bytes, 2), rows, x, out)
            chunk.out = chunk.out.at(at, self.out_bytes)
            chunk.bias = ops.ptr("bias").at(at, self.out_bytes)
            pair(f, ops, chunk)
