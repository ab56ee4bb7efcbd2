"""What there is to say of the models that clients may name, loaded or not."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chabok.errors import ChabokError
from chabok.server.facts import Facts, read_facts
from chabok.server.loading import Loader, in_thread
from chabok.server.settings import model_name

SCAN_S = 5.0
"""How old the list of installed models may be."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that clients may name, loaded or not.

    size_bytes: its file. memory_bytes: what it takes now. expires: when it will be unloaded if nobody uses it
    until then, in seconds since the epoch; None: not loaded, or to stay. context: tokens, as served.
    trained_context: tokens the model was made for. A model whose file could not be read has error instead.
    """

    name: str
    aliases: tuple[str, ...] = ()
    loaded: bool = False
    loading: bool = False
    in_use: int = 0
    size_bytes: int = 0
    memory_bytes: int = 0
    family: str = ""
    title: str = ""
    parameters: int = 0
    quantization: str = ""
    context: int = 0
    trained_context: int = 0
    modified: float = 0.0
    digest: str = ""
    expires: float | None = None
    preloaded: bool = False
    load_s: float = 0.0
    error: str = ""
    path: Path | None = None


def described(facts: Facts, context: int | None) -> dict[str, Any]:
    """The fields of an entry that a file says. context: tokens it is served with; None: the default."""
    from chabok.engine.load import DEFAULT_CONTEXT

    return {
        "size_bytes": facts.size,
        "family": facts.family,
        "title": facts.title,
        "parameters": facts.parameters,
        "quantization": facts.quantization,
        "context": min(facts.context, context or DEFAULT_CONTEXT),
        "trained_context": facts.context,
        "modified": facts.modified,
        "digest": facts.fingerprint,
        "path": facts.path,
    }


class Installed:
    """The installed models, listed anew in a thread when the list is asked for and old."""

    def __init__(self, loader: Loader, context: int | None, clock: Callable[[], float]) -> None:
        """``context``: tokens they are served with; None for the default."""
        self.entries: dict[str, ModelEntry] = {}
        self._loader, self._context, self._clock = loader, context, clock
        self._scanned = -math.inf
        self._scan: asyncio.Future[dict[str, ModelEntry]] | None = None

    def renew(self) -> None:
        """Have the list made anew unless it is fresh; it is replaced some time later."""
        if self._scan is None and self._clock() - self._scanned >= SCAN_S:
            self._scan = in_thread(self._list)
            self._scan.add_done_callback(self._take)

    def _take(self, scan: asyncio.Future[dict[str, ModelEntry]]) -> None:
        self._scan = None
        self._scanned = self._clock()
        if not scan.cancelled() and scan.exception() is None:
            self.entries = scan.result()

    def _list(self) -> dict[str, ModelEntry]:
        found: dict[str, ModelEntry] = {}
        for model in {id(model): model for model in self._loader.installed().values()}.values():
            name = model_name(model.name)
            with suppress(ChabokError, OSError):  # of a family that cannot be run, or gone
                found[name] = replace(ModelEntry(name), **described(read_facts(model.path), self._context))
        return found
