"""Messages, tools and formats as the OpenAI chat interface writes them.

Source of the shapes: the OpenAI API reference, "Create chat completion".
"""

from __future__ import annotations

from typing import Any, Literal

from chabok.errors import RequestError
from chabok.server.events import ResponseFormat
from chabok.server.fields import Strict


class TextPart(Strict, tag="text", tag_field="type"):
    """A part of a message that is text, the only kind there is here."""

    text: str


class RefusalPart(Strict, tag="refusal", tag_field="type"):
    """What an assistant once refused with."""

    refusal: str


Content = str | list[TextPart | RefusalPart]


class System(Strict, tag="system", tag_field="role"):
    """Instructions."""

    content: Content
    name: str | None = None


class Developer(Strict, tag="developer", tag_field="role"):
    """Instructions, by their newer name."""

    content: Content
    name: str | None = None


class User(Strict, tag="user", tag_field="role"):
    """What the user says."""

    content: Content
    name: str | None = None


class CalledFunction(Strict):
    """A function by name, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call the assistant made."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class Assistant(Strict, tag="assistant", tag_field="role"):
    """What the assistant said. Fields that its answers have but that say nothing here may be sent back."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolResult(Strict, tag="tool", tag_field="role"):
    """What a called function gave."""

    content: Content
    tool_call_id: str
    name: str | None = None


Message = System | Developer | User | Assistant | ToolResult


def message_dict(message: Message) -> dict[str, Any]:
    """A message as chat templates take it."""
    role = message.__struct_config__.tag
    found: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = message.content
    if content is not None and not isinstance(content, str):
        content = "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    if isinstance(message, Assistant):
        found["content"] = content if content is not None or message.tool_calls else message.refusal or ""
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in message.tool_calls
            ]
        if (thought := message.reasoning_content or message.reasoning) is not None:
            found["reasoning_content"] = thought
    else:
        found["content"] = content
    if isinstance(message, ToolResult):
        found["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        found["name"] = message.name
    return found


class Function(Strict):
    """A function the model may call; parameters: their JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only kind."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(Strict):
    """A function by name."""

    name: str


class NamedChoice(Strict):
    """The tool that must be called."""

    function: FunctionName
    type: Literal["function"] = "function"


ToolChoice = Literal["none", "auto", "required"] | NamedChoice

MAX_TOOLS = 128


def tool_dicts(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates take them. Raises RequestError for names that cannot be told apart or written."""
    found = []
    names: set[str] = set()
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} functions; {MAX_TOOLS} is the most", "tools")
    for i, tool in enumerate(tools or ()):
        function = tool.function
        where = f"tools[{i}].function.name"
        check_name(function.name, where)
        if function.name in names:
            raise RequestError(f"{where}: there are two functions {function.name!r}", where)
        names.add(function.name)
        found.append(tool_dict(function.name, function.description, function.parameters))
    return found


def check_name(name: str, where: str) -> None:
    """Raise RequestError unless a function can be called so."""
    if not 0 < len(name) <= 128 or not all(c.isascii() and (c.isalnum() or c in "_-.:/") for c in name):
        raise RequestError(f"{where} must be 1 to 128 letters, digits, _ or -, not {name!r:.80}", where)


def tool_dict(name: str, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """One function in the shape that templates know."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters if parameters is not None else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def choice_of(choice: ToolChoice | None, tools: list[dict[str, Any]]) -> str:
    """ "auto", "none", "required", or the name of a function that there is."""
    if isinstance(choice, NamedChoice):
        return named(choice.function.name, tools, "tool_choice")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is 'required', but there are no tools", "tool_choice")
    return choice or "auto"


def named(name: str, tools: list[dict[str, Any]], field_: str) -> str:
    """The name of a function, if it is one of these."""
    names = [tool["function"]["name"] for tool in tools]
    if name not in names:
        raise RequestError(
            f"{field_} names {name!r:.80}, but the tools are {', '.join(names) or 'none'}", field_
        )
    return name


class PlainText(Strict, tag="text", tag_field="type"):
    """Any text."""


class JsonObject(Strict, tag="json_object", tag_field="type"):
    """A JSON object of any shape."""


class NamedSchema(Strict):
    """A JSON schema with a name."""

    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class JsonSchema(Strict, tag="json_schema", tag_field="type"):
    """JSON that a schema describes; always kept to, whatever ``strict`` says."""

    json_schema: NamedSchema


class Regex(Strict, tag="regex", tag_field="type"):
    """Text that a regular expression matches."""

    pattern: str


class Lark(Strict, tag="lark", tag_field="type"):
    """Text of a Lark grammar."""

    grammar: str


Format = PlainText | JsonObject | JsonSchema | Regex | Lark


def format_of(format: Format | None) -> ResponseFormat | None:
    """The form an answer must have; None for any."""
    match format:
        case JsonObject():
            return ResponseFormat("json_object")
        case JsonSchema():
            return ResponseFormat("json_schema", format.json_schema.schema)
        case Regex():
            return ResponseFormat("regex", source=format.pattern)
        case Lark():
            return ResponseFormat("lark", source=format.grammar)
    return None


class StreamOptions(Strict):
    """What a stream has beside text. include_obfuscation: none is ever added."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None
