"""The sampler against a plain numpy definition of what it should do."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from chabok.engine.request import SamplingParams
from chabok.engine.sampler import Sampler, Uniforms, pick
from chabok.errors import CheckpointError
from chabok.models.batch import BLOCK, RUN, Logits, best_first, block_maxima

Array = NDArray[np.float64]


def expected(row: NDArray[np.float32], params: SamplingParams) -> Array:
    """Probabilities by definition: sort everything, cut, renormalise, cut again."""
    logits = row.astype(np.float64)
    order = np.lexsort((np.arange(len(row)), -logits))

    def shares() -> Array:
        weights = np.exp(logits[order] - logits[order[0]])
        return weights / weights.sum()

    if params.top_k:
        order = order[: params.top_k]
    if params.typical_p < 1:
        p = shares()
        surprise = -np.log(np.maximum(p, 1e-300))
        nearest = np.argsort(np.abs(surprise - (p * surprise).sum()), kind="stable")
        n = np.searchsorted(np.cumsum(p[nearest]), params.typical_p) + 1
        order = order[np.sort(nearest[:n])]
    if params.top_p < 1:
        order = order[: np.searchsorted(np.cumsum(shares()), params.top_p) + 1]
    if params.min_p > 0:
        p = shares()
        order = order[p >= p[0] * params.min_p]
    weights = np.exp((logits[order] - logits[order[0]]) / params.temperature)
    result = np.zeros(len(row))
    result[order] = weights / weights.sum()
    return result


def rows(shape: str, vocab: int = 1000) -> NDArray[np.float32]:
    rng = np.random.default_rng(5)
    values = {
        "peaked": rng.normal(0, 4, vocab),
        "usual": rng.normal(0, 2, vocab) + np.where(rng.random(vocab) < 0.01, 6, 0),
        "flat": rng.normal(0, 0.05, vocab),
        "equal": np.zeros(vocab),
    }[shape]
    return values.astype(np.float32)


def frequencies(row: NDArray[np.float32], params: SamplingParams, n: int) -> Array:
    """Shares of tokens over evenly spaced uniform numbers: exact up to one part in n per token."""
    logits = Logits(row[None].copy())
    found = [pick(logits, 0, params, (i + 0.5) / n) for i in range(n)]
    return np.bincount(found, minlength=len(row)) / n


CUTS = [
    {},
    {"top_k": 1},
    {"top_k": 10},
    {"top_k": 500},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 0.9},
    {"typical_p": 0.5},
    {"typical_p": 0.95},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 200, "typical_p": 0.8, "top_p": 0.9},
    {"typical_p": 0.9, "min_p": 0.3},
]


@pytest.mark.parametrize("shape", ["peaked", "usual", "flat", "equal"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_come_as_often_as_defined(shape: str, cut: dict[str, float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, **cut)  # type: ignore[arg-type]
    row = rows(shape)
    n = 2000
    got, want = frequencies(row, params, n), expected(row, params)
    # A token at a cut may fall on either side when two sums differ in their last bits.
    wrong = np.abs(got - want) > 1.5 / n
    assert wrong.sum() <= 1
    assert np.abs(got - want).max() < 3 / n


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=300),
    st.fixed_dictionaries(
        {
            "temperature": st.floats(0.1, 3),
            "top_k": st.integers(0, 20),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 1),
            "typical_p": st.floats(0.05, 1),
        }
    ),
    st.floats(0, 1, exclude_max=True),
)
def test_only_tokens_with_a_share_are_picked(values: list[float], cut: dict[str, float], u: float) -> None:
    params = SamplingParams(**cut)  # type: ignore[arg-type]
    row = np.array(values, np.float32)
    token = pick(Logits(row[None]), 0, params, u)
    assert 0 <= token < len(row)
    loose = {"top_p": min(1.0, params.top_p + 1e-6), "typical_p": min(1.0, params.typical_p + 1e-6)}
    near = SamplingParams(**{**cut, **loose, "min_p": max(0.0, params.min_p - 1e-6)})  # type: ignore[arg-type]
    assert expected(row, near)[token] > 0 or expected(row, params)[token] > 0


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"min_p": 0.02}], ids=str)
def test_a_large_flat_vocabulary_is_sampled_exactly(cut: dict[str, float]) -> None:
    row = np.random.default_rng(3).normal(0, 0.3, 30000).astype(np.float32)
    params = SamplingParams(temperature=0.8, **cut)  # type: ignore[arg-type]
    logits = Logits(row[None])
    uniforms = Uniforms(1)
    found = np.array([pick(logits, 0, params, uniforms.at(i)) for i in range(300)])
    want = expected(row, params)
    assert (want[found] > 0).all()
    # By deciles of probability: the likely half must come as often as its mass says.
    order = np.argsort(-want)
    likely = np.zeros(len(row), bool)
    likely[order[: np.searchsorted(np.cumsum(want[order]), 0.5)]] = True
    assert 0.35 < likely[found].mean() < 0.65


@pytest.mark.parametrize(
    "cut", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}], ids=str
)
def test_seeded_tokens_pass_a_chi_square_test(cut: dict[str, float]) -> None:
    row = rows("usual", 60)
    want = expected(row, SamplingParams(temperature=1, **cut))  # type: ignore[arg-type]
    n = 4000
    counts = np.zeros(len(row))
    for seed in range(20):
        sampler = Sampler(SamplingParams(temperature=1, seed=seed, **cut), [], 60)  # type: ignore[arg-type]
        logits = Logits(row[None])
        for _ in range(n // 20):
            counts[sampler.choose(logits, 0).token] += 1
    some = want * n >= 5
    statistic = ((counts - want * n)[some] ** 2 / (want * n)[some]).sum()
    freedom = some.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom) + 5
    assert counts[want == 0].sum() == 0


def test_uniforms_are_uniform_and_streams_of_near_seeds_do_not_overlap() -> None:
    streams = np.array([[Uniforms(seed).at(i) for i in range(500)] for seed in range(-5, 15)])
    assert ((streams >= 0) & (streams < 1)).all()
    counts = np.histogram(streams, bins=20, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 19 + 5 * np.sqrt(38)
    assert len(np.unique(streams)) == streams.size
    assert np.abs(np.corrcoef(streams) - np.eye(len(streams))).max() < 0.2


def test_temperature_zero_is_the_best_token_lowest_id_among_equals() -> None:
    row = np.array([1, 5, 5, 2], np.float32)
    assert Sampler(SamplingParams(), [], 4).choose(Logits(row[None]), 0).token == 1


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    def tokens(seed: int | None) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1, seed=seed), [], 1000)
        return [sampler.choose(Logits(rows("usual")[None]), 0).token for _ in range(20)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


def test_the_repetition_penalty_is_ctrl_s_over_prompt_and_answer() -> None:
    row = np.array([4, 3.9, -1, 3.8, 0], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=2), [0, 2], 5)
    logits = Logits(row[None].copy())
    assert sampler.choose(logits, 0).token == 1
    assert logits.values[0].tolist() == pytest.approx([2, 3.9, -2, 3.8, 0])
    logits = Logits(row[None].copy())
    assert sampler.choose(logits, 0).token == 3
    assert logits.values[0].tolist() == pytest.approx([2, 1.95, -2, 3.8, 0])


def test_frequency_and_presence_penalties_count_the_answer_alone() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    sampler = Sampler(params, [1, 1, 1], 3)
    seen = []
    for _ in range(3):
        logits = Logits(np.array([[2, 1.9, -9]], np.float32))
        sampler.choose(logits, 0)
        seen.append(logits.values[0].tolist())
    assert seen[0] == pytest.approx([2, 1.9, -9])
    assert seen[1] == pytest.approx([1.25, 1.9, -9])
    assert seen[2] == pytest.approx([1.25, 1.15, -9])


def test_penalties_count_many_tokens() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=100), [], 300)
    row = np.linspace(1, 0, 300, dtype=np.float32)
    assert [sampler.choose(Logits(row[None].copy()), 0).token for _ in range(200)] == list(range(200))


def test_logit_bias_forbids_and_forces() -> None:
    row = np.array([[3, 2, 1]], np.float32)
    sampler = Sampler(SamplingParams(logit_bias={0: float("-inf"), 2: 5}), [], 3)
    assert sampler.choose(Logits(row), 0).token == 2


def test_end_tokens_do_not_come_before_min_tokens() -> None:
    sampler = Sampler(SamplingParams(min_tokens=2), [], 3, end_ids=[0])
    chosen = [sampler.choose(Logits(np.array([[3, 2, 1]], np.float32)), 0).token for _ in range(3)]
    assert chosen == [1, 1, 0]


def test_log_probabilities_are_the_model_s_own_whatever_shapes_the_choice() -> None:
    row = np.array([3, 2, 1, 0], np.float32)
    want = row - np.log(np.exp(row).sum())
    params = SamplingParams(logprobs=2, logit_bias={0: -50}, repetition_penalty=1.5, temperature=0.1)
    choice = Sampler(params, [1], 4).choose(Logits(row[None].copy()), 0)
    assert choice.token == 1 or choice.token == 2
    assert choice.logprob == pytest.approx(want[choice.token], abs=1e-6)
    assert [token for token, _ in choice.top] == [0, 1]
    assert [value for _, value in choice.top] == pytest.approx(want[:2], abs=1e-6)


def test_no_top_tokens_are_reported_when_none_are_asked_for() -> None:
    choice = Sampler(SamplingParams(logprobs=0), [], 2).choose(Logits(np.zeros((1, 2), np.float32)), 0)
    assert choice.logprob == pytest.approx(-np.log(2))
    assert choice.top == ()


WAYS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "typical_p": 0.5},
    {"logprobs": 3},
    {"temperature": 1.0, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("params", WAYS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_an_error_and_not_a_token(
    value: float, params: dict[str, float]
) -> None:
    row = np.full((1, 200), value, np.float32)
    sampler = Sampler(SamplingParams(seed=1, **params), [1, 2], 200)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="not numbers"):
        sampler.choose(Logits(row), 0)


@pytest.mark.parametrize("params", WAYS, ids=str)
@pytest.mark.parametrize("n", [1, 64, 150])
def test_a_token_whose_score_is_no_number_is_never_chosen(n: int, params: dict[str, float]) -> None:
    row = np.linspace(0, 1, 200, dtype=np.float32)[None].copy()
    row[0, 7 : 7 + n] = np.nan
    for seed in range(20):
        sampler = Sampler(SamplingParams(seed=seed, **params), [1, 2], 200)  # type: ignore[arg-type]
        try:
            token = sampler.choose(Logits(row.copy()), 0).token
        except CheckpointError:
            continue
        assert not np.isnan(row[0, token])


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30])
def test_the_smallest_temperatures_pick_the_best_token(temperature: float) -> None:
    row = rows("usual")
    for seed in range(20):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [], len(row))
        assert sampler.choose(Logits(row[None].copy()), 0).token == row.argmax()


def prepared(row: NDArray[np.float32], scale: float) -> Logits:
    """Logits with what a model computes beside them."""
    runs = [row[i : i + RUN].astype(np.float64) for i in range(0, len(row), RUN)]
    sums = [(run.max(), np.exp(scale * (run - run.max())).sum()) for run in runs]
    return Logits(row[None].copy(), block_maxima(row)[None], np.array([sums]), np.array([scale], np.float32))


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [50, RUN, 3 * RUN + 17])
@pytest.mark.parametrize("shape", ["peaked", "usual", "flat", "equal"])
def test_sums_made_beforehand_do_not_change_what_is_drawn(shape: str, vocab: int, temperature: float) -> None:
    row, params = rows(shape, vocab), SamplingParams(temperature=temperature)
    for i in range(200):
        uniform = (i + 0.37) / 200
        token = pick(prepared(row, 1 / temperature), 0, params, uniform)
        ends = expected(row, params).cumsum()
        assert ends[token] >= uniform - 1e-5
        assert token == 0 or ends[token - 1] <= uniform + 1e-5


def test_a_row_that_was_edited_is_drawn_from_as_it_is_now() -> None:
    logits = prepared(rows("flat", 2 * RUN), 1.0)
    logits.values[0, RUN + 5] = 60
    logits.changed(0)
    assert {pick(logits, 0, SamplingParams(temperature=1), u) for u in (0.1, 0.3, 0.999)} == {RUN + 5}


@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.5, 3.0, -5.0]), min_size=1, max_size=4 * BLOCK), st.floats(-6, 4)
)
def test_tokens_that_reach_a_floor_come_best_first(values: list[float], floor: float) -> None:
    row = np.array(values, np.float32)
    reached = prepared(row, 1.0).reaching(0, floor)
    ids, found = best_first(reached, row[reached])
    wanted = sorted((i for i, value in enumerate(row) if value >= floor), key=lambda i: (-row[i], i))
    assert ids.tolist() == wanted
    assert found.tolist() == row[wanted].tolist()
