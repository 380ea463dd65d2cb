"""Intervals and robust means against definitions and published values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.statistics import bootstrap_interval, paired_interval, wilson_interval

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40)


def test_wilson_interval_equals_published_values() -> None:
    # Newcombe (1998), table I: 81/263 gives 0.2553 to 0.3662; 15/148 gives 0.0624 to 0.1605; 0/20 gives 0 to 0.1611
    for successes, trials, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        interval = wilson_interval(successes, trials)
        assert interval.value == successes / trials
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_paired_interval_equals_a_published_value_and_covers_as_often_as_it_says() -> None:
    # Newcombe (1998), paired differences, method 10: 36, 12, 2 and 0 of 50 give -0.2 with 0.0569 to 0.3404
    found = paired_interval(36, 12, 2, 0)
    assert tuple(round(number, 4) for number in found) == (-0.2, -0.3404, -0.0569)
    assert paired_interval(0, 0, 0, 9).value == 0
    assert paired_interval(9, 0, 0, 0).low < -0.2  # nine equal pairs do not show that nothing changes
    rng, shares = np.random.default_rng(0), (0.5, 0.2, 0.1, 0.2)
    intervals = [paired_interval(*map(int, rng.multinomial(50, shares))) for _ in range(2000)]
    assert 0.93 < np.mean([low <= -0.1 <= high for _, low, high in intervals]) < 0.98


@settings(deadline=None)
@given(trials=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_interval_lies_around_the_rate_and_within_zero_and_one(trials, share) -> None:
    successes = round(share * trials)
    interval = wilson_interval(successes, trials)
    # the ends touch the rate at 0 and 1
    assert 0.0 <= interval.low <= interval.value <= interval.high <= 1.0
    mirrored = wilson_interval(trials - successes, trials)
    assert mirrored.low == pytest.approx(1 - interval.high, abs=1e-12)


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (3, 2), (-1, 5)])
def test_wilson_interval_refuses_counts_that_cannot_be(successes, trials) -> None:
    with pytest.raises(ConfigError, match=f"got {successes}/{trials}"):
        wilson_interval(successes, trials)


@settings(deadline=None)
@given(values=VALUES)
def test_interquartile_mean_is_the_mean_of_the_middle_half(values) -> None:
    # each value four times: the middle half is then a whole number of values
    repeated = np.sort(np.repeat(values, 4))
    quarter = len(values)
    expected = repeated[quarter:-quarter].mean()
    found = bootstrap_interval(np.array(values), robust=True, resamples=2)
    assert found.value == pytest.approx(expected, abs=1e-9)


def test_interquartile_mean_ignores_outliers_that_the_mean_does_not() -> None:
    assert bootstrap_interval(np.array([1.0, 2.0, 3.0, 1e9]), robust=True).value == 2.5


def test_no_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one value, got none"):
        bootstrap_interval(np.array([]))


def test_bootstrap_interval_is_the_same_for_the_same_data_and_other_for_another_seed() -> None:
    data = np.random.default_rng(1).normal(size=30)
    assert bootstrap_interval(data) == bootstrap_interval(data)
    assert bootstrap_interval(data, seed=1) != bootstrap_interval(data)


@pytest.mark.parametrize("robust", [False, True])
def test_bootstrap_interval_holds_the_truth_about_95_times_in_100(robust) -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        interval = bootstrap_interval(generator.normal(3.0, 2.0, 40), robust=robust, resamples=300, seed=trial)
        assert interval.low <= interval.value <= interval.high
        hits += interval.low <= 3.0 <= interval.high
    # a percentile bootstrap of 40 values covers a little under 95 %; 200 trials have a standard error of 1.6 points
    assert 0.87 <= hits / 200 <= 1.0


def test_bootstrap_interval_of_equal_values_has_no_width() -> None:
    assert bootstrap_interval(np.full(5, 2.0), robust=True) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("robust", [False, True])
def test_the_interval_of_many_values_is_that_of_a_bootstrap(robust) -> None:
    values = np.random.default_rng(4).gamma(2.0, size=20_000)
    one_less = bootstrap_interval(values[1:], robust=robust, resamples=400)
    found = bootstrap_interval(values, robust=robust)
    assert found.value == pytest.approx(one_less.value, rel=1e-3)
    assert found.high - found.low == pytest.approx(one_less.high - one_less.low, rel=0.1)
