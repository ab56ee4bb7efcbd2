"""A model without a server as what is measured: asked through the Python API, timed in the same way."""

from __future__ import annotations

import asyncio
from time import perf_counter
from types import TracebackType
from typing import Any

from chabok.engine.aio import AsyncLLM
from chabok.engine.request import SamplingParams
from chabok.engine.timings import Timings
from chabok.errors import ChabokError
from chabok.measure.endpoint import Messages
from chabok.measure.timeline import Event, Failure, ServerTimings, Timeline, Usage
from chabok.measure.wire import Ask


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
    def open(cls, name: str, *, quiet: bool = False) -> LocalModel:
        """Load a model, with progress. SourceError and its like: it cannot be had."""
        from chabok.cli.progress import Bars

        with Bars(quiet=quiet) as bars:
            return cls(AsyncLLM(name, progress=bars), name)

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
        params = SamplingParams(
            max_tokens=ask.output_tokens, temperature=ask.temperature or 0.0, ignore_eos=ask.exact
        )
        events = timeline.events
        timeline.sent = perf_counter() - start
        try:
            count = 0
            async with await self._llm.chat_stream(ask.turns, params) as stream:
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
            timeline.finish = completion.finish_reason
            timeline.server = _stages(completion.timings)
            timings = completion.timings
            timeline.usage = Usage(timings.prompt_tokens, timings.output_tokens, None, timings.cached_tokens)
        finally:
            timeline.done = perf_counter() - start
        return timeline


def _stages(timings: Timings) -> ServerTimings:
    found: dict[str, Any] = timings.to_dict()
    names = [name for name in ServerTimings.__dataclass_fields__ if name != "source"]
    known = {
        name: found[name.removesuffix("_ms") + "_s"]
        for name in names
        if name.removesuffix("_ms") + "_s" in found
    }
    return ServerTimings("chabok", **{name: seconds * 1000 for name, seconds in known.items()})
