"""The header of one GGUF file: metadata and tensor descriptions, every number checked against the file.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), all little endian::

    "GGUF"  version u32  n_tensors u64  n_keys u64
    n_keys    x  key string, value type u32, value
    n_tensors x  name string, n_dims u32, n_dims x dim u64, tensor type u32, offset u64
    padding to the alignment, then the tensor data

A string is a u64 length and that many bytes; an array is an element type u32, a u64 count, the elements.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np

from chabok.checkpoints.ggml import TYPES
from chabok.checkpoints.strings import StringArray
from chabok.errors import CheckpointError

Value: TypeAlias = "str | int | float | bool | np.ndarray | StringArray | list[Value]"

# Far above anything real; they bound the time and memory a hostile file can cost.
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1
MAX_STRING_BYTES = 1 << 24
MAX_STRINGS = 1 << 24
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 512
MAX_DIMS = 4
MAX_NESTING = 4
MAX_NESTED_ITEMS = 1 << 16

_SCALARS = {  # value type code -> struct format
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about one tensor; ``n_bytes`` is -1 where the type's size is not known."""

    name: str
    type_code: int
    shape: tuple[int, ...]  # numpy order: the contiguous dimension last
    offset: int  # from the start of the file
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Everything before the tensor data of one file."""

    version: int
    metadata: dict[str, Value]
    tensors: list[TensorInfo]
    n_bytes: int  # where the header ends, before padding


def read_header(source: mmap, path: Path) -> Header:
    """Read and check the header of the mapped file ``source``; ``path`` is named in errors."""
    return _Reader(source, path).read()


class _Reader:
    """A position in a mapped file that never reads past the end, and names the field when it would."""

    def __init__(self, source: mmap, path: Path) -> None:
        self._map = source
        self._size = len(source)
        self._path = path
        self._at = 0
        self._nested_items = 0

    def read(self) -> Header:
        version = self._version()
        n_tensors = self._count("tensor count", each=24, limit=MAX_TENSORS)
        n_keys = self._count("metadata count", each=13, limit=MAX_KEYS)
        metadata: dict[str, Value] = {}
        for i in range(n_keys):
            key = self._string(f"metadata key {i}", MAX_KEY_BYTES)
            if key in metadata:
                self._fail(f"field '{key}'", "occurs twice")
            field = f"field '{key}'"
            metadata[key] = self._value(self._u32(field), field, 0)
        tensors = [self._tensor(i) for i in range(n_tensors)]
        end = self._at
        return Header(version, metadata, self._placed(tensors, self._alignment(metadata), end), end)

    def _fail(self, field: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path}: {field}: {problem}")

    # -- primitives

    def _take(self, n: int, field: str) -> int:
        """Advance by ``n`` bytes and return where they start."""
        start = self._at
        if n > self._size - start:
            self._fail(field, f"needs {n:,} bytes at offset {start:,}, but the file ends at {self._size:,}")
        self._at = start + n
        return start

    def _u32(self, field: str) -> int:
        return int.from_bytes(self._map[self._take(4, field) : self._at], "little")

    def _u64(self, field: str) -> int:
        return int.from_bytes(self._map[self._take(8, field) : self._at], "little")

    def _count(self, field: str, each: int, limit: int) -> int:
        """A count of things that take at least ``each`` bytes, so that the rest of the file bounds it."""
        count = self._u64(field)
        if count > limit:
            self._fail(field, f"{count:,} is not plausible (at most {limit:,})")
        if count * each > self._size - self._at:
            self._fail(field, f"{count:,} do not fit in the {self._size - self._at:,} bytes that follow")
        return count

    def _string(self, field: str, limit: int) -> str:
        n = self._u64(field)
        if n > limit:
            self._fail(field, f"a string of {n:,} bytes is not plausible here (at most {limit:,})")
        raw = self._map[self._take(n, field) : self._at]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(field, f"is not valid UTF-8 ({raw[:40]!r})")

    # -- metadata

    def _version(self) -> int:
        if self._size < 24 or self._map[:4] != b"GGUF":
            self._fail("magic", f"not a GGUF file{_what_it_is(self._map[:64])}")
        self._at = 4
        version = self._u32("version")
        if version in (2, 3):
            return version
        if version & 0xFFFF == 0:
            self._fail("version", "a big-endian GGUF file; only little-endian files are supported")
        if version == 1:
            self._fail("version", "GGUF version 1 is not supported; convert the model again (version 2 or 3)")
        self._fail("version", f"GGUF version {version} is not known; supported: 2 and 3")

    def _value(self, kind: int, field: str, depth: int) -> Value:
        if kind == _STRING:
            return self._string(field, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(field, depth)
        form = _SCALARS.get(kind)
        if form is None:
            self._fail(field, f"value type {kind} is not known")
        value: int | float
        (value,) = struct.unpack_from(form, self._map, self._take(struct.calcsize(form), field))
        if kind != _BOOL:
            return value
        if value > 1:
            self._fail(field, f"a boolean must be 0 or 1, not {value}")
        return bool(value)

    def _array(self, field: str, depth: int) -> Value:
        kind = self._u32(field)
        if kind == _STRING:
            return self._strings(self._count(field, each=8, limit=MAX_STRINGS), field)
        if kind == _ARRAY:
            if depth + 1 >= MAX_NESTING:
                self._fail(field, f"arrays are nested more than {MAX_NESTING} deep")
            count = self._count(field, each=12, limit=MAX_NESTED_ITEMS)
            self._nested_items += count
            if self._nested_items > MAX_NESTED_ITEMS:
                self._fail(field, f"more than {MAX_NESTED_ITEMS:,} nested arrays")
            return [self._array(field, depth + 1) for _ in range(count)]
        form = _SCALARS.get(kind)
        if form is None:
            self._fail(field, f"array element type {kind} is not known")
        dtype = np.dtype(form)
        count = self._count(field, each=dtype.itemsize, limit=1 << 40)
        start = self._take(count * dtype.itemsize, field)
        values = np.frombuffer(self._map, dtype, count, start) if count else np.empty(0, dtype)
        if kind != _BOOL:
            return values
        if count and values.max() > 1:
            self._fail(field, "a boolean must be 0 or 1")
        return values.view(np.bool_)

    def _strings(self, count: int, field: str) -> StringArray:
        # The only way to find string i+1 is through string i. This loop costs about 80 ns per string.
        length_at = struct.Struct("<Q").unpack_from
        source, at, last = self._map, self._at, self._size - 8
        ends: list[int] = []
        append = ends.append
        for i in range(count):
            if at > last:
                self._fail(field, f"the file ends before string {i:,} of {count:,}")
            at += 8 + length_at(source, at)[0]
            append(at)
        if at > self._size:
            self._fail(field, f"its strings run past the end of the file ({self._size:,} bytes)")
        stops = np.array(ends, np.int64)
        starts = np.empty_like(stops)
        starts[:1] = self._at + 8
        starts[1:] = stops[:-1] + 8
        self._at = at
        if count and int((stops - starts).max()) > MAX_STRING_BYTES:
            self._fail(field, f"a string of more than {MAX_STRING_BYTES:,} bytes is not plausible")
        return StringArray(source, starts, stops, f"{self._path}: {field}")

    # -- tensors

    def _alignment(self, metadata: dict[str, Value]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if isinstance(alignment, bool) or not isinstance(alignment, int):
            self._fail("field 'general.alignment'", "must be an integer")
        if alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 30:
            self._fail("field 'general.alignment'", f"{alignment} is not a power of two")
        return alignment

    def _tensor(self, index: int) -> TensorInfo:
        """One description; its offset is still relative to the start of the data."""
        name = self._string(f"name of tensor {index}", MAX_NAME_BYTES)
        field = f"tensor '{name}'"
        n_dims = self._u32(field)
        if not 1 <= n_dims <= MAX_DIMS:
            self._fail(field, f"has {n_dims} dimensions; 1 to {MAX_DIMS} are supported")
        dims = struct.unpack_from(f"<{n_dims}Q", self._map, self._take(8 * n_dims, field))
        code = self._u32(field)
        offset = self._u64(field)
        kind = TYPES.get(code)
        n_values = 1
        for dim in dims:  # Python integers do not overflow, but readers of the shape would
            n_values *= dim
        if n_values == 0 or n_values >= 1 << 62:
            self._fail(field, f"impossible shape {dims}")
        if kind is None:
            return TensorInfo(name, code, dims[::-1], offset, -1)
        if dims[0] % kind.block_size:
            self._fail(field, f"rows of {dims[0]:,} are not whole {kind.name} blocks of {kind.block_size}")
        return TensorInfo(name, code, dims[::-1], offset, n_values // kind.block_size * kind.block_bytes)

    def _placed(self, infos: list[TensorInfo], alignment: int, header_end: int) -> list[TensorInfo]:
        """The tensors with offsets from the start of the file, each inside it and none over another."""
        data = -(-header_end // alignment) * alignment
        placed: list[TensorInfo] = []
        names: set[str] = set()
        for info in infos:
            field = f"tensor '{info.name}'"
            if info.name in names:
                self._fail(field, "occurs twice")
            names.add(info.name)
            if info.offset % alignment:
                self._fail(
                    field, f"its offset {info.offset:,} is not a multiple of the alignment {alignment}"
                )
            start = data + info.offset
            if start + max(info.n_bytes, 0) > self._size:
                self._fail(
                    field,
                    f"its {max(info.n_bytes, 0):,} bytes at offset {start:,} lie outside the file of "
                    f"{self._size:,} bytes (incomplete download?)",
                )
            placed.append(TensorInfo(info.name, info.type_code, info.shape, start, info.n_bytes))
        before: TensorInfo | None = None
        for info in sorted(placed, key=lambda info: info.offset):
            if before is not None and before.offset + max(before.n_bytes, 1) > info.offset:
                self._fail(f"tensor '{info.name}'", f"overlaps tensor '{before.name}'")
            before = info
        return placed


def _what_it_is(start: bytes) -> str:
    """A hint for the files people mistake for GGUF."""
    if not start:
        return " (it is empty)"
    if start.startswith(b"version https://git-lfs"):
        return " (a Git LFS pointer: fetch the real file with `git lfs pull`)"
    if start[:2] == b"PK":
        return " (a zip archive, perhaps PyTorch weights)"
    if start[:4] in (b"tjgg", b"lmgg", b"fmgg", b"GGML", b"ggml", b"ggjt"):
        return " (an old GGML file from before August 2023: convert the model again)"
    if start[8:9] == b"{":
        return " (it looks like safetensors)"
    if start.lstrip()[:1] == b"<":
        return " (it looks like a web page: was the download a sign-in page?)"
    if not start.strip(b"\0"):
        return " (it begins with zeros: an incomplete download?)"
    return ""
