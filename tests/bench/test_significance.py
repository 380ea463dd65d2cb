"""The tests and intervals, compared with relabeling in every way, with textbooks, and with their coverage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench._significance import (
    Moments,
    clip,
    exact_rate_interval,
    least_p,
    least_units,
    mean_shift,
    measure_paired_shift,
    rate_shift,
    relabel_p,
    shift,
    sign_flip_p,
    t_quantile,
    units_needed,
    unseen,
)

INTEGERS = st.integers(-5, 5).map(float)


def unit(values: Sequence[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values] if length else list(values)


def brute_force_flips(metrics: Sequence[Sequence[float]]) -> list[float]:
    """p of each metric: the share of sign patterns whose largest statistic, over metrics, is at least its own."""
    rows = [unit(row) for row in metrics]
    patterns = list(itertools.product((-1, 1), repeat=len(rows[0])))
    largest = [max(abs(sum(s * v for s, v in zip(signs, row, strict=True))) for row in rows) for signs in patterns]
    return [sum(found >= abs(sum(row)) - 1e-9 for found in largest) / len(patterns) for row in rows]


def brute_force_labels(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> list[float]:
    rows = []
    for one, other in zip(first, second, strict=True):
        mean = sum((*one, *other)) / (len(one) + len(other))
        rows.append(unit([value - mean for value in (*one, *other)]))
    choices = list(itertools.combinations(range(len(rows[0])), len(first[0])))
    largest = [max(abs(sum(row[i] for i in chosen)) for row in rows) for chosen in choices]
    own = [abs(sum(row[: len(first[0])])) for row in rows]
    return [sum(found >= seen - 1e-9 for found in largest) / len(choices) for seen in own]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 7).flatmap(lambda n: st.lists(st.lists(INTEGERS, min_size=n, max_size=n), min_size=1, max_size=3))
)
def test_the_p_values_of_pairs_are_those_of_flipping_signs_in_every_way(metrics: list[list[float]]) -> None:
    # both count the same patterns; sums of at most seven terms are rounded far below the 1e-9 that counts as a tie
    assert sign_flip_p(metrics) == pytest.approx(brute_force_flips(metrics), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(INTEGERS, min_size=2, max_size=5), st.lists(INTEGERS, min_size=2, max_size=5), st.integers(0, 1))
def test_the_p_values_of_two_samples_are_those_of_relabeling_in_every_way(
    first: list[float], second: list[float], more: int
) -> None:
    metrics = ([first, first[::-1]][: 1 + more], [second, second][: 1 + more])
    assert relabel_p(*metrics) == pytest.approx(brute_force_labels(*metrics), rel=1e-12)


def test_a_p_value_is_never_smaller_than_the_number_of_relabelings_allows() -> None:
    assert sign_flip_p([[1.0] * 5]) == [least_p(5, 5, paired=True)] == [2 / 32]
    assert sign_flip_p([[1.0] * 2]) == [0.5]
    assert relabel_p([[1.0] * 5], [[2.0] * 5]) == [least_p(5, 5, paired=False)] == [2 / 252]
    assert sign_flip_p([[0.0] * 5]) == relabel_p([[1.0] * 5], [[1.0] * 5]) == [1.0]
    assert (least_units(0.01, paired=True), least_units(0.01, paired=False)) == (8, 5)


def test_a_sample_of_relabelings_agrees_with_all_of_them() -> None:
    generator = np.random.default_rng(4)
    pairs = generator.normal(0.6, 1.0, 14).tolist()
    (exact,) = sign_flip_p([pairs])
    (drawn,) = sign_flip_p([[*pairs, 0.0, 0.0, 0.0, 0.0]])  # pairs without a difference change nothing
    assert drawn == pytest.approx(exact, abs=0.005)  # three standard deviations of 20,000 draws near 5 %


def test_a_huge_effect_is_found_among_many_metrics_and_one_disturbed_run_does_not_hide_it() -> None:
    generator = np.random.default_rng(0)
    noise = [generator.normal(0.0, 0.03, 10).tolist() for _ in range(9)]
    huge = (math.log(24) + generator.normal(0.0, 0.03, 10)).tolist()
    assert sign_flip_p([huge, *noise])[0] == pytest.approx(2 / 1024)
    disturbed = np.array([0.1] * 9 + [-1.5])
    assert sign_flip_p([clip(disturbed).tolist()])[0] < sign_flip_p([disturbed.tolist()])[0]


def test_the_shift_is_the_median_difference_and_its_interval_is_that_of_the_rank_test() -> None:
    # the textbook case: n = m = 5 at 95 % leaves out the two smallest and the two largest of 25 differences
    first, second = [1.0, 2.0, 4.0, 8.0, 16.0], [3.0, 5.0, 9.0, 17.0, 33.0]
    differences = sorted(b - a for a in first for b in second)
    assert shift(first, second) == (differences[12], differences[2], differences[-3])
    assert shift([1.0, 2.0], [3.0, 4.0]).low is None


def test_the_signed_rank_interval_is_the_textbook_one() -> None:
    # n = 6 at 95 %: the extremes of the 21 averages are kept out only at P = 2/64 = 3.1 %, so one at each end
    differences = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    averages = sorted((a + b) / 2 for i, a in enumerate(differences) for b in differences[i:])
    assert measure_paired_shift(differences) == (averages[10], averages[0], averages[-1])
    assert measure_paired_shift(differences[:5]).low is None
    assert measure_paired_shift(differences, 0.05 / 2).low is None, "with two looks six pairs are too few"


@pytest.mark.parametrize("size", [8, 12])
def test_intervals_contain_the_true_shift_in_95_of_100_samples(size: int) -> None:
    generator = np.random.default_rng(0)
    inside = np.zeros(3)
    for _ in range(1000):
        first, second = generator.normal(size=size), generator.normal(0.7, size=size)
        found = (
            shift(first.tolist(), second.tolist()),
            measure_paired_shift((second - first).tolist()),
            mean_shift(Moments.of(first.tolist()), Moments.of(second.tolist())),
        )
        inside += [one.low <= 0.7 <= one.high for one in found]  # type: ignore[operator]  # eight values have edges
    # 95 % nominal, the rank tests a little more; three standard deviations of 1,000 draws are 2 %
    assert (inside >= 930).all()


def test_rates_have_the_interval_of_clopper_and_pearson() -> None:
    # of the tables: 0 of 10, 5 of 10, 10 of 10
    assert exact_rate_interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert exact_rate_interval(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert exact_rate_interval(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert unseen(10) == pytest.approx(exact_rate_interval(0, 10)[1])


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_of_rates_contain_the_true_difference(paired: bool) -> None:
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(500):
        luck = generator.uniform(size=60)
        first, second = luck < 0.9, (luck if paired else generator.uniform(size=60)) < 0.8
        counts = ((first & ~second).sum(), (second & ~first).sum()) if paired else (first.sum(), second.sum())
        found = rate_shift(*((int(count), 60) for count in counts))
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= -0.1 <= found.high
    assert inside >= 475  # exact intervals of each rate together are wider than 95 %


def test_students_distribution_is_that_of_the_tables() -> None:
    for degrees, quantile in ((1, 12.7062), (3, 3.18245), (9, 2.26216), (30, 2.04227), (1000, 1.96234)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)  # the tables have so many digits


def test_intervals_of_means_are_those_of_the_textbook() -> None:
    # Student's sleep data (1908): 95 % interval 0.7001 to 2.4599
    sleep = Moments.of([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    found = mean_shift(Moments(0.0, 0.0, sleep.n), sleep)
    assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    # equal spread and size: the classical interval with 2n - 2 degrees
    found = mean_shift(Moments(0.0, 1.0, 10), Moments(1.0, 1.0, 10))
    assert found.high == pytest.approx(1.0 + t_quantile(18.0) * math.sqrt(0.2))


def test_the_number_of_runs_grows_with_the_square_of_the_noise() -> None:
    few, many = (units_needed(spread, 0.05, 0.001) for spread in (0.03, 0.3))
    assert (many - 2) / (few - 2) == pytest.approx(100, rel=0.1)  # whole runs
    assert units_needed(0.0, 0.05, 0.001) == 2
