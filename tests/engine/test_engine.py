"""Many sequences at once, on a model whose text shows every paging mistake."""

import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.mock import EOS, ByteTokenizer, MockModel, continuation, mock_engine

from chabok.engine.engine import Engine
from chabok.engine.handle import Handle
from chabok.engine.request import Request, SamplingParams
from chabok.engine.stops import Text
from chabok.errors import RequestError, ResourceError
from chabok.models.batch import Batch


def request(text: str, *, salt: str = "", priority: int = 0, **params: object) -> Request:
    params.setdefault("max_tokens", 20)
    return Request(list(text.encode()), SamplingParams(**params), salt=salt, priority=priority)  # type: ignore[arg-type]


def alone(one: Request) -> list[int]:
    """What a request gives on an engine of its own."""
    return mock_engine(context=512).submit(one).result().tokens


def drain(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            return
        engine.step()
        engine.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[Request, int, int | None]]:
    """Requests with the steps before the next one comes, and after how many steps each is cancelled."""
    prefix = "shared beginning " * draw(st.integers(0, 12))
    found = []
    for i in range(draw(st.integers(1, 8))):
        text = (prefix if draw(st.booleans()) else "") + f"prompt {i} " + "x" * draw(st.integers(0, 200))
        one = request(
            text,
            max_tokens=draw(st.integers(0, 120)),
            temperature=draw(st.sampled_from([0, 0.8])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.2])),
            seed=i,
            priority=draw(st.integers(0, 1)),
        )
        found.append((one, draw(st.integers(0, 30)), draw(st.none() | st.integers(0, 30))))
    return found


@settings(max_examples=120, deadline=None)
@given(workloads(), st.integers(8, 24), st.sampled_from([8, 40, 128]), st.integers(1, 6))
def test_every_text_equals_the_one_computed_alone(
    workload: list[tuple[Request, int, int | None]], n_pages: int, max_rows: int, max_batch: int
) -> None:
    engine = mock_engine(context=512, n_pages=n_pages, max_batch=max_batch, max_rows=max_rows, budget_s=1e-9)
    handles: list[tuple[Handle, Request, int | None]] = []
    step = 0
    for one, pause, end in workload:
        handles.append((engine.submit(one), one, None if end is None else step + end))
        for _ in range(pause):
            for handle, _one, cancelled in handles:
                if cancelled == step:
                    handle.cancel()
            engine.step()
            engine.scheduler.check_integrity()
            step += 1
    drain(engine)
    for handle, one, _ in handles:
        completion = handle.result()
        want = alone(one)
        if completion.finish_reason == "cancelled":
            assert completion.tokens == want[: len(completion.tokens)]
        else:
            assert completion.tokens == want
        assert [token.id for token in handle] == completion.tokens
    assert engine.scheduler.pool.available == n_pages


@pytest.mark.parametrize("n_prompt", [1, 63, 64, 65, 128, 300])
@pytest.mark.parametrize("max_rows", [7, 64, 128])
def test_each_token_follows_from_all_tokens_before_it(n_prompt: int, max_rows: int) -> None:
    prompt = [(7 * i) % 120 for i in range(n_prompt)]
    handle = mock_engine(max_rows=max_rows, max_batch=4).submit(
        Request(prompt, SamplingParams(max_tokens=140))
    )
    assert handle.result().tokens == continuation(prompt, 140)


def test_generating_sequences_come_first_in_every_step() -> None:
    engine = mock_engine(max_rows=64)
    first = engine.submit(request("short", max_tokens=200))
    engine.step()
    engine.submit(request("long " * 100, max_tokens=5))
    model = engine.model
    assert isinstance(model, MockModel)
    model.steps.clear()
    while not first.done:
        engine.step()
    assert all(segments[0][1:] == (1, 1) for segments in model.steps)
    assert sum(len(segments) > 1 for segments in model.steps) >= 5


def test_while_one_stream_runs_a_long_prompt_is_cut_to_the_wall_clock_budget() -> None:
    engine = mock_engine(max_rows=128, row_s=0.001, budget_s=0.03, n_pages=128)
    first = engine.submit(request("x", max_tokens=900))
    for _ in range(10):
        engine.step()
    engine.submit(request("a long prompt " * 60, max_tokens=1))
    model = engine.model
    assert isinstance(model, MockModel)
    model.steps.clear()
    while sum(map(len, model.steps)) == len(model.steps) or len(model.steps[-1]) > 1:
        engine.step()
    chunks = [segments[1][1] for segments in model.steps if len(segments) > 1]
    assert sum(chunks) == 14 * 60
    # 30 ms at 1 ms a row leave 29 prompt rows; the first tries are smaller.
    assert max(chunks[3:]) <= 32
    assert min(chunks[3:-1]) >= 15
    assert not first.done


