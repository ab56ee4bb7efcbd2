from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.corpus import texts
from tests.text.vocabularies import CONTROL, NORMAL, USER_DEFINED, byte_level, sentencepiece

from chabok.errors import CheckpointError, RequestError
from chabok.text import bpe, pretokenizers, spm
from chabok.text.merging import merge
from chabok.text.tokenizer import Tokenizer

BPE = Tokenizer.from_gguf(byte_level("llama-bpe"))
SPM = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False, add_bos_token=False))
SPM_PREFIX = Tokenizer.from_gguf(sentencepiece(add_bos_token=False))
SPECIAL_TEXTS = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<s>",
    "</s>",
    "<unk>",
    "<0x41>",
]
unicode_text = st.text(st.characters(exclude_categories=["Cs"]))
tricky_text = st.lists(
    st.sampled_from(SPECIAL_TEXTS + [part for text in SPECIAL_TEXTS for part in text])
).map("".join)


def with_tokens(metadata: dict[str, Any], **kinds: int) -> dict[str, Any]:
    """``metadata`` with a token of each text and kind at the end."""
    tokens = "tokenizer.ggml.tokens"
    types = "tokenizer.ggml.token_type"
    return {
        **metadata,
        tokens: [*metadata[tokens], *kinds],
        types: [*metadata[types], *kinds.values()],
    }


@given(unicode_text)
def test_byte_level_text_survives_the_round_trip(text: str) -> None:
    assert BPE.decode(BPE.encode(text)) == text


@given(unicode_text)
def test_sentencepiece_text_survives_the_round_trip_up_to_its_space_sign(text: str) -> None:
    assert SPM.decode(SPM.encode(text)) == text.replace("▁", " ")


@given(unicode_text.filter(lambda text: "  " not in text and "\n\n" not in text and "<tag>" not in text))
def test_the_space_prefix_is_taken_off_again(text: str) -> None:
    assert SPM_PREFIX.decode(SPM_PREFIX.encode(text)) == text.replace("▁", " ")


@pytest.mark.parametrize("tokenizer", [BPE, SPM, SPM_PREFIX])
@given(text=tricky_text)
def test_user_text_never_becomes_a_control_token(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_special, ids))
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_recognised_when_asked_for() -> None:
    ids = BPE.encode("<|im_start|>a<|im_end|>", special=True)
    assert [BPE.is_special(token) for token in ids] == [True, False, True]
    assert BPE.decode(ids) == "a"
    assert BPE.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"


@pytest.mark.parametrize("special", [False, True])
def test_tokens_added_by_the_author_are_recognised_always(special: bool) -> None:
    ids = BPE.encode("x<tool_call>y", special=special)
    assert BPE.vocabulary.ids[b"<tool_call>"] in ids
    assert BPE.decode(ids) == "x<tool_call>y"


def test_the_longest_added_token_comes_first_whatever_stands_left_of_it() -> None:
    metadata = with_tokens(byte_level(), ab=USER_DEFINED, bcd=USER_DEFINED)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("abcd")] == [b"a", b"bcd"]


def naive_merge(symbols: list[bytes], costs: dict[bytes, int]) -> list[bytes]:
    symbols = list(symbols)
    while True:
        pairs = [(costs.get(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        possible = [(cost, i) for cost, i in pairs if cost is not None]
        if not possible:
            return symbols
        _, i = min(possible)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from([b"a", b"b", b"c"]), max_size=24),
    st.dictionaries(st.text("abc", min_size=2, max_size=5).map(str.encode), st.integers(0, 5), max_size=20),
)
def test_merging_takes_the_cheapest_pair_first_and_the_leftmost_of_equals(
    symbols: list[bytes], costs: dict[bytes, int]
) -> None:
    assert merge(symbols, lambda left, right: costs.get(left + right)) == naive_merge(symbols, costs)


@given(unicode_text, unicode_text)
def test_chunks_of_sentencepiece_do_not_change_the_tokens(left: str, right: str) -> None:
    # The text in one piece, merged without any cut.
    model = SPM._model
    text = f"{left} {right}".replace(" ", "▁").replace("<tag>", "").replace("\n\n", "\n")
    whole = model._encode_chunk(text) if text else []  # type: ignore[union-attr]
    assert model.encode(text) == whole


def test_a_lone_surrogate_becomes_a_replacement_character_and_a_pair_is_joined() -> None:
    assert BPE.decode(BPE.encode("a\ud83db")) == "a\ufffdb"
    assert BPE.decode(BPE.encode("\ud83d\ude00")) == "😀"


def test_a_word_that_is_a_token_is_taken_whole_where_the_family_says_so() -> None:
    metadata = with_tokens(byte_level("llama-bpe"), quixotry=NORMAL)
    assert len(Tokenizer.from_gguf(metadata).encode("quixotry")) == 1
    assert len(Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("quixotry")) > 1


def test_merges_cannot_make_a_control_token() -> None:
    metadata = with_tokens(byte_level(), zq=CONTROL)
    metadata["tokenizer.ggml.merges"] = ["z q", *metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("zq")] == [b"z", b"q"]


def test_a_byte_without_a_token_is_dropped() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [
        "[gone]" if t == "z" else t for t in metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("a z b")) == "a  b"


def test_the_beginning_of_text_is_added_when_the_model_wants_it_or_the_caller() -> None:
    bos = SPM.bos_id
    assert Tokenizer.from_gguf(sentencepiece()).encode("")[0] == bos  # SentencePiece models do by default
    assert SPM.encode("") == []
    assert SPM.encode("", add_bos=True) == [bos]
    assert Tokenizer.from_gguf(byte_level("llama-bpe", add_bos_token=None)).add_bos
    assert not Tokenizer.from_gguf(byte_level("qwen2", add_bos_token=None)).add_bos
    without = Tokenizer.from_gguf(byte_level(bos_token_id=None, add_bos_token=True))
    assert not without.add_bos
    with pytest.raises(RequestError, match="no beginning-of-text"):
        without.encode("a", add_bos=True)


def test_every_token_that_ends_a_generation_is_known_by_name_or_number() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(eot_token_id=5))
    ends = {tokenizer.token_bytes(token) for token in tokenizer.eos_ids if token != 5}
    assert ends == {b"<|im_end|>", b"<|endoftext|>"}
    assert 5 in tokenizer.eos_ids


