"""The vocabulary of a model file: its tokens, what kind each one is, and which ones have a part to play."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum

import numpy as np

from chabok.errors import CheckpointError


class TokenType(IntEnum):
    """What a token is for, as ``tokenizer.ggml.token_type`` numbers it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Files seldom say which tokens end a generation besides the one in eos_token_id, so they are known by their
# text. The lists are llama.cpp's (llama-vocab.cpp), so that both engines stop at the same token.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
_FILL_IN_TEXTS = {
    "fim_pre_token_id": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suf_token_id": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_mid_token_id": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}  # fmt: skip
_FILL_IN_ENDS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_CALLS = {b"<|call|>", b"<|calls|>"}
_ANSWERS = {b"<|return|>", b"<|flush|>"}
# gpt-oss marks the structure of its answer with these; a reader of the answer must see them.
_VISIBLE_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")


class Vocabulary:
    """Tokens by id, ids by text, and the tokens with a special part, read from GGUF metadata.

    ``tokens``: each token as the file writes it, in UTF-8: bytes take half the memory of strings here, and
    the time to decode them is saved; ``ids``: the way back; ``types``: the TokenType of each, one byte per
    token; ``control``: ids that only a template or ``special=True`` may write, never user text;
    ``user_defined``: ids matched in any text before everything else; ``eos_ids``: every id that ends a
    generation.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.tokens = byte_strings(metadata, "tokenizer.ggml.tokens")
        n = len(self.tokens)
        if not n:
            raise CheckpointError("tokenizer.ggml.tokens is empty: the file has no vocabulary")
        self.ids: dict[bytes, int] = dict(zip(self.tokens, range(n)))
        types = _types(metadata, n)
        is_spm = metadata.get("tokenizer.ggml.model") == "llama"
        self.bos_id = self._special(metadata, "bos_token_id", 1 if is_spm else None)
        self.eos_id = self._special(metadata, "eos_token_id", 2 if is_spm else None)
        self.unk_id = self._special(metadata, "unknown_token_id", 0 if is_spm else None)
        self.pad_id = self._special(metadata, "padding_token_id", None)
        self.eos_ids = self._find_ends(metadata, types)
        self.types = types.tobytes()
        special = (types == TokenType.CONTROL) | (types == TokenType.UNKNOWN)
        self.control: list[int] = np.flatnonzero(special).tolist()
        self.user_defined: list[int] = np.flatnonzero(types == TokenType.USER_DEFINED).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def text(self, token: int | None) -> str:
        """The text of a token, "" for None: what a template sees as ``bos_token``."""
        return "" if token is None else self.tokens[token].decode(errors="replace")

    def is_control(self, token: int) -> bool:
        """Whether a token stands for structure (a turn, an end) and not for text."""
        return self.types[token] in (TokenType.CONTROL, TokenType.UNKNOWN)

    def _special(self, metadata: Mapping[str, object], name: str, default: int | None) -> int | None:
        """The id in ``tokenizer.ggml.<name>``; files do carry ids out of range, which count as absent."""
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(value, int | np.integer) or not 0 <= int(value) < len(self.tokens):
            return None
        return int(value)

    def _find_ends(self, metadata: Mapping[str, object], types: np.ndarray) -> frozenset[int]:
        """Every end-of-generation id; corrects ``types`` where a file has structure marked as text."""
        ends: set[int] = set()
        for key, texts in _FILL_IN_TEXTS.items():
            token = self._special(metadata, key, None)
            if token is None:
                token = next((self.ids[text.encode()] for text in texts if text.encode() in self.ids), None)
                if token is not None:
                    types[token] = TokenType.CONTROL
            if token is not None and key in _FILL_IN_ENDS:
                ends.add(token)
        for text in _END_TEXTS:
            token = self.ids.get(text.encode())
            if token is not None:
                ends.add(token)
                types[token] = TokenType.CONTROL
        # Where "</s>" is no control token, it closes a struck-out passage of HTML (Gemma, Qwen).
        token = self.ids.get(b"</s>")
        if token is not None and types[token] == TokenType.CONTROL:
            ends.add(token)
        for text in _VISIBLE_TEXTS:
            token = self.ids.get(text.encode())
            if token is not None:
                types[token] = TokenType.USER_DEFINED
        # Harmony (gpt-oss) and Solar: "<|end|>" ends one message of several, and generation goes on.
        found = {self.tokens[token] for token in ends}
        if b"<|end|>" in found and found & _CALLS and found & _ANSWERS:
            ends.remove(self.ids[b"<|end|>"])
            types[self.ids[b"<|end|>"]] = TokenType.USER_DEFINED
        named = [
            self.eos_id,
            self._special(metadata, "eot_token_id", None),
            self._special(metadata, "eom_token_id", None),
        ]
        return frozenset(ends.union(token for token in named if token is not None))


def byte_strings(metadata: Mapping[str, object], key: str) -> list[bytes]:
    """The array of strings under ``key`` in UTF-8, or an error that names the field."""
    value = metadata.get(key)
    if value is None:
        raise CheckpointError(f"{key} is missing: the file cannot be used to read or write text")
    raws: Callable[[], list[bytes]] | None = getattr(
        value, "raws", None
    )  # an array still in the file gives its bytes undecoded
    if raws is not None:
        return raws()
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{key} is not an array of strings")
    return [item.encode() for item in value]


def flag(metadata: Mapping[str, object], name: str, default: bool) -> bool:
    """The boolean ``tokenizer.ggml.<name>``."""
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool | np.bool_):
        raise CheckpointError(f"tokenizer.ggml.{name} is {value!r}, expected true or false")
    return bool(value)


def numbers(metadata: Mapping[str, object], key: str, n: int) -> np.ndarray | None:
    """The numeric array under ``key``, at least ``n`` long, or None when the file has none."""
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray | Sequence):
        raise CheckpointError(f"{key} is {type(value).__name__}, expected an array of numbers")
    array = np.asarray(value)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise CheckpointError(f"{key} is not an array of numbers")
    if len(array) < n:
        raise CheckpointError(f"{key} has {len(array)} entries for {n} tokens")
    return array[:n]


def _types(metadata: Mapping[str, object], n: int) -> np.ndarray:
    """uint8[n]; a vocabulary without types is all NORMAL, a number out of range is UNDEFINED."""
    types = numbers(metadata, "tokenizer.ggml.token_type", n)
    if types is None:
        return np.full(n, TokenType.NORMAL, np.uint8)
    known = (types >= 0) & (types <= int(TokenType.BYTE))
    return np.where(known, types, int(TokenType.UNDEFINED)).astype(np.uint8)
