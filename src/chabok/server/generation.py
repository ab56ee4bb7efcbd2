"""From what a client asks to the events that answer it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from chabok.engine.request import Request
from chabok.engine.timings import Timings
from chabok.errors import RequestError
from chabok.server.events import (
    Answer,
    Ask,
    Call,
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reasoning,
    Text,
    TokenInfo,
)
from chabok.server.output import Output
from chabok.server.prompts import Encoded, Prompts

if TYPE_CHECKING:
    from chabok.server.auth import Caller
    from chabok.server.roster import Served


async def prepare(ask: Ask, served: Served, caller: Caller) -> Prepared:
    """Turn an ask into running requests. All that can be refused is refused here, by raising RequestError,
    TemplateError, BusyError or StoppingError.
    """
    return await prepare_all([ask], served, caller)


async def prepare_all(asks: Sequence[Ask], served: Served, caller: Caller) -> Prepared:
    """Several asks as one: the answers to the first come first, then those to the second ..."""
    now = perf_counter()
    prepared = Prepared(caller)
    try:
        for ask in asks:
            prepared.submit(ask, await encode(ask, served), served, now)
    except BaseException:
        prepared.close()
        raise
    return prepared


async def encode(ask: Ask, served: Served) -> Encoded:
    """The prompt of an ask, with the model's own system text where it has none. Raises RequestError or
    TemplateError.
    """
    if ask.messages is not None and served.settings.system:
        ask.messages = _with_system(ask.messages, served.settings.system)
    return await Prompts.of(served.llm).encode(ask)


def _with_system(messages: list[dict[str, object]], system: str) -> list[dict[str, object]]:
    if messages and messages[0].get("role") == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


class Prepared:
    """Running requests whose events are still to be read; ``close`` ends them early.

    prompt_tokens: in all prompts.
    """

    def __init__(self, caller: Caller) -> None:
        self.prompt_tokens = 0
        self._caller = caller
        self.gone = False  # the client left
        self._news = asyncio.Event()
        self._outputs: list[Output] = []
        self._open: list[Output] = []

    def submit(self, ask: Ask, encoded: Encoded, served: Served, now: float) -> None:
        """Queue the n requests of an ask. now: when it arrived, unless it says so itself."""
        arrived = now if ask.arrived is None else ask.arrived
        caller = self._caller
        deadline = caller.deadline
        if ask.deadline_ms is not None:
            deadline = min(deadline or math.inf, arrived + ask.deadline_ms / 1000)
        caller.begin(served.name, len(encoded.tokens))
        self.prompt_tokens += len(encoded.tokens)
        for i in range(ask.n):
            params, seed = ask.params, ask.params.seed
            if i and seed is not None:
                params = replace(params, seed=(seed + i) % 2**63)
            request = Request(
                encoded.tokens,
                params,
                client=caller.name,
                priority=caller.capped(ask.priority + served.settings.priority),
                deadline=deadline,
                arrived=arrived,
                tokenize_s=encoded.seconds,
                salt=caller.salt,
                constraint=encoded.constraint,
                prompt_logprobs=ask.prompt_logprobs,
                visible=encoded.visible,
            )
            # The queue's limit is for requests; further answers of one that was taken may go beyond it.
            first = not self._outputs
            try:
                stream = served.llm.submit(request, self._news, bounded=first)
            except RequestError as error:
                # All that a request can have wrong besides its parameters is its prompt.
                error.field = error.field or ("prompt" if ask.messages is None else "messages")
                raise
            output = Output(len(self._outputs), stream, ask, encoded, served.llm.llm)
            self._outputs.append(output)
            self._open.append(output)

    @property
    def timings(self) -> Timings:
        """Of the first answer, so far; its stages up to the prompt's end are final after the first event."""
        return self._outputs[0].stream.timings

    async def next(self) -> list[Event] | None:
        """The events since the last call, waiting for one; [] after ``poke``; None after the end.

        Raises what made a request fail; the others are ended then.
        """
        if not self._open:
            return None
        try:
            if not any(output.stream.has_news for output in self._open):
                # Nothing is awaited between looking and clearing, so a wake-up in between is still to come.
                self._news.clear()
                await self._news.wait()
            events: list[Event] = []
            for output in self._open:
                output.take(events)
            for event in events:
                if isinstance(event, Ended):
                    self._caller.ended(event.completion.timings, event.reason)
            if any(output.ended for output in self._open):
                self._open = [output for output in self._open if not output.ended]
            return events
        except BaseException as error:
            self._caller.failed(error)
            self.close()
            raise

    def poke(self) -> None:
        """Have ``next`` return, events or not."""
        self._news.set()

    async def events(self) -> AsyncIterator[Event]:
        """The events one by one; closing the iterator ends the requests."""
        try:
            while (events := await self.next()) is not None:
                for event in events:
                    yield event
        finally:
            self.close()

    async def answers(self) -> list[Answer]:
        """Wait for the end: every answer whole, in order."""
        return self.put_together([event async for event in self.events()])

    def put_together(self, events: list[Event]) -> list[Answer]:
        """The whole answers that all the events make."""
        collected = [_Collected() for _ in self._outputs]
        for event in events:
            collected[event.index].add(event)
        return [one.answer() for one in collected if one.ended is not None]

    def close(self) -> None:
        """End what still runs."""
        for output in self._open:
            output.stream.close()
            self._caller.ended(output.stream.timings, "cancelled")
        self._open = []
        self._news.set()


class _Collected:
    """The events of one answer, put together."""

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []
        self._arguments: list[list[str]] = []
        self._tokens: list[TokenInfo] = []

    def add(self, event: Event) -> None:
        match event:
            case Text():
                self._texts.append(event.text)
                self._tokens += event.tokens
            case Reasoning():
                self._thoughts.append(event.text)
            case CallStart():
                self._calls.append(Call(event.id, event.name, ""))
                self._arguments.append([])
            case CallArguments():
                self._arguments[event.call].append(event.text)
            case Ended():
                self.ended = event

    def answer(self) -> Answer:
        assert self.ended is not None
        for call, pieces in zip(self._calls, self._arguments, strict=True):
            call.arguments = "".join(pieces)
        text, thought = "".join(self._texts), "".join(self._thoughts)
        return Answer(self.ended.index, self.ended, text, thought, self._calls, self._tokens)
