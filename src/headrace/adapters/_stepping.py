"""What is the same in the adapters of all libraries: actions from -1 to 1, scaled rewards, counted episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace.adapters._learner import AnyEnv
from headrace.errors import ConfigError
from headrace.rollout import PPOCfg
from headrace.rollout._groups import as_float_rows, channels_first, is_image, read_groups
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
    """A batch of environments as learners want it. Borrows the environment: whoever made it closes it.

    The actor reads every observation group but ``critic``; the critic reads ``critic`` where the task has it.
    """

    def __init__(
        self,
        env: AnyEnv,
        *,
        reward_scale: float | None = None,
        actor_groups: Sequence[str] | None = None,
        critic_groups: Sequence[str] | None = None,
    ) -> None:
        """Check the spaces; refuse what PPO cannot act on or a network cannot read.

        Args:
            env: to step.
            reward_scale: factor on rewards; None where the library does that itself.
            actor_groups: observation groups that the actor reads; None for all but ``critic``.
            critic_groups: those of the critic; None for ``critic`` where the task has it, else the actor's.
        """
        space = env.single_action_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise ConfigError(f"PPO: expected a task with continuous actions (a flat Box), got {space}")
        if env.autoreset != "same_step":
            raise ConfigError(f'PPO: expected an environment with autoreset="same_step", got {env.autoreset!r}')
        self.env = env
        self.num_envs, self.device = env.num_envs, env.device
        self.action_dim = space.shape[0]
        self.read = read_groups(env.single_observation_space, actor_groups, critic_groups)
        self.obs: Obs = {}
        """The newest observation; empty before :meth:`reset`."""
        # a number would be made into a tensor at every step, at twice the cost of the product
        self._scale = None if reward_scale is None else torch.tensor(reward_scale, device=env.device)
        self._ends: list[EpisodeEnds] = []
        self._bounds = _bounds(space, env.device)
        self._unit = self._bounds is not None and bool((self._bounds[0] == 0.0).all() & (self._bounds[1] == 1.0).all())
        self._none = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        # cameras whose images nobody reads are not drawn
        self._observe = (self._none,) if self.read.draws_for_nobody else ()

    @classmethod
    def of(cls, env: AnyEnv, settings: PPOCfg, *, scale_rewards: bool = True) -> LearnerEnv:
        """The environment of a learner with these settings."""
        return cls(
            env,
            reward_scale=settings.reward_scale if scale_rewards else None,
            actor_groups=settings.actor_groups,
            critic_groups=settings.critic_groups,
        )

    def rows(self, obs: Obs, groups: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Some groups as networks read them: float32, images channels first and from 0 to 1."""
        return {name: as_float_rows(obs[name]) for name in groups}

    def space(self, groups: Mapping[str, tuple[int, ...]]) -> spaces.Box | spaces.Dict:
        """Of :meth:`rows` of one environment: a ``Box`` for one group, a ``Dict`` for several."""
        seen = cast("spaces.Dict", self.env.single_observation_space)
        found = {name: _row_space(seen[name], shape) for name, shape in groups.items()}
        return next(iter(found.values())) if len(found) == 1 else spaces.Dict(cast("Any", found))

    def reset(self, seed: int | None = None) -> Obs:
        """Begin episodes everywhere; the first time from the first episodes, whatever the environment did before."""
        begins = seed is None and not self.obs
        self.obs, _ = self.env.reset(seed=self.env.seed if begins else seed)
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

    def finished(self) -> EpisodeEnds:
        """The episodes that ended since the last call."""
        ends, self._ends = self._ends, []
        return EpisodeEnds.join(ends)

    def state_dict(self) -> StateDict:
        """Of the environment."""
        return self.env.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Put the environment back; the newest observation is what it holds now."""
        self.env.load_state_dict(state)
        self.obs = self.env.observe()


def true_next(turn: Turn) -> Obs:
    """The observation that followed the action, (N, …): the last of its episode where that ended."""
    if "final_obs" not in turn.info or "_final_obs" not in turn.info:
        return turn.obs
    final, ended = turn.info["final_obs"], turn.info["_final_obs"]
    return {
        name: torch.where(ended.reshape(-1, *([1] * (rows.dim() - 1))), final[name], rows)
        for name, rows in turn.obs.items()
    }


def _row_space(space: spaces.Space[Any], shape: tuple[int, ...]) -> spaces.Box:
    if is_image(shape):
        bound = 1.0 if space.dtype == np.uint8 else np.inf
        return spaces.Box(0.0 if space.dtype == np.uint8 else -bound, bound, channels_first(shape), np.float32)
    if isinstance(space, spaces.Box) and space.dtype == np.float32:
        return space
    return spaces.Box(-np.inf, np.inf, shape, np.float32)


def _bounds(space: spaces.Box, device: torch.device) -> tuple[Tensor, Tensor] | None:
    low, high = torch.as_tensor(space.low, device=device), torch.as_tensor(space.high, device=device)
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        return None
    return (high + low) / 2.0, (high - low) / 2.0
