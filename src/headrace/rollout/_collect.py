"""Collecting a batch of steps as a ``TensorDict``, with or without next observations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headrace.envs import BatchEnv
from headrace.errors import ConfigError
from headrace.types import Obs

if TYPE_CHECKING:
    from tensordict import TensorDict


def collect(
    env: BatchEnv,
    policy: Callable[[Obs], Tensor],
    steps: int,
    *,
    reset: bool = True,
    seed: int | None = None,
    compact: bool = False,
) -> TensorDict:
    """Run a policy for some steps and return what happened, environments first: batch (N, steps).

    Keys: ``("observation", group)``, ``action``, ``active``, ``step_count``, ``("collector", "traj_ids")`` (the
    environments' episode ids), and under ``next``: ``("observation", group)``, ``reward``, ``done``, ``terminated``,
    ``truncated``. Next observations are the true last ones where an episode ended. Rewards, flags and ``step_count``
    are (N, steps, 1).

    Args:
        env: stepped in its present state; environments that are suspended stay so, and ``active`` is False for them.
        policy: observation groups (N, …) → actions (N, …).
        steps: how many.
        reset: begin with ``env.reset(seed=seed)``; False goes on from where the environments are.
        seed: for the reset.
        compact: drop every ``("next", "observation")`` here, at the producer: half the memory. They can be put back
            where the following entry has them with :func:`headrace.replay.reconstruct_next`, and are lost at
            ends. A :class:`headrace.replay.ReplayBuffer` is smaller still and loses nothing;
            :func:`headrace.replay.to_delta` keeps rounded differences.
    """
    from tensordict import TensorDict

    if steps < 1:
        raise ConfigError(f"collect: expected at least 1 step, got {steps}")
    obs = env.reset(seed=seed)[0] if reset else env.observe()
    entries: list[TensorDict] = []
    size = [env.num_envs]
    for _ in range(steps):
        active, ids, counts = env.active, env.episode_ids, env.episode_steps
        action = policy(obs)
        step = env.step(action)
        after: dict[str, Tensor | TensorDict] = {
            "reward": step.reward[:, None],
            "done": (step.terminated | step.truncated)[:, None],
            "terminated": step.terminated[:, None],
            "truncated": step.truncated[:, None],
        }
        if not compact:
            true = _true_next(step.obs, step.info.get("final_obs"), step.info.get("_final_obs"))
            after["observation"] = TensorDict({**true}, size)
        entries.append(
            TensorDict(
                {
                    "observation": TensorDict({**obs}, size),
                    "action": action,
                    "active": active,
                    "step_count": counts[:, None],
                    "collector": TensorDict({"traj_ids": ids}, size),
                    "next": TensorDict({**after}, size),
                },
                size,
            )
        )
        obs = step.obs
    return torch.stack(entries, 1)  # pyright: ignore[reportArgumentType, reportReturnType]  # TensorDict overloads it


def _true_next(obs: Obs, final: Obs | None, ended: Tensor | None) -> Obs:
    """The observation that follows each action: the last of its episode where that ended."""
    if final is None or ended is None:
        return obs
    return {
        name: torch.where(ended.reshape(-1, *([1] * (value.dim() - 1))), final[name], value)
        for name, value in obs.items()
    }
