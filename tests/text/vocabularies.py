"""Small vocabularies for tests, as the metadata of a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_CONTROL_TEXTS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_USER_TEXTS = ["<tool_call>", "</tool_call>", "    "]


def byte_level(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """A byte-level BPE vocabulary of about 1,200 tokens, cut into words the way ``pre`` names."""
    small = _small()
    tokens = [*small["bpe_tokens"], *_CONTROL_TEXTS, *_USER_TEXTS]
    n = len(small["bpe_tokens"])
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": small["bpe_merges"],
        "tokenizer.ggml.token_type": [NORMAL] * n + [CONTROL] * 3 + [USER_DEFINED] * 3,
        "tokenizer.ggml.bos_token_id": n,
        "tokenizer.ggml.eos_token_id": n + 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return _changed(metadata, changes)


def sentencepiece(**changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of about 1,300 tokens: bytes, pieces with scores, added tokens."""
    pieces = _small()["spm_pieces"]
    added = ["<tag>", "  ", "\n\n", "<start_of_turn>", "<end_of_turn>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *added]
    types = [
        UNKNOWN,
        CONTROL,
        CONTROL,
        *[BYTE] * 256,
        *[NORMAL] * len(pieces),
        *[USER_DEFINED] * 3,
        *[CONTROL] * 2,
    ]
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        # Some pieces tie, so that the order of equals matters.
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i // 3) for i in range(len(pieces))] + [-1000.0] * 5,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``add_bos_token=True`` sets ``tokenizer.ggml.add_bos_token``; None takes the key away."""
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def _small() -> dict[str, list[str]]:
    small: dict[str, list[str]] = json.loads((FIXTURES / "small.json").read_text())
    return small
