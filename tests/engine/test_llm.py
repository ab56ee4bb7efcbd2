import asyncio
import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from tests.engine.mock import ByteTokenizer, MockModel, PlainTemplate

from chabok import LLM, AsyncLLM, SamplingParams
from chabok.engine.load import Loaded, Options, OptionValues, cache_pages, context_for
from chabok.errors import RequestError, SourceError

SHORT = SamplingParams(max_tokens=12)


def mock_llm(**model: float) -> LLM:
    return LLM.of(
        Loaded(MockModel(**model), ByteTokenizer(), PlainTemplate, Options(context=512))  # type: ignore[arg-type]
    )


@pytest.fixture
def llm() -> Iterator[LLM]:
    with mock_llm() as one:
        yield one


def test_one_prompt_gives_one_completion_and_a_list_a_list(llm: LLM) -> None:
    one = llm.generate("Hello", SHORT)
    assert len(one.tokens) == 12
    assert one.finish_reason == "length"
    assert one.text == llm.detokenize(one.tokens)
    many = llm.generate(["Hello", list(b"Hello"), "Other"], SHORT)
    assert [each.text for each in many[:2]] == [one.text, one.text]
    assert many[2].text != one.text
    assert llm.generate(np.array(list(b"Hello")), SHORT).text == one.text  # type: ignore[call-overload]
    assert llm.generate([], SHORT) == []


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    found = llm.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)])
    assert [len(one.tokens) for one in found] == [1, 2]
    with pytest.raises(RequestError, match="2 prompts, but 1 params"):
        llm.generate(["a", "b"], [SHORT])


def test_a_stream_yields_the_text_piece_by_piece(llm: LLM) -> None:
    stream = llm.stream("Hello", SamplingParams(max_tokens=12, logprobs=2))
    tokens = list(stream)
    assert "".join(token.text for token in tokens) == stream.completion.text
    assert [token.id for token in tokens] == stream.completion.tokens
    assert [token.logprob for token in tokens] == stream.completion.logprobs
    assert all(len(token.top) == 2 for token in tokens)
    assert tokens[0].top[0] == (tokens[0].id, tokens[0].logprob)


def test_streams_of_several_prompts_can_be_read_in_any_order(llm: LLM) -> None:
    want = [one.text for one in llm.generate(["a", "b", "c"], SHORT)]
    streams = llm.generate(["a", "b", "c"], SHORT, stream=True)
    texts = ["", "", ""]
    for _ in range(12):
        for i, stream in enumerate(streams):
            texts[i] += next(stream).text
    assert texts == want


def test_leaving_a_stream_ends_it(llm: LLM) -> None:
    with llm.generate("Hello", SamplingParams(max_tokens=400), stream=True) as stream:
        first = [next(stream).text for _ in range(3)]
    assert stream.completion.finish_reason == "cancelled"
    assert stream.completion.text.startswith("".join(first))
    assert not llm.engine.scheduler.active


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = llm.generate("<user>hi\n<assistant>", SHORT)
    assert llm.chat(messages, SHORT).text == plain.text
    assert "".join(token.text for token in llm.chat(messages, SHORT, stream=True)) == plain.text


def test_a_stream_that_nobody_holds_ends(llm: LLM) -> None:
    for token in llm.stream("Hello", SamplingParams(max_tokens=400)):
        if token.id:
            break
    gc.collect()
    llm.generate("Other", SHORT)
    assert not llm.engine.scheduler.active


def test_an_async_stream_that_nobody_holds_ends() -> None:
    async def main() -> int:
        async with AsyncLLM.of(mock_llm()) as llm:
            async for _ in await llm.stream("Hello", SamplingParams(max_tokens=400)):
                break
            gc.collect()
            await llm.generate("Other", SHORT)
            return len(llm.llm.engine.scheduler.active)

    assert asyncio.run(main()) == 0


@pytest.mark.parametrize("messages", ["hi", ["hi"], [3], None, 3])
def test_chat_refuses_what_is_no_conversation(llm: LLM, messages: list[str]) -> None:
    with pytest.raises(RequestError, match="messages must be a list such as"):
        llm.chat(messages)  # type: ignore[call-overload]


@pytest.mark.parametrize("prompt", [3, None, [1.5], [[1.5]], [None], {"a": 1}, b"abc"])
def test_generate_refuses_what_is_no_prompt(llm: LLM, prompt: object) -> None:
    with pytest.raises(RequestError, match="a prompt must be text or"):
        llm.generate(prompt)  # type: ignore[call-overload]
    assert not llm.engine.has_work or llm.generate("x", SHORT)


