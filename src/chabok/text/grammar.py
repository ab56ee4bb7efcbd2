"""Constrained output: what may come next, as a mask over the vocabulary, from a grammar and the text so far.

The grammars are compiled and followed by ``llguidance`` (Lark's syntax with extensions: its docs/syntax.md).
Whitespace of JSON is fixed, ", " and ": " as in most training text: a model cannot get lost in blanks, and
more of the text is dictated, which needs no sampling.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from chabok.errors import RequestError
from chabok.text.compiling import check_multiples, compile_bounded, explain, schemas_in
from chabok.text.tools import ToolFormat, is_strict, name_of, parameters_of

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from chabok.text.reasoning import ReasoningParser
    from chabok.text.tokenizer import Tokenizer

MAX_SCHEMA = 256 << 10
MAX_LARK = 64 << 10
MAX_REGEX = 8 << 10
"""Longest sources, in characters: what llguidance compiles in a second or two at most, whatever they say."""

_KEPT = 32
_KEPT_CHARS = 512 << 10
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False, "lenient": False}


class GrammarMatcher:
    """Where one answer is in its grammar."""

    __slots__ = ("_field", "inner")

    def __init__(self, inner: LLMatcher, field: str) -> None:
        self.inner = inner
        self._field = field

    def fill_mask(self, mask: NDArray[np.uint32]) -> None:
        """Set the bit of every token that may come next, and no other; uint32[ceil(vocab / 32)].

        Raises RequestError if the grammar turned out to need too much work here.
        """
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()

    def accept(self, token: int) -> None:
        """Go on by a token, one that the mask allows."""
        if not self.inner.consume_token(token):
            self.check()
            raise RequestError(f"token {token} is not allowed by the grammar here", self._field)

    def forced(self) -> list[int]:
        """The tokens that must come next, whatever the model says; often none.

        They are those of the model's own way to cut the text that must come, as far as no continuation could
        change the cut. ``accept`` each of them to go on.
        """
        return list(self.inner.compute_ff_tokens())

    @property
    def finished(self) -> bool:
        """Whether nothing may follow but the end of the text."""
        return self.inner.is_stopped()

    def check(self) -> None:
        """Raise RequestError if the grammar failed."""
        if self.inner.is_error():
            raise RequestError(explain(self.inner.get_error()), self._field)


class Grammar:
    """A compiled grammar, for any number of answers."""

    def __init__(self, prototype: LLMatcher, field: str) -> None:
        self._prototype = prototype
        self._field = field

    def matcher(self) -> GrammarMatcher:
        """A matcher at the beginning."""
        return GrammarMatcher(self._prototype.deep_copy(), self._field)

    @staticmethod
    def fill_masks(matchers: Sequence[GrammarMatcher], masks: NDArray[np.uint32]) -> None:
        """``fill_mask`` for many at once: masks uint32[>= n, ceil(vocab / 32)], C order. On several cores if
        that pays, which most masks are too quick for.

        A matcher that fails is found by its ``check``; its row means nothing then.
        """
        _MASKING.fill([matcher.inner for matcher in matchers], masks)


class _Masking:
    """Computes masks one after the other, or on several cores where the last ones took long."""

    def __init__(self) -> None:
        self._each_s = 0.0  # of late
        self._executor: LLExecutor | None = None

    def fill(self, inner: list[LLMatcher], masks: NDArray[np.uint32]) -> None:
        started = perf_counter()
        address, row_bytes, n = masks.ctypes.data, masks.shape[1] * 4, len(inner)
        cores = 1.0
        if n > 1 and n * self._each_s > _WORTH_SHARING_S:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor()
            cores = 2.0  # at least, if it was worth it
            self._executor.unsafe_compute_mask_ptr(
                [(one, row) for row, one in enumerate(inner)], address, row_bytes, len(masks)
            )
        else:
            for row, one in enumerate(inner):
                one.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        each = (perf_counter() - started) * cores / n
        self._each_s += (each - self._each_s) * 0.2


_WORTH_SHARING_S = 0.002
_MASKING = _Masking()


class _Vocabulary:
    """A tokenizer in the form that llguidance asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = list(tokenizer.vocabulary.control)

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")  # how llguidance finds out what it may give
        return self._tokenizer.encode(text, continuation=True)


