"""Telling what a model thinks from what it answers."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.vocabularies import byte_level

from chabok.text.chat import ChatTemplate
from chabok.text.reasoning import FAMILIES, ReasoningParser, strip_reasoning
from chabok.text.tokenizer import Tokenizer

THINK = FAMILIES[0]
TOKENIZER = Tokenizer.from_gguf(byte_level())
# The form of Qwen 3's: the model opens the block itself, or finds an empty one.
QWEN3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1]"
    " + '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- endif %}{%- endif %}"
)
# The form of DeepSeek R1's distillations: the template opens it.
OPENED = QWEN3.split("{%- if enable_thinking")[0] + "{{- '<think>\n' }}{%- endif %}"
USER = {"role": "user", "content": "Hello"}


def split(text: str, cuts: list[int], *, inside: bool = False) -> tuple[str, str]:
    one = ReasoningParser(THINK, inside=inside)
    found = {"reasoning": "", "content": ""}
    for a, b in itertools.pairwise([0, *cuts, len(text)]):
        for kind, piece in one.push(text[a:b]):
            assert piece
            found[kind] += piece
    for kind, piece in one.finish():
        found[kind] += piece
    return found["reasoning"], found["content"]


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nFirst, 1 < 2.\n\nThen.\n</think>\n\nYes.\n", False, ("First, 1 < 2.\n\nThen.", "Yes.\n")),
        ("First.\n</think>\n\nYes.", True, ("First.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("\n<think>a</think>b", False, ("a", "b")),
        ("Yes, <think> is a tag </think>.", False, ("", "Yes, <think> is a tag </think>.")),
        ("<think>a</think>b <think>c</think>", False, ("a", "b <think>c</think>")),
        ("<think>never ends </thin", False, ("never ends </thin", "")),
        ("  <thi", False, ("", "  <thi")),
        ("  plain", False, ("", "  plain")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_and_content_are_told_apart(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split(text, [], inside=inside) == expected
    assert split(text, list(range(1, len(text))), inside=inside) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "</th", "<", "\n", " ", "word", "é"]), max_size=12),
    st.booleans(),
    st.data(),
)
def test_where_an_answer_is_cut_changes_nothing(words: list[str], inside: bool, data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert split(text, cuts, inside=inside) == split(text, [], inside=inside)


def test_half_a_marker_is_never_shown() -> None:
    one = ReasoningParser(THINK)
    shown = [piece for char in "<think>\nhm\n</think>\nYes" for _, piece in one.push(char)]
    assert "".join(shown) == "hmYes"
    assert not any("<" in piece for piece in shown)


def test_a_template_tells_whether_its_model_reasons_and_where_the_answer_begins() -> None:
    plain = ChatTemplate("{{ messages[0].content }}", TOKENIZER)
    assert ReasoningParser.of(plain, plain.render([USER])) is None
    for source, variables, inside in [
        (QWEN3, {}, False),
        (QWEN3, {"enable_thinking": False}, False),
        (OPENED, {}, True),
    ]:
        template = ChatTemplate(source, TOKENIZER)
        one = ReasoningParser.of(template, template.render([USER], **variables)[-200:])
        assert one is not None
        assert one.reasoning is inside


def test_thinking_is_turned_off_by_a_variable_of_the_template() -> None:
    template = ChatTemplate(QWEN3, TOKENIZER)
    assert template.render([USER]).endswith("<|im_start|>assistant\n")
    assert template.render([USER], enable_thinking=False).endswith("<think>\n\n</think>\n\n")


def test_earlier_reasoning_can_be_taken_out() -> None:
    assert strip_reasoning("<think>\nx\n</think>\n\nYes") == "Yes"
    assert strip_reasoning("Yes, <think> is a tag") == "Yes, <think> is a tag"
