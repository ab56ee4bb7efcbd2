"""Who goes first, and what nobody has to suffer for it; on a model whose text shows every paging mistake."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.mock import MockModel, mock_engine

from chabok.engine.engine import Engine
from chabok.engine.handle import Handle
from chabok.engine.request import Request, SamplingParams
from chabok.errors import BusyError, RequestError, StoppingError


def request(text: str, client: str = "", *, priority: int = 0, n: int = 8) -> Request:
    return Request(list(text.encode()), SamplingParams(max_tokens=n), client=client, priority=priority)


def alone(one: Request) -> list[int]:
    return mock_engine(context=512).submit(Request(one.prompt, one.params)).result().tokens


def steps(engine: Engine, n: int = 100_000) -> None:
    for _ in range(n):
        if not engine.has_work:
            return
        engine.step()
        engine.scheduler.check_integrity()


def order_of_ends(engine: Engine, handles: dict[str, Handle]) -> list[str]:
    ended: list[str] = []
    while engine.has_work:
        engine.step()
        ended += [name for name, handle in handles.items() if handle.done and name not in ended]
    return ended


# Clients.


def test_a_client_with_a_hundred_requests_does_not_hold_up_another_s_one() -> None:
    engine = mock_engine(max_batch=2)
    many = [engine.submit(request(f"many {i}", "many")) for i in range(100)]
    for _ in range(20):
        engine.step()
    before = sum(handle.done for handle in many)
    one = engine.submit(request("one", "one"))
    while not one.done:
        engine.step()
    assert sum(handle.done for handle in many) - before <= 3
    steps(engine)
    assert one.result().tokens == alone(request("one"))
    assert all(handle.result().tokens == alone(request(f"many {i}")) for i, handle in enumerate(many))


def test_two_clients_that_always_ask_get_the_same_work_done() -> None:
    """One asks for long texts, one for short ones; shares are of work, not of requests."""
    engine = mock_engine(max_batch=1, context=1024)
    sizes = {"long": (200, 100), "short": (20, 10)}
    handles: dict[str, list[Handle]] = {name: [] for name in sizes}
    for i in range(60):
        for name, (n_prompt, n) in sizes.items():
            for _ in range(1 if name == "long" else 10):
                one = request(f"{i} {len(handles[name])}".ljust(n_prompt, "x"), name, n=n)
                handles[name].append(engine.submit(one, bounded=False))
    for _ in range(3000):
        engine.step()
    done = {name: sum(handle.done for handle in handles[name]) * sum(sizes[name]) for name in sizes}
    assert min(done.values()) > 2000
    assert done["long"] / done["short"] == pytest.approx(1, rel=0.25)


def test_idle_clients_save_nothing_up() -> None:
    engine = mock_engine(max_batch=1)
    busy = [engine.submit(request(f"busy {i}", "busy")) for i in range(30)]
    while not busy[9].done:
        engine.step()
    late = [engine.submit(request(f"late {i}", "late")) for i in range(10)]
    while not late[9].done:
        engine.step()
    # Both want everything from then on, so neither gets more than half.
    assert sum(handle.done for handle in busy) == pytest.approx(20, abs=2)


def test_clients_are_forgotten_when_they_have_gone() -> None:
    engine = mock_engine()
    engine.submit(request("one that stays", "stays", n=900))
    for i in range(300):
        engine.submit(request("x", f"client {i}", n=2))
        steps(engine, 2)
    assert len(engine.scheduler.shares._clients) < 100
    steps(engine)
    assert len(engine.scheduler.shares._clients) == 0


def test_a_full_house_yields_to_a_client_that_has_nothing_at_work() -> None:
    engine = mock_engine(max_batch=4)
    many = [engine.submit(request(f"many {i}", "many", n=300)) for i in range(4)]
    steps(engine, 10)
    one = engine.submit(request("one", "one", n=3))
    steps(engine, 4)
    assert one.done
    steps(engine)
    assert sorted(handle.result().timings.preemptions for handle in many) == [0, 0, 0, 1]
    assert all(handle.result().tokens == alone(request(f"many {i}", n=300)) for i, handle in enumerate(many))


def test_the_only_stream_of_a_client_is_not_stopped_for_another_client_s_sake() -> None:
    engine = mock_engine(max_batch=2)
    running = [engine.submit(request(name, name, n=400)) for name in "ab"]
    steps(engine, 10)
    later = [engine.submit(request(name, name, n=2)) for name in "cdef"]
    steps(engine)
    assert all(handle.result().timings.preemptions == 0 for handle in (*running, *later))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 150), st.integers(1, 60)), max_size=25))
def test_nobody_starves(asked: list[tuple[str, int, int]]) -> None:
    """A patient client's one request ends although others go on asking all the time."""
    engine = mock_engine(context=512, n_pages=10, max_batch=3, max_rows=64)
    patient = engine.submit(request("p" * 200, "patient", n=50))
    for i in range(2000):
        if patient.done:
            break
        client, n_prompt, n = asked[i % len(asked)] if asked else ("a", 1, 1)
        if engine.queue.waiting < 6:
            engine.submit(request(f"{i}".ljust(n_prompt, "x"), client, n=n))
        engine.step()
    assert patient.done
    assert patient.result().tokens == alone(request("p" * 200, n=50))


