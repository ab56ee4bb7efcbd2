"""Quantized block formats: their sizes, and the strips that kernels read.

On disk a matrix [rows, k] is rows of blocks (ggml's formats). Packed, it is strips of 16 rows: for each unit
of k (32, or 256 for the K-formats) first the scales of the 16 rows, then their quantized values, laid out so
that one 64-byte vector holds 16 rows x 4 consecutive k (8 bits), or 16 rows x 8 (4 bits: low nibbles k..k+3,
high nibbles k+4..k+7). Bits above the fourth lie in vectors of their own. The layout is the same for every
instruction set.

    unit of 32:   d f16[16] | m f16[16]? | quants | high bits?
    unit of 256:  d f16[16] | dmin f16[16]? | 8 groups of ( scales u8[16 or 32] | mins u8[16]? | quants | high
    bits? ) floats:       [k][16]

Packing moves bits and changes none: unpack(pack(x)) equals dequantizing x as ggml does, to the bit. Rows are
padded with zeros to a multiple of 32, the rows a kernel takes at once.

Sources: ggml-common.h and gguf-py's quants.py (block layouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

STRIP = 16
"""Rows of a strip."""

PAIR = 32
"""Rows a kernel takes at once: two strips."""

GROUP = 32
"""Consecutive k that share a scale of the activations."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """A block format: a value is scale * (q - zero), or scale * q + minimum."""

    name: str
    block: int
    """Values in a block on disk."""
    block_bytes: int
    bits: int = 0
    """Bits of a quantized value; 0 for floats."""
    zero: int = 0
    """The q that stands for zero, where there is no minimum."""
    minimum: bool = False
    nested: bool = False
    """Whether scales are themselves quantized, in blocks of 256."""
    scales: int = 1
    """Scales in a group of 32."""

    @property
    def quantized(self) -> bool:
        """Whether values are integers with scales."""
        return self.bits > 0

    @property
    def high_bytes(self) -> int:
        """Bytes of the bits above the fourth in a packed group of 16 rows x 32."""
        return {5: 64, 6: 128}.get(self.bits, 0)

    @property
    def quant_bytes(self) -> int:
        """Bytes of the quantized values, less the high bits, in a packed group."""
        return 512 if self.bits == 8 else 256

    @property
    def group_head(self) -> int:
        """Bytes before the quants in a packed group."""
        if self.nested:
            return STRIP * (self.scales + self.minimum)
        return 2 * STRIP * (1 + self.minimum)

    @property
    def group_bytes(self) -> int:
        """Bytes of a packed group of 16 rows x 32."""
        return self.group_head + self.quant_bytes + self.high_bytes

    @property
    def unit(self) -> int:
        """k in a packed unit."""
        return self.block if self.quantized else 1

    @property
    def unit_head(self) -> int:
        """Bytes before the groups in a packed unit."""
        return 2 * STRIP * (1 + self.minimum) if self.nested else 0

    @property
    def unit_bytes(self) -> int:
        """Bytes of a packed unit of 16 rows."""
        if not self.quantized:
            return STRIP * self.block_bytes
        return self.unit_head + self.unit // GROUP * self.group_bytes

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values on disk. Raises ValueError if k does not fill whole blocks."""
        if k % self.block:
            raise ValueError(f"{self.name} holds rows in blocks of {self.block}, not {k} values")
        return k // self.block * self.block_bytes

    def strip_bytes(self, k: int) -> int:
        """Bytes of a packed strip of 16 rows."""
        return k // self.unit * self.unit_bytes

    def packed_bytes(self, rows: int, k: int) -> int:
        """Bytes of a packed matrix."""
        return -(-rows // PAIR) * 2 * self.strip_bytes(k)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("F32", 1, 4),
        Format("F16", 1, 2),
        Format("BF16", 1, 2),
        Format("Q4_0", 32, 18, bits=4, zero=8),
        Format("Q4_1", 32, 20, bits=4, minimum=True),
        Format("Q5_0", 32, 22, bits=5, zero=16),
        Format("Q5_1", 32, 24, bits=5, minimum=True),
        Format("Q8_0", 32, 34, bits=8, zero=128),
        Format("Q4_K", 256, 144, bits=4, minimum=True, nested=True),
        Format("Q5_K", 256, 176, bits=5, minimum=True, nested=True),
        Format("Q6_K", 256, 210, bits=6, zero=32, nested=True, scales=2),
    )
}


@dataclass
class _Parts:
    """A block of rows taken apart: q uint8[rows, k], and whichever scales the format has."""

    q: Bytes
    d: Bytes
    """f16 bytes [rows, units, 2]."""
    m: Bytes | None = None
    """f16 bytes [rows, units, 2]."""
    scales: Bytes | None = None
    """uint8 [rows, groups, format.scales]."""
    mins: Bytes | None = None
    """uint8 [rows, groups]."""


def _nibbles(qs: Bytes, run: int) -> Bytes:
    """Nibbles of runs of bytes: the run's low nibbles, then its high ones. [..., n] -> [..., 2n]."""
    runs = qs.reshape(*qs.shape[:-1], -1, 1, run)
    both = np.concatenate([runs & 15, runs >> 4], axis=-2)
    return both.reshape(*qs.shape[:-1], -1)


