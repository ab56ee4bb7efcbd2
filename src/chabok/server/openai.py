"""OpenAI's interface: POST /v1/chat/completions, GET /v1/models.

Source of the shapes: the OpenAI API reference, "Chat" and "Models".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from starlette.routing import BaseRoute, Route

from chabok.errors import RequestError
from chabok.server import anthropic, thinking
from chabok.server.accounts import fingerprint, merged_timings, timings_dict, usage_dict
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint
from chabok.server.errors import encode, problem_of, shape
from chabok.server.events import (
    Answer,
    Ask,
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reasoning,
    Started,
    Text,
    TokenInfo,
)
from chabok.server.fields import MAX_N, Sampling, count, deadline_of, params_of, priority_of
from chabok.server.generation import prepare
from chabok.server.messages import (
    Format,
    Message,
    StreamOptions,
    Tool,
    ToolChoice,
    choice_of,
    format_of,
    message_dict,
    tool_dicts,
)
from chabok.server.streaming import server_timing, stream, whole
from chabok.server.thinking import Effort

if TYPE_CHECKING:
    from chabok.server.roster import Served

MAX_TOP_LOGPROBS = 20


class ChatBody(Sampling, kw_only=True):
    """The body of POST /v1/chat/completions. Fields that can only be null are not supported."""

    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Format | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    template_variables: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: bool | None = None
    reasoning_effort: Effort | None = None
    continue_final_message: bool | None = None

    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    audio: None = None
    function_call: None = None
    functions: None = None
    prediction: None = None
    verbosity: None = None
    web_search_options: None = None


BODY = Body(ChatBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface."""
    return [
        Route("/v1/chat/completions", Endpoint(chat, BODY), methods=["POST"]),
        Route("/v1/models", Endpoint(models), methods=["GET"]),
        Route("/v1/models/{model:path}", Endpoint(model), methods=["GET"]),
    ]


async def chat(call: Call) -> None:
    """Answer a conversation."""
    body = await call.parse(BODY)
    async with call.model(body.model) as served:
        ask = await call.convert(ask_of, call, body, served)
        prepared = await prepare(ask, served, call.state.caller)
        head = _Head(call, served)
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            await stream(call, prepared, ChatWriter(head, ask, usage))
            return
        answers = await whole(call, prepared)
        timings = merged_timings(answers)
        value = {
            **head.fields("chat.completion"),
            "choices": [_choice(answer, ask) for answer in answers],
            "usage": usage_dict([answer.ended for answer in answers], ask.n),
            "timings": timings_dict(timings, call.load_s),
        }
        await call.json(value, headers={"Server-Timing": server_timing(timings)})


