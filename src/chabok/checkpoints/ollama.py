"""Models in Ollama's folder: listed and run where they are, never changed.

``manifests/<registry>/<namespace>/<model>/<tag>`` is JSON whose layers name files in ``blobs/`` by hash.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from chabok.checkpoints.installed import InstalledModel

_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


def folders() -> list[Path]:
    """Where Ollama keeps models: ``$OLLAMA_MODELS``, else the user's folder and that of the Linux service."""
    chosen = os.environ.get("OLLAMA_MODELS")
    if chosen:
        return [Path(chosen).expanduser()]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def installed() -> Iterator[InstalledModel]:
    """Every model with its file present, as ``ollama:name:tag``."""
    seen: set[str] = set()
    for folder in folders():
        root = folder / "manifests"
        try:
            manifests = sorted(path for path in root.rglob("*") if path.is_file())
        except OSError:  # the service's folder may be closed to us
            continue
        for manifest in manifests:
            name = _name(manifest.relative_to(root).parts)
            blob = _blob(manifest, folder / "blobs")
            if name and blob and name not in seen:
                seen.add(name)
                yield InstalledModel(f"ollama:{name}", "ollama", blob, blob.stat().st_size)


def matches(model: InstalledModel, name: str) -> bool:
    """Whether ``name`` (no prefix; no tag means "latest") is this model's, as Ollama understands it."""
    full = name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"
    return model.name.lower() == f"ollama:{full}".lower()


def _name(parts: tuple[str, ...]) -> str | None:
    """The name as Ollama shows it, which leaves out its own registry and the namespace "library"."""
    if len(parts) != 4:
        return None
    registry, namespace, model, tag = parts
    if registry != "registry.ollama.ai":
        return f"{registry}/{namespace}/{model}:{tag}"
    return f"{model}:{tag}" if namespace == "library" else f"{namespace}/{model}:{tag}"


def _blob(manifest: Path, blobs: Path) -> Path | None:
    """The file of the weights; None if it is not one file that is there."""
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [layer["digest"] for layer in layers if layer["mediaType"] == _MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    match = _DIGEST.fullmatch(digests[0]) if len(digests) == 1 and isinstance(digests[0], str) else None
    if match is None:
        return None
    blob = blobs / f"sha256-{match[1]}"
    try:
        with blob.open("rb") as file:
            return blob if file.read(4) == b"GGUF" else None
    except OSError:
        return None
