"""What every real batched simulator is put through: the contract, ``evaluate``, recording, frame stacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flat import evaluate
from headrace.bridges import BridgeEnv
from headrace.evaluation import Evaluation
from headrace.policies import as_chunk_policy
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg
from headrace.testing import check_env

MakeEnv = Callable[..., BridgeEnv]


def not_claimed(make: MakeEnv, *, sizes: tuple[int, ...], steps: int = 8) -> dict[str, str]:
    """Run the contract; what was left out, and why."""
    results = check_env(make, sizes=sizes, steps=steps)
    for result in results:
        print(result)
    return {result.check: result.not_claimed for result in results if result.not_claimed}


def stacked_policy(width: int, *, gain: float = 0.3) -> Any:
    """Three actions from a stack of the last two observations."""

    def plan(obs: dict[str, torch.Tensor]) -> torch.Tensor:
        frames = obs["policy"]
        assert frames.shape[1] == 2
        push = torch.tanh(gain * (frames[:, -1] - 0.5 * frames[:, 0]).sum(dim=1))
        shape = torch.linspace(1.0, 0.5, 3)[None, :, None] * torch.linspace(-1.0, 1.0, width)[None, None]
        return push[:, None, None] * shape

    return as_chunk_policy(plan, horizon=3, action_dim=width, obs_steps=2)


def evaluated(env: BridgeEnv, *, episodes: int, **settings: Any) -> Evaluation:
    """Play a plan with a chunk policy over frame stacks."""
    width = env.single_action_space.shape
    assert width is not None
    try:
        return evaluate(
            env, stacked_policy(width[0]), episodes=episodes, execute=2, progress=False, engine="inline", **settings
        )
    finally:
        env.close()


def recorded(env: BridgeEnv, path: Path, *, episodes: int, **settings: Any) -> tuple[Evaluation, EpisodeDataset]:
    """The same, recorded."""
    with EpisodeRecorder(path, RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        result = evaluated(env, episodes=episodes, **settings)
    return result, EpisodeDataset(path)
