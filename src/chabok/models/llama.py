"""Llama 2 and 3, Mistral, SmolLM2, and others of the same shape."""

from __future__ import annotations

from dataclasses import replace

from chabok.checkpoints.gguf import GGUF
from chabok.models import config
from chabok.models.config import Config
from chabok.models.layers import Graph

ARCHITECTURES = ("llama",)


def read(gguf: GGUF) -> Config:
    """Queries and keys of llama files are stored in pairs; a mixture of experts under this name is
    Mixtral's."""
    c = config.read(gguf)
    if c.n_experts:
        raise gguf.error(
            "llama.expert_count",
            "mixture-of-experts models of this architecture (Mixtral) are not supported yet",
        )
    return c.with_(rope=replace(c.rope, interleaved=True))


def build(graph: Graph) -> None:
    """Norm, attention, norm, gated feed-forward."""
    graph.transformer()
