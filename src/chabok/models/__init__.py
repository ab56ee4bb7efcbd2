"""One file per architecture family: configuration to program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chabok.errors import CheckpointError, ResourceError

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from chabok.checkpoints.gguf import GGUF
    from chabok.checkpoints.packed import PackedStore
    from chabok.checkpoints.progress import Progress
    from chabok.models.config import Config
    from chabok.models.transformer import Transformer


def check_supported(gguf: GGUF) -> None:
    """Raise CheckpointError, naming what is supported, if the file's architecture is not."""
    _family(gguf)


def read_config(gguf: GGUF) -> Config:
    """The shape of a model, read from its file's header alone; raises CheckpointError as ``load`` does."""
    config: Config = _family(gguf).read(gguf)
    return config


def load(
    gguf: GGUF,
    *,
    threads: int | None = None,
    pack: PackedStore | None = None,
    kernels: Path | None = None,
    max_rows: int = 512,
    progress: Progress | None = None,
) -> Transformer:
    """Make a model ready to run.

    pack: where packed weights are kept; None packs into memory. kernels: folder of compiled kernels, by
    default the cache's. Raises CheckpointError for a file that is damaged or not supported, naming the field
    or tensor.
    """
    from chabok.checkpoints.paths import kernels_dir
    from chabok.compute.isa import UnsupportedCPUError, choose
    from chabok.compute.library import Library
    from chabok.models.transformer import Transformer
    from chabok.models.weights import Weights

    family = _family(gguf)
    config = family.read(gguf)
    weights = Weights(gguf, config)
    try:
        isa = choose()
    except UnsupportedCPUError as error:
        raise ResourceError(str(error)) from None
    weights.load(pack, progress)
    library = Library(isa, kernels or kernels_dir(), progress)
    return Transformer(
        config,
        weights,
        family.build,
        library,
        fingerprint=gguf.fingerprint,
        threads=threads,
        max_rows=max_rows,
    )


def _family(gguf: GGUF) -> ModuleType:
    from chabok.models import gemma, llama, qwen

    families: dict[str, ModuleType] = {
        arch: family for family in (llama, qwen, gemma) for arch in family.ARCHITECTURES
    }
    family = families.get(gguf.architecture)
    if family is None:
        raise CheckpointError(
            f"{gguf.path}: architecture '{gguf.architecture}' is not supported; "
            f"supported are {', '.join(sorted(families))}"
        )
    return family
