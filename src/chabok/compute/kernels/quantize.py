"""Rows of floats become lines of 8-bit activations, optionally normalized first."""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import F32, I8, I32, I64, Function, Module, Value
from chabok.compute.isa import ISA
from chabok.compute.kernels import matmul
from chabok.compute.kernels.common import begin, flagged, over_rows

FIELDS = (
    "rows",
    "x",
    "x_stride",
    "x_private",
    "k",
    "norm",
    "eps",
    "out",
    "out_stride",
    "out_private",
    "line_stride",
    "counter",
)


def root_mean_square(f: Function, x: Value, k: Value, eps: Value) -> Value:
    """1 / sqrt(mean of squares + eps) of k floats, k a multiple of 16; sums in four lanesful to overlap."""
    zero = f.const(0.0, F32 * 16)
    acc = [f.variable(zero) for _ in range(2)]
    with f.loop(0, k, 32) as i:
        for half in range(2):
            v = x.at(i, 4).load(F32 * 16, 64 * half)
            acc[half].set(f.fma(v, v, acc[half].get()))
    total = f.reduce_add(acc[0].get() + acc[1].get())
    return f.const(1.0, F32) / f.sqrt(total / k.to_float() + eps)


def quantize_group(f: Function, a: Value, b: Value, line: Value) -> tuple[Value, Value]:
    """Write 32 floats (two vectors of 16) as a line: bytes, scale and the sums that zero points and minimums
    need. Returns what rounding lost."""
    peak = f.reduce_max(f.maximum(f.abs(a), f.abs(b)))
    scale = peak * (1.0 / 127.0)
    inverse = (peak > 1e-30).select(f.const(127.0, F32) / peak, 0.0)
    sums, lost = [], []
    for half, v in enumerate((a, b)):
        q = f.round_even(v * inverse).to_int(I32)
        line.store(q.trunc(I8), 16 * half)
        sums.append(f.reduce_add(q))
        lost.append(f.fma(q.to_float(), -scale.splat(16), v))
    total = sums[0] + sums[1]
    line.store(scale, matmul.X_SCALE)
    line.store(scale * total.to_float(), matmul.X_MIN)
    for zero, field in matmul.ZERO_FIELD.items():
        line.store(total * -zero, field)
    line.store(sums[0] * -32, matmul.X_LOW32)
    line.store(sums[1] * -32, matmul.X_HIGH32)
    return lost[0], lost[1]


@dataclass(frozen=True)
class Quantize:
    """x float32[rows, k] -> lines of 8-bit activations, or floats if not ``to_bytes``.

    norm: multiply by norm[k] / rms(x) first. private: every thread does all rows, each into its own copy
    (cheaper than a barrier for few rows); otherwise rows are shared out. terms: 2 writes a second line,
    ``line_stride`` bytes on, of what rounding the first one lost: fifteen bits in all.
    """

    norm: bool
    to_bytes: bool = True
    private: bool = False
    terms: int = 1

    fields = FIELDS

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(
            "quantize", norm=self.norm, float=not self.to_bytes, private=self.private, two=self.terms == 2
        )

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        f, ops = begin(module, self.symbol, FIELDS)
        out = ops.ptr("out").at(f.args[1] * ops.int("out_private"))
        source = ops.ptr("x").at(f.args[1] * ops.int("x_private"))
        k, norm = ops.int("k"), ops.ptr("norm")

        def row(r: Value) -> None:
            x, to = source.at(r * ops.int("x_stride")), out.at(r * ops.int("out_stride"))
            factor = root_mean_square(f, x, k, ops.float("eps")) if self.norm else None
            with f.loop(0, k, 32) as i:
                vectors = []
                for half in range(2):
                    v = x.at(i, 4).load(F32 * 16, 64 * half)
                    if factor is not None:
                        v = v * factor * norm.at(i, 4).load(F32 * 16, 64 * half)
                    vectors.append(v)
                if self.to_bytes:
                    line = to.at(i, 2)
                    lost = quantize_group(f, vectors[0], vectors[1], line)
                    if self.terms == 2:
                        quantize_group(f, *lost, line.at(ops.int("line_stride")))
                else:
                    for half in range(2):
                        to.at(i, 4).store(vectors[half], 64 * half)

        over_rows(f, ops.ptr("rows").load(I64), ops.ptr("counter"), self.private, row)
