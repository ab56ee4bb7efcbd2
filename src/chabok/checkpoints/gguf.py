"""GGUF model files: opened, mapped, checked, and read only where they are touched."""

from __future__ import annotations

import hashlib
import math
import mmap
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from chabok.checkpoints.ggml import TYPES
from chabok.checkpoints.header import Header, TensorInfo, Value, read_header
from chabok.checkpoints.strings import StringArray
from chabok.errors import CheckpointError

__all__ = ["GGUF", "StringArray", "Tensor", "Value"]

T = TypeVar("T", str, int, float, bool, np.ndarray, StringArray, list[Any])

_MISSING: Any = object()
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_KINDS: dict[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    np.ndarray: "an array of numbers",
    StringArray: "an array of strings",
    list: "a list of arrays",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor of a model file; ``shape`` in numpy order, e.g. ``(rows, k)`` or ``(experts, rows, k)``."""

    name: str
    type: str  # "Q4_K", "F32" ..., or "type 99" where the code is not known
    shape: tuple[int, ...]
    offset: int  # bytes from the start of its file
    path: Path  # of its file, or shard
    _map: mmap.mmap
    _n_bytes: int

    @property
    def n_bytes(self) -> int:
        """Bytes of its data; raises CheckpointError for a type of unknown size."""
        if self._n_bytes < 0:
            raise CheckpointError(
                f"{self.path}: tensor '{self.name}' has {self.type}, which is not a known tensor type"
            )
        return self._n_bytes

    @property
    def n_values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def data(self) -> np.ndarray:
        """Its bytes, uint8[n_bytes], a read-only view on the mapped file."""
        return np.frombuffer(self._map, np.uint8, self.n_bytes, self.offset)


class GGUF:
    """An open model file, all shards of a split one as if they were one.

    ``metadata`` holds plain values, ``np.ndarray`` views for arrays of numbers and ``StringArray`` for
    arrays of strings; ``tensors`` are in the order of the file. The file stays mapped as long as the
    object or any view from it is alive.
    """

    def __init__(self, shards: list[tuple[Path, mmap.mmap, Header]]) -> None:
        """Use ``GGUF.open``. ``shards``: path, map and checked header of each file, the first one first."""
        self.path = shards[0][0]
        self.paths = [path for path, _, _ in shards]
        self.n_bytes = sum(len(source) for _, source, _ in shards)
        self.version = shards[0][2].version
        self.metadata: Mapping[str, Value] = MappingProxyType(shards[0][2].metadata)
        self._shards = shards
        tensors: dict[str, Tensor] = {}
        for path, source, header in shards:
            for info in header.tensors:
                if info.name in tensors:
                    first = tensors[info.name].path.name
                    raise CheckpointError(f"{path}: tensor '{info.name}': occurs in {first} too")
                tensors[info.name] = _tensor(info, path, source)
        self.tensors: Mapping[str, Tensor] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | Path) -> GGUF:
        """Map and check the file at ``path``; for a split model, its first shard."""
        path = Path(path)
        source, header = _map(path)
        n_shards = header.metadata.get("split.count", 1)
        if not isinstance(n_shards, int) or n_shards <= 1:
            return cls([(path, source, header)])
        return cls(_all_shards(path, source, header, n_shards))

    def __repr__(self) -> str:
        return f"GGUF({str(self.path)!r}, {len(self.tensors)} tensors, {self.n_bytes:,} bytes)"

    def get(
        self,
        key: str,
        kind: type[T],
        default: T = _MISSING,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> T:
        """The metadata value ``key`` as ``kind``: str, int, float, bool, np.ndarray, StringArray or list.

        Without a ``default`` the key must be there. Integers serve as floats; numbers must be finite and
        within ``at_least`` and ``at_most``. Anything else is a CheckpointError naming file and field.
        """
        value = self.metadata.get(key)
        if value is None:
            if default is _MISSING:
                raise self.error(key, f"is missing; it must be {_KINDS[kind]}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(key, f"must be {_KINDS[kind]}, not {_described(value)}")
        if isinstance(value, int | float):
            if not math.isfinite(value):
                raise self.error(key, f"must be a finite number, not {value}")
            if (at_least is not None and value < at_least) or (at_most is not None and value > at_most):
                low = "" if at_least is None else f"at least {at_least}"
                high = "" if at_most is None else f"at most {at_most}"
                raise self.error(key, f"is {value}; it must be {' and '.join(filter(None, (low, high)))}")
        return value

    def per_layer(self, key: str, n_layers: int, default: int = _MISSING, *, at_least: int = 0) -> list[int]:
        """An integer per layer: an array of ``n_layers``, or one integer that holds for all."""
        value = self.metadata.get(key)
        if not isinstance(value, np.ndarray):
            return [self.get(key, int, default, at_least=at_least)] * n_layers
        if not (np.issubdtype(value.dtype, np.integer) or value.dtype == np.bool_):
            raise self.error(key, f"must be integers, not {_described(value)}")
        if len(value) != n_layers:
            raise self.error(key, f"has {len(value)} values for {n_layers} layers")
        numbers = [int(number) for number in value]
        if min(numbers, default=at_least) < at_least:
            raise self.error(key, f"holds {min(numbers)}; it must be at least {at_least}")
        return numbers

    def error(self, key: str, problem: str) -> CheckpointError:
        """The error to raise about the metadata field ``key``; names this file."""
        return CheckpointError(f"{self.path}: field '{key}': {problem}")

    @property
    def architecture(self) -> str:
        """The model family, e.g. "llama" or "qwen3moe"."""
        name = self.get("general.architecture", str)
        if not name.isprintable() or len(name) > 64:
            raise self.error("general.architecture", f"is not a name: {name!r:.80}")
        return name

    @property
    def n_values(self) -> int:
        """How many numbers all tensors hold together: the parameter count."""
        return sum(tensor.n_values for tensor in self.tensors.values())

    def type_histogram(self) -> dict[str, tuple[int, int]]:
        """For each tensor type, how many tensors have it and how many bytes these take; largest first."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for tensor in self.tensors.values():
            count[tensor.type] += 1
            size[tensor.type] += max(tensor._n_bytes, 0)
        return {kind: (count[kind], n_bytes) for kind, n_bytes in size.most_common()}

    @cached_property
    def fingerprint(self) -> str:
        """A cheap identity of the content, 32 hex digits: the same for a copy, new for other weights.

        Covers sizes, headers, and a piece out of the middle and the end of each tensor, so that a model
        which differs in a few tensors only (a merged adapter, say) is told apart without reading it all.
        """
        digest = hashlib.sha256()
        for _, source, header in self._shards:
            digest.update(f"{len(source)} {header.n_bytes}\n".encode())
            with memoryview(source) as view:
                digest.update(view[: header.n_bytes])
                for info in header.tensors:
                    end = info.offset + max(info.n_bytes, 0)
                    middle = (info.offset + end) // 2
                    digest.update(view[middle : min(middle + 256, end)])
                    digest.update(view[max(info.offset, end - 64) : end])
        return digest.hexdigest()[:32]


def _tensor(info: TensorInfo, path: Path, source: mmap.mmap) -> Tensor:
    kind = TYPES.get(info.type_code)
    name = kind.name if kind else f"type {info.type_code}"
    return Tensor(info.name, name, info.shape, info.offset, path, source, info.n_bytes)


def _map(path: Path) -> tuple[mmap.mmap, Header]:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"{path}: magic: not a GGUF file (it is empty)")
            source = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return source, read_header(source, path)


