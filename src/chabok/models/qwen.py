"""Qwen 2, 2.5 and 3, dense and mixture of experts.

Qwen 2 has biases on queries, keys and values; Qwen 3 norms of queries and keys instead: both are used where
the file has them.
"""

from __future__ import annotations

from chabok.checkpoints.gguf import GGUF
from chabok.models import config
from chabok.models.config import Config
from chabok.models.layers import Graph

ARCHITECTURES = ("qwen2", "qwen3", "qwen3moe")


def read(gguf: GGUF) -> Config:
    """Nothing but the common fields."""
    c = config.read(gguf)
    if (gguf.architecture == "qwen3moe") != (c.n_experts > 0):
        raise gguf.error(
            f"{gguf.architecture}.expert_count", f"is {c.n_experts}, which does not fit the architecture"
        )
    return c


def build(graph: Graph) -> None:
    """Norm, attention, norm, gated feed-forward or experts."""
    graph.transformer()
