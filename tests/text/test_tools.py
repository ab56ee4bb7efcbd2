"""How each family is told of tools, and how calls and results in a conversation reach its template."""

from typing import Any

import pytest
from tests.text.vocabularies import CONTROL, byte_level

from chabok.errors import RequestError, TemplateError
from chabok.text.chat import ChatTemplate
from chabok.text.tokenizer import Tokenizer
from chabok.text.tools import ToolFormat, call_id, check_tools, parameters_of

# Templates in the forms of the families', cut down to what they do with tools.
HERMES = """{%- if tools %}{{- '<|im_start|>system\nYou may call:\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{{- 'Write <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
{%- if m.role == 'tool' %}{{- '<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- elif '</think>' in m.content %}{{- m.content.split('</think>')[-1] }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endfor %}"""

LLAMA3 = """{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is defined and tools %}{%- for t in tools %}{{- t | tojson }}{%- endfor %}{%- endif %}
{%- for m in messages %}{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only one call at a time') }}{%- endif %}
{%- set call = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- endif %}{%- endfor %}"""

MISTRAL = """{%- if tools %}{{- '[AVAILABLE_TOOLS]' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- for m in messages %}{%- if m.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids must have nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}
{%- endif %}
{%- endfor %}{{- ']' }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids must have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
)

# Refuses a system message and turns that do not alternate, as Gemma 2's does.
GEMMA2 = """{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set who = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + who + '\n' + m.content + '<end_of_turn>\n' }}
{%- endfor %}"""

TOKENIZER = Tokenizer.from_gguf(byte_level())
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = [
    {"id": "call_abc1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Qom"}'}},
    {
        "id": "call_abcdef2",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rey"}'},
    },
]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "call_abc1", "content": "21"},
    {"role": "tool", "tool_call_id": "call_abcdef2", "content": "23"},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Warm.", "tool_calls": []},
    {"role": "user", "content": "Thanks."},
]


def prompt(source: str, messages: list[dict[str, Any]] = CONVERSATION, choice: str = "auto") -> str:
    template = ChatTemplate(source, TOKENIZER)
    format = ToolFormat.of(template, TOKENIZER)
    given, tools = format.prepare(messages, [WEATHER], choice)
    return template.render(given, tools=tools)


@pytest.mark.parametrize(
    ("source", "name", "native"),
    [
        (HERMES, "hermes", True),
        (LLAMA3, "llama3", True),
        (MISTRAL, "mistral", True),
        (CHATML, "generic", False),
        (GEMMA2, "generic", False),
        ("{{ tools | tojson }}<|call|>", "generic", False),
    ],
)
def test_the_format_is_known_by_what_the_template_writes(source: str, name: str, native: bool) -> None:
    format = ToolFormat.of(ChatTemplate(source, TOKENIZER), TOKENIZER)
    assert (format.name, format.native) == (name, native)


@pytest.mark.parametrize("source", [HERMES, LLAMA3, MISTRAL, CHATML, GEMMA2])
def test_tools_calls_and_results_reach_every_template(source: str) -> None:
    text = prompt(source)
    for part in [
        '"name": "weather"',
        '"city": {"type": "string"}',
        '{"city": "Qom"}',
        '{"city": "Rey"}',
        "21",
    ]:
        assert part in text
    assert text.index("Qom") < text.index("21")
    assert text.index("23") < text.index("And now?")


def test_several_calls_become_one_turn_each_where_a_template_takes_one_at_a_time() -> None:
    text = prompt(LLAMA3)
    assert text.index("Qom") < text.index("21") < text.index("Rey") < text.index("23")


def test_ids_of_calls_are_shortened_where_a_template_insists_and_still_match() -> None:
    text = prompt(MISTRAL)
    ids = [piece[:9] for piece in text.split('"id": "')[1:]]
    assert [piece[:9] for piece in text.split('"call_id": "')[1:]] == ids
    assert len(set(ids)) == 2
    assert all(len(one) == 9 and one.isalnum() for one in (*ids, call_id()))
    assert len({call_id() for _ in range(100)}) == 100


def test_a_system_message_and_the_tools_share_one_turn_where_the_template_knows_no_tools() -> None:
    text = prompt(CHATML, [{"role": "system", "content": "Be brief."}, *CONVERSATION])
    assert text.count("<|im_start|>system") == 1
    assert text.index("Be brief.") < text.index("<tools>") < text.index("Weather?")
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Qom"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n21\n</tool_response>\n<tool_response>\n23" in text


def test_the_first_user_turn_carries_what_a_template_takes_no_system_message_for() -> None:
    text = prompt(GEMMA2, [{"role": "system", "content": "Be brief."}, *CONVERSATION])
    first = text.split("<end_of_turn>")[0]
    assert first.startswith("<start_of_turn>user\nBe brief.")
    assert "<tools>" in first
    assert first.endswith("Weather?")
    with pytest.raises(TemplateError):
        ChatTemplate(GEMMA2, TOKENIZER).render([{"role": "system", "content": "x"}])


def test_with_tool_choice_none_no_tool_is_told_of_but_earlier_calls_stay() -> None:
    for source in (HERMES, LLAMA3, MISTRAL, CHATML, GEMMA2):
        text = prompt(source, choice="none")
        assert '"parameters": {"type"' not in text
        assert "Qom" in text
        assert "21" in text


def test_markers_that_are_control_tokens_are_to_be_made_visible() -> None:
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "[TOOL_CALLS]"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], CONTROL]
    tokenizer = Tokenizer.from_gguf(metadata)
    marker = tokenizer.vocabulary.ids[b"[TOOL_CALLS]"]
    format = ToolFormat.of(ChatTemplate(MISTRAL, tokenizer), tokenizer)
    assert format.visible == {marker}
    ids = [marker, *tokenizer.encode("[]"), *tokenizer.eos_ids]
    hidden, shown = tokenizer.stream(), tokenizer.stream(visible=format.visible)
    assert "".join(map(hidden.push, ids)) == "[]"
    assert "".join(map(shown.push, ids)) == "[TOOL_CALLS][]"


@pytest.mark.parametrize(
    ("tools", "choice", "field", "words"),
    [
        ([{"type": "function", "function": {"name": "a b"}}], "auto", "tools[0].function.name", "letters"),
        ([WEATHER, WEATHER], "auto", "tools[1].function.name", "twice"),
        ([WEATHER], "rain", "tool_choice", "weather"),
        ([], "required", "tool_choice", "no tools"),
        ([{"function": {"name": "f", "parameters": "x"}}], "auto", "tools", "JSON schema"),
        (["f"], "auto", "tools", "tools[0]"),
    ],
)
def test_tools_that_make_no_sense_are_refused_by_name(
    tools: Any, choice: str, field: str, words: str
) -> None:
    with pytest.raises(RequestError, match=words.replace("[", r"\[")) as caught:
        check_tools(tools, choice)
    assert caught.value.field == field


def test_a_tool_without_parameters_takes_no_arguments() -> None:
    assert parameters_of({"function": {"name": "f"}}) == {"type": "object", "properties": {}}
