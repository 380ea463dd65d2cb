"""How often comparisons are right, by seeded simulation: false verdicts, wrong "unchanged" and power of every design.

The simulation is that of ``scripts/docs/compare_characteristics.py``, whose tables are in the docs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.bench.comparison import MetricComparison

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))

from compare_characteristics import (  # noqa: E402  # the path is set above
    LOADS,
    Load,
    SweepCase,
    differ,
    share,
    simulate_plays,
    simulate_sweep,
    simulate_trainings,
    simulate_until_decided,
    unchanged,
    write_page,
)

FEW = 200
MANY = 8
"""False verdicts of 200 comparisons that a true chance of 1 % exceeds with a chance of 0.1 %."""


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("n", [2, 10])
def test_equal_sides_of_a_sweep_are_rarely_called_different_whatever_the_load(n: int, load: Load) -> None:
    assert share(lambda seed: simulate_sweep(SweepCase(n=n, load=load), seed), differ, FEW)[0] <= MANY


@pytest.mark.parametrize("load", ["even", "every fourth run"])
def test_looking_several_times_keeps_the_chance_of_a_false_verdict(load: Load) -> None:
    assert share(lambda seed: simulate_until_decided(SweepCase(n=40, load=load), seed), differ, 100)[0] <= 6


def test_ten_percent_more_time_is_found_in_ten_pairs_and_six_percent_is_not_called_unchanged() -> None:
    found, _ = share(lambda seed: simulate_sweep(SweepCase(n=10, change=0.1), seed)[:1], differ, 100)
    assert found >= 80
    wrong, _ = share(lambda seed: simulate_sweep(SweepCase(n=10, noise=0.01, change=0.06), seed)[:1], unchanged, FEW)
    assert wrong <= 10
    # and the sides are told to be equal where they are
    right, _ = share(lambda seed: simulate_sweep(SweepCase(n=10, noise=0.01), seed)[:1], unchanged, 100)
    assert right >= 80


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("two_valued", [True, False])
@pytest.mark.parametrize("n", [2, 6])
def test_equal_trainings_are_rarely_called_different(n: int, two_valued: bool, paired: bool) -> None:
    def one(seed: int) -> list[MetricComparison]:
        return simulate_trainings(seed, n=n, paired=paired, two_valued=two_valued)

    assert share(one, differ, FEW)[0] <= MANY


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("episodes", [2, 10, 100])
def test_equal_policies_are_rarely_called_different_and_failures_rarely_missed(episodes: int, paired: bool) -> None:
    def play(seed: int, before: float, after: float) -> list[MetricComparison]:
        return simulate_plays(seed, episodes=episodes, before=before, after=after, paired=paired)

    assert share(lambda seed: play(seed, 0.6, 0.6), differ, FEW)[0] <= MANY
    # at most 5 % of 200; three standard deviations more are 19
    assert share(lambda seed: play(seed, 1.0, 0.9), unchanged, FEW)[0] <= 19


def test_a_fall_from_95_to_60_percent_in_a_thousand_episodes_is_always_found() -> None:
    found = [simulate_plays(seed, episodes=1000, before=0.95, after=0.6, paired=True) for seed in range(5)]
    assert all(differ(rows) for rows in found)


@pytest.mark.slow
def test_every_design_keeps_its_bars_in_ten_thousand_comparisons() -> None:
    assert write_page(10_000, (2, 5, 8, 10, 20), LOADS).short == []
