import dataclasses
import math

import pytest

from chabok.engine.request import SamplingParams
from chabok.engine.timings import Timeline, Timings
from chabok.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("max_tokens", -1, "max_tokens must be an integer of at least 0 (or None), not -1"),
        ("max_tokens", 1.5, "integer"),
        ("max_tokens", True, "integer"),
        ("temperature", -0.1, "temperature must be a number from 0 to 100, not -0.1"),
        ("temperature", math.nan, "temperature"),
        ("temperature", "hot", "temperature must be a number"),
        ("temperature", None, "temperature must be a number"),
        ("top_p", 0, "top_p must be a number greater than 0 and at most 1, not 0"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -1, "top_k must be an integer of at least 0"),
        ("min_p", 2, "min_p must be a number from 0 to 1"),
        ("typical_p", 0, "typical_p"),
        ("repetition_penalty", 0, "repetition_penalty"),
        ("frequency_penalty", math.inf, "frequency_penalty"),
        ("seed", 2**64, "seed"),
        ("min_tokens", -1, "min_tokens"),
        ("logprobs", -1, "logprobs"),
        ("stop", "", "stop must be one or more non-empty strings"),
        ("stop", ["a", 3], "stop"),
        ("stop_token_ids", [-1], "stop_token_ids must be token ids"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("logit_bias", {1: math.nan}, "logit_bias of token 1"),
    ],
)
def test_an_invalid_value_is_refused_by_name_and_range(name: str, value: object, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_the_bounds_themselves_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, min_p=1, top_k=0, max_tokens=0, seed=-(2**63), logprobs=0)
    SamplingParams(logit_bias={3: -math.inf}, stop="x", stop_token_ids=[0])


def test_params_are_frozen_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[1, 2])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_help_tells_what_every_parameter_means() -> None:
    text = SamplingParams.__doc__ or ""
    assert all(f"{item.name}: {item.metadata['help']}" in text for item in dataclasses.fields(SamplingParams))


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(RequestError, match="did you mean temperature"):
        SamplingParams.of({"temprature": 1})
    with pytest.raises(RequestError, match="did you mean temperature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]


def test_stages_add_up() -> None:
    timeline = Timeline(None, 0.25)
    timeline.arrived = timeline.submitted - 0.5
    timeline.started = timeline.submitted + 1
    timeline.prefilled = timeline.started + 2
    timeline.first = timeline.prefilled + 0.1
    timeline.last = timeline.first + 4
    timeline.finished = timeline.last
    timings = timeline.timings(prompt_tokens=100, cached_tokens=64, output_tokens=9)
    assert timings.queue_s == pytest.approx(1)
    assert timings.prefill_s == pytest.approx(2)
    assert timings.first_token_s == pytest.approx(3.6)
    assert timings.decode_s == pytest.approx(4)
    assert timings.total_s == pytest.approx(7.6)
    assert timings.prompt_tokens_per_s == pytest.approx(18)
    assert timings.tokens_per_s == pytest.approx(2)


def test_speeds_of_nothing_are_zero_not_an_error() -> None:
    assert Timings().tokens_per_s == 0
    assert Timings().to_dict()["prompt_tokens_per_s"] == 0
