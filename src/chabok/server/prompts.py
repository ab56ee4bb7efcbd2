"""What a client says, as tokens: templates, tokenizers, grammars; off the event loop where they take time."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakKeyDictionary

from chabok.errors import RequestError
from chabok.server.events import Ask

if TYPE_CHECKING:
    from chabok.engine.aio import AsyncLLM
    from chabok.engine.llm import LLM
    from chabok.engine.request import Constraint
    from chabok.text.chat import ChatTemplate
    from chabok.text.grammar import Grammars
    from chabok.text.reasoning import ReasoningParser
    from chabok.text.tokenizer import Tokenizer
    from chabok.text.toolparsers import ToolParser
    from chabok.text.tools import ToolFormat

INLINE_CHARACTERS = 2000
"""Prompts up to this size may be encoded on the event loop."""

INLINE_S = 0.001
"""... if the last of them took no longer than this."""

CERTAIN_CHARACTERS = 100_000
"""Prompts up to this size are encoded in any case, to say how many tokens they have."""

_TAKEN = frozenset({"messages", "tools", "token_limit", "self"})
"""Names that a chat template is given in any case, or that mean something on the way to it."""

_END_TOKENS = 40
"""Tokens of a prompt's end that show whether its template began the reasoning."""

_threads = ThreadPoolExecutor(2, "chabok-text")


@dataclass(slots=True)
class Encoded:
    """A prompt that is ready for the engine, and how its answers are read.

    text: the prompt's, where it is to be repeated. visible: control tokens that the parsers must see as text.
    seconds: it took.
    """

    tokens: list[int]
    text: str = ""
    constraint: Constraint | None = None
    format: ToolFormat | None = None
    tools: tuple[dict[str, Any], ...] = ()
    end: str | None = None
    template: ChatTemplate | None = None
    visible: frozenset[int] = frozenset()
    seconds: float = 0.0

    def tool_parser(self) -> ToolParser | None:
        """A parser of calls for one answer, if there can be calls."""
        return self.format.parser(self.tools) if self.format is not None else None

    def reasoning_parser(self) -> ReasoningParser | None:
        """A parser of reasoning for one answer, if the model is known to reason."""
        if self.end is None or self.template is None:
            return None
        from chabok.text.reasoning import ReasoningParser

        return ReasoningParser.of(self.template, self.end)


