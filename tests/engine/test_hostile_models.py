"""Well-formed files that say impossible things, taken through loading, prompts, sampling and chat: each one
runs, or is refused in one line; none crashes, hangs or takes gigabytes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.checkpoints.writing import ARRAY, FLOAT32, INT32, STRING, UINT64, RawTensor, Typed, gguf_bytes
from tests.models.variants import contents, metadata

ROOT = Path(__file__).parents[2]
CODES = {kind.name: int(kind.value) for kind in gguf.GGMLQuantizationType}
DOUBLE = 12
VOCABULARY = "tokenizer.ggml."

Case = tuple[str, dict[str, Any], dict[str, RawTensor | None]]
"""Fixture, metadata to change (None drops it), tensors to change (None drops it)."""


def double(value: float) -> Typed:
    return Typed(DOUBLE, value)


INTEGERS = [
    None, 0, 1, 3, 31, 32, 33, 64, 96, 1000, 1 << 20, (1 << 24) - 32, 1 << 30, (1 << 31) - 1, (1 << 32) - 1,
    Typed(UINT64, 1 << 40), Typed(UINT64, (1 << 64) - 1), Typed(INT32, -32), 1.5, "64", True, [64, 64], [64],
]  # fmt: skip
FLOATS = [
    None, 0.0, -1.0, 1e-45, 1e-30, 1.0, 1e10, 3e38, double(1e308), double(5e-324), math.nan, math.inf,
    -math.inf, 0, "x", True, [1.0], Typed(UINT64, (1 << 64) - 1),
]  # fmt: skip
SIZES = [
    "embedding_length", "block_count", "attention.head_count", "attention.head_count_kv",
    "attention.key_length", "attention.value_length", "context_length", "feed_forward_length",
    "rope.dimension_count", "rope.scaling.original_context_length",
]  # fmt: skip
NUMBERS = [
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "attention.scale",
    "attn_logit_softcapping", "final_logit_softcapping",
]  # fmt: skip
EXPERTS = ["expert_count", "expert_used_count", "expert_feed_forward_length"]
WINDOW = ["attention.sliding_window", "attention.sliding_window_pattern"]
TEMPLATES = [
    "", "{{", "{{ 'a' * 10 ** 10 }}", "{% for x in range(100000000) %}a{% endfor %}", "{{ messages[5].x }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "{{" + "(" * 3000 + ")" * 3000 + "}}", 3,
    "{{ ('a,' * 100000) | replace('a', 'b' * 100000) }}", "{{ ''.__class__ }}", "{{ 2 ** 10 ** 10 }}",
]  # fmt: skip


def fields(name: str) -> Iterator[Case]:
    extra = {"qwen3moe": EXPERTS, "gemma3": WINDOW}.get(name, [])
    arch = metadata(name)["general.architecture"]
    for key in [*SIZES, *extra]:
        yield from ((name, {f"{arch}.{key}": value}, {}) for value in INTEGERS)
    for key in NUMBERS:
        yield from ((name, {f"{arch}.{key}": value}, {}) for value in FLOATS)
    for value in (None, "", "LLAMA", "llama\n", "x" * 1000, 3):
        yield name, {"general.architecture": value}, {}
    for value in (None, "", "a\x1b[31m\nb", 3, "x" * 100000):
        yield name, {"general.name": value}, {}


def vocabularies(name: str) -> Iterator[Case]:
    tokens: list[str] = metadata(name)[f"{VOCABULARY}tokens"]
    n = len(tokens)

    def array(code: int, items: list[Any]) -> Typed:
        return Typed(ARRAY, (code, items))

    lists = [
        [],
        tokens[:100],
        tokens[:-1],
        [*tokens, "x"],
        ["a"] * n,
        [""] * n,
        [b"\xff\xfe"] * n,
        ["\0"] * n,
    ]
    kinds = [array(INT32, [kind] * n) for kind in (-1, 2, 3, 4, 5, 6, 99)]
    odd = [None, 7, "x", array(INT32, []), array(INT32, [1]), array(STRING, ["x"] * n)]
    floats = [array(FLOAT32, [value] * n) for value in (math.nan, math.inf, -math.inf)]
    changes: dict[str, list[Any]] = {
        "tokens": [None, 7, "x", array(INT32, [1] * n), *(array(STRING, some) for some in lists)],
        "token_type": [*odd, *kinds, *floats],
        "scores": [*odd, *kinds, *floats, array(DOUBLE, [1e308] * n)],
        "merges": [None, 7, array(STRING, []), array(STRING, ["x", " ", "", "a b c"]), array(INT32, [1])],
        "model": [None, "gpt2", "llama", "bert", "", 3],
        "pre": [None, "nonsense", "", 3],
        **{
            f"{part}_token_id": [None, n, 1 << 31, Typed(INT32, -1), 1.5, "x"]
            for part in ("bos", "eos", "eot")
        },
        "add_bos_token": [1, "x"],
    }
    for key, values in changes.items():
        yield from ((name, {VOCABULARY + key: value}, {}) for value in values)
    yield from ((name, {"tokenizer.chat_template": template}, {}) for template in TEMPLATES)


def tensors(name: str) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for key, (kind, values) in contents(name)[1].items():
        if "blk." in key and "blk.1." not in key:
            continue
        code, n, dims, data = CODES[kind], values.size, values.shape[::-1], values.tobytes()

        def changed(code: int, dims: tuple[int, ...], data: bytes, key: str = key) -> Case:
            return name, {}, {key: RawTensor(key, code, dims, data)}

        yield name, {}, {key: None}
        yield changed(code, dims[::-1] if len(dims) > 1 else (*dims, 1), data)
        yield changed(code, (n,), data)
        yield changed(code, (1, *dims), data)
        yield changed(77, dims, data)
        with np.errstate(over="ignore"):
            for value in (math.nan, math.inf, 0, 1e38, -1e38):
                yield changed(code, dims, np.full(n, value, values.dtype).tobytes())
        single = values.copy()
        single.flat[3] = math.nan
        yield changed(code, dims, single.tobytes())
        for other in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F64", "I32", "IQ4_NL"):
            size, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[other]]
            if dims[0] % size == 0:
                length = n // size * n_bytes
                for raw in (b"\xff" * length, b"\x7f" * length, rng.bytes(length)):
                    yield changed(CODES[other], dims, raw)


def written(path: Path, case: Case) -> Path:
    name, changes, replaced = case
    meta: dict[str, Any] = metadata(name)
    for key, value in changes.items():
        meta.pop(key, None)
        if value is not None:
            meta[key] = value
    old = {
        key: RawTensor(key, CODES[kind], values.shape[::-1], values.tobytes())
        for key, (kind, values) in contents(name)[1].items()
    }
    kept: Mapping[str, RawTensor | None] = {**old, **replaced}
    path.write_bytes(gguf_bytes(meta, [tensor for tensor in kept.values() if tensor is not None]))
    return path


def outcomes(folder: Path, cases: list[Case]) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What became of each case; files are written a few at a time, as they are large together."""
    environment = os.environ | {"CHABOK_CACHE": str(folder / "cache"), "PYTHONWARNINGS": "ignore"}
    for first in range(0, len(cases), 100):
        some = cases[first : first + 100]
        paths = [written(folder / f"{i}.gguf", case) for i, case in enumerate(some)]
        done = subprocess.run(
            [sys.executable, "-m", "tests.engine.hostile", *map(str, paths)],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=1800,
        )  # fmt: skip
        yield from zip(some, map(json.loads, done.stdout.splitlines()), strict=True)


def told(case: Case) -> str:
    name, changes, replaced = case
    raw = {key: None if t is None else (t.code, tuple(t.dims), t.data[:4]) for key, t in replaced.items()}
    return f"{name} {str(changes)[:200]} {raw}"


@pytest.mark.wide
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3moe", "qwen2-yarn"])
@pytest.mark.parametrize("changes", [fields, vocabularies, tensors], ids=lambda kind: kind.__name__)
def test_hostile_models_run_or_are_refused_in_one_line(name: str, changes: Any, tmp_path: Path) -> None:
    faults = []
    for case, outcome in outcomes(tmp_path, list(changes(name))):
        said = outcome["said"]
        fine = said == "ran" or (said.startswith("refused: ") and "\n" not in said)
        if outcome["signal"] or not fine or outcome["seconds"] > 10 or outcome["megabytes"] > 700:
            faults.append(f"{told(case)}: {outcome}")
    assert not faults, f"{len(faults)} faults, among them:\n" + "\n".join(faults[:10])
