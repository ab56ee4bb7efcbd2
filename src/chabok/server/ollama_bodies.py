"""Bodies of Ollama's interface, and what they ask for.

Form: https://docs.ollama.com/api and the structs of github.com/ollama/ollama, api/types.go
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from chabok.engine.request import SamplingParams
from chabok.errors import RequestError
from chabok.server import thinking
from chabok.server.events import Ask, ResponseFormat
from chabok.server.fields import check_stops, naming

if TYPE_CHECKING:
    from chabok.server.roster import Served

DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's own, for requests and models that say nothing."""

MAX_TOP_LOGPROBS = 20

Duration: TypeAlias = float | str


class Options(Struct, forbid_unknown_fields=True, kw_only=True):
    """Ollama's ``options``. The last group is about how a model is computed, not what it answers: it is
    allowed and without effect, as the server's own settings decide.
    """

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    num_ctx: int | None = None
    # Served only at the value that changes nothing.
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    # Without effect.
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    numa: bool | None = None


class Function(Struct, forbid_unknown_fields=True):
    """A call's function; index: which of the calls."""

    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class ToolCall(Struct, forbid_unknown_fields=True):
    """A call that the model made."""

    function: Function
    id: str | None = None
    type: str | None = None


class Message(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of generation have."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: Duration | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None
    # Of this server's own.
    priority: int | None = None
    deadline_ms: float | None = None
    template_variables: dict[str, Any] | None = None


class GenerateBody(Common):
    """The body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None
    width: int | None = None
    height: int | None = None
    steps: int | None = None


class ChatBody(Common):
    """The body of POST /api/chat."""

    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None


class ShowBody(Struct, forbid_unknown_fields=True):
    """The body of POST /api/show."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None
    system: Any | UnsetType = UNSET
    template: Any | UnsetType = UNSET
    options: Any | UnsetType = UNSET


class PullBody(Struct, forbid_unknown_fields=True):
    """The body of POST /api/pull."""

    model: str = ""
    name: str = ""
    stream: bool | None = None
    insecure: bool | None = None
    username: Any | UnsetType = field(default=UNSET)
    password: Any | UnsetType = field(default=UNSET)


_REFUSED = {
    "suffix": "filling in the middle is not supported",
    "template": "a template of the request's own is not supported; use raw with the text as it shall be",
    "context": "the tokens of an earlier answer are not taken; use /api/chat, whose prefixes are kept anyway",
    "images": "images are not supported; the models here read text only",
    "width": "images are not made here",
    "height": "images are not made here",
    "steps": "images are not made here",
}


def generate_ask(body: GenerateBody, served: Served) -> Ask:
    """What a prompt asks for. Raises RequestError."""
    for name, why in _REFUSED.items():
        if getattr(body, name):
            raise RequestError(f"{name}: {why}", name)
    ask = _ask(body, served)
    if body.raw:
        if body.system:
            raise RequestError("system goes with a template, and raw means none; give one of them", "system")
        if body.think is not None:
            raise RequestError("think goes with a template, and raw means none; give one of them", "think")
        ask.prompt = body.prompt or ""
        ask.reasoning = False
        return ask
    ask.messages = [{"role": "user", "content": body.prompt or ""}]
    if body.system:
        ask.messages.insert(0, {"role": "system", "content": body.system})
    return ask


def chat_ask(body: ChatBody, served: Served) -> Ask:
    """What a conversation asks for. Raises RequestError."""
    ask = _ask(body, served)
    ask.messages = _messages(body.messages or [])
    ask.tools = [_tool(i, tool) for i, tool in enumerate(body.tools or ())]
    ask.continue_final = ask.messages[-1]["role"] == "assistant" and not ask.messages[-1].get("tool_calls")
    return ask


def _ask(body: Common, served: Served) -> Ask:
    if body.truncate or body.shift:
        name = "truncate" if body.truncate else "shift"
        raise RequestError(f"{name}: too long a conversation is refused here, never cut; leave it out", name)
    return Ask(
        _params(body, served),
        format=_format(body.format),
        template_variables=_thinking(body, served) | (body.template_variables or {}),
    )


def _thinking(body: Common, served: Served) -> dict[str, Any]:
    if isinstance(body.think, str):
        effort = "high" if body.think == "max" else body.think
        return thinking.variables(served, True, effort, "think")
    return thinking.variables(served, body.think, None, "think")


def _messages(given: list[Message]) -> list[dict[str, Any]]:
    """The conversation in OpenAI's shape; calls have no ids in Ollama's, so they are counted."""
    found: list[dict[str, Any]] = []
    calls = 0
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result so far
    for i, message in enumerate(given):
        place = f"messages[{i}]"
        if message.images:
            raise RequestError(f"{place}.images: {_REFUSED['images']}", f"{place}.images")
        made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            made["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            if message.role != "assistant":
                raise RequestError(
                    f"{place}.tool_calls: only the assistant calls tools", f"{place}.tool_calls"
                )
            calls += 1
            id_ = call.id or f"call_{calls}"
            waiting.append((id_, call.function.name))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            function = {"name": call.function.name, "arguments": arguments}
            made.setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": function})
        if message.role == "tool":
            made |= _answered(message, waiting)
        found.append(made)
    return found


def _answered(message: Message, waiting: list[tuple[str, str]]) -> dict[str, str]:
    """Which call a tool's result answers: by id, else the first of its name, else the first."""
    named = [wanted for wanted in (message.tool_call_id, message.tool_name) if wanted]
    found = next((call for wanted in named for call in waiting if wanted in call), None)
    if found is None and waiting and message.tool_call_id is None:
        found = waiting[0]
    if found is None:
        return {"name": message.tool_name} if message.tool_name else {}
    waiting.remove(found)
    return {"tool_call_id": found[0], "name": message.tool_name or found[1]}


def _tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise RequestError(
            f'tools[{i}] must be {{"type": "function", "function": {{"name", "parameters"}}}}', f"tools[{i}]"
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(
            f"tools[{i}].function.name is missing; it is required", f"tools[{i}].function.name"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        place = f"tools[{i}].function.parameters"
        raise RequestError(f"{place} must be a JSON schema", place)
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def _format(given: str | dict[str, Any] | None) -> ResponseFormat | None:
    if given is None or given == "":
        return None
    if isinstance(given, dict):
        return ResponseFormat("json_schema", given)
    if given == "json":
        return ResponseFormat("json_object")
    raise RequestError(f'format must be "json" or a JSON schema, not {given!r:.40}', "format")


_SAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

_ONLY = {
    "tfs_z": 1.0,
    "mirostat": 0,
    "penalize_newline": True,
    "vocab_only": False,
    "logits_all": False,
    "embedding_only": False,
}


def _params(body: Common, served: Served) -> SamplingParams:
    options = body.options or Options()
    values: dict[str, Any] = {**DEFAULTS, **served.settings.sampling}
    for name in _SAME:
        if (value := getattr(options, name)) is not None:
            values[name] = value
    for name, harmless in _ONLY.items():
        if getattr(options, name) not in (None, harmless):
            raise RequestError(
                f"options.{name} is not supported; leave it out, or give {json.dumps(harmless)}",
                f"options.{name}",
            )
    if options.num_predict is not None and options.num_predict >= 0:
        values["max_tokens"] = options.num_predict
    elif options.num_predict not in (None, -1, -2):  # up to the model's end, up to the context's
        raise RequestError("options.num_predict must be a number of tokens, or -1", "options.num_predict")
    if options.stop is not None:
        values["stop"] = check_stops(options.stop, "options.stop")
    _repetition(options, values)
    context = served.llm.llm.context
    if options.num_ctx is not None and options.num_ctx > context:
        raise RequestError(
            f"options.num_ctx: {served.name} is served with {context} tokens of context, fewer than "
            f"{options.num_ctx}; ask for less, or start the server with a larger context",
            "options.num_ctx",
        )
    _logprobs(body, values)
    return naming(SamplingParams.of, values)


def _repetition(options: Options, values: dict[str, Any]) -> None:
    """Ollama looks back ``repeat_last_n`` tokens, this engine at the whole context: the same at -1 only."""
    if options.repeat_penalty is not None:
        values["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:
        values["repetition_penalty"] = 1.0
    elif options.repeat_last_n not in (None, -1) and values.get("repetition_penalty", 1.0) != 1.0:
        raise RequestError(
            "options.repeat_last_n: repeat_penalty looks at the whole context here; give -1, or 0 for none",
            "options.repeat_last_n",
        )


def _logprobs(body: Common, values: dict[str, Any]) -> None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}", "top_logprobs")
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError("top_logprobs goes with logprobs only", "top_logprobs")


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_WHOLE = re.compile(rf"[+-]?(?:0|(?:{_PART.pattern})+)")


def keep_alive_s(given: Duration | None) -> float | None:
    """Seconds a model is to stay loaded; inf: for ever. A number, or a duration such as "5m" or "1h30m"."""
    if given is None:
        return None
    if isinstance(given, str):
        text = given.strip()
        if re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
            seconds = float(text)
        elif _WHOLE.fullmatch(text):
            seconds = sum(float(amount) * _UNITS[unit] for amount, unit in _PART.findall(text))
            seconds = -seconds if text.startswith("-") else seconds
        else:
            raise RequestError(
                f'keep_alive must be seconds or a duration such as "5m", not {given!r:.40}', "keep_alive"
            )
    else:
        seconds = given
    return math.inf if seconds < 0 else seconds


def name_of(body: ShowBody | PullBody) -> str:
    """The model; ``name`` is what older clients call the field."""
    name = body.model or body.name
    if not name:
        raise RequestError("model is missing; it is required", "model")
    for other in msgspec.structs.fields(type(body)):
        if other.default is UNSET and getattr(body, other.name) not in (UNSET, None, "", {}):
            raise RequestError(f"{other.name} is not supported by this server; leave it out", other.name)
    return name
