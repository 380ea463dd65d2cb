"""``MujocoSim``: the protocol, and equality with MuJoCo's own loop."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

from headrace.envs.registry import make_task
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.sim import MujocoSim
from headrace.testing import check_simulation

MODELS = {name: make_task(name).model for name in ("inverted-pendulum", "ant", "humanoid", "pusher")}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_mujoco_sim_keeps_the_protocol(model, threads) -> None:
    derived = ("xpos", "cvel", "qfrc_actuator")
    result = check_simulation(lambda num_envs: MujocoSim(model, num_envs, threads=threads), derived=derived)
    assert result.not_claimed is None


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_states_and_derived_fields_equal_a_loop_of_mj_step(model) -> None:
    sim = MujocoSim(model, 3, threads=2)
    qpos, qvel, ctrl, xpos = (sim.field(name) for name in ("qpos", "qvel", "ctrl", "xpos"))
    generator = np.random.default_rng(0)
    sim.reset(None)
    qvel.copy_(torch.from_numpy(generator.normal(0, 0.1, (3, model.nv))))
    sim.forward(None)
    datas = [mujoco.MjData(model) for _ in range(3)]
    for data, row in zip(datas, qvel.clone(), strict=True):
        data.qvel[:] = row
        mujoco.mj_forward(model, data)
    for count in range(20):
        acting = [0, 2] if count % 3 else [0, 1, 2]
        actions = generator.uniform(-0.4, 0.4, (3, model.nu))
        ctrl.copy_(torch.from_numpy(actions))
        assert sim.step(torch.tensor(acting), 2) is None
        for i in acting:
            datas[i].ctrl[:] = actions[i]
            for _ in range(2):
                mujoco.mj_step(model, datas[i])
        for i in range(3):
            assert np.array_equal(qpos[i].numpy(), datas[i].qpos), (count, i)
            assert np.array_equal(qvel[i].numpy(), datas[i].qvel), (count, i)
            assert np.array_equal(xpos[i].numpy(), datas[i].xpos), (count, i)


def test_thread_count_changes_no_bit() -> None:
    model = MODELS["humanoid"]
    states = []
    for threads in (1, 2, 5):
        sim = MujocoSim(model, 13, threads=threads)
        sim.reset(None)
        sim.field("qvel").copy_(torch.linspace(-0.2, 0.2, 13 * model.nv, dtype=torch.float64).reshape(13, model.nv))
        sim.forward(None)
        for _ in range(5):
            sim.step(torch.arange(0, 13, 2), 3)
            sim.step(None, 1)
        states.append(sim.states(None))
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])


def test_fields_are_live_views_without_a_copy() -> None:
    sim = MujocoSim(MODELS["ant"], 2, threads=1)
    qpos, again = sim.field("qpos"), sim.field("qpos")
    assert qpos.data_ptr() == again.data_ptr()
    sim.reset(None)
    before = qpos.clone()
    sim.forward(None)
    sim.step(None, 3)
    assert not torch.equal(qpos, before)


def test_a_derived_field_that_nobody_bound_in_time_is_an_error_not_zeros() -> None:
    sim = MujocoSim(MODELS["ant"], 2, threads=1)
    sim.field("xpos")
    sim.seal()
    sim.field("xpos")
    sim.field("qpos")
    with pytest.raises(LifecycleError, match="'cvel': expected it to be read when the environment was made"):
        sim.field("cvel")


def test_a_heavier_body_falls_the_same_but_answers_less_to_a_force() -> None:
    model = MODELS["ant"]
    sim = MujocoSim(model, 2, threads=1)
    mass = sim.model_field("body_mass")
    sim.reset(None)
    mass[1] *= 10.0
    sim.field("qpos")[:, 2] = 5.0
    sim.field("xfrc_applied")[:, 1, 0] = 1.0
    sim.forward(None)
    sim.step(None, 10)
    speed = sim.field("qvel")[:, 0].abs()
    assert float(speed[1]) < 0.2 * float(speed[0])
    # not exactly: armature and joint damping do not grow with the mass
    torch.testing.assert_close(sim.field("qvel")[0, 2], sim.field("qvel")[1, 2], rtol=1e-2, atol=0)


def test_model_fields_travel_in_the_state_dict_and_are_nominal_where_it_has_none() -> None:
    model = MODELS["pusher"]
    plain, changed = MujocoSim(model, 2, threads=1), MujocoSim(model, 2, threads=1)
    for sim in (plain, changed):
        sim.reset(None)
    changed.model_field("body_mass")[1] *= 3.0
    changed.field("ctrl")[:] = 1.0
    changed.forward(None)
    changed.step(None, 2)
    other = MujocoSim(model, 2, threads=1)
    other.load_state_dict(changed.state_dict())
    assert torch.equal(other.model_field("body_mass"), changed.model_field("body_mass"))
    for sim in (changed, other):
        sim.step(None, 5)
    assert torch.equal(other.states(None), changed.states(None))
    plain.forward(None)
    changed.load_state_dict(plain.state_dict())
    nominal = torch.from_numpy(model.body_mass.copy())
    assert torch.equal(changed.model_field("body_mass"), nominal.expand(2, -1))


def test_a_failing_simulation_keeps_being_reported_until_it_is_reset() -> None:
    sim = MujocoSim(MODELS["ant"], 4, threads=2)
    sim.reset(None)
    sim.forward(None)
    sim.field("qpos")[3, 0] = float("nan")
    sim.field("qvel")[1, 0] = 1e20
    for ids, expected in ((None, [1, 3]), (torch.tensor([0, 2, 3]), [3]), (torch.tensor([0, 2]), None)):
        failed = sim.step(ids, 1)
        assert (None if failed is None else failed.nonzero().flatten().tolist()) == expected
    sim.reset(torch.tensor([1, 3]))
    sim.forward(torch.tensor([1, 3]))
    assert sim.step(None, 1) is None


def test_a_state_dict_of_another_size_is_refused() -> None:
    sim, other = MujocoSim(MODELS["ant"], 2, threads=1), MujocoSim(MODELS["ant"], 3, threads=1)
    with pytest.raises(DataError, match="expected states of shape"):
        sim.load_state_dict(other.state_dict())


def test_numbers_of_envs_and_threads_are_checked() -> None:
    for kwargs, message in (
        ({"num_envs": 0}, "num_envs: expected at least 1"),
        ({"num_envs": 1, "threads": 0}, "threads"),
    ):
        with pytest.raises(ConfigError, match=message):
            MujocoSim(MODELS["ant"], **kwargs)


def test_a_closed_simulation_says_so() -> None:
    sim = MujocoSim(MODELS["ant"], 2, threads=1)
    sim.close()
    sim.close()
    for call in (
        lambda: sim.step(None, 1),
        lambda: sim.reset(None),
        lambda: sim.field("qpos"),
        lambda: sim.states(None),
    ):
        with pytest.raises(LifecycleError, match="closed"):
            call()
