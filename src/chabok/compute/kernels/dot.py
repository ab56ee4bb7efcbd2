"""Sums of 8-bit products, the one operation that differs between instruction sets.

A step multiplies 64 weight bytes (16 rows x 4 consecutive k) by 4 activation bytes that all rows share, and
adds the 4 products of each row to that row's 32-bit sum. Weights are unsigned with a zero point, activations
signed in -127..127. On AVX-512 or AVX-VNNI this is one instruction. Plain AVX2 has no such sum:
``vpmaddubsw`` adds pairs into 16 bits and saturates, so for weights of up to 7 bits as many pair sums are
added as 16 bits hold before they are widened, and for 8 bits the weight's sign is moved to the activation
first.
"""

from __future__ import annotations

from dataclasses import dataclass

from chabok.compute.emit import I1, I8, I16, I32, Function, Value
from chabok.compute.isa import ISA


@dataclass(frozen=True)
class Dot:
    """How one instruction set sums 8-bit products.

    bits: bits of a weight. signed: whether weights must be given as signed bytes (zero point taken away).
    """

    isa: ISA
    bits: int

    @property
    def signed(self) -> bool:
        """Whether 8-bit weights are taken signed: the unsigned form has 255 * 127 * 2 > 32767 there."""
        return self.bits == 8 and self.isa.dot in ("maddubs", "neon")

    @property
    def lanes(self) -> int:
        """Rows one step serves: 16 where the register file is wide, else 8 (half a strip)."""
        return 16 if self.isa.dot == "vnni512" else 8

    def group(self, f: Function, weights: list[Value], x: list[Value], start: Value | None) -> Value:
        """Sum over a run of steps: weights[j]: <4*lanes x i8>, x[j]: i32 (4 activations) -> <lanes x i32>.

        start: the sum to begin with, or None for zero.
        """
        lanes = self.lanes
        zero = f.const(0, I32 * lanes)
        if self.isa.dot == "vnni512" or self.isa.dot == "vnni256":
            acc = zero if start is None else start
            name = f"llvm.x86.avx512.vpdpbusd.{lanes * 32}"
            for w, b in zip(weights, x):
                acc = f.call(name, I32 * lanes, acc, w, b.splat(lanes).bitcast(I8 * (4 * lanes)))
            return acc
        if self.isa.dot == "maddubs":
            total = self._maddubs(f, weights, x)
            return total if start is None else total + start
        return self._neon(f, weights, x, zero if start is None else start)

    def _maddubs(self, f: Function, weights: list[Value], x: list[Value]) -> Value:
        ones = f.const(1, I16 * 16)
        largest = 128 if self.signed else 2**self.bits - 1
        fit = max(32767 // (largest * 127 * 2), 1)
        total: Value | None = None
        pairs: Value | None = None
        for j, (w, b) in enumerate(zip(weights, x), 1):
            b8 = b.splat(8).bitcast(I8 * 32)
            if self.signed:
                b8 = f.call("llvm.x86.avx2.psign.b", I8 * 32, b8, w)
                w = f.call("llvm.abs.v32i8", I8 * 32, w, f.const(0, I1))
            product = f.call("llvm.x86.avx2.pmadd.ub.sw", I16 * 16, w, b8)
            pairs = product if pairs is None else pairs + product
            if j % fit == 0 or j == len(weights):
                wide = f.call("llvm.x86.avx2.pmadd.wd", I32 * 8, pairs, ones)
                total = wide if total is None else total + wide
                pairs = None
        assert total is not None
        return total

    def _neon(self, f: Function, weights: list[Value], x: list[Value], acc: Value) -> Value:
        halves = [acc.shuffle(range(4)), acc.shuffle(range(4, 8))]
        for w, b in zip(weights, x):
            b8 = b.splat(4).bitcast(I8 * 16)
            for h in range(2):
                part = w.shuffle(range(16 * h, 16 * h + 16))
                halves[h] = f.call("llvm.aarch64.neon.sdot.v4i32.v16i8", I32 * 4, halves[h], part, b8)
        return halves[0].shuffle(range(8), halves[1])
