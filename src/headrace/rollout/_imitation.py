"""Behavior cloning: record an expert's successful episodes, and teach a chunk policy to plan as it acts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace import rng
from headrace.chunking import ChunkContext
from headrace.envs import BatchEnv
from headrace.errors import ConfigError
from headrace.rollout._act_policy import ActCfg, ActPolicy
from headrace.rollout.experts import Expert
from headrace.types import Obs

_WAVES_WITHOUT_SUCCESS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Successful episodes end to end, M steps in all; the tensors belong to whoever holds the record."""

    obs: Tensor
    """float32 (M, obs_dim): the group ``policy``."""
    actions: Tensor
    """float32 (M, A): what the expert wanted in each state, not the disturbed action that was played."""
    left: Tensor
    """int64 (M,): steps to the end of the episode, this one included."""
    episode_ids: Tensor
    """int64 (E,): the episodes that are in here, ascending."""
    attempted: int
    """Episodes that the expert was given for them."""

    def chunks(self, index: Tensor, horizon: int) -> tuple[Tensor, Tensor]:
        """The next ``horizon`` actions from steps ``index`` (n,), and which of them are before the episode's end.

        Returns:
            float32 (n, horizon, A), and bool (n, horizon); rows beyond the end hold any values.
        """
        ahead = torch.arange(horizon)
        inside = ahead < self.left[index][:, None]
        return self.actions[(index[:, None] + ahead).clamp(max=len(self.actions) - 1)], inside


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
        expert: see :data:`headrace.rollout.experts.Expert`.
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
    """One episode in every slot: (id, observations, wanted actions) of those that succeed, in the order of ids."""
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


@dataclass(frozen=True, kw_only=True)
class CloneCfg:
    """Settings of :func:`clone`."""

    updates: int = 8000
    """Steps of the optimizer, about 20 ms each on a core; the learning rate falls to nothing over them."""
    batch: int = 128
    learning_rate: float = 1e-3
    average: float = 0.998
    """Decay of the running average of the weights, which is what :func:`clone` returns."""
    seed: int = 0


def clone(demos: Demonstrations, cfg: CloneCfg, *, progress: Callable[[int, float], None] | None = None) -> ActPolicy:
    """Train a chunk policy on demonstrations by least absolute error.

    Args:
        demos: at least one episode.
        cfg: see there.
        progress: told the updates made and the recent loss, now and then.
    """
    if cfg.updates < 1:
        raise ConfigError(f"clone: expected at least 1 update, got {cfg.updates}")
    generator = torch.Generator().manual_seed(cfg.seed)
    policy = untrained(demos, seed=cfg.seed).train()
    averaged = copy.deepcopy(policy).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.learning_rate, weight_decay=1e-4)
    mean, std = policy.get_buffer("action_mean"), policy.get_buffer("action_std")
    for update in range(cfg.updates):
        falling = 0.5 * (1.0 + math.cos(math.pi * update / cfg.updates))
        for group in optimizer.param_groups:
            group["lr"] = cfg.learning_rate * min(1.0, (update + 1) / 100) * falling
        index = torch.randint(len(demos.obs), (cfg.batch,), generator=generator)
        target, inside = demos.chunks(index, policy.horizon)
        error = (policy.normalized(demos.obs[index]) - (target - mean) / std).abs().mean(dim=2)
        loss = (error * inside).sum() / inside.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        # the average forgets its random start first
        decay = min(cfg.average, (update + 1) / (update + 11))
        with torch.no_grad():
            for kept, new in zip(averaged.parameters(), policy.parameters(), strict=True):
                kept.lerp_(new, 1.0 - decay)
        if progress is not None and (update + 1) % 20 == 0:
            progress(update + 1, float(loss.detach()))
    return averaged


def untrained(demos: Demonstrations, *, seed: int) -> ActPolicy:
    """A policy with random weights and the statistics of the demonstrations: what :func:`clone` starts from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ActPolicy(ActCfg(obs_dim=demos.obs.shape[1], action_dim=demos.actions.shape[1]))
    policy.set_statistics(demos.obs, demos.actions)
    return policy.eval()


@dataclass(frozen=True, slots=True)
class MeanAction:
    """A chunk policy that replays one action (A,): the least that a learner must beat."""

    action: Tensor
    horizon: int = 16
    obs_steps: int = 1

    @property
    def action_dim(self) -> int:
        """Size of the action."""
        return len(self.action)

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """The action, (n, horizon, A)."""
        del obs
        return self.action.expand(len(context.env_ids), self.horizon, -1).clone()
