"""Keeping what a user writes apart from what a chat template writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_FIRST_STAND_IN = 0xF0000  # plane 15: private use, so no text has a meaning there
# Characters that templates look for in messages less often than "<" (as in '</think>' in content) come first.
_PREFERRED = "|｜[]_>"


class Guard:
    """Covers up, in given text, the characters without which no control token can be written.

    ``characters``: a small set such that every control token has at least one of them.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """``texts``: the text of every control token."""
        self.characters = _hitting_set({frozenset(text) for text in texts if text})

    def stand_ins(self, rendered: str, given: object) -> dict[str, str]:
        """An unused private character for each guarded character that ``given`` has; {} if it has none."""
        used: set[str] = set()
        _collect(given, used)
        needed = sorted(self.characters & used)
        used.update(rendered)
        free = (char for char in map(chr, range(_FIRST_STAND_IN, 0x110000)) if char not in used)
        return dict(zip(needed, free))

    def cover(self, given: Any, stand_ins: Mapping[str, str]) -> Any:
        """``given`` with stand-ins in every string, keys included, however deep."""
        return _map_strings(given, str.maketrans(dict(stand_ins)))


def restore(text: str, stand_ins: Mapping[str, str]) -> str:
    """``text`` with the real characters back in place of their stand-ins."""
    return text.translate({ord(stand_in): char for char, stand_in in stand_ins.items()})


def _hitting_set(alphabets: set[frozenset[str]]) -> frozenset[str]:
    """Few characters that meet every alphabet: greedily the one that most of those left have."""
    chosen: set[str] = set()
    while alphabets:
        counts: dict[str, int] = {}
        for alphabet in alphabets:
            for char in alphabet:
                counts[char] = counts.get(char, 0) + 1
        # Letters and digits would be in every message; punctuation serves wherever a token has any.
        best = max(counts, key=lambda char: (not char.isalnum(), counts[char], -_rank(char), char))
        chosen.add(best)
        alphabets = {alphabet for alphabet in alphabets if best not in alphabet}
    return frozenset(chosen)


def _rank(char: str) -> int:
    position = _PREFERRED.find(char)
    return position if position >= 0 else len(_PREFERRED)


def _collect(value: object, into: set[str]) -> None:
    if isinstance(value, str):
        into.update(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(key, into)
            _collect(item, into)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, into)


def _map_strings(value: Any, table: Mapping[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(table)
    if isinstance(value, Mapping):
        return {_map_strings(key, table): _map_strings(item, table) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, table) for item in value]
    return value
