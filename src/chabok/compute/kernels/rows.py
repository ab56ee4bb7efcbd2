"""What happens to rows between products: embedding, residual sums and norms, gates, and the choice of the
best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from chabok.compute.blocks import FORMATS, GROUP, STRIP
from chabok.compute.emit import F16, F32, F64, I8, I32, I64, Function, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import begin, chunks, exp, flagged, gelu_tanh, numbers, over_rows, silu
from chabok.compute.kernels.quantize import quantize_group, root_mean_square


@dataclass(frozen=True)
class Embed:
    """Rows of a packed table as floats: out[row] = table[tokens[row]] * scale. ``private``: every thread its
    own copy."""

    format: str
    private: bool = False

    fields = (
        "rows",
        "tokens",
        "table",
        "strip_bytes",
        "units",
        "scale",
        "out",
        "out_stride",
        "out_private",
        "counter",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"embed_{self.format}", private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        fmt = FORMATS[self.format]
        out = ops.ptr("out").at(f.args[1] * ops.int("out_private"))

        def row(r: Value) -> None:
            token = ops.ptr("tokens").at(r, 4).load(I32).sext(I64)
            strip, lane = ops.ptr("table").at(token // STRIP * ops.int("strip_bytes")), token % STRIP
            to = out.at(r * ops.int("out_stride"))
            with f.loop(0, ops.int("units")) as u:
                unit, values = strip.at(u, fmt.unit_bytes), to.at(u, 4 * fmt.unit)
                if fmt.quantized:
                    for g in range(fmt.unit // GROUP):
                        group = unit.at(fmt.unit_head + g * fmt.group_bytes)
                        for half, v in enumerate(self.group(f, unit, group, lane)):
                            values.store(v * ops.float("scale"), 128 * g + 64 * half)
                else:
                    values.store(numbers(self.format, unit.at(lane, fmt.block_bytes)) * ops.float("scale"))

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)

    def group(self, f: Function, unit: Value, group: Value, lane: Value) -> list[Value]:
        """The 32 values of one row in a group, as two vectors."""
        fmt = FORMATS[self.format]

        def bytes4(offset: int, count: int) -> Value:
            """``count`` runs of 4 bytes of this row, 64 bytes apart: <4 * count x i8>."""
            v = f.const(0, I32 * count)
            for i in range(count):
                v = v.with_lane(i, group.at(lane, 4).load(I32, offset + 64 * i))
            return v.bitcast(I8 * (4 * count))

        if fmt.bits == 8:
            q = bytes4(fmt.group_head, 8)
        else:
            nibbles = bytes4(fmt.group_head, 4)
            order = [4 * v + c + 16 * h for v in range(4) for h in range(2) for c in range(4)]
            q = (nibbles & 15).shuffle(order, nibbles >> 4)
            high_at = fmt.group_head + fmt.quant_bytes
            if fmt.bits == 5:
                high = bytes4(high_at, 1).shuffle([c for _ in range(8) for c in range(4)])
                shifts = f.const_vector([j for j in range(8) for _ in range(4)], I8)
                q = q | (((high >> shifts) & 1) << 4)
            elif fmt.bits == 6:
                high = bytes4(high_at, 2).shuffle([4 * (j // 4) + c for j in range(8) for c in range(4)])
                shifts = f.const_vector([2 * (j % 4) for j in range(8) for _ in range(4)], I8)
                q = q | (((high >> shifts) & 3) << 4)

        def half(base: Value, offset: int) -> Value:
            return base.at(lane, 2).load(F16, offset).to_float()

        minimum: Value | None = None
        if not fmt.nested:
            scales = [half(group, 0)] * 2
            minimum = half(group, 2 * STRIP) if fmt.minimum else None
        elif fmt.scales == 2:
            scales = [
                half(unit, 0) * group.at(lane).load(I8, STRIP * i).sext(I32).to_float() for i in range(2)
            ]
        else:
            scales = [half(unit, 0) * group.at(lane).load(I8).zext(I32).to_float()] * 2
            minimum = -(half(unit, 2 * STRIP) * group.at(lane).load(I8, STRIP).zext(I32).to_float())
        result = []
        for h in range(2):
            v = (q.shuffle(range(16 * h, 16 * h + 16)).zext(I32) - fmt.zero).to_float() * scales[h]
            result.append(v if minimum is None else v + minimum)
        return result


@dataclass(frozen=True)
class AddNorm:
    """x += y * norm / rms(y): the residual sum after a block whose result is normalized.

    ``private``: every thread adds into its own copy of x.
    """

    private: bool = False

    fields = ("rows", "x", "x_stride", "x_private", "y", "y_stride", "k", "norm", "eps", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged("add_norm", private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        x = ops.ptr("x").at(f.args[1] * ops.int("x_private"))

        def row(r: Value) -> None:
            to, y = x.at(r * ops.int("x_stride")), ops.ptr("y").at(r * ops.int("y_stride"))
            factor = root_mean_square(f, y, ops.int("k"), ops.float("eps"))
            with f.loop(0, ops.int("k"), 16) as i:
                v = y.at(i, 4).load(F32 * 16) * factor * ops.ptr("norm").at(i, 4).load(F32 * 16)
                to.at(i, 4).store(to.at(i, 4).load(F32 * 16) + v)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)


@dataclass(frozen=True)
class Gate:
    """act(gate) * up as lines of 8-bit activations or floats, where a product could not do it (weights of two
    formats).

    gate, up: float32[rows, k] at their addresses, ``stride`` bytes a row.
    """

    activation: str
    to_bytes: bool = True
    private: bool = False

    fields = ("rows", "gate", "up", "stride", "k", "out", "out_stride", "out_private", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(f"gate_{self.activation}", float=not self.to_bytes, private=self.private)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        act = silu if self.activation == "silu" else gelu_tanh
        out = ops.ptr("out").at(f.args[1] * ops.int("out_private"))

        def row(r: Value) -> None:
            gate, up = (ops.ptr(n).at(r * ops.int("stride")) for n in ("gate", "up"))
            to = out.at(r * ops.int("out_stride"))
            with f.loop(0, ops.int("k"), 32) as i:
                g, u = ([p.at(i, 4).load(F32 * 16, 64 * h) for h in range(2)] for p in (gate, up))
                a, b = (act(f, g[h]) * u[h] for h in range(2))
                if self.to_bytes:
                    quantize_group(f, a, b, to.at(i, 2))
                else:
                    to.at(i, 4).store(a)
                    to.at(i, 4).store(b, 64)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)


@dataclass(frozen=True)
class Gather:
    """Copies chosen rows: out[i] = x[index[i]], k floats each, k a multiple of 16."""

    fields = ("rows", "index", "x", "x_stride", "k", "out", "out_stride", "counter")

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return "gather"

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        with (
            chunks(f, ops.ptr("counter"), ops.ptr("rows").load(I64), 4) as (start, stop),
            f.loop(start, stop) as r,
        ):
            source = ops.ptr("x").at(ops.ptr("index").at(r, 8).load(I64) * ops.int("x_stride"))
            to = ops.ptr("out").at(r * ops.int("out_stride"))
            with f.loop(0, ops.int("k"), 16) as i:
                to.at(i, 4).store(source.at(i, 4).load(F32 * 16))


SUMMARY_BLOCK = 64
"""Logits that share a maximum."""

SUMMARY_RUN = 4096
"""Logits that share a partial sum of exponentials."""


@dataclass(frozen=True)
class Summarize:
    """What choosing a token needs of its logits without reading them all again.

    logits float32[rows, stride / 4], n of them in use -> maxima float32[rows, ceil(n / 64)] and, for each run
    of 4096, the peak and the sum of exp(scale * (logit - peak)) as float64[rows, ceil(n / 4096), 2]. scales
    float32[rows]: inverse temperatures; 0: no sum is wanted. cap: logits first become cap * tanh(logits /
    cap), in place.
    """

    cap: bool = False

    fields = (
        "rows",
        "logits",
        "stride",
        "n",
        "cap",
        "maxima",
        "maxima_stride",
        "sums",
        "sums_stride",
        "scales",
        "counter",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged("summarize", cap=self.cap)

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, self.fields)
        n = ops.int("n")
        runs = (n + (SUMMARY_RUN - 1)) // SUMMARY_RUN
        never = f.const(float("-inf"), F32 * 16)

        with chunks(f, ops.ptr("counter"), ops.ptr("rows").load(I64) * runs, 1) as (item, _):
            r, run = item // runs, item % runs
            first = run * SUMMARY_RUN
            end = f.minimum(first + SUMMARY_RUN, n)
            logits = ops.ptr("logits").at(r * ops.int("stride"))
            maxima = ops.ptr("maxima").at(r * ops.int("maxima_stride"))
            peak = f.variable(never)

            def vector(at: Value) -> Value:
                """Sixteen logits; beyond the end, nothing."""
                lane = f.const_vector(range(16), I32)
                inside = lane < (end - at).trunc(I32)
                # What lies wholly beyond the end is not read: only a last vector of sixteen has room for
                # certain.
                return inside.select(logits.at((at < end).select(at, first), 4).load(F32 * 16), never)

            with f.loop(first, end, SUMMARY_BLOCK) as at:
                four = []
                for i in range(4):
                    v = vector(at + 16 * i)
                    if self.cap:
                        cap = ops.float("cap").splat(16)
                        v = cap * (1.0 - 2.0 / (exp(f, v * (2.0 / cap)) + 1.0))
                        with f.when(at + 16 * i < end):
                            logits.at(at + 16 * i, 4).store(v)
                        v = vector(at + 16 * i)
                    four.append(v)
                best = f.maximum(f.maximum(four[0], four[1]), f.maximum(four[2], four[3]))
                maxima.at(at // SUMMARY_BLOCK, 4).store(f.reduce_max(best))
                peak.set(f.maximum(peak.get(), best))
            top = f.reduce_max(peak.get())
            total = f.variable(f.const(0.0, F32 * 16))
            scale = ops.ptr("scales").at(r, 4).load(F32)
            with f.when(scale > 0.0), f.loop(first, end, 16) as at:
                total.set(total.get() + exp(f, (vector(at) - top) * scale))
            to = ops.ptr("sums").at(r * ops.int("sums_stride")).at(run, 16)
            to.store(top.to_float(F64), 0)
            to.store(f.reduce_add(total.get()).to_float(F64), 8)


@dataclass(frozen=True)
class Pick:
    """The best token of each row, int64[rows]: the lowest among equals. Reads what ``Summarize`` found."""

    fields = (
        "rows",
        "logits",
        "stride",
        "n",
        "maxima",
        "maxima_stride",
        "sums",
        "sums_stride",
        "best",
        "counter",
    )

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return "pick"

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel: among runs, then among the best run's blocks, then within the best block."""
        f, ops = begin(module, self.symbol, self.fields)
        n = ops.int("n")
        blocks = (n + (SUMMARY_BLOCK - 1)) // SUMMARY_BLOCK
        per_run = SUMMARY_RUN // SUMMARY_BLOCK

        def first_best(start: Value, stop: Value, score: Callable[[Value], Value]) -> Value:
            """The first index in [start, stop) whose score is the largest."""
            where, peak = f.variable(start), f.variable(score(start))
            with f.loop(start, stop) as i:
                value = score(i)
                better = value > peak.get()
                where.set(better.select(i, where.get()))
                peak.set(better.select(value, peak.get()))
            return where.get()

        def row(r: Value) -> None:
            sums, maxima, logits = (
                ops.ptr(name).at(r * ops.int(stride))
                for name, stride in (
                    ("sums", "sums_stride"),
                    ("maxima", "maxima_stride"),
                    ("logits", "stride"),
                )
            )
            runs = (n + (SUMMARY_RUN - 1)) // SUMMARY_RUN
            run = first_best(f.const(0, I64), runs, lambda i: sums.at(i, 16).load(F64))
            end = f.minimum((run + 1) * per_run, blocks)
            block = first_best(run * per_run, end, lambda i: maxima.at(i, 4).load(F32))
            end = f.minimum((block + 1) * SUMMARY_BLOCK, n)
            best = first_best(block * SUMMARY_BLOCK, end, lambda i: logits.at(i, 4).load(F32))
            ops.ptr("best").at(r, 8).store(best)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), False, row)
