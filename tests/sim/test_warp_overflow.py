"""Contacts, equality constraints, mocap bodies, subsets and overflow on MuJoCo Warp (its CPU device)."""

from __future__ import annotations

import logging

import pytest
import torch

import headrace
from headrace.envs.task import Rows, Task, TaskCfg
from headrace.errors import ConfigError
from headrace.sim import MujocoSim, load_model
from headrace.sim.warp_sim import MujocoWarpSim
from headrace.types import Obs

# spheres on a floor, one of them held by a weld that can be switched off, and one welded to a mocap body
SCENE = """
<mujoco><option solver="Newton" timestep="0.004"/>
<worldbody>
  <geom type="plane" size="5 5 1"/>
  <body name="held" pos="0 0 1"><freejoint/><geom size="0.1" mass="0.5"/></body>
  <body name="led" pos="1 0 1"><freejoint/><geom size="0.1" mass="0.5"/></body>
  <body name="free" pos="2 0 0.1"><freejoint/><geom size="0.1" mass="0.5"/></body>
  <body name="hand" mocap="true" pos="1 0 1"/>
</worldbody>
<equality><weld body1="held"/><weld body1="led" body2="hand"/></equality>
</mujoco>
"""
# float32 against float64 over 50 physics steps of contact and welds
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def pile(count: int) -> str:
    spheres = "".join(
        f'<body pos="{index * 0.3} 0 0.0999"><freejoint/><geom size="0.1" mass="0.5"/></body>' for index in range(count)
    )
    return (
        '<mujoco><option solver="Newton"/><worldbody><geom type="plane" size="9 9 1"/>'
        + spheres
        + "</worldbody></mujoco>"
    )


class Falling(Task[TaskCfg]):
    """Nothing to do: spheres lie on a floor."""

    def __init__(self, count: int, njmax: int | None) -> None:
        super().__init__(TaskCfg(decimation=2, episode_length=100, njmax=njmax), load_model(pile(count)), {"policy": 1})

    def observe(self, rows: Rows) -> Obs:
        return {"policy": rows.get("qpos", 2)[:, None]}

    def reward(self, rows: Rows, actions: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), dtype=torch.float64, device=rows.device)


@pytest.fixture(scope="module")
def scene() -> MujocoWarpSim:
    return MujocoWarpSim(load_model(SCENE), 4)


def begin(sim: MujocoSim | MujocoWarpSim) -> None:
    sim.reset(None)
    # the welds of 1 and 3 are off: their spheres fall; every hand moves up by another length
    sim.field("eq_active")[1::2, 0] = 0
    for env in range(4):
        sim.field("mocap_pos")[env, 0, 2] = 1 + 0.1 * env
    sim.forward(None)


def test_contacts_welds_and_mocap_bodies_agree_with_native_mujoco(scene: MujocoWarpSim) -> None:
    native = MujocoSim(load_model(SCENE), 4)
    for sim in (native, scene):
        begin(sim)
        failed = sim.step(None, 50)
        assert failed is None or not failed.any()
    torch.testing.assert_close(scene.field("qpos").double(), native.field("qpos"), **TOLERANCE)
    heights = scene.field("qpos")[:, 2]
    assert (heights[0::2] > 0.9).all()  # held
    assert (heights[1::2] < 0.85).all()  # let go
    assert (scene.field("qpos")[:, 9].diff() > 0.02).all()  # led by their hands
    assert ((scene.field("qpos")[:, 16] - 0.1).abs() < 0.01).all()  # on the floor


def test_a_subset_step_keeps_equality_flags_and_everything_of_the_others(scene: MujocoWarpSim) -> None:
    begin(scene)
    scene.step(None, 10)
    before = {name: scene.field(name).clone() for name in ("qpos", "qvel", "eq_active", "mocap_pos", "xpos")}
    flags = scene.field("eq_active").clone()
    scene.step(torch.tensor([1, 2]), 10)
    scene.forward(torch.tensor([3]))
    assert torch.equal(scene.field("eq_active"), flags)
    for name, values in before.items():
        assert torch.equal(scene.field(name)[0], values[0]), name
    assert not torch.equal(scene.field("qpos")[1:3], before["qpos"][1:3])
    # a partial reset switches the weld of 1 on again, and nobody else's
    scene.reset(torch.tensor([1]))
    scene.forward(torch.tensor([1]))
    assert scene.field("eq_active")[:, 0].tolist() == [True, True, True, False]


def test_a_subset_goes_where_all_together_go(scene: MujocoWarpSim) -> None:
    begin(scene)
    start = scene.states(None)
    scene.step(None, 10)
    together = scene.field("qpos").clone()
    scene.set_states(None, start)
    scene.forward(None)
    scene.set_states(None, start)
    for ids in ([0, 2, 3], [1]):
        scene.step(torch.tensor(ids), 10)
    torch.testing.assert_close(scene.field("qpos"), together, rtol=1e-5, atol=1e-6)


def test_a_packed_state_has_equality_flags_and_restores_them(scene: MujocoWarpSim) -> None:
    begin(scene)
    states = scene.states(None)
    scene.reset(None)
    scene.set_states(torch.tensor([1, 2]), states[1:3])
    assert scene.field("eq_active")[:, 0].tolist() == [True, False, True, True]


def test_worlds_without_room_for_their_constraints_end_as_diverged_with_a_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = headrace.make(Falling(6, njmax=8), 3, sim="warp")
    env.reset(seed=0)
    with caplog.at_level(logging.WARNING, "headrace.envs"):
        step = env.step(torch.zeros(3, 0))
        env.step(torch.zeros(3, 0))
    assert step.truncated.all()
    assert step.info["ends"].diverged.all()
    assert env.divergences == 6
    assert len(caplog.records) == 1  # said once
    assert "NEFC" in caplog.text
    assert "njmax=8" in caplog.text
    assert "--set njmax" in caplog.text


def test_the_usual_sizes_have_room_for_twenty_spheres_on_a_floor() -> None:
    sim = MujocoWarpSim(load_model(pile(20)), 2)
    sim.reset(None)
    sim.forward(None)
    assert not sim.step(None, 20).any()
    assert (sim.field("qpos").reshape(2, 20, 7)[..., 2] > 0.09).all()
    assert sim.explain(torch.tensor([0, 1])) == ""


def test_sizes_that_make_no_sense_and_models_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="njmax: expected at least 1"):
        MujocoWarpSim(load_model(pile(1)), 2, njmax=0)
    with pytest.raises(ConfigError, match="njmax: expected at least 1"):
        TaskCfg(decimation=1, episode_length=1, njmax=0)
    sleeping = pile(1).replace('solver="Newton"/>', 'solver="Newton"><flag sleep="enable"/></option>')
    with pytest.raises(ConfigError, match="without sleeping"):
        MujocoWarpSim(load_model(sleeping), 2)
