"""Anthropic's interface: POST /v1/messages and /v1/messages/count_tokens, and its form of /v1/models.

Form: https://docs.claude.com/en/api/messages and .../messages-streaming
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from chabok.engine.request import SamplingParams
from chabok.errors import RequestError, UnknownModelError
from chabok.server import anthropic_bodies as bodies
from chabok.server import generation, thinking
from chabok.server.accounts import timings_dict
from chabok.server.anthropic_bodies import Conversation, CountBody, MessageBody
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
    Usage,
)
from chabok.server.fields import check_stops, count, deadline_of, naming, priority_of
from chabok.server.streaming import server_timing, stream, whole

if TYPE_CHECKING:
    from chabok.server.roster import ModelEntry, Served

SIGNATURE = "unsigned"
"""What stands where Anthropic signs thoughts: they come back as they were given, and nobody checks."""

MAX_LISTED = 1000

_MESSAGE = Body(MessageBody)
_COUNT = Body(CountBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface; ``models`` and ``model`` are those of OpenAI's, with another header."""
    return [
        Route("/v1/messages", Endpoint(create, _MESSAGE), methods=["POST"]),
        Route("/v1/messages/count_tokens", Endpoint(count_tokens, _COUNT), methods=["POST"]),
    ]


def speaks(call: Call) -> bool:
    """Whether a client of this interface asks, on a path that it shares with OpenAI's."""
    return "anthropic-version" in call.headers


async def create(call: Call) -> None:
    """Answer a conversation."""
    body = await call.parse(_MESSAGE)
    bodies.check(body)
    async with call.model(body.model) as served:
        ask = ask_of(body, served)
        ask.params = _params(body, served)
        ask.priority = priority_of(call, body.priority)
        ask.deadline_ms = deadline_of(call, body.deadline_ms)
        ask.arrived = call.arrived
        prepared = await generation.prepare(ask, served, call.state.caller)
        shown = body.thinking is None or getattr(body.thinking, "display", None) != "omitted"
        head = _Head(call, body, served)
        if body.stream:
            await stream(call, prepared, MessageWriter(head, shown))
            return
        (answer,) = await whole(call, prepared)
        timings = answer.ended.completion.timings
        await call.json(_message(head, answer, shown), headers={"Server-Timing": server_timing(timings)})


async def count_tokens(call: Call) -> None:
    """How many tokens a conversation has."""
    body = await call.parse(_COUNT)
    bodies.check(body)
    async with call.model(body.model) as served:
        encoded = await generation.encode(ask_of(body, served), served)
        await call.json({"input_tokens": len(encoded.tokens)})


def ask_of(body: Conversation, served: Served) -> Ask:
    """What a body asks for, but for how to choose tokens. Raises RequestError."""
    messages = bodies.messages(body)
    tools = bodies.tools(body)
    choice, parallel = bodies.tool_choice(body, tools)
    last = messages[-1]
    if last["role"] == "assistant" and (last.get("tool_calls") or "reasoning_content" in last):
        raise RequestError(
            "the last message is the assistant's and holds more than text: add the tool_result, or end it "
            "with the text that is to be continued",
            f"messages[{len(body.messages) - 1}]",
        )
    wanted = bodies.wants_thinking(body)
    field = "thinking"
    if body.thinking is None and thinking.can_switch(served):
        wanted = False  # who does not ask for thoughts expects text first
    return Ask(
        SamplingParams(),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        format=bodies.output_format(body),
        template_variables=thinking.variables(served, wanted, bodies.effort(body), field)
        | (body.template_variables or {}),
        continue_final=last["role"] == "assistant" and last["content"] != "",
    )


def _params(body: MessageBody, served: Served) -> SamplingParams:
    """The request's sampling parameters, else those of the model's settings, else Anthropic's."""
    values: dict[str, Any] = {"temperature": 1.0, **served.settings.sampling, "max_tokens": body.max_tokens}
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "seed"):
        if (value := getattr(body, name)) is not None:
            values[name] = value
    if body.stop_sequences is not None:
        values["stop"] = check_stops(body.stop_sequences, "stop_sequences")
    return naming(SamplingParams.of, values)


class _Head:
    """What both forms of an answer begin with."""

    def __init__(self, call: Call, body: MessageBody, served: Served) -> None:
        self.id = f"msg_{call.request_id.removeprefix('req-')}"
        self.request_id = call.request_id
        self.model = served.name
        self.max_tokens = body.max_tokens
        self.load_s = call.load_s

    def message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def stop(self, ended: Ended) -> dict[str, Any]:
        """Why an answer ended: {"stop_reason", "stop_sequence"}."""
        by = ended.stopped_by if isinstance(ended.stopped_by, str) else None
        if ended.reason == "tool_calls":
            reason, by = "tool_use", None
        elif ended.reason == "length":
            short = ended.usage.output < self.max_tokens
            reason = "model_context_window_exceeded" if short else "max_tokens"
        elif ended.reason == "deadline":
            reason = "deadline"  # of this server's own, for those who gave one
        else:
            reason = "end_turn" if by is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": by}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic's ``input_tokens`` are those that did not come from the cache."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }


