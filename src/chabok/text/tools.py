"""Tool calls: how each family is told of tools, writes calls, and how its calls are read while they stream.

The formats are those of the models' own chat templates: Hermes (NousResearch; also Qwen 2.5 and 3), Llama
3.x (Meta's model cards: "JSON based tool calling"), and Mistral (mistral-common, tokenizers v3 to v13).
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chabok.errors import RequestError
from chabok.text.toolparsers import HermesParser, LlamaParser, MistralParser, ToolParser

if TYPE_CHECKING:
    from chabok.text.chat import ChatTemplate
    from chabok.text.tokenizer import Tokenizer

Message = dict[str, Any]
Tool = Mapping[str, Any]

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

_PREAMBLE = """# Tools

You can call functions. These are their descriptions:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"its": "arguments"}}}}
</tool_call>

What it returns comes back within <tool_response></tool_response> tags. Call a function only if it helps; \
otherwise answer the user."""


@dataclass(frozen=True)
class ToolFormat:
    """How one family writes tool calls.

    name: "hermes", "llama3", "mistral" or "generic". native: the family's own template tells the model of its
    tools; otherwise a system text does. begin, end: what stands around one call; separator: between several.
    arguments_key: the member of the call's JSON object that holds them. tokens: the control tokens among the
    markers, by text.
    """

    name: str
    native: bool
    begin: str
    end: str
    separator: str
    arguments_key: str = "arguments"
    tokens: tuple[tuple[str, int], ...] = ()
    array: bool = False  # the calls are the elements of one JSON array (older Mistral)
    bare: bool = False  # a call is the name and its arguments, not an object (newer Mistral)
    system_role: bool = True  # the template takes a message of the system

    @property
    def visible(self) -> frozenset[int]:
        """Control tokens that must reach the parser as text: for ``Request.visible``."""
        return frozenset(token for _, token in self.tokens)

    @classmethod
    def of(cls, template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
        """The format of a model, by what its chat template writes."""
        source = template.tool_source
        native = re.search(r"\btools\b", source) is not None
        if native and "[TOOL_CALLS]" in source:
            name_first = "[ARGS]" in source
            space = " " if "[TOOL_CALLS] [" in source else ""  # as its tokenizer's version has it
            control = _control(tokenizer, "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
            return cls(
                name="mistral",
                native=True,
                begin="[TOOL_CALLS]" + space,
                end="",
                separator="",
                tokens=control,
                array=not name_first,
                bare=name_first,
            )
        if native and "<|start_header_id|>" in source:
            control = _control(tokenizer, "<|python_tag|>")
            return cls(
                name="llama3",
                native=True,
                begin="",
                end="",
                separator="; ",
                arguments_key="parameters",
                tokens=control,
            )
        hermes = native and "<tool_call>" in source and "<function=" not in source
        control = _control(tokenizer, "<tool_call>", "</tool_call>")
        return cls(
            name="hermes" if hermes else "generic",
            native=hermes,
            begin="<tool_call>\n",
            end="\n</tool_call>",
            separator="\n",
            tokens=control,
            system_role=hermes or _takes_system(template),
        )

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], choice: str = "auto"
    ) -> tuple[list[Message], list[Tool] | None]:
        """The messages and tools to give to the template.

        choice: "auto", "none", "required", or the name of a function. With "none" the model is told of no
        tools, but earlier calls and results in the messages stay what they are.
        """
        told = [] if choice == "none" else list(tools)
        found = [
            {key: value for key, value in message.items() if key != "tool_calls" or value}
            for message in messages
        ]
        if self.name == "mistral":
            return _with_short_ids(found), told or None
        if self.name == "llama3":
            return _one_call_each(found), told or None
        if self.native:
            for message in found:
                if message.get("tool_calls") and message.get("content") is None:
                    message["content"] = ""  # Qwen 3's looks into it
            return found, told or None
        return self._explained(found, told), None

    def _explained(self, messages: list[Message], tools: list[Tool]) -> list[Message]:
        """Messages in which calls, results and the description of tools are plain text."""
        found: list[Message] = []
        told_of_result = False  # the last turn is the result of a call
        for message in messages:
            if message.get("role") == "tool":
                text = f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"
                if found and found[-1].get("role") == "user":
                    found[-1] = {**found[-1], "content": f"{_text(found[-1]['content'])}\n{text}"}
                else:
                    found.append({"role": "user", "content": text})
                told_of_result = True
            elif message.get("role") == "user" and told_of_result:
                # Many of these templates want turns to alternate.
                text = f"{found[-1]['content']}\n\n{_text(message.get('content'))}"
                found[-1] = {**message, "content": text}
                told_of_result = False
            elif message.get("tool_calls"):
                calls = [self.write(call) for call in message["tool_calls"]]
                said = _text(message.get("content"))
                content = "\n".join([said, *calls] if said else calls)
                kept = {key: value for key, value in message.items() if key != "tool_calls"}
                found.append({**kept, "content": content})
                told_of_result = False
            else:
                found.append(message)
                told_of_result = False
        if not tools:
            return self._told(found, "")
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return self._told(found, _PREAMBLE.format(tools=listed))

    def _told(self, messages: list[Message], text: str) -> list[Message]:
        """Messages with a system text, in the first user's turn where the template takes no system."""
        joined = text
        if messages and messages[0].get("role") in ("system", "developer"):
            joined = f"{_text(messages[0].get('content'))}\n\n{text}".strip()
            messages = messages[1:]
        if not joined:
            return messages
        if self.system_role:
            return [{"role": "system", "content": joined}, *messages]
        for at, message in enumerate(messages):
            if message.get("role") == "user":
                content = f"{joined}\n\n{_text(message.get('content'))}"
                return [*messages[:at], {**message, "content": content}, *messages[at + 1 :]]
        return [{"role": "user", "content": joined}, *messages]

    def write(self, call: Mapping[str, Any]) -> str:
        """A call (in OpenAI's form) as the model would have written it, for formats without a template."""
        function = call.get("function") or call
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name", ""), ensure_ascii=False)
        return f'{self.begin}{{"name": {name}, "{self.arguments_key}": {arguments}}}{self.end}'

    def parser(self, tools: Sequence[Tool] = ()) -> ToolParser:
        """A parser for one answer."""
        names = frozenset(name_of(tool) for tool in tools)
        if self.name == "mistral":
            return MistralParser(names, call_id)
        if self.name == "llama3":
            return LlamaParser(names, call_id)
        return HermesParser(names, call_id)


