"""``chabok list``: the models on this machine, and those the catalogue knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from chabok.checkpoints.installed import InstalledModel

_ORIGINS = {"hub": "hub", "wheel": "package", "ollama": "Ollama", "lmstudio": "LM Studio"}


def list_(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also what could be fetched.")] = False,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """List the models on this machine: fetched ones, Ollama's and LM Studio's."""
    from chabok.checkpoints import catalog, sources

    rows = [_row(model) for model in sources.installed()]
    here = {row["name"] for row in rows}
    if all_:
        rows += [
            {
                "name": entry.name,
                "installed": False,
                "origin": "catalogue",
                "bytes": entry.bytes,
                "parameters": entry.parameters,
                "licence": entry.licence,
                "source": entry.source,
                "path": None,
            }
            for entry in catalog.entries()
            if entry.name not in here
        ]
    if json:
        import json as encoder

        typer.echo(encoder.dumps(rows, indent=2))
    elif rows:
        _print(rows)
    else:
        typer.echo(
            "No models yet: `chabok pull smollm2` fetches a small one, `chabok list --all` shows more."
        )


def _row(model: InstalledModel) -> dict[str, Any]:
    from chabok.checkpoints import catalog

    entry = catalog.by_source(model.name)
    return {
        "name": entry.name if entry else model.name,
        "installed": True,
        "origin": _ORIGINS[model.source],
        "bytes": model.n_bytes,
        "parameters": entry.parameters if entry else None,
        "licence": model.licence,
        "source": model.name,
        "path": str(model.path),
    }


def _print(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from chabok.checkpoints.storage import format_bytes
    from chabok.cli.terminal import console, harmless

    out = console()
    longest = max(len(row["name"]) for row in rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Where there is little room, the licence gives way first; a name is what users type.
    table.add_column("name", overflow="fold", min_width=min(longest, max(out.width // 2, 1)))
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("parameters")
    table.add_column("from")
    table.add_column("licence")
    for row in rows:
        origin = row["origin"] if row["installed"] else "not fetched"
        size = format_bytes(row["bytes"])
        cells = (row["name"], size, row["parameters"] or "", origin, row["licence"] or "")
        table.add_row(*(Text(harmless(cell)) for cell in cells), style=None if row["installed"] else "dim")
    out.print(table)
