"""MuJoCo Warp on Warp's CPU device: few, small worlds. Cold, Warp compiles its kernels for about a minute."""

from __future__ import annotations

from typing import cast

import pytest
import torch

import headrace
from headrace.envs.recipe import SimName
from headrace.envs.registry import make_task
from headrace.errors import ConfigError
from headrace.sim import MujocoSim
from headrace.sim.warp_sim import MujocoWarpSim
from headrace.testing import Tolerance, check_simulation
from headrace.testing.episodes import check_suspend_is_exact

# float32 physics: the last digits depend on how many worlds are stepped together (measured: 1e-6 over a few steps)
FLOAT32 = Tolerance(rtol=1e-4, atol=1e-5)


def test_warp_keeps_the_simulation_contract() -> None:
    model = make_task("cartpole").model
    check_simulation(lambda num_envs: MujocoWarpSim(model, num_envs), num_envs=4, tolerance=FLOAT32)


def test_suspended_warp_worlds_are_frozen_bit_for_bit() -> None:
    def make_env(**settings: object) -> headrace.BatchEnv:
        return headrace.make("cartpole", sim="warp", **settings)

    check_suspend_is_exact(make_env, num_envs=4, steps=6)


def test_warp_agrees_with_native_mujoco_to_single_precision() -> None:
    native, warp = (headrace.make("cartpole", 3, sim=cast("SimName", sim)) for sim in ("mujoco", "warp"))
    native.reset(seed=3)
    warp.reset(seed=3)
    for step in range(20):
        actions = torch.full((3, 1), 0.1 * (step % 3))
        expected, got = native.step(actions), warp.step(actions)
    # 40 physics steps of float32 against float64 from the same start
    torch.testing.assert_close(got.obs["policy"], expected.obs["policy"], rtol=1e-3, atol=1e-4)


def test_a_model_with_the_pgs_solver_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"solver=\"Newton\""):
        MujocoWarpSim(make_task("humanoid").model, 2)


def test_both_simulations_say_what_suspension_costs() -> None:
    assert "skipped" in MujocoSim.suspension_cost
    assert "two copies of their states" in MujocoWarpSim.suspension_cost


def test_the_mass_of_one_warp_world_is_not_that_of_the_others() -> None:
    model = make_task("cartpole").model
    sim, plain = MujocoWarpSim(model, 3), MujocoWarpSim(model, 3)
    for each in (sim, plain):
        each.field("subtree_com")
        each.model_field("body_mass")
        each.field("qpos")[:, 1] = 0.5
        each.forward(None)
    sim.model_field("body_mass")[0, 2] *= 7.0
    sim.forward(torch.tensor([0]))
    sim.step(None, 2)
    plain.step(None, 2)
    assert torch.equal(sim.field("subtree_com")[1:], plain.field("subtree_com")[1:])
    assert torch.equal(sim.states(None)[1:], plain.states(None)[1:])
    # half of the pole's length from the cart, as far as it is the heavier one
    assert sim.field("subtree_com")[0, 0, 0] > 2 * sim.field("subtree_com")[1, 0, 0] > 0
