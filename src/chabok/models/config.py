"""Hyper-parameters of a model, read from its file and checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from chabok.checkpoints.gguf import GGUF
from chabok.compute.kernels.attention import head_bytes
from chabok.errors import CheckpointError

MAX_EXPERTS_USED = 32

MAX_LAYERS = 1024
"""Far above any model there is."""

_MAX_NUMBER = 1e30
"""Kernels take these numbers in 32 bits."""

MAX_CONTEXT = 1 << 20
"""Tokens; of models made for more, this many can be used."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency, and how contexts longer than the trained one are scaled."""

    base: float
    scaling: str = "none"
    """none, linear, or yarn."""
    factor: float = 1.0
    n_ctx: int = 0
    """Context the frequencies were trained for, where they are scaled."""
    interleaved: bool = False
    """Whether pairs are (2i, 2i + 1), as llama files store queries and keys, rather than (i, i + n_rot
    / 2)."""
    n_rot: int = 0
    """Dimensions of a head that turn."""


@dataclass(frozen=True)
class Config:
    """What a program is built from. Sizes are numbers of elements."""

    architecture: str
    name: str
    n_ctx: int
    n_layers: int
    dim: int
    ff: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    rope: Rope
    local_rope: Rope | None = None
    """Of layers that see a window only, where it differs."""
    attention_scale: float = 0.0
    attention_cap: float = 0.0
    final_cap: float = 0.0
    window: int = 0
    """Keys a row of a local layer sees, itself included."""
    window_period: int = 0
    """Every such layer is global."""
    embedding_scale: float = 1.0
    activation: str = "silu"
    n_experts: int = 0
    n_experts_used: int = 0
    expert_ff: int = 0

    def is_local(self, layer: int) -> bool:
        """Whether a layer sees a sliding window only."""
        return self.window > 0 and (layer + 1) % self.window_period != 0

    @property
    def q_dim(self) -> int:
        """All query heads together."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """All key heads together."""
        return self.n_kv_heads * self.head_dim

    @property
    def page_layer_bytes(self) -> int:
        """Bytes that a layer has in a page of the KV cache."""
        return self.n_kv_heads * head_bytes(self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of the KV cache: one layer after the other."""
        return self.n_layers * self.page_layer_bytes

    def with_(self, **changes: object) -> Config:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


def read(gguf: GGUF) -> Config:
    """The fields all families share. Raises CheckpointError naming file and field."""
    arch = gguf.architecture

    def integer(key: str, default: int | None = None, at_most: int = 1 << 24) -> int:
        if default is None:
            return gguf.get(f"{arch}.{key}", int, at_least=1, at_most=at_most)
        return gguf.get(f"{arch}.{key}", int, default, at_least=0, at_most=at_most)

    def number(key: str, default: float | None = None) -> float:
        if default is None:
            return gguf.get(f"{arch}.{key}", float, at_least=0.0, at_most=_MAX_NUMBER)
        return gguf.get(f"{arch}.{key}", float, default, at_least=0.0, at_most=_MAX_NUMBER)

    dim, n_layers = integer("embedding_length"), integer("block_count", at_most=MAX_LAYERS)
    n_heads = _one_value(gguf, f"{arch}.attention.head_count", n_layers)
    n_kv_heads = _one_value(gguf, f"{arch}.attention.head_count_kv", n_layers, n_heads, at_least=1)
    n_experts = integer("expert_count", 0, at_most=4096)
    ff = _one_value(gguf, f"{arch}.feed_forward_length", n_layers, 0)
    # What no layer has must not take memory either.
    dense = not n_experts or any(f"blk.{i}.ffn_gate.weight" in gguf.tensors for i in range(n_layers))
    head_dim = integer("attention.key_length", 0) or dim // n_heads
    value_dim = integer("attention.value_length", 0) or dim // n_heads
    if head_dim == 0:
        raise gguf.error(
            f"{arch}.attention.head_count", f"is {n_heads}, more than the {dim} dimensions there are"
        )
    config = Config(
        architecture=arch,
        name=gguf.get("general.name", str, "") or gguf.path.stem,
        n_ctx=min(integer("context_length", at_most=1 << 30), MAX_CONTEXT),
        n_layers=n_layers,
        dim=dim,
        ff=ff if dense else 0,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        vocab=_vocabulary(gguf),
        eps=number("attention.layer_norm_rms_epsilon"),
        rope=_rope(gguf, head_dim),
        attention_scale=number("attention.scale", 0.0) or 1.0 / math.sqrt(head_dim),
        attention_cap=number("attn_logit_softcapping", 0.0),
        final_cap=number("final_logit_softcapping", 0.0),
        n_experts=n_experts,
        n_experts_used=integer("expert_used_count", 0, at_most=4096),
        expert_ff=integer("expert_feed_forward_length", 0),
    )
    _check(gguf, config, value_dim, dense)
    return config