def _k_scales(raw: Bytes) -> tuple[Bytes, Bytes]:
    """The eight 6-bit scales and minimums in 12 bytes: uint8[..., 12] -> two uint8[..., 8]."""
    low, mid, high = raw[..., 0:4], raw[..., 4:8], raw[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 6) << 4)], axis=-1)
    return scales, mins


def _take_apart(format_: Format, raw: Bytes) -> _Parts:
    """raw: uint8[rows, blocks, block_bytes]."""
    rows, blocks = raw.shape[:2]
    name = format_.name

    def flat(q: NDArray[Any]) -> Bytes:
        return q.reshape(rows, -1).astype(np.uint8, copy=False)

    if name in ("Q4_0", "Q4_1"):
        head = 2 if name == "Q4_0" else 4
        return _Parts(flat(_nibbles(raw[..., head:], 16)), raw[..., :2], raw[..., 2:4] if head == 4 else None)
    if name in ("Q5_0", "Q5_1"):
        head = 2 if name == "Q5_0" else 4
        high = np.unpackbits(raw[..., head : head + 4], axis=-1, bitorder="little")
        return _Parts(
            flat(_nibbles(raw[..., head + 4 :], 16) | (high << 4)),
            raw[..., :2],
            raw[..., 2:4] if head == 4 else None,
        )
    if name == "Q8_0":
        return _Parts(flat(raw[..., 2:] ^ 128), raw[..., :2])
    if name in ("Q4_K", "Q5_K"):
        scales, mins = _k_scales(raw[..., 4:16])
        q: NDArray[Any] = _nibbles(raw[..., 16 if name == "Q4_K" else 48 :], 32)
        if name == "Q5_K":
            high_bits: NDArray[Any] = (raw[..., 16:48, None] >> np.arange(8, dtype=np.uint8)) & 1
            q = q | (np.swapaxes(high_bits, -1, -2).reshape(rows, blocks, 256) << 4)
        return _Parts(
            flat(q), raw[..., :2], raw[..., 2:4], scales.reshape(rows, -1, 1), mins.reshape(rows, -1)
        )
    if name == "Q6_K":
        low, high = raw[..., :128], raw[..., 128:192]
        ql = _nibbles(low, 64)
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        qh = ((high.reshape(rows, blocks, 2, 1, 32) >> shifts) & 3).reshape(rows, blocks, 256)
        return _Parts(flat(ql | (qh << 4)), raw[..., 208:210], None, raw[..., 192:208].reshape(rows, -1, 2))
    raise ValueError(f"{name} is not a quantized format")


