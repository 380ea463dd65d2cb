"""ALOHA: equal to gym-aloha, whose answers are in ``aloha_reference.npz``, and to plain MuJoCo; found, drawn, refused.

``make test-aloha`` asks the genuine gym-aloha again and runs this file on its answers.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

import headrace
from headrace import testing
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make_task
from headrace.envs.tasks import aloha
from headrace.envs.tasks.aloha import ACTIONS, START
from headrace.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from headrace.sim import MujocoSim

HERE = Path(__file__).parent
REFERENCE = Path(os.environ.get("HEADRACE_ALOHA_REFERENCE", HERE / "aloha_reference.npz"))
TASKS = {"transfer_cube": "aloha-transfer-cube-state", "insertion": "aloha-insertion-state"}
FREE = 25
"""Control steps in which no hand of the scripted episodes touches anything."""
MODELS = {name: f"bimanual_viperx_{name}.xml" for name in TASKS}


@pytest.fixture(scope="module")
def commands():
    return np.load(HERE / "aloha_commands.npz")


@pytest.fixture(scope="module")
def genuine():
    return np.load(REFERENCE)


def put(env: BatchEnv, qpos: np.ndarray) -> None:
    """Joint positions from outside, and what follows from them."""
    rows = env.rows()
    rows.set("qpos", torch.from_numpy(qpos))
    env.sim.forward(None)


def stages(task: str, qpos: np.ndarray) -> np.ndarray:
    env = headrace.make(task, len(qpos), threads=1)
    env.reset()
    put(env, qpos)
    found = env.task.reward(env.rows(), torch.zeros(0)).numpy()
    env.close()
    return found


@pytest.mark.parametrize("name", TASKS)
def test_scripted_episodes_go_as_in_gym_aloha(name, commands, genuine) -> None:
    poses, actions = commands[f"{name}/poses"], commands[f"{name}/actions"]
    env = headrace.make(TASKS[name], len(poses), threads=1, autoreset="disabled")
    env.reset()
    start = env.rows().get("qpos").numpy()
    assert np.array_equal(start[:, :16], np.tile((*START, *START), (len(poses), 1)))
    put(env, np.concatenate((start[:, :16], poses), axis=1))
    for step in range(50):
        obs = env.step(torch.from_numpy(actions[:, step])).obs
        qpos = env.rows().get("qpos").numpy()
        for episode in range(len(poses)):
            theirs = genuine[f"{name}/{episode}/qpos"][step]
            # contacts differ between MuJoCo 3.8 and 4
            np.testing.assert_allclose(qpos[episode], theirs, rtol=0, atol=1e-5 if step < FREE else 0.02)
            seen = genuine[f"{name}/{episode}/observed"][step]
            np.testing.assert_allclose(
                obs["policy"][episode, :ACTIONS], seen, rtol=0, atol=1e-5 if step < FREE else 0.02 / 0.03956
            )
    env.close()


@pytest.mark.parametrize("name", TASKS)
def test_the_stage_of_every_step_of_scripted_episodes_is_that_of_gym_aloha(name, commands, genuine) -> None:
    seen: set[float] = set()
    for episode in range(len(commands[f"{name}/poses"])):
        rewards = genuine[f"{name}/{episode}/rewards"]
        assert np.array_equal(stages(TASKS[name], genuine[f"{name}/{episode}/qpos"]), rewards)
        seen |= set(rewards)
    assert {0.0, 2.0, 4.0} <= seen
    states = commands[f"{name}/states"]
    assert np.array_equal(stages(TASKS[name], states), genuine[f"{name}/stages"])
    assert len(set(genuine[f"{name}/stages"])) >= 3


def test_the_scripted_transfers_end_in_the_same_step_as_in_gym_aloha(commands, genuine) -> None:
    poses, actions = commands["transfer_cube/poses"], commands["transfer_cube/actions"]
    env = headrace.make("aloha-transfer-cube-state", len(poses), threads=1, autoreset="disabled")
    env.reset()
    put(env, np.concatenate((env.rows().get("qpos").numpy()[:, :16], poses), axis=1))
    ended: dict[int, int] = {}
    for step in range(actions.shape[1]):
        info = env.step(torch.from_numpy(actions[:, step])).info
        if "ends" in info:
            assert info["ends"].success.all()
            ended |= dict.fromkeys(info["ends"].env_ids.tolist(), step)
    theirs = {k: int(np.flatnonzero(genuine[f"transfer_cube/{k}/rewards"] == 4)[0]) for k in range(len(poses))}
    assert ended == theirs
    env.close()


@pytest.mark.parametrize("name", TASKS)
def test_steps_are_those_of_plain_mujoco_bit_for_bit_and_stages_follow_from_its_contacts(name, commands) -> None:
    model = mujoco.MjModel.from_xml_path(str(aloha.aloha_assets() / MODELS[name]))
    data, shown = mujoco.MjData(model), mujoco.MjData(model)
    poses, actions = commands[f"{name}/poses"][0], commands[f"{name}/actions"][0]
    env = headrace.make(TASKS[name], 2, threads=2, autoreset="disabled")
    env.reset(options={"episode_ids": [5, 6]})
    put(env, np.tile(np.concatenate((START, START, poses)), (2, 1)))
    env.suspend([0])
    data.qpos[:], data.ctrl[:] = np.concatenate((START, START, poses)), (*START, *START)
    # where the solver begins: what the forward of the reset has left in the state
    data.qacc_warmstart[:] = env.rows([1]).get("qacc_warmstart")[0]
    for action in actions[:90]:
        fingers = action[[6, 13]] * (0.058 - 0.01844) + 0.01844
        data.ctrl[:] = [*action[:6], fingers[0], -fingers[0], *action[7:13], fingers[1], -fingers[1]]
        mujoco.mj_step(model, data, 10)
        step = env.step(torch.from_numpy(np.tile(action, (2, 1))))
        rows = env.rows([1])
        assert np.array_equal(rows.get("qpos")[0], data.qpos)
        assert np.array_equal(rows.get("qvel")[0], data.qvel)
        shown.qpos[:] = data.qpos
        mujoco.mj_fwdPosition(model, shown)
        pairs = {(model.geom(c.geom1).name, model.geom(c.geom2).name) for c in shown.contact}
        touch = torch.tensor([[pair in pairs for pair in env.task.pairs]])  # type: ignore[attr-defined]  # ALOHA's
        assert float(step.reward[1]) == float(env.task.stage(touch))  # type: ignore[attr-defined]  # ALOHA's
        assert float(step.reward[0]) == 0
        if bool(step.terminated[1]):
            break
    env.close()


@pytest.mark.parametrize("task", TASKS.values())
def test_objects_begin_where_gym_aloha_draws_them(task) -> None:
    env = headrace.make(task, 512, seed=3, threads=1)
    obs, _ = env.reset()
    poses = obs["policy"][:, ACTIONS:].reshape(512, -1, 7).double()
    for index, ((low_x, high_x), (low_y, high_y)) in enumerate(env.task.places):  # type: ignore[attr-defined]
        for axis, low, high in ((0, low_x, high_x), (1, low_y, high_y)):
            values = poses[:, index, axis]
            assert low <= float(values.min()) + 1e-6 < low + 0.01 * (high - low) + 1e-6
            assert high - 0.01 * (high - low) - 1e-6 < float(values.max()) - 1e-6 <= high
            assert abs(float(values.mean()) - (low + high) / 2) < 0.05 * (high - low)
    assert torch.equal(
        poses[:, :, 2:], poses.new_tensor([0.05, 1, 0, 0, 0]).float().double().expand_as(poses[:, :, 2:])
    )
    flat = poses[:, :, :2].reshape(512, -1)
    assert np.abs(np.corrcoef(flat.numpy().T) - np.eye(flat.shape[1])).max() < 0.15
    env.close()


@pytest.mark.parametrize("task", ["aloha-transfer-cube", "aloha-insertion"])
def test_the_contract_holds_in_batches_of_1_4_and_16(task) -> None:
    small = {"episode_length": 17, "width": 32, "height": 24}
    results = testing.check_env(partial(headrace.make, task, overrides=small), sizes=(1, 4, 16), steps=8)
    assert [str(result) for result in results if result.not_claimed] == []


def walk(task: str, steps: int) -> None:
    env = headrace.make(task, 64, seed=1)
    obs, _ = env.reset()
    torch.manual_seed(0)
    for _ in range(steps):
        step = env.step(torch.rand(64, ACTIONS) * 2 - 1)
        obs = step.obs
        assert torch.isfinite(obs["policy"]).all()
        assert torch.isfinite(step.reward).all()
    assert torch.isfinite(env.rows().get("qvel")).all()
    # arms thrown about at random make MuJoCo diverge now and then: such an episode is truncated and begun anew
    assert env.divergences <= 64 * steps // 1000
    env.close()


@pytest.mark.parametrize("task", TASKS.values())
def test_random_actions_give_no_nan(task) -> None:
    walk(task, 20)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS.values())
def test_a_thousand_random_steps_of_64_environments_give_no_nan(task) -> None:
    walk(task, 1000)


def test_the_picture_is_480_by_640_and_sizes_and_cameras_can_be_chosen() -> None:
    env = headrace.make("aloha-transfer-cube", 1, threads=1)
    obs, _ = env.reset()
    assert {name: tuple(values.shape[1:]) for name, values in obs.items()} == {
        "policy": (14,),
        "critic": (21,),
        "top": (480, 640, 3),
    }
    assert obs["top"].dtype == torch.uint8
    assert torch.equal(obs["policy"], obs["critic"][:, :14])
    red = (obs["top"][0, ..., 0].int() - obs["top"][0, ..., 1].int()) > 80
    assert 200 < int(red.sum()) < 4000, "the cube is in the picture"
    assert env.instructions() == ("Pick up the cube with the right arm and transfer it to the left arm.",)
    env.close()
    chosen = {"cameras": ("top", "left_wrist"), "width": 40, "height": 30}
    env = headrace.make("aloha-insertion", 2, overrides=chosen)
    obs, _ = env.reset()
    assert obs["top"].shape == obs["left_wrist"].shape == (2, 30, 40, 3)
    assert not torch.equal(obs["top"], obs["left_wrist"])
    assert env.instructions() == ("Insert the peg into the socket.",) * 2
    env.close()
    with pytest.raises(UnknownNameError, match="unknown camera 'topp'; did you mean 'top'"):
        headrace.make("aloha-insertion", 1, overrides={"cameras": ("topp",)})


def test_gym_aloha_is_found_without_being_imported_and_its_absence_says_what_to_run(monkeypatch, tmp_path) -> None:
    make_task("aloha-transfer-cube-state")
    assert "gym_aloha" not in sys.modules
    assert "dm_control" not in sys.modules
    monkeypatch.setattr(aloha, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"not installed; run: pip install --no-deps gym-aloha"):
        headrace.make("aloha-transfer-cube", 1)
    empty = find_spec("json")
    assert empty is not None
    monkeypatch.setattr(aloha, "find_spec", lambda name: empty)
    with pytest.raises(DataError, match=r"bimanual_viperx_insertion.xml, got no such file; reinstall"):
        headrace.make("aloha-insertion", 1)


def test_a_simulation_whose_contacts_lag_behind_is_refused() -> None:
    task = make_task("aloha-transfer-cube-state")
    with pytest.raises(ConfigError, match=r"MujocoSim\(…, current_positions=True\)"):
        BatchEnv(task, MujocoSim(task.model, 1, threads=1))


def test_a_batch_that_all_diverges_at_once_is_finite_and_drawn_again() -> None:
    env = headrace.make("aloha-transfer-cube", 2, threads=1, overrides={"width": 32, "height": 24})
    obs, _ = env.reset()
    begun = obs["top"].clone()
    env.rows().set("qvel", torch.full((2, 22), 1e15, dtype=torch.float64))
    step = env.step(torch.zeros(2, ACTIONS))
    assert env.divergences == 2
    assert torch.equal(step.info["final_obs"]["top"], begun)
    assert torch.isfinite(step.obs["policy"]).all()
    assert not torch.equal(step.obs["critic"], obs["critic"])
    env.close()
