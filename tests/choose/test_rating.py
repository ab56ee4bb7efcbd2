"""Choices rated through a server, and by the model in this process: the same numbers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.measure.formats import Answer, Said, openai_chat
from tests.measure.scripted import ScriptedServer
from tests.server.conftest import Running, serving, tiny

from chabok.choose.local import LocalModel
from chabok.choose.quality import Asker, question_of, rating
from chabok.choose.quality.rating import Rated, UnratedError
from chabok.measure import Endpoint
from chabok.server.settings import Settings

MODEL = Path(__file__).parents[1] / "fixtures" / "llama.gguf"
CONTEXT = "Question: What color is the sky?\nAnswer:"
CHOICES = (" blue", " a dark green, mostly", " سبز")
QUESTION = question_of({"prompt": "What color is the sky?", "choices": ["blue", "green"], "answer": 0})


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with serving(Settings(models=(tiny("llama", MODEL),), installed=False, prefix_disk=False)) as running:
        yield running


def through(url: str) -> list[Rated]:
    endpoint = Endpoint.at(url, model="llama")

    async def go() -> list[Rated]:
        async with endpoint.client() as client:
            return await rating.rate(endpoint, client, (CONTEXT,) * len(CHOICES), CHOICES)

    return asyncio.run(go())


def test_a_server_and_the_model_itself_rate_alike(served: Running) -> None:
    with LocalModel.open(str(MODEL)) as model:
        here = asyncio.run(model.rate((CONTEXT,) * len(CHOICES), CHOICES))
    there = through(served.url)
    assert [each.tokens for each in there] == [each.tokens for each in here]
    assert [each.logprob for each in there] == pytest.approx([each.logprob for each in here], abs=1e-3)
    assert all(each.logprob < 0 for each in here)


def test_the_probability_of_a_choice_is_that_of_its_tokens_one_after_the_other() -> None:
    with LocalModel.open(str(MODEL)) as model:
        llm = model._llm.llm
        (whole,) = asyncio.run(model.rate((CONTEXT,), (CHOICES[1],)))
        tokens = llm.tokenize(CONTEXT + CHOICES[1])
        logits = llm.logits(tokens).astype("float64")
    import numpy as np

    start = len(tokens) - whole.tokens
    rows = logits[start - 1 : len(tokens) - 1]
    logprobs = (
        rows
        - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))
        - rows.max(1, keepdims=True)
    )
    expected = sum(logprobs[place, token] for place, token in enumerate(tokens[start:]))
    assert whole.logprob == pytest.approx(expected, abs=1e-3)


def test_where_no_probabilities_are_told_the_text_is_read_and_that_is_said() -> None:
    server = ScriptedServer()
    try:
        chat = openai_chat(Answer([Said(1, "B")], {"prompt": 3, "output": 1}))
        endpoint = Endpoint.at(server.script(chat), model="m")

        async def go() -> tuple[object, str]:
            async with endpoint.client() as client:
                asker = Asker(endpoint, client)
                return await asker(QUESTION, "q"), asker.note

        answered, note = asyncio.run(go())
    finally:
        server.close()
    assert (answered.method, answered.right, answered.read) == ("text", False, "B")  # type: ignore[attr-defined]
    assert note


def test_what_must_be_rated_and_cannot_be_is_an_error_not_a_wrong_answer() -> None:
    endpoint = Endpoint.at("http://127.0.0.1:9", model="m", dialect="anthropic")

    async def go() -> object:
        async with endpoint.client() as client:
            with pytest.raises(UnratedError):
                await rating.rate(endpoint, client, (CONTEXT,), CHOICES[:1])
            return await Asker(endpoint, client, "logprob")(QUESTION, "q")

    answered = asyncio.run(go())
    assert "no way to ask" in answered.error  # type: ignore[attr-defined]
