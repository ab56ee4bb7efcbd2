"""Gemma 3: five layers that see a sliding window, then one that sees everything; norms before and after each
block."""

from __future__ import annotations

import math
from dataclasses import replace

from chabok.checkpoints.gguf import GGUF
from chabok.models import config
from chabok.models.config import Config
from chabok.models.layers import Graph

ARCHITECTURES = ("gemma3",)

_FAR = 1 << 30
"""More tokens, and layers, than there can be."""


def read(gguf: GGUF) -> Config:
    """Scaled embeddings, GELU, the window, and a rotation of its own for local layers, never scaled."""
    c = config.read(gguf)
    local_base = gguf.get("gemma3.rope.freq_base_swa", float, 10000.0, at_least=1.0)
    scale = c.attention_scale
    if c.n_layers == 62 and not gguf.get("gemma3.attention.scale", float, 0.0):
        scale = 1.0 / math.sqrt(
            c.dim / c.n_heads
        )  # the 27B model divides by this, the others by sqrt(head_dim)
    return c.with_(
        activation="gelu",
        embedding_scale=math.sqrt(c.dim),
        attention_scale=scale,
        window=gguf.get("gemma3.attention.sliding_window", int, 0, at_least=0, at_most=_FAR),
        window_period=gguf.get("gemma3.attention.sliding_window_pattern", int, 6, at_least=1, at_most=_FAR),
        local_rope=replace(c.rope, base=local_base, scaling="none", factor=1.0),
    )


def build(graph: Graph) -> None:
    """As ever; the graph puts a norm after each block where the file has one."""
    graph.transformer()
