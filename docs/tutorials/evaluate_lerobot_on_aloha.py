"""Lesson: evaluate a LeRobot policy on ALOHA.

Run it with ``python docs/tutorials/evaluate_lerobot_on_aloha.py``, after ``pip install --no-deps gym-aloha``. What it
says is asserted.

ACT plans 100 actions from one picture of 480 × 640 pixels. LeRobot's own loop draws three such pictures in every step
of gym-aloha, and the policy looks at one in 300. Here a picture is drawn when the policy is about to read it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

import headrace
from headrace import evaluate, load_policy
from headrace.evaluation import PlayCfg
from headrace.imitation.experts import expert_for
from headrace.policies import as_chunk_policy
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset

# The task has the observations, actions, control rate, rewards and starts of gym-aloha. LeRobot's `observation.state`
# is the group `policy`, its `observation.images.top` the group `top`. LeRobot evaluates with 400 steps; 40 do here.

settings = {"episode_length": 40, "width": 64, "height": 48}
env = headrace.make("aloha-transfer-cube", num_envs=4, autoreset="disabled", final_obs=False, overrides=settings)
print(env.single_observation_space)

# A checkpoint of LeRobot's is loaded with `headrace.policies.load_lerobot_policy(directory)`, or named on the command
# line: `headrace evaluate aloha-transfer-cube --policy DIRECTORY --execute 100 --set episode_length=400`. It brings its
# own processors. What matters is its shape, so this lesson has a class of that shape: it has a configuration that names
# its inputs, and `predict_action_chunk`.


class HoldStill:
    """Stays where it is, as an ACT that has learned nothing would at best."""

    config = SimpleNamespace(
        input_features={"observation.state": None, "observation.images.top": None},
        output_features={"action": SimpleNamespace(shape=(14,))},
        chunk_size=20,
        n_obs_steps=1,
    )

    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        """Plan (n, 20, 14) from a float picture (n, 3, 48, 64) and 14 positions."""
        assert batch["observation.images.top"].shape[1:] == (3, 48, 64)
        return batch["observation.state"][:, None].expand(-1, 20, -1)


result = evaluate(env, as_chunk_policy(HoldStill()), episodes=8, play=PlayCfg(execute=20), seed=1, progress=False)
counters = result.counters
print(f"{counters.env_steps} steps, {counters.frames_drawn} pictures, {counters.model_calls} calls of the model")
assert counters.env_steps == 8 * 40
assert counters.frames_drawn == counters.rows_inferred == 8 * 2
assert result.success_rate is not None
assert result.success_rate.value == 0.0
env.close()

# Demonstrations come from a scripted expert that sees joints and the pose of the cube. Recording wants every picture,
# so every picture is drawn; the export is a dataset of LeRobot's format, version 3, which its own class opens.

with tempfile.TemporaryDirectory() as folder:
    size = {"width": 64, "height": 48}
    env = headrace.make("aloha-transfer-cube", num_envs=2, autoreset="disabled", overrides=size)
    expert = expert_for("aloha-transfer-cube")
    with EpisodeRecorder(
        Path(folder, "demos"), RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)
    ) as recorder:
        env.attach(recorder)
        obs, _ = env.reset(seed=0)
        while bool(env.active.any()):
            obs = env.step(expert(obs)).obs
        env.detach(recorder)
    env.close()
    demos = EpisodeDataset(Path(folder, "demos"))
    assert [episode.meta.success for episode in demos] == [True, True]
    export_dataset(Path(folder, "demos"), Path(folder, "lerobot"), "lerobot", fps=50)
    assert Path(folder, "lerobot", "meta", "info.json").is_file()

# A policy that was trained on 2,000 such demonstrations ships with headrace. It reads the pose of the cube instead of a
# picture, so its task has no camera.

env = headrace.make("aloha-transfer-cube-state", num_envs=4, autoreset="disabled", final_obs=False)
trained = evaluate(
    env, load_policy("aloha-transfer-cube-state"), episodes=4, play=PlayCfg(execute=16), seed=1, progress=False
)
env.close()
assert trained.success_rate is not None
print(f"the trained policy succeeds in {trained.success_rate.value:.0%} of {len(trained.episodes)} episodes")
assert trained.success_rate.value >= 0.75
assert torch.tensor([episode.length for episode in trained.episodes]).max() < 300
