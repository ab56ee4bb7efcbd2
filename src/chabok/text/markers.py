"""Finding markers such as <think> or <tool_call> in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def overlap(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``markers`` without being all of it."""
    best = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), best, -1):
            if text.endswith(marker[:size]):
                best = size
                break
    return best


def first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Where the first of ``markers`` begins in ``text``, and which it is; (-1, "") if there is none."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    if not found:
        return -1, ""
    at, _, marker = min(found)
    return at, marker
