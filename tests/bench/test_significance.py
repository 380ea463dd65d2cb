"""The tests and intervals, compared with dealing labels out in every way, with textbooks, and with their coverage."""

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
    fisher_p,
    holm,
    least_runs,
    least_signed_rank_p,
    mcnemar_p,
    paired_rate_shift,
    rank_sum_p,
    rate_shift,
    runs_needed,
    shift,
    signed_rank_p,
    signed_rank_shift,
    t_quantile,
    t_shift,
    t_tail,
    t_test_p,
    welch,
)
from headrace.statistics import bootstrap_interval


def brute_force_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided exact p by dealing the labels out in every way."""
    pooled = [*first, *second]
    ranks = [sum(o < v for o in pooled) + (sum(o == v for o in pooled) + 1) / 2 for v in pooled]
    sums = [sum(chosen) for chosen in itertools.combinations(ranks, len(first))]
    observed = sum(ranks[: len(first)])
    below = sum(s <= observed + 1e-9 for s in sums) / len(sums)
    above = sum(s >= observed - 1e-9 for s in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=6),
    st.lists(st.integers(0, 6).map(float), min_size=1, max_size=6),
)
def test_the_p_value_is_that_of_dealing_labels_out_in_every_way_ties_included(
    first: list[float], second: list[float]
) -> None:
    # both count the same integers; only their quotient is rounded
    assert rank_sum_p(first, second) == pytest.approx(brute_force_p(first, second), rel=1e-12)


def test_the_p_value_of_separate_samples_is_the_least_there_is() -> None:
    assert rank_sum_p([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert least_runs(0.01) == 5, "2 / 252 is below, 2 / 70 is not"


def test_the_shift_is_the_median_difference_and_its_interval_is_that_of_the_rank_test() -> None:
    # the textbook case: n = m = 5 at 95 % leaves out the two smallest and the two largest of 25 differences
    first, second = [1.0, 2.0, 4.0, 8.0, 16.0], [3.0, 5.0, 9.0, 17.0, 33.0]
    differences = sorted(b - a for a in first for b in second)
    found = shift(first, second)
    assert found.estimate == differences[12]
    assert (found.low, found.high) == (differences[2], differences[-3])


def test_the_interval_contains_the_true_shift_in_95_of_100_samples() -> None:
    generator = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        found = shift(generator.normal(size=8).tolist(), generator.normal(0.7, size=8).tolist())
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 0.7 <= found.high
    # exact tests are conservative; three standard deviations of 1,000 draws are 2 %
    assert inside >= 930


def test_there_is_no_interval_of_two_runs() -> None:
    assert shift([1.0, 2.0], [3.0, 4.0]).low is None


def test_holm_multiplies_the_smallest_by_all_and_keeps_the_order() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


# --- censored values ---


def test_without_censoring_nothing_changes() -> None:
    first, second = [1.0, 3.0, 3.0], [2.0, 3.0, 9.0]
    assert rank_sum_p(first, second, censored=[False] * 6) == rank_sum_p(first, second)


def test_runs_that_never_reach_it_count_as_slower_than_all_that_did() -> None:
    reached, never = [10.0, 11.0, 12.0, 13.0, 14.0], [100.0] * 5
    assert rank_sum_p(reached, never, censored=[False] * 5 + [True] * 5) == pytest.approx(2 / math.comb(10, 5))


def test_a_run_that_was_cut_off_early_says_nothing_about_later_ones() -> None:
    # cut off at 5 s: whether it would have reached it before 10 s nobody knows
    assert rank_sum_p([10.0] * 5, [5.0] * 5, censored=[False] * 5 + [True] * 5) == 1.0


# --- pairs ---


def brute_force_signed_p(differences: Sequence[float]) -> float:
    values = [value for value in differences if value]
    sizes = [abs(value) for value in values]
    ranks = [sum(o < v for o in sizes) + (sum(o == v for o in sizes) + 1) / 2 for v in sizes]
    observed = sum(rank for rank, value in zip(ranks, values, strict=True) if value > 0)
    sums = [sum(itertools.compress(ranks, signs)) for signs in itertools.product((0, 1), repeat=len(ranks))]
    below = sum(s <= observed + 1e-9 for s in sums) / len(sums)
    above = sum(s >= observed - 1e-9 for s in sums) / len(sums)
    return min(1.0, 2 * min(below, above))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=9))
def test_the_signed_rank_p_is_that_of_flipping_signs_in_every_way(differences: list[float]) -> None:
    # both count the same subsets; powers of two are exact, sums of at most 512 terms are rounded
    assert signed_rank_p(differences) == pytest.approx(brute_force_signed_p(differences), rel=1e-12)


def test_the_signed_rank_p_of_differences_of_one_sign_is_the_least_there_is() -> None:
    assert signed_rank_p([1.0, 2.0, 3.0, 4.0, 5.0]) == least_signed_rank_p(5) == 0.0625


def test_the_signed_rank_interval_is_the_textbook_one() -> None:
    # n = 6 at 95 %: the extremes of the 21 averages are kept out only at P = 2/64 = 3.1 %, so one at each end
    differences = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    averages = sorted((a + b) / 2 for i, a in enumerate(differences) for b in differences[i:])
    found = signed_rank_shift(differences)
    assert (found.estimate, found.low, found.high) == (averages[10], averages[0], averages[-1])
    assert signed_rank_shift([1.0, 2.0]).low is None


def test_students_distribution_is_that_of_the_tables() -> None:
    for degrees, quantile in ((1, 12.7062), (3, 3.18245), (9, 2.26216), (30, 2.04227), (1000, 1.96234)):
        assert t_quantile(degrees) == pytest.approx(quantile, abs=1e-4)  # the tables have so many digits
        assert t_tail(quantile, degrees) == pytest.approx(0.05, abs=1e-5)
    assert t_tail(0.0, 5) == 1.0
    assert t_tail(1e9, 5) < 1e-30


def test_the_t_test_is_that_of_the_textbook() -> None:
    # Student's sleep data (1908): t = 4.0621 on 9 degrees, p = 0.002833
    sleep = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]
    assert t_test_p(sleep) == pytest.approx(0.002833, abs=1e-6)
    found = t_shift(sleep)
    assert (found.low, found.high) == pytest.approx((0.7001, 2.4599), abs=1e-4)
    assert t_test_p([0.0] * 5) == 1.0
    assert t_test_p([0.1] * 5) == 0.0


def test_the_bootstrap_interval_is_near_that_of_the_t_test_for_many_values() -> None:
    values = np.random.default_rng(1).normal(0.5, 1.0, 400).tolist()
    one, other = bootstrap_interval(np.array(values)), t_shift(values)
    # 2,000 resamples: the edges have an error of about 2 % of the interval
    assert (one.low, one.high) == pytest.approx((other.low, other.high), abs=0.02)


# --- episodes ---


def test_mcnemar_is_a_fair_coin_over_the_pairs_that_differ() -> None:
    assert mcnemar_p(0, 0) == 1.0
    assert mcnemar_p(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 2**12)
    assert mcnemar_p(10, 2) == mcnemar_p(2, 10)


def test_fisher_is_the_sum_over_tables_that_are_no_likelier() -> None:
    # the lady tasting tea: three of four cups right
    assert fisher_p((3, 4), (1, 4)) == pytest.approx(34 / 70)
    assert fisher_p((0, 5), (0, 5)) == 1.0
    assert fisher_p((950, 1000), (600, 1000)) < 1e-60


@pytest.mark.parametrize("paired", [True, False])
def test_intervals_of_rates_contain_the_true_difference(paired: bool) -> None:
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(1000):
        luck = generator.uniform(size=60)
        first = luck < 0.9
        second = (luck if paired else generator.uniform(size=60)) < 0.8
        if paired:
            found = paired_rate_shift(int((second & ~first).sum()), int((first & ~second).sum()), 60)
        else:
            found = rate_shift((int(first.sum()), 60), (int(second.sum()), 60))
        inside += found.low <= -0.1 <= found.high
    # 95 % nominal; three standard deviations of 1,000 draws are 2 %
    assert inside >= 930


def test_welch_is_that_of_the_textbook() -> None:
    # Welch (1947) as in NIST's example: equal spread and size is the classical t-test with 2n - 2 degrees
    p, found = welch(Moments(0.0, 1.0, 10), Moments(1.0, 1.0, 10))
    assert p == pytest.approx(t_tail(1.0 / math.sqrt(0.2), 18))
    assert found.high - found.estimate == pytest.approx(t_quantile(18.0) * math.sqrt(0.2))
    assert welch(Moments(1.0, 0.0, 5), Moments(1.0, 0.0, 5))[0] == 1.0


def test_the_number_of_runs_grows_with_the_square_of_the_noise() -> None:
    few, many = (runs_needed(spread, 0.05, 0.001) for spread in (0.03, 0.3))
    assert (many - 2) / (few - 2) == pytest.approx(100, rel=0.1)  # whole runs
    assert runs_needed(0.0, 0.05, 0.001) == 2
