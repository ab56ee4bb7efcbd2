"""Bodies of Anthropic's Messages interface, and what they ask for.

Form: https://docs.claude.com/en/api/messages
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from chabok.errors import RequestError
from chabok.server.errors import UNSUPPORTED_THREAD, RefusedError
from chabok.server.events import ResponseFormat

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


class CacheControl(Struct, forbid_unknown_fields=True):
    """Marks a prefix worth keeping; allowed and without effect, as every prefix is kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    """Text."""

    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ThinkingBlock(_Block, tag="thinking"):
    """What the model thought; its signature is not checked."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Block, tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class _Refused(Struct, tag_field="type"):
    """A kind of content that the models cannot read; its fields do not matter."""


class ImageBlock(_Refused, tag="image"):
    """An image."""


class DocumentBlock(_Refused, tag="document"):
    """A document."""


class SearchResultBlock(_Refused, tag="search_result"):
    """A search result."""


class RedactedThinkingBlock(_Refused, tag="redacted_thinking"):
    """Thoughts that only Anthropic's servers can read."""


class ServerToolUseBlock(_Refused, tag="server_tool_use"):
    """A call of a tool that runs on Anthropic's servers."""


class WebSearchResultBlock(_Refused, tag="web_search_tool_result"):
    """The result of a tool that runs on Anthropic's servers."""


class ToolResultBlock(_Block, tag="tool_result"):
    """What a tool gave."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock] | None = None
    is_error: bool | None = None


Block: TypeAlias = (
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | RedactedThinkingBlock
    | ServerToolUseBlock
    | WebSearchResultBlock
)


class Turn(Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # every input is streamed as it is written
    input_examples: list[dict[str, Any]] | None = None


class _Choice(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    disable_parallel_tool_use: bool = False


class ChoiceAuto(_Choice, tag="auto"):
    """The model decides."""


class ChoiceAny(_Choice, tag="any"):
    """Some tool is called."""


class ChoiceTool(_Choice, tag="tool"):
    """This tool is called."""

    name: str


class ChoiceNone(Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    """No tool is called."""


Display: TypeAlias = Literal["summarized", "omitted"] | None


class ThinkingEnabled(Struct, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """Think; the budget is a hint that no model here needs: max_tokens is the limit."""

    budget_tokens: Annotated[int, Meta(ge=1)]
    display: Display = None


class ThinkingAdaptive(Struct, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    """Think as the model sees fit."""

    display: Display = None


class ThinkingDisabled(Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    """Do not think."""


class OutputFormat(Struct, forbid_unknown_fields=True):
    """The form the text must have."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """The form of the text; how much effort to take (a hint, for models whose template takes one)."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Who is behind a request; allowed and without effect."""

    user_id: str | None = None


class Conversation(Struct, forbid_unknown_fields=True, kw_only=True):
    """What counting tokens and answering have in common."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=100_000)]
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    template_variables: dict[str, Any] | None = None
    # Known, but nothing this server has: named where they are refused.
    container: Any | UnsetType = UNSET
    context_management: Any | UnsetType = UNSET
    diagnostics: Any | UnsetType = UNSET
    inference_geo: Any | UnsetType = UNSET
    mcp_servers: Any | UnsetType = UNSET
    thread: Any | UnsetType = UNSET
    user_profile_id: Any | UnsetType = UNSET
    workspace_id: Any | UnsetType = UNSET


class MessageBody(Conversation):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=0)]
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Of this server's own.
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    priority: int | None = None
    deadline_ms: float | None = None


class CountBody(Conversation):
    """The body of POST /v1/messages/count_tokens."""


_UNSUPPORTED = (
    "container",
    "context_management",
    "diagnostics",
    "inference_geo",
    "mcp_servers",
    "user_profile_id",
    "workspace_id",
)


def check(body: Conversation) -> None:
    """Raise RequestError for a parameter that is known but not supported; RefusedError for a thread, whose
    code tells clients to go on without.
    """
    if body.thread not in (UNSET, None):
        raise RefusedError(
            400, "thread: conversations are not kept here; send all of the messages", UNSUPPORTED_THREAD
        )
    for name in _UNSUPPORTED:
        if getattr(body, name) not in (UNSET, None, []):
            raise RequestError(f"{name} is not supported by this server; leave it out", name)


def messages(body: Conversation) -> list[dict[str, Any]]:
    """The conversation in OpenAI's shape. Turns of one role that follow each other become one."""
    found: list[dict[str, Any]] = []
    if body.system is not None:
        system = body.system if isinstance(body.system, str) else "\n\n".join(b.text for b in body.system)
        if system:
            found.append({"role": "system", "content": system})
    called: dict[str, str] = {}  # names of tools by the id of their call
    for i, turn in enumerate(body.messages):
        blocks = [TextBlock(text=turn.content)] if isinstance(turn.content, str) else turn.content
        for j, block in enumerate(blocks):
            _add(found, turn.role, block, f"messages[{i}].content[{j}]", called)
        if not blocks:
            _text(found, turn.role, "")
    return found


