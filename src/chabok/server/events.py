"""What every dialect asks for, and the events that answer it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from chabok.engine.request import Completion, SamplingParams


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """What form the text of an answer must have.

    kind: a JSON object of any shape, JSON that a schema describes, or text that a regular expression or a
    Lark grammar describes. schema: of json_schema. source: the expression or grammar.
    """

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    schema: dict[str, Any] | None = None
    source: str = ""


@dataclass(slots=True)
class Ask:
    """One request of a client, whatever interface it came through.

    messages or prompt: one of the two; a prompt is text or token ids.
    params: of each of the n answers; their seeds are seed, seed + 1, ... where one is given.
    tools: in OpenAI's shape, {"type": "function", "function": {"name", "description", "parameters"}}.
    tool_choice: "auto", "none", "required", or the name of the function to call.
    format: of the text, where it must have one.
    echo: begin each text with the prompt's. prompt_logprobs: log probabilities of the prompt's tokens, and of
    the n best at each position.
    template_variables: further names for the chat template, such as enable_thinking.
    priority: higher goes first. deadline_ms: milliseconds from now after which nobody wants the answer.
    reasoning: give what a model thinks before it answers as Reasoning, not as Text.
    continue_final: the last message, the assistant's, is the beginning of the answer.
    arrived: time.perf_counter() when the request was received; None: when it is prepared.
    """

    params: SamplingParams
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    n: int = 1
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    format: ResponseFormat | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    deadline_ms: float | None = None
    reasoning: bool = True
    continue_final: bool = False
    arrived: float | None = None


class TokenInfo(Struct, frozen=True, gc=False):
    """A token with its log probability.

    data: its bytes, possibly part of a character. logprob: natural logarithm; None where nothing precedes it.
    top: the likeliest tokens there, (id, bytes, logprob), best first.
    """

    id: int
    data: bytes
    logprob: float | None
    top: tuple[tuple[int, bytes, float], ...] = ()


class Usage(Struct, frozen=True, gc=False):
    """Tokens of one answer; ``reasoning`` are among ``output``, ``cached`` among ``prompt``."""

    prompt: int
    output: int
    cached: int = 0
    reasoning: int = 0


class Started(Struct, frozen=True, gc=False):
    """The prompt of an answer has been read; comes before its other events.

    index: which of the n answers. cached_tokens: tokens of the prompt that needed no computing.
    """

    index: int
    prompt_tokens: int
    cached_tokens: int


class Text(Struct, frozen=True, gc=False):
    """A piece of the answer; tokens: those it is made of, where log probabilities were asked for."""

    index: int
    text: str
    tokens: tuple[TokenInfo, ...] = ()


class Reasoning(Struct, frozen=True, gc=False):
    """A piece of what the model thinks before it answers."""

    index: int
    text: str


class CallStart(Struct, frozen=True, gc=False):
    """The model calls a function; call: which of the answer's calls, from 0."""

    index: int
    call: int
    id: str
    name: str


class CallArguments(Struct, frozen=True, gc=False):
    """A piece of the arguments of a call, JSON text."""

    index: int
    call: int
    text: str


Reason: TypeAlias = Literal["stop", "length", "tool_calls", "cancelled", "deadline"]
"""Why an answer ended; "tool_calls": it calls functions."""


class Ended(Struct, frozen=True):
    """The last event of an answer.

    stopped_by: the stop string or token id that ended it, if one did. completion: the engine's account of it.
    """

    index: int
    reason: Reason
    stopped_by: str | int | None
    completion: Completion
    usage: Usage


Event: TypeAlias = Started | Text | Reasoning | CallStart | CallArguments | Ended


@dataclass(slots=True)
class Call:
    """A finished call of a function; arguments: JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """One of the n answers, whole."""

    index: int
    ended: Ended
    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    tokens: list[TokenInfo] = field(default_factory=list)
