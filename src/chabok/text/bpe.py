"""Byte-level BPE: the tokenizers of GPT-2 and its descendants (Llama 3, Qwen, SmolLM, DeepSeek ...)."""

from __future__ import annotations

from collections.abc import Mapping

from chabok.text.merging import merge
from chabok.text.pretokenizers import LIKENESS, PIECE_CHARACTERS, PreTokenizer, pieces, rough_pieces
from chabok.text.vocabulary import TokenType, Vocabulary, byte_strings

_CACHED_WORDS = 1 << 15
_CACHED_LENGTH = 64  # longer ones are seldom seen twice


def _byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself where it is visible, else one from U+0100 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in visible)
    stand_ins = {byte: chr(0x100 + index) for index, byte in enumerate(others)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]


_ALPHABET = [char.encode() for char in _byte_alphabet()]
_BYTE_OF = {char: byte for byte, char in enumerate(_byte_alphabet())}


class ByteLevelBPE:
    """Words are cut by the pre-tokenizer, spelt in bytes, and merged by the file's list of merges.

    The merges stay the strings the file has ("Ġ t"), as keys of one dictionary: that takes a quarter of the
    time and half the memory of the native model of the ``tokenizers`` library, which matters more to a local
    engine than throughput on text it has never seen. Words seen before come from a cache.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object], pre: PreTokenizer) -> None:
        merges = byte_strings(metadata, "tokenizer.ggml.merges")
        # Reversed, because the first of two equal merges counts and a dictionary keeps the last.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1)))
        self._vocabulary = vocabulary
        self._ids = vocabulary.ids
        self._split = pre.split
        self._whole_words = pre.whole_words
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of a text that holds no special token; see ``Tokenizer.encode`` for the limit."""
        if limit is None:
            return [token for piece in pieces(text) for token in self._encode_piece(piece)]
        ids: list[int] = []
        for piece in pieces(text):
            if len(piece) > 4 * PIECE_CHARACTERS:
                # No break far and wide: see roughly whether it fits before it is cut into words in one go.
                rough: list[int] = []
                for n, part in enumerate(rough_pieces(piece), 1):
                    rough += self._encode_piece(part)
                    if len(ids) + len(rough) > limit + LIKENESS * n:
                        return ids + rough
            ids += self._encode_piece(piece)
            if len(ids) > limit:
                break
        return ids

    def _encode_piece(self, text: str) -> list[int]:
        ids: list[int] = []
        words = self._words
        for word in self._split(text):
            found = words.get(word)
            if found is None:
                found = self._encode_word(word)
                if len(word) <= _CACHED_LENGTH:
                    if len(words) >= _CACHED_WORDS:
                        words.clear()
                    words[word] = found
            ids += found
        return ids

    def _encode_word(self, word: str) -> list[int]:
        symbols = [_ALPHABET[byte] for byte in word.encode()]
        if self._whole_words:
            token = self._piece(b"".join(symbols))
            if token is not None:
                return [token]
        ids: list[int] = []
        for part in merge(symbols, self._cost):
            token = self._piece(part)
            # Only a damaged vocabulary has a merge that makes no token, or a control token. A few
            # (StarCoder's, SmolLM's) lack bytes that their training text never had; such a byte is dropped,
            # as everywhere.
            spelt = [self._piece(char.encode()) for char in part.decode()] if token is None else [token]
            ids += [token for token in spelt if token is not None]
        return ids

    def _piece(self, part: bytes) -> int | None:
        token = self._ids.get(part)
        return None if token is None or self._vocabulary.is_control(token) else token

    def _cost(self, left: bytes, right: bytes) -> int | None:
        return self._ranks.get(b"%b %b" % (left, right))

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for unused ones."""
        text = self._vocabulary.tokens[token]
        kind = self._vocabulary.types[token]
        if kind == TokenType.NORMAL:
            try:
                return bytes([_BYTE_OF[char] for char in text.decode()])
            except (KeyError, UnicodeDecodeError):
                return text  # an added token that the file counts as normal
        return b"" if kind in (TokenType.UNUSED, TokenType.UNDEFINED) else text
