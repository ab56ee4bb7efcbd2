"""Model files that are on this machine, wherever they came from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from chabok.checkpoints.gguf import shard_paths

_QUANTIZATION = re.compile(
    r"(?:^|[-._])(I?Q\d\w*|T?Q\d_\d|MXFP4\w*|NVFP4|BF16|F16|FP16|F32)(?=[-._]|$)", re.I
)


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model file, or all shards of one, that can be run as it is."""

    name: str  # as ``resolve`` takes it
    source: str  # "hub", "wheel", "ollama" or "lmstudio"
    path: Path  # the file, or its first shard
    n_bytes: int  # of all shards
    licence: str | None = None

    @property
    def is_ours(self) -> bool:
        """Whether Chabok fetched it and may remove it."""
        return self.source in ("hub", "wheel")


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is remembered about a fetched file, in a small JSON file beside it."""

    spec: str
    licence: str | None
    sha256: dict[str, str]  # by file name

    def write(self, model: Path) -> None:
        """Put it beside ``model``."""
        _receipt_path(model).write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, model: Path) -> Receipt | None:
        """What is remembered of ``model``; None if there is nothing legible."""
        try:
            fields = json.loads(_receipt_path(model).read_text())
            return cls(str(fields["spec"]), fields["licence"], dict(fields["sha256"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _receipt_path(model: Path) -> Path:
    return model.with_name(model.name + ".json")


def model_files(paths: Iterable[Path]) -> list[Path]:
    """The models among ``paths``: complete, one path for a split one, without projectors and the like."""
    found: list[Path] = []
    for path in sorted(paths):
        if not is_model_name(path.name):
            continue
        shards = shard_paths(path)
        if path == shards[0] and all(shard.is_file() for shard in shards):
            found.append(path)
    return found


def is_model_name(name: str) -> bool:
    """Whether a file of this name holds a language model: GGUF, but no image projector or the like."""
    name = name.lower()
    return name.endswith(".gguf") and not name.startswith(("mmproj", "imatrix")) and ".mmproj" not in name


def quantization(name: str) -> str | None:
    """The quantization in a file name, upper case: "Q4_K_M" in ``Some-Model-Q4_K_M.gguf``."""
    matches: list[str] = _QUANTIZATION.findall(name.removesuffix(".gguf"))
    return matches[-1].upper() if matches else None  # the last: others may be part of the model's name


def size_of(model: Path) -> int:
    """Bytes of ``model`` with all its shards."""
    return sum(shard.stat().st_size for shard in shard_paths(model))


def delete(model: Path, root: Path) -> None:
    """Remove a fetched model with its shards and receipt, and folders under ``root`` this leaves empty."""
    for path in [*shard_paths(model), _receipt_path(model)]:
        path.unlink(missing_ok=True)
    folder = model.parent
    while folder != root and root in folder.parents and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent
