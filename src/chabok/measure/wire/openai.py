"""OpenAI's chat completions and completions, as OpenAI, vLLM, SGLang, llama.cpp, LM Studio and others speak
them (https://platform.openai.com/docs/api-reference/chat-streaming)."""

from __future__ import annotations

from typing import Any

import msgspec

from chabok.measure.failures import ServerSaidError
from chabok.measure.timeline import Event, Kind, ServerTimings, Timeline, Usage
from chabok.measure.wire.reader import Ask, Parser, error_text, merge


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: dict[str, Any] | None = None
    error: Any = None
    object: str | None = None
    detail: Any = None
    message: Any = None


_DECODE = msgspec.json.Decoder(_Chunk).decode


class ChunkParser:
    """Reads the chunks of both; ``[DONE]`` ends them."""

    def __init__(self, timeline: Timeline) -> None:
        self.finished = False
        self._timeline = timeline
        self._events = timeline.events

    def read(self, at: float, data: bytes, name: bytes) -> None:
        """Take one event."""
        if data == b"[DONE]":
            self.finished = True
            return
        chunk = _DECODE(data)
        if chunk.error is not None or chunk.object == "error" or name == b"error":
            raise ServerSaidError(
                error_text(msgspec.json.decode(data)) or data[:200].decode("utf-8", "replace")
            )
        kind: Kind = "role"
        text = ""
        for choice in chunk.choices or ():
            if choice.finish_reason:
                self._timeline.finish = choice.finish_reason
            if choice.text:
                kind, text = "content", choice.text
            elif choice.delta is not None:
                kind, text = self._delta(at, choice.delta)
        tokens = None
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
            self._timeline.usage = _counts(chunk.usage)
            kind = "usage" if kind == "role" else kind
        if chunk.timings is not None:
            self._timeline.server = merge(self._timeline.server, server_timings(chunk.timings))
        self._events.append(Event(at, kind, text, tokens))

    def _delta(self, at: float, delta: _Delta) -> tuple[Kind, str]:
        found: list[tuple[Kind, str]] = []
        if reasoning := delta.reasoning_content or delta.reasoning:
            found.append(("reasoning", reasoning))
        if delta.content:
            found += [("content", delta.content)] if isinstance(delta.content, str) else parts(delta.content)
        if delta.refusal:
            found.append(("content", delta.refusal))
        if delta.tool_calls:
            calls = [call.function for call in delta.tool_calls if call.function is not None]
            text = "".join((call.name or "") + (call.arguments or "") for call in calls)
            if text:
                found.append(("tool", text))
        if not found:
            return "role", ""
        # One event of several kinds, as at the end of reasoning: the others are beside it at the same time.
        self._events += [Event(at, kind, text) for kind, text in found[:-1]]
        return found[-1]


def parts(content: list[Any]) -> list[tuple[Kind, str]]:
    """Content that is a list of typed parts, as Mistral sends its reasoning."""
    found: list[tuple[Kind, str]] = []
    for part in content:
        if isinstance(part, dict):
            inner = part.get("thinking")
            if isinstance(inner, list):
                found += [("reasoning", text) for _, text in parts(inner)]
            elif isinstance(inner, str):
                found.append(("reasoning", inner))
            elif isinstance(part.get("text"), str):
                found.append(("content", part["text"]))
    return [(kind, text) for kind, text in found if text]


def _counts(usage: _Usage) -> Usage:
    prompt, output = usage.prompt_tokens_details, usage.completion_tokens_details
    return Usage(
        usage.prompt_tokens,
        usage.completion_tokens,
        None if output is None else output.reasoning_tokens,
        None if prompt is None else prompt.cached_tokens,
    )


def server_timings(found: dict[str, Any]) -> ServerTimings:
    """The ``timings`` object of Chabok or of llama.cpp's server."""
    numbers = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if "predicted_ms" in numbers:
        return ServerTimings(
            "llama.cpp", prefill_ms=numbers.get("prompt_ms"), decode_ms=numbers.get("predicted_ms")
        )
    names = [name for name in ServerTimings.__dataclass_fields__ if name != "source"]
    return ServerTimings("chabok", **{name: numbers[name] for name in names if name in numbers})


def bearer(key: str) -> dict[str, str]:
    """Headers of a JSON request; with a key, as a bearer."""
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    return headers | {"Authorization": f"Bearer {key}"} if key else headers


class OpenAIChat:
    """``/v1/chat/completions``.

    strict: only fields that OpenAI itself takes; its newer models refuse ``max_tokens``.
    """

    name = "openai-chat"
    path = "/v1/chat/completions"
    lines = False

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        return bearer(key)

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body."""
        body: dict[str, Any] = {"model": ask.model, "messages": ask.turns}
        body |= _common(ask, self.strict)
        if self.strict:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return body | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return ChunkParser(timeline)


class OpenAICompletions:
    """``/v1/completions``: the text goes on from the prompt, without a chat template."""

    name = "openai-completions"
    path = "/v1/completions"
    lines = False

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict

    def headers(self, key: str) -> dict[str, str]:
        """Headers of a request."""
        return bearer(key)

    def body(self, ask: Ask) -> dict[str, Any]:
        """The JSON body."""
        return {"model": ask.model, "prompt": ask.flat} | _common(ask, self.strict) | dict(ask.extra)

    def parser(self, timeline: Timeline) -> Parser:
        """What reads one response."""
        return ChunkParser(timeline)


def _common(ask: Ask, strict: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": ask.output_tokens, "stream": ask.stream}
    if ask.temperature is not None:
        fields["temperature"] = ask.temperature
    if ask.stream:
        fields["stream_options"] = {"include_usage": True}
    if ask.exact and not strict:
        fields["ignore_eos"] = True  # vLLM, SGLang, llama.cpp, Chabok
    return fields
