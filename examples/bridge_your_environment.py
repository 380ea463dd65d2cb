"""Give a Gymnasium environment of your own suspend, resume, exact ends and recording."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gymnasium
import numpy as np
import torch

import headrace
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg


class Thermostat(gymnasium.Env[np.ndarray, np.int64]):
    """Keep a room at 20 degrees: the environment that you already have."""

    observation_space = gymnasium.spaces.Box(-50, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, object] | None = None):
        super().reset(seed=seed, options=options)
        self._celsius, self._minutes = float(self.np_random.uniform(10, 30)), 0
        return np.array([self._celsius], np.float32), {}

    def step(self, action: np.int64):
        self._celsius += (0.8 if action else -0.5) + float(self.np_random.normal(0, 0.1))
        self._minutes += 1
        return np.array([self._celsius], np.float32), -abs(self._celsius - 20), False, self._minutes == 60, {}


def main() -> None:
    """Step four rooms; one of them waits. Record what they do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-steps", type=int, default=130)
    parser.add_argument(
        "--output", type=Path, default=None, help="directory for the episodes (default: a new one in /tmp)"
    )
    arguments = parser.parse_args()
    folder = arguments.output or Path(tempfile.mkdtemp()) / "rooms"

    env = headrace.bridge([Thermostat] * 4)
    info = DatasetInfo(recipe={"source": "thermostat"}, fps=1)
    with EpisodeRecorder(folder, RecorderCfg(fields=("obs", "actions", "rewards")), info) as recorder:
        env.attach(recorder)
        obs, _ = env.reset(seed=0)
        env.suspend([3])  # waits for its owner: not stepped, not recorded
        for _ in range(arguments.num_steps):
            cold = obs["policy"][:, 0] < 20
            obs = env.step(cold.to(torch.int64)).obs
    print(f"kept as {env.fidelity}; {len(EpisodeDataset(folder))} episodes in {folder}")
    env.close()


if __name__ == "__main__":
    main()
