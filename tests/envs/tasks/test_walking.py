"""Rewards of the walking tasks against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.envs.tasks.walking import AntCfg, between, mass_center_x, outside, walk_reward


@settings(deadline=None, max_examples=60)
@given(rows=st.integers(0, 9), width=st.integers(1, 21), seed=st.integers(0, 10_000))
def test_the_reward_is_that_of_plain_numpy_to_the_last_bit(rows: int, width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    before, after, actions = draw.normal(size=rows), draw.normal(size=rows), draw.normal(size=(rows, width))
    fallen = draw.random(rows) < 0.5
    cfg = AntCfg()
    given = [torch.from_numpy(array) for array in (before, after, fallen, actions)]
    got = walk_reward(cfg, 0.05, *given)
    for row in range(rows):
        effort = cfg.ctrl_cost_weight * np.sum(np.square(actions[row]))
        healthy = 0.0 if fallen[row] else cfg.healthy_reward
        assert got[row] == ((after[row] - before[row]) / 0.05 * cfg.forward_reward_weight + healthy) - effort


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(0, 7), bodies=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_the_center_of_mass_is_that_of_plain_numpy_to_the_last_bit(rows: int, bodies: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    positions, mass = draw.normal(size=(rows, bodies, 3)), draw.random(bodies) + 0.1
    got = mass_center_x(torch.from_numpy(positions), torch.from_numpy(mass), float(mass.sum()))
    for row in range(rows):
        assert got[row] == (np.sum(mass[:, None] * positions[row], axis=0) / mass.sum())[0]


@pytest.mark.parametrize("height", [0.2, 1.0, 0.6, np.nextafter(0.2, 0), np.nextafter(1.0, 2), np.nan, np.inf])
def test_bounds_belong_to_a_closed_interval_and_not_to_an_open_one(height: float) -> None:
    value = torch.tensor([height], dtype=torch.float64)
    assert bool(outside(value, 0.2, 1.0)) == (not (0.2 <= height <= 1.0))
    assert bool(outside(value, *between(0.2, 1.0))) == (not (0.2 < height < 1.0))
