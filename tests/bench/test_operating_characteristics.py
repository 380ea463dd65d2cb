"""How often comparisons are right, by seeded simulation: false verdicts and power of every design that is accepted.

The simulation is that of ``scripts/docs/compare_characteristics.py``, whose tables are in the docs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "docs"))

from compare_characteristics import Case, rates, simulate_plays  # noqa: E402  # the path is set above

FEW = 60
"""Comparisons per case in the quick tests, ten metrics each: at the nominal 1 %, more than three false verdicts in them
have a chance of 0.3 %."""


@pytest.mark.parametrize("order", ["sweep", "alternating", "random"])
@pytest.mark.parametrize(("n", "noise", "drift"), [(5, 0.01, 0.4), (10, 0.03, 0.4), (20, 0.3, 0.0), (10, 0.03, 0.0)])
def test_equal_sides_are_rarely_called_different(order: str, n: int, noise: float, drift: float) -> None:
    assert rates(Case(order=order, n=n, noise=noise, drift=drift), FEW)["any"] <= 0.05  # type: ignore[arg-type]  # a parameter


def test_blocks_are_refused_and_would_be_wrong_otherwise() -> None:
    case = {"n": 10, "noise": 0.03, "drift": 0.4}
    assert rates(Case(order="block", **case), 20)["any"] == 0.0
    assert rates(Case(order="block", accept_drift=True, **case), 20)["any"] > 0.5


def test_ten_percent_at_ten_pairs_is_found_in_spite_of_noise_and_drift() -> None:
    assert rates(Case(order="sweep", n=10, noise=0.03, drift=0.2, change=0.1), FEW)["regressed"] >= 0.9


def test_a_change_of_the_smallest_that_matters_is_decided() -> None:
    found = rates(Case(order="sweep", n=20, noise=0.01, change=0.05), FEW)
    assert 1.0 - found["inconclusive"] >= 0.95


def test_drift_of_forty_percent_does_not_hide_a_change_from_pairs() -> None:
    assert rates(Case(order="sweep", n=12, noise=0.03, drift=0.4, change=0.1), 30)["regressed"] >= 0.9


@pytest.mark.parametrize("paired", [True, False])
def test_equal_policies_are_rarely_called_different(paired: bool) -> None:
    found = [simulate_plays(seed, episodes=200, before=0.7, after=0.7, paired=paired) for seed in range(100)]
    assert sum(bool(c.count("improved") or c.count("regressed")) for c in found) <= 5


def test_a_fall_from_95_to_60_percent_in_a_thousand_episodes_is_always_found() -> None:
    found = [simulate_plays(seed, episodes=1000, before=0.95, after=0.6, paired=True) for seed in range(20)]
    assert all(comparison.count("regressed") for comparison in found)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["sweep", "alternating", "random"])
@pytest.mark.parametrize("n", [5, 10, 20, 40])
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("drift", [0.0, 0.2, 0.4])
def test_equal_sides_are_called_different_in_at_most_one_of_twenty_comparisons(
    order: str, n: int, noise: float, drift: float
) -> None:
    # 5 % allowed; three standard deviations of 200 draws at the nominal 1 % are 2.1 %
    assert rates(Case(order=order, n=n, noise=noise, drift=drift), 200)["any"] <= 0.05  # type: ignore[arg-type]  # a parameter


@pytest.mark.slow
def test_power_and_decisions_hold_over_many_comparisons() -> None:
    assert rates(Case(order="sweep", n=10, noise=0.03, drift=0.2, change=0.1), 1000)["regressed"] >= 0.9
    assert 1.0 - rates(Case(order="sweep", n=20, noise=0.01, change=0.05), 1000)["inconclusive"] >= 0.95
