"""Chabok: open-weight language models on ordinary CPUs, as fast as the hardware allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chabok.engine.aio import AsyncLLM
    from chabok.engine.llm import LLM
    from chabok.engine.request import Completion, SamplingParams
    from chabok.errors import ChabokError

__all__ = ["LLM", "AsyncLLM", "ChabokError", "Completion", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "chabok.engine.llm",
    "AsyncLLM": "chabok.engine.aio",
    "SamplingParams": "chabok.engine.request",
    "Completion": "chabok.engine.request",
    "ChabokError": "chabok.errors",
}


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that ``chabok --help`` stays instant."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'chabok' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
