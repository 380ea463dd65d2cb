"""Playing episodes whose actions depend on the episode alone, and comparing what happened in them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace import rng
from headrace.errors import ConfigError
from headrace.testing._contract import EXACT, ContractEnv, Tolerance, fail, require_equal
from headrace.types import Obs, Step

_ACTION_SEED = 20_240_229
# a call of step lets about half of the watched environments act; this many calls per wanted step are plenty
_CALLS_PER_STEP = 20


@dataclass(slots=True)
class Trajectory:
    """What one episode went through; owns its tensors."""

    obs: list[dict[str, Tensor]]
    """The first observation, and the one after each step (the true last one where it ended)."""
    rewards: list[Tensor] = field(default_factory=list[Tensor])
    terminated: list[bool] = field(default_factory=list[bool])
    truncated: list[bool] = field(default_factory=list[bool])

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def ended(self) -> bool:
        """Whether the last step was the end of the episode."""
        return bool(self.rewards) and (self.terminated[-1] or self.truncated[-1])


def actions_of(env: ContractEnv, episode_ids: Tensor, steps: Tensor) -> Tensor:
    """Random actions as a function of (episode id, step) and of nothing else, one row per environment."""
    low, width, whole = _range_of(env.single_action_space)
    ids, steps = episode_ids.cpu().clamp_min(0), steps.cpu()
    count = low.numel()
    unit = rng.uniform(_ACTION_SEED, ids, "actions", count, draw=steps * count).reshape(-1, *low.shape)
    actions = low + torch.floor(unit * width) if whole else low + unit * width
    return actions.to(torch.int64 if whole else torch.float32).to(env.device)


def poisoned(env: ContractEnv, actions: Tensor, rows: Tensor) -> Tensor:
    """Return the actions with some rows (a mask or ids) made unusable: NaN, or a choice that does not exist."""
    low, _, whole = _range_of(env.single_action_space)
    actions = actions.clone()
    actions[rows] = (low - 1).to(actions) if whole else float("nan")
    return actions


def _range_of(space: spaces.Space[object]) -> tuple[Tensor, Tensor, bool]:
    """Lowest value and width, float64 of one action's shape, and whether actions are whole numbers."""
    if isinstance(space, spaces.Discrete):
        low, width, whole = np.asarray(space.start), np.asarray(space.n), True
    elif isinstance(space, spaces.MultiDiscrete):
        low, width, whole = space.start, space.nvec, True
    elif isinstance(space, spaces.MultiBinary):
        low, width, whole = np.zeros(space.shape), np.full(space.shape, 2), True
    elif isinstance(space, spaces.Box):
        whole = np.dtype(space.dtype).kind != "f"
        low = np.clip(space.low.astype(np.float64), -1e3, 1e3)
        width = np.clip(space.high.astype(np.float64), -1e3, 1e3) - low + whole
    else:
        raise ConfigError(f"action space: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}")
    return torch.from_numpy(np.array(low, np.float64)), torch.from_numpy(np.array(width, np.float64)), whole


def next_actions(env: ContractEnv) -> Tensor:
    """Return the actions for the coming step; rows of environments that are not active are unusable."""
    return poisoned(env, actions_of(env, env.episode_ids, env.episode_steps), ~env.active)


def final_or_next_obs(step: Step, env_id: int) -> dict[str, Tensor]:
    """Return the observation that belongs to the end of this step, before any automatic reset."""
    obs: Obs = step.obs
    final = step.info.get("_final_obs")
    if final is not None and bool(final[env_id]):
        obs = step.info.get("final_obs", obs)
    return {name: values[env_id].clone() for name, values in obs.items()}


class SuspensionPattern:
    """Which environments rest before each call of ``step``: random, about half, the same for the same number."""

    def __init__(self, env: ContractEnv, number: int) -> None:
        self._env = env
        self._episodes = torch.arange(env.num_envs)
        self._number = number

    def apply(self, call: int) -> None:
        """Suspend and resume environments for the coming call."""
        env = self._env
        draws = rng.uniform(self._number, self._episodes, "suspension", 1, draw=call)[:, 0]
        rest = (draws < 0.5).to(env.device)
        env.suspend(rest & env.active)
        env.resume(env.suspended & ~rest)

    def lift(self) -> None:
        """Resume all suspended environments."""
        self._env.resume(self._env.suspended)


def play(
    env: ContractEnv, obs: Obs, steps: int, *, watch: Collection[int], pattern: SuspensionPattern | None = None
) -> dict[int, Trajectory]:
    """Step until each episode in ``watch`` has ended or taken ``steps`` steps.

    Args:
        env: just reset, with all episodes of ``watch`` in it.
        obs: what ``reset`` returned.
        steps: how far to watch.
        watch: episode ids.
        pattern: which environments rest when; None for none.
    """
    seen: dict[int, Trajectory] = {}
    for slot, episode in enumerate(env.episode_ids.tolist()):
        if episode in watch:
            seen[episode] = Trajectory(obs=[{name: values[slot].clone() for name, values in obs.items()}])
    for call in range(steps * _CALLS_PER_STEP):
        if all(t.ended or len(t) >= steps for t in seen.values()):
            return seen
        if pattern is not None:
            pattern.apply(call)
        active, episodes = env.active.tolist(), env.episode_ids.tolist()
        step = env.step(next_actions(env))
        for slot, episode in enumerate(episodes):
            trajectory = seen.get(episode)
            if trajectory is None or trajectory.ended or not active[slot]:
                continue
            trajectory.obs.append(final_or_next_obs(step, slot))
            trajectory.rewards.append(step.reward[slot].clone())
            trajectory.terminated.append(bool(step.terminated[slot]))
            trajectory.truncated.append(bool(step.truncated[slot]))
    slow = {episode: len(t) for episode, t in seen.items()}
    raise AssertionError(
        f"expected {steps} steps of each episode in {steps * _CALLS_PER_STEP} calls of step, got {slow}"
    )


def require_same_trajectories(
    got: Mapping[int, Trajectory],
    expected: Mapping[int, Trajectory],
    steps: int,
    situation: str,
    tolerance: Tolerance = EXACT,
) -> None:
    """Fail unless the episodes agree over their first ``steps`` steps. ``situation`` says how ``got`` was played."""
    for episode, theirs in expected.items():
        ours = got[episode]
        for t in range(min(steps, len(theirs)) + 1):
            where = f"episode {episode} {situation}, step {t}"
            if t > len(ours):
                fail(f"{where}: expected it to go on, got its end after {len(ours)} steps")
            for name, values in theirs.obs[t].items():
                require_equal(ours.obs[t][name], values, f"{where}: obs[{name!r}]", tolerance)
            if t == 0:
                continue
            require_equal(ours.rewards[t - 1], theirs.rewards[t - 1], f"{where}: reward", tolerance)
            for flag in ("terminated", "truncated"):
                ours_flag, theirs_flag = getattr(ours, flag)[t - 1], getattr(theirs, flag)[t - 1]
                if ours_flag != theirs_flag:
                    fail(f"{where}: {flag}: expected {theirs_flag}, got {ours_flag}")
