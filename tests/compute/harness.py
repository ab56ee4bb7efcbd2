"""Runs kernels on numpy arrays, one program of one step at a time.

What a kernel's operands are called and how rows are described to it is known here and nowhere else in the
tests; the tests themselves speak of matrices, rows and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tests.oracles.quantize import encode

from chabok.compute.blocks import FORMATS, PAIR, Format, pack
from chabok.compute.isa import ISA
from chabok.compute.kernels import matmul
from chabok.compute.kernels.matmul import MatMul
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.library import Library
from chabok.compute.memory import aligned
from chabok.compute.pool import Pool
from chabok.compute.program import Kernel, Program

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]

QUANTIZED = [name for name, one in FORMATS.items() if one.quantized]
FLOATS = [name for name, one in FORMATS.items() if not one.quantized]
NOTHING = np.zeros(64, np.uint8)


class Machine:
    """The kernels of one instruction set, and pools of 1, 2, ... threads to run them."""

    def __init__(self, isa: ISA, cache: Path) -> None:
        self.isa = isa
        self.library = Library(isa, cache)
        self._pools: dict[int, Pool] = {}

    def pool(self, threads: int) -> Pool:
        if threads not in self._pools:
            self._pools[threads] = Pool(self.library, threads)
        return self._pools[threads]

    def run(self, kernel: Kernel, *, threads: int = 1, **operands: Any) -> None:
        program = Program()
        program.step(kernel, **operands)
        program.seal(self.library)
        self.pool(threads).run(program)


def place(values: NDArray[Any]) -> NDArray[Any]:
    """A copy at an aligned address."""
    memory = aligned(max(values.nbytes, 1))[: values.nbytes].view(values.dtype).reshape(values.shape)
    memory[...] = values
    return memory


def count(n: int) -> NDArray[np.int64]:
    """A number where kernels read it."""
    return place(np.array([n], np.int64))


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


# -- weights ------------------------------------------------------------------------------------------------


def raw_bytes(weight: Array, format_name: str) -> Bytes:
    """A matrix as it lies in a file: uint8, flat."""
    return np.ascontiguousarray(encode(weight, format_name)).reshape(-1).view(np.uint8)


def dequantized(raw: Bytes, format_name: str, k: int) -> Array:
    """What a file's bytes stand for, by the gguf package: float32[rows, k]."""
    kind = gguf.GGMLQuantizationType[format_name]
    rows = raw.reshape(-1, FORMATS[format_name].row_bytes(k))
    if format_name in ("F32", "F16"):
        return rows.view(np.float32 if format_name == "F32" else np.float16).astype(np.float32)
    return np.asarray(gguf.quants.dequantize(rows, kind), np.float32)


def packed(raw: Bytes, format_name: str, k: int) -> Bytes:
    fmt = FORMATS[format_name]
    rows = raw.size // fmt.row_bytes(k)
    out = aligned(fmt.packed_bytes(rows, k))
    pack(fmt, raw, rows, k, out)
    return out


def interleaved(gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
    """Rows of two matrices by turns of a strip of 16, as gated products take them: [2 * n, ...]."""
    n = len(gate)
    both = np.stack([gate.reshape(n // 16, 16, -1), up.reshape(n // 16, 16, -1)], axis=1)
    return np.ascontiguousarray(both.reshape(2 * n, *gate.shape[1:]))


# -- activations --------------------------------------------------------------------------------------------


def rounded(x: Array) -> NDArray[np.float64]:
    """Activations as 8-bit kernels see them: each run of 32 a multiple of its largest over 127."""
    groups = np.asarray(x, np.float32).reshape(-1, 32)
    peak = np.abs(groups).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak > 1e-30)
    scale = peak * np.float32(1 / 127)
    return (np.rint(groups * inverse).astype(np.float64) * scale).reshape(x.shape)


def activations(machine: Machine, x: Array, format_name: str) -> tuple[NDArray[Any], int]:
    """Rows in the form products with this format read, and the bytes of a row."""
    if not FORMATS[format_name].quantized:
        return place(x), 4 * x.shape[1]
    rows, k = x.shape
    out = aligned(rows * k // 32 * matmul.LINE)
    stride = k // 32 * matmul.LINE
    machine.run(
        Quantize(norm=False), rows=count(rows), x=place(x), x_stride=4 * k, x_private=0, k=k, norm=NOTHING,
        eps=0.0, out=out, out_stride=stride, out_private=0, line_stride=0,
    )  # fmt: skip
    return out, stride


def product(
    machine: Machine,
    format_name: str,
    raw: Bytes,
    x: Array,
    *,
    epilogue: str = "store",
    bias: Array | None = None,
    onto: Array | None = None,
    threads: int = 1,
) -> Array:
    """x[rows, k] times the transpose of a matrix [n, k] given as in a file: float32[rows, n or n / 2]."""
    fmt = FORMATS[format_name]
    rows, k = x.shape
    n = raw.size // fmt.row_bytes(k)
    pairs = -(-n // PAIR)
    width = n // 2 if epilogue in ("silu", "gelu") else n
    out = place(np.full((rows, pairs * PAIR), np.nan, np.float32))
    if onto is not None:
        out[:, :width] = onto
    padded = aligned(4 * pairs * PAIR).view(np.float32)
    if bias is not None:
        padded[: len(bias)] = bias
    scratch = aligned(threads * matmul.scratch_bytes(rows)).reshape(threads, -1)
    source, stride = activations(machine, x, format_name)
    machine.run(
        MatMul(format_name, epilogue, bias is not None), threads=threads,
        rows=count(rows), x=source, x_stride=stride, x_private=0, w=packed(raw, format_name, k),
        strip_bytes=fmt.strip_bytes(k), pairs=pairs, share=pairs // (2 * threads), chunk=2,
        units=k // fmt.unit, out=out, out_stride=out.strides[0], bias=padded, scratch=scratch,
        scratch_stride=scratch.strides[0],
    )  # fmt: skip
    return out[:, :width].copy()


def expert_product(
    machine: Machine,
    format_name: str,
    raw: Sequence[Bytes],
    x: Array,
    rows_of: Sequence[int],
    *,
    epilogue: str = "store",
    threads: int = 1,
) -> Array:
    """Each expert's matrix times its own consecutive rows of x; ``rows_of[e]`` rows belong to expert e."""
    fmt = FORMATS[format_name]
    k = x.shape[1]
    n = raw[0].size // fmt.row_bytes(k)
    pairs, width = -(-n // PAIR), n // 2 if epilogue in ("silu", "gelu") else n
    active = [(e, sum(rows_of[:e]), m, 0) for e, m in enumerate(rows_of) if m]
    out = place(np.full((len(x), pairs * PAIR), np.nan, np.float32))
    weights = place(np.concatenate([packed(one, format_name, k) for one in raw]))
    scratch = aligned(threads * matmul.scratch_bytes(len(x))).reshape(threads, -1)
    source, stride = activations(machine, x, format_name)
    machine.run(
        MatMul(format_name, epilogue, experts=True), threads=threads,
        rows=count(len(x)), x=source, x_stride=stride, x_private=0, w=weights, strip_bytes=fmt.strip_bytes(k),
        pairs=pairs, share=0, chunk=2, units=k // fmt.unit, out=out, out_stride=out.strides[0], bias=NOTHING,
        scratch=scratch, scratch_stride=scratch.strides[0], active=place(np.array(active, np.int64)),
        n_active=count(len(active)), active_private=0, expert_bytes=fmt.packed_bytes(n, k),
    )  # fmt: skip
    return out[:, :width].copy()


def format_of(name: str) -> Format:
    return FORMATS[name]
