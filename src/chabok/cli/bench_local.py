"""Loads a model without a server as what is measured, with progress."""

from __future__ import annotations

from chabok.choose.local import LocalModel
from chabok.cli.progress import Bars


def open_model(name: str, *, quiet: bool = False) -> LocalModel:
    """Load a model, with progress. SourceError and its like: it cannot be had."""
    with Bars(quiet=quiet) as bars:
        return LocalModel.open(name, bars)
