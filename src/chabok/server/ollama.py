"""Ollama's interface: POST /api/generate and /api/chat. What it says about models is in ``ollama_models``.

Form: https://docs.ollama.com/api
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from time import perf_counter
from typing import TYPE_CHECKING, Any

from starlette.routing import BaseRoute, Route

from chabok.server import ollama_models
from chabok.server.accounts import timings_dict
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint
from chabok.server.errors import RefusedError, encode, problem_of, shape
from chabok.server.events import (
    Answer,
    Ask,
    CallArguments,
    CallStart,
    Ended,
    Event,
    Reasoning,
    Text,
    TokenInfo,
)
from chabok.server.fields import deadline_of, priority_of
from chabok.server.generation import prepare
from chabok.server.ollama_bodies import (
    ChatBody,
    Common,
    GenerateBody,
    chat_ask,
    generate_ask,
    keep_alive_s,
)
from chabok.server.streaming import server_timing, stream, whole

if TYPE_CHECKING:
    from chabok.server.roster import Served

_GENERATE = Body(GenerateBody)
_CHAT = Body(ChatBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface."""
    return [
        Route("/api/generate", Endpoint(generate, _GENERATE), methods=["POST"]),
        Route("/api/chat", Endpoint(chat, _CHAT), methods=["POST"]),
        *ollama_models.routes(),
    ]


async def generate(call: Call) -> None:
    """Continue or answer a prompt; without one, load or unload a model."""
    body = await call.parse(_GENERATE)
    if not body.prompt:
        await _load(call, body, {"response": ""})
        return
    keep_alive = keep_alive_s(body.keep_alive)
    async with call.model(body.model, keep_alive) as served:
        await _answer(call, body, served, await call.convert(generate_ask, body, served), chat=False)


async def chat(call: Call) -> None:
    """Answer a conversation; without messages, load or unload a model."""
    body = await call.parse(_CHAT)
    if not body.messages:
        await _load(call, body, {"message": {"role": "assistant", "content": ""}})
        return
    keep_alive = keep_alive_s(body.keep_alive)
    async with call.model(body.model, keep_alive) as served:
        await _answer(call, body, served, await call.convert(chat_ask, body, served), chat=True)


async def _load(call: Call, body: Common, empty: dict[str, Any]) -> None:
    keep_alive = keep_alive_s(body.keep_alive)
    started = perf_counter()
    if keep_alive == 0:
        await _unload(call, body.model)
        reason = "unload"
    else:
        async with call.model(body.model, keep_alive):
            reason = "load"
    nanoseconds = int((perf_counter() - started) * 1e9)
    await call.json(
        {
            "model": body.model,
            "created_at": now(),
            **empty,
            "done": True,
            "done_reason": reason,
            "total_duration": nanoseconds,
            "load_duration": nanoseconds,
        }
    )


async def _unload(call: Call, name: str) -> None:
    """Unload a model, as soon as nobody uses it. Raises RefusedError for one that is to stay."""
    roster = call.server.roster
    if await roster.unload(name):
        return
    if (await roster.known(name)).preloaded:
        raise RefusedError(409, f"{name} is preloaded by the server's settings, and stays", "model_stays")
    async with roster.use(name, keep_alive=0):
        pass


async def _answer(call: Call, body: Common, served: Served, ask: Ask, *, chat: bool) -> None:
    ask.priority = priority_of(call, body.priority)
    ask.deadline_ms = deadline_of(call, body.deadline_ms)
    ask.arrived = call.arrived
    prepared = await prepare(ask, served, call.state.caller)
    writer = Writer(body.model, chat, call.load_s)
    if body.stream is not False:
        await stream(call, prepared, writer)
        return
    (answer,) = await whole(call, prepared)
    head = {"Server-Timing": server_timing(answer.ended.completion.timings)}
    await call.json(writer.whole(answer), headers=head)


