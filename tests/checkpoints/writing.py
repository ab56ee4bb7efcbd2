"""A small GGUF writer for tests: writes what it is told, right or wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10


@dataclass(frozen=True)
class Typed:
    """A metadata value with its type code; arrays are ``Typed(ARRAY, (element code, [values]))``."""

    code: int
    value: object


@dataclass(frozen=True)
class RawTensor:
    name: str
    code: int
    dims: Sequence[int]  # as in the file: the contiguous dimension first
    data: bytes
    offset: int | None = None  # None: after the one before


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def typed(value: object) -> Typed:
    """The type a Python value is written as."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, bool):
        return Typed(BOOL, value)
    if isinstance(value, int):
        return Typed(UINT32, value)
    if isinstance(value, float):
        return Typed(FLOAT32, value)
    if isinstance(value, str | bytes):
        return Typed(STRING, value)
    assert isinstance(value, list)
    return Typed(ARRAY, (typed(value[0]).code if value else UINT32, value))


def payload(value: Typed) -> bytes:
    if value.code == STRING:
        return string(value.value)  # type: ignore[arg-type]
    if value.code == ARRAY:
        code, items = value.value  # type: ignore[misc]
        parts = (payload(typed(item) if code == ARRAY else Typed(code, item)) for item in items)
        return struct.pack("<IQ", code, len(items)) + b"".join(parts)
    return struct.pack("<" + FORMATS[value.code], value.value)


def gguf_bytes(
    metadata: Mapping[str, object] | Sequence[tuple[str, object]] = (),
    tensors: Sequence[RawTensor] = (),
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    pairs = list(metadata.items()) if isinstance(metadata, Mapping) else list(metadata)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    for key, value in pairs:
        as_typed = typed(value)
        head += string(key) + struct.pack("<I", as_typed.code) + payload(as_typed)
    data = b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        head += string(tensor.name) + struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
        head += struct.pack("<IQ", tensor.code, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    return head + bytes(-len(head) % alignment if tensors else 0) + data


def small_model(seed: int = 0) -> bytes:
    """A valid file with every kind of metadata and some tensors, about 2 kB."""
    rng = np.random.default_rng(seed)

    def noise(n: int) -> bytes:
        return rng.integers(0, 256, n, np.uint8).tobytes()

    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "general.name": "سلام 你好 🙂",
        "general.alignment": 32,
        "llama.block_count": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.flag": True,
        "llama.long": Typed(UINT64, 1 << 40),
        "llama.double": Typed(12, 1e-300),
        "tokenizer.ggml.tokens": ["a", "", "bc", "\0", "ن", "x" * 40],
        "tokenizer.ggml.scores": [0.0, -1.5, 2.5],
        "tokenizer.ggml.token_type": Typed(ARRAY, (INT32, [1, 3, -1])),
        "llama.bools": [True, False],
        "llama.nested": Typed(ARRAY, (ARRAY, [[1, 2], [3]])),
        "llama.empty": Typed(ARRAY, (STRING, [])),
    }
    tensors = [
        RawTensor("token_embd.weight", 2, (64, 4), noise(64 * 4 // 32 * 18)),
        RawTensor("blk.0.attn_norm.weight", 0, (16,), noise(64)),
        RawTensor("blk.0.ffn_up.weight", 12, (256, 2), noise(288)),
        RawTensor("experts", 1, (8, 2, 3), noise(96)),
    ]
    return gguf_bytes(metadata, tensors)


def write_shards(folder: Path, n: int = 3, stem: str = "model") -> list[Path]:
    """A valid split model of ``n`` files with one tensor each."""
    paths = []
    for i in range(n):
        metadata: dict[str, object] = {"general.architecture": "llama"} if i == 0 else {}
        metadata |= {
            "split.no": Typed(2, i),
            "split.count": Typed(2, n),
            "split.tensors.count": Typed(INT32, n),
        }
        paths.append(folder / f"{stem}-{i + 1:05}-of-{n:05}.gguf")
        paths[-1].write_bytes(gguf_bytes(metadata, [RawTensor(f"t{i}", 0, (4,), bytes([i] * 16))]))
    return paths
