"""The OpenAI interface, spoken with OpenAI's own client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.server.conftest import Running

from chabok import SamplingParams

HELLO: Any = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=running.v1, api_key="none", max_retries=0) as one:
        yield one


def joined(pieces: Any) -> str:
    return "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)


@pytest.mark.parametrize("model", ["tiny", "tiny-spm"])
def test_a_conversation_is_answered_as_the_python_api_answers_it(
    client: openai.OpenAI, running: Running, model: str
) -> None:
    answer = client.chat.completions.create(model=model, messages=HELLO, max_tokens=16)
    want = running.llms[model].chat(HELLO, SamplingParams(max_tokens=16))
    assert answer.choices[0].message.content == want.text
    assert answer.choices[0].finish_reason == want.finish_reason
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len(running.llms[model].tokenize_chat(HELLO))
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model == model
    assert answer.system_fingerprint


def test_how_much_to_think_is_a_hint(client: openai.OpenAI) -> None:
    for effort in ("none", "low", "high"):
        asked: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "reasoning_effort": effort}
        assert client.chat.completions.create(**asked).choices[0].finish_reason == "length"


def test_a_stream_has_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=16)
    pieces = list(
        client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert joined(pieces) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].choices == []
    assert whole.usage is not None
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(piece.usage is None for piece in pieces[:-1])
    assert pieces[-1].model_extra is not None
    assert pieces[-1].model_extra["timings"]["output_tokens"] == 16


def test_timings_tell_where_the_time_went(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HELLO, max_tokens=8)
    extra = raw.parse().model_extra
    assert extra is not None
    timings = extra["timings"]
    for name in ("tokenize", "queue", "prefill", "first_token", "decode", "sample", "detokenize", "total"):
        assert timings[f"{name}_ms"] >= 0
    assert 0 < timings["first_token_ms"] <= timings["total_ms"]
    assert timings["tokens_per_s"] > 0
    assert timings["output_tokens"] == 8
    assert "prefill;dur=" in raw.headers["server-timing"]


def test_several_answers_differ_by_their_seeds_and_come_again_with_the_same(client: openai.OpenAI) -> None:
    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, n=3, seed=7, temperature=1.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) == 3
    assert ask() == first
    streamed = ["", "", ""]
    for piece in client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, n=3, seed=7, temperature=1.0, stream=True
    ):
        for choice in piece.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == first


def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI, running: Running) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=3
    )
    want = running.llm.chat(HELLO, SamplingParams(max_tokens=12, logprobs=3))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert want.logprobs is not None
    assert [each.logprob for each in logprobs.content] == pytest.approx(want.logprobs)
    said = b"".join(bytes(each.bytes or []) for each in logprobs.content)
    assert said.decode("utf-8", "replace") == want.text
    for each in logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob
        assert each.top_logprobs[0].bytes == each.bytes  # greedy
    streamed = [
        each
        for piece in client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, logprobs=True, top_logprobs=3, stream=True
        )
        if piece.choices[0].logprobs is not None
        for each in piece.choices[0].logprobs.content or []
    ]
    assert [each.bytes for each in streamed] == [each.bytes for each in logprobs.content]


def test_a_stop_string_ends_the_text_before_it_and_its_tokens_are_not_reported(
    client: openai.OpenAI, running: Running
) -> None:
    text = running.llm.chat(HELLO, SamplingParams(max_tokens=24)).text
    stop = text[9:12]
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=24, stop=[stop], logprobs=True
    )
    choice = answer.choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.model_extra is not None
    assert choice.model_extra["stop_reason"] == stop
    assert choice.logprobs is not None
    said = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content or [])
    assert said.decode("utf-8", "replace").startswith(choice.message.content or "")
    assert len(said) < len((choice.message.content or "").encode()) + 16
    pieces = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=24, stop=stop, stream=True
    )
    assert joined(pieces) == choice.message.content


def test_logit_bias_and_penalties_change_what_is_chosen(client: openai.OpenAI, running: Running) -> None:
    token = running.llm.tokenize("z")[-1]
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=4, logit_bias={str(token): 100}
    )
    assert answer.choices[0].message.content == "zzzz"
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=4,
        logit_bias={str(token): 100},
        frequency_penalty=2.0,
        presence_penalty=2.0,
        extra_body={"repetition_penalty": 100.0},
    )
    assert answer.choices[0].message.content != "zzzz"


def test_parts_of_text_and_an_instruction_by_its_newer_name_are_what_they_mean(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}],
        max_tokens=8,
    )
    parts = client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}],
            },
        ],
        max_tokens=8,
    )
    assert parts.choices[0].message.content == plain.choices[0].message.content


def test_an_answer_can_be_begun_by_the_client(client: openai.OpenAI, running: Running) -> None:
    whole = running.llm.chat(HELLO, SamplingParams(max_tokens=16)).text
    half = whole[:4]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[*HELLO, {"role": "assistant", "content": half}],
        max_tokens=8,
        extra_body={"continue_final_message": True},
    )
    prompt = running.llm.tokenize_chat(HELLO) + running.llm.tokenize(half, add_bos=False)
    want = running.llm.generate(prompt, SamplingParams(max_tokens=8)).text
    assert answer.choices[0].message.content == want


def test_thirty_two_streams_at_once_are_each_what_they_are_alone(running: Running) -> None:
    prompts = [f"story {i} of {i * i}" for i in range(32)]
    want = [one.text for one in running.llm.generate(prompts, SamplingParams(max_tokens=24))]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=running.v1, api_key="none", max_retries=0) as client:

            async def one(prompt: str) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=prompt, max_tokens=24, stream=True
                )
                return "".join([piece.choices[0].text async for piece in stream])

            return await asyncio.gather(*map(one, prompts))

    assert asyncio.run(all_of_them()) == want


def test_models_are_listed_and_found_by_their_names(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny-spm"]
    assert client.models.retrieve("tiny-spm").id == "tiny-spm"
    assert client.models.retrieve("nimble").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="nowhere"):
        client.models.retrieve("nowhere")
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(model="tinyy", messages=HELLO)


# The older interface.


def test_a_text_is_continued_16_tokens_where_nothing_is_said(client: openai.OpenAI, running: Running) -> None:
    answer = client.completions.create(model="tiny", prompt="once upon")
    assert answer.choices[0].text == running.llm.generate("once upon", SamplingParams(max_tokens=16)).text
    pieces = client.completions.create(model="tiny", prompt="once upon", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def test_prompts_may_be_several_texts_or_tokens(client: openai.OpenAI, running: Running) -> None:
    a, b = running.llm.tokenize("once"), running.llm.tokenize("upon a")
    want = [one.text for one in running.llm.generate(["once", "upon a"], SamplingParams(max_tokens=6))]
    for prompt in (["once", "upon a"], [a, b]):
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=6)
        assert [choice.text for choice in answer.choices] == want
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(a) + len(b)
    assert client.completions.create(model="tiny", prompt=a, max_tokens=6).choices[0].text == want[0]
    pair = client.completions.create(model="tiny", prompt=["once", "upon a"], max_tokens=6, n=2)
    assert [choice.text for choice in pair.choices] == [want[0], want[0], want[1], want[1]]
    assert pair.usage is not None
    assert pair.usage.prompt_tokens == len(a) + len(b)


def test_echo_scores_the_prompt_as_evaluation_harnesses_need_it(
    client: openai.OpenAI, running: Running
) -> None:
    text = "once upon a time"
    tokens = running.llm.tokenize(text)
    answer = client.completions.create(
        model="tiny", prompt=tokens, max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    choice = answer.choices[0]
    assert choice.text == text
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    logits = running.llm.logits(tokens).astype("f8")
    for i in range(1, len(tokens)):
        row = logits[i - 1]
        want = row[tokens[i]] - row.max() - math.log(sum(math.e ** (row - row.max())))
        assert logprobs.token_logprobs[i] == pytest.approx(want, abs=1e-3)
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[i]) == 2
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        assert text[offset:].startswith(token)
    more = client.completions.create(model="tiny", prompt=tokens, max_tokens=3, echo=True, logprobs=0)
    plain = client.completions.create(model="tiny", prompt=tokens, max_tokens=3)
    assert more.choices[0].text == text + plain.choices[0].text
    assert more.choices[0].logprobs is not None
    assert len(more.choices[0].logprobs.tokens or []) == len(tokens) + 3
    pieces = list(
        client.completions.create(
            model="tiny", prompt=tokens, max_tokens=3, echo=True, logprobs=0, stream=True
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces) == more.choices[0].text
    offsets = [
        offset for p in pieces if p.choices[0].logprobs for offset in p.choices[0].logprobs.text_offset or []
    ]
    assert offsets == more.choices[0].logprobs.text_offset


def test_best_of_gives_the_likeliest_of_several(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.completions.create(
            model="tiny",
            prompt="once",
            max_tokens=6,
            temperature=1.0,
            seed=3,
            extra_body={"ignore_eos": True},
            **more,
        )

    every = ask(n=4, logprobs=0).choices
    mean = [sum(choice.logprobs.token_logprobs) / 6 for choice in every]
    best = ask(n=1, best_of=4)
    assert best.choices[0].text == every[mean.index(max(mean))].text
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == 24
