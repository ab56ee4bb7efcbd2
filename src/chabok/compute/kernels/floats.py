"""Products with unquantized weights."""

from __future__ import annotations

from chabok.compute.blocks import STRIP
from chabok.compute.emit import F32, I64, PTR, Function, Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import Operands, in_tiles, numbers
from chabok.compute.kernels.matmul import MatMul
from chabok.compute.kernels.product import Chunk, Product


class Floats(Product):
    """Float weights [k][16 rows] with float activations, x_stride bytes a row."""

    def __init__(self, spec: MatMul, module: Module, isa: ISA) -> None:
        super().__init__(spec, module, isa, STRIP)

    def tile(self, rows: int) -> Function:
        """A function that takes one pair of strips and ``rows`` rows."""
        args = [("w", PTR), ("strip_bytes", I64), ("k", I64), ("x", PTR), ("x_stride", I64), ("out", PTR),
                ("out_stride", I64), ("bias", PTR)]  # fmt: skip
        f = self.module.function(f"{self.spec.symbol}_tile{rows}", args)
        w, strip_bytes, k, x, x_stride, out, out_stride, bias = f.args
        acc = [[f.variable(f.const(0.0, F32 * STRIP)) for _ in range(2)] for _ in range(rows)]
        row_x = [x.at(f.const(r, I64) * x_stride) if r else x for r in range(rows)]
        with f.loop(0, k) as i:
            weights = [
                numbers(
                    self.format.name, (w.at(strip_bytes) if s else w).at(i, self.format.unit_bytes), STRIP
                )
                for s in range(2)
            ]
            for r in range(rows):
                value = row_x[r].at(i, 4).load(F32)
                for s in range(2):
                    acc[r][s].set(f.fma(weights[s], value, acc[r][s].get()))
        self.finish_rows(f, [[a.get() for a in row] for row in acc], out, out_stride, bias)
        return f

    def emit(self) -> None:
        """Write the kernel."""
        sizes = (6, 1) if self.isa.registers >= 32 else (3, 1)
        tiles = {r: self.tile(r) for r in sizes}

        def pair(f: Function, ops: Operands, c: Chunk) -> None:
            strip_bytes, k, x_stride, out_stride = (
                ops.int(n) for n in ("strip_bytes", "units", "x_stride", "out_stride")
            )
            in_tiles(f, c.rows, sizes, lambda n, at: f.invoke(
                tiles[n], c.w, strip_bytes, k, c.x.at(at * x_stride), x_stride,
                c.out.at(at * out_stride), out_stride, c.bias))  # fmt: skip

        self.kernel(pair)