def _message(head: _Head, answer: Answer, shown: bool) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    if answer.reasoning:
        thoughts = answer.reasoning if shown else ""
        content.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
    # White space around calls is the model's format, not something it says.
    if answer.text.strip() or (answer.text and not answer.calls):
        content.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
        )
    ended = answer.ended
    return {
        **head.message(content, _usage(ended.usage)),
        **head.stop(ended),
        "timings": timings_dict(ended.completion.timings, head.load_s),
    }


def _input(arguments: str) -> dict[str, Any]:
    """A call's input. One that was cut off has none, as its stop_reason says why."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class MessageWriter:
    """Writes an answer as Anthropic's stream of events, each block of content between its start and stop."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, head: _Head, shown: bool = True) -> None:
        self._head = head
        self._shown = shown
        self.keep_alive = b": keep-alive\n\n"  # clients know no ping before the start of the message
        self._open = ""  # the kind of the block that is being written
        self._index = -1
        self._called = False
        self._blank = ""  # white space that may turn out to be nothing but the space around a call
        self._out: list[bytes] = []

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        self._out = []
        for event in events:
            self._write(event)
        return b"".join(self._out)

    def _write(self, event: Event) -> None:
        match event:
            case Started():
                self.keep_alive = _event("ping", {})
                usage = _usage(Usage(event.prompt_tokens, 0, event.cached_tokens))
                self._send("message_start", message=self._head.message([], usage))
                self._send("ping")
            case Reasoning():
                self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                if self._shown:
                    self._delta("thinking_delta", thinking=event.text)
            case Text():
                self._text(event.text)
            case CallStart():
                self._blank = ""
                self._called = True
                block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
                self._block("tool_use", block, anew=True)
                self._delta("input_json_delta", partial_json="")
            case CallArguments():
                self._delta("input_json_delta", partial_json=event.text)
            case Ended():
                if not self._called and self._blank:
                    self._say(self._blank)
                self._close()
                timings = timings_dict(event.completion.timings, self._head.load_s)
                delta = self._head.stop(event)
                self._send("message_delta", delta=delta, usage=_usage(event.usage), timings=timings)

    def _text(self, text: str) -> None:
        if self._open != "text" and not text.strip():
            self._blank += text
            return
        self._say(self._blank + text)

    def _say(self, text: str) -> None:
        self._blank = ""
        self._block("text", {"type": "text", "text": ""})
        self._delta("text_delta", text=text)

    def _block(self, kind: str, start: dict[str, Any], anew: bool = False) -> None:
        """Be within a block of a kind: go on with the open one, or begin another."""
        if self._open == kind and not anew:
            return
        self._close()
        self._open = kind
        self._index += 1
        self._send("content_block_start", index=self._index, content_block=start)

    def _close(self) -> None:
        if self._open == "thinking":
            self._delta("signature_delta", signature=SIGNATURE)
        if self._open:
            self._send("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, kind: str, **fields: str) -> None:
        self._send("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _send(self, name: str, **fields: Any) -> None:
        self._out.append(_event(name, fields))

    def fail(self, error: BaseException) -> bytes:
        """An error in the middle of the stream; clients raise it."""
        problem = shape(problem_of(error), "anthropic", self._head.request_id)
        return b"event: error\ndata: " + encode(problem) + b"\n\n"

    def end(self) -> bytes:
        """The last event."""
        return _event("message_stop", {})


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode({"type": name, **fields}))


async def models(call: Call) -> None:
    """List the models, a page at a time (after_id, before_id, limit)."""
    query = call.query_params
    known = {"after_id", "before_id", "limit", "beta"}
    for name in query:
        if name not in known:
            raise RequestError(
                f"there is no parameter {name!r:.80}; there are {', '.join(sorted(known))}", name
            )
    asked = query.get("limit")
    if asked is not None and not (asked.isascii() and asked.isdigit() and len(asked) < 6):
        raise RequestError(f"limit must be a number, not {asked!r:.40}", "limit")
    limit = count(int(asked) if asked else None, "limit", 1, MAX_LISTED, 20)
    entries = call.server.roster.entries()
    names = [entry.name for entry in entries]
    if (after := query.get("after_id")) is not None:
        entries = entries[_place(names, after, "after_id") + 1 :]
    if (before := query.get("before_id")) is not None:
        entries = entries[: _place([entry.name for entry in entries], before, "before_id")][-limit:]
    page = entries[:limit]
    await call.json(
        {
            "data": [_model(entry) for entry in page],
            "has_more": len(entries) > len(page),
            "first_id": page[0].name if page else None,
            "last_id": page[-1].name if page else None,
        }
    )


def _place(names: list[str], name: str, field: str) -> int:
    if name not in names:
        raise RequestError(f"{field}: there is no model {name!r:.80} here", field)
    return names.index(name)


async def model(call: Call) -> None:
    """One model."""
    name = call.path_params["model"]
    for entry in call.server.roster.entries():
        if name == entry.name:
            await call.json(_model(entry))
            return
    raise UnknownModelError(f"there is no model {name!r:.80} here; GET /v1/models lists them")


def _model(entry: ModelEntry) -> dict[str, Any]:
    created = datetime.fromtimestamp(entry.modified, UTC)
    return {
        "type": "model",
        "id": entry.name,
        "display_name": entry.title or entry.name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": entry.context or None,
        "max_tokens": entry.context or None,
    }
