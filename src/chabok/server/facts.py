"""What a model's file says of it, and what serving it will take, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

PARTS_PER_ROOM = 4
"""The cache of keys and values takes a quarter of what is free at most where nothing is said."""


@dataclass(frozen=True, slots=True)
class Facts:
    """A model file. Sizes in bytes, times in seconds since the epoch."""

    path: Path
    size: int
    modified: float
    title: str
    family: str
    parameters: int
    quantization: str
    context: int
    """Tokens it was trained for."""
    fingerprint: str
    weights: int
    page: int
    """Bytes of 64 tokens' keys and values in all layers."""

    def least(self, context: int | None, kv_memory: int | None = None) -> int:
        """Bytes that it takes with room for one context only, or with the key-value cache asked for."""
        return self.weights + (self._pages(context) * self.page if kv_memory is None else kv_memory)

    def kv_memory(self, context: int | None, asked: int | None, room: int) -> int:
        """Bytes of key-value cache to give it, with ``room`` bytes for weights and cache together."""
        if asked is not None:
            return asked
        from chabok.engine.load import DEFAULT_CONTEXTS

        one = self._pages(context) * self.page
        share = max(room - self.weights, 0) // PARTS_PER_ROOM
        return max(one, min(DEFAULT_CONTEXTS * one, share // self.page * self.page))

    def _pages(self, context: int | None) -> int:
        from chabok.engine.kv import pages_for
        from chabok.engine.load import context_for

        return pages_for(context_for(self.context, context))


def read_facts(path: Path) -> Facts:
    """The facts of a model file, which is read up to where its weights begin. Raises CheckpointError."""
    state = path.stat()
    return _read(path, state.st_size, state.st_mtime)


@lru_cache(maxsize=256)
def _read(path: Path, size: int, modified: float) -> Facts:
    from chabok.checkpoints.gguf import GGUF
    from chabok.checkpoints.installed import quantization, size_of
    from chabok.models import read_config

    gguf = GGUF.open(path)
    config = read_config(gguf)
    tensors = gguf.tensors.values()
    by_type: dict[str, int] = {}
    for tensor in tensors:
        by_type[tensor.type] = by_type.get(tensor.type, 0) + tensor.n_bytes
    return Facts(
        path=path,
        size=size_of(path),
        modified=modified,
        title=config.name,
        family=gguf.architecture,
        parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        # The file's name says it as people do (Q4_K_M); else the type that most of it has.
        quantization=quantization(path.name) or max(by_type, key=by_type.__getitem__, default="unknown"),
        context=gguf.get(f"{gguf.architecture}.context_length", int, at_least=1),
        fingerprint=gguf.fingerprint,
        weights=sum(by_type.values()),
        page=config.page_bytes,
    )