def test_with_nobody_generating_prompts_fill_the_step() -> None:
    engine = mock_engine(max_rows=100)
    engine.submit(request("p" * 250, max_tokens=1)).result()
    model = engine.model
    assert isinstance(model, MockModel)
    assert [segments[0][1] for segments in model.steps] == [100, 100, 50]
    assert [segments[0][2] for segments in model.steps] == [0, 0, 1]


def test_a_sequence_that_loses_its_pages_is_recomputed_to_the_same_text() -> None:
    engine = mock_engine(context=512, n_pages=8)
    requests = [request(f"number {i}", max_tokens=300, temperature=1, seed=i) for i in range(3)]
    handles = [engine.submit(one) for one in requests]
    drain(engine)
    assert sum(handle.result().timings.preemptions for handle in handles) > 0
    assert handles[0].result().timings.preemptions == 0
    for handle, one in zip(handles, requests, strict=True):
        assert handle.result().tokens == alone(one)


def test_higher_priority_is_served_first_and_equals_in_order_of_arrival() -> None:
    engine = mock_engine(max_batch=1)
    order: list[int] = []
    handles = []
    for i, priority in enumerate([0, 0, 5, 0, 5]):
        one = request(f"{i}", max_tokens=3, priority=priority)
        handles.append(engine.submit(one))
    while engine.has_work:
        engine.step()
        order += [i for i, handle in enumerate(handles) if handle.done and i not in order]
    assert order == [2, 4, 0, 1, 3]


def test_a_low_priority_prompt_goes_on_while_a_higher_one_waits_for_room() -> None:
    engine = mock_engine(context=512, n_pages=8, max_rows=16)
    low = engine.submit(request("l" * 400, max_tokens=2))
    engine.step()
    high = engine.submit(request("h" * 400, max_tokens=2, priority=9))
    drain(engine)
    assert low.result().finish_reason == high.result().finish_reason == "length"


# The prefix cache.


def test_a_prompt_seen_before_is_read_from_the_cache_but_for_its_last_token() -> None:
    engine = mock_engine()
    one = request("a long prompt, twice " * 20)
    first, second = engine.submit(one).result(), engine.submit(one).result()
    assert first.timings.cached_tokens == 0
    assert second.timings.cached_tokens == 419
    assert second.tokens == first.tokens


def test_at_least_one_token_is_computed_even_if_all_pages_are_known() -> None:
    engine = mock_engine()
    one = request("x" * 128, max_tokens=2)
    engine.submit(one).result()
    again = engine.submit(one).result()
    assert again.timings.cached_tokens == 127
    assert again.tokens == alone(one)


def test_an_answer_is_found_again_as_part_of_the_next_prompt() -> None:
    engine = mock_engine()
    prompt = list(b"turn one: ")
    answer = engine.submit(Request(prompt, SamplingParams(max_tokens=150))).result().tokens
    following = Request(prompt + answer + list(b"turn two"), SamplingParams(max_tokens=5))
    completion = engine.submit(following).result()
    assert completion.timings.cached_tokens == 159
    assert completion.tokens == alone(following)


def test_requests_that_come_together_compute_their_shared_prefix_once() -> None:
    engine = mock_engine(n_pages=128)
    requests = [request("the same system prompt " * 20 + str(i), max_tokens=4) for i in range(4)]
    handles = [engine.submit(one) for one in requests]
    drain(engine)
    assert [handle.result().timings.cached_tokens for handle in handles] == [0, 448, 448, 448]
    for handle, one in zip(handles, requests, strict=True):
        assert handle.result().tokens == alone(one)


def test_prefixes_are_not_shared_between_salts() -> None:
    engine = mock_engine()
    engine.submit(request("y" * 300, salt="one")).result()
    assert engine.submit(request("y" * 300, salt="two")).result().timings.cached_tokens == 0
    assert engine.submit(request("y" * 300, salt="one")).result().timings.cached_tokens == 299


