"""Rows of float32 to GGUF blocks of any native type; the ``gguf`` package lacks the K types.

Plain nearest rounding: valid blocks with honest contents, not the best ones. What the blocks then mean is
always asked of ``gguf.quants.dequantize``.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf.quants import dequantize as decode
from gguf.quants import quantize
from numpy.typing import NDArray

Array = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SUPER_BLOCK = 256

__all__ = ["block_size", "decode", "encode"]


def block_size(type_name: str) -> int:
    """Values per block of a type: what a row's length must be a multiple of."""
    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]][0]


def encode(weight: Array, type_name: str) -> NDArray[np.generic]:
    """Encode along the last axis: float32 or float16 for those types, else uint8[..., bytes per row]."""
    weight = np.ascontiguousarray(weight, dtype=np.float32)
    if type_name in K_ENCODERS:
        blocks = K_ENCODERS[type_name](weight.reshape(-1, SUPER_BLOCK))
        return blocks.reshape(*weight.shape[:-1], -1)
    if type_name in ("F32", "F16"):
        return weight.astype(np.float32 if type_name == "F32" else np.float16)
    return quantize(weight, gguf.GGMLQuantizationType[type_name]).view(np.uint8)


def _scales_and_mins(x: Array, top: int) -> tuple[Bytes, Bytes, NDArray[np.uint8], Bytes]:
    """Affine rounding of [n, 8, 32] to 0..top: halves d and dmin as bytes, q, and the packed 6-bit scales."""
    low = np.minimum(x.min(axis=2), 0)
    scale, minimum = (x.max(axis=2) - low) / top, -low
    d = (scale.max(axis=1, keepdims=True) / 63).astype(np.float16)
    dmin = (minimum.max(axis=1, keepdims=True) / 63).astype(np.float16)
    sc = _levels(scale, d).astype(np.uint8)
    m = _levels(minimum, dmin).astype(np.uint8)
    step = (d.astype(np.float32) * sc)[:, :, None]
    offset = (dmin.astype(np.float32) * m)[:, :, None]
    q = np.clip(np.rint(_ratio(x + offset, step)), 0, top).astype(np.uint8)
    packed = np.concatenate(
        [
            sc[:, :4] | (sc[:, 4:] >> 4) << 6,
            m[:, :4] | (m[:, 4:] >> 4) << 6,
            (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    return d.view(np.uint8), dmin.view(np.uint8), q, packed


def _levels(x: Array, d: NDArray[np.float16]) -> Array:
    return np.clip(np.rint(_ratio(x, d.astype(np.float32))), 0, 63)


def _ratio(a: Array, b: Array) -> Array:
    b = np.broadcast_to(b, a.shape)
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)


def _q4_k(x: Array) -> Bytes:
    d, dmin, q, scales = _scales_and_mins(x.reshape(-1, 8, 32), 15)
    pairs = q.reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate([d, dmin, scales, low], axis=1)


def _q5_k(x: Array) -> Bytes:
    d, dmin, q, scales = _scales_and_mins(x.reshape(-1, 8, 32), 31)
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    low = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    bits = np.arange(8, dtype=np.uint8)[None, :, None]
    high = np.bitwise_or.reduce((q >> 4) << bits, axis=1)
    return np.concatenate([d, dmin, scales, high, low], axis=1)


def _q6_k(x: Array) -> Bytes:
    blocks = x.reshape(-1, 16, 16)
    scale = np.abs(blocks).max(axis=2) / 31
    d = (scale.max(axis=1, keepdims=True) / 127).astype(np.float16)
    sc = np.clip(np.rint(_ratio(scale, d.astype(np.float32))), 0, 127).astype(np.int8)
    step = (d.astype(np.float32) * sc)[:, :, None]
    q = (np.clip(np.rint(_ratio(blocks, step)), -32, 31) + 32).astype(np.uint8).reshape(-1, 2, 128)
    low = ((q[:, :, :64] & 15) | (q[:, :, 64:] & 15) << 4).reshape(-1, 128)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    high = np.bitwise_or.reduce((q.reshape(-1, 2, 4, 32) >> 4) << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([low, high, sc.view(np.uint8), d.view(np.uint8)], axis=1)


K_ENCODERS = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