# Priorities and deadlines.


def test_a_higher_priority_takes_the_place_of_a_lower_one_that_comes_back_later() -> None:
    engine = mock_engine(max_batch=2)
    low = [engine.submit(request(f"low {i}", n=200)) for i in range(2)]
    steps(engine, 5)
    high = engine.submit(request("high", n=4, priority=1))
    steps(engine, 5)
    assert high.done
    assert not any(handle.done for handle in low)
    steps(engine)
    assert [handle.result().timings.preemptions for handle in low] == [0, 1]
    assert all(handle.result().tokens == alone(request(f"low {i}", n=200)) for i, handle in enumerate(low))


def test_pages_are_taken_from_the_lowest_priority_and_texts_stay_right() -> None:
    engine = mock_engine(context=512, n_pages=8, max_batch=4)
    asked = [request(f"number {i}", n=300, priority=i) for i in range(3)]
    handles = [engine.submit(one) for one in asked]
    steps(engine)
    preempted = [handle.result().timings.preemptions for handle in handles]
    assert preempted[2] == 0
    assert preempted[0] > 0
    assert engine.stats.preemptions == sum(preempted)
    for handle, one in zip(handles, asked, strict=True):
        assert handle.result().tokens == alone(one)


def test_the_earliest_deadline_of_a_client_goes_first() -> None:
    engine = mock_engine(max_batch=1)
    now = time.perf_counter()
    handles = {}
    for name, seconds in [("running", None), ("never", None), ("late", 900), ("soon", 300), ("later", 950)]:
        one = request(name, n=5)
        one.deadline = None if seconds is None else now + seconds
        handles[name] = engine.submit(one)
        engine.step()
    assert order_of_ends(engine, handles) == ["running", "soon", "late", "later", "never"]


def test_deadlines_do_not_let_a_client_pass_another() -> None:
    engine = mock_engine(max_batch=1)
    handles = {}
    for i in range(4):
        one = request(f"hurried {i}", "hurried", n=20)
        one.deadline = time.perf_counter() + 100
        handles[f"hurried {i}"] = engine.submit(one)
    handles["plain"] = engine.submit(request("plain    ", "plain", n=20))
    assert order_of_ends(engine, handles).index("plain") <= 1


@pytest.mark.parametrize("where", ["waiting", "reading"])
def test_a_deadline_passes_also_for_one_that_has_no_token_yet(where: str) -> None:
    engine = mock_engine(max_batch=1 if where == "waiting" else 4, max_rows=8, row_s=0.001)
    engine.submit(request("first", n=100))
    steps(engine, 3)
    one = request("x" * 900, n=10)
    one.deadline = time.perf_counter() + 0.05
    handle = engine.submit(one)
    started = time.perf_counter()
    while not handle.done:
        engine.step()
    assert time.perf_counter() - started < 0.7  # it would have taken longer than a second
    completion = handle.result()
    assert (completion.finish_reason, completion.tokens) == ("deadline", [])
    engine.scheduler.check_integrity()


# The queue.


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    engine = mock_engine(max_batch=2, row_s=0.0002)
    engine.max_queue = 3
    handles = [engine.submit(request(f"{i}", n=100)) for i in range(5)]
    with pytest.raises(BusyError, match="the queue holds 3; try again in 1 s") as caught:
        engine.submit(request("one too many"))
    assert caught.value.retry_after_s == 1
    assert engine.queue[:2] == (0, 5)
    steps(engine)
    assert all(handle.result().finish_reason == "length" for handle in handles)
    assert (engine.stats.rejected, engine.stats.submitted) == (1, 5)
    engine.submit(request("welcome again")).result()


