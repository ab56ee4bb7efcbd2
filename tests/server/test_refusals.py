"""What is wrong with a request is answered 400 with the field's name, whatever it is; never 500."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from tests.server.conftest import Running

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 2}
PATHS = {"chat/completions": CHAT, "completions": TEXT, "responses": RESPONSE}


def refused(running: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    data = body if isinstance(body, bytes | str) else json.dumps(body)
    answer = httpx.post(f"{running.v1}/{path}", content=data, timeout=20)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in answer.text
    return error


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        ("chat/completions", {"temprature": 1}, "temprature"),
        ("chat/completions", {"temperature": "hot"}, "temperature"),
        ("chat/completions", {"temperature": -1}, "temperature"),
        ("chat/completions", {"temperature": 10**400}, "temperature"),
        ("chat/completions", {"top_p": 0}, "top_p"),
        ("chat/completions", {"max_tokens": -1}, "max_tokens"),
        ("chat/completions", {"max_tokens": 1.5}, "max_tokens"),
        ("chat/completions", {"max_tokens": True}, "max_tokens"),
        ("chat/completions", {"max_completion_tokens": -1, "max_tokens": None}, "max_completion_tokens"),
        ("chat/completions", {"max_completion_tokens": 3}, "max_tokens"),
        ("chat/completions", {"seed": 2**70}, "seed"),
        ("chat/completions", {"n": 0}, "n"),
        ("chat/completions", {"n": 129}, "n"),
        ("chat/completions", {"stop": [""]}, "stop"),
        ("chat/completions", {"stop": ["a"] * 65}, "stop"),
        ("chat/completions", {"stop": [1]}, "stop[0]"),
        ("chat/completions", {"logit_bias": {"x": 1}}, "logit_bias"),
        ("chat/completions", {"logit_bias": {"999999": 1}}, "logit_bias"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ("chat/completions", {"messages": [{"role": "ghost", "content": ""}]}, "messages[0].role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "", "x": 1}]}, "messages[0].x"),
        ("chat/completions", {"store": True}, "store"),
        ("chat/completions", {"functions": []}, "functions"),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        (
            "chat/completions",
            {"tools": [{"function": {"name": "a b"}}]},
            "tools[0].function.name",
        ),
        ("chat/completions", {"deadline_ms": 0}, "deadline_ms"),
        ("chat/completions", {"priority": 10**9}, "priority"),
        ("completions", {"suffix": "x"}, "suffix"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [""]}, None),
        ("completions", {"prompt": [1, "a"]}, "prompt"),
        ("completions", {"prompt": [10**9]}, "prompt"),
        ("completions", {"prompt": [-1]}, None),
        ("completions", {"prompt": [2**64]}, None),
        ("completions", {"prompt": [[]]}, None),
        ("completions", {"best_of": 2, "stream": True}, "best_of"),
        ("completions", {"best_of": 1, "n": 2}, "best_of"),
        ("completions", {"logprobs": 101}, "logprobs"),
        ("completions", {"logprobs": True}, "logprobs"),
        ("completions", {"prompt": ["a"] * 600}, "prompt"),
        ("responses", {"input": []}, "input"),
        ("responses", {"n": 2}, "n"),
        ("responses", {"tools": [{"type": "web_search"}]}, None),
    ],
)
def test_what_is_wrong_is_named(running: Running, path: str, more: dict[str, Any], field: str | None) -> None:
    body = {key: value for key, value in {**PATHS[path], **more}.items() if value is not None}
    error = refused(running, path, body)
    assert error["type"] == "invalid_request_error"
    if field is not None:
        assert error["param"] == field
        assert field.rsplit(".", 1)[-1] in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": 1e999}',
        b'{"temperature": 0.5, "temperature": 0.7}',
        b'{"model": "\\ud800"}',
        b'{"user": "\xed\xa0\x80"}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"[" * 100_000,
        b'{"messages": [' + b'{"role": "user", "content": [' * 200 + b"]}" * 200 + b"]}",
    ],
)
def test_a_body_that_is_no_such_object_is_refused(running: Running, path: str, data: bytes) -> None:
    refused(running, path, data)


@pytest.mark.parametrize("path", PATHS)
def test_a_wrong_type_in_any_field_is_refused(running: Running, path: str) -> None:
    with httpx.Client() as client:
        for name in PATHS_FIELDS[path]:
            for value in ({"a": {"b": [1]}}, [[["x"]]], "\0", -(2**63) - 1, 1e308, True, "", 10**30, [], {}):
                body = {**PATHS[path], name: value}
                answer = client.post(f"{running.v1}/{path}", content=json.dumps(body), timeout=20)
                assert answer.status_code in (200, 400, 404), (name, value, answer.text)
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"]


def _fields(path: str) -> list[str]:
    from chabok.server.completions import CompletionBody
    from chabok.server.openai import ChatBody
    from chabok.server.responses import ResponseBody

    kinds = {"chat/completions": ChatBody, "completions": CompletionBody, "responses": ResponseBody}
    return list(kinds[path].__struct_fields__)


PATHS_FIELDS = {path: _fields(path) for path in PATHS}


@pytest.mark.parametrize(
    ("path", "more", "said"),
    [
        ("chat/completions", {"temperature": "hot"}, "temperature must be a number, not a string"),
        ("chat/completions", {"stream": 1}, "stream must be true or false, not an integer"),
        ("chat/completions", {"store": True}, "store must be false, not true"),
        (
            "chat/completions",
            {"tool_choice": "x"},
            "tool_choice must be 'auto' or 'none' or 'required', not 'x'",
        ),
        ("chat/completions", {"metadata": {"a": 1}}, "metadata[...] must be a string, not an integer"),
        (
            "chat/completions",
            {"messages": [{"role": "human", "content": "hi"}]},
            "messages[0].role must be 'system' or 'developer' or 'user' or 'assistant' or 'tool', not '",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type: images are not supported; the models here read text only",
        ),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type: images are not supported; the models here read text only",
        ),
        ("responses", {"input": [{"type": "x"}]}, "input[0].type must be 'message' or 'function_call'"),
        (
            "chat/completions",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objekt"}},
                }
            },
            "the JSON schema is not valid: Invalid type: objekt",
        ),
    ],
)
def test_it_is_told_what_a_field_must_be(
    running: Running, path: str, more: dict[str, Any], said: str
) -> None:
    assert refused(running, path, PATHS[path] | more)["message"].startswith(said)


def test_nul_in_a_text_is_a_character_like_any_other(running: Running) -> None:
    body = {**CHAT, "messages": [{"role": "user", "content": "a\0b"}]}
    answer = httpx.post(running.v1 + "/chat/completions", json=body)
    assert answer.status_code == 200


def test_fields_that_change_nothing_are_taken(running: Running) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    for path, body in PATHS.items():
        answer = httpx.post(f"{running.v1}/{path}", json={**body, **more})
        assert answer.status_code == 200, answer.text


def test_a_body_that_says_it_is_too_large_is_refused_before_it_is_read(running: Running) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n\r\n{"
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_prompt_that_is_too_long_is_refused_and_says_by_how_much(running: Running) -> None:
    error = refused(running, "completions", {**TEXT, "prompt": "word " * 4000})
    assert error["code"] == "context_length_exceeded"
    assert "4096" in error["message"]
    million = [{"role": "user", "content": "word " * 1_000_000}]
    error = refused(running, "chat/completions", {"model": "tiny", "messages": million})
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"


def test_every_answer_has_the_request_s_id(running: Running) -> None:
    url = running.v1 + "/chat/completions"
    assert httpx.post(url, json=CHAT, headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = httpx.post(url, content=b"{", headers={"X-Request-Id": "not\tsane"}).headers["x-request-id"]
    assert made.startswith("req-")
    assert httpx.get(running.url + "/nowhere").headers["x-request-id"]


def test_paths_and_methods_that_are_not_there_are_told_as_the_rest(running: Running) -> None:
    answer = httpx.get(running.v1 + "/nowhere")
    assert answer.status_code == 404
    assert "/v1/nowhere" in answer.json()["error"]["message"]
    answer = httpx.get(running.v1 + "/chat/completions")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", "/v1/embeddings: embeddings are not supported; this server writes text only"),
        ("/v1/images/generations", "/v1/images/generations: images are not supported"),
        ("/chat/completions", "there is no /chat/completions here; did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "there is no /v1/v1/messages here; did you mean /v1/messages?"),
        ("/somewhere", "there is no /somewhere here"),
    ],
)
def test_a_path_that_is_not_there_is_told_with_what_may_have_been_meant(
    running: Running, path: str, said: str
) -> None:
    answer = httpx.post(running.url + path, content="{}")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(said)
