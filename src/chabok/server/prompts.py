"""What a client says, as tokens: templates and tokenizers, off the event loop where they take time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar
from weakref import WeakKeyDictionary

from chabok.errors import RequestError
from chabok.server.events import Ask

if TYPE_CHECKING:
    from chabok.engine.aio import AsyncLLM
    from chabok.engine.llm import LLM

INLINE_CHARACTERS = 2000
"""Prompts up to this size may be encoded on the event loop."""

INLINE_S = 0.001
"""... if the last of them took no longer than this."""

_threads = ThreadPoolExecutor(2, "chabok-text")


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

    async def tokens(self, ask: Ask) -> list[int]:
        """The token ids of what is asked. Raises RequestError or TemplateError."""
        if isinstance(ask.prompt, list):
            return ask.prompt
        short = _size(ask) <= INLINE_CHARACTERS
        if short and self._short_s <= INLINE_S:
            tokens, seconds = _timed(self._encode, ask)
        else:
            loop = asyncio.get_running_loop()
            tokens, seconds = await loop.run_in_executor(_threads, _timed, self._encode, ask)
        if short:
            self._short_s = seconds
        return tokens

    def _encode(self, ask: Ask) -> list[int]:
        if ask.messages is None:
            assert isinstance(ask.prompt, str)
            return self._llm.tokenize(ask.prompt)
        messages, start = ask.messages, ""
        if ask.continue_final:
            *messages, last = messages
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str) or not messages:
                raise RequestError(
                    "only a last message of the assistant, a text, can be continued", "messages"
                )
            start = last["content"]
        tokens = self._llm.tokenize_chat(messages, ask.tools or None, **ask.template_variables)
        return tokens + self._llm.tokenize(start, add_bos=False) if start else tokens


def _timed(encode: Callable[[Ask], list[int]], ask: Ask) -> tuple[list[int], float]:
    started = perf_counter()
    tokens = encode(ask)
    return tokens, perf_counter() - started


def _size(ask: Ask) -> int:
    """Characters to encode, roughly."""
    if ask.prompt is not None:
        return len(ask.prompt)
    if ask.tools or ask.template_variables:
        return INLINE_CHARACTERS + 1
    size = 0
    for message in ask.messages or ():
        content = message.get("content")
        size += len(content) + 20 if isinstance(content, str) else INLINE_CHARACTERS
    return size