class Prompts:
    """Encodes the prompts of one model."""

    _known: ClassVar[WeakKeyDictionary[AsyncLLM, Prompts]] = WeakKeyDictionary()

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._short_s = 1.0  # what the last short prompt took; the first loads what it needs

    @classmethod
    def of(cls, llm: AsyncLLM) -> Prompts:
        """Those of a model; made once."""
        known = cls._known.get(llm)
        if known is None:
            known = cls._known[llm] = cls(llm.llm)
        return known

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls."""
        from chabok.text.tools import ToolFormat

        return ToolFormat.of(cast("ChatTemplate", self._llm.template), cast("Tokenizer", self._llm.tokenizer))

    @cached_property
    def grammars(self) -> Grammars:
        """Makes grammars of the model's tokens."""
        return self._llm.grammars

    async def encode(self, ask: Ask) -> Encoded:
        """What the engine is to be given. Raises RequestError or TemplateError."""
        short = _size(ask) <= INLINE_CHARACTERS
        if short and self._short_s <= INLINE_S:
            encoded = self._encode(ask)
        else:
            encoded = await asyncio.get_running_loop().run_in_executor(_threads, self._encode, ask)
        if short:
            self._short_s = encoded.seconds
        return encoded

    def _encode(self, ask: Ask) -> Encoded:
        started = perf_counter()
        self._check_size(ask)
        encoded = Encoded([])
        if ask.messages is not None:
            self._chat(ask, encoded)
        elif isinstance(ask.prompt, str):
            encoded.tokens = self._llm.tokenize(ask.prompt, limit=self._llm.context)
            encoded.text = ask.prompt
        else:
            encoded.tokens = ask.prompt or []
            if ask.echo:
                encoded.text = self._llm.detokenize(encoded.tokens)
        reasoning = encoded.reasoning_parser()
        if reasoning is not None:
            encoded.visible |= reasoning.visible(cast("Tokenizer", self._llm.tokenizer))
        encoded.constraint = self._constraint(ask, reasoning)
        encoded.seconds = perf_counter() - started
        return encoded

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token."""
        llm = self._llm
        return max(len(llm.token_bytes(token)) for token in range(llm.engine.model.vocab_size))

    def _check_size(self, ask: Ask) -> None:
        """Refuse what cannot fit before it is encoded, which would take seconds."""
        size = len(ask.prompt) if isinstance(ask.prompt, str) else 0
        for message in ask.messages or ():
            content = message.get("content")
            size += len(content) if isinstance(content, str) else 0
        if size > CERTAIN_CHARACTERS and size // self._longest > self._llm.context:
            least = size // self._longest
            raise RequestError(
                f"the prompt has {size} characters, which is at least {least} tokens, but the "
                f"context is {self._llm.context} tokens (prompt and answer together); shorten the prompt",
                "prompt" if ask.messages is None else "messages",
            )

    def _constraint(self, ask: Ask, reasoning: ReasoningParser | None) -> Constraint | None:
        from chabok.text.tools import is_strict

        calls = bool(ask.tools) and ask.tool_choice not in ("auto", "none")
        if ask.tool_choice == "auto" and ask.format is None:
            calls = any(map(is_strict, ask.tools))
        if ask.format is None and not calls:
            return None
        grammars = self.grammars
        if calls:
            if ask.format is not None:
                raise RequestError("a call is required, so response_format cannot hold", "response_format")
            return grammars.tool_calls(
                self.tool_format,
                ask.tools,
                ask.tool_choice,
                parallel=ask.parallel_tool_calls,
                reasoning=reasoning,
            )
        format = ask.format
        if format is None:
            return None
        if format.kind == "json_object":
            return grammars.json_object(reasoning=reasoning)
        if format.kind == "json_schema":
            return grammars.json_schema(format.schema or {}, reasoning=reasoning)
        make = grammars.regex if format.kind == "regex" else grammars.lark
        return make(format.source, reasoning=reasoning)

    def _chat(self, ask: Ask, encoded: Encoded) -> None:
        messages, start = ask.messages or [], ""
        taken = _TAKEN & ask.template_variables.keys()
        if taken:
            name = min(taken)
            raise RequestError(
                f"template_variables cannot have {name!r}: the template gets it from the request",
                "template_variables",
            )
        if ask.continue_final:
            *messages, last = messages
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or not messages:
                raise RequestError(
                    "only a text of the assistant, after other messages, can be continued", "messages"
                )
            start = last["content"]
        tools: list[Any] | None = None
        of_tools = any(message.get("tool_calls") or message["role"] == "tool" for message in messages)
        refused = messages and messages[0]["role"] == "system" and not self.tool_format.system_role
        if ask.tools or of_tools or refused:
            messages, tools = self.tool_format.prepare(messages, ask.tools, ask.tool_choice)
            if ask.tools and ask.tool_choice != "none" and ask.format is None:
                encoded.format, encoded.tools = self.tool_format, tuple(ask.tools)
                encoded.visible = self.tool_format.visible
        encoded.tokens = self._llm.tokenize_chat(
            messages, tools, token_limit=self._llm.context, **ask.template_variables
        )
        if ask.reasoning:
            encoded.template = cast("ChatTemplate", self._llm.template)
            encoded.end = self._llm.detokenize(encoded.tokens[-_END_TOKENS:], skip_special=False)
        if start:
            encoded.tokens += self._llm.tokenize(start, add_bos=False)


def _size(ask: Ask) -> int:
    """Characters to encode, roughly; what takes longer than characters do counts as too many."""
    if ask.tools or ask.format is not None or ask.template_variables:
        return INLINE_CHARACTERS + 1
    if ask.prompt is not None:
        return len(ask.prompt)
    size = 0
    for message in ask.messages or ():
        content = message.get("content")
        size += len(content) + 20 if isinstance(content, str) else INLINE_CHARACTERS
    return size