def test_prefixes_are_evicted_from_their_end() -> None:
    engine = mock_engine(context=512, n_pages=8)
    engine.submit(request("z" * 400, max_tokens=1)).result()
    engine.submit(request("something else " * 20, max_tokens=1)).result()
    again = engine.submit(request("z" * 400, max_tokens=1)).result()
    assert again.timings.cached_tokens == 3 * 64


# Ends.


def test_the_model_s_end_token_stops_and_is_counted_but_not_shown() -> None:
    engine = mock_engine(eos_every=10)
    completion = engine.submit(request("1234567", max_tokens=100)).result()
    assert completion.finish_reason == "stop"
    assert completion.stopped_by == EOS
    assert completion.tokens[-1] == EOS
    assert len(completion.tokens) == completion.timings.output_tokens == 4


def test_ignore_eos_goes_on_to_the_limit() -> None:
    completion = mock_engine(eos_every=10).submit(request("1234567", max_tokens=30, ignore_eos=True)).result()
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 30
    assert EOS in completion.tokens


def test_min_tokens_keeps_the_end_away() -> None:
    completion = mock_engine(eos_every=10).submit(request("1234567", max_tokens=30, min_tokens=5)).result()
    assert len(completion.tokens) == 14


def test_a_stop_token_ends_and_a_stop_string_is_never_streamed() -> None:
    text = mock_engine().submit(request("stop here")).result().text
    token = text[6]
    end = text.index(token)
    by_token = mock_engine().submit(request("stop here", stop_token_ids=[ord(token)])).result()
    assert (by_token.text, by_token.finish_reason, by_token.stopped_by) == (text[:end], "stop", ord(token))
    handle = mock_engine().submit(request("stop here", stop=["zzz", text[5:8]]))
    streamed = "".join(one.text for one in handle)
    assert streamed == handle.result().text == text[: text.index(text[5:8])]
    assert handle.result().stopped_by == text[5:8]


def test_streamed_text_adds_up_when_the_end_cuts_a_possible_stop_string() -> None:
    text = mock_engine().submit(request("held", max_tokens=9)).result().text
    handle = mock_engine().submit(request("held", max_tokens=9, stop=text[-2:] + "\x00never"))
    assert "".join(one.text for one in handle) == text


def test_the_context_s_end_is_a_limit() -> None:
    engine = mock_engine(context=64, n_pages=4)
    completion = engine.submit(request("x" * 60, max_tokens=None)).result()
    assert completion.finish_reason == "length"
    assert len(completion.tokens) == 4


def test_too_long_a_prompt_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="the prompt has 64 tokens, but the context is 64 tokens"):
        mock_engine(context=64, n_pages=4).submit(request("x" * 64))


