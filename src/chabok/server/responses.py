"""OpenAI's newer interface: POST /v1/responses, without state: nothing is kept from one request to the next.

Source of the shapes: the OpenAI API reference, "Responses".
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.routing import BaseRoute, Route

from chabok.errors import RequestError
from chabok.server import thinking
from chabok.server.bodies import Body, explained
from chabok.server.call import Call, Endpoint
from chabok.server.events import Ask, ResponseFormat
from chabok.server.fields import Sampling, Strict, count, deadline_of, params_of, priority_of
from chabok.server.generation import prepare
from chabok.server.messages import (
    MAX_TOOLS,
    JsonObject,
    Lark,
    NamedSchema,
    PlainText,
    Regex,
    check_name,
    format_of,
    named,
    tool_dict,
)
from chabok.server.response_items import ResponseItems, ResponseWriter
from chabok.server.streaming import gather, server_timing, stream
from chabok.server.thinking import Effort

if TYPE_CHECKING:
    from chabok.server.roster import Served

MAX_TOP_LOGPROBS = 20


class InputText(Strict, tag="input_text", tag_field="type"):
    """Text of the user."""

    text: str


class OutputText(Strict, tag="output_text", tag_field="type"):
    """Text of an earlier answer, with what answers have beside it."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ReasoningText(Strict, tag="reasoning_text", tag_field="type"):
    """What the model thought before an earlier answer."""

    text: str


class MessageItem(Strict, tag="message", tag_field="type"):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: str | None = None
    status: str | None = None


class CallItem(Strict, tag="function_call", tag_field="type"):
    """A call the model made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Strict, tag="function_call_output", tag_field="type"):
    """What a called function gave."""

    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Strict, tag="reasoning", tag_field="type"):
    """What the model thought."""

    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class FunctionTool(Strict):
    """A function the model may call."""

    name: str
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    """The function that must be called."""

    name: str
    type: Literal["function"] = "function"


class SchemaFormat(NamedSchema, tag="json_schema", tag_field="type"):
    """JSON that a schema describes."""


class TextSettings(Strict):
    """The form of the answer's text."""

    format: PlainText | JsonObject | SchemaFormat | Regex | Lark | None = None
    verbosity: None = None


class ReasoningSettings(Strict):
    """How much to think: a hint, for models whose template takes one or can do without."""

    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(Strict):
    """Of streams. include_obfuscation: none is ever added."""

    include_obfuscation: Literal[False] | None = None


class ResponseBody(Sampling, kw_only=True):
    """The body of POST /v1/responses. Fields that can only be null are those of a server that keeps state."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextSettings | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    template_variables: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning: ReasoningSettings | None = None

    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None


BODY = Body(ResponseBody)


def routes() -> list[BaseRoute]:
    """The paths of this interface."""
    return [Route("/v1/responses", Endpoint(respond, BODY), methods=["POST"])]


async def respond(call: Call) -> None:
    """Answer a text or a list of items."""
    body = await call.parse(BODY)
    async with call.model(body.model) as served:
        ask = await call.convert(ask_of, call, body, served)
        prepared = await prepare(ask, served, call.state.caller)
        items = ResponseItems(_response(call, body, served, ask), call.load_s)
        if body.stream:
            await stream(call, prepared, ResponseWriter(items))
            return
        for event in await gather(call, prepared):
            items.add(event)
        await call.json(items.response, headers={"Server-Timing": server_timing(prepared.timings)})


def effort_of(body: ResponseBody) -> Effort | None:
    """How much the model is asked to think."""
    return body.reasoning.effort if body.reasoning is not None else None


def ask_of(call: Call, body: ResponseBody, served: Served) -> Ask:
    """What a body asks for. Raises RequestError."""
    if body.n not in (None, 1):
        raise RequestError("n: a response is one answer", "n")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options goes with stream only", "stream_options")
    messages = messages_of(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if body.tools is not None and len(body.tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(body.tools)} functions; {MAX_TOOLS} is the most", "tools")
    for i, tool in enumerate(body.tools or ()):
        check_name(tool.name, f"tools[{i}].name")
    tools = [tool_dict(tool.name, tool.description, tool.parameters) for tool in body.tools or ()]
    choice = body.tool_choice or "auto"
    if isinstance(choice, FunctionChoice):
        choice = named(choice.name, tools, "tool_choice")  # type: ignore[assignment]
    top = count(body.top_logprobs, "top_logprobs", 0, MAX_TOP_LOGPROBS, 0)
    logprobs = top if body.include or top else None
    return Ask(
        params_of(
            body, served, max_tokens=body.max_output_tokens, logprobs=logprobs, limit="max_output_tokens"
        ),
        messages=messages,
        tools=tools,
        tool_choice=str(choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        format=_format(body.text),
        template_variables=thinking.asked(served, effort_of(body), "reasoning.effort")
        | (body.template_variables or {})
        | (body.chat_template_kwargs or {}),
        priority=priority_of(call, body.priority),
        deadline_ms=deadline_of(call, body.deadline_ms),
        arrived=call.arrived,
    )


def _format(text: TextSettings | None) -> ResponseFormat | None:
    format = text.format if text is not None else None
    if isinstance(format, SchemaFormat):
        return ResponseFormat("json_schema", format.schema)
    return format_of(format)


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input as the messages that chat templates take. Raises RequestError naming the item that is wrong."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise RequestError("input is empty; give it a text or items", "input")
    messages: list[dict[str, Any]] = []
    thought: str | None = None
    for i, raw in enumerate(given):
        try:
            item = msgspec.convert({"type": "message", **raw}, Item)
        except msgspec.ValidationError as error:
            raise explained(error, Item, f"input[{i}]") from None
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _joined(item.content)})
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case CallOutputItem():
                output = _joined(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                continue
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = None
    if not messages:
        raise RequestError("input has no message to answer", "input")
    return messages


def _joined(content: str | list[InputText | OutputText] | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _response(call: Call, body: ResponseBody, served: Served, ask: Ask) -> dict[str, Any]:
    """The response before anything was generated."""
    text: Any = msgspec.to_builtins(body.text.format) if body.text and body.text.format else {"type": "text"}
    choice: Any = msgspec.to_builtins(body.tool_choice) if body.tool_choice is not None else "auto"
    tools = [{"strict": None, "description": None, "parameters": None, **msgspec.to_builtins(tool)}
             for tool in body.tools or ()]  # fmt: skip
    return {
        "id": f"resp_{call.request_id.removeprefix('req-')}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": served.name,
        "output": [],
        "parallel_tool_calls": ask.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": effort_of(body), "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": ask.params.temperature,
        "text": {"format": text},
        "tool_choice": choice,
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": ask.params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