def ask_of(call: Call, body: ChatBody, served: Served) -> Ask:
    """What a body asks for. Raises RequestError."""
    if not body.messages:
        raise RequestError("messages is empty; there must be one at least", "messages")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream only", "stream_options")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError("max_tokens is max_completion_tokens; give one of them", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs goes with logprobs only", "top_logprobs")
    top = count(body.top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    max_tokens, limit = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        max_tokens, limit = body.max_completion_tokens, "max_completion_tokens"
    messages = [message_dict(message) for message in body.messages]
    tools = tool_dicts(body.tools)
    return Ask(
        params_of(body, served, max_tokens=max_tokens, logprobs=top if body.logprobs else None, limit=limit),
        messages=messages,
        n=count(body.n, "n", 1, MAX_N, 1),
        tools=tools,
        tool_choice=choice_of(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=format_of(body.response_format),
        template_variables=thinking.asked(served, body.reasoning_effort, "reasoning_effort")
        | (body.template_variables or {})
        | (body.chat_template_kwargs or {}),
        priority=priority_of(call, body.priority),
        deadline_ms=deadline_of(call, body.deadline_ms),
        reasoning=body.reasoning is not False,
        continue_final=bool(body.continue_final_message),
        arrived=call.arrived,
    )


FINISH = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "deadline": "length"}
"""Reasons in OpenAI's words; a deadline is a limit on the length."""


def stop_reason(ended: Ended) -> str | int | None:
    """What exactly ended an answer: a stop string, a token id, or "deadline"."""
    return "deadline" if ended.reason == "deadline" else ended.stopped_by


class _Head:
    """What every object of one answer begins with."""

    def __init__(self, call: Call, served: Served) -> None:
        self.id = f"chatcmpl-{call.request_id.removeprefix('req-')}"
        self.created = int(time.time())
        self.model = served.name
        self.fingerprint = fingerprint(served)
        self.load_s = call.load_s

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def _choice(answer: Answer, ask: Ask) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.text if answer.text or not answer.calls else None,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    logprobs = {"content": chat_logprobs(answer.tokens), "refusal": None}
    return {
        "index": answer.index,
        "message": message,
        "logprobs": logprobs if ask.params.logprobs is not None else None,
        "finish_reason": FINISH.get(answer.ended.reason, "stop"),
        "stop_reason": stop_reason(answer.ended),
    }


LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON does not have."""


def finite(logprob: float | None) -> float:
    """A log probability that JSON can hold."""
    return LEAST_LOGPROB if logprob is None or logprob < LEAST_LOGPROB else logprob


def token_text(data: bytes) -> str:
    """A token's bytes as text; those that are only part of a character as \\x escapes."""
    return data.decode("utf-8", "backslashreplace")


def chat_logprobs(tokens: list[TokenInfo] | tuple[TokenInfo, ...]) -> list[dict[str, Any]]:
    """Log probabilities as the chat interface writes them."""
    return [
        {
            "token": token_text(token.data),
            "logprob": finite(token.logprob),
            "bytes": list(token.data),
            "top_logprobs": [
                {"token": token_text(data), "logprob": finite(logprob), "bytes": list(data)}
                for _, data, logprob in token.top
            ],
        }
        for token in tokens
    ]


class Chunks:
    """What the streams of both completions interfaces have alike: the end of an answer, and that of all.

    common: what every object begins with, after ``data: `` and without its closing brace. n: answers to a
    prompt; total: to all prompts. usage: whether a last object has it.
    """

    media_type = "text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, common: bytes, n: int, total: int, *, usage: bool, load_s: float) -> None:
        self._n, self._total = n, total
        self._usage = usage
        self._load_s = load_s
        self._ended: list[Ended] = []
        self._common = b"data: " + common
        self._close = b',"usage":null}\n\n' if usage else b"}\n\n"

    def _end_choice(self, out: list[bytes], begin: bytes, event: Ended) -> None:
        """The last object of an answer; ``begin``: it up to the value of finish_reason."""
        self._ended.append(event)
        out += (begin, encode(FINISH.get(event.reason, "stop")))
        out += (b',"stop_reason":', encode(stop_reason(event)), b"}]")
        if len(self._ended) == self._total and not self._usage:
            out += (b',"timings":', encode(self._timings()))
        out.append(self._close)

    def _timings(self) -> dict[str, float | int]:
        return timings_dict(merged_timings(self._ended), self._load_s)

    def fail(self, error: BaseException) -> bytes:
        """An error in the middle of the stream; clients raise it."""
        return b"data: " + encode(shape(problem_of(error), "openai")) + b"\n\n"

    def end(self) -> bytes:
        """The usage, where it was asked for, and the end."""
        if not self._usage:
            return b"data: [DONE]\n\n"
        ended = sorted(self._ended, key=lambda one: one.index)
        usage, timings = encode(usage_dict(ended, self._n)), encode(self._timings())
        tail = b',"choices":[],"usage":' + usage + b',"timings":' + timings
        return self._common + tail + b"}\n\ndata: [DONE]\n\n"


class ChatWriter(Chunks):
    """Writes an answer as chat.completion.chunk objects.

    What stays the same is put together once: a piece of text costs one short JSON string and a join.
    """

    def __init__(self, head: _Head, ask: Ask, usage: bool) -> None:
        common = encode(head.fields("chat.completion.chunk"))[:-1]
        super().__init__(common, ask.n, ask.n, usage=usage, load_s=head.load_s)
        self._begin = self._common + b',"choices":[{"index":'
        self._no_finish = b'},"logprobs":null,"finish_reason":null}]' + self._close
        self._text = [self._begin + b'%d,"delta":{"content":' % i for i in range(ask.n)]

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        out: list[bytes] = []
        for event in events:
            if type(event) is Text and not event.tokens:
                out += (self._text[event.index], encode(event.text), self._no_finish)
            else:
                self._write(event, out)
        return b"".join(out)

    def _write(self, event: Event, out: list[bytes]) -> None:
        match event:
            case Started():
                self._delta(out, event.index, {"role": "assistant", "content": ""})
            case Text():
                self._delta(out, event.index, {"content": event.text}, event.tokens)
            case Reasoning():
                self._delta(out, event.index, {"reasoning_content": event.text})
            case CallStart():
                function = {"name": event.name, "arguments": ""}
                call = {"index": event.call, "id": event.id, "type": "function", "function": function}
                self._delta(out, event.index, {"tool_calls": [call]})
            case CallArguments():
                piece = {"index": event.call, "function": {"arguments": event.text}}
                self._delta(out, event.index, {"tool_calls": [piece]})
            case Ended():
                end = b'%d,"delta":{},"logprobs":null,"finish_reason":' % event.index
                self._end_choice(out, self._begin + end, event)

    def _delta(
        self, out: list[bytes], index: int, delta: dict[str, Any], tokens: tuple[TokenInfo, ...] = ()
    ) -> None:
        out += (self._begin, b'%d,"delta":' % index, encode(delta))
        if tokens:
            logprobs = {"content": chat_logprobs(tokens), "refusal": None}
            out += (b',"logprobs":', encode(logprobs), b',"finish_reason":null}]', self._close)
        else:
            out.append(b',"logprobs":null,"finish_reason":null}]' + self._close)


async def models(call: Call) -> None:
    """List the models."""
    if anthropic.speaks(call):
        await anthropic.models(call)
        return
    data = [_model(entry) for entry in call.server.roster.entries()]
    await call.json({"object": "list", "data": data})


async def model(call: Call) -> None:
    """One model, by its name or an alias."""
    if anthropic.speaks(call):
        await anthropic.model(call)
        return
    name = call.path_params["model"]
    await call.json(_model(await call.server.roster.known(name)))


def _model(entry: Any) -> dict[str, Any]:
    return {"id": entry.name, "object": "model", "created": int(entry.modified), "owned_by": "chabok"}