@pytest.mark.parametrize(("tokens", "says"), [([], "no tokens"), ([1, 320], "token id 320"), ([-1], "id -1")])
def test_a_prompt_that_is_no_prompt_is_refused(tokens: list[int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        mock_engine().submit(Request(tokens))


def test_too_small_a_cache_is_refused() -> None:
    with pytest.raises(ResourceError, match="a context of 1024 tokens needs 16 cache pages"):
        mock_engine(context=1024, n_pages=15)


def test_no_tokens_asked_for_means_none_made() -> None:
    completion = mock_engine().submit(request("x", max_tokens=0)).result()
    assert (completion.tokens, completion.text, completion.finish_reason) == ([], "", "length")


def test_a_deadline_ends_a_request_with_what_there_is() -> None:
    engine = mock_engine(row_s=0.002)
    one = request("hurry", max_tokens=900)
    one.deadline = time.perf_counter() + 0.05
    completion = engine.submit(one).result()
    assert completion.finish_reason == "deadline"
    assert 0 < len(completion.tokens) < 100
    engine.scheduler.check_integrity()


def test_cancelling_during_prefill_takes_effect_at_the_next_step() -> None:
    engine = mock_engine(max_rows=16)
    handle = engine.submit(request("long " * 100))
    engine.step()
    handle.cancel()
    engine.step()
    assert handle.result().finish_reason == "cancelled"
    assert handle.result().tokens == []
    assert not engine.has_work
    handle.cancel()
    engine.step()


# Failures.


def test_a_step_that_fails_fails_its_requests_and_no_others() -> None:
    engine = mock_engine(max_batch=2)
    handles = [engine.submit(request(f"{i}")) for i in range(3)]
    engine.step()

    def fail(batch: Batch) -> None:
        raise MemoryError("no room")

    model = engine.model
    assert isinstance(model, MockModel)
    model.before = fail
    engine.step()
    model.before = lambda batch: None
    for handle in handles[:2]:
        with pytest.raises(MemoryError, match="no room"):
            handle.result()
    assert handles[2].result().tokens == alone(request("2"))
    engine.scheduler.check_integrity()


def test_a_fault_in_one_sequence_s_text_leaves_the_others_alone() -> None:
    engine = mock_engine()
    bad, good = engine.submit(request("bad")), engine.submit(request("good"))
    engine.step()

    class Broken(Text):
        def push(self, token: int) -> str:
            raise ValueError("no such token")

    sequence = next(one for one in engine.scheduler.active if one.handle is bad)
    sequence.text = Broken(ByteTokenizer().stream(), [])
    with pytest.raises(ValueError, match="no such token"):
        bad.result()
    assert good.result().tokens == alone(request("good"))
    engine.scheduler.check_integrity()


def test_a_fault_of_the_scheduler_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = mock_engine(max_batch=1)
    engine.start()

    def broken() -> Batch:
        raise AssertionError("a fault")

    monkeypatch.setattr(engine.scheduler, "plan", broken)
    for handle in [engine.submit(request("x")) for _ in range(3)]:
        with pytest.raises(AssertionError, match="a fault"):
            handle.result()
    monkeypatch.undo()
    assert engine.submit(request("y")).result().tokens == alone(request("y"))
    engine.close()


def test_closing_fails_what_has_not_ended_and_refuses_what_comes_after() -> None:
    engine = mock_engine()
    handle = engine.submit(request("x"))
    engine.step()
    engine.close()
    engine.close()
    with pytest.raises(RequestError, match="closed before"):
        handle.result()
    with pytest.raises(RequestError, match="was closed"):
        engine.submit(request("y"))
    model = engine.model
    assert isinstance(model, MockModel)
    assert model.closed


def test_an_interrupt_comes_between_steps_and_the_engine_stays_usable() -> None:
    import signal

    engine = mock_engine()
    model = engine.model
    assert isinstance(model, MockModel)
    one = request("interrupted", max_tokens=50)
    handle = engine.submit(one)

    def interrupt(batch: Batch) -> None:
        if len(model.steps) == 5:
            signal.raise_signal(signal.SIGINT)

    model.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    engine.scheduler.check_integrity()
    assert handle.result().tokens == alone(one)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_forked_child_is_told_that_the_model_is_its_parent_s() -> None:
    engine = mock_engine()
    engine._pid = os.getpid() + 1
    with pytest.raises(RequestError, match="forked"):
        engine.submit(request("x"))


# Threads.


@pytest.mark.parametrize("background", [False, True])
def test_threads_that_wait_together_all_get_their_own_text(background: bool) -> None:
    engine = mock_engine(n_pages=128)
    if background:
        engine.start()
    requests = [request(f"thread {i}", max_tokens=40 + i) for i in range(8)]
    found: dict[int, list[int]] = {}

    def work(i: int) -> None:
        found[i] = [token.id for token in engine.submit(requests[i])]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[i] for i in range(8)] == [alone(one) for one in requests]
    engine.close()


def test_an_idle_engine_uses_no_cpu() -> None:
    engine = mock_engine()
    engine.start()
    engine.submit(request("x")).result()
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02
    engine.close()


def test_closing_wakes_a_thread_that_waits() -> None:
    engine = mock_engine(row_s=0.01)
    engine.start()
    handle = engine.submit(request("x", max_tokens=1000))
    threading.Timer(0.1, engine.close).start()
    with pytest.raises(RequestError, match="closed"):
        handle.result()


def test_a_step_costs_little_python() -> None:
    engine = mock_engine(n_pages=64)
    model = engine.model
    assert isinstance(model, MockModel)
    spent = 0.0
    forward = model.forward

    def timed(batch: Batch) -> object:
        nonlocal spent
        start = time.perf_counter()
        logits = forward(batch)
        spent += time.perf_counter() - start
        return logits

    model.forward = timed  # type: ignore[method-assign, assignment]
    handle = engine.submit(request("x", max_tokens=1000, ignore_eos=True))
    start = time.perf_counter()
    n = sum(1 for _ in handle)
    # Some 12 us on an idle machine; the bound leaves room for a busy one.
    assert (time.perf_counter() - start - spent) / n < 300e-6
