"""Constrained output: what the masks allow, for every kind of vocabulary, and what is refused."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.text.vocabularies import CONTROL, byte_level, sentencepiece

from chabok.errors import RequestError
from chabok.text.chat import ChatTemplate
from chabok.text.grammar import MAX_LARK, MAX_REGEX, MAX_SCHEMA, Grammar, Grammars
from chabok.text.reasoning import FAMILIES, ReasoningParser
from chabok.text.tokenizer import Tokenizer
from chabok.text.tools import ToolFormat

VOCABULARIES = {"byte-level": byte_level, "sentencepiece": sentencepiece}
each_vocabulary = pytest.mark.parametrize("kind", sorted(VOCABULARIES))


@cache
def grammars(kind: str = "byte-level") -> Grammars:
    return Grammars(tokenizer(kind))


@cache
def tokenizer(kind: str = "byte-level") -> Tokenizer:
    return Tokenizer.from_gguf(VOCABULARIES[kind]())


def allowed(matcher: Any, one: Tokenizer) -> list[int]:
    mask = np.zeros(-(-one.vocab_size // 32), np.uint32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[one.vocab_size :].any()
    return np.flatnonzero(bits).tolist()


def takes(grammar: Grammar, text: str, kind: str = "byte-level") -> bool:
    """Whether the grammar allows a text as a whole, token by token."""
    one, matcher = tokenizer(kind), grammar.matcher()
    for token in one.encode(text, continuation=True):
        if matcher.finished or token not in allowed(matcher, one):
            return False
        matcher.accept(token)
    return matcher.finished or not one.eos_ids.isdisjoint(allowed(matcher, one))


@each_vocabulary
def test_a_schema_allows_valid_json_and_nothing_else(kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "n": {"type": "integer", "maximum": 20}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
    grammar = grammars(kind).json_schema(schema)
    assert takes(grammar, '{"name": "Mahsa, \\"é\\" \u0645", "n": 7}', kind)
    for text in [
        '{"name": "x"}',
        '{"name": "x", "n": 21}',
        '{"n": 1, "name": "x"}',
        '{"name": "x", "n": 1} ',
        "[]",
    ]:
        assert not takes(grammar, text, kind), text


@each_vocabulary
def test_a_regular_expression_and_a_grammar_allow_what_they_match(kind: str) -> None:
    regex = grammars(kind).regex("(yes|no), [0-9]{2,3}")
    assert takes(regex, "yes, 123", kind)
    assert not takes(regex, "yes, 1", kind)
    assert not takes(regex, " yes, 12", kind)
    lark = grammars(kind).lark('start: "(" start ")" | NAME\nNAME: /[a-z]+/')
    assert takes(lark, "((word))", kind)
    assert not takes(lark, "((word)", kind)


@each_vocabulary
def test_what_is_dictated_comes_as_the_tokens_of_the_model_s_own_tokenizer(kind: str) -> None:
    one = tokenizer(kind)
    matcher = grammars(kind).json_schema({"enum": ["one and only text"]}).matcher()
    forced = matcher.forced()
    for token in forced:
        assert not matcher.finished
        matcher.accept(token)
    if not matcher.finished:
        forced.append(allowed(matcher, one)[0])
    text = one.decode(forced, continuation=True)
    assert text.startswith('"one and only text')
    assert forced == one.encode(text, continuation=True)


@each_vocabulary
def test_random_choices_under_a_mask_always_make_what_was_asked_for(kind: str) -> None:
    schema = {
        "type": "array",
        "items": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 6}, {"enum": [None, True]}]},
        "minItems": 2,
        "maxItems": 4,
    }
    grammar, one = grammars(kind).json_schema(schema), tokenizer(kind)
    for seed in range(30):
        rng, matcher, tokens = np.random.default_rng(seed), grammar.matcher(), list[int]()
        while not matcher.finished and len(tokens) < 400:
            token = int(rng.choice(allowed(matcher, one)))
            if token in one.eos_ids:
                break
            tokens.append(token)
            matcher.accept(token)
        if len(tokens) < 400:  # random digits may go on for ever
            assert 2 <= len(json.loads(one.decode(tokens, continuation=True))) <= 4


@pytest.mark.parametrize("worth_s", [0.0, 1.0])
def test_many_masks_at_once_are_the_masks_one_by_one(worth_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chabok.text.grammar._WORTH_SHARING_S", worth_s)  # on several cores, and on one
    one = tokenizer()
    makers: list[Callable[[], Grammar]] = [
        grammars().json_object,
        lambda: grammars().regex("a+b"),
        lambda: grammars().lark('start: "x"'),
    ]
    matchers = [make().matcher() for make in makers * 3]
    masks = np.zeros((len(matchers), -(-one.vocab_size // 32)), np.uint32)
    Grammar.fill_masks(matchers, masks)
    Grammar.fill_masks(matchers, masks)
    for matcher, mask in zip(matchers, masks, strict=True):
        alone = np.zeros_like(mask)
        matcher.fill_mask(alone)
        assert (alone == mask).all()


def test_matchers_of_one_grammar_do_not_disturb_each_other() -> None:
    grammar = grammars().regex("ab|cd")
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(tokenizer().encode("a", continuation=True)[0])
    assert first.forced() != second.forced()
    assert takes(grammar, "cd")


def test_a_source_is_compiled_once() -> None:
    schema = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(300)}}
    started = time.perf_counter()
    grammars().json_schema(schema)
    first = time.perf_counter() - started
    started = time.perf_counter()
    grammars().json_schema(dict(schema))
    assert time.perf_counter() - started < first / 2


def test_reasoning_comes_first_and_is_free() -> None:
    schema = {"enum": ["a", "b"]}
    closed = grammars().json_schema(schema, reasoning=ReasoningParser(FAMILIES[0]))
    opened = grammars().json_schema(schema, reasoning=ReasoningParser(FAMILIES[0], inside=True))
    assert takes(closed, '"a"')
    assert takes(closed, '<think>\nis "a" < "b"?\n</think>\n\n"a"')
    assert not takes(closed, '<think>\nhm\n"a"')
    assert takes(opened, 'hm, "c"?\n</think>\n\n"b"')
    assert not takes(opened, '"b"')


TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
FORMATS = {
    "hermes": "{{ tools }}<tool_call>",
    "llama3": "{{ tools }}<|start_header_id|>",
    "mistral": "{{ tools }}[TOOL_CALLS]",
    "mistral, name first": "{{ tools }}[TOOL_CALLS][ARGS]",
    "generic": "{{ messages[0].content }}",
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Qom"}}\n</tool_call>',
    "llama3": '{"name": "weather", "parameters": {"city": "Qom"}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Qom"}}]',
    "mistral, name first": '[TOOL_CALLS]weather[ARGS]{"city": "Qom"}',
    "generic": '<tool_call>\n{"name": "weather", "arguments": {"city": "Qom"}}\n</tool_call>',
}


def tool_format(family: str, one: Tokenizer) -> ToolFormat:
    return ToolFormat.of(ChatTemplate(FORMATS[family], one), one)


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_a_required_call_is_written_as_the_family_writes_it_and_read_back(family: str) -> None:
    format = tool_format(family, tokenizer())
    grammar = grammars().tool_calls(format, TOOLS)
    assert takes(grammar, CALLS[family])
    assert not takes(grammar, "Hello")
    assert not takes(grammar, CALLS[family].replace("weather", "thunder"))
    assert not takes(grammar, CALLS[family].replace('"Qom"', "1"))
    assert not takes(grammar, CALLS[family].replace('"Qom"', '"Qom", "unknown": 1'))
    assert takes(grammars().tool_calls(format, TOOLS, "weather"), CALLS[family])
    assert not takes(grammars().tool_calls(format, TOOLS, "stop"), CALLS[family])
    parser = format.parser(TOOLS)
    parser.push(CALLS[family])
    parser.finish()
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == [
        ("weather", {"city": "Qom"})
    ]


@pytest.mark.parametrize("family", sorted(FORMATS))
def test_several_calls_come_only_where_they_may(family: str) -> None:
    format, call = tool_format(family, tokenizer()), CALLS[family]
    two = call + format.separator + call
    if format.array:
        two = call[:-1] + ", " + call.split("[", 2)[2]
    assert takes(grammars().tool_calls(format, TOOLS), two)
    alone = grammars().tool_calls(format, TOOLS, parallel=False)
    assert takes(alone, call)
    assert not takes(alone, two)


@pytest.mark.parametrize("family", sorted(set(FORMATS) - {"llama3"}))
def test_text_may_lead_to_calls_whose_arguments_hold_to_strict_schemas(family: str) -> None:
    format, call = tool_format(family, tokenizer()), CALLS[family]
    grammar = grammars().tool_calls(format, TOOLS, "auto")
    assert takes(grammar, "Hello, a < b [c].")
    assert takes(grammar, "Let me see.\n" + call)
    assert not takes(grammar, call.replace('"Qom"', "1"))
    assert not takes(grammar, call.replace("weather", "thunder"))
    alone = grammars().tool_calls(format, TOOLS, "auto", parallel=False)
    assert takes(alone, "So: " + call)
    assert not takes(alone, call + "\n" + call)


def test_a_format_without_a_marker_cannot_hold_free_text_to_a_schema_and_says_so() -> None:
    with pytest.raises(RequestError, match="tool_choice"):
        grammars().tool_calls(tool_format("llama3", tokenizer()), TOOLS, "auto")


def test_a_control_token_that_marks_calls_is_a_token_of_the_grammar() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[TOOL_CALLS]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL]
    one = Tokenizer.from_gguf(metadata)
    marker = one.vocabulary.ids[b"[TOOL_CALLS]"]
    matcher = Grammars(one).tool_calls(tool_format("mistral", one), TOOLS).matcher()
    assert matcher.forced()[0] == marker
    assert allowed(matcher, one) == [marker]


# What is refused, and how it is told.


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"uniqueItems": True}}}, "'uniqueItems' (at #/properties/a/uniqueItems)"),
        ({"properties": {"a": {"type": "string", "format": "wave"}}}, "'wave' (at #/properties/a/format)"),
        ({"items": {"$ref": "https://example.com/s.json"}}, "(at #/items/$ref) that leads out"),
        ({"$ref": "#/$defs/gone"}, "#/$defs/gone"),
        ({"$ref": "#"}, "no text can match"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"items": {"multipleOf": 30_000}}, "multipleOf 3E+4 (at #/items/multipleOf)"),
        ({"enum": ["x" * MAX_SCHEMA]}, f"at most {MAX_SCHEMA}"),
        ({"patternProperties": {"^a": {"type": "string"}, "^ab": {"type": "null"}}}, "not disjoint"),
        (["not", "an", "object"], "must be an object"),
        ({"const": {1, 2}}, "no JSON"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused_with_the_place(schema: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars().json_schema(schema)
    assert words in str(caught.value)
    assert caught.value.field == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a(?=b)", "at character 2: look-around"),
        (r"(a)\1", "backreferences"),
        ("[a", "unclosed character class"),
        ("a" * (MAX_REGEX + 1), f"at most {MAX_REGEX}"),
        ("(" * 4000 + ")" * 4000, "nest"),
        ("a\0", "NUL"),
        ("\ud800", "surrogate"),
        (r"[^\s\S]", "no text can match"),
    ],
)
def test_a_regular_expression_that_cannot_be_used_is_refused_in_words(pattern: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars().regex(pattern)
    assert words in str(caught.value)
    assert caught.value.field == "response_format.pattern"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("start: foo", "foo"),
        ("hello (((", "not valid"),
        ('start: A\nA: "x" A', "circular"),
        ("x" * (MAX_LARK + 1), f"at most {MAX_LARK}"),
        ("start: " + "(" * 9000 + '"a"' + ")" * 9000, "deep"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_in_words(source: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars().lark(source)
    assert words in str(caught.value)


# What explodes: each ends soon, with a mask or an error, and the process lives.


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(n: int) -> dict[str, Any]:
    links = {f"r{i}": {"properties": {"a": {"$ref": f"#/$defs/r{i + 1}"}}} for i in range(n)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{n}": {"type": "string"}}}


HOSTILE: dict[str, Callable[[Grammars], Grammar]] = {
    "nested repetitions": lambda g: g.regex("((a{1,1000}){1,1000}){1,1000}"),
    "many paths": lambda g: g.regex("(x+x+)+y"),
    "every path": lambda g: g.regex("(a|aa|aaa){1,5000}b{1,5000}"),
    "exponential states": lambda g: g.regex("(a|b)*a(a|b){20}c"),
    "character classes": lambda g: g.regex(r"(\w{1,300}\W{1,300}){1,300}"),
    "a long regex": lambda g: g.regex("a?b*" * (MAX_REGEX // 4)),
    "a pattern in a schema": lambda g: g.json_schema({"pattern": "((a{1,1000}){1,1000}){1,1000}"}),
    "objects in objects": lambda g: g.json_schema(nested(2000)),
    "a reference to itself": lambda g: g.json_schema({"items": {"$ref": "#"}, "type": "array"}),
    "references in a ring": lambda g: g.json_schema(
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    ),
    "a long chain of references": lambda g: g.json_schema(chain(3000)),
    "a huge enum": lambda g: g.json_schema({"enum": [f"value {i}" for i in range(15_000)]}),
    "thousands of properties": lambda g: g.json_schema(
        {"properties": {f"p{i}": {"type": "string"} for i in range(6000)}}
    ),
    "all of any of": lambda g: g.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"k{i}{j}": {}}} for j in "abcd"]} for i in range(12)]}
    ),
    "a million items": lambda g: g.json_schema({"type": "array", "minItems": 1_000_000}),
    "a million characters": lambda g: g.json_schema({"type": "string", "minLength": 1_000_000}),
    "numbers of a prime": lambda g: g.json_schema({"type": "integer", "multipleOf": 999_983}),
    "primes together": lambda g: g.json_schema(
        {"type": "integer", "allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}
    ),
    "many numbers": lambda g: g.json_schema({"prefixItems": [{"multipleOf": 9000 + i} for i in range(1000)]}),
    "numbers of a prime in a grammar": lambda g: g.lark('start: %json {"multipleOf": 999983}'),
    "an ambiguous grammar": lambda g: g.lark('start: x\nx: x x x | "a" | "b"'),
    "repeated rules": lambda g: g.lark('start: b{1000}\nb: c{1000}\nc: d{1000}\nd: "a" | "b"'),
    "a long chain of rules": lambda g: g.lark(
        "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(2800)) + '\nr2800: "x"'
    ),
    "a long chain of tokens": lambda g: g.lark(
        "start: R0\n" + "\n".join(f'R{i}: "a" R{i + 1} | "b"' for i in range(2800)) + '\nR2800: "x"'
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_what_explodes_is_refused_or_bounded_at_every_step(name: str) -> None:
    one, worst = tokenizer(), 0.0
    started = time.process_time()
    with suppress(RequestError):
        matcher, rng = HOSTILE[name](grammars()).matcher(), np.random.default_rng(1)
        for _ in range(150):
            before = time.thread_time()
            ids = allowed(matcher, one)
            matcher.forced()
            worst = max(worst, time.thread_time() - before)
            if matcher.finished or not ids:
                break
            matcher.accept(int(rng.choice(ids)))
    assert worst < 0.3
    assert time.process_time() - started < 10


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet="ab(){}[]|*+?.,^$\\d1-é", max_size=30))
def test_any_regular_expression_is_compiled_or_refused(pattern: str) -> None:
    with suppress(RequestError):
        grammars().regex(pattern).matcher().forced()
