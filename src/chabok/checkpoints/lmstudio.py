"""Models in LM Studio's folder (``publisher/repo/file.gguf``): run where they are, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from chabok.checkpoints.installed import InstalledModel, model_files, size_of


def folders() -> list[Path]:
    """Where LM Studio keeps models; a pointer file says so where its home was moved."""
    home = Path.home()
    found = [home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"]
    try:
        moved = (home / ".lmstudio-home-pointer").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        moved = ""
    if moved and Path(moved) / "models" not in found:
        found.insert(0, Path(moved) / "models")
    return found


def installed() -> Iterator[InstalledModel]:
    """Every model, as ``lmstudio:publisher/repo/file.gguf``."""
    seen: set[str] = set()
    for folder in folders():
        for path in model_files(folder.rglob("*.gguf")):
            name = f"lmstudio:{path.relative_to(folder).as_posix()}"
            if name not in seen:
                seen.add(name)
                yield InstalledModel(name, "lmstudio", path, size_of(path))


def matches(model: InstalledModel, name: str) -> bool:
    """Whether ``name`` (no prefix) means this model: its path, ``publisher/repo``, the repo or the file."""
    path = model.name.removeprefix("lmstudio:").lower()
    parts = path.split("/")
    names = {path, path.removesuffix(".gguf"), parts[-1], parts[-1].removesuffix(".gguf")}
    if len(parts) >= 2:
        names |= {"/".join(parts[:-1]), parts[-2]}
    return name.lower() in names
