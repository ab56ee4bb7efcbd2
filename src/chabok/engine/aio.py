"""The Python API for asyncio: the same model, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload
from weakref import WeakSet

from chabok.engine.engine import Engine
from chabok.engine.llm import LLM, Message, Prompt, each_prompt, is_prompt, per_prompt, single
from chabok.engine.load import OptionValues
from chabok.engine.request import Completion, Constraint, Request, SamplingParams, Token
from chabok.engine.timings import Timings

if TYPE_CHECKING:
    from chabok.checkpoints.progress import Progress
    from chabok.text.grammar import Grammars


class _Waker:
    """Wakes the streams of one event loop, once for all the news of a step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: WeakSet[AsyncStream] = WeakSet()
        self._due = False

    def __call__(self) -> None:
        if not self._due:
            self._due = True
            with suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._due = False
        for stream in self.streams:
            if stream.has_news:
                stream.news.set()


class AsyncStream:
    """An answer as it is written: ``async for token in stream``, or ``await stream.completion()``.

    Leaving an ``async with`` block, or cancelling the task that waits for it, ends the generation early.
    """

    def __init__(
        self,
        waker: _Waker,
        engine: Engine,
        request: Request,
        news: asyncio.Event | None = None,
        *,
        bounded: bool = True,
    ) -> None:
        self.news = news or asyncio.Event()
        self._waker = waker
        self._handle = engine.submit(request, waker, bounded=bounded)
        waker.streams.add(self)

    @property
    def has_news(self) -> bool:
        """Whether something can be read without waiting."""
        return bool(self._handle.tokens) or self._handle.done

    @property
    def done(self) -> bool:
        """Whether it ended, well or not; tokens may still be there to take."""
        return self._handle.done

    @property
    def timings(self) -> Timings:
        """How long its stages took so far; all up to the prompt's end is final with the first token."""
        return self._handle.timings()

    def take(self) -> list[Token]:
        """The tokens that can be read without waiting, possibly none."""
        tokens = self._handle.tokens
        return [tokens.popleft() for _ in range(len(tokens))]

    def result(self) -> Completion:
        """The whole answer of a stream that is ``done``. Raises what made it fail."""
        self._waker.streams.discard(self)
        return self._handle.result()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        handle = self._handle
        while not handle.tokens:
            if handle.done:
                self._waker.streams.discard(self)
                if handle.error is not None:
                    raise handle.error
                raise StopAsyncIteration
            await self._wait()
        return handle.tokens.popleft()

    async def completion(self) -> Completion:
        """The whole answer; waits for its end."""
        handle = self._handle
        while not handle.done:
            await self._wait()
        self._waker.streams.discard(self)
        return handle.result()

    async def _wait(self) -> None:
        # Nothing is awaited between looking and clearing, so a wake-up in between is still to come.
        self.news.clear()
        if self._handle.done:
            return
        try:
            await self.news.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        """Stop generating; what was written so far is in ``completion``, with finish_reason "cancelled"."""
        if not self._handle.done:
            self._handle.cancel()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # else it was refused
            self.close()


