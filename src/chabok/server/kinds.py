"""How one setting is written, on a command line or in TOML: whole numbers, sizes, durations, lists."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a setting may be.

    read: from what was written (text from a command line; text, number, bool or list from TOML) to the value;
    raises ValueError whose text completes "NAME must be ...". metavar: what stands for it in help.
    """

    read: Callable[[Any], Any]
    metavar: str


def setting(default: Any, kind: Kind, text: str) -> Any:
    """A field of a settings class. text: what it means, in a few words, for help and documentation."""
    return field(default=default, metadata={"kind": kind, "help": text})


def whole(low: int, high: int | None = None) -> Kind:
    """Integers from low to high."""
    bound = f"from {low} to {high}" if high is not None else f"of at least {low}"

    def read(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"an integer {bound}")
        if high is not None and value > high:
            raise ValueError(f"an integer {bound}")
        return value

    return Kind(read, "N")


def above_zero(unit: str) -> Kind:
    """Numbers above 0, of a unit."""

    def read(value: Any) -> float:
        if isinstance(value, str):
            value = _float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"a number of {unit} above 0")
        return float(value)

    return Kind(read, "N")


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def read_duration(value: Any) -> float:
    """Seconds that are meant: 90, "90", "90s", "1h30m"; "forever" or a negative number is infinite.

    This is also how Ollama's clients write ``keep_alive``. Raises ValueError.
    """
    said = 'a duration such as 90, "30s", "5m", "1h30m", or "forever"'
    if isinstance(value, bool):
        raise ValueError(said)
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("forever", "never", "inf"):
            return math.inf
        negative = text.startswith("-")
        text = text.removeprefix("-")
        number = _float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None
        if number is None:
            parts = _DURATION.findall(text)
            if not parts or "".join(_DURATION.sub("", text).split()):
                raise ValueError(said)
            number = sum(float(amount) * _SECONDS[unit] for amount, unit in parts)
        value = -number if negative else number
    if not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(said)
    return math.inf if value < 0 else float(value)


def duration(*, forever: bool = False) -> Kind:
    """Durations, in seconds. forever: whether one without an end is permitted, and 0."""

    def read(value: Any) -> float:
        seconds = read_duration(value)
        if not forever and not 0 < seconds < math.inf:
            raise ValueError('a duration above 0, such as 90, "30s" or "5m"')
        return seconds

    return Kind(read, "DURATION")


def size(low: int = 0) -> Kind:
    """Numbers of bytes: 1000000, "1MB", "4GiB"."""

    def read(value: Any) -> int:
        from chabok.checkpoints.storage import parse_bytes
        from chabok.errors import ResourceError

        said = f'a size such as 500MB or "4GB"{f" of at least {low} bytes" if low > 1 else ""}'
        if isinstance(value, str):
            try:
                value = parse_bytes(value, "")
            except ResourceError:
                raise ValueError(said) from None
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(said)
        return value

    return Kind(read, "SIZE")


def text(metavar: str = "TEXT", *, empty: bool = False) -> Kind:
    """Text."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or not (value.strip() or empty) or "\0" in value:
            raise ValueError("text" if empty else "text that is not empty")
        return value

    return Kind(read, metavar)


def path() -> Kind:
    """The path of a file; ``~`` is the home folder."""

    def read(value: Any) -> Path:
        if isinstance(value, Path):
            return value
        if not isinstance(value, str) or not value or "\0" in value:
            raise ValueError("the path of a file")
        try:
            return Path(value).expanduser()
        except RuntimeError:
            raise ValueError("a path; there is no such user, or no home folder") from None

    return Kind(read, "FILE")


def choice(*names: str) -> Kind:
    """One of a few words."""

    def read(value: Any) -> str:
        if value not in names:
            raise ValueError(f"{' or '.join(names)}")
        return str(value)

    return Kind(read, "|".join(names))


def texts(metavar: str) -> Kind:
    """Several texts: a list in TOML, a repeated option on a command line."""

    def read(value: Any) -> tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
            raise ValueError("a list of texts that are not empty")
        return tuple(items)

    return Kind(read, metavar)


def origins() -> Kind:
    """Web origins as browsers send them (RFC 6454, section 6.1), or * for all."""

    def read(value: Any) -> tuple[str, ...]:
        items: tuple[str, ...] = texts("").read(value)
        if not all(_ORIGIN.fullmatch(item) for item in items):
            raise ValueError('"*", or origins such as "https://app.example.com", with nothing after the host')
        return items

    return Kind(read, "ORIGIN")


def addresses() -> Kind:
    """IP addresses and networks, or * for all."""

    def read(value: Any) -> tuple[str, ...]:
        items: tuple[str, ...] = texts("").read(value)
        for item in items:
            try:
                if item != "*":
                    ipaddress.ip_network(item, strict=False)
            except ValueError:
                raise ValueError('"*", or IP addresses or networks such as "10.0.0.0/8"') from None
        return items

    return Kind(read, "ADDRESS")


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


FLAG = Kind(_read_flag, "")
"""True or false."""