class Writer:
    """Writes an answer as lines of JSON, the last of which has the figures.

    model: as the client calls it. load_s: seconds spent on getting the model.
    """

    media_type = "application/x-ndjson"
    keep_alive = b""  # clients would take any line for a part of the answer

    def __init__(self, model: str, chat: bool, load_s: float) -> None:
        self._model = model
        self._chat = chat
        self._load_s = load_s
        self._calls: list[tuple[CallStart, list[str]]] = []
        self._given = 0  # calls that were written already

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        return b"".join(encode(line) + b"\n" for event in events for line in self._lines(event))

    def _lines(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case Text():
                line = self._line(event.text)
                if event.tokens:
                    line["logprobs"] = logprobs(event.tokens)
                return [*self._finished(), line]
            case Reasoning():
                return [self._line("", thinking=event.text)]
            case CallStart():
                lines = self._finished()
                self._calls.append((event, []))
                return lines
            case CallArguments():
                self._calls[event.call][1].append(event.text)
            case Ended():
                return [*self._finished(), {**self._line(""), **self._end(event)}]
        return []

    def _finished(self) -> list[dict[str, Any]]:
        """A line for each call that is whole by now: Ollama's clients get calls in one piece."""
        ready = self._calls[self._given :]
        lines = []
        for start, pieces in ready:
            call = _call(self._given, start.id, start.name, "".join(pieces))
            lines.append(self._line("", tool_calls=[call]))
            self._given += 1
        return lines

    def _line(
        self, content: str, thinking: str = "", tool_calls: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        line: dict[str, Any] = {"model": self._model, "created_at": now()}
        if self._chat:
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if thinking:
                message["thinking"] = thinking
            if tool_calls:
                message["tool_calls"] = tool_calls
            line["message"] = message
        else:
            line["response"] = content
            if thinking:
                line["thinking"] = thinking
        line["done"] = False
        return line

    def _end(self, ended: Ended) -> dict[str, Any]:
        """The figures of an answer: durations in nanoseconds.

        eval_duration is from the end of the prompt to the end, so that eval_count over it is a speed also of
        an answer of one token.
        """
        timings = ended.completion.timings
        after = timings.total_s - self._load_s - timings.tokenize_s - timings.queue_s - timings.prefill_s
        reason = {"length": "length", "deadline": "deadline"}.get(ended.reason, "stop")
        return {
            "done": True,
            "done_reason": reason,
            "total_duration": _ns(timings.total_s),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": timings.prompt_tokens,
            "prompt_eval_duration": _ns(timings.prefill_s),
            "eval_count": timings.output_tokens,
            "eval_duration": max(_ns(max(after, timings.decode_s)), 1),
            "timings": timings_dict(timings, self._load_s),
        }

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The answer as one object."""
        calls = [_call(i, call.id, call.name, call.arguments) for i, call in enumerate(answer.calls)]
        line = self._line(answer.text, answer.reasoning, calls)
        if answer.tokens:
            line["logprobs"] = logprobs(answer.tokens)
        return {**line, **self._end(answer.ended)}

    def fail(self, error: BaseException) -> bytes:
        """An error in the middle of the stream; clients raise it."""
        return encode(shape(problem_of(error), "ollama")) + b"\n"

    def end(self) -> bytes:
        """Nothing: the line with the figures was the last."""
        return b""


def _call(index: int, id_: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        values = json.loads(arguments)
    except ValueError:
        values = {}  # cut off, as done_reason says
    if not isinstance(values, dict):
        values = {}
    return {"id": id_, "function": {"index": index, "name": name, "arguments": values}}


def logprobs(tokens: list[TokenInfo] | tuple[TokenInfo, ...]) -> list[dict[str, Any]]:
    """Log probabilities as Ollama writes them."""
    return [
        {
            **_token(token.data, token.logprob),
            "top_logprobs": [_token(data, logprob) for _, data, logprob in token.top],
        }
        for token in tokens
    ]


def _token(data: bytes, logprob: float | None) -> dict[str, Any]:
    # JSON has no infinity: far below any logarithm of a number that can be told from 0.
    value = -9999.0 if logprob is None else max(logprob, -9999.0)
    return {"token": data.decode("utf-8", "replace"), "logprob": value, "bytes": list(data)}


def now() -> str:
    """This moment as Ollama writes it."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)