def _add(found: list[dict[str, Any]], role: str, block: Block, place: str, called: dict[str, str]) -> None:
    match block:
        case TextBlock():
            _text(found, role, block.text)
        case ThinkingBlock() if role == "assistant":
            turn = _turn(found, role)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + block.thinking
        case ToolUseBlock() if role == "assistant":
            called[block.id] = block.name
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            call = {"id": block.id, "type": "function", "function": function}
            _turn(found, role).setdefault("tool_calls", []).append(call)
        case ToolResultBlock() if role == "user":
            name = called.get(block.tool_use_id)
            if name is None:
                raise RequestError(
                    f"{place}.tool_use_id: no tool_use block before it has the id {block.tool_use_id!r:.80}",
                    f"{place}.tool_use_id",
                )
            text = _result(block, place)
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text}
            found.append(result)
        case _Refused():
            raise _unreadable(block, place)
        case _:
            kind = type(block).__struct_config__.tag
            raise RequestError(f"{place}: a {kind} block cannot stand in a message of the {role}", place)


def _turn(found: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message at hand if it is the role's, else a new one."""
    if not found or found[-1]["role"] != role:
        found.append({"role": role, "content": ""})
    return found[-1]


def _text(found: list[dict[str, Any]], role: str, text: str) -> None:
    turn = _turn(found, role)
    between = "\n\n" if turn["content"] and text and role != "assistant" else ""
    turn["content"] += between + text


def _result(block: ToolResultBlock, place: str) -> str:
    texts: list[str] = []
    if isinstance(block.content, str):
        texts.append(block.content)
    else:
        for k, part in enumerate(block.content or ()):
            if not isinstance(part, TextBlock):
                raise _unreadable(part, f"{place}.content[{k}]")
            texts.append(part.text)
    text = "\n".join(texts)
    # No template has a place for it: the model must be able to read that it failed.
    return f"Error: {text}" if block.is_error else text


def _unreadable(block: _Refused, place: str) -> RequestError:
    kind = type(block).__struct_config__.tag
    return RequestError(f"{place}: {kind} blocks are not supported; the models here read text only", place)


def tools(body: Conversation) -> list[dict[str, Any]]:
    """The tools in OpenAI's shape. Raises RequestError for one that the client does not run itself."""
    found: dict[str, dict[str, Any]] = {}
    for i, given in enumerate(body.tools or ()):
        place = f"tools[{i}]"
        if given.get("type") not in (None, "custom"):
            raise RequestError(
                f"{place}: tools of type {given['type']!r:.80} are Anthropic's own and not supported; "
                "describe yours by name, description and input_schema",
                f"{place}.type",
            )
        try:
            tool = msgspec.convert(given, Tool)
        except msgspec.ValidationError as error:
            what = str(error).replace("`", "").replace(" - at $.", ": ")
            raise RequestError(f"{place}: {what[:1].lower()}{what[1:]}", place) from None
        if not _NAME.fullmatch(tool.name):
            raise RequestError(
                f"{place}.name must be 1 to 128 letters, digits, - and _, not {tool.name!r:.150}",
                f"{place}.name",
            )
        if tool.name in found:
            raise RequestError(f"{place}.name: two tools are called {tool.name!r}", f"{place}.name")
        found[tool.name] = _openai(tool)
    return list(found.values())


def _openai(tool: Tool) -> dict[str, Any]:
    description = tool.description or ""
    if tool.input_examples:
        examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in tool.input_examples)
        description = f"{description}\n\nExamples of its input:\n{examples}".strip()
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if description:
        function["description"] = description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def tool_choice(body: Conversation, given: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Which tool is to be called ("auto", "none", "required", or a name), and whether several may be."""
    choice = body.tool_choice
    if choice is None:
        return "auto", True
    if isinstance(choice, ChoiceNone):
        return "none", True
    if not given:
        raise RequestError("tool_choice needs tools; give some, or leave it out", "tool_choice")
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, ChoiceTool):
        names = [tool["function"]["name"] for tool in given]
        if choice.name not in names:
            raise RequestError(
                f"tool_choice.name: no tool is called {choice.name!r:.80}; there are {', '.join(names)}",
                "tool_choice.name",
            )
        return choice.name, parallel
    return ("required" if isinstance(choice, ChoiceAny) else "auto"), parallel


def output_format(body: Conversation) -> ResponseFormat | None:
    """The form the text must have, if any."""
    inner = body.output_config.format if body.output_config else None
    if inner is not None and body.output_format is not None:
        raise RequestError("output_format and output_config.format are the same; give one", "output_format")
    chosen = inner or body.output_format
    return ResponseFormat("json_schema", chosen.schema) if chosen else None


def effort(body: Conversation) -> str | None:
    """How much effort to take, in the words that templates know."""
    chosen = body.output_config.effort if body.output_config else None
    return "high" if chosen in ("xhigh", "max") else chosen


def wants_thinking(body: Conversation) -> bool | None:
    """True, False, or None: as the model sees fit."""
    match body.thinking:
        case ThinkingEnabled():
            return True
        case ThinkingDisabled():
            return False
    return None
