"""The side of an adapter that is the same for all libraries: actions from -1 to 1, scaled rewards, episodes counted."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from gymnasium import spaces
from torch import Tensor

from headrace.adapters._learner import Finished
from headrace.envs import BatchEnv
from headrace.errors import ConfigError, UnsupportedError
from headrace.types import EpisodeEnds, Obs, StateDict, StepInfo


class Turn(NamedTuple):
    """A step as adapters hand it on. In most steps no episode ends: flags are then the same tensors each time."""

    obs: Obs
    reward: Tensor
    """Scaled, (N,); a fresh tensor, or the environment's own where nothing is scaled."""
    terminated: Tensor
    """bool (N,), not to be changed, as the next two."""
    truncated: Tensor
    """Cut off, and not terminated in the same step."""
    ended: Tensor
    any_ended: bool
    any_truncated: bool
    info: StepInfo


class LearnerEnv:
    """A ``BatchEnv`` as learners want it. Borrows the environment: whoever made it closes it.

    The actor reads the group ``policy``; the critic reads ``critic`` where the task has it and the library can.
    """

    def __init__(self, env: BatchEnv, *, reward_scale: float | None) -> None:
        """Look at the spaces, and refuse what PPO cannot act on.

        Args:
            env: to step.
            reward_scale: what rewards are multiplied with; None where the library does that itself.
        """
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
        self.pictures = {name for name in ("policy", self.critic_group) if picture(self.groups[name])}
        """The groups among those that are read."""
        self.obs: Obs = {}
        """The newest observation; empty before :meth:`reset`."""
        # a number would be made into a tensor at every step, at twice the cost of the product
        self._scale = None if reward_scale is None else torch.tensor(reward_scale, device=env.device)
        self._ends: list[EpisodeEnds] = []
        self._bounds = _bounds(space, env.device)
        self._unit = self._bounds is not None and bool((self._bounds[0] == 0.0).all() & (self._bounds[1] == 1.0).all())
        # cameras whose pictures neither actor nor critic reads are not drawn
        drawn = set(env.task.pictures)
        self._observe: tuple[Tensor, ...] = ()
        if drawn and not drawn & {"policy", self.critic_group}:
            self._observe = (torch.zeros(env.num_envs, dtype=torch.bool, device=env.device),)
        self._none = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the actor's observation, one environment."""
        return self.groups["policy"]

    def reset(self) -> Obs:
        """Begin episodes everywhere."""
        self.obs, _ = self.env.reset()
        return self.obs

    def step(self, actions: Tensor, *, within: bool = False) -> Turn:
        """One step with actions (N, A) from -1 to 1.

        Args:
            actions: cut to that.
            within: the library has cut them already; they are then the environment's to keep.
        """
        chosen = self.rescaled(actions, within=within)
        obs, reward, terminated, truncated, info = self.env.step(chosen, *self._observe)
        self.obs = obs
        if self._scale is not None:
            reward = reward * self._scale
        if "ends" not in info:
            return Turn(obs, reward, self._none, self._none, self._none, False, False, info)
        self._ends.append(info["ends"])
        cut = truncated & ~terminated
        return Turn(obs, reward, terminated, cut, terminated | cut, True, bool(cut.any()), info)

    def rescaled(self, actions: Tensor, *, within: bool = False) -> Tensor:
        """Actions (N, A) from -1 to 1 in the environment's bounds; unbounded ones as they are. A fresh tensor, unless
        they are ``within`` and need no change."""
        if self._bounds is None:
            return actions if within else actions.clone()
        cut = actions if within else actions.clamp(-1.0, 1.0)
        return cut if self._unit else torch.addcmul(self._bounds[0], cut, self._bounds[1])

    def finished(self) -> Finished:
        """The episodes that ended since the last call."""
        ends, self._ends = self._ends, []
        return Finished.of(ends)

    def state_dict(self) -> StateDict:
        """Of the environment."""
        return self.env.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Put the environment back; the newest observation is what it holds now."""
        self.env.load_state_dict(state)
        self.obs = self.env.observe()


def true_next(turn: Turn, group: str) -> Tensor:
    """The observation that followed the action, (N, …): the last of its episode where that ended."""
    if "final_obs" not in turn.info or "_final_obs" not in turn.info:
        return turn.obs[group]
    final, ended = turn.info["final_obs"][group], turn.info["_final_obs"]
    return torch.where(ended.reshape(-1, *([1] * (final.dim() - 1))), final, turn.obs[group])


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
