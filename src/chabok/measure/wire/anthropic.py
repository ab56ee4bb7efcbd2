"""Anthropic's messages (https://docs.anthropic.com/en/docs/build-with-claude/streaming)."""

from __future__ import annotations

from typing import Any

import msgspec

from chabok.measure.failures import ServerSaidError
from chabok.measure.timeline import Event, Kind, Timeline
from chabok.measure.wire.openai import server_timings
from chabok.measure.wire.reader import Ask, Parser, error_text, merge


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Delta(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Block(msgspec.Struct):
    text: str | None = None
    thinking: str | None = None
    name: str | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    type: str
    message: _Message | None = None
    delta: _Delta | None = None
    content_block: _Block | None = None
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None


_DECODE = msgspec.json.Decoder(_Event).decode


class MessagesParser:
    """``message_stop`` ends the stream."""

    def __init__(self, timeline: Timeline) -> None:
        self.finished = False
        self._timeline = timeline

    def read(self, at: float, data: bytes, name: bytes) -> None:
        """Take one event."""
        if name == b"error" or b'"type":"error"' in data[:40]:
            found = msgspec.json.decode(data)
            raise ServerSaidError(error_text(found) or data[:200].decode("utf-8", "replace"))
        event = _DECODE(data)
        if event.type == "error":
            raise ServerSaidError(error_text(msgspec.json.decode(data)) or "error")
        timeline = self._timeline
        if event.timings is not None:
            timeline.server = merge(timeline.server, server_timings(event.timings))
        if event.type == "ping":
            return
        kind: Kind = "role"
        text = ""
        tokens = None
        piece = event.delta if event.type == "content_block_delta" else event.content_block
        if piece is not None:
            call = piece.partial_json if isinstance(piece, _Delta) else piece.name
            if piece.text:
                kind, text = "content", piece.text
            elif piece.thinking:
                kind, text = "reasoning", piece.thinking
            elif call:
                kind, text = "tool", call
        elif event.type == "message_start" and event.message is not None:
            self._count(event.message.usage)
            timeline.usage.output_tokens = None  # a first guess of the server, no count
        elif event.type == "message_delta":
            if event.delta is not None and event.delta.stop_reason:
                timeline.finish = event.delta.stop_reason
            if event.usage is not None:
                kind, tokens = "usage", event.usage.output_tokens
                self._count(event.usage)
        elif event.type == "message_stop":
            self.finished = True
        timeline.events.append(Event(at, kind, text, tokens))

    def _count(self, usage: _Usage | None) -> None:
        if usage is None:
            return
        counts = self._timeline.usage
        if usage.input_tokens is not None:
            # Here the prompt's cached tokens are beside its input tokens, not inside.
            read, made = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
            counts.prompt_tokens = usage.input_tokens + read + made
            if usage.cache_read_input_tokens is not None:
                counts.cached_tokens = read
        if usage.output_tokens is not None:
            counts.output_tokens = usage.output_tokens


class AnthropicMessages:
    """``/v1/messages``."""

    name = "anthropic"
    path = "/v1/messages"
    lines = False

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "anthropic-version": "2023-06-01",
        }
        return headers | {"x-api-key": key} if key else headers

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body; this dialect has no way to force a length."""
        system = "\n\n".join(str(each.get("content", "")) for each in ask.turns if each["role"] == "system")
        body: dict[str, Any] = {
            "model": ask.model,
            "messages": [each for each in ask.turns if each["role"] != "system"],
            "max_tokens": ask.output_tokens,
            "stream": ask.stream,
        }
        if system:
            body["system"] = system
        if ask.temperature is not None:
            body["temperature"] = ask.temperature
        return body | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return MessagesParser(timeline)
