"""Kernels read nothing beyond the memory they are given: arrays end where the next page may not be read."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="protects pages as Linux does")

GUARDED = """
import ctypes, mmap
import numpy as np
from chabok.compute import isa, pool
from chabok.compute.blocks import FORMATS, pack
from chabok.compute.kernels.attention import Attention
from chabok.compute.kernels.experts import Choose
from chabok.compute.kernels.matmul import LINE, MatMul, scratch_bytes
from chabok.compute.kernels.quantize import Quantize
from chabok.compute.kernels.rows import Embed, Gate, Summarize
from chabok.compute.library import Library
from chabok.compute.program import Program

kept = []

def guarded(shape, dtype=np.float32, fill=0):
    n = int(np.prod(shape)) * np.dtype(dtype).itemsize
    size = -(-n // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    raw = np.frombuffer(memory, np.uint8)
    kept.append(memory)
    start = raw.ctypes.data
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), ctypes.c_size_t(mmap.PAGESIZE), 0)
    out = raw[size - n : size].view(dtype).reshape(shape)
    out[...] = fill
    return out

library = Library(isa.choose(ISA))
threads = pool.Pool(library, 1)

def run(kernel, **operands):
    program = Program()
    program.step(kernel, **operands)
    program.seal(library)
    threads.run(program)
"""

PRODUCT = """
fmt = FORMATS["{name}"]
k, n, rows = 256, 32, {rows}
weights = guarded(fmt.packed_bytes(n, k), np.uint8)
quantized = fmt.quantized
stride = k // 32 * LINE if quantized else 4 * k
scratch = guarded(scratch_bytes(rows), np.uint8)
run(MatMul("{name}", bias=True), rows=guarded(1, np.int64, rows), x=guarded((rows, stride), np.uint8),
    x_stride=stride, x_private=0, w=weights, strip_bytes=fmt.strip_bytes(k), pairs=1,
    share=0, chunk=1, units=k // fmt.unit, out=guarded((rows, n)),
    out_stride=4 * n, bias=guarded(n), scratch=scratch, scratch_stride=scratch.size)
"""
EMBED = """
fmt = FORMATS["{name}"]
table = guarded(fmt.packed_bytes(32, 256), np.uint8)
run(Embed("{name}"), rows=guarded(1, np.int64, 2), tokens=guarded(2, np.int32, 31), table=table,
    strip_bytes=fmt.strip_bytes(256), units=256 // fmt.unit, scale=1.0, out=guarded((2, 256)),
    out_stride=1024, out_private=0)
"""
QUANTIZE = """
run(Quantize(True), rows=guarded(1, np.int64, 3), x=guarded((3, 96), fill=1), x_stride=384, x_private=0, k=96,
    norm=guarded(96), eps=1e-5, out=guarded((3, 192), np.uint8), out_stride=192, out_private=0,
    line_stride=0)
run(Quantize(True, terms=2), rows=guarded(1, np.int64, 3), x=guarded((3, 96), fill=1), x_stride=384,
    x_private=0, k=96, norm=guarded(96), eps=1e-5, out=guarded((3, 384), np.uint8), out_stride=384,
    out_private=0, line_stride=192)
run(Gate("silu"), rows=guarded(1, np.int64, 3), gate=guarded((3, 96)), up=guarded((3, 96)), stride=384, k=96,
    out=guarded((3, 192), np.uint8), out_stride=192, out_private=0)
"""
CHOOSE = """
run(Choose(3), rows=guarded(1, np.int64, 5), logits=guarded((5, 32)), logits_stride=128, experts=17,
    ids=guarded((5, 3), np.int32), weights=guarded((5, 3)), private=0)
"""
SUMMARIZE = """
run(Summarize(cap={cap}), rows=guarded(1, np.int64, 2), logits=guarded((2, 288)), stride=4 * 288, n=269,
    cap=30.0, maxima=guarded((2, 5)), maxima_stride=20, sums=guarded((2, 1, 2), np.float64), sums_stride=16,
    scales=guarded(2, fill=1))
"""

FORMAT_NAMES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def stays_inside(code: str, isa_name: str) -> bool:
    done = subprocess.run([sys.executable, "-c", f"ISA = {isa_name!r}\n{GUARDED}{code}"], capture_output=True)
    assert done.returncode in (0, -11), done.stderr.decode()
    return done.returncode == 0


@pytest.mark.parametrize("isa_name", ["avx2", ""])
def test_products_and_embedding_stay_inside(isa_name: str) -> None:
    names = ["Q4_1", "Q8_0", "F16"]
    code = "".join(PRODUCT.format(name=name, rows=rows) for name in names for rows in (1, 3, 9))
    assert stays_inside(code + "".join(EMBED.format(name=name) for name in names), isa_name)


@pytest.mark.wide
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_products_and_embedding_of_every_format_stay_inside(name: str) -> None:
    for isa_name in ("avx2", ""):
        code = "".join(PRODUCT.format(name=name, rows=rows) for rows in (1, 2, 4, 5, 6, 13))
        assert stays_inside(code + EMBED.format(name=name), isa_name)


def test_rows_and_routes_stay_inside() -> None:
    assert stays_inside(QUANTIZE + CHOOSE, "")


@pytest.mark.parametrize("cap", [False, True])
def test_summaries_stay_inside(cap: bool) -> None:
    assert stays_inside(SUMMARIZE.format(cap=cap), "avx2")
