"""Makes tests/fixtures: tiny random models of each architecture, with the logits that transformers computes.

Run with an interpreter that has torch and transformers (neither is needed to run the tests):

    python -m tests.oracles.make_fixtures [NAME ...]

The weights are rounded to the file's types first and loaded back, so that both sides compute with the same
numbers; then ``NAME.gguf`` holds them and ``NAME.npz`` the prompt (``tokens``) and float32 ``logits`` of all
its positions. Weights are larger than trained ones so that rotation, masks, and experts all show in them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from . import gguf_files
from .quantize import decode, encode

FIXTURES = Path(__file__).parents[1] / "fixtures"
N_TOKENS = 100  # crosses a 64-token page
VOCAB = 269
CONTEXT = 512
Array = NDArray[np.float32]


@dataclass(frozen=True)
class Recipe:
    """One fixture: the transformers configuration, and what the file calls it."""

    arch: str
    config: str  # of transformers, without "Config"
    options: dict[str, Any]
    type_of: Callable[[str], str]  # tensor name -> GGUF type of a matrix
    metadata: dict[str, Any] = field(default_factory=dict)  # beyond the usual, keys without "arch."


def k_types(name: str) -> str:
    """A mixture like the field's Q4_K_M files, with every K type in it."""
    if "attn_v" in name or "ffn_down" in name or "token_embd" in name:
        return "Q6_K"
    return "Q5_K" if "attn_k" in name or "ffn_up" in name else "Q4_K"


def all_of(type_name: str) -> Callable[[str], str]:
    """The same type for every matrix."""
    return lambda name: type_name


SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {
    **SMALL,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 24,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("llama", "Llama", SMALL, all_of("F32")),
    "llama3-scaled": Recipe(
        "llama",
        "Llama",
        {**SMALL, "head_dim": 64, "tie_word_embeddings": True, "rope_parameters": LLAMA3},
        all_of("F16"),
    ),
    "llama-k": Recipe(
        "llama",
        "Llama",
        {
            **SMALL,
            "hidden_size": 256,
            "intermediate_size": 256,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
        k_types,
    ),
    "mistral-linear": Recipe(
        "llama",
        "Mistral",
        {**SMALL, "sliding_window": None, "rope_parameters": LINEAR},
        all_of("BF16"),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2": Recipe(
        "qwen2",
        "Qwen2",
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
        all_of("F16"),
    ),
    "qwen2-yarn": Recipe(
        "qwen2",
        "Qwen2",
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_parameters": YARN},
        all_of("F16"),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "qwen3": Recipe(
        "qwen3",
        "Qwen3",
        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
        all_of("F16"),
    ),
    "qwen3moe": Recipe(
        "qwen3moe",
        "Qwen3Moe",
        {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        | {"moe_intermediate_size": 32},
        all_of("F16"),
    ),
    "gemma3": Recipe("gemma3", "Gemma3Text", GEMMA, all_of("F16")),
    "gemma3-capped": Recipe(
        "gemma3",
        "Gemma3Text",
        {
            **GEMMA,
            "num_hidden_layers": 6,
            "head_dim": 64,
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        all_of("F16"),
        {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}


def build(recipe: Recipe) -> tuple[Any, Any]:
    """The model of transformers and its configuration, in float32 with eager attention."""
    options = dict(recipe.options)
    if recipe.config == "Qwen2":
        del options["head_dim"]  # Qwen2 always has dim / n_heads
    config = getattr(transformers, f"{recipe.config}Config")(**options)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval(), config


def random_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator, gemma: bool) -> Array:
    """Random weights that keep activations near unit size and give attention and router clear preferences."""
    x = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return x * np.float32(0.3) if "bias" in name else x * np.float32(0.2) + np.float32(0 if gemma else 1)
    gain = 1.0
    if "q_proj" in name or "k_proj" in name:
        gain = 1.5
    elif "mlp.gate.weight" in name:
        gain = 2.0
    elif "embed_tokens" in name and not gemma:
        return x * np.float32(0.3)  # may be the head too
    return x * np.float32(gain / math.sqrt(shape[-1]))


SUFFIXES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_SUFFIXES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_names(name: str, arch: str) -> list[str]:
    """What the file calls a parameter; fused expert matrices give two tensors."""
    if name in TOP:
        return [TOP[name]]
    _, _, layer, rest = name.split(".", 3)
    if rest == "mlp.experts.gate_up_proj":
        return [f"blk.{layer}.ffn_gate_exps.weight", f"blk.{layer}.ffn_up_exps.weight"]
    if rest == "mlp.experts.down_proj":
        return [f"blk.{layer}.ffn_down_exps.weight"]
    module, kind = rest.rsplit(".", 1)
    suffixes = SUFFIXES | (GEMMA_SUFFIXES if arch == "gemma3" else {})
    return [f"blk.{layer}.{suffixes[module]}.{kind}"]


def interleave_heads(rows: NDArray[np.generic], n_heads: int) -> NDArray[np.generic]:
    """Reorder Q or K rows as llama files store them: halves of a head become alternating pairs."""
    return rows.reshape(n_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def convert(recipe: Recipe, model: Any, config: Any, seed: int) -> dict[str, gguf_files.Encoded]:
    """Give the model random weights, rounded to the file's types, and return the file's tensors."""
    rng = np.random.default_rng(seed)
    gemma = recipe.arch == "gemma3"
    tensors: dict[str, gguf_files.Encoded] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # tied heads appear once
            rounded = []
            names = gguf_names(name, recipe.arch)
            weight = random_weight(name, tuple(parameter.shape), rng, gemma)
            for target, part in zip(names, np.split(weight, len(names), axis=-2 if len(names) > 1 else 0)):
                small = part.ndim == 1 or "ffn_gate_inp" in target
                type_name = "F32" if small else recipe.type_of(target)
                stored = part + 1 if gemma and "norm" in target else part
                data = encode(stored, type_name)
                back = decode(data, gguf.GGMLQuantizationType[type_name]).reshape(part.shape)
                rounded.append(back - 1 if gemma and "norm" in target else back)
                if recipe.arch == "llama" and ("attn_q." in target or "attn_k." in target):
                    heads = config.num_attention_heads if "attn_q." in target else config.num_key_value_heads
                    data = interleave_heads(data, heads)
                tensors[target] = (type_name, data)
            parameter.copy_(
                torch.from_numpy(np.concatenate(rounded, axis=-2) if len(rounded) > 1 else rounded[0])
            )
    if config.rope_parameters.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = ("F32", llama3_factors(config))
    return tensors


def llama3_factors(config: Any) -> Array:
    """By how much each frequency is divided (as stored in Llama 3.x files)."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    return (plain / scaled.numpy()).astype(np.float32)


def metadata(name: str, recipe: Recipe, config: Any) -> dict[str, Any]:
    """Everything a GGUF file says of such a model."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    own = {
        "context_length": CONTEXT,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "vocab_size": config.vocab_size,
        **recipe.metadata,
    }
    if recipe.arch == "llama":
        own["rope.dimension_count"] = head_dim
    if recipe.arch == "qwen3moe":
        own |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    if recipe.arch == "gemma3":
        own["attention.sliding_window"] = config.sliding_window
    pre = {"llama": "smollm"}.get(recipe.arch, "qwen2")
    vocabulary = (
        gguf_files.sentencepiece_vocabulary()
        if recipe.arch == "gemma3"
        else gguf_files.byte_level_vocabulary(pre)
    )
    return {
        "general.architecture": recipe.arch,
        "general.name": f"tiny random {name}",
        "general.quantization_version": 2,
        **{f"{recipe.arch}.{key}": value for key, value in own.items()},
        **vocabulary,
    }


def make(name: str) -> None:
    """Write one fixture's file and its expected logits."""
    recipe = RECIPES[name]
    seed = list(RECIPES).index(name)
    model, config = build(recipe)
    tensors = convert(recipe, model, config, seed)
    gguf_files.write(FIXTURES / f"{name}.gguf", metadata(name, recipe, config), tensors)
    tokens = np.random.default_rng(1000 + seed).integers(4, VOCAB - 4, N_TOKENS, dtype=np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[None].astype(np.int64))).logits[0].numpy()
    np.savez_compressed(FIXTURES / f"{name}.npz", tokens=tokens, logits=logits.astype(np.float32))
    print(f"{name}: logits of size {logits.std():.2f}")


def main() -> None:
    """Make the fixtures named on the command line, or all."""
    torch.set_num_threads(1)
    FIXTURES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or RECIPES:
        make(name)


if __name__ == "__main__":
    main()