def test_the_wait_is_foretold_from_the_speed_measured() -> None:
    engine = mock_engine(max_batch=1, row_s=0.0005, context=2048)
    assert engine.expected_wait_s() == 0
    engine.submit(request("to measure by" * 10, n=100)).result()
    assert engine.expected_wait_s() == 0
    for i in range(5):
        engine.submit(request(f"{i}" * 100, n=100))
    steps(engine, 1)
    foretold, started = engine.expected_wait_s(), time.perf_counter()
    last = engine.submit(request("last", n=1))
    while not last.done:
        engine.step()
    assert 0.3 * foretold < time.perf_counter() - started < 4 * foretold


def test_draining_ends_what_is_there_and_takes_no_more() -> None:
    engine = mock_engine(row_s=0.0005)
    engine.start()
    handle = engine.submit(request("x", n=50))
    assert engine.drain(10)
    assert handle.result().finish_reason == "length"
    with pytest.raises(StoppingError, match="takes no more"):
        engine.submit(request("y"))
    engine.close()


@pytest.mark.parametrize("thread", [True, False])
def test_draining_gives_back_what_takes_too_long(thread: bool) -> None:
    engine = mock_engine(row_s=0.001, max_batch=1)
    if thread:
        engine.start()
    handles = [engine.submit(request("x", n=1000)) for _ in range(2)]
    started = time.perf_counter()
    assert not engine.drain(0.1)
    assert time.perf_counter() - started < 1.5  # both would have taken two seconds
    for handle in handles:
        with pytest.raises(StoppingError, match=r"stopped 0\.1 s after"):
            handle.result()
    assert engine.queue == (0, 0, 0)
    engine.close()


# Log probabilities of the prompt.


def test_prompt_log_probabilities_equal_those_of_the_logits_whatever_the_chunks() -> None:
    import numpy as np

    text = "how likely is this text? " * 10
    engine = mock_engine(max_rows=128)
    plain = request(text, n=0)
    plain.prompt_logits = True
    handle = engine.submit(plain)
    handle.result()
    logits = np.concatenate(handle.prompt_logits).astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for max_rows in (1, 7, 64, 128):
        engine = mock_engine(max_rows=max_rows)
        engine.submit(request(text)).result()
        one = request(text, n=3)
        one.prompt_logprobs = 3
        completion = engine.submit(one).result()
        assert completion.tokens == alone(request(text, n=3))
        found, best = completion.prompt_logprobs, completion.prompt_top_logprobs
        assert found is not None
        assert best is not None
        assert found[0] is None
        assert best[0] == ()
        assert len(found) == len(best) == len(one.prompt)
        want = [logs[i, token] for i, token in enumerate(one.prompt[1:])]
        assert found[1:] == pytest.approx(want, abs=1e-5)
        for i, top in enumerate(best[1:]):
            assert [token for token, _ in top] == np.argsort(-logits[i], kind="stable")[:3].tolist()
        model = engine.model
        assert isinstance(model, MockModel)
        assert max(outputs for segments in model.steps for _, _, outputs in segments) <= 64


def test_prompt_log_probabilities_survive_the_loss_of_pages() -> None:
    engine = mock_engine(context=512, n_pages=8, max_batch=3, max_rows=16)
    one = request("q" * 300, n=100)
    one.prompt_logprobs = 1
    want = mock_engine(context=512).submit(one).result()
    handle = engine.submit(one)
    steps(engine, 10)
    engine.submit(request("h" * 300, n=2, priority=1))
    steps(engine)
    completion = handle.result()
    assert completion.timings.preemptions == 1
    assert completion.prompt_logprobs == want.prompt_logprobs
    assert completion.prompt_top_logprobs == want.prompt_top_logprobs
    assert completion.tokens == want.tokens


def test_too_many_prompt_log_probabilities_are_refused_by_name() -> None:
    one = request("x")
    one.prompt_logprobs = 1001
    with pytest.raises(RequestError, match="prompt_logprobs must be from 0 to 1000, not 1001"):
        mock_engine().submit(one)
