"""The expert for ALOHA's transfer of a cube: its arm is MuJoCo's, it succeeds, and its episodes are worth keeping."""

from __future__ import annotations

from pathlib import Path

import mujoco
import pytest
import torch

import headrace
from flat import evaluate
from headrace import load_policy
from headrace.envs.tasks import aloha
from headrace.imitation.demonstrations import record_demonstrations
from headrace.imitation.experts import disturbance_for, expert_for
from headrace.imitation.experts._arm import PINCH, _from_left, _from_right, in_gripper, joints_for, pinch_place
from headrace.policies.load_policy import list_shipped_policies
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.statistics import wilson_interval

STATE = "aloha-transfer-cube-state"


@pytest.mark.parametrize(("arm", "frame", "at"), [("left", _from_left, 0), ("right", _from_right, 8)])
def test_the_kinematics_are_those_of_the_model(arm, frame, at) -> None:
    model = aloha.aloha_model("bimanual_viperx_transfer_cube.xml", ())
    data = mujoco.MjData(model)
    torch.manual_seed(0)
    joints = (torch.rand(20, 6, dtype=torch.float64) - 0.5) * torch.tensor([2, 1.5, 2, 0, 2, 0])
    place, thing = pinch_place(joints), torch.rand(20, 3, dtype=torch.float64)
    seen = in_gripper(frame(thing), joints)
    for row in range(20):
        data.qpos[at : at + 6] = joints[row]
        mujoco.mj_kinematics(model, data)
        body = data.body(f"vx300s_{arm}/gripper_link")
        turn = torch.from_numpy(body.xmat.reshape(3, 3).copy())
        pinch = torch.from_numpy(body.xpos.copy()) + turn[:, 0] * PINCH
        # the model's right base is turned by 3.1416, not by pi
        torch.testing.assert_close(place[row], frame(pinch[None])[0], atol=2e-5, rtol=0)
        torch.testing.assert_close(seen[row], turn.T @ (thing[row] - pinch), atol=2e-5, rtol=0)


def test_the_inverse_kinematics_find_the_place_and_pitch_within_reach_and_stay_finite_beyond() -> None:
    torch.manual_seed(0)
    places = torch.rand(50, 3, dtype=torch.float64) * torch.tensor([0.25, 0.4, 0.25]) + torch.tensor([0.25, -0.2, 0.05])
    for pitch, roll in ((0.6, 0.0), (-0.35, 1.5)):
        joints = joints_for(places, pitch, roll)
        torch.testing.assert_close(pinch_place(joints), places, atol=1e-9, rtol=0)
        torch.testing.assert_close(joints[:, 1] + joints[:, 2] + joints[:, 4], torch.full((50,), pitch).double())
        assert (joints[:, 5] == roll).all()
    assert torch.isfinite(joints_for(places * 10, 0.6, 0.0)).all()
    assert torch.isfinite(joints_for(places * 0, 0.6, 0.0)).all()


def play(task: str, num_envs: int, **overrides) -> torch.Tensor:
    """Successes of the first episodes, bool (num_envs,)."""
    env = headrace.make(task, num_envs, seed=0, autoreset="disabled", final_obs=False, overrides=overrides)
    expert, success = expert_for(task), torch.zeros(num_envs, dtype=torch.bool)
    obs, _ = env.reset()
    while bool(env.active.any()):
        step = env.step(expert(obs), observe=torch.zeros(num_envs, dtype=torch.bool))
        obs = step.obs
        if "ends" in step.info:
            success[step.info["ends"].env_ids] = step.info["ends"].success
    env.close()
    return success


def test_the_expert_passes_the_cube_on() -> None:
    assert float(play(STATE, 20).double().mean()) >= 0.9


def test_the_expert_does_the_same_beside_a_camera() -> None:
    small = {"width": 8, "height": 6, "episode_length": 150}
    assert torch.equal(play("aloha-transfer-cube", 4, **small), play(STATE, 4, episode_length=150))


@pytest.mark.slow
def test_the_expert_succeeds_in_nine_of_ten_episodes_of_200() -> None:
    success = play(STATE, 200)
    found = wilson_interval(int(success.sum()), 200)
    assert found.low >= 0.9, found


def test_disturbed_demonstrations_succeed_and_keep_what_the_expert_wanted() -> None:
    env = headrace.make(STATE, 8, autoreset="disabled", final_obs=False)
    found = record_demonstrations(env, expert_for(STATE), 6, seed=3, noise=disturbance_for(STATE))
    assert found.attempted <= 8
    assert found.obs.shape[1:] == (21,)
    torch.testing.assert_close(found.actions, expert_for(STATE)({"policy": found.obs}))
    assert float(found.actions.abs().max()) > 1.0, "beyond gym-aloha's declared bounds, and not clipped"
    env.close()


def test_demonstrations_are_recorded_with_pictures_and_exported_to_lerobot(tmp_path: Path) -> None:
    size = {"width": 64, "height": 48}
    env = headrace.make("aloha-transfer-cube", 2, seed=0, autoreset="disabled", overrides=size)
    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))
    expert = expert_for("aloha-transfer-cube")
    with EpisodeRecorder(tmp_path / "demos", cfg, DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        obs, _ = env.reset()
        while bool(env.active.any()):
            obs = env.step(expert(obs)).obs
        env.detach(recorder)
    env.close()
    dataset = EpisodeDataset(tmp_path / "demos")
    assert [episode.meta.success for episode in dataset] == [True, True]
    assert {episode.meta.instruction for episode in dataset} == {
        "Pick up the cube with the right arm and transfer it to the left arm."
    }
    pytest.importorskip("pyarrow")
    export_dataset(tmp_path / "demos", tmp_path / "lerobot", "lerobot", fps=50)
    assert verify_dataset(tmp_path / "lerobot").problems == ()
    import json

    features = json.loads((tmp_path / "lerobot" / "meta" / "info.json").read_text())["features"]
    assert features["observation.state"]["shape"] == features["action"]["shape"] == [14]
    assert features["observation.images.top"]["shape"] == [48, 64, 3]


def test_the_shipped_policy_scores_what_the_manifest_says() -> None:
    stated = list_shipped_policies()[STATE]["score"]
    assert isinstance(stated, dict)
    env = headrace.make(STATE, 12, autoreset="disabled", final_obs=False)
    found = evaluate(env, load_policy(STATE), episodes=24, execute=16, seed=77, progress=False).success_rate
    env.close()
    assert found is not None
    assert found.high >= stated["low"]
    assert found.value >= 0.85


def test_the_table_of_the_shipped_policy_is_the_same_in_batches_of_1_4_and_16() -> None:
    tables = []
    for num_envs in (1, 4, 16):
        env = headrace.make(STATE, num_envs, autoreset="disabled", final_obs=False, overrides={"episode_length": 60})
        tables.append(evaluate(env, load_policy(STATE), episodes=6, execute=16, seed=5, progress=False).episodes)
        env.close()
    assert tables[0] == tables[1] == tables[2]