def test_a_message_end_of_harmony_does_not_end_the_generation() -> None:
    metadata = with_tokens(byte_level(), **{"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL})
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.vocabulary.ids
    assert ids[b"<|end|>"] not in tokenizer.eos_ids
    assert {ids[b"<|return|>"], ids[b"<|call|>"]} <= tokenizer.eos_ids


def test_an_end_token_that_a_conversion_marked_as_text_is_a_control_token() -> None:
    tokenizer = Tokenizer.from_gguf(with_tokens(byte_level(), **{"<|eot_id|>": NORMAL}))
    assert tokenizer.is_special(tokenizer.vocabulary.ids[b"<|eot_id|>"])


def test_numbers_may_be_arrays() -> None:
    metadata = sentencepiece(add_bos_token=False)
    for key in ("scores", "token_type"):
        metadata[f"tokenizer.ggml.{key}"] = np.asarray(metadata[f"tokenizer.ggml.{key}"])
    text = texts()[10]
    assert Tokenizer.from_gguf(metadata).encode(text) == SPM_PREFIX.encode(text)


def test_an_unknown_or_missing_way_to_cut_words_is_told() -> None:
    assert BPE.warnings == ()
    assert "'brand-new'" in Tokenizer.from_gguf(byte_level("brand-new")).warnings[0]
    assert "does not say" in Tokenizer.from_gguf(byte_level(None)).warnings[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, "unigram"),
        ({"model": "bert"}, "WordPiece"),
        ({"model": "strange"}, "'strange'"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": []}, "no vocabulary"),
        ({"tokens": 7}, "not an array of strings"),
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"token_type": [1]}, "1 entries"),
        ({"token_type": ["x"] * 2000}, "not an array of numbers"),
        ({"add_bos_token": "yes"}, "true or false"),
    ],
)
def test_a_damaged_vocabulary_is_refused_with_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(byte_level(**changes))


def test_a_sentencepiece_vocabulary_needs_scores() -> None:
    with pytest.raises(CheckpointError, match="scores"):
        Tokenizer.from_gguf(sentencepiece(scores=None))


def test_special_ids_out_of_range_count_as_absent() -> None:
    assert Tokenizer.from_gguf(byte_level(bos_token_id=10**6)).bos_id is None


def test_a_token_out_of_range_is_refused() -> None:
    with pytest.raises(RequestError, match="not in the vocabulary"):
        BPE.token_bytes(BPE.vocab_size)
    with pytest.raises(RequestError, match="not in the vocabulary"):
        BPE.decode([-1])


@pytest.mark.parametrize("name", sorted(pretokenizers._BY_NAME))
@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("ab Z\n\r\t .,'s1²中é\u0301/<_A"), min_size=20, max_size=200))
def test_a_long_text_is_cut_in_pieces_into_the_same_words(name: str, text: str) -> None:
    cut = pretokenizers.PreTokenizer.named(name)
    whole = cut.split(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokenizers, "PIECE_CHARACTERS", 3)
        assert [word for piece in pretokenizers.pieces(text) for word in cut.split(piece)] == whole


@pytest.mark.parametrize("tokenizer", [BPE, SPM], ids=["bpe", "spm"])
@pytest.mark.parametrize("unit", ["word and another\n", "x", "0123456789", "  ", "中文字符"])
def test_a_text_that_is_far_too_long_is_given_up_early(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (2_000_000 // len(unit))
    start = time.perf_counter()
    found = tokenizer.encode(text, limit=500)
    assert time.perf_counter() - start < 1.5
    assert len(found) > 500


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from("ab Z\n.,1²中é"), max_size=120), st.integers(0, 150))
def test_a_limit_changes_nothing_for_texts_within_it(text: str, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (pretokenizers, bpe, spm):
            patch.setattr(module, "PIECE_CHARACTERS", 3)
        for tokenizer in (BPE, SPM):
            whole = tokenizer.encode(text)
            found = tokenizer.encode(text, limit=limit)
            assert found == whole if len(whole) <= limit else len(found) > limit
