"""The catalogue: short names for models, and where each comes from (``catalog.toml``)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue; ``bytes`` is approximate unless there is a ``sha256``."""

    name: str
    source: str
    licence: str
    parameters: str
    bytes: int
    aliases: tuple[str, ...] = ()
    sha256: str | None = None
    wheel_bytes: int | None = None  # what is downloaded, for a source that is a wheel


@cache
def entries() -> tuple[Entry, ...]:
    """All entries, in the order of the file."""
    text = Path(__file__).with_name("catalog.toml").read_text(encoding="utf-8")
    return tuple(
        Entry(name=name, **{**fields, "aliases": tuple(fields.get("aliases", ()))})
        for name, fields in tomllib.loads(text).items()
    )


def find(name: str) -> Entry | None:
    """The entry with this name or alias, in any case."""
    name = name.lower()
    return next((entry for entry in entries() if name == entry.name or name in entry.aliases), None)


def by_source(source: str) -> Entry | None:
    """The entry that comes from ``source``."""
    return next((entry for entry in entries() if entry.source == source), None)


def suggestions(name: str, others: Iterable[str] = ()) -> list[str]:
    """Names much like ``name``, the likeliest first: for "did you mean"."""
    name = name.lower()
    known = {entry.name: entry.name for entry in entries()}
    known |= {alias: alias for entry in entries() for alias in entry.aliases}
    known |= {other.lower(): other for other in others}
    family = [known[other] for other in known if other.split(":")[0] == name]  # "qwen3" alone
    close = [known[other] for other in difflib.get_close_matches(name, known, n=4, cutoff=0.6)]
    return list(dict.fromkeys(close[:2] + family + close[2:]))[:6]
