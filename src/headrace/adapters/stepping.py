"""The side of an adapter that is the same for all libraries: actions from -1 to 1, scaled rewards, episodes counted."""

from __future__ import annotations

from typing import cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.adapters.learner import Finished
from headrace.envs import BatchEnv
from headrace.errors import ConfigError, UnsupportedError
from headrace.types import EpisodeEnds, Obs, StateDict, Step


class LearnerEnv:
    """A ``BatchEnv`` as learners want it. Borrows the environment: whoever made it closes it.

    The actor reads the group ``policy``; the critic reads ``critic`` where the task has it and the library can.
    """

    def __init__(self, env: BatchEnv, *, reward_scale: float) -> None:
        space, seen = env.single_action_space, env.single_observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"PPO: expected a task with continuous actions (a flat Box), got {space}")
        if not isinstance(seen, spaces.Dict) or "policy" not in seen.spaces:
            raise ConfigError(f"PPO: expected a task with an observation group 'policy', got {seen}")
        if env.autoreset != "same_step":
            raise ConfigError(f'PPO: expected an environment with autoreset="same_step", got {env.autoreset!r}')
        self.env = env
        self.num_envs, self.device = env.num_envs, env.device
        self.action_dim = space.shape[0]
        self.groups: dict[str, tuple[int, ...]] = {
            name: cast("tuple[int, ...]", group.shape) for name, group in seen.spaces.items()
        }
        self.critic_group = "critic" if "critic" in self.groups else "policy"
        self.obs: Obs = {}
        """The newest observation; empty before :meth:`reset`."""
        self._scale = reward_scale
        self._ends: list[EpisodeEnds] = []
        self._bounds = _bounds(space, env.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the actor's observation, one environment."""
        return self.groups["policy"]

    def reset(self) -> Obs:
        """Begin episodes everywhere."""
        self.obs, _ = self.env.reset()
        return self.obs

    def step(self, actions: Tensor) -> Step:
        """One step with actions (N, A) from -1 to 1, cut there; the reward is scaled, and a fresh tensor."""
        step = self.env.step(self.rescaled(actions))
        self.obs = step.obs
        if "ends" in step.info:
            self._ends.append(step.info["ends"])
        return step._replace(reward=step.reward * self._scale)

    def rescaled(self, actions: Tensor) -> Tensor:
        """Actions (N, A) from -1 to 1 in the environment's bounds; unbounded ones as they are."""
        if self._bounds is None:
            return actions
        middle, half = self._bounds
        return torch.addcmul(middle, actions.clamp(-1.0, 1.0), half)

    def finished(self) -> Finished:
        """The episodes that ended since the last call."""
        ends, self._ends = self._ends, []
        known = bool(ends) and ends[0].success is not None
        return Finished(
            env_ids=[number for end in ends for number in end.env_ids.tolist()],
            returns=[number for end in ends for number in end.returns.tolist()],
            lengths=[number for end in ends for number in end.lengths.tolist()],
            success=[flag for end in ends for flag in cast("Tensor", end.success).tolist()] if known else None,
        )

    def state_dict(self) -> StateDict:
        """Of the environment."""
        return self.env.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Put the environment back; the newest observation is what it holds now."""
        self.env.load_state_dict(state)
        self.obs = self.env.observe()


def true_next(step: Step, group: str) -> Tensor:
    """The observation that followed the action, (N, …): the last of its episode where that ended."""
    if "final_obs" not in step.info or "_final_obs" not in step.info:
        return step.obs[group]
    final, ended = step.info["final_obs"][group], step.info["_final_obs"]
    return torch.where(ended.reshape(-1, *([1] * (final.dim() - 1))), final, step.obs[group])


def picture(shape: tuple[int, ...]) -> bool:
    """Whether a group of this shape is a picture; anything but a vector or a picture is refused."""
    if len(shape) not in (1, 3):
        raise UnsupportedError(f"observation group: expected a vector or a picture, got shape {shape}")
    return len(shape) == 3


def channels_first(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The shape of a picture with its channels first."""
    first, second, third = shape
    return (third, first, second) if third < first else (first, second, third)


def float_picture(rows: Tensor) -> Tensor:
    """Pictures (n, H, W, C) or (n, C, H, W), uint8 or float, as float32 (n, C, H, W), bytes divided by 255."""
    rows = rows.to(torch.float32) / 255.0 if rows.dtype == torch.uint8 else rows
    return rows.movedim(-1, 1) if rows.shape[-1] < rows.shape[1] else rows


def _bounds(space: spaces.Box, device: torch.device) -> tuple[Tensor, Tensor] | None:
    low, high = torch.as_tensor(space.low, device=device), torch.as_tensor(space.high, device=device)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        return None
    return (high + low) / 2.0, (high - low) / 2.0