def pack(format_: Format, raw: Bytes, rows: int, k: int, out: Bytes) -> None:
    """Rearrange a matrix into strips.

    raw: uint8[rows * row_bytes(k)], as on disk. out: uint8[packed_bytes(rows, k)], every byte of which is
    written.
    """
    step = max(PAIR, (1 << 21) // max(k, 1) // PAIR * PAIR)
    row_bytes, pair_bytes = format_.row_bytes(k), 2 * format_.strip_bytes(k)
    for what, found, wanted in (
        ("is", raw.size, rows * row_bytes),
        ("packed is", out.size, format_.packed_bytes(rows, k)),
    ):
        if found != wanted:
            raise ValueError(f"a {format_.name} matrix of {rows} x {k} {what} {wanted} bytes, not {found}")
    for first in range(0, rows, step):
        n = min(step, rows - first)
        part = raw[first * row_bytes : (first + n) * row_bytes].reshape(n, -1)
        padded = -(-n // PAIR) * PAIR
        if padded != n:
            part = np.concatenate([part, np.zeros((padded - n, row_bytes), np.uint8)])
        start = first // PAIR * pair_bytes
        _pack_rows(format_, part, k, out[start : start + padded // PAIR * pair_bytes])


def _pack_rows(format_: Format, raw: Bytes, k: int, out: Bytes) -> None:
    rows = len(raw)
    strips = rows // STRIP
    if not format_.quantized:
        values = raw.reshape(strips, STRIP, k, format_.block_bytes)
        out.reshape(strips, k, STRIP, format_.block_bytes)[:] = values.swapaxes(1, 2)
        return
    parts = _take_apart(format_, raw.reshape(rows, -1, format_.block_bytes))
    units, per_unit = k // format_.unit, format_.unit // GROUP
    unit = out.reshape(strips, units, format_.unit_bytes)

    def halves(array: Bytes) -> Bytes:  # f16 bytes [rows, units, 2] -> [strips, units, 32]
        return array.reshape(strips, STRIP, units, 2).swapaxes(1, 2).reshape(strips, units, 2 * STRIP)

    if format_.nested:
        unit[..., : 2 * STRIP] = halves(parts.d)
        if parts.m is not None:
            unit[..., 2 * STRIP : 4 * STRIP] = halves(parts.m)
    groups = unit[..., format_.unit_head :].reshape(strips, units, per_unit, format_.group_bytes)
    at = 0

    def put(array: NDArray[Any]) -> None:
        nonlocal at
        size = array.shape[-1]
        groups[..., at : at + size] = array
        at += size

    if format_.nested:
        assert parts.scales is not None
        s = parts.scales.reshape(strips, STRIP, units, per_unit, format_.scales)
        put(s.transpose(0, 2, 3, 4, 1).reshape(strips, units, per_unit, -1))
        if parts.mins is not None:
            put(parts.mins.reshape(strips, STRIP, units, per_unit).transpose(0, 2, 3, 1))
    else:
        put(halves(parts.d)[:, :, None])
        if parts.m is not None:
            put(halves(parts.m)[:, :, None])
    shape = (strips, units, per_unit)
    # Axes: strip, row, unit, group, vector j (4 consecutive k), c.
    q = parts.q.reshape(strips, STRIP, units, per_unit, 8, 4)
    if format_.bits == 8:
        put(q.transpose(0, 2, 3, 4, 1, 5).reshape(*shape, -1))
        return
    low = q & 15
    nibbles = low[..., 0::2, :] | (low[..., 1::2, :] << 4)
    put(nibbles.transpose(0, 2, 3, 4, 1, 5).reshape(*shape, -1))
    if format_.bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        bits = np.bitwise_or.reduce((q >> 4) << shifts, axis=4)
        put(bits.transpose(0, 2, 3, 1, 4).reshape(*shape, -1))
    elif format_.bits == 6:
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
        pairs = ((q >> 4).reshape(strips, STRIP, units, per_unit, 2, 4, 4) << shifts).sum(
            axis=5, dtype=np.uint8
        )
        put(pairs.transpose(0, 2, 3, 4, 1, 5).reshape(*shape, -1))


def unpack(format_: Format, packed: Bytes, rows: int, k: int) -> NDArray[np.float32]:
    """The matrix a packed one stands for: float32[rows, k], equal to ggml's dequantization to the bit."""
    strips = -(-rows // PAIR) * 2
    if not format_.quantized:
        raw = (
            packed.reshape(strips, k, STRIP, format_.block_bytes)
            .swapaxes(1, 2)
            .reshape(strips * STRIP, -1)[:rows]
        )
        return widen(format_, np.ascontiguousarray(raw))
    units, per_unit = k // format_.unit, format_.unit // GROUP
    unit = packed.reshape(strips, units, format_.unit_bytes)
    groups = unit[..., format_.unit_head :].reshape(strips, units, per_unit, format_.group_bytes)
    at = format_.group_head
    quants = groups[..., at : at + format_.quant_bytes].reshape(strips, units, per_unit, -1, STRIP, 4)
    high = groups[..., at + format_.quant_bytes :]
    q: NDArray[Any]
    if format_.bits == 8:
        q = quants
    else:
        q = np.stack([quants & 15, quants >> 4], axis=4).reshape(strips, units, per_unit, 8, STRIP, 4)
    if format_.bits == 5:
        shifts = np.arange(8, dtype=np.uint8)[:, None, None]
        q = q | (((high.reshape(strips, units, per_unit, 1, STRIP, 4) >> shifts) & 1) << 4)
    elif format_.bits == 6:
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        bits = (high.reshape(strips, units, per_unit, 2, 1, STRIP, 4) >> shifts) & 3
        q = q | (bits.reshape(strips, units, per_unit, 8, STRIP, 4) << 4)

    def half(array: Bytes) -> NDArray[np.float32]:
        return np.ascontiguousarray(array).view(np.float16).astype(np.float32)

    # Axes: strip, unit, group, vector j, row, c; scales per half of a group where the format has two.
    values = (
        q.astype(np.float32) if format_.minimum else (q.astype(np.int16) - format_.zero).astype(np.float32)
    )
    minimum: NDArray[np.float32] | None = None
    if format_.nested:
        d = half(unit[..., : 2 * STRIP])[:, :, None, None]
        raw_scales = groups[..., : STRIP * format_.scales].reshape(
            strips, units, per_unit, format_.scales, STRIP
        )
        typed = raw_scales.view(np.int8) if format_.scales == 2 else raw_scales
        scale = np.repeat(d * typed.astype(np.float32), 8 // format_.scales, axis=3)
        if format_.minimum:
            mins = groups[..., STRIP * format_.scales : format_.group_head].astype(np.float32)
            minimum = -(half(unit[..., 2 * STRIP : 4 * STRIP])[:, :, None] * mins)[:, :, :, None]
    else:
        scale = half(groups[..., : 2 * STRIP])[:, :, :, None]
        if format_.minimum:
            minimum = half(groups[..., 2 * STRIP : 4 * STRIP])[:, :, :, None]
    values = values * scale[..., None]
    if minimum is not None:
        values = values + minimum[..., None]
    return np.ascontiguousarray(values.transpose(0, 4, 1, 2, 3, 5).reshape(strips * STRIP, k)[:rows])


def widen(format_: Format, raw: Bytes) -> NDArray[np.float32]:
    """Unquantized values as float32; raw: uint8[..., n * block_bytes]."""
    if format_.name == "F32":
        return raw.view(np.float32)
    if format_.name == "F16":
        return raw.view(np.float16).astype(np.float32)
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
