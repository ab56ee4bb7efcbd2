"""Where Chabok keeps what it can fetch or compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The cache folder: ``$CHABOK_CACHE``, or the platform's folder for caches. It may not exist yet."""
    chosen = os.environ.get("CHABOK_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    from platformdirs import user_cache_path

    return user_cache_path("chabok", appauthor=False)


def models_dir() -> Path:
    """Downloaded model files."""
    return cache_dir() / "models"


def packed_dir() -> Path:
    """Weights in the layout of the kernels."""
    return cache_dir() / "packed"


def kernels_dir() -> Path:
    """Where compiled kernels are kept."""
    return cache_dir() / "kernels"


def prefixes_dir() -> Path:
    """Pages of keys and values of prompts that may come again."""
    return cache_dir() / "prefixes"
