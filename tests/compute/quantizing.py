"""Runs the kernel that makes lines of bytes of activations, and reads lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tests.compute.harness import NOTHING, Array, Machine, count, place

from chabok.compute.kernels import matmul
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.memory import aligned

EPS = 1e-5


def quantize(
    machine: Machine,
    x: Array,
    norm: Array | None = None,
    *,
    to_bytes: bool = True,
    private: bool = False,
    terms: int = 1,
    threads: int = 1,
) -> NDArray[np.uint8]:
    """Rows as they come out, uint8[threads if private else 1, rows, terms * bytes of a line]."""
    rows, k = x.shape
    line = k // 32 * matmul.LINE if to_bytes else 4 * k
    stride = terms * line
    copies = threads if private else 1
    out = aligned(copies * rows * stride)
    out[:] = 0xAA
    machine.run(
        Quantize(norm is not None, to_bytes, private, terms), threads=threads,
        rows=count(rows), x=place(x), x_stride=4 * k, x_private=0, k=k,
        norm=NOTHING if norm is None else place(norm), eps=EPS, out=out, out_stride=stride,
        out_private=rows * stride if private else 0, line_stride=line,
    )  # fmt: skip
    return out.reshape(copies, rows, stride).copy()


class Lines:
    """The fields of lines: groups of 32 activations."""

    def __init__(self, raw: NDArray[np.uint8]) -> None:
        lines = raw.reshape(*raw.shape[:-1], -1, matmul.LINE)
        self.q = lines[..., :32].view(np.int8).astype(np.int64)
        self._lines = np.ascontiguousarray(lines)

    def floats(self, at: int) -> Array:
        return np.ascontiguousarray(self._lines[..., at : at + 4]).view(np.float32)[..., 0]

    def integers(self, at: int) -> NDArray[np.int32]:
        return np.ascontiguousarray(self._lines[..., at : at + 4]).view(np.int32)[..., 0]


def fields(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Lines without the bytes at their end that mean nothing."""
    return np.ascontiguousarray(raw.reshape(-1, matmul.LINE)[:, : matmul.X_HIGH32 + 4])
