"""Reading tool calls out of answers, however they are cut into pieces."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chabok.text.calls import JSONScanner, MalformedJSONError
from chabok.text.toolparsers import (
    CallArguments,
    CallStart,
    HermesParser,
    LlamaParser,
    MistralParser,
    Piece,
    TextPiece,
    ToolCall,
    ToolParser,
)

PARSERS = {"hermes": HermesParser, "llama3": LlamaParser, "mistral": MistralParser}


def parser(family: str) -> ToolParser:
    ids = itertools.count()
    return PARSERS[family](frozenset({"f", "g"}), lambda: f"id{next(ids)}")


def read(family: str, pieces: list[str]) -> tuple[list[Piece], list[ToolCall], bool]:
    """What comes out, neighbours joined, and what the parser says of the calls at the end."""
    one = parser(family)
    found: list[Piece] = []
    for piece in pieces:
        found += one.push(piece)
    found += one.finish()
    joined: list[Piece] = []
    for item in found:
        last = joined[-1] if joined else None
        if isinstance(item, TextPiece) and isinstance(last, TextPiece):
            joined[-1] = TextPiece(last.text + item.text)
        elif isinstance(item, CallArguments) and isinstance(last, CallArguments):
            joined[-1] = CallArguments(item.index, last.text + item.text)
        else:
            joined.append(item)
    return joined, one.calls, one.broken


def told(pieces: list[Piece]) -> str:
    """Pieces in short: text, then [name arguments] for each call."""
    return "".join(
        f"[{piece.name} "
        if isinstance(piece, CallStart)
        else f"{piece.text}]"
        if isinstance(piece, CallArguments)
        else piece.text
        for piece in pieces
    )


@pytest.mark.parametrize(
    ("family", "text", "expected"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n',
            'Let me see.[f {"a": 1}]',
        ),
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g"}</tool_call> Done.',
            "[f {}][g {}]Done.",
        ),
        ("hermes", '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', '[f {"a": [1]}]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', '[f {"a": 1}]'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "[f {}]"),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"a": 1}}', '[f {"a": 1}]'),
        ("hermes", '```json\n{"name": "f", "arguments": {"a": 1}}\n```', '[f {"a": 1}]'),
        ("hermes", 'So:\n```json\n{"name": "f", "arguments": {}}\n```\nDone.', "So:[f {}]Done."),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_ca', "[f {}]"),
        ("hermes", '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}', "[f {}][g {}]"),
        ("llama3", '{"name": "f", "parameters": {"a": 1}}', '[f {"a": 1}]'),
        ("llama3", '\n{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "[f {}][g {}]"),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '[f {"a": 1}]'),
        ("llama3", 'Here: <|python_tag|>{"name": "f", "parameters": {}}', "Here:[f {}]"),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
            '[f {"a": 1}][g {}]',
        ),
        ("mistral", 'Yes[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', 'Yes[f {"a": 1}][g {}]'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', '[f {"a": 1}]'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {}}', "[f {}]"),
    ],
)
def test_calls_of_each_family_are_found(family: str, text: str, expected: str) -> None:
    pieces, calls, broken = read(family, [text])
    assert told(pieces) == expected
    assert not broken
    assert [call.name for call in calls] == [piece.name for piece in pieces if isinstance(piece, CallStart)]


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "no call at all, a < b, and <tool"),
        ("hermes", "<tool_call>\nI do not know.\n</tool_call>"),
        ("hermes", '<tool_call>{"nam'),
        ("hermes", '<tool_call>["f"]</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```'),
        ("hermes", '```json\n{"name": "f", "age": 3}\n```'),
        ("hermes", "```json\n[1, 2]\n``` and ```python\nf()\n```"),
        ("hermes", '{"name": "unknown", "arguments": {}}'),
        ("hermes", 'I would write {"name": "f", "arguments": {}}'),
        ("llama3", '{"name": "unknown", "parameters": {}}'),
        ("llama3", '{"answer": 42}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", 'I would write {"name": "f", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS]what is that?"),
        ("mistral", "[TOOL_CALLS] [1, 2]"),
        ("mistral", "[TOOL_CALLS"),
    ],
)
def test_what_is_no_call_comes_out_as_the_text_it_is(family: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found, calls, broken = read(family, pieces)
        assert told(found) == text
        assert calls == []
        assert not broken


def test_a_call_that_breaks_in_its_arguments_is_said_to_be_broken_and_the_rest_is_text() -> None:
    pieces, calls, broken = read(
        "hermes", ['<tool_call>{"name": "f", "arguments": {"a": tru]}</tool_call> x']
    )
    assert pieces == [
        CallStart(0, "id0", "f"),
        CallArguments(0, '{"a": tru'),
        TextPiece("]}</tool_call> x"),
    ]
    assert calls == []
    assert broken


def test_a_call_cut_off_by_the_end_of_the_answer_is_not_complete() -> None:
    pieces, calls, broken = read("hermes", ['<tool_call>{"name": "f", "arguments": {"a": "lon'])
    assert told(pieces) == '[f {"a": "lon]'
    assert (calls, broken) == ([], True)


def test_the_name_comes_first_and_arguments_as_they_grow() -> None:
    one = parser("hermes")
    assert one.push('<tool_call>\n{"name": "f", "argu') == []
    assert one.push('ments": {"ci') == [CallStart(0, "id0", "f"), CallArguments(0, '{"ci')]
    assert one.push('ty": "Q') == [CallArguments(0, 'ty": "Q')]
    assert one.push('om"}}') == [CallArguments(0, 'om"}')]
    assert one.calls == [ToolCall("id0", "f", '{"city": "Qom"}')]


def test_text_is_held_back_only_while_it_may_become_a_marker() -> None:
    one = parser("hermes")
    assert one.push("a <tool") == [TextPiece("a")]
    assert one.push("box> b") == [TextPiece(" <toolbox> b")]


def test_arguments_nested_a_hundred_thousand_deep_do_no_harm() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    _, calls, _ = read("hermes", [f'<tool_call>{{"name": "f", "arguments": {{"a": {deep}}}}}</tool_call>'])
    assert len(calls[0].arguments) == 200_007
    _, calls, broken = read("hermes", ['<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000])
    assert (calls, broken) == ([], True)


WORDS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<tool", "[TOOL",
    '{"name": "f", "arguments": {"a": [1, -2.5e3, "\\u00e9", null]}}', '{"name": "f"', ', "arguments": {',
    '{"name": "g", "parameters": {}}', "f", "}", "]", '"', ",", ";", " ", "\n", "\\", "é", "{", "[", "1",
    "true", "text", "```json\n", "```",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(PARSERS)), st.lists(st.sampled_from(WORDS), max_size=14), st.data())
def test_where_an_answer_is_cut_changes_nothing(family: str, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    found, calls, broken = read(family, pieces)
    assert (found, calls, broken) == read(family, list(text)) == read(family, [text])
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not any(isinstance(piece, CallStart) for piece in found):
        assert "".join(told(found).split()) == "".join(text.split()), "text was lost or invented"


def valid(text: str) -> bool:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(JSON, st.booleans(), st.data())
def test_the_scanner_takes_exactly_what_is_json(value: object, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=data.draw(st.sampled_from([None, 1])))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + data.draw(st.sampled_from(['"', ",", "}", "0", "-", ".", "\\", "e", ""]))
            + text[at + 1 :]
        )
    scanner = JSONScanner()
    try:
        for char in text:
            scanner.push(char)
        taken = scanner.done
    except MalformedJSONError:
        taken = False
    assert taken == valid(text)
