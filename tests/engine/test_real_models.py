"""The engine on real kernels: tiny random models, and every text equal to the one computed alone."""

import numpy as np
import pytest
from tests.fixtures import FIXTURES, expected, fixture_path

from chabok import LLM, SamplingParams


@pytest.mark.parametrize("name", FIXTURES)
def test_batches_prefixes_and_preemption_leave_every_text_as_it_is(name: str) -> None:
    rng = np.random.default_rng(1)
    with LLM(str(fixture_path(name)), pack=False, threads=1, context=384) as llm:
        vocab = llm.engine.model.vocab_size
        shared = rng.integers(0, vocab, 150).tolist()
        prompts = [(shared if i % 2 else []) + rng.integers(0, vocab, 5 + 40 * i).tolist() for i in range(4)]
        params = [
            SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8 * (i > 1), seed=i)
            for i in range(4)
        ]
        alone = []
        for prompt, each in zip(prompts, params, strict=True):
            llm.engine.scheduler.pool.clear()
            alone.append(llm.generate(prompt, each).tokens)
        again = [llm.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True)]
        assert [one.tokens for one in again] == alone
        assert again[3].timings.cached_tokens >= 128
    page_bytes = llm.engine.model.page_bytes
    with LLM(str(fixture_path(name)), pack=False, threads=1, context=384, kv_memory=8 * page_bytes) as small:
        together = small.generate(prompts, params)
        assert [one.tokens for one in together] == alone
        assert sum(one.timings.preemptions for one in together) > 0
        small.engine.scheduler.check_integrity()


def test_logits_are_those_of_the_reference() -> None:
    tokens, want = expected("llama")
    with LLM(str(fixture_path("llama")), pack=False, threads=1) as llm:
        got = llm.logits(tokens.tolist())
    assert got.shape == want.shape
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()
