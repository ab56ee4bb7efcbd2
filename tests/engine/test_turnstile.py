"""Engines that share a process."""

import threading
import time
from itertools import pairwise

from tests.engine.mock import MockModel, mock_engine

from chabok.engine.engine import Engine
from chabok.engine.request import Request, SamplingParams
from chabok.engine.turnstile import TURNS, Turnstile
from chabok.models.batch import Batch


def request(text: str, n: int) -> Request:
    return Request(list(text.encode()), SamplingParams(max_tokens=n))


def watched(engine: Engine, before: object) -> None:
    model = engine.model
    assert isinstance(model, MockModel)
    model.before = before  # type: ignore[assignment]


def test_engines_never_compute_at_once_and_take_turns() -> None:
    engines = [mock_engine(row_s=0.0005) for _ in range(2)]
    inside: list[int] = []
    order: list[int] = []

    def watch(i: int) -> None:
        def before(batch: Batch) -> None:
            assert not inside
            inside.append(i)
            time.sleep(0.0005)
            order.append(i)
            inside.clear()

        watched(engines[i], before)

    handles = []
    for i, engine in enumerate(engines):
        watch(i)
        engine.start()
        handles.append(engine.submit(request("x", 100)))
    texts = [handle.result().tokens for handle in handles]
    assert texts[0] == texts[1]
    both = order[order.index(1 - order[0]) :]
    both = both[: len(both) - both[::-1].index(1 - both[-1])]
    changes = sum(a != b for a, b in pairwise(both))
    assert changes > 0.8 * len(both)
    for engine in engines:
        engine.close()


def test_a_long_prompt_of_one_engine_does_not_hold_up_the_streams_of_another() -> None:
    streaming, reading = mock_engine(row_s=0.0005), mock_engine(row_s=0.0005, max_rows=512)
    streaming.start()
    reading.start()
    stream = streaming.submit(request("x", 1000))
    reading.submit(request("to learn the pace " * 20, 1)).result()
    while stream.done or len(stream.tokens) < 20:
        time.sleep(0.001)
    reading.submit(request("long " * 200, 1)).result()
    assert not stream.done
    stream.cancel()
    # Alone, the 1000 rows would come in two steps of 250 ms.
    assert stream.result().timings.worst_gap_s < 0.15
    streaming.close()
    reading.close()
    assert not TURNS.streaming & {id(streaming), id(reading)}


def test_a_turnstile_lets_in_those_who_wait_in_their_order() -> None:
    turns, order = Turnstile(), []
    threads = []
    with turns:
        for i in range(5):

            def enter(i: int = i) -> None:
                with turns:
                    order.append(i)

            threads.append(threading.Thread(target=enter))
            threads[-1].start()
            while len(turns._queue) <= i:
                time.sleep(0.001)
        assert turns.contended
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    assert not turns.contended


def test_a_failed_step_leaves_the_turn_to_others() -> None:
    bad, good = mock_engine(), mock_engine()

    def fail(batch: Batch) -> None:
        raise MemoryError("no room")

    watched(bad, fail)
    handle = bad.submit(request("x", 3))
    bad.step()
    assert isinstance(handle.error, MemoryError)
    assert len(good.submit(request("x", 3)).result().tokens) == 3
