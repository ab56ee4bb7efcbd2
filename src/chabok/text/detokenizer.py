"""Text out of tokens as they come."""

from __future__ import annotations

import codecs
from typing import Protocol


class _Source(Protocol):
    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...


class Detokenizer:
    """Turns tokens into text one by one; never gives half a character.

    The texts of ``push`` and ``finish`` joined are what ``Tokenizer.decode`` gives for all the tokens at
    once. Bytes that cannot become a character any more are given as U+FFFD at once, unfinished ones at
    ``finish``.
    """

    __slots__ = ("_decoder", "_skip_special", "_source", "_strip", "_visible")

    def __init__(
        self,
        source: _Source,
        *,
        skip_special: bool = True,
        strip_space: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        """``strip_space``: leave out the space in front of the first text (SentencePiece's own prefix).

        ``visible``: control tokens that are not left out.
        """
        self._source = source
        self._skip_special = skip_special
        self._strip = strip_space
        self._visible = visible
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is certain once ``token`` is known; often a word, sometimes ""."""
        if self._skip_special and self._source.is_special(token) and token not in self._visible:
            return ""
        data = self._source.token_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the tokens ended within a character, else ""."""
        return self._decoder.decode(b"", True)