class Grammars:
    """Makes grammars for one tokenizer. Safe to use from several threads.

    Every method raises RequestError, with the field that is wrong and what to do about it, for a source that
    is invalid, unsupported, or too much work; ``field``: what the caller's user knows the source as.
    ``reasoning``: the answer may (or, where the prompt opened it, does) begin with reasoning, which is free.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._tokenizer.eos_ids:
            raise RequestError("this model has no token that ends a text, which constrained output needs")
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer)),
            n_vocab=self._tokenizer.vocab_size,
            eos_token=sorted(self._tokenizer.eos_ids),
        )

    def json_object(
        self, *, reasoning: ReasoningParser | None = None, field: str = "response_format"
    ) -> Grammar:
        """Any JSON object."""
        return self.json_schema({"type": "object"}, reasoning=reasoning, field=field)

    def json_schema(
        self,
        schema: Mapping[str, Any],
        *,
        reasoning: ReasoningParser | None = None,
        field: str = "response_format.json_schema.schema",
    ) -> Grammar:
        """JSON that is valid under a schema (draft 2020-12 as far as llguidance enforces it)."""
        text = _dumped(schema, field)
        grammar = {"json_schema": {**json.loads(text), "x-guidance": _JSON}}
        return self._compile(grammar, reasoning, field, schema)

    def regex(
        self,
        pattern: str,
        *,
        reasoning: ReasoningParser | None = None,
        field: str = "response_format.pattern",
    ) -> Grammar:
        """Text that a regular expression matches as a whole (Rust's syntax: no look-around or references)."""
        from llguidance import LLMatcher

        _check_size(pattern, MAX_REGEX, "the regular expression", field)
        source = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
        return self._compile({"lark_grammar": source}, reasoning, field, pattern)

    def lark(
        self, source: str, *, reasoning: ReasoningParser | None = None, field: str = "response_format.grammar"
    ) -> Grammar:
        """Text of a context-free grammar in Lark's syntax."""
        _check_size(source, MAX_LARK, "the grammar", field)
        for schema in schemas_in(source, field):
            check_multiples(schema, field)
        return self._compile({"lark_grammar": source}, reasoning, field, source)

    def tool_calls(
        self,
        format: ToolFormat,
        tools: Sequence[Mapping[str, Any]],
        choice: str = "required",
        *,
        parallel: bool = True,
        reasoning: ReasoningParser | None = None,
        field: str = "tools",
    ) -> Grammar:
        """Calls in a family's own format, with arguments that are valid under their schemas.

        choice: "required" for one or more of any of the tools, the name of one, or "auto" for text in which
        calls may come; then only tools with ``strict`` are held to their schemas. parallel: several calls may
        be made.
        """
        chosen = [tool for tool in tools if choice in ("required", "auto", name_of(tool))]
        if not chosen:
            raise RequestError(f"there is no tool {choice!r:.80} to call", "tool_choice")
        for tool in chosen:
            _dumped(parameters_of(tool), f"{field}: parameters of {name_of(tool)}")
        source = calls_lark(format, chosen, parallel, free=choice == "auto")
        _check_size(source, MAX_SCHEMA, "the tools", field)
        return self._compile({"lark_grammar": source}, reasoning, field, [dict(tool) for tool in chosen])

    def _compile(
        self, grammar: dict[str, Any], reasoning: ReasoningParser | None, field: str, given: object
    ) -> Grammar:
        grammars = [{**grammar, "name": "answer"}]
        if reasoning is not None:
            grammars.insert(0, {"name": "whole", "lark_grammar": self._reasoned(reasoning)})
        source = json.dumps({"grammars": grammars})
        with self._lock:
            prototype = self._kept.get(source)
            if prototype is not None:
                self._kept.move_to_end(source)
                return Grammar(prototype, field)
            vocabulary = self._vocabulary
        prototype = compile_bounded(vocabulary, source, field, given)
        with self._lock:
            self._kept[source] = prototype
            while len(self._kept) > _KEPT or (
                len(self._kept) > 1 and sum(map(len, self._kept)) > _KEPT_CHARS
            ):
                self._kept.popitem(last=False)
        return Grammar(prototype, field)

    def _reasoned(self, reasoning: ReasoningParser) -> str:
        """Lark: reasoning, then the grammar named "answer"."""
        ids = self._tokenizer.vocabulary.ids
        begin, end = reasoning.markers.begin, reasoning.markers.end
        hidden = reasoning.visible(self._tokenizer)
        control = {text: ids[text.encode()] for text in (begin, end) if ids.get(text.encode()) in hidden}
        if end in control:
            thought = f"thought: FREE <[{control[end]}]>\n"
        else:
            thought = f"thought[lazy]: FREE {json.dumps(end)}\n"
        opened = "" if reasoning.reasoning else f"{literal(begin, control)} "
        block = "block" if reasoning.reasoning else "block?"
        return (
            f"start: {block} @answer\nblock: {opened}thought BREAK\n{thought}"
            "FREE: /(.|\\n)*/\nBREAK: /\\n{0,2}/\n"
        )


def calls_lark(
    format: ToolFormat, tools: Sequence[Mapping[str, Any]], parallel: bool, *, free: bool = False
) -> str:
    """Lark source of calls as a family writes them; free: text in which they may come."""
    if free and not format.begin:
        raise RequestError(
            "nothing marks the beginning of a call in this model's format, so strict tools can only be held "
            'to their schemas where a call is required: set tool_choice to "required" or leave out strict',
            "tools",
        )
    control = dict(format.tokens)
    lines: list[str] = []
    for at, tool in enumerate(tools):
        name = name_of(tool)
        schema = parameters_of(tool) if not free or is_strict(tool) else {"type": "object"}
        if "properties" in schema:
            schema = {"additionalProperties": False, **schema}  # no arguments that nobody described
        if format.bare:
            lines.append(f"call{at}: {literal(name + '[ARGS]', control)} args{at}")
        else:
            head = f'{{"name": {json.dumps(name)}, "{format.arguments_key}": '
            lines.append(f'call{at}: {literal(head, control)} args{at} "}}"')
        lines.append(f"args{at}: %json {json.dumps({**schema, 'x-guidance': _JSON})}")
    one = "(" + " | ".join(f"call{at}" for at in range(len(tools))) + ")"
    calls, separator = f"{one} {literal(format.end, control)}", literal(format.separator, control)
    if format.array:
        more = f'(", " {one})*' if parallel else ""
        calls, separator = f'"[" {one} {more} "]"', ""
        parallel = False  # they are all in the one array
    lines.insert(0, f"calls: {calls}")
    begin = literal(format.begin, control)
    if not free:
        more = f"({separator} {begin} calls)*" if parallel else ""
        return "\n".join([f"start: {begin} calls {more}", *lines]) + "\n"
    marker, rest = first_marker(format.begin, control)
    begins = f"begin: TEXT {marker}" if marker.startswith("<") else f"begin[lazy]: TEXT {marker}"
    start = "start: (begin rest calls)* TEXT" if parallel else "start: TEXT | begin rest calls"
    return "\n".join([start, begins, f"rest: {rest}", "TEXT: /(.|\\n)*/", *lines]) + "\n"


def first_marker(begin: str, control: Mapping[str, int]) -> tuple[str, str]:
    """What begins a call, as two pieces of Lark: the marker proper and what follows it."""
    marker = next((token for token in control if begin.startswith(token)), begin.rstrip())
    return literal(marker, control), literal(begin[len(marker) :], control) or '""'


def literal(text: str, control: Mapping[str, int]) -> str:
    """Text as Lark, control tokens in it as tokens; "" for no text."""
    parts: list[str] = []
    while text:
        at, found = min(
            ((text.find(token), token) for token in control if token in text), default=(len(text), "")
        )
        if at:
            parts.append(json.dumps(text[:at]))
        if found:
            parts.append(f"<[{control[found]}]>")
        text = text[at + len(found) :]
    return " ".join(parts)


def _dumped(schema: Mapping[str, Any], field: str) -> str:
    if not isinstance(schema, Mapping):
        raise RequestError(f"a JSON schema must be an object, not {type(schema).__name__}", field)
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise RequestError("the JSON schema is nested too deep; 100 levels are the most", field) from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema is no JSON: {error}", field) from None
    _check_size(text, MAX_SCHEMA, "the JSON schema", field)
    check_multiples(schema, field)
    return text


def _check_size(source: str, most: int, what: str, field: str) -> None:
    if not isinstance(source, str):
        raise RequestError(f"{what} must be text, not {type(source).__name__}", field)
    if len(source) > most:
        raise RequestError(
            f"{what} has {len(source)} characters; at most {most} are accepted, make it smaller", field
        )
    if "\0" in source:
        raise RequestError(f"{what} has a NUL character; take it out", field)
    try:
        source.encode()
    except UnicodeEncodeError:
        raise RequestError(
            f"{what} has a lone surrogate, which is no character; take it out", field
        ) from None
