"""Every value in a full request of every interface, replaced by wrong ones: never does the server fail."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.breaking import serving

_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "of a place", "parameters": _PARAMETERS, "strict": True}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
_SAMPLING = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1,
    "frequency_penalty": 0.1, "presence_penalty": 0.1, "logit_bias": {"5": 1.5}, "stop": ["zz", "yy"],
    "stop_token_ids": [3], "seed": 1, "ignore_eos": False, "min_tokens": 0, "priority": 1,
    "deadline_ms": 5000, "user": "u", "metadata": {"a": "b"},
}  # fmt: skip

_TALK = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "x"},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "20"},
]
_SHORT = {"messages": [{"role": "user", "content": "u"}], "max_tokens": 2}
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": _PARAMETERS, "strict": True}}

FULL: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "model": "tiny", **_SAMPLING, "n": 1, "max_completion_tokens": 2, "logprobs": True,
            "top_logprobs": 2,
            "messages": _TALK, "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False, "template_variables": {"enable_thinking": False}, "stream": True,
            "stream_options": {"include_usage": True}, "reasoning": True,
        },
        {**_SHORT, "messages": [*_SHORT["messages"], {"role": "assistant", "content": "a"}],
         "continue_final_message": True, "response_format": _SCHEMA},
        {**_SHORT, "response_format": {"type": "regex", "pattern": "a+"}},
        {**_SHORT, "response_format": {"type": "lark", "grammar": 'start: "a"+'}},
    ],
    "/v1/completions": [
        {"model": "tiny", **_SAMPLING, "prompt": ["a", "b"], "max_tokens": 2, "n": 2, "logprobs": 2,
         "echo": True, "stream": False},
        {"prompt": [[1, 2], [3]], "best_of": 2, "n": 1, "max_tokens": 1},
    ],
    "/v1/responses": [
        {
            "model": "tiny", "instructions": "i", "max_output_tokens": 2, "store": False, "temperature": 0.5,
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t"}]},
                {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "20"},
            ],
            "tools": [{"type": "function", **_FUNCTION}], "tool_choice": "auto",
            "text": {"format": {"type": "text"}}, "stream": True,
        },
        {"input": "x", "max_output_tokens": 2,
         "text": {"format": {"type": "json_schema", "name": "n", "schema": _PARAMETERS}}},
    ],
    "/v1/messages": [
        {
            "model": "tiny", "max_tokens": 2, "system": [{"type": "text", "text": "s"}], "temperature": 0.5,
            "top_k": 3, "top_p": 0.5, "stop_sequences": ["zz"], "stream": False, "metadata": {"user_id": "u"},
            "messages": [
                {"role": "user", "content": [
                    {"type": "text", "text": "t", "cache_control": {"type": "ephemeral"}}]},
                {"role": "assistant", "content": [
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "a",
                     "content": [{"type": "text", "text": "20"}]}]},
            ],
            "tools": [{"name": "weather", "description": "d", "input_schema": _PARAMETERS}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
    ],
    "/v1/messages/count_tokens": [
        {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "system": "s"},
    ],
    "/api/chat": [
        {
            "model": "tiny", "stream": True, "keep_alive": "5m", "format": _PARAMETERS,
            "messages": [{"role": "user", "content": "x", "images": []}],
            "options": {"num_predict": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 1,
                        "stop": ["zz"]},
        },
        {"model": "tiny", "messages": [{"role": "user", "content": "x"},
         {"role": "assistant", "content": "", "tool_calls": [
             {"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
         {"role": "tool", "content": "20", "tool_name": "weather"}],
         "tools": [{"type": "function", "function": _FUNCTION}], "options": {"num_predict": 2}},
    ],
    "/api/generate": [
        {"model": "tiny", "prompt": "x", "system": "s", "raw": False, "format": "json", "stream": False,
         "options": {"num_predict": 2}, "keep_alive": 60},
    ],
    "/api/show": [{"model": "tiny", "verbose": True}],
    "/api/pull": [{"model": "no-such-model", "stream": False, "insecure": False}],
}  # fmt: skip

NASTY: list[Any] = [
    None, True, 0, -1, 1.5, 5e-324, 10**18, 2**64, 1e308, "", "x", "\0", "\u2028", "{{ 7 * 7 }}", "a" * 5000,
    [], [[]], [None], [0], [""], {}, {"": None}, {"type": "object"}, {"type": "text", "text": "x"}, [{}] * 50,
]  # fmt: skip


def mutations(whole: Any) -> Iterator[Any]:
    """The body with each value in it replaced by each nasty one, left out, and with one too many."""
    for path in list(paths(whole, ())):
        for nasty in NASTY:
            yield changed(whole, path, nasty)
        yield changed(whole, path, ...)
        if isinstance(at(whole, path), dict):
            yield changed(whole, (*path, "unknown"), 1)
            yield changed(whole, (*path, "\0"), {})
        if isinstance(at(whole, path), list):
            yield changed(whole, path, at(whole, path) * 3)


def paths(value: Any, here: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*here, key)
        yield from paths(item, (*here, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(whole)
    place = at(body, path[:-1])
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return body


@pytest.mark.wide
def test_no_wrong_value_anywhere_makes_the_server_fail(tmp_path: Path) -> None:
    with serving(tmp_path / "cache", "--context", "2048", "--no-log-requests") as server:
        counts: dict[str, int] = {}
        failed: list[str] = []
        with httpx.Client(base_url=server.address, timeout=60) as client:
            for path, wholes in FULL.items():
                for whole in wholes:
                    plain = client.post(path, content=json.dumps(whole))
                    assert path == "/api/pull" or plain.status_code == 200, plain.text
                    for body in mutations(whole):
                        body.setdefault("deadline_ms", 3000) if path.startswith("/v1/c") else None
                        answer = client.post(path, content=json.dumps(body))
                        key = f"{path} {answer.status_code}"
                        counts[key] = counts.get(key, 0) + 1
                        if answer.status_code >= 500 and answer.status_code != 504:
                            failed.append(
                                f"{path} {json.dumps(body)[:600]}: {answer.status_code} {answer.text}"
                            )
                        elif answer.status_code >= 400:
                            assert len(message(answer.json())) > 10, (body, answer.text)
                        elif "server failed" in answer.text:
                            failed.append(
                                f"{path} {json.dumps(body)[:600]}: within the stream: {answer.text[-300:]}"
                            )
        print(counts)
        assert not failed, f"{len(failed)}:\n" + "\n".join(failed[:20])
        server.unharmed()


def message(value: Any) -> str:
    error = value["error"]
    return error if isinstance(error, str) else str(error["message"])
