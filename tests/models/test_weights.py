"""A file's tensors become packed matrices and vectors; what is missing or misshapen is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.fixtures import FIXTURES, fixture_path
from tests.models.variants import variant
from tests.oracles.forward import Oracle
from tests.oracles.gguf_files import Encoded
from tests.oracles.quantize import encode

from chabok import models
from chabok.checkpoints.gguf import GGUF
from chabok.compute.blocks import unpack
from chabok.errors import CheckpointError
from chabok.models import gemma, llama, qwen
from chabok.models.rope import order
from chabok.models.weights import Weights

FAMILIES = {arch: family for family in (llama, qwen, gemma) for arch in family.ARCHITECTURES}


def loaded(gguf: GGUF) -> Weights:
    weights = Weights(gguf, FAMILIES[gguf.architecture].read(gguf))
    weights.load(None, None)
    return weights


@pytest.mark.parametrize("name", FIXTURES)
def test_every_packed_matrix_is_its_tensor_in_the_kernels_order(name: str) -> None:
    gguf, oracle = GGUF.open(fixture_path(name)), Oracle(fixture_path(name))
    c = FAMILIES[gguf.architecture].read(gguf)
    weights = loaded(gguf)
    turned = order(c.rope, c.head_dim)
    for matrix_name, m in weights.matrices.items():
        parts = np.split(m.data, m.experts)
        ours = np.stack([unpack(m.format, part, m.rows, m.k) for part in parts])
        if "gate_up" in matrix_name:
            gate, up = (oracle.weight(matrix_name.replace("gate_up", p) + ".weight") for p in ("gate", "up"))
            shape = (m.experts, m.rows // 32, 16, m.k)
            wanted = np.stack([gate.reshape(shape), up.reshape(shape)], axis=2)
        else:
            wanted = oracle.weight(f"{matrix_name}.weight")
            if matrix_name.endswith(("attn_q", "attn_k")):
                wanted = wanted.reshape(-1, c.head_dim, m.k)[:, turned]
        assert np.array_equal(ours, wanted.reshape(m.experts, m.rows, m.k)), matrix_name
    for vector_name, v in weights.vectors.items():
        full = vector_name if vector_name.endswith(".bias") else f"{vector_name}.weight"
        wanted = oracle.weight(full)
        if vector_name.endswith(("attn_q.bias", "attn_k.bias", "attn_q_norm", "attn_k_norm")):
            wanted = wanted.reshape(-1, c.head_dim)[:, turned].reshape(-1)
        assert np.array_equal(v[: len(wanted)], wanted), vector_name
        assert not v[len(wanted) :].any()
    assert weights.n_bytes == sum(m.data.size for m in weights.matrices.values())


NEEDED = ["token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight", "blk.1.attn_q.weight",
          "blk.0.attn_output.weight", "blk.1.ffn_norm.weight", "blk.0.ffn_gate.weight", "blk.0.ffn_up.weight",
          "blk.1.ffn_down.weight"]  # fmt: skip


@pytest.mark.parametrize("tensor", NEEDED)
def test_a_missing_tensor_is_named(tensor: str, tmp_path: Path) -> None:
    gguf = variant(tmp_path, "llama", drop=[tensor])
    with pytest.raises(CheckpointError, match=f"{gguf.path}: tensor '{tensor}' is missing"):
        loaded(gguf)


@pytest.mark.parametrize("tensor", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"])
def test_missing_experts_are_named(tensor: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"tensor 'blk\.0\.{tensor}\.weight' is missing"):
        loaded(variant(tmp_path, "qwen3moe", drop=[f"blk.0.{tensor}.weight"]))


def floats(*shape: int) -> Encoded:
    return "F32", np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [("blk.0.attn_q.weight", (32, 32)), ("blk.0.attn_norm.weight", (31,)), ("output_norm.weight", (1, 64)),
     ("blk.1.ffn_down.weight", (64,)), ("blk.0.ffn_up.weight", (1, 1, 64)), ("rope_freqs.weight", (3,)),
     ("blk.0.attn_q.bias", (7,)), ("output.weight", (5, 64))],
)  # fmt: skip
def test_a_tensor_of_another_shape_is_named_with_both(
    tensor: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    gguf = variant(tmp_path, "llama", tensors={tensor: floats(*shape)})
    with pytest.raises(CheckpointError, match=rf"tensor '{tensor}' has shape \({shape[0]},.*ask for"):
        loaded(gguf)


def test_an_unsupported_type_is_named_with_those_supported(tmp_path: Path) -> None:
    gguf = variant(
        tmp_path, "llama-k", tensors={"blk.0.ffn_up.weight": ("IQ4_NL", np.zeros((512, 144), np.uint8))}
    )
    tensor = gguf.tensors["blk.0.ffn_up.weight"]
    old = GGUF.open(fixture_path("llama-k")).tensors["blk.0.ffn_up.weight"]
    raw = np.zeros((old.shape[0], old.shape[1] // 32 * 18), np.uint8)
    gguf = variant(tmp_path, "llama-k", tensors={tensor.name: ("IQ4_NL", raw)})
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.ffn_up\.weight' has type IQ4_NL.*supported are .*Q4_K"
    ):
        loaded(gguf)


def test_a_quantized_vector_is_refused(tmp_path: Path) -> None:
    dim = GGUF.open(fixture_path("llama")).tensors["output_norm.weight"].shape[0]
    norm = encode(np.ones((1, dim), np.float32), "Q8_0").reshape(-1)
    gguf = variant(tmp_path, "llama", tensors={"output_norm.weight": ("Q8_0", norm)})
    with pytest.raises(CheckpointError, match=r"output_norm\.weight' has type Q8_0; a vector must be"):
        loaded(gguf)


def test_gate_and_up_of_different_types_stay_apart(tmp_path: Path) -> None:
    old = Oracle(fixture_path("llama")).weight("blk.0.ffn_up.weight")
    gguf = variant(tmp_path, "llama", tensors={"blk.0.ffn_up.weight": ("Q8_0", encode(old, "Q8_0"))})
    weights = loaded(gguf)
    assert "blk.0.ffn_gate_up" not in weights
    assert weights.matrices["blk.0.ffn_up"].format.name == "Q8_0"
    assert "blk.1.ffn_gate_up" in weights


def test_a_norm_of_queries_without_one_of_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="attn_k_norm"):
        models.load(variant(tmp_path, "qwen3", drop=["blk.0.attn_k_norm.weight"]), threads=1)


def test_a_dense_layer_larger_than_an_expert_is_refused_or_has_room(tmp_path: Path) -> None:
    gguf = GGUF.open(fixture_path("qwen3moe"))
    dim, ff = gguf.get("qwen3moe.embedding_length", int), 2048
    dense = {f"blk.0.ffn_{p}.weight": floats(ff, dim) for p in ("gate", "up")}
    gguf = variant(
        tmp_path, "qwen3moe", {"*.feed_forward_length": ff}, drop=["blk.0.ffn_gate_inp.weight"],
        tensors={**dense, "blk.0.ffn_down.weight": floats(dim, ff)},
    )  # fmt: skip
    try:
        model = models.load(gguf, threads=1, max_rows=8)
    except CheckpointError:
        return
    try:
        assert model.work.gate.strides[0] >= 4 * ff
        assert model.work.hidden_lines.strides[0] >= 2 * ff
    finally:
        model.close()
