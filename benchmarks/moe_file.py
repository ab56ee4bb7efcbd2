"""Writes a random mixture-of-experts file in the shape of Qwen3-MoE: no such weights come with any package.

    python benchmarks/moe_file.py moe.gguf

gives about one billion parameters, 64 experts of which 8 work on each token, as Q4_K and Q6_K. Speed does not
depend on what the weights are; they are sampled from honest blocks so that activations stay of ordinary size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.oracles.gguf_files import Encoded, byte_level_vocabulary, write
from tests.oracles.quantize import block_size, encode

POOL_BLOCKS = 2048


def vocabulary_of(size: int) -> dict[str, Any]:
    """A byte-level vocabulary grown to ``size`` entries by merging pairs of characters."""
    vocabulary = byte_level_vocabulary("qwen2")
    tokens, merges = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.merges"]
    characters, known = tokens[:256], set(tokens)
    pairs = ((a, b) for a in characters for b in characters if a + b not in known)
    grown = [next(pairs) for _ in range(size - len(tokens))]
    return {
        **vocabulary,
        "tokenizer.ggml.tokens": tokens + [a + b for a, b in grown],
        "tokenizer.ggml.token_type": vocabulary["tokenizer.ggml.token_type"] + [1] * len(grown),
        "tokenizer.ggml.merges": merges + [f"{a} {b}" for a, b in grown],
    }


def random_matrix(
    shape: tuple[int, ...], type_name: str, rng: np.random.Generator, gain: float = 1.0
) -> Encoded:
    """A matrix of random blocks whose values have variance gain^2 / k."""
    k, width = shape[-1], block_size(type_name)
    if width == 1:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(gain / math.sqrt(k))
        return type_name, encode(values, type_name)
    pool = rng.standard_normal((POOL_BLOCKS, width), dtype=np.float32) * np.float32(gain / math.sqrt(k))
    blocks = encode(pool, type_name)
    chosen = rng.integers(0, POOL_BLOCKS, (*shape[:-1], k // width), dtype=np.uint16)
    return type_name, blocks[chosen].reshape(*shape[:-1], -1)


def write_moe(
    path: Path,
    *,
    dim: int = 1024,
    n_layers: int = 9,
    n_heads: int = 16,
    n_kv_heads: int = 4,
    head_dim: int = 128,
    expert_ff: int = 512,
    n_experts: int = 64,
    n_used: int = 8,
    vocabulary: int = 32768,
    types: tuple[str, str, str] = ("Q4_K", "Q4_K", "Q6_K"),
    seed: int = 0,
) -> None:
    """Write the file; ``types`` are those of attention, of experts' gate and up, and of down and head."""
    rng = np.random.default_rng(seed)
    dense, wide, narrow = types

    def norm(n: int) -> Encoded:
        values: NDArray[np.float32] = 1 + 0.1 * rng.standard_normal(n, dtype=np.float32)
        return "F32", values.astype(np.float32)

    def layer(name: str) -> Iterator[tuple[str, Encoded]]:
        yield f"{name}.attn_norm.weight", norm(dim)
        yield f"{name}.attn_q.weight", random_matrix((n_heads * head_dim, dim), dense, rng)
        yield f"{name}.attn_k.weight", random_matrix((n_kv_heads * head_dim, dim), dense, rng)
        yield f"{name}.attn_v.weight", random_matrix((n_kv_heads * head_dim, dim), narrow, rng)
        yield f"{name}.attn_q_norm.weight", norm(head_dim)
        yield f"{name}.attn_k_norm.weight", norm(head_dim)
        yield f"{name}.attn_output.weight", random_matrix((dim, n_heads * head_dim), dense, rng)
        yield f"{name}.ffn_norm.weight", norm(dim)
        yield f"{name}.ffn_gate_inp.weight", random_matrix((n_experts, dim), "F32", rng, gain=2.0)
        yield f"{name}.ffn_gate_exps.weight", random_matrix((n_experts, expert_ff, dim), wide, rng)
        yield f"{name}.ffn_up_exps.weight", random_matrix((n_experts, expert_ff, dim), wide, rng)
        yield f"{name}.ffn_down_exps.weight", random_matrix((n_experts, dim, expert_ff), narrow, rng)

    tensors: dict[str, Encoded] = {"token_embd.weight": random_matrix((vocabulary, dim), dense, rng)}
    for index in range(n_layers):
        tensors |= layer(f"blk.{index}")
    tensors["output_norm.weight"] = norm(dim)
    tensors["output.weight"] = random_matrix((vocabulary, dim), narrow, rng)
    own = {
        "context_length": 4096,
        "embedding_length": dim,
        "block_count": n_layers,
        "feed_forward_length": expert_ff,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        "vocab_size": vocabulary,
        "expert_count": n_experts,
        "expert_used_count": n_used,
        "expert_feed_forward_length": expert_ff,
    }
    metadata = {
        "general.architecture": "qwen3moe",
        "general.name": f"random mixture of experts, {n_used} of {n_experts}",
        "general.quantization_version": 2,
        **{f"qwen3moe.{key}": value for key, value in own.items()},
        **vocabulary_of(vocabulary),
    }
    write(path, metadata, tensors)


if __name__ == "__main__":
    write_moe(Path(sys.argv[1]))
