"""Real files: as right as a float32 forward pass of their weights, but for the rounding of activations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks import quality

from chabok.models.batch import Model

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module", params=quality.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str) -> Iterator[Model]:
    loaded = quality.load(name)
    yield loaded
    loaded.close()


def test_perplexity_is_within_half_a_percent_of_the_oracle_and_no_worse_than_llama_cpp(
    name: str, model: Model
) -> None:
    kept = quality.kept(name)
    ours = quality.perplexity(model, kept["windows"])
    assert ours == pytest.approx(kept["perplexity"], rel=5e-3)
    assert ours <= kept["peer_perplexity"]


def test_greedy_choices_differ_only_where_the_best_two_are_closer_than_rounding_moves_them(
    name: str, model: Model
) -> None:
    kept = quality.kept(name)
    found = quality.divergences(model, kept["prompts"])
    # The oracle's own rounding shows how far gaps move, and how many choices that changes.
    assert [one for one in found if one.gap > kept["rounding"]["max"]] == []
    assert len(found) <= 2 * kept["rounding"]["changed"] + 10


def test_continuations_decoded_together_follow_the_oracle_up_to_such_a_choice(
    name: str, model: Model
) -> None:
    prompts = quality.kept(name)["prompts"]
    close = {(one.prompt, one.step) for one in quality.divergences(model, prompts)}
    ours = quality.continuations(model, [prompt["ids"] for prompt in prompts], 64)
    for index, (tokens, prompt) in enumerate(zip(ours, prompts, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(tokens, prompt["tokens"])) if a != b), None)
        assert first is None or (index, first) in close
