"""A model without a server as what is measured: asked through the Python API, timed in the same way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from chabok import AsyncLLM, ChabokError, SamplingParams
from chabok.choose.quality.rating import Rated
from chabok.measure.endpoint import Messages
from chabok.measure.timeline import Event, Failure, ServerTimings, Timeline, Usage
from chabok.measure.wire import Ask

if TYPE_CHECKING:
    from chabok.checkpoints.progress import Progress


class _NoConnections:
    """Stands where a pool of connections would: there is nothing to connect to."""

    async def __aenter__(self) -> _NoConnections:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def warm(self, connections: int) -> float:
        return 0.0

    def close(self) -> None:
        pass


class LocalModel:
    """A loaded model; a context manager that unloads it."""

    def __init__(self, llm: AsyncLLM, name: str) -> None:
        self._llm = llm
        self.model = name
        self.url = "this process"

    @classmethod
    def open(cls, name: str, progress: Progress | None = None) -> LocalModel:
        """Load a model. SourceError and its like: it cannot be had."""
        return cls(AsyncLLM(name, progress=progress), name)

    def __enter__(self) -> LocalModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.llm.close()

    def client(self) -> _NoConnections:
        """Nothing to connect to."""
        return _NoConnections()

    def ask(self, prompt: str, output_tokens: int, *, exact: bool = True, messages: Messages = ()) -> Ask:
        """A request for an answer to a prompt, or to the last of several messages."""
        return Ask(self.model, prompt, messages, output_tokens, exact)

    async def round_trip(self, client: object) -> float | None:
        """No network, no round trip."""
        return None

    async def time(self, client: object, ask: Ask, timeline: Timeline, start: float) -> Timeline:
        """Ask, and write what happens into the timeline."""
        return await self._time(self._llm.chat_stream(ask.turns, _params(ask)), timeline, start)

    async def time_raw(self, client: object, ask: Ask, timeline: Timeline, start: float) -> Timeline:
        """As ``time``, but the text goes on from the prompt, without a chat template."""
        return await self._time(self._llm.stream(ask.flat, _params(ask)), timeline, start)

    async def _time(self, opening: Any, timeline: Timeline, start: float) -> Timeline:
        events = timeline.events
        timeline.sent = perf_counter() - start
        try:
            count = 0
            async with await opening as stream:
                async for token in stream:
                    count += 1
                    events.append(Event(perf_counter() - start, "content", token.text, count))
                completion = await stream.completion()
        except ChabokError as error:
            timeline.failure = Failure("refused", str(error), getattr(error, "retry_after_s", None))
            timeline.events.append(Event(perf_counter() - start, "error", str(error)))
        except asyncio.CancelledError:
            timeline.failure = Failure("cancelled", "the run was stopped before the answer was complete")
            raise
        else:
            timings = completion.timings
            timeline.finish = completion.finish_reason
            timeline.server = _stages(timings.to_dict())
            timeline.usage = Usage(timings.prompt_tokens, timings.output_tokens, None, timings.cached_tokens)
        finally:
            timeline.done = perf_counter() - start
        return timeline

    async def rate(self, contexts: Sequence[str], continuations: Sequence[str]) -> list[Rated]:
        """How probable each continuation is after its context; all of them share a batch."""
        llm = self._llm.llm
        params = SamplingParams(max_tokens=0)
        requests, starts = [], []
        for context, continuation in zip(contexts, continuations, strict=True):
            before = llm.tokenize(context)
            request = llm.request(context + continuation, params)
            request.prompt_logprobs = 0
            # Where a token spans the border, the continuation begins with it.
            same = next((n for n, (a, b) in enumerate(zip(before, request.prompt)) if a != b), len(before))
            starts.append(max(min(same, len(request.prompt) - 1), 1))
            requests.append(request)
        streams = [self._llm.submit(request, bounded=False) for request in requests]
        try:
            done = [await stream.completion() for stream in streams]
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        found = []
        for start, completion in zip(starts, done):
            rated = [value for value in (completion.prompt_logprobs or [])[start:] if value is not None]
            found.append(Rated(sum(rated), len(rated)))
        return found


def _params(ask: Ask) -> SamplingParams:
    stop = ask.extra.get("stop", ())
    return SamplingParams(
        max_tokens=ask.output_tokens, temperature=ask.temperature or 0.0, ignore_eos=ask.exact, stop=stop
    )


def _stages(found: dict[str, Any]) -> ServerTimings:
    names = [name for name in ServerTimings.__dataclass_fields__ if name != "source"]
    known = {
        name: found[name.removesuffix("_ms") + "_s"]
        for name in names
        if name.removesuffix("_ms") + "_s" in found
    }
    return ServerTimings("chabok", **{name: seconds * 1000 for name, seconds in known.items()})
