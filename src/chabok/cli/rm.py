"""``chabok rm``: remove a fetched model and its packed weights."""

from __future__ import annotations

from typing import Annotated

import typer


def rm(
    model: Annotated[str, typer.Argument(help="A name chabok list shows.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Remove a model that Chabok fetched, with its packed weights, but no other program's files."""
    from chabok.checkpoints import sources
    from chabok.checkpoints.gguf import GGUF
    from chabok.checkpoints.packed import PackedStore
    from chabok.checkpoints.storage import format_bytes
    from chabok.errors import CheckpointError, SourceError

    found = sources.find_installed(model)
    if found is None:
        path = sources.find(model)
        if path is not None:
            raise SourceError(f"{path} was not fetched by Chabok; delete the file yourself")
        raise SourceError(f"{model} is not on this machine; `chabok list` shows what is")
    if not found.is_ours:
        sources.remove(found)  # raises, saying whose it is
    store = PackedStore()
    try:
        packed = store.sizes_of(GGUF.open(found.path).fingerprint)
    except CheckpointError:  # a damaged file has no packed weights that could be told
        packed = {}
    size = format_bytes(found.n_bytes + sum(packed.values()))
    if not yes and not typer.confirm(f"Remove {found.path.name} and its packed weights ({size})?"):
        raise typer.Exit(1)
    for key in packed:
        store.remove(key)
    sources.remove(found)
    typer.echo(f"{model}: removed, {size} freed")
