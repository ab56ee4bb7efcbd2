"""What a file says of its model is checked before it is used; what is wrong is named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import FIXTURES, fixture_path
from tests.models.variants import metadata, variant

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.errors import CheckpointError
from chabok.models import gemma, llama, qwen
from chabok.models.config import Config

FAMILIES: dict[str, Any] = {arch: family for family in (llama, qwen, gemma) for arch in family.ARCHITECTURES}


def read(gguf: GGUF) -> Config:
    return FAMILIES[gguf.architecture].read(gguf)


@pytest.mark.parametrize("name", FIXTURES)
def test_sizes_are_those_the_file_states(name: str) -> None:
    c, meta = read(GGUF.open(fixture_path(name))), metadata(name)
    arch = c.architecture
    stated = {
        "block_count": c.n_layers, "embedding_length": c.dim, "context_length": c.n_ctx,
        "attention.head_count": c.n_heads, "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.head_dim, "rope.freq_base": c.rope.base,
        "attention.layer_norm_rms_epsilon": c.eps,
    }  # fmt: skip
    for key, value in stated.items():
        if f"{arch}.{key}" in meta:
            assert value == pytest.approx(meta[f"{arch}.{key}"]), key
    assert (c.q_dim, c.kv_dim) == (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim)
    assert c.vocab == len(meta["tokenizer.ggml.tokens"])


NOT_A_NUMBER = float("nan")
HOSTILE: list[tuple[str, str, Any]] = [
    ("llama", "*.embedding_length", None),
    ("llama", "*.embedding_length", 0),
    ("llama", "*.embedding_length", 2**31),
    ("llama", "*.embedding_length", 100),
    ("llama", "*.embedding_length", "64"),
    ("llama", "*.block_count", None),
    ("llama", "*.block_count", 0),
    ("llama", "*.block_count", 2**32 - 1),
    ("llama", "*.attention.head_count", 0),
    ("llama", "*.attention.head_count", [4, 2]),
    ("llama", "*.attention.head_count_kv", 3),
    ("llama", "*.attention.key_length", 48),
    ("llama", "*.attention.key_length", 2048),
    ("llama", "*.attention.value_length", 64),
    ("llama", "*.attention.layer_norm_rms_epsilon", None),
    ("llama", "*.attention.layer_norm_rms_epsilon", -1.0),
    ("llama", "*.attention.layer_norm_rms_epsilon", NOT_A_NUMBER),
    ("llama", "*.context_length", None),
    ("llama", "*.context_length", 0),
    ("llama", "*.context_length", 2**32 - 1),
    ("llama", "*.feed_forward_length", 0),
    ("llama", "*.feed_forward_length", 33),
    ("llama", "*.feed_forward_length", None),
    ("llama", "*.rope.freq_base", 0.0),
    ("llama", "*.rope.freq_base", math.inf),
    ("llama", "*.rope.dimension_count", 1),
    ("llama", "*.rope.dimension_count", 31),
    ("llama", "*.rope.dimension_count", 4096),
    ("llama", "*.rope.scaling.type", "longrope"),
    ("llama", "*.rope.scaling.type", 3),
    ("llama", "*.rope.scaling.factor", -2.0),
    ("llama", "*.rope.scaling.factor", 1e-30),
    ("llama", "*.rope.scaling.factor", 1e30),
    ("llama", "*.attention.scale", 3e38),
    ("qwen2-yarn", "*.rope.scaling.original_context_length", 0),
    ("llama", "*.expert_count", 8),
    ("qwen2", "*.expert_count", 8),
    ("qwen3moe", "*.expert_count", 0),
    ("qwen3moe", "*.expert_count", 2**31),
    ("qwen3moe", "*.expert_used_count", 0),
    ("qwen3moe", "*.expert_used_count", 4096),
    ("qwen3moe", "*.expert_used_count", None),
    ("qwen3moe", "*.expert_feed_forward_length", 0),
    ("qwen3moe", "*.expert_feed_forward_length", 31),
    ("gemma3", "*.attention.sliding_window_pattern", 0),
    ("gemma3", "*.attention.sliding_window", "wide"),
    ("gemma3", "*.attention.sliding_window", 2**32 - 1),
    ("gemma3", "*.rope.freq_base_swa", -1.0),
    ("gemma3", "*.final_logit_softcapping", NOT_A_NUMBER),
]


@pytest.mark.parametrize(("name", "field", "value"), HOSTILE, ids=lambda x: str(x).replace("*.", ""))
def test_a_field_that_cannot_be_names_itself_and_the_file(
    name: str, field: str, value: Any, tmp_path: Path
) -> None:
    gguf = variant(tmp_path, name, {field: value})
    with pytest.raises(CheckpointError) as raised:
        read(gguf)
    text = str(raised.value)
    assert str(gguf.path) in text
    # Too many experts used is as much an error of their number.
    assert field.split(".", 1)[1] in text or "expert" in text


NO_HEAD = {"*.attention.key_length": None, "*.attention.value_length": None, "*.rope.dimension_count": None}
BROKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "no key heads": ("llama", {"*.attention.head_count_kv": 0}),
    "heads without dimensions": (
        "llama",
        {"*.attention.head_count": 1024, "*.attention.head_count_kv": 1024, **NO_HEAD},
    ),
    "yarn of base one": ("qwen2-yarn", {"*.rope.freq_base": 1.0}),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_fields_that_contradict_each_other_are_refused(what: str, tmp_path: Path) -> None:
    name, fields = BROKEN[what]
    with pytest.raises(CheckpointError):
        models.load(variant(tmp_path, name, fields), threads=1)


def test_a_width_that_no_layer_has_takes_no_memory(tmp_path: Path) -> None:
    assert read(variant(tmp_path, "qwen3moe", {"*.feed_forward_length": 1 << 31})).ff == 0


def test_one_number_may_be_written_for_each_layer(tmp_path: Path) -> None:
    n = metadata("llama")["llama.block_count"]
    heads = metadata("llama")["llama.attention.head_count"]
    assert read(variant(tmp_path, "llama", {"*.attention.head_count": [heads] * n})).n_heads == heads
    with pytest.raises(CheckpointError, match=r"head_count_kv.*differs from layer to layer"):
        read(variant(tmp_path, "llama", {"*.attention.head_count_kv": [1] * (n - 1) + [2]}))


def test_what_may_be_left_out_has_the_fields_usual_value(tmp_path: Path) -> None:
    c = read(variant(tmp_path, "llama", {"*.rope.freq_base": None, "*.rope.dimension_count": None,
                                         "general.name": None}))  # fmt: skip
    assert c.rope.base == 10000.0
    assert c.rope.n_rot == c.head_dim
    assert c.name == "llama-variant"
    assert c.attention_scale == pytest.approx(1 / math.sqrt(c.head_dim))


def test_llama_pairs_neighbours_and_qwen_halves() -> None:
    assert read(GGUF.open(fixture_path("llama"))).rope.interleaved
    assert not read(GGUF.open(fixture_path("qwen2"))).rope.interleaved


def test_gemma_scales_embeddings_and_turns_local_layers_otherwise(tmp_path: Path) -> None:
    c = read(GGUF.open(fixture_path("gemma3")))
    assert c.embedding_scale == pytest.approx(math.sqrt(c.dim))
    assert c.activation == "gelu"
    assert c.local_rope is not None
    scaled = read(
        variant(tmp_path, "gemma3", {"*.rope.scaling.type": "linear", "*.rope.scaling.factor": 8.0})
    )
    assert scaled.local_rope is not None
    assert (scaled.rope.scaling, scaled.rope.factor) == ("linear", 8.0)
    assert (scaled.local_rope.scaling, scaled.local_rope.factor) == ("none", 1.0)


def test_every_sixth_layer_of_gemma_sees_everything(tmp_path: Path) -> None:
    c = read(variant(tmp_path, "gemma3", {"*.attention.sliding_window_pattern": None}))
    assert [c.is_local(layer) for layer in range(12)] == ([True] * 5 + [False]) * 2


def test_without_a_window_no_layer_is_local(tmp_path: Path) -> None:
    c = read(variant(tmp_path, "gemma3", {"*.attention.sliding_window": 0}))
    assert not any(c.is_local(layer) for layer in range(12))


def test_an_unknown_architecture_is_named_with_those_supported(tmp_path: Path) -> None:
    gguf = variant(tmp_path, "llama", {"general.architecture": "mamba"})
    with pytest.raises(CheckpointError, match=r"'mamba' is not supported; supported are .*llama.*qwen3moe"):
        models.load(gguf, threads=1)
