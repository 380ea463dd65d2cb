"""What works where MuJoCo 4 is not: run by tests, in a process whose MuJoCo is blocked, and beside MuJoCo 3.

``python without_native_mujoco.py blocked|present [EXPECTED WORDS OF THE ERROR …]``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.argv[1] == "blocked":
    sys.modules["mujoco"] = None  # type: ignore[assignment]  # whoever imports it gets ModuleNotFoundError

import torch

import headrace
from headrace.errors import MissingExtraError
from headrace.history import FrameStack, normalize_image
from headrace.learning import PPOCfg, gae
from headrace.recording import EpisodeDataset
from headrace.recording.playback import replay_dataset
from headrace.replay import ReplayBuffer
from headrace.testing import check_env
from headrace.types import StackSpec


class Plan:
    """A chunk policy of two actions."""

    horizon, action_dim = 2, 1

    def __call__(self, obs: Any, context: Any = None) -> torch.Tensor:
        return obs["policy"][:, None, :1].clamp(-1, 1).expand(-1, 2, 1)


def bridges() -> None:
    """Step, suspend and check a bridge; keep its transitions."""
    env = headrace.bridge("Pendulum-v1", 4, seed=1)
    store = ReplayBuffer(64, 4, env.single_observation_space, env.single_action_space)
    obs, _ = env.reset()
    env.suspend([2])
    for _ in range(6):
        active, action = env.active, torch.zeros(4, 1)
        step = env.step(action)
        store.extend(obs, action, step, active)
        obs = step.obs
    assert store.sample(8)["observation", "policy"].shape == (8, 3)
    env.close()
    assert check_env(lambda num_envs, **more: headrace.bridge("CartPole-v1", num_envs, **more), sizes=(1, 2))


def numbers() -> None:
    """Returns, images, stacks."""
    rows = torch.rand(4, 3)
    gae(rows, rows, rows, rows < 0.1, rows < 0.0, gamma=0.99, lam=0.9)
    images = torch.randint(0, 255, (2, 8, 8, 3), dtype=torch.uint8)
    assert normalize_image(images).dtype == torch.float32
    FrameStack(StackSpec(frames=2, dim=-1), num_envs=2, frame_shape=(8, 8, 3)).append(images)


def jobs(place: Path) -> None:
    """Evaluate, time, train, record and replay by name."""
    found = headrace.evaluate("gym:Pendulum-v1", Plan(), episodes=2, num_envs=2, progress=False)
    assert len(found.episodes) == 2
    headrace.bench.runtime(
        "gym:CartPole-v1", num_envs=2, num_steps=3, warmup_steps=1, run=headrace.RunCfg(output=place / "timed")
    )
    headrace.bench.report(place / "timed", output=place / "page.html")
    settings = PPOCfg(steps=4, minibatches=1, epochs=1)
    headrace.train(
        "gym:Pendulum-v1", num_envs=2, iterations=1, ppo=settings, run=headrace.RunCfg(output=place / "trained")
    )
    headrace.bench.run("gym:CartPole-v1", num_envs=2, num_steps=60, record=place / "set")
    replays = list(replay_dataset(EpisodeDataset(place / "set")))
    assert replays
    assert all(replay.exact for _, replay in replays)


def main() -> None:
    """Everything, then what must be refused."""
    bridges()
    numbers()
    with tempfile.TemporaryDirectory() as place:
        jobs(Path(place))
    assert sys.modules.get("mujoco") is None, "nothing of this has imported MuJoCo"
    try:
        headrace.make("cartpole")
    except MissingExtraError as error:
        refusal = str(error)
    else:
        raise AssertionError("a native task was made without MuJoCo 4")
    assert all(words in refusal for words in sys.argv[2:]), refusal
    print(f"refused: {refusal}")


if __name__ == "__main__":
    main()
