"""Finding special tokens in text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_PREFIX = 4


class SpecialTokens:
    """A set of tokens that are cut out of a text before it is tokenized.

    The longest token is looked for first, everywhere, then the next longest in what is left: llama.cpp's
    order, which decides what a run of 40 newlines becomes.
    """

    def __init__(self, tokens: Sequence[bytes], ids: Iterable[int]) -> None:
        """``tokens``: the text of every token; ``ids``: the ones to look for."""
        # Thousands of tokens begin alike (<unused0> ...): one look for the beginning rules them all out.
        self._by_prefix: dict[str, list[tuple[str, int]]] = {}
        for token in ids:
            text = tokens[token].decode(errors="replace")
            if text:
                self._by_prefix.setdefault(text[:_PREFIX], []).append((text, token))

    def split(self, text: str) -> list[int | str]:
        """``text`` in order, with the id of each token found in place of its text; no empty strings."""
        present = [
            entry
            for prefix, entries in self._by_prefix.items()
            if prefix in text
            for entry in entries
            if entry[0] in text
        ]
        present.sort(key=lambda entry: -len(entry[0].encode()))
        fragments: list[int | str] = [text] if text else []
        for token_text, token in present:
            fragments = [piece for fragment in fragments for piece in _cut(fragment, token_text, token)]
        return fragments


def _cut(fragment: int | str, token_text: str, token: int) -> Iterable[int | str]:
    if isinstance(fragment, int) or token_text not in fragment:
        return (fragment,)
    first, *others = fragment.split(token_text)
    pieces: list[int | str] = [first] if first else []
    for other in others:
        pieces.append(token)
        if other:
            pieces.append(other)
    return pieces