def test_what_is_no_text_no_tokens_and_no_params_is_refused(llm: LLM) -> None:
    for call in (
        lambda: llm.tokenize(b"x"),  # type: ignore[arg-type]
        lambda: llm.detokenize("ab"),  # type: ignore[arg-type]
        lambda: llm.generate(["a", "b"], [SHORT, 3]),  # type: ignore[list-item]
        lambda: llm.generate(["a", "b"], 3),  # type: ignore[call-overload]
        lambda: SamplingParams(stop=3),  # type: ignore[arg-type]
        lambda: SamplingParams(logit_bias=3),  # type: ignore[arg-type]
        lambda: Options(budget_s="x"),  # type: ignore[arg-type]
        lambda: LLM(None),  # type: ignore[arg-type]
        lambda: LLM(b"smollm2"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RequestError, match="must be"):
            call()


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        LLM(tmp_path / "model.gguf")


def test_logits_come_for_every_position_also_in_chunks() -> None:
    text = "many rows " * 30
    with mock_llm(max_rows=64) as llm, mock_llm(max_rows=128) as other:
        found = llm.logits(text)
        assert found.shape == (300, 320)
        assert found.dtype == np.float32
        assert np.array_equal(found, other.logits(text))
        assert int(found[-1].argmax()) == llm.generate(text, SHORT).tokens[0]
        assert np.array_equal(llm.logits(text), found), "cached pages must not hide rows"


def test_timings_tell_the_stages(llm: LLM) -> None:
    timings = llm.generate("Hello" * 30, SHORT).timings
    assert timings.prompt_tokens == 150
    assert timings.output_tokens == 12
    assert 0 < timings.first_token_s < timings.total_s
    parts = timings.tokenize_s + timings.queue_s + timings.prefill_s + timings.decode_s
    assert parts == pytest.approx(timings.total_s, rel=0.3, abs=0.005)


def test_options_are_checked_by_name() -> None:
    with pytest.raises(RequestError, match="threads must be an integer of at least 1, not 0"):
        Options(threads=0)
    with pytest.raises(RequestError, match="threads must be at most 1024, not 65536"):
        Options(threads=65536)
    with pytest.raises(RequestError, match="budget_s"):
        Options(budget_s=0)
    with pytest.raises(RequestError, match="made for 2048 at most"):
        context_for(2048, 4096)
    assert context_for(131072, None) == 8192
    assert context_for(2048, None) == 2048


def test_the_cache_holds_what_was_asked_for() -> None:
    assert cache_pages(1000, 640, Options(kv_memory=20_000)) == 20
    with pytest.raises(RequestError, match=r"9\.0 kB, but a context of 640 tokens takes 10\.0 kB"):
        cache_pages(1000, 640, Options(kv_memory=9000))
    assert cache_pages(1000, 640, Options()) == 40
    assert cache_pages(2**50, 640, Options()) == 10


# asyncio.


def test_async_answers_equal_the_synchronous_ones() -> None:
    prompts = [f"prompt {i}" for i in range(10)]
    with mock_llm() as plain:
        want = [one.text for one in plain.generate(prompts, SHORT)]
        chat = plain.chat([{"role": "user", "content": "hi"}], SHORT).text

    async def run() -> None:
        async with AsyncLLM.of(mock_llm()) as llm:
            assert [one.text for one in await llm.generate(prompts, SHORT)] == want
            assert (await llm.generate(prompts[0], SHORT)).text == want[0]
            assert (await llm.chat([{"role": "user", "content": "hi"}], SHORT)).text == chat

            async def streamed(prompt: str) -> str:
                return "".join([token.text async for token in await llm.stream(prompt, SHORT)])

            assert await asyncio.gather(*map(streamed, prompts)) == want

    asyncio.run(run())


def test_cancelling_a_task_ends_its_request() -> None:
    async def run() -> None:
        async with AsyncLLM.of(mock_llm(row_s=0.002)) as llm:
            task = asyncio.create_task(llm.generate("x", SamplingParams(max_tokens=500)))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for _ in range(100):
                if not llm.llm.engine.has_work:
                    break
                await asyncio.sleep(0.01)
            assert not llm.llm.engine.has_work

    asyncio.run(run())


def test_async_errors_reach_the_caller() -> None:
    async def run() -> None:
        async with AsyncLLM.of(mock_llm(row_s=0.002)) as llm:
            with pytest.raises(RequestError, match="the prompt has more than 512 tokens"):
                await llm.generate(["ok", "x" * 600], SHORT)
            async with await llm.stream("x", SamplingParams(max_tokens=400)) as stream:
                assert (await anext(stream)).text is not None
            assert (await stream.completion()).finish_reason == "cancelled"

    asyncio.run(run())


def test_a_stream_can_be_iterated_awaited_or_entered() -> None:
    messages = [{"role": "user", "content": "hi"}]

    async def run() -> None:
        async with AsyncLLM.of(mock_llm(row_s=0.0005)) as llm:
            want = (await llm.generate("Hello", SHORT)).text
            assert "".join([token.text async for token in llm.stream("Hello", SHORT)]) == want
            assert (await (await llm.stream("Hello", SHORT)).completion()).text == want
            async with llm.stream("Hello", SamplingParams(max_tokens=400)) as stream:
                assert want.startswith((await anext(stream)).text)
            assert (await stream.completion()).finish_reason == "cancelled"
            chat = (await llm.chat(messages, SHORT)).text
            assert "".join([token.text async for token in llm.chat(messages, SHORT, stream=True)]) == chat
            with pytest.raises(RequestError, match="more than 512 tokens"):
                async for _ in llm.stream("x" * 600):
                    pass

    asyncio.run(run())


def test_an_iteration_that_is_left_ends_its_stream() -> None:
    async def run() -> None:
        async with AsyncLLM.of(mock_llm(row_s=0.001)) as llm:
            async for _ in llm.stream("Hello", SamplingParams(max_tokens=400)):
                break
            gc.collect()
            await llm.generate("Other", SHORT)
            assert llm.llm.engine.stats.finished["cancelled"] == 1

    asyncio.run(run())


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(RequestError, match="no option 'max_batches'; did you mean max_batch"):
            kind("smollm2", max_batches=3)  # type: ignore[call-arg]
    assert set(get_type_hints(OptionValues)) == {item.name for item in dataclasses.fields(Options)}
    assert all(item.name in (LLM.__doc__ or "") for item in dataclasses.fields(Options))


def test_many_prompts_of_one_caller_are_not_too_many_for_the_queue() -> None:
    with mock_llm() as llm:
        llm.engine.max_queue = 2
        params = SamplingParams(max_tokens=1)
        assert len(llm.generate([f"{i}" for i in range(100)], params)) == 100
