"""Ollama's generate and chat (https://github.com/ollama/ollama/blob/main/docs/api.md): JSON in lines."""

from __future__ import annotations

from typing import Any

import msgspec

from chabok.measure.failures import ServerSaidError
from chabok.measure.timeline import Event, Kind, ServerTimings, Timeline, Usage
from chabok.measure.wire.openai import bearer
from chabok.measure.wire.reader import Ask, Parser, error_text, merge


class _Message(msgspec.Struct):
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[Any] | None = None


class _Line(msgspec.Struct):
    message: _Message | None = None
    response: str | None = None
    thinking: str | None = None
    done: bool = False
    done_reason: str | None = None
    error: Any = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


_DECODE = msgspec.json.Decoder(_Line).decode


class LinesParser:
    """Reads the lines of both; ``"done": true`` ends them."""

    def __init__(self, timeline: Timeline) -> None:
        self.finished = False
        self._timeline = timeline

    def read(self, at: float, data: bytes, name: bytes) -> None:
        """Take one line."""
        line = _DECODE(data)
        if line.error is not None:
            raise ServerSaidError(error_text({"error": line.error}))
        message = line.message or _Message(line.response, line.thinking)
        found: list[tuple[Kind, str]] = []
        if message.thinking:
            found.append(("reasoning", message.thinking))
        if message.content:
            found.append(("content", message.content))
        if message.tool_calls:
            found.append(("tool", msgspec.json.encode(message.tool_calls).decode()))
        events = self._timeline.events
        events += [Event(at, kind, text) for kind, text in found]
        if line.done:
            self._end(at, line)
        elif not found:
            events.append(Event(at, "role"))

    def _end(self, at: float, line: _Line) -> None:
        timeline = self._timeline
        self.finished = True
        timeline.finish = line.done_reason or "stop"
        # A prompt that is cached as a whole has no prompt_eval_count in some versions.
        timeline.usage = Usage(line.prompt_eval_count, line.eval_count)
        timings = ServerTimings(
            "ollama",
            load_ms=_ms(line.load_duration),
            prefill_ms=_ms(line.prompt_eval_duration),
            decode_ms=_ms(line.eval_duration),
            total_ms=_ms(line.total_duration),
        )
        timeline.server = merge(timeline.server, timings)
        timeline.events.append(
            Event(at, "usage" if line.eval_count is not None else "role", "", line.eval_count)
        )


def _ms(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e6


class OllamaChat:
    """``/api/chat``."""

    name = "ollama-chat"
    path = "/api/chat"
    lines = True

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        return bearer(key) | {"Accept": "application/x-ndjson"}

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body; this dialect has no way to force a length."""
        return {"model": ask.model, "messages": ask.turns} | _common(ask) | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return LinesParser(timeline)


class OllamaGenerate:
    """``/api/generate``."""

    name = "ollama-generate"
    path = "/api/generate"
    lines = True

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        return bearer(key) | {"Accept": "application/x-ndjson"}

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body; this dialect has no way to force a length."""
        return {"model": ask.model, "prompt": ask.flat} | _common(ask) | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return LinesParser(timeline)


def _common(ask: Ask) -> dict[str, Any]:
    options: dict[str, Any] = {"num_predict": ask.output_tokens}
    if ask.temperature is not None:
        options["temperature"] = ask.temperature
    return {"stream": ask.stream, "options": options}