def _one_value(gguf: GGUF, key: str, n_layers: int, default: int | None = None, *, at_least: int = 0) -> int:
    """A number that may be written per layer, but must be the same in all."""
    if default is None:
        values = gguf.per_layer(key, n_layers, at_least=1)
    else:
        values = gguf.per_layer(key, n_layers, default, at_least=at_least)
    if len(set(values)) != 1:
        raise gguf.error(
            key, "differs from layer to layer, which this architecture's program does not support"
        )
    return values[0]


def _vocabulary(gguf: GGUF) -> int:
    table = gguf.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise CheckpointError(f"{gguf.path}: tensor 'token_embd.weight' is missing or not a matrix")
    return int(table.shape[0])


def _rope(gguf: GGUF, head_dim: int) -> Rope:
    arch = gguf.architecture
    factor = gguf.get(f"{arch}.rope.scaling.factor", float, 0.0, at_least=0.0)
    if factor and not 1e-3 <= factor <= 1e6:
        raise gguf.error(f"{arch}.rope.scaling.factor", f"is {factor}; it must be 0.001 to 1000000")
    scaling = gguf.get(f"{arch}.rope.scaling.type", str, "linear" if factor else "none")
    if scaling not in ("none", "linear", "yarn"):
        raise gguf.error(f"{arch}.rope.scaling.type", f"is '{scaling}'; supported are none, linear and yarn")
    n_ctx = gguf.get(f"{arch}.context_length", int, at_least=1)
    if scaling == "yarn":
        # Its ramp is laid out in logarithms of the base.
        gguf.get(f"{arch}.rope.freq_base", float, 10000.0, at_least=2.0)
    return Rope(
        base=gguf.get(f"{arch}.rope.freq_base", float, 10000.0, at_least=1.0),
        scaling=scaling if factor not in (0.0, 1.0) else "none",
        factor=factor or 1.0,
        n_ctx=gguf.get(f"{arch}.rope.scaling.original_context_length", int, n_ctx, at_least=1),
        n_rot=gguf.get(f"{arch}.rope.dimension_count", int, head_dim, at_least=2, at_most=head_dim),
    )


def _check(gguf: GGUF, c: Config, value_dim: int, dense: bool) -> None:
    arch = c.architecture

    def require(holds: bool, key: str, problem: str) -> None:
        if not holds:
            raise gguf.error(f"{arch}.{key}", problem)

    require(c.dim % 32 == 0, "embedding_length", f"is {c.dim}; it must be a multiple of 32")
    require(
        c.n_heads % c.n_kv_heads == 0,
        "attention.head_count_kv",
        f"is {c.n_kv_heads}, which does not divide the {c.n_heads} query heads",
    )
    require(
        c.head_dim % 32 == 0 and c.head_dim <= 1024,
        "attention.key_length",
        f"is {c.head_dim}; it must be a multiple of 32, at most 1024",
    )
    require(value_dim == c.head_dim, "attention.value_length", f"is {value_dim}, but keys have {c.head_dim}")
    require(c.n_heads <= 1024, "attention.head_count", f"is {c.n_heads}; at most 1024 are supported")
    require(c.rope.n_rot % 2 == 0, "rope.dimension_count", f"is {c.rope.n_rot}; it must be even")
    if c.n_experts:
        require(
            0 < c.n_experts_used <= min(c.n_experts, MAX_EXPERTS_USED),
            "expert_used_count",
            f"is {c.n_experts_used} of {c.n_experts} experts",
        )
        require(
            c.expert_ff > 0 and c.expert_ff % 32 == 0,
            "expert_feed_forward_length",
            f"is {c.expert_ff}; it must be a multiple of 32",
        )
    if dense:
        require(c.ff > 0 and c.ff % 32 == 0, "feed_forward_length", f"is {c.ff}; it must be a multiple of 32")