class Opening:
    """A stream that is asked for where it is first used: ``async for token in it``, ``async with it as
    stream``, or ``stream = await it``."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, AsyncStream]]) -> None:
        self._make = make
        self._stream: AsyncStream | None = None

    def __await__(self) -> Generator[Any, None, AsyncStream]:
        return self._make().__await__()

    async def completion(self) -> Completion:
        """The whole answer; waits for its end."""
        return await (await self._make()).completion()

    def __aiter__(self) -> AsyncIterator[Token]:
        return self

    async def __anext__(self) -> Token:
        if self._stream is None:
            self._stream = await self._make()
        return await anext(self._stream)

    async def __aenter__(self) -> AsyncStream:
        self._stream = await self._make()
        return self._stream

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


class AsyncLLM:
    """A language model for asyncio; its steps run in a thread of their own, which sleeps when idle.

    The parameters are those of ``LLM``. Loading blocks; ``await AsyncLLM.open(...)`` does it in a thread.

        async with await AsyncLLM.open("smollm2") as llm:
            async for token in llm.stream("The sea is", SamplingParams(max_tokens=32)):
                print(token.text, end="")
    """

    def __init__(
        self,
        model: str | PathLike[str] = "smollm2",
        *,
        progress: Progress | None = None,
        **options: Unpack[OptionValues],
    ) -> None:
        self._set(LLM(model, progress=progress, **options))

    @classmethod
    async def open(cls, model: str | PathLike[str] = "smollm2", **options: Any) -> AsyncLLM:
        """Load a model without blocking the event loop."""
        return await asyncio.to_thread(cls, model, **options)

    @classmethod
    def of(cls, llm: LLM) -> AsyncLLM:
        """The asynchronous side of a model that is loaded already; closing one closes the other."""
        one = cls.__new__(cls)
        one._set(llm)
        return one

    def _set(self, llm: LLM) -> None:
        self.llm = llm
        self._wakers: dict[asyncio.AbstractEventLoop, _Waker] = {}
        llm.engine.start()

    @property
    def grammars(self) -> Grammars:
        """Makes constraints, see ``LLM.grammars``; slow for large schemas, so best called in a thread."""
        return self.llm.grammars

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Opening:
        """Continue a prompt: ``async for token in llm.stream(prompt)``."""
        return Opening(lambda: self._open(self.llm.request, prompt, params, constraint=constraint))

    async def _open(self, make: Callable[..., Request], *args: Any, **named: Any) -> AsyncStream:
        return self.submit(await asyncio.to_thread(make, *args, **named))

    def submit(
        self, request: Request, news: asyncio.Event | None = None, *, bounded: bool = True
    ) -> AsyncStream:
        """Queue a request that is complete; to be called in the event loop that will read the stream.

        news: set whenever the stream has news; several may share one. bounded: see ``Engine.submit``.
        Raises RequestError if it cannot be served, BusyError if the queue is full, StoppingError if the
        engine is being drained.
        """
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            self._wakers = {known: waker for known, waker in self._wakers.items() if not known.is_closed()}
            waker = self._wakers[loop] = _Waker(loop)
        return AsyncStream(waker, self.llm.engine, request, news, bounded=bounded)

    def chat_stream(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
    ) -> Opening:
        """Answer a conversation: ``async for token in llm.chat_stream(messages)``."""
        make = self.llm.chat_request
        return Opening(lambda: self._open(make, messages, params, tools=tools, constraint=constraint))

    @overload
    async def generate(  # type: ignore[overload-overlap]  # a str is a sequence of strings, to the type checker
        self, prompts: str, params: SamplingParams | None = None, *, constraint: Constraint | None = None
    ) -> Completion: ...
    @overload
    async def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> list[Completion]: ...
    @overload
    async def generate(
        self,
        prompts: Sequence[int],
        params: SamplingParams | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> Completion: ...
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        constraint: Constraint | None = None,
    ) -> Completion | list[Completion]:
        """Continue one prompt, or several at once; see ``LLM.generate``."""
        if is_prompt(prompts):
            return await (await self.stream(prompts, single(params), constraint=constraint)).completion()
        streams: list[AsyncStream] = []
        try:
            for prompt, each in zip(each_prompt(prompts), per_prompt(params, len(prompts)), strict=True):
                request = await asyncio.to_thread(self.llm.request, prompt, each, constraint)
                streams.append(self.submit(request, bounded=False))
            return [await stream.completion() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.close()
            raise

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        stream: Literal[False] = False,
    ) -> Coroutine[Any, Any, Completion]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        stream: Literal[True],
    ) -> Opening: ...
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        constraint: Constraint | None = None,
        stream: bool = False,
    ) -> Coroutine[Any, Any, Completion] | Opening:
        """Answer a conversation: ``await llm.chat(messages)``; with ``stream``, see ``chat_stream``."""
        opening = self.chat_stream(messages, params, tools=tools, constraint=constraint)
        return opening if stream else opening.completion()

    async def close(self) -> None:
        """Release threads and memory; requests that have not ended fail."""
        await asyncio.to_thread(self.llm.close)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
