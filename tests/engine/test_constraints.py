"""Generation under a grammar: every text is what was asked for, whoever shares the batch."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.mock import EOS, VOCAB, ByteTokenizer, mock_engine

from chabok.engine.engine import Engine
from chabok.engine.llm import LLM
from chabok.engine.request import Request, SamplingParams
from chabok.engine.sampler import Sampler
from chabok.errors import RequestError
from chabok.models.batch import Logits
from chabok.text.grammar import Grammar, Grammars
from chabok.text.vocabulary import TokenType

FIXTURES = Path(__file__).parent.parent / "fixtures"


class ByteVocabulary(ByteTokenizer):
    """The byte tokenizer as grammars need it."""

    class vocabulary:  # noqa: N801 - stands for an instance
        control = tuple(range(EOS, VOCAB))
        types = bytes([TokenType.NORMAL] * EOS + [TokenType.CONTROL] * (VOCAB - EOS))

    def encode(self, text: str, **_: Any) -> list[int]:  # type: ignore[override]
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b"<%d>" % token


@cache
def grammars() -> Grammars:
    return Grammars(ByteVocabulary())  # type: ignore[arg-type]


def request(constraint: Grammar | None, text: str = "prompt", **params: Any) -> Request:
    params.setdefault("max_tokens", 200)
    return Request(list(text.encode()), SamplingParams(**params), constraint=constraint)


def run(engine: Engine, *requests: Request) -> list[str]:
    handles = [engine.submit(one) for one in requests]
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    return [handle.result().text for handle in handles]


SCHEMAS: dict[str, dict[str, Any]] = {
    "a person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "pattern": "^[a-z]{1,5}@[a-z]{1,5}\\.org$"},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    "choices": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "boolean"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1},
                },
                "required": ["value", "children"],
                "additionalProperties": False,
            }
        },
    },
    "alternatives": {
        "type": "array",
        "items": {
            "anyOf": [
                {"type": "object",
                 "properties": {"kind": {"const": "a"}, "n": {"type": "number", "multipleOf": 0.5}},
                 "required": ["kind"], "additionalProperties": False},
                {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"],
                 "additionalProperties": False},
            ]
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "a date": {"type": "string", "format": "date"},
}  # fmt: skip


@cache
def llm(name: str) -> LLM:
    return LLM(FIXTURES / f"{name}.gguf", context=512, threads=1, pack=False)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_random_text_of_a_model_is_valid_under_its_schema(model: str, name: str) -> None:
    one, schema = llm(model), SCHEMAS[name]
    constraint = one.grammars.json_schema(schema)
    params = [SamplingParams(temperature=1, seed=seed, max_tokens=300) for seed in range(8)]
    validator, ended = jsonschema_rs.validator_for(schema), 0
    for completion in one.generate(["Data: "] * len(params), params, constraint=constraint):
        if completion.finish_reason == "stop":
            ended += 1
            value = json.loads(completion.text)
            assert validator.is_valid(value), completion.text
        else:
            assert completion.finish_reason == "length"
            assert len(completion.tokens) == 300
    assert ended


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_seed_gives_the_same_text_whether_or_not_dictated_text_is_computed_at_once(model: str) -> None:
    one = llm(model)
    constraint = one.grammars.json_schema(SCHEMAS["a person"])
    for seed in range(4):
        # Asked for log probabilities, every token goes through the model one by one.
        fast = one.generate("x", SamplingParams(temperature=1, seed=seed), constraint=constraint)
        slow = one.generate("x", SamplingParams(temperature=1, seed=seed, logprobs=0), constraint=constraint)
        assert fast.text == slow.text
        assert fast.tokens == slow.tokens


def test_dictated_text_takes_one_step_however_long() -> None:
    engine = mock_engine()
    constraint = grammars().regex("[ab]The sea is all that there is[cd]")
    text = run(engine, request(constraint))[0]
    assert text[1:-1] == "The sea is all that there is"
    rows = [segments[0][1] for segments in engine.model.steps]  # type: ignore[attr-defined]
    assert rows == [len("prompt"), 1 + len("The sea is all that there is")]


def test_dictated_text_at_the_beginning_needs_no_choice() -> None:
    engine = mock_engine()
    assert run(engine, request(grammars().regex("Sea[ab]")))[0][:3] == "Sea"
    assert [segments[0][1:] for segments in engine.model.steps] == [(6, 1), (3, 1)]  # type: ignore[attr-defined]


def test_the_text_ends_where_the_grammar_does_without_an_end_token() -> None:
    handle = mock_engine().submit(request(grammars().regex("[ab]{3}")))
    completion = handle.result()
    assert len(completion.tokens) == 3
    assert completion.finish_reason == "stop"
    assert completion.stopped_by is None


def test_an_end_token_ends_it_where_the_grammar_allows_one() -> None:
    bias = {EOS: 1000.0}
    completion = mock_engine().submit(request(grammars().regex("[ab]{3}[cd]*"), logit_bias=bias)).result()
    assert len(completion.tokens) == 4
    assert completion.stopped_by == EOS


def test_too_few_tokens_for_the_grammar_give_length() -> None:
    completion = mock_engine().submit(request(grammars().json_object(), max_tokens=1)).result()
    assert (completion.text, completion.finish_reason) == ("{", "length")
    dictated = mock_engine().submit(request(grammars().regex("abcdefgh[xy]"), max_tokens=5)).result()
    assert (dictated.text, dictated.finish_reason) == ("abcde", "length")
    last = mock_engine().submit(request(grammars().regex("abcde"), max_tokens=5)).result()
    assert (last.text, last.finish_reason) == ("abcde", "stop")


def test_a_stop_string_ends_a_constrained_text_also_within_what_is_dictated() -> None:
    completion = mock_engine().submit(request(grammars().regex("one two three[xy]"), stop=" three")).result()
    assert (completion.text, completion.stopped_by) == ("one two", " three")


@pytest.mark.parametrize("params", [{"min_tokens": 6}, {"ignore_eos": True, "max_tokens": 6}])
def test_an_end_token_waits_while_others_are_allowed(params: dict[str, Any]) -> None:
    bias = {EOS: 1000.0}
    completion = mock_engine().submit(request(grammars().regex("[ab]+"), logit_bias=bias, **params)).result()
    assert len(completion.tokens) >= 6
    assert EOS not in completion.tokens[:6]


@pytest.mark.parametrize("params", [{"min_tokens": 6}, {"ignore_eos": True}])
def test_the_end_of_a_grammar_is_the_end_whatever_else_was_asked_for(params: dict[str, Any]) -> None:
    completion = mock_engine().submit(request(grammars().regex("[ab]{3}"), **params)).result()
    assert len(completion.text) == 3
    assert completion.finish_reason == "stop"


def test_a_bias_moves_the_choice_within_the_grammar_and_never_out_of_it() -> None:
    constraint = grammars().regex("[abc]{20}")
    for bias, expected in [({ord("b"): 100.0}, {"b"}), ({ord("x"): 100.0, ord("c"): 50.0}, {"c"})]:
        assert set(run(mock_engine(), request(constraint, logit_bias=bias))[0]) == expected
    forbidden = {ord(letter): -float("inf") for letter in "abc"}
    assert set(run(mock_engine(), request(constraint, logit_bias=forbidden))[0]) <= set("abc")


def test_log_probabilities_are_the_model_s_own_not_those_left_by_the_mask() -> None:
    prompt = list(b"prompt")
    free = mock_engine().submit(Request(prompt, SamplingParams(max_tokens=1, logprobs=VOCAB))).result()
    bound = mock_engine().submit(request(grammars().regex("[qz]"), logprobs=3)).result()
    assert free.top_logprobs is not None
    assert bound.top_logprobs is not None
    assert bound.logprobs == [dict(free.top_logprobs[0])[bound.tokens[0]]]
    assert bound.top_logprobs[0] == free.top_logprobs[0][:3]


def workload(n: int) -> list[Request]:
    makers = [
        grammars().json_schema(SCHEMAS["a person"]),
        grammars().regex("([a-z]{3} and what is dictated ){5,9}\\."),
        grammars().lark('start: "(" start ")" | /[0-9]{2}/'),
        None,
    ]
    return [
        request(
            makers[i % 4],
            "shared beginning " * (i % 3) + f"prompt {i}",
            temperature=1,
            seed=i,
            max_tokens=150,
        )
        for i in range(n)
    ]


def test_every_constrained_text_equals_the_one_computed_alone_also_when_pages_run_out() -> None:
    alone = [run(mock_engine(context=512), one)[0] for one in workload(24)]
    crowded = mock_engine(context=512, n_pages=8, max_batch=8, max_rows=12)
    assert run(crowded, *workload(24)) == alone
    assert crowded.scheduler.preemptions


class Failing:
    """A constraint that is too much work after some tokens."""

    def __init__(self, after: int) -> None:
        self._after = after

    def matcher(self) -> "Failing":
        return Failing(self._after)

    finished = False

    def fill_mask(self, mask: NDArray[np.uint32]) -> None:
        mask[:] = 0xFFFFFFFF

    def fill_masks(self, matchers: list["Failing"], masks: NDArray[np.uint32]) -> None:
        masks[:] = 0xFFFFFFFF

    def check(self) -> None:
        if self._after == 0:
            raise RequestError("it is too complex", "response_format")

    def accept(self, token: int) -> None:
        self._after -= 1

    def forced(self) -> list[int]:
        return []


def test_a_grammar_that_fails_on_the_way_ends_its_own_request_only() -> None:
    engine = mock_engine()
    failing = engine.submit(Request(list(b"x"), SamplingParams(max_tokens=20), constraint=Failing(5)))
    other, free = (
        engine.submit(request(grammars().regex("[ab]{9}"))),
        engine.submit(request(None, max_tokens=9)),
    )
    with pytest.raises(RequestError, match="too complex"):
        failing.result()
    assert len(other.result().text) == 9
    assert len(free.result().tokens) == 9


@pytest.mark.parametrize("share", [0.01, 0.4, 0.7, 0.99])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.02}, {"frequency_penalty": 0.5}]
)
def test_a_mask_is_as_good_as_a_smaller_vocabulary(
    share: float, temperature: float, cuts: dict[str, Any]
) -> None:
    rng = np.random.default_rng(5)
    vocab = 1000  # not a multiple of a block
    values = (rng.standard_normal(vocab) * 3).astype(np.float32)
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[rng.permutation(vocab)[: int(share * vocab)]] = 1
    mask = np.packbits(bits, bitorder="little").view(np.uint32)
    only = np.where(bits[:vocab] == 1, values, -np.inf).astype(np.float32)
    for seed in range(20):
        params = SamplingParams(temperature=temperature, seed=seed, **cuts)
        peaks = values[None].max(axis=1, keepdims=True).astype(np.float64)
        sums = np.stack([peaks, np.exp(values[None] - peaks).sum(axis=1, keepdims=True)], axis=-1)
        one = values[None].copy()
        logits = Logits(one, block_max(one), sums, one.argmax(axis=1))
        chosen = Sampler(params, [], vocab).choose(logits, 0, mask).token
        assert bits[chosen]
        assert chosen == Sampler(params, [], vocab).choose(Logits(only[None].copy()), 0).token


def block_max(values: NDArray[np.float32]) -> NDArray[np.float32]:
    from chabok.models.batch import block_maxima

    return np.stack([block_maxima(row) for row in values])