def shard_paths(path: Path) -> list[Path]:
    """The files of a split model by the name of any one of them; ``[path]`` if it is not split."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


def _all_shards(
    path: Path, source: mmap.mmap, header: Header, n_shards: int
) -> list[tuple[Path, mmap.mmap, Header]]:
    def fail(path: Path, field: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{path}: field '{field}': {problem}")

    match = _SHARD.fullmatch(path.name)
    if match is None or int(match["count"]) != n_shards:
        pattern = f"NAME-00001-of-{n_shards:05}.gguf"
        raise fail(path, "split.count", f"one of {n_shards} shards, but it is not named like {pattern}")
    paths = shard_paths(path)
    if header.metadata.get("split.no", 0) != 0:
        raise fail(path, "split.no", f"not the first of {n_shards} shards; open {paths[0].name}")
    shards = [(path, source, header)]
    for number, other in enumerate(paths[1:], start=1):
        if not other.exists():
            raise fail(path, "split.count", f"shard {number + 1} of {n_shards} is missing: {other}")
        other_source, other_header = _map(other)
        if other_header.metadata.get("split.no") != number:
            raise fail(other, "split.no", f"should be {number}")
        if other_header.metadata.get("split.count") != n_shards:
            raise fail(other, "split.count", f"should be {n_shards}, as in {path.name}")
        shards.append((other, other_source, other_header))
    expected = header.metadata.get("split.tensors.count")
    found = sum(len(shard.tensors) for _, _, shard in shards)
    if expected is not None and expected != found:
        raise fail(path, "split.tensors.count", f"says {expected}, but the shards hold {found} tensors")
    return shards


def _described(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name} values"
    if isinstance(value, StringArray | list):
        return f"{_KINDS[type(value)]} ({len(value)})"
    return f"{_KINDS[type(value)]} ({value!r:.60})"
