"""Percentiles, intervals and verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from chabok.measure import compare, describe
from chabok.measure.stats import describe_pooled, mean_interval, quantile_interval, resampled_quantiles


def test_a_percentile_is_shown_only_where_the_sample_reaches_beyond_it() -> None:
    for n, shown in ((1, {50}), (9, {50}), (10, {50, 90}), (20, {50, 90, 95}), (99, {50, 90, 95})):
        found = describe(list(range(n)))
        assert found is not None
        assert set(found.percentiles) == shown
    assert 99.0 in describe(list(range(100))).percentiles  # type: ignore[union-attr]
    assert describe([]) is None


def test_one_value_has_no_interval() -> None:
    found = describe([3.0])
    assert found is not None
    assert found.intervals == {}
    assert (found.median, found.mean, found.least, found.most) == (3.0, 3.0, 3.0, 3.0)


def test_percentiles_are_those_of_numpy() -> None:
    values = np.random.default_rng(1).exponential(1, 500)
    found = describe(values)
    assert found is not None
    assert found.percentiles[99.0] == pytest.approx(np.percentile(values, 99))


def test_quantiles_of_resamples_are_distributed_as_by_resampling() -> None:
    rng = np.random.default_rng(2)
    sample = np.sort(rng.exponential(1, 60))
    naive = np.percentile(sample[rng.integers(0, 60, (20000, 60))], 90, axis=1)
    drawn = resampled_quantiles(sample, 90, resamples=20000)
    for p in (2.5, 25, 50, 75, 97.5):
        assert np.percentile(drawn, p) == pytest.approx(np.percentile(naive, p), rel=0.05)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    medians = means = 0
    for seed in range(200):
        sample = np.sort(rng.exponential(1, 100))
        low, high = quantile_interval(sample, 50, seed=seed)
        medians += low <= np.log(2) <= high
        low, high = mean_interval(sample, seed=seed)
        means += low <= 1 <= high
    assert medians >= 180
    assert means >= 180


def test_intervals_are_the_same_for_the_same_seed() -> None:
    values = np.random.default_rng(4).exponential(1, 50)
    assert describe(values, seed=7) == describe(values, seed=7)
    assert describe(values, seed=7) != describe(values, seed=8)


def test_pooled_values_are_resampled_by_request_since_those_of_one_resemble_each_other() -> None:
    groups = [np.full(200, level) for level in (1.0, 1.0, 1.0, 5.0, 5.0, 5.0, 9.0)]
    found = describe_pooled(groups)
    assert found is not None
    assert (found.n, found.requests) == (1400, 7)
    low, high = found.intervals[0.0]
    assert low < 3.5
    assert high > 5.2  # as wide as seven values make it, not fourteen hundred


def test_the_cost_of_pooled_intervals_does_not_grow_with_the_number_of_values() -> None:
    rng = np.random.default_rng(5)
    groups = [rng.exponential(0.01, 2000) for _ in range(200)]
    found = describe_pooled(groups)
    assert found is not None
    assert found.intervals[50.0].low <= found.median <= found.intervals[50.0].high
    assert found.intervals[50.0].high - found.intervals[50.0].low < 0.0005


def test_a_real_difference_is_found_and_an_imagined_one_is_not() -> None:
    rng = np.random.default_rng(6)
    base = rng.normal(100, 10, 200)
    same = [compare(rng.normal(100, 10, 200), rng.normal(100, 10, 200), 50, seed=seed) for seed in range(100)]
    verdicts = [found.verdict for found in same if found is not None]
    assert verdicts.count("no measurable difference") >= 90
    slower = compare(base, rng.normal(110, 10, 200), 50)
    assert slower is not None
    assert slower.verdict == "worse"
    assert slower.share == pytest.approx(0.1, abs=0.05)
    faster = compare(base, rng.normal(110, 10, 200), None, lower_is_better=False)
    assert faster is not None
    assert faster.verdict == "better"


def test_a_comparison_that_the_samples_do_not_carry_is_not_made() -> None:
    few = list(range(1, 51))
    assert compare(few, few, 99) is None
    assert compare([1.0], few, 50) is None
    found = compare(few, few, 90)
    assert found is not None
    assert found.verdict == "no measurable difference"


def test_pooled_samples_are_compared_by_request() -> None:
    rng = np.random.default_rng(8)
    before = [rng.normal(10, 1, 50) for _ in range(30)]
    after = [values * 1.2 for values in before]
    found = compare(before, after, 50)
    assert found is not None
    assert found.verdict == "worse"
    same = compare(before, [rng.normal(10, 1, 50) for _ in range(30)], 50)
    assert same is not None
    assert same.verdict == "no measurable difference"
