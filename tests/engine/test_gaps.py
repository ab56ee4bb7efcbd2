"""Streams of a real model beside long prompts; to be run on an idle machine."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chabok import LLM, SamplingParams
from chabok.engine.request import Request

pytestmark = pytest.mark.wide

BUDGET_S = 0.03


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    place = os.environ.get("CHABOK_TEST_MODELS")
    if not place:
        pytest.skip("CHABOK_TEST_MODELS names no folder with smollm2.gguf")
    # Room for all of them, so that nobody loses pages.
    with LLM(Path(place) / "smollm2.gguf", context=8192, budget_s=BUDGET_S, kv_memory=1200 << 20) as one:
        one.engine.start()
        yield one


@pytest.mark.parametrize(("n_streams", "n_prompts"), [(1, 1), (8, 4)])
def test_long_prompts_leave_streams_no_gap_of_twice_the_budget(
    llm: LLM, n_streams: int, n_prompts: int
) -> None:
    engine, rng = llm.engine, random.Random(n_streams)

    def ask(n_prompt: int, n: int) -> Request:
        ids = [rng.randrange(1000, 40_000) for _ in range(n_prompt)]
        return Request(ids, SamplingParams(max_tokens=n, ignore_eos=True))

    engine.submit(ask(500, 1)).result()
    streams = [engine.submit(ask(30, 5000)) for _ in range(n_streams)]
    while any(len(stream.tokens) < 20 for stream in streams):
        time.sleep(0.01)
    for prompt in [engine.submit(ask(4000, 1)) for _ in range(n_prompts)]:
        prompt.result()
    assert not any(stream.done for stream in streams)
    for stream in streams:
        stream.cancel()
    worst = max(stream.result().timings.worst_gap_s for stream in streams)
    # The first gaps are those of the other streams' own prompts, and count as well.
    assert worst < 2 * BUDGET_S, f"{1000 * worst:.0f} ms"
