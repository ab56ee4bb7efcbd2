"""Anthropic's interface: POST /v1/messages and /v1/messages/count_tokens, and its form of /v1/models.

Form: https://docs.claude.com/en/api/messages and .../messages-streaming
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.routing import BaseRoute, Route

from chabok.engine.request import SamplingParams
from chabok.errors import RequestError
from chabok.server import anthropic_bodies as bodies
from chabok.server import generation, thinking
from chabok.server.accounts import timings_dict
from chabok.server.anthropic_bodies import Conversation, CountBody, MessageBody
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint
from chabok.server.errors import encode, problem_of, shape
from chabok.server.events import (
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
from chabok.server.streaming import gather, server_timing, stream

if TYPE_CHECKING:
    from chabok.server.entries import ModelEntry
from chabok.server.roster import Served

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
    await call.convert(bodies.check, body)
    async with call.model(body.model) as served:
        ask = await call.convert(ask_of, body, served)
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
        steps = Steps(head, shown)
        message = whole(step for event in await gather(call, prepared) for step in steps.of(event))
        await call.json(message, headers={"Server-Timing": server_timing(prepared.timings)})


async def count_tokens(call: Call) -> None:
    """How many tokens a conversation has."""
    body = await call.parse(_COUNT)
    await call.convert(bodies.check, body)
    async with call.model(body.model) as served:
        encoded = await generation.encode(await call.convert(ask_of, body, served), served)
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


Step: TypeAlias = dict[str, Any]
"""One event of the stream, with its "type"."""


class Steps:
    """Makes the events of Anthropic's stream, each block of content between its start and stop.

    shown: whether thoughts are given; else their block stays empty.
    """

    def __init__(self, head: _Head, shown: bool = True) -> None:
        self._head = head
        self._shown = shown
        self._open = ""  # the kind of the block that is being written
        self._index = -1
        self._called = False
        self._blank = ""  # white space that may turn out to be nothing but the space around a call
        self._steps: list[Step] = []

    def of(self, event: Event) -> list[Step]:
        """What comes of one event of an answer."""
        self._steps = []
        match event:
            case Started():
                usage = _usage(Usage(event.prompt_tokens, 0, event.cached_tokens))
                self._add("message_start", message=self._head.message([], usage))
                self._add("ping")
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
                self._end(event)
        return self._steps

    def _end(self, event: Ended) -> None:
        if self._blank and not self._called:
            self._say(self._blank)
        self._close()
        timings = timings_dict(event.completion.timings, self._head.load_s)
        self._add("message_delta", delta=self._head.stop(event), usage=_usage(event.usage), timings=timings)

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
        self._add("content_block_start", index=self._index, content_block=start)

    def _close(self) -> None:
        if self._open == "thinking":
            self._delta("signature_delta", signature=SIGNATURE)
        if self._open:
            self._add("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, kind: str, **fields: str) -> None:
        self._add("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _add(self, kind: str, **fields: Any) -> None:
        self._steps.append({"type": kind, **fields})


def whole(steps: Iterable[Step]) -> dict[str, Any]:
    """The message that a stream tells piece by piece."""
    message: dict[str, Any] = {}
    content: list[dict[str, Any]] = []
    pieces: list[str] = []
    for step in steps:
        match step["type"]:
            case "message_start":
                message = step["message"]
            case "content_block_start":
                content.append(dict(step["content_block"]))
                pieces = []
            case "content_block_delta":
                delta = step["delta"]
                if delta["type"] == "signature_delta":
                    content[-1]["signature"] = delta["signature"]
                else:
                    pieces += (text for name, text in delta.items() if name != "type")
            case "content_block_stop":
                _fill(content[-1], "".join(pieces))
            case "message_delta":
                message |= {**step["delta"], "usage": step["usage"], "timings": step["timings"]}
    return {**message, "content": content}


def _fill(block: dict[str, Any], text: str) -> None:
    if block["type"] != "tool_use":
        block[block["type"]] = text
        return
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = {}  # it was cut off, as stop_reason says
    block["input"] = found if isinstance(found, dict) else {}


class MessageWriter:
    """Writes an answer as Anthropic's stream of events."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, head: _Head, shown: bool = True) -> None:
        self._steps = Steps(head, shown)
        self._request_id = head.request_id
        self.keep_alive = b": keep-alive\n\n"  # clients know no ping before the start of the message

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        if events:
            self.keep_alive = _event({"type": "ping"})
        return b"".join(_event(step) for event in events for step in self._steps.of(event))

    def fail(self, error: BaseException) -> bytes:
        """An error in the middle of the stream; clients raise it."""
        return _event(shape(problem_of(error), "anthropic", self._request_id))

    def end(self) -> bytes:
        """The last event."""
        return _event({"type": "message_stop"})


def _event(step: Step) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (step["type"].encode(), encode(step))


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
    await call.json(_model(await call.server.roster.known(call.path_params["model"])))


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
