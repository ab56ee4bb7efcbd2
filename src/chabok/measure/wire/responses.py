"""OpenAI's responses (https://platform.openai.com/docs/api-reference/responses-streaming)."""

from __future__ import annotations

from typing import Any

import msgspec

from chabok.measure.failures import ServerSaidError
from chabok.measure.timeline import Event, Kind, Timeline, Usage
from chabok.measure.wire.openai import bearer, server_timings
from chabok.measure.wire.reader import Ask, Parser, error_text, merge


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    error: Any = None
    timings: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    type: str
    delta: Any = None
    response: _Response | None = None
    timings: dict[str, Any] | None = None


_DECODE = msgspec.json.Decoder(_Event).decode

_KINDS: dict[str, Kind] = {
    "response.output_text.delta": "content",
    "response.refusal.delta": "content",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "tool",
    "response.custom_tool_call_input.delta": "tool",
}


class ResponsesParser:
    """``response.completed``, or its less happy kin, ends the stream."""

    def __init__(self, timeline: Timeline) -> None:
        self.finished = False
        self._timeline = timeline

    def read(self, at: float, data: bytes, name: bytes) -> None:
        """Take one event."""
        if data == b"[DONE]":  # some servers end this stream so, too
            self.finished = True
            return
        event = _DECODE(data)
        timeline = self._timeline
        if event.type in ("error", "response.failed"):
            found = msgspec.json.decode(data)
            said = error_text(found) or error_text(found.get("response")) or str(found.get("message", ""))
            raise ServerSaidError(said or data[:200].decode("utf-8", "replace"))
        kind = _KINDS.get(event.type)
        if kind is not None:
            text = event.delta if isinstance(event.delta, str) else ""
            timeline.events.append(Event(at, kind if text else "role", text))
            return
        if event.type not in ("response.completed", "response.incomplete"):
            timeline.events.append(Event(at, "role"))
            return
        self.finished = True
        response = event.response or _Response()
        timeline.finish = "length" if event.type == "response.incomplete" else "stop"
        tokens = None
        if (usage := response.usage) is not None:
            tokens = usage.output_tokens
            timeline.usage = Usage(
                usage.input_tokens,
                tokens,
                None if usage.output_tokens_details is None else usage.output_tokens_details.reasoning_tokens,
                None if usage.input_tokens_details is None else usage.input_tokens_details.cached_tokens,
            )
        if timings := response.timings or event.timings:
            timeline.server = merge(timeline.server, server_timings(timings))
        timeline.events.append(Event(at, "usage" if usage else "role", "", tokens))


class OpenAIResponses:
    """``/v1/responses``."""

    name = "openai-responses"
    path = "/v1/responses"
    lines = False

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        return bearer(key)

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body; this dialect has no way to force a length."""
        body: dict[str, Any] = {
            "model": ask.model,
            "input": ask.turns,
            "max_output_tokens": max(ask.output_tokens, 16),  # OpenAI takes no less
            "stream": ask.stream,
            "store": False,
        }
        if ask.temperature is not None:
            body["temperature"] = ask.temperature
        return body | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return ResponsesParser(timeline)
