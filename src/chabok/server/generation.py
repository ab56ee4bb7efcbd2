"""From what a client asks to the events that answer it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from chabok.engine.request import Completion, Request, Token
from chabok.engine.timings import Timings
from chabok.server.events import (
    Answer,
    Ask,
    Call,
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reason,
    Reasoning,
    Started,
    Text,
    TokenInfo,
    Usage,
)
from chabok.server.prompts import Prompts

if TYPE_CHECKING:
    from chabok.engine.aio import AsyncLLM, AsyncStream
    from chabok.server.roster import Served


class Caller(Protocol):
    """Who asks."""

    @property
    def name(self) -> str:
        """Its share of the engine is that of one client."""

    @property
    def salt(self) -> str:
        """Cached prefixes are shared only with callers of the same salt."""


async def prepare(ask: Ask, served: Served, caller: Caller) -> Prepared:
    """Turn an ask into running requests. All that can be refused is refused here, by raising RequestError,
    BusyError or StoppingError.
    """
    arrived = perf_counter() if ask.arrived is None else ask.arrived
    prompts = Prompts.of(served.llm)
    started = perf_counter()
    prompt = await prompts.tokens(ask)
    tokenize_s = perf_counter() - started
    deadline = None if ask.deadline_ms is None else arrived + ask.deadline_ms / 1000
    news = asyncio.Event()
    streams: list[AsyncStream] = []
    try:
        for index in range(ask.n):
            params, seed = ask.params, ask.params.seed
            if index and seed is not None:
                params = replace(params, seed=(seed + index) % 2**63)
            request = Request(
                prompt,
                params,
                priority=ask.priority,
                deadline=deadline,
                arrived=arrived,
                tokenize_s=tokenize_s,
                salt=caller.salt,
                client=caller.name,
                prompt_logprobs=ask.prompt_logprobs,
            )
            # The queue's limit is for requests; answers of one that was taken may go beyond it.
            streams.append(served.llm.submit(request, news, bounded=index == 0))
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    return Prepared(ask, served.llm, prompt, streams, news)


class Prepared:
    """Running requests whose events are still to be read; ``close`` ends them early.

    prompt_tokens: in the prompt.
    """

    def __init__(
        self,
        ask: Ask,
        llm: AsyncLLM,
        prompt: Sequence[int],
        streams: list[AsyncStream],
        news: asyncio.Event,
    ) -> None:
        self.prompt_tokens = len(prompt)
        self._news = news
        self._streams = streams
        self._open = [_Output(i, stream, ask, llm, prompt) for i, stream in enumerate(streams)]

    @property
    def timings(self) -> Timings:
        """Of the first answer, so far; its stages up to the prompt's end are final after the first event."""
        return self._streams[0].timings

    async def next(self) -> list[Event] | None:
        """The events since the last call, waiting for one; [] after ``poke``; None after the end.

        Raises what made a request fail; the others are ended then.
        """
        if not self._open:
            return None
        try:
            if not any(output.has_news for output in self._open):
                # Nothing is awaited between looking and clearing, so a wake-up in between is still to come.
                self._news.clear()
                await self._news.wait()
            events: list[Event] = []
            for output in self._open:
                output.take(events)
            if any(output.ended for output in self._open):
                self._open = [output for output in self._open if not output.ended]
            return events
        except BaseException:
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
        found: dict[int, Answer] = {}
        texts: dict[int, list[str]] = {}
        thoughts: dict[int, list[str]] = {}
        calls: dict[int, list[Call]] = {}
        tokens: dict[int, list[TokenInfo]] = {}
        while (events := await self.next()) is not None:
            for event in events:
                i = event.index
                match event:
                    case Text():
                        texts.setdefault(i, []).append(event.text)
                        tokens.setdefault(i, []).extend(event.tokens)
                    case Reasoning():
                        thoughts.setdefault(i, []).append(event.text)
                    case CallStart():
                        calls.setdefault(i, []).append(Call(event.id, event.name, ""))
                    case CallArguments():
                        calls[i][event.call].arguments += event.text
                    case Ended():
                        text, thought = "".join(texts.get(i, ())), "".join(thoughts.get(i, ()))
                        found[i] = Answer(i, event, text, thought, calls.get(i, []), tokens.get(i, []))
        return [found[i] for i in sorted(found)]

    def close(self) -> None:
        """End what still runs."""
        for output in self._open:
            output.stream.close()
        self._open = []
        self._news.set()


class _Output:
    """One of the n answers as it grows."""

    def __init__(
        self, index: int, stream: AsyncStream, ask: Ask, llm: AsyncLLM, prompt: Sequence[int]
    ) -> None:
        self.index = index
        self.stream = stream
        self.ended = False
        self._llm = llm
        self._prompt = prompt
        self._logprobs = ask.params.logprobs is not None
        self._started = False
        self._held: list[TokenInfo] = []  # tokens whose text is still to come

    @property
    def has_news(self) -> bool:
        return self.stream.has_news

    def take(self, events: list[Event]) -> None:
        """Append what there is."""
        stream = self.stream
        done = stream.done  # looked at first: what is there afterwards is all there will be
        tokens = stream.take()
        if not self._started and (tokens or done):
            self._started = True
            cached = stream.timings.cached_tokens if tokens else 0
            events.append(Started(self.index, len(self._prompt), cached))
        for token in tokens:
            self._token(token, events)
        if done:
            self._end(stream.result(), events)

    def _token(self, token: Token, events: list[Event]) -> None:
        if self._logprobs:
            self._held.append(self._info(token))
            if token.text:
                events.append(Text(self.index, token.text, tuple(self._held)))
                self._held = []
        elif token.text:
            events.append(Text(self.index, token.text))

    def _info(self, token: Token) -> TokenInfo:
        data = self._llm.llm.token_bytes
        top = tuple((id_, data(id_), logprob) for id_, logprob in token.top)
        return TokenInfo(token.id, data(token.id), token.logprob, top)

    def _end(self, completion: Completion, events: list[Event]) -> None:
        self.ended = True
        reason: Reason = completion.finish_reason
        usage = Usage(len(self._prompt), len(completion.tokens), completion.timings.cached_tokens)
        events.append(Ended(self.index, reason, completion.stopped_by, completion, usage))
