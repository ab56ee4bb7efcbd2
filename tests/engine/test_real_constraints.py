"""Constraints and tool calls with real models."""

import json
from typing import Any

import jsonschema_rs
import pytest
from tests.models import model_path

from chabok.engine.llm import LLM
from chabok.engine.request import Request, SamplingParams
from chabok.text.tools import ToolFormat

pytestmark = pytest.mark.wide

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"enum": ["celsius", "kelvin"]},
            },
            "required": ["city", "unit"],
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Isfahan, in celsius?"}]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "skills": {"type": "array", "items": {"enum": ["art", "maths", "sport"]}, "maxItems": 3},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "qwen05"])
def llm(request: pytest.FixtureRequest) -> Any:
    with LLM(model_path(request.param), context=2048) as one:
        yield one


def test_a_required_call_names_the_city_that_was_asked_about(llm: LLM) -> None:
    format = ToolFormat.of(llm.template, llm.tokenizer)  # type: ignore[arg-type]
    messages, tools = format.prepare(QUESTION, [WEATHER], "required")
    constraint = llm.grammars.tool_calls(format, [WEATHER], parallel=False)
    request = Request(
        llm.tokenize_chat(messages, tools), SamplingParams(max_tokens=100), constraint=constraint
    )
    parser = format.parser([WEATHER])
    completion = llm.engine.submit(request).result()
    parser.push(completion.text)
    parser.finish()
    assert completion.finish_reason == "stop"
    assert [call.name for call in parser.calls] == ["get_weather"]
    assert json.loads(parser.calls[0].arguments) == {"city": "Isfahan", "unit": "celsius"}


def test_text_of_any_temperature_is_valid_and_greedy_text_is_the_same_token_by_token(llm: LLM) -> None:
    constraint = llm.grammars.json_schema(PERSON)
    valid = jsonschema_rs.validator_for(PERSON)
    params = [SamplingParams(temperature=t, seed=s, max_tokens=200) for t in (0, 1, 3) for s in range(5)]
    for completion in llm.generate(["A person as JSON: "] * len(params), params, constraint=constraint):
        assert completion.finish_reason == "stop"
        assert valid.is_valid(json.loads(completion.text)), completion.text
    fast = llm.generate("A person: ", SamplingParams(max_tokens=200), constraint=constraint)
    slow = llm.generate("A person: ", SamplingParams(max_tokens=200, logprobs=0), constraint=constraint)
    assert fast.text == slow.text
