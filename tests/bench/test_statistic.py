"""Statistics keep what they are made of, and nothing is made of nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.schema import RESERVOIR, Proportion, Statistic


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50))
def test_the_numbers_are_those_of_numpy(values: list[float]) -> None:
    found = Statistic.of(values)
    assert found is not None
    assert found.n == len(values)
    assert found.mean == float(np.mean(values))
    assert found.std == float(np.std(values, ddof=1))
    assert (found.minimum, found.peak) == (min(values), max(values))
    assert found.percentiles is not None
    assert found.percentiles.p95 == float(np.quantile(values, 0.95))
    assert found.samples == values
    assert found.sampling is not None
    assert found.sampling.rule == "all"


def test_of_nothing_there_is_no_statistic() -> None:
    assert Statistic.of([]) is None
    assert Proportion.of(0, 0) is None


def test_one_sample_has_no_spread() -> None:
    found = Statistic.of([3.0])
    assert found is not None
    assert (found.n, found.mean, found.std, found.interval) == (1, 3.0, None, None)


def test_nan_is_refused_rather_than_averaged() -> None:
    with pytest.raises(ValueError, match="1 of 2 that are not"):
        Statistic.of([1.0, float("nan")])


def test_many_samples_are_drawn_from_in_order_but_counted_whole() -> None:
    values = [float(i) for i in range(3 * RESERVOIR)]
    found = Statistic.of(values)
    assert found is not None
    assert found.n == len(values)
    assert found.mean == float(np.mean(values))
    assert found.samples is not None
    assert len(found.samples) == RESERVOIR
    assert found.samples == sorted(set(found.samples))
    assert set(found.samples) <= set(values)
    assert found.sampling is not None
    assert (found.sampling.rule, found.sampling.capacity, found.sampling.seed) == ("reservoir", RESERVOIR, 0)
    assert found == Statistic.of(values), "the same draw every time"


def test_the_interval_knows_that_neighbors_are_alike() -> None:
    """A slow wave: samples are alike, so a thousand of them tell little more than a few blocks do."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        steps = np.zeros(1000)
        for i in range(1, 1000):
            steps[i] = 0.9 * steps[i - 1] + generator.normal()
        found = Statistic.of(steps.tolist())
        assert found is not None
        assert found.interval is not None
        covered += found.interval.low <= 0.0 <= found.interval.high
    # pretending that samples are independent covers about 35 of 100; blocks of 33 with a memory of 10 nearly 95
    assert covered >= 85


def test_a_rate_has_wilsons_interval() -> None:
    found = Proportion.of(9, 10)
    assert found is not None
    assert (found.rate, found.successes, found.n) == (0.9, 9, 10)
    assert found.interval is not None
    # Wilson 1927 for 9 of 10
    assert (found.interval.low, found.interval.high) == pytest.approx((0.596, 0.982), abs=5e-4)
