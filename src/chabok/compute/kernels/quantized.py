"""Products with quantized weights: few rows stream strips, many rows pass over unpacked panels."""

from __future__ import annotations

from chabok.compute.blocks import FORMATS, GROUP, STRIP
from chabok.compute.emit import F16, F32, I1, I8, I32, I64, PTR, Function, Module, Value, Variable
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import Operands, in_tiles
from chabok.compute.kernels.dot import Dot
from chabok.compute.kernels.matmul import (
    FEW_ROWS,
    LINE,
    PANEL_GROUP_BYTES,
    PANEL_GROUPS,
    PREFETCH,
    X_HIGH32,
    X_LOW32,
    X_MIN,
    X_SCALE,
    ZERO_FIELD,
    MatMul,
)
from chabok.compute.kernels.product import Chunk, Product


class Quantized(Product):
    """Emits a product's functions for one format, epilogue and instruction set."""

    def __init__(self, spec: MatMul, module: Module, isa: ISA) -> None:
        self.dot = Dot(isa, FORMATS[spec.format].bits)
        super().__init__(spec, module, isa, self.dot.lanes)
        self.parts = STRIP // self.lanes
        """Vectors that cover a strip: 1, or 2 of 8 rows."""
        # Sums of both strips, as integers and as floats, and what a minimum adds, must fit in 32 registers.
        # With 16 half as wide some sums are spilled in any case; four rows are still best, measured, but for
        # one.
        wide = 5 if self.format.minimum else 6
        self.tile_rows = wide if self.parts == 1 else 3 if spec.format in ("Q4_1", "Q5_1") else 4
        self.tile_rows -= self.tile_rows % spec.terms

    # -- unpacking ------------------------------------------------------------------------------------------

    def weights(self, f: Function, group: Value, part: int) -> list[Value]:
        """The eight weight vectors of a group: <4*lanes x i8> each, unsigned (or signed, where the dot takes
        it so)."""
        n, fmt = 4 * self.lanes, self.format
        base = fmt.group_head + part * n

        def vector(offset: int) -> Value:
            return group.load(I8 * n, base + offset, align=1)

        if fmt.bits == 8:
            vectors = [vector(64 * j) for j in range(8)]
            return [v ^ -128 for v in vectors] if self.dot.signed else vectors
        wide = I32 * self.lanes
        high = [vector(256 + 64 * h).bitcast(wide) for h in range(fmt.high_bytes // 64)]
        result = []
        for j in range(8):
            quants = vector(64 * (j // 2)).bitcast(wide)
            low = (quants >> 4 if j % 2 else quants).bitcast(I8 * n) & 15
            if fmt.bits == 5:
                low = low | (shift_left(high[0], 4 - j).bitcast(I8 * n) & 16)
            elif fmt.bits == 6:
                low = low | (shift_left(high[j // 4], 4 - 2 * (j % 4)).bitcast(I8 * n) & 48)
            result.append(low)
        return result

    def scales(self, f: Function, unit: Value, group: Value, part: int) -> tuple[Value, Value | None]:
        """The scales of a group, float<lanes>, and the minimums or the second half's scales where there are
        any."""
        fmt, n = self.format, self.lanes

        def half(base: Value, offset: int) -> Value:
            return base.load(F16 * n, offset + part * 2 * n, align=1).to_float()

        if not fmt.nested:
            return half(group, 0), half(group, 2 * STRIP) if fmt.minimum else None

        def byte(offset: int, signed: bool) -> Value:
            v = group.load(I8 * n, offset + part * n, align=1)
            return (v.sext(I32) if signed else v.zext(I32)).to_float()

        d = half(unit, 0)
        if fmt.scales == 2:
            return d * byte(0, True), d * byte(STRIP, True)
        return d * byte(0, False), -(half(unit, 2 * STRIP) * byte(STRIP, False))

    # -- one group ------------------------------------------------------------------------------------------

    def accumulate(
        self, f: Function, acc: Value, weights: list[Value], first: Value, second: Value | None, x: Value
    ) -> Value:
        """Add a group's products to a row's sums. x: the row's line of this group."""
        fmt, lanes = self.format, self.lanes
        bytes4 = [x.load(I32, 4 * j) for j in range(8)]
        x_scale = x.load(F32, X_SCALE)
        if fmt.scales == 2:
            for half, scale in enumerate((first, second)):
                assert scale is not None
                start = x.load(I32, (X_LOW32, X_HIGH32)[half]).splat(lanes)
                four = slice(4 * half, 4 * half + 4)
                total = self.dot.group(f, weights[four], bytes4[four], start)
                acc = f.fma(total.to_float() * x_scale, scale, acc)
            return acc
        zero: Value | None = None
        if not fmt.minimum and not (fmt.bits == 8 and self.dot.signed):
            zero = x.load(I32, ZERO_FIELD[fmt.zero]).splat(lanes)
        total = self.dot.group(f, weights, bytes4, zero)
        acc = f.fma(total.to_float() * x_scale, first, acc)
        if fmt.minimum:
            assert second is not None
            acc = f.fma(second, x.load(F32, X_MIN), acc)
        return acc

    # -- few rows: stream ------------------------------------------------------------------------------------

    def direct(self, rows: int) -> Function:
        """A function that takes one pair of strips and ``rows`` rows, unpacking in registers."""
        args = [("w", PTR), ("strip_bytes", I64), ("units", I64), ("x", PTR), ("x_stride", I64), ("out", PTR),
                ("out_stride", I64), ("bias", PTR)]  # fmt: skip
        f = self.module.function(f"{self.spec.symbol}_direct{rows}", args)
        w, strip_bytes, units, x, x_stride, out, out_stride, bias = f.args
        fmt, zero = self.format, f.const(0.0, F32 * self.lanes)
        per_unit = fmt.unit // GROUP
        sums: list[list[Value]] = [[] for _ in range(rows)]
        for strip in range(2):
            acc = [[f.variable(zero) for _ in range(self.parts)] for _ in range(rows)]
            strip_at = w.at(strip_bytes) if strip else w
            with f.loop(0, units) as u:
                unit = strip_at.at(u, fmt.unit_bytes)
                lines = x.at(u, LINE * per_unit)
                # A loop, not eight copies: with fewer values alive at once nothing is spilled.
                with f.loop(0, per_unit) as g:
                    group = unit.at(fmt.unit_head).at(g, fmt.group_bytes)
                    for at in range(0, fmt.group_bytes, 64):
                        group.prefetch(PREFETCH + at)
                    for p in range(self.parts):
                        weights = self.weights(f, group, p)
                        first, second = self.scales(f, unit, group, p)
                        for r in range(rows):
                            line = lines.at(f.const(r, I64) * x_stride if r else 0).at(g, LINE)
                            acc[r][p].set(self.accumulate(f, acc[r][p].get(), weights, first, second, line))
            for r in range(rows):
                sums[r] += [a.get() for a in acc[r]]
        self.finish_rows(f, sums, out, out_stride, bias)
        return f

    # -- many rows: a panel ----------------------------------------------------------------------------------

    def unpack_panel(self) -> Function:
        """A function that unpacks ``units`` units of one strip into a panel, and asks for what lies ``ahead``
        bytes further on: what this thread will probably unpack next."""
        args = [("w", PTR), ("units", I64), ("panel", PTR), ("ahead", I64)]
        f = self.module.function(f"{self.spec.symbol}_unpack", args)
        w, units, panel, ahead = f.args
        fmt = self.format
        per_unit = fmt.unit // GROUP
        with f.loop(0, units) as u:
            unit = w.at(u, fmt.unit_bytes)
            to_unit = panel.at(u, per_unit * PANEL_GROUP_BYTES)
            with f.loop(0, per_unit) as g:
                group, to = unit.at(fmt.unit_head).at(g, fmt.group_bytes), to_unit.at(g, PANEL_GROUP_BYTES)
                for line in range(0, fmt.group_bytes, 64):
                    group.at(ahead).prefetch(line, 2)
                for p in range(self.parts):
                    for j, v in enumerate(self.weights(f, group, p)):
                        to.store(v, 64 * j + p * 4 * self.lanes, align=4 * self.lanes)
                    first, second = self.scales(f, unit, group, p)
                    to.store(first, 512 + p * 4 * self.lanes, align=4 * self.lanes)
                    if second is not None:
                        to.store(second, 576 + p * 4 * self.lanes, align=4 * self.lanes)
        return f

    def tile(self, rows: int) -> Function:
        """A function that passes ``rows`` rows over a panel of two strips.

        partial: float32[rows, 32], the sums so far (not read if ``is_first``); written unless ``is_last``,
        when the epilogue writes to out instead.
        """
        args = [
            ("panel", PTR),
            ("groups", I64),
            ("x", PTR),
            ("x_stride", I64),
            ("partial", PTR),
            ("is_first", I1),
            ("is_last", I1),
            ("out", PTR),
            ("out_stride", I64),
            ("bias", PTR),
        ]
        f = self.module.function(f"{self.spec.symbol}_tile{rows}", args)
        panel, groups, x, x_stride, partial, is_first, is_last, out, out_stride, bias = f.args
        n, fmt = self.lanes, self.format
        width = 4 * n
        strip_panel = PANEL_GROUPS * PANEL_GROUP_BYTES
        zero = f.const(0.0, F32 * n)
        with f.when(is_last):
            # Results are often far from any cache: own their lines by the time they are ready.
            for r in range(rows // self.spec.terms):
                for at in range(0, self.out_bytes, 64):
                    out.at(f.const(r, I64) * out_stride).prefetch(at, write=True)
        sums: list[list[list[Value]]] = []
        row_x = [x.at(f.const(r, I64) * x_stride) if r else x for r in range(rows)]
        for p in range(self.parts):
            acc: list[list[Variable]] = []
            for r in range(rows):
                before = [partial.at(r * 128 + s * 64 + p * width) for s in range(2)]
                acc.append([f.variable(zero) for _ in range(2)])
                with f.when(is_first.eq(0)):
                    for s in range(2):
                        acc[r][s].set(before[s].load(F32 * n))
            with f.loop(0, groups) as g:
                groups_at = [panel.at(s * strip_panel + p * width).at(g, PANEL_GROUP_BYTES) for s in range(2)]
                weights = [[a.load(I8 * width, 64 * j, align=width) for j in range(8)] for a in groups_at]
                firsts = [a.load(F32 * n, 512, align=width) for a in groups_at]
                two = fmt.minimum or fmt.scales == 2
                seconds = [a.load(F32 * n, 576, align=width) if two else None for a in groups_at]
                for r in range(rows):
                    line = row_x[r].at(g, LINE)
                    for s in range(2):
                        acc[r][s].set(
                            self.accumulate(f, acc[r][s].get(), weights[s], firsts[s], seconds[s], line)
                        )
            sums.append([[a.get() for a in row] for row in acc])
        with f.either(is_last) as otherwise:
            flat = [[sums[p][r][s] for s in range(2) for p in range(self.parts)] for r in range(rows)]
            self.finish_rows(f, flat, out, out_stride, bias)
            otherwise()
            for r in range(rows):
                for s in range(2):
                    for p in range(self.parts):
                        partial.store(sums[p][r][s], r * 128 + s * 64 + p * width)
        return f

    def panels(self) -> Function:
        """A function that computes one pair of strips for all rows by way of panels."""
        unpack = self.unpack_panel()
        terms = self.spec.terms
        tiles = {r: self.tile(r) for r in range(terms, self.tile_rows + 1, terms)}
        args = [
            ("w", PTR),
            ("strip_bytes", I64),
            ("units", I64),
            ("rows", I64),
            ("x", PTR),
            ("x_stride", I64),
            ("out", PTR),
            ("out_stride", I64),
            ("bias", PTR),
            ("scratch", PTR),
            ("ahead", I64),
        ]
        f = self.module.function(f"{self.spec.symbol}_panels", args)
        w, strip_bytes, units, rows, x, x_stride, out, out_stride, bias, scratch, ahead = f.args
        fmt = self.format
        per_unit = fmt.unit // GROUP
        panel_units = PANEL_GROUPS // per_unit
        strip_panel = PANEL_GROUPS * PANEL_GROUP_BYTES
        partial = scratch.at(2 * strip_panel)
        with f.loop(0, units, panel_units) as u:
            count = f.minimum(units - u, panel_units)
            for s in range(2):
                strip_at = w.at(strip_bytes) if s else w
                f.invoke(unpack, strip_at.at(u, fmt.unit_bytes), count, scratch.at(s * strip_panel), ahead)
            is_first, is_last = u.eq(0), u + count >= units
            lines = x.at(u, LINE * per_unit)

            def run(n: int, r: Value) -> None:
                f.invoke(
                    tiles[n], scratch, count * per_unit, lines.at(r * x_stride), x_stride, partial.at(r, 128),
                    is_first, is_last, out.at(r // terms * out_stride), out_stride, bias,
                )  # fmt: skip

            whole = rows // self.tile_rows * self.tile_rows
            with f.loop(0, whole, self.tile_rows) as r:
                run(self.tile_rows, r)
            left = rows - whole
            for n in range(terms, self.tile_rows, terms):
                with f.when(left.eq(n)):
                    run(n, whole)
        return f

    # -- the kernel ------------------------------------------------------------------------------------------

    def emit(self) -> None:
        """Write the kernel."""
        terms = self.spec.terms
        sizes = [n for n in (4, 2, 1) if n % terms == 0]
        directs = {n: self.direct(n) for n in sizes}
        panels = self.panels()

        def pair(f: Function, ops: Operands, c: Chunk) -> None:
            strip_bytes, units = ops.int("strip_bytes"), ops.int("units")
            x_stride, out_stride = ops.int("x_stride"), ops.int("out_stride")
            scratch = ops.ptr("scratch").at(f.args[1] * ops.int("scratch_stride"))
            with f.either(c.rows <= FEW_ROWS) as otherwise:
                in_tiles(f, c.rows, sizes, lambda n, at: f.invoke(
                    directs[n], c.w, strip_bytes, units, c.x.at(at * x_stride), x_stride,
                    c.out.at(at // terms * out_stride), out_stride, c.bias))  # fmt: skip
                otherwise()
                # Pairs are taken one at a time: the next of this thread is about as many on as there are
                # threads.
                ahead = f.args[2] * strip_bytes * 2
                f.invoke(
                    panels,
                    c.w,
                    strip_bytes,
                    units,
                    c.rows,
                    c.x,
                    x_stride,
                    c.out,
                    out_stride,
                    c.bias,
                    scratch,
                    ahead,
                )

        self.kernel(pair)


def shift_left(v: Value, left: int) -> Value:
    """Shift left, or right by a negative count."""
    return v << left if left > 0 else v >> -left if left < 0 else v
