"""Token for token what llama.cpp makes of a wide corpus (fixtures/reference.json, see make_reference.py)."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from tests.models import model_path
from tests.text.vocabularies import FIXTURES, byte_level, sentencepiece

from chabok.checkpoints.gguf import GGUF
from chabok.text.tokenizer import Tokenizer


@functools.cache
def reference() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FIXTURES / "reference.json").read_text())
    return loaded


def small_vocabulary(name: str) -> dict[str, Any]:
    if name.startswith("pre:"):
        return byte_level(name.removeprefix("pre:"))
    return sentencepiece(add_space_prefix=name == "spm")


def assert_equals_reference(tokenizer: Tokenizer, name: str) -> None:
    texts = reference()["texts"]
    for kind, expected in reference()[name].items():
        for text, ids in zip(texts, expected, strict=True):
            assert tokenizer.encode(text, special=kind == "special", add_bos=False) == ids, (kind, text)


@pytest.mark.parametrize("name", [name for name in reference() if name.startswith(("pre:", "spm"))])
def test_small_vocabularies_give_the_tokens_of_llama_cpp(name: str) -> None:
    assert_equals_reference(Tokenizer.from_gguf(small_vocabulary(name)), name)


@pytest.mark.parametrize(
    "name",
    [
        "smollm2",
        pytest.param("gemma3", marks=pytest.mark.wide),
        pytest.param("qwen05", marks=pytest.mark.wide),
    ],
)
def test_real_vocabularies_give_the_tokens_of_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(GGUF.open(model_path(name)).metadata)
    assert_equals_reference(tokenizer, name)
    for text in reference()["texts"]:
        # SentencePiece cannot tell "▁" from a space, and Gemma's vocabulary is one.
        wanted = text.replace("▁", " ") if name == "gemma3" else text
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == wanted


@pytest.mark.wide
@pytest.mark.parametrize("name", ["gemma3", "qwen05"])
def test_a_closing_html_tag_is_text_where_its_author_made_it_text(name: str) -> None:
    # llama.cpp takes any "</s>" for the end of generation; transformers and the models' authors do not.
    tokenizer = Tokenizer.from_gguf(GGUF.open(model_path(name)).metadata)
    assert tokenizer.vocabulary.ids[b"</s>"] not in tokenizer.eos_ids
    assert tokenizer.decode(tokenizer.encode("<s>old</s>new", special=True, add_bos=False)) == "<s>old</s>new"
