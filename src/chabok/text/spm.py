"""SentencePiece BPE: the tokenizers of Llama 2, Mistral and Gemma, rebuilt from pieces and scores."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from math import inf

import numpy as np

from chabok.errors import CheckpointError
from chabok.text.merging import merge
from chabok.text.pretokenizers import LIKENESS, PIECE_CHARACTERS, rough_pieces
from chabok.text.vocabulary import TokenType, Vocabulary, flag, numbers

_CACHED_CHUNKS = 1 << 15
_CACHED_LENGTH = 64  # longer ones are seldom seen twice
_SPACE = "▁"
_BYTE = re.compile(rb"<0x([0-9A-F]{2})>")


class SentencePiece:
    """Any two neighbours that form a piece are joined, best score first; what is left over is spelt in bytes.

    A file has pieces and scores but no list of merges, and several splits of one piece must tie (leftmost
    first), which a list of merges cannot say; so the scores themselves drive the merge loop, exactly as in
    SentencePiece. Text is cut where no piece can reach across (before most spaces), and chunks are cached.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object]) -> None:
        scores = numbers(metadata, "tokenizer.ggml.scores", len(vocabulary))
        if scores is None:
            raise CheckpointError("tokenizer.ggml.scores is missing: a SentencePiece vocabulary needs scores")
        self._vocabulary = vocabulary
        costs = -scores.astype(np.float64)
        self._prefix_space = flag(metadata, "add_space_prefix", True)
        # Control tokens are no pieces: otherwise "<", "s>" in user text could merge into one.
        reserved = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
        costs[np.isin(np.frombuffer(vocabulary.types, np.uint8), reserved)] = np.inf
        self._costs = array("d", costs.tobytes())  # a quarter of a list's memory
        self._ids = vocabulary.ids
        self._bytes = _byte_tokens(vocabulary)
        self._chunk = _chunk_pattern(vocabulary.tokens)
        self._chunks: dict[str, list[int]] = {}

    @property
    def prefix_space(self) -> bool:
        """Whether text after a special token, or at the start, gets a space in front."""
        return self._prefix_space

    def encode(self, text: str, limit: int | None = None) -> list[int]:
        """The tokens of a text that holds no special token; the space prefix is the caller's.

        See ``Tokenizer.encode`` for the limit.
        """
        ids: list[int] = []
        chunks = self._chunks
        for match in self._chunk.finditer(text.replace(" ", _SPACE)):
            if limit is not None and len(ids) > limit:
                break
            chunk = match[0]
            if limit is not None and len(chunk) > 4 * PIECE_CHARACTERS:
                # No break far and wide: see roughly whether it fits before all of it is merged.
                rough: list[int] = []
                for n, part in enumerate(rough_pieces(chunk), 1):
                    rough += self._encode_chunk(part)
                    if len(ids) + len(rough) > limit + LIKENESS * n:
                        return ids + rough
            found = chunks.get(chunk)
            if found is None:
                found = self._encode_chunk(chunk)
                if len(chunk) <= _CACHED_LENGTH:
                    if len(chunks) >= _CACHED_CHUNKS:
                        chunks.clear()
                    chunks[chunk] = found
            ids += found
        return ids

    def _encode_chunk(self, chunk: str) -> list[int]:
        ids: list[int] = []
        for part in merge([char.encode() for char in chunk], self._cost):
            token = self._ids.get(part)
            if token is not None and self._costs[token] < inf:
                ids.append(token)
            else:
                ids += [self._bytes[byte] for byte in part]
        return ids

    def _cost(self, left: bytes, right: bytes) -> float | None:
        token = self._ids.get(left + right)
        if token is None:
            return None
        cost = self._costs[token]
        return cost if cost < inf else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; none for unused ones."""
        text = self._vocabulary.tokens[token]
        kind = self._vocabulary.types[token]
        if kind == TokenType.NORMAL:
            return text.replace(_SPACE.encode(), b" ")
        if kind == TokenType.BYTE:
            match = _BYTE.fullmatch(text)
            return bytes([int(match[1], 16)]) if match else text
        return b"" if kind in (TokenType.UNUSED, TokenType.UNDEFINED) else text


def _byte_tokens(vocabulary: Vocabulary) -> list[int]:
    """The token of each byte: "<0x41>", or the character itself, or the unknown token."""
    tokens: list[int] = []
    for byte in range(256):
        token = vocabulary.ids.get(b"<0x%02X>" % byte, vocabulary.ids.get(bytes([byte])))
        if token is None:
            token = vocabulary.unk_id
        if token is None:
            raise CheckpointError(f"tokenizer.ggml.tokens has no token <0x{byte:02X}>, and no unknown token")
        tokens.append(token)
    return tokens


def _chunk_pattern(pieces: Sequence[bytes]) -> re.Pattern[str]:
    """A pattern whose matches cover a text and can be merged one by one.

    A cut before a space is safe when no piece holds the character before it and the space side by side.
    """
    joined = (
        "".join(set(re.findall(f"([^\0]){_SPACE}", b"\0".join(pieces).decode(errors="replace")))) + _SPACE
    )
    glued = re.escape(joined)
    return re.compile(f"(?s:.+?)(?:(?<=[^{glued}])(?={_SPACE})|\\Z)")