def name_of(tool: Tool) -> str:
    """The name of a tool's function."""
    return str(_function(tool).get("name", ""))


def parameters_of(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments; that of no arguments where it has none."""
    found = _function(tool).get("parameters")
    if found is None or found == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(found, Mapping):
        raise RequestError(
            f"the parameters of tool {name_of(tool)!r} must be a JSON schema, an object", "tools"
        )
    return found if "type" in found or "$ref" in found or "anyOf" in found else {**found, "type": "object"}


def is_strict(tool: Tool) -> bool:
    """Whether a tool's arguments are to be held to its schema however it comes to be called."""
    return bool(_function(tool).get("strict"))


def check_tools(tools: Sequence[Tool], choice: str = "auto") -> None:
    """Raise RequestError, naming the field, if tools or tool_choice make no sense."""
    names: set[str] = set()
    for at, tool in enumerate(tools):
        where = f"tools[{at}].function.name"
        if not isinstance(tool, Mapping) or not isinstance(_function(tool), Mapping):
            raise RequestError(f'tools[{at}] must be {{"type": "function", "function": {{...}}}}', "tools")
        name = _function(tool).get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise RequestError(f"{where} must be 1 to 64 letters, digits, _, - or ., not {name!r:.80}", where)
        if name in names:
            raise RequestError(f"{where} {name!r} is there twice; give each tool a name of its own", where)
        names.add(name)
        parameters_of(tool)
    if choice in ("auto", "none"):
        return
    if not tools:
        raise RequestError("tool_choice asks for a call, but there are no tools", "tool_choice")
    if choice != "required" and choice not in names:
        raise RequestError(
            f"tool_choice names {choice!r:.80}, but the tools are {', '.join(sorted(names))}", "tool_choice"
        )


def call_id() -> str:
    """An id for a call: nine letters and digits, as Mistral's templates insist on; others take any."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def _function(tool: Tool) -> Any:
    return tool.get("function", tool)


def _control(tokenizer: Tokenizer, *texts: str) -> tuple[tuple[str, int], ...]:
    """Those of the texts that are control tokens, which a detokenizer would hide, and their ids."""
    vocabulary = tokenizer.vocabulary
    found = ((text, vocabulary.ids.get(text.encode())) for text in texts)
    return tuple((text, token) for text, token in found if token is not None and vocabulary.is_control(token))


def _takes_system(template: ChatTemplate) -> bool:
    """Whether a system message comes out of a template, found out by trying."""
    from chabok.errors import TemplateError

    mark = "qzxv"
    try:
        text = template.render([{"role": "system", "content": mark}, {"role": "user", "content": "x"}])
    except TemplateError:
        return False
    return mark in text


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Messages with one call in each: several in one become several, each with its result after it."""
    found: list[Message] = []
    results = {message.get("tool_call_id"): message for message in messages if message.get("role") == "tool"}
    moved: list[int] = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            if id(message) not in moved:
                found.append(message)
            continue
        for at, call in enumerate(calls):
            said = message.get("content") if at == 0 else None
            found.append({**message, "content": said, "tool_calls": [call]})
            result = results.get(call.get("id"))
            if result is not None:
                found.append(result)
                moved.append(id(result))
    return found


def _with_short_ids(messages: list[Message]) -> list[Message]:
    """Messages whose call ids are nine letters and digits; other ones are replaced by a hash of theirs."""
    for message in messages:
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "id": _short_id(call.get("id") or call_id())} for call in message["tool_calls"]
            ]
        if message.get("tool_call_id"):
            message["tool_call_id"] = _short_id(message["tool_call_id"])
    return messages


def _short_id(given: object) -> str:
    text = str(given)
    return text if re.fullmatch(r"[A-Za-z0-9]{9}", text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _text(content: Any) -> str:
    """A message's content as one text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(
            part if isinstance(part, str) else str(part.get("text", ""))
            for part in content
            if isinstance(part, str | Mapping)
        )
    return str(content)
