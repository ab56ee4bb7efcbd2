"""Copies of the tiny fixtures with fields and tensors changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType
from tests.fixtures import fixture_path
from tests.oracles.gguf_files import Encoded, write

from chabok.checkpoints.gguf import GGUF


@cache
def contents(name: str) -> tuple[dict[str, Any], dict[str, Encoded]]:
    reader = GGUFReader(fixture_path(name))
    metadata = {}
    for key, item in reader.fields.items():
        if not key.startswith("GGUF."):
            value = item.contents()
            metadata[key] = int(value) if item.types[0] == GGUFValueType.UINT32 else value
    tensors = {t.name: (t.tensor_type.name, np.array(t.data)) for t in reader.tensors}
    return metadata, tensors


def metadata(name: str) -> dict[str, Any]:
    return dict(contents(name)[0])


def variant(
    folder: Path,
    name: str,
    fields: Mapping[str, Any] | None = None,
    *,
    drop: Collection[str] = (),
    tensors: Mapping[str, Encoded] | None = None,
) -> GGUF:
    """A fixture with other metadata (None takes a field away; ``*.`` stands for the architecture), less some
    tensors, with others put in."""
    meta, old = contents(name)
    meta = dict(meta)
    for key, value in (fields or {}).items():
        key = key.replace("*.", f"{meta['general.architecture']}.")
        meta.pop(key, None)
        if value is not None:
            meta[key] = value
    kept = {key: tensor for key, tensor in old.items() if key not in drop}
    path = folder / f"{name}-variant.gguf"
    write(path, meta, {**kept, **(tensors or {})})
    return GGUF.open(path)
