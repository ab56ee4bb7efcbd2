"""Text as tokens and back, as evaluation harnesses ask for it."""

from __future__ import annotations

import httpx
import pytest
from tests.server.conftest import Running


def test_a_text_comes_back_from_its_tokens(running: Running) -> None:
    text = "Hello, world! چابک"
    answer = httpx.post(running.url + "/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"])
    assert answer["tokens"] == running.llm.tokenize(text, special=True, add_bos=False)
    back = httpx.post(running.url + "/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}


def test_a_conversation_is_tokenized_as_its_template_writes_it(running: Running) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = httpx.post(running.url + "/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == running.llm.tokenize_chat(messages)


def test_the_special_tokens_are_told_and_can_be_tokenized(running: Running) -> None:
    info = httpx.get(running.url + "/tokenizer_info").json()
    answer = httpx.post(
        running.url + "/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}
    )
    assert len(answer.json()["tokens"]) == 1
    assert info["chat_template"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": "x", "promt": "y"}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
    ],
)
def test_what_cannot_be_tokenized_is_refused(running: Running, path: str, body: dict[str, object]) -> None:
    answer = httpx.post(running.url + path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
