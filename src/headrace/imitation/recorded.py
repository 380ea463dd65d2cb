"""An expert's successful episodes, recorded in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace import rng
from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError
from headrace.imitation.demonstrations import Demonstrations
from headrace.imitation.experts import Expert

_WAVES_WITHOUT_SUCCESS = 10


def record_demonstrations(
    env: BatchEnv,
    expert: Expert,
    count: int,
    *,
    seed: int,
    noise: float = 0.3,
    progress: Callable[[int], None] | None = None,
) -> Demonstrations:
    """Play episodes 0, 1, 2, … with an expert and keep the first ``count`` that succeed.

    Which episodes are kept depends on their ids, not on how soon they end.

    Args:
        env: made with ``autoreset="disabled"``: an episode that has ended costs nothing while the others finish.
        expert: see :func:`headrace.imitation.experts.expert_for`.
        count: demonstrations wanted.
        seed: of the episodes and of the disturbance.
        noise: spread of the disturbance of the played actions, in actions' own units. A learner that has seen how the
            expert recovers does not drift away from it.
        progress: told how many demonstrations there are after each wave of episodes.
    """
    if env.autoreset != "disabled":
        raise ConfigError(f'record_demonstrations: expected autoreset="disabled", got {env.autoreset!r}')
    if count < 1:
        raise ConfigError(f"record_demonstrations: expected at least 1 demonstration, got {count}")
    if not isinstance(env.single_action_space, spaces.Box):
        raise ConfigError(f"record_demonstrations: expected continuous actions, got {env.single_action_space}")
    kept: list[tuple[int, Tensor, Tensor]] = []
    wave = 0
    while len(kept) < count:
        first = wave * env.num_envs
        kept.extend(_wave(env, expert, torch.arange(first, first + env.num_envs), seed, noise))
        wave += 1
        if not kept and wave == _WAVES_WITHOUT_SUCCESS:
            raise ConfigError(f"record_demonstrations: no success in {wave * env.num_envs} episodes; check the expert")
        if progress is not None:
            progress(min(len(kept), count))
    kept = kept[:count]
    lengths = [len(actions) for _, _, actions in kept]
    return Demonstrations(
        obs=torch.cat([obs for _, obs, _ in kept]),
        actions=torch.cat([actions for _, _, actions in kept]),
        left=torch.cat([torch.arange(length, 0, -1) for length in lengths]),
        episode_ids=torch.tensor([episode for episode, _, _ in kept]),
        attempted=kept[-1][0] + 1,
    )


def _wave(env: BatchEnv, expert: Expert, ids: Tensor, seed: int, noise: float) -> list[tuple[int, Tensor, Tensor]]:
    """Yield (id, observations, wanted actions) of episodes that succeed, one in every slot, in the order of ids."""
    obs, _ = env.reset(seed=seed, options={"episode_ids": ids})
    space = cast("spaces.Box", env.single_action_space)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    seen: list[Tensor] = []
    wanted: list[Tensor] = []
    length = torch.zeros(len(ids), dtype=torch.int64)
    while bool(env.active.any()):
        action = expert(obs)
        seen.append(obs["policy"].clone())
        wanted.append(action)
        size = action.shape[1]
        disturbance = rng.normal(seed, ids, "demonstration noise", size, draw=len(seen) * size).to(action.dtype)
        # what the expert itself wants may lie beyond the declared bounds
        obs, _, _, _, info = env.step((action + noise * disturbance).clamp(low.minimum(action), high.maximum(action)))
        if "ends" in info:
            ends = info["ends"]
            if ends.success is None:
                raise ConfigError("record_demonstrations: expected a task that measures success")
            length[ends.env_ids] = torch.where(ends.success, ends.lengths, 0)
    every_obs, every_action = torch.stack(seen, 1), torch.stack(wanted, 1)
    return [
        (int(ids[slot]), every_obs[slot, :steps].clone(), every_action[slot, :steps].clone())
        for slot, steps in enumerate(length.tolist())
        if steps
    ]
