"""Chat templates: messages to the tokens a model was trained to answer."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from chabok.errors import TemplateError
from chabok.text.guard import Guard, restore
from chabok.text.sandbox import Program
from chabok.text.tokenizer import Tokenizer

_KEY = "tokenizer.chat_template"

_CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

_GEMMA = """{{- bos_token -}}
{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' -%}
{%- for message in messages if message.role != 'system' -%}
{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\n' }}
{{- (system if loop.first else '') + message.content + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""

_LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"""

_PLAIN = """{{- bos_token -}}
{%- for message in messages -%}
{{ message.role + ': ' + message.content + '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'assistant:' }}{%- endif -%}"""

# What a file without a template gets, by the token that gives its family away.
_FALLBACKS = (
    ("<|im_start|>", _CHATML),
    ("<start_of_turn>", _GEMMA),
    ("<|start_header_id|>", _LLAMA3),
    ("", _PLAIN),
)


class ChatTemplate:
    """The chat template of a model file, or a documented stand-in for files without one.

    ``source``: the Jinja source in use when no tools are given, ``tool_source`` when some are; ``fallback``:
    whether the file had none and the form was chosen by its vocabulary: ChatML where there is <|im_start|>,
    Gemma's turns where there is <start_of_turn>, Llama 3's headers where there is <|start_header_id|>, else
    plain "role: text" lines.

    Where a file has a template of its own for tools (``tokenizer.chat_template.tool_use``), that one is used
    when tools are given.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tool_source: str = "", fallback: bool = False
    ) -> None:
        """``tool_source``: the template to use when tools are given, if it is another one."""
        self.source = source
        self.tool_source = tool_source or source
        self.fallback = fallback
        self._tokenizer = tokenizer
        self._program = Program(source)
        self._tool_program = Program(tool_source) if tool_source else self._program
        vocabulary = tokenizer.vocabulary
        self._own = {
            "bos_token": vocabulary.text(vocabulary.bos_id),
            "eos_token": vocabulary.text(vocabulary.eos_id),
            "unk_token": vocabulary.text(vocabulary.unk_id),
            "pad_token": vocabulary.text(vocabulary.pad_id),
        }
        self._guard = Guard([vocabulary.text(token) for token in vocabulary.control])

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate:
        """The template in the metadata of a GGUF file, or the stand-in that its vocabulary asks for."""
        source = metadata.get(_KEY)
        if not isinstance(source, str) or not source.strip():
            ids = tokenizer.vocabulary.ids
            source = next(text for token, text in _FALLBACKS if not token or token.encode() in ids)
            return cls(source, tokenizer, fallback=True)
        tool_source = metadata.get(f"{_KEY}.tool_use")
        return cls(source, tokenizer, tool_source=tool_source if isinstance(tool_source, str) else "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt as text.

        ``messages``: mappings with ``role`` and ``content`` (text, None, or parts of type "text"), and what
        else the template reads (``tool_calls``, ``tool_call_id``, ``reasoning_content`` ...). ``tools``:
        JSON schemas of functions. ``add_generation_prompt``: end with the beginning of the answer.
        ``variables``: further names the template knows, such as ``enable_thinking``.
        """
        given = self._given(messages, tools, documents, variables)
        return self._render(given, add_generation_prompt, datetime.datetime.now())

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        token_limit: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """The prompt as tokens: the template's special tokens are tokens, those in messages are only text.

        How they are told apart: the template is rendered a second time with the characters that every
        control token needs (often just "|") replaced in all that is given by stand-ins, which only this
        class can turn back. Control tokens of that rendering are the template's own, however it cuts and
        joins the pieces.

        Its limits: a template may decide by those very characters (``'<|x|>' in message.content``), and so
        come out otherwise than with the real text. Then, if the real rendering holds no other control tokens
        than the guarded one, the real one is used; else the guarded one, which is always safe.

        ``token_limit``: see the limit of ``Tokenizer.encode``.
        """
        given = self._given(messages, tools, documents, variables)
        now = datetime.datetime.now()  # one time for both renderings
        plain = self._render(given, add_generation_prompt, now)
        fragments = self._tokenizer.split_special(plain)
        stand_ins = self._guard.stand_ins(plain, given)
        if stand_ins:
            # Not the names of variables: a template must find them, and nobody but the caller chose them.
            covered = {name: self._guard.cover(value, stand_ins) for name, value in given.items()}
            guarded_text = self._render(covered, add_generation_prompt, now)
            guarded = self._tokenizer.split_control(guarded_text)
            own = [fragment for fragment in guarded if isinstance(fragment, int)]
            if restore(guarded_text, stand_ins) == plain or own != self._control_in(plain):
                fragments = [restore(item, stand_ins) if isinstance(item, str) else item for item in guarded]
        ids = self._tokenizer.encode_fragments(fragments, add_bos=False, limit=token_limit)
        bos = self._tokenizer.bos_id
        return [bos, *ids] if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos] else ids

    def _control_in(self, text: str) -> list[int]:
        return [fragment for fragment in self._tokenizer.split_control(text) if isinstance(fragment, int)]

    def _given(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        """All that the caller gives, in the form templates expect."""
        if not messages:
            raise TemplateError("there are no messages to answer")
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise TemplateError(
                    f"message {index} has no role: expected {{'role': 'user', 'content': '...'}}"
                )
        return {
            **{name: _plain(value) for name, value in variables.items()},
            "messages": [_message(index, _plain(message)) for index, message in enumerate(messages)],
            "tools": _plain(tools) if tools else None,
            "documents": _plain(documents) if documents else None,
        }

    def _render(self, given: Mapping[str, Any], add_generation_prompt: bool, now: datetime.datetime) -> str:
        program = self._tool_program if given["tools"] else self._program
        variables = {**given, **self._own, "add_generation_prompt": add_generation_prompt}
        return program.render(variables, now)


def _plain(value: Any) -> Any:
    """``value`` with every mapping a dict and every sequence a list, which is all that templates know."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message in the form templates expect.

    Its parts of text are joined, as few templates read parts; arguments of tool calls are values, not the
    JSON text that the OpenAI interface has them in, because templates write them as JSON themselves.
    """
    content = message.get("content")
    if content is None:
        content = None if message.get("tool_calls") else ""
    elif not isinstance(content, str | list):
        raise TemplateError(
            f"message {index} has a content of type {type(content).__name__}; it must be text or parts"
        )
    elif not isinstance(content, str):
        content = "".join(_part(index, part) for part in content)
    message = {**message, "content": content}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call  # what a model once wrote need not be JSON
    return {**call, "function": {**function, "arguments": arguments}}


def _part(index: int, part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TemplateError(f"message {index} has a part of type {kind!r}; only text is supported")
