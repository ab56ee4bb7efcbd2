"""Products of activations with packed weights: out[row, n] = sum over k of x[row, k] * w[n, k].

A chunk of work is some pairs of strips (32 outputs) for all rows of the batch. Few rows: each strip is
streamed once, unpacked in registers. Many rows: a pair of strips is unpacked into a panel that stays in the
nearest caches, a run of k at a time, and tiles of rows pass over it.

Whichever way, an output is computed by the same operations in the same order: the integer sum of a group of
32 is exact, then ``acc = fma(float(sum) * x_scale, w_scale, acc)`` and, with a minimum, ``acc = fma(w_min,
x_scale * x_sum, acc)``, groups in order of k. So a row's result does not depend, to the bit, on what else is
in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.blocks import FORMATS, STRIP
from chabok.compute.emit import Module
from chabok.compute.isa import ISA
from chabok.compute.kernels.common import flagged

LINE = 64
"""Bytes of a quantized group of activations: 32 signed bytes, then eight 32-bit fields."""

X_SCALE, X_MIN, X_ZERO8, X_ZERO16, X_ZERO128, X_LOW32, X_HIGH32 = (32 + 4 * i for i in range(7))
"""Fields of a line: scale f32; scale * sum f32; -8, -16, -128 times the sum, i32; -32 times the sums of each
half, i32."""

ZERO_FIELD = {8: X_ZERO8, 16: X_ZERO16, 128: X_ZERO128}

PANEL_GROUPS = 16
"""Groups of k in a panel: two strips of it take 20 KB, which leaves room for activations in a 32 KB first-
level cache."""

PANEL_GROUP_BYTES = 512 + 128
"""Bytes of a panel's group of one strip: 512 weights, then two vectors of 16 floats (scales and minimums, or
two scales)."""

EPILOGUES = ("store", "add", "silu", "gelu")
"""What becomes of a sum: stored, added to what is there, or (weights interleaved by strips) act(gate) * up
stored."""

FIELDS = ("rows", "x", "x_stride", "x_private", "w", "strip_bytes", "pairs", "share", "chunk", "units", "out",
          "out_stride", "bias", "counter", "scratch", "scratch_stride")  # fmt: skip

ACTIVE_BYTES = 32
"""An active expert: its number, its first sorted row, its rows, 64 bits each, padded."""

EXPERT_FIELDS = ("active", "n_active", "active_private", "expert_bytes")
"""More operands: entries of active experts and their number, each thread's copies ``active_private`` bytes
apart."""

PREFETCH = 6144
"""How far ahead of what it multiplies a stream of weights is asked for, in bytes: one core alone then draws a
third more from memory than its own prefetchers bring, and most where unpacking takes long."""

FEW_ROWS = 5
"""Up to this many rows are streamed directly; beyond, a panel pays."""


def scratch_bytes(max_rows: int) -> int:
    """Bytes of scratch a thread needs: a panel of two strips and the partial sums of every row."""
    return 2 * PANEL_GROUPS * PANEL_GROUP_BYTES + max_rows * 2 * STRIP * 4


@dataclass(frozen=True)
class MatMul:
    """The product kernel of one weight format and one epilogue; with ``bias``, a float32[n] is added.

    terms: lines that make up a row of activations, one after the other; their products are added (see
    ``Quantize``). experts: weights are one matrix per expert, and each active expert (see ``experts.Sort``)
    takes its own rows.
    """

    format: str
    epilogue: str = "store"
    bias: bool = False
    experts: bool = False
    terms: int = 1

    def __post_init__(self) -> None:
        if self.epilogue not in EPILOGUES or (self.bias and self.epilogue in ("silu", "gelu")):
            raise ValueError(f"no product ends with {self.epilogue!r}{' and a bias' if self.bias else ''}")

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the operands."""
        return FIELDS + EXPERT_FIELDS if self.experts else FIELDS

    @property
    def symbol(self) -> str:
        """Name of the function."""
        return flagged(
            f"matmul_{self.format}_{self.epilogue}", bias=self.bias, experts=self.experts, two=self.terms == 2
        )

    def emit(self, module: Module, isa: ISA) -> None:
        """Write the kernel."""
        if FORMATS[self.format].quantized:
            from chabok.compute.kernels.quantized import Quantized

            Quantized(self, module, isa).emit()
        else:
            from chabok.compute.kernels.floats import Floats

            Floats(self, module, isa).emit()
