"""OpenAI's older interface: POST /v1/completions, text to text.

Source of the shapes: the OpenAI API reference, "Completions".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from starlette.routing import BaseRoute, Route

from chabok.errors import RequestError
from chabok.server.accounts import fingerprint, merged_timings, timings_dict, usage_dict
from chabok.server.bodies import Body
from chabok.server.call import Call, Endpoint
from chabok.server.errors import encode
from chabok.server.events import Answer, Ask, Ended, Event, Text, TokenInfo
from chabok.server.fields import MAX_N, Sampling, count, deadline_of, params_of, priority_of
from chabok.server.generation import prepare_all
from chabok.server.messages import Format, StreamOptions, format_of
from chabok.server.openai import FINISH, Chunks, finite, stop_reason
from chabok.server.streaming import server_timing, stream, whole

if TYPE_CHECKING:
    from chabok.server.roster import Served

MAX_LOGPROBS = 100
MAX_ANSWERS = 512
"""Most answers to one request: prompts x n."""

DEFAULT_MAX_TOKENS = 16
"""What the interface says where a request does not."""


class CompletionBody(Sampling, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None
    response_format: Format | None = None

    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


BODY = Body(CompletionBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface."""
    return [Route("/v1/completions", Endpoint(complete, BODY), methods=["POST"])]


async def complete(call: Call) -> None:
    """Continue one text, or several."""
    body = await call.parse(BODY)
    async with call.model(body.model) as served:
        asks, keep = await call.convert(asks_of, call, body, served)
        prepared = await prepare_all(asks, served, call.state.caller)
        head = _Head(call, served)
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            await stream(call, prepared, TextWriter(head, asks, usage))
            return
        answers = await whole(call, prepared)
        timings = merged_timings(answers)
        n = asks[0].n
        value = {
            **head.fields(),
            "choices": _choices(answers, n, keep, asks[0]),
            "usage": usage_dict([answer.ended for answer in answers], n),
            "timings": timings_dict(timings, call.load_s),
        }
        await call.json(value, headers={"Server-Timing": server_timing(timings)})


def asks_of(call: Call, body: CompletionBody, served: Served) -> tuple[list[Ask], int]:
    """What a body asks for, one ask a prompt, and how many of each one's answers to keep."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream only", "stream_options")
    prompts = prompts_of(body.prompt)
    keep = count(body.n, "n", 1, MAX_N, 1)
    best_of = count(body.best_of, "best_of", keep, MAX_N, keep)
    if best_of > keep and body.stream:
        raise RequestError("best_of cannot be streamed: which is best is known at the end", "best_of")
    if best_of * len(prompts) > MAX_ANSWERS:
        message = f"{len(prompts)} prompts with {best_of} answers each; {MAX_ANSWERS} in all is the most"
        raise RequestError(message, "prompt")
    logprobs = None
    if body.logprobs is not None:
        logprobs = count(body.logprobs, "logprobs", 0, MAX_LOGPROBS, 0)
    if body.echo and body.response_format is not None:
        raise RequestError("echo does not go with response_format", "echo")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    wanted = 0 if logprobs is None and best_of > keep else logprobs
    params = params_of(body, served, max_tokens=max_tokens, logprobs=wanted)
    asks = [
        Ask(
            params,
            prompt=prompt,
            n=best_of,
            format=format_of(body.response_format),
            echo=bool(body.echo),
            prompt_logprobs=logprobs if body.echo else None,
            priority=priority_of(call, body.priority),
            deadline_ms=deadline_of(call, body.deadline_ms),
            arrived=call.arrived,
        )
        for prompt in prompts
    ]
    return asks, keep


def prompts_of(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of the field: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty; give it a text or token ids", "prompt")
    kind = type(prompt[0])
    if any(type(item) is not kind for item in prompt):
        raise RequestError("prompt must be all texts, all token ids, or all lists of token ids", "prompt")
    if kind is int:
        return [prompt]  # type: ignore[list-item]  # all are ints, as was just seen
    return prompt  # type: ignore[return-value]


class _Head:
    """What every object of one answer begins with."""

    def __init__(self, call: Call, served: Served) -> None:
        self.id = f"cmpl-{call.request_id.removeprefix('req-')}"
        self.created = int(time.time())
        self.model = served.name
        self.fingerprint = fingerprint(served)
        self.load_s = call.load_s

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def _choices(answers: list[Answer], n: int, keep: int, ask: Ask) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for at in range(0, len(answers), n):
        group = answers[at : at + n]
        if keep < n:
            group = sorted(group, key=_mean_logprob, reverse=True)[:keep]
        for answer in group:
            # Asked for by best_of only where there are none in the request.
            wanted = ask.params.logprobs is not None and (keep == n or ask.prompt_logprobs is not None)
            logprobs = TextLogprobs().add(answer.tokens) if wanted else None
            found.append(
                {
                    "index": len(found),
                    "text": answer.text,
                    "logprobs": logprobs,
                    "finish_reason": FINISH.get(answer.ended.reason, "stop"),
                    "stop_reason": stop_reason(answer.ended),
                }
            )
    return found


def _mean_logprob(answer: Answer) -> float:
    """What best_of compares: the log probability of an answer per token."""
    logprobs = answer.ended.completion.logprobs or [0.0]
    return sum(logprobs) / len(logprobs)


class TextLogprobs:
    """Log probabilities as the completions interface writes them; offsets go on from call to call."""

    def __init__(self) -> None:
        self._offset = 0

    def add(self, tokens: list[TokenInfo] | tuple[TokenInfo, ...]) -> dict[str, Any]:
        """The object for more tokens. text_offset: in characters from the beginning of the text."""
        offsets = []
        pending = b""
        for token in tokens:
            offsets.append(self._offset)
            # Characters count once they are complete.
            pending += token.data
            text = pending.decode("utf-8", "ignore")
            if len(text.encode()) == len(pending) or len(pending) > 4:
                self._offset += len(pending.decode("utf-8", "replace"))
                pending = b""
        return {
            "tokens": [bytes_text(token.data) for token in tokens],
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {bytes_text(data): finite(logprob) for _, data, logprob in reversed(token.top)}
                if token.top
                else None
                for token in tokens
            ],
            "text_offset": offsets,
        }


def bytes_text(data: bytes) -> str:
    """A token's bytes as the completions interface names them: "bytes:\\xe2\\x82" for part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextWriter(Chunks):
    """Writes answers as streamed text_completion objects; what stays the same is put together once."""

    def __init__(self, head: _Head, asks: list[Ask], usage: bool) -> None:
        n, total = asks[0].n, asks[0].n * len(asks)
        super().__init__(encode(head.fields())[:-1], n, total, usage=usage, load_s=head.load_s)
        self._logprobs = asks[0].params.logprobs is not None
        self._offsets = [TextLogprobs() for _ in range(total)]
        self._rest = b',"logprobs":null,"finish_reason":null}]' + self._close
        self._text = [self._common + b',"choices":[{"index":%d,"text":' % i for i in range(total)]

    def write(self, events: list[Event]) -> bytes:
        """The bytes of events."""
        out: list[bytes] = []
        for event in events:
            if type(event) is Text:
                out += (self._text[event.index], encode(event.text))
                if self._logprobs and event.tokens:
                    logprobs = encode(self._offsets[event.index].add(event.tokens))
                    out += (b',"logprobs":', logprobs, b',"finish_reason":null}]', self._close)
                else:
                    out.append(self._rest)
            elif type(event) is Ended:
                end = b'"","logprobs":null,"finish_reason":'
                self._end_choice(out, self._text[event.index] + end, event)
        return b"".join(out)
