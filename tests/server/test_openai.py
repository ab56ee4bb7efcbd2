"""The OpenAI interface, spoken with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.server.conftest import Running

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as one:
        yield one


def test_a_conversation_is_answered_as_the_python_api_answers_it(
    client: openai.OpenAI, running: Running
) -> None:
    from chabok import SamplingParams

    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=16)
    want = running.llm.chat(HELLO, SamplingParams(max_tokens=16))
    assert answer.choices[0].message.content == want.text
    assert answer.choices[0].finish_reason == want.finish_reason
    assert answer.usage.completion_tokens == 16


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=16)
    pieces = list(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=16, stream=True))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"
