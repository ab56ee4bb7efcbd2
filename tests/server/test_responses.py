"""The Responses interface, spoken with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.conftest import Running

from chabok import SamplingParams


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as one:
        yield one


def test_a_text_is_answered(client: openai.OpenAI, running: Running) -> None:
    answer = client.responses.create(
        model="tiny", instructions="be brief", input="hello there", max_output_tokens=12
    )
    want = running.llm.chat(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
        SamplingParams(max_tokens=12),
    )
    assert answer.output_text == want.text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 12
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["output_tokens"] == 12


def test_a_stream_tells_of_every_step_and_ends_with_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hello there", max_output_tokens=12)
    events = list(
        client.responses.create(model="tiny", input="hello there", max_output_tokens=12, stream=True)
    )
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert last.response.output_text == text
    with client.responses.stream(model="tiny", input="hello there", max_output_tokens=12) as stream:
        for _ in stream:
            pass


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("store", True), ("conversation", "c"), ("truncation", "auto")],
)
def test_what_needs_state_is_refused_by_name(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=field) as caught:
        client.responses.create(model="tiny", input="hello", **{field: value})
    assert caught.value.param == field


def test_an_item_that_is_wrong_is_named(client: openai.OpenAI) -> None:
    bad: Any = [{"role": "user", "content": "a"}, {"role": "ghost", "content": "b"}]
    with pytest.raises(openai.BadRequestError, match=r"input\[1\]\.role"):
        client.responses.create(model="tiny", input=bad)
