from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.vocabularies import byte_level, sentencepiece

from chabok.text.tokenizer import Tokenizer

BPE = Tokenizer.from_gguf(byte_level())
SPM = Tokenizer.from_gguf(sentencepiece(add_bos_token=False))


@pytest.mark.parametrize("tokenizer", [BPE, SPM])
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_pieces_joined_are_the_text_of_all_tokens(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    # Bytes often, so that characters come in parts, complete or not.
    token = st.one_of(st.integers(0, 258), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token))
    stream = tokenizer.stream(skip_special=skip, continuation=continuation)
    pieces = [*map(stream.push, ids), stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip, continuation=continuation)
    raw = b"".join(tokenizer.token_bytes(i) for i in ids if not (skip and tokenizer.is_special(i)))
    strip = tokenizer is SPM and not continuation
    assert "".join(pieces) == (raw.removeprefix(b" ") if strip else raw).decode(errors="replace")


@pytest.mark.parametrize("tokenizer", [BPE, SPM])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd▁")))
def test_no_piece_of_valid_text_is_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = tokenizer.stream()
    for token in tokenizer.encode(text):
        assert "\ufffd" not in stream.push(token)
    assert stream.finish() == ""


def test_a_character_comes_when_its_last_byte_does() -> None:
    stream = SPM.stream()
    byte = {b: SPM.vocabulary.ids[b"<0x%02X>" % b] for b in range(256)}
    assert [stream.push(byte[b]) for b in "🙂".encode()] == ["", "", "", "🙂"]
    assert stream.finish() == ""


def test_bytes_that_are_no_character_are_replaced_as_soon_as_that_is_certain() -> None:
    byte = {b: SPM.vocabulary.ids[b"<0x%02X>" % b] for b in range(256)}
    stream = SPM.stream()
    assert stream.push(byte[0xE4]) == ""
    assert stream.push(byte[0x41]) == "\ufffdA"
    assert stream.push(byte[0xFF]) == "\ufffd"
    assert stream.push(byte[0xF0]) == ""
    assert stream.finish() == "\ufffd"


def test_a_generation_keeps_the_space_that_joins_it_to_its_prompt() -> None:
    ids = SPM.encode("the")
    assert SPM.decode(ids) == "the"
    assert "".join(map(SPM.stream().push, ids)) == " the"
