"""What the learners of all libraries stand on: the environment as they want it, what they do alike, their policies.

The first of them is our own: the small PPO of :mod:`headrace.learning.ppo`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from headrace._published import read_weights
from headrace.envs.recipe import AnyEnv
from headrace.errors import ConfigError
from headrace.files import write_whole
from headrace.learning.actor_critic import (
    Policy,
    actor_critic_content,
    as_float_rows,
    channels_first,
    is_image,
    load_actor_critic,
    read_groups,
)
from headrace.learning.ppo import PPO, PPOCfg
from headrace.libraries.training import META_KEY, CheckpointMeta, Times, check_fit, load_random_state, random_state
from headrace.types import EpisodeEnds, Obs, StateDict, StepInfo

MemoryState: TypeAlias = tuple[Tensor, ...]
"""What a recurrent policy keeps of n rows: tensors (layers, n, size), zeros before an episode."""
Act: TypeAlias = Callable[[Obs, MemoryState | None], tuple[Tensor, MemoryState | None]]
"""Groups (n, …) and the memory of these rows → actions (n, A) within the environment's bounds, and the memory after."""


class InferencePolicy:
    """Actions for rows of observations, any number of them. A recurrent one reads and replaces :attr:`memory`."""

    def __init__(self, act: Act, *, recurrent: bool = False) -> None:
        self._act, self.recurrent = act, recurrent
        self.memory: MemoryState | None = None
        """Of the rows of the next call, then of those of the last; None for rows that begin, and where nothing is
        kept."""

    @torch.no_grad()
    def __call__(self, obs: Obs) -> Tensor:
        """Observation groups (n, …) → actions (n, A) within the environment's bounds; the caller owns them."""
        actions, self.memory = self._act(obs, self.memory)
        return actions


class LearnerStep(NamedTuple):
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
    """A batch of environments as learners want it. Borrows the environment: its maker closes it.

    The actor reads every observation group but ``critic``; the critic reads ``critic`` where the task has it.
    """

    def __init__(
        self,
        env: AnyEnv,
        *,
        reward_scale: float | None = None,
        actor_groups: Sequence[str] | None = None,
        critic_groups: Sequence[str] | None = None,
        discrete: bool = False,
    ) -> None:
        """Check the spaces; refuse what PPO cannot act on or a network cannot read.

        Args:
            env: to step.
            reward_scale: factor on rewards; None where the library does that itself.
            actor_groups: observation groups that the actor reads; None for all but ``critic``.
            critic_groups: those of the critic; None for ``critic`` where the task has it, else the actor's.
            discrete: actions that are numbers, (N,), are taken as well.
        """
        space = env.single_action_space
        self.discrete = discrete and isinstance(space, spaces.Discrete)
        if not self.discrete and (not isinstance(space, spaces.Box) or len(space.shape) != 1):
            raise ConfigError(f"PPO: expected a task with continuous actions (a flat Box), got {space}")
        if env.autoreset != "same_step":
            raise ConfigError(f'PPO: expected an environment with autoreset="same_step", got {env.autoreset!r}')
        self.env = env
        self.num_envs, self.device = env.num_envs, env.device
        self.action_dim = 1 if isinstance(space, spaces.Discrete) else cast("spaces.Box", space).shape[0]
        self.read = read_groups(env.single_observation_space, actor_groups, critic_groups)
        self.obs: Obs = {}
        """The newest observation; empty before :meth:`reset`."""
        # a number would be made into a tensor at every step, at twice the cost of the product
        self._scale = None if reward_scale is None else torch.tensor(reward_scale, device=env.device)
        self.ended: list[EpisodeEnds] = []
        """What :meth:`finished` gives next; a learner that steps the environment itself adds to it."""
        self._bounds = _bounds(space, env.device) if isinstance(space, spaces.Box) else None
        self._unit = self._bounds is not None and bool((self._bounds[0] == 0.0).all() & (self._bounds[1] == 1.0).all())
        self._none = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
        # cameras whose images are not read are not drawn
        self._observe = (self._none,) if self.read.images_unread else ()

    def rows(self, obs: Obs, groups: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Return some groups as networks read them: float32, images channels first and from 0 to 1."""
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

    def step(self, actions: Tensor, *, within: bool = False) -> LearnerStep:
        """One step with actions (N, A) from -1 to 1.

        Args:
            actions: cut to that.
            within: the library has cut them already; they are then the environment's to keep.
        """
        chosen = self.rescale_actions(actions, within=within)
        obs, reward, terminated, truncated, info = self.env.step(chosen, *self._observe)
        self.obs = obs
        if self._scale is not None:
            reward = reward * self._scale
        if "ends" not in info:
            return LearnerStep(obs, reward, self._none, self._none, self._none, False, False, info)
        self.ended.append(info["ends"])
        cut = truncated & ~terminated
        return LearnerStep(obs, reward, terminated, cut, terminated | cut, True, bool(cut.any()), info)

    def rescale_actions(self, actions: Tensor, *, within: bool = False) -> Tensor:
        """Actions (N, A) from -1 to 1 in the environment's bounds; unbounded ones as they are. A fresh tensor, unless
        they are ``within`` and need no change."""
        if self._bounds is None:
            return actions if within else actions.clone()
        cut = actions if within else actions.clamp(-1.0, 1.0)
        return cut if self._unit else torch.addcmul(self._bounds[0], cut, self._bounds[1])

    def finished(self) -> EpisodeEnds:
        """Return the episodes that ended since the last call."""
        ends, self.ended = self.ended, []
        return EpisodeEnds.join(ends)

    def state_dict(self) -> StateDict:
        """Of the environment."""
        return self.env.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Put the environment back; the newest observation is what it holds now."""
        self.env.load_state_dict(state)
        self.obs = self.env.observe()


class Learner(ABC):
    """A library's PPO over one environment. Owns its networks and rollout memory, not the environment.

    A library whose checkpoints are torch files implements :meth:`content` and :meth:`load_content`; one with files of
    another kind :meth:`save` and :meth:`load`.
    """

    library: ClassVar[str]
    """As in ``--library``."""
    algorithm: str = "PPO"
    agent_cfg: Mapping[str, Any] | None = None
    """The library's own configuration, where it was given instead of settings."""

    def __init__(self, env: AnyEnv, settings: PPOCfg, *, scale_rewards: bool = True, discrete: bool = False) -> None:
        """Check the spaces.

        Args:
            env: to learn on.
            settings: of PPO.
            scale_rewards: False where the library does that itself.
            discrete: actions that are numbers are taken as well.
        """
        self.settings = settings
        self.core = LearnerEnv(
            env,
            reward_scale=settings.reward_scale if scale_rewards else None,
            actor_groups=settings.actor_groups,
            critic_groups=settings.critic_groups,
            discrete=discrete,
        )

    @abstractmethod
    def iterate(self) -> tuple[float, float]:
        """Collect ``settings.steps`` steps of every environment, and learn from them; wall seconds of both."""

    @abstractmethod
    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the policy as it is now, reading the learner's own weights; sampling if not ``deterministic``."""

    def content(self, meta: CheckpointMeta) -> Mapping[str, Any]:
        """Weights, statistics and optimizer as the library keeps them, with ``meta.plain()`` among them."""
        raise NotImplementedError(f"{type(self).__name__}: expected content() or save() to be implemented")

    def load_content(self, content: dict[str, Any]) -> None:
        """Take over :meth:`content`; what does not match the networks may raise anything."""
        raise NotImplementedError(f"{type(self).__name__}: expected load_content() or load() to be implemented")

    def finished(self) -> EpisodeEnds:
        """Return the episodes that ended since the last call, in order of time."""
        return self.core.finished()

    def save(self, path: Path, meta: CheckpointMeta) -> None:
        """Write weights, normalizer statistics and optimizer as a file that the library itself can load."""
        content = self.content(meta)
        write_whole(path, lambda part: torch.save(content, part))

    def load(self, path: Path, *, trust: bool = False) -> None:
        """Take weights, statistics and optimizer from a file.

        Args:
            path: written by :meth:`save` or by the library.
            trust: unpickle whatever is in it, which can execute arbitrary code; otherwise a file with more than weights
                is refused.
        """
        content = dict(read_weights(path, trust=trust))
        check_fit(path, self.library, lambda: self.load_content(content))

    def state_dict(self) -> StateDict:
        """Return what a checkpoint does not hold and resuming needs: environment, random streams, unfinished
        episodes."""
        return {"env": self.core.state_dict(), "random": random_state()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`, after :meth:`load` of the checkpoint of the same moment."""
        self.core.load_state_dict(state["env"])
        load_random_state(state["random"])

    def close(self) -> None:  # noqa: B027  (most libraries leave nothing running)
        """End threads and files of the library. The environment stays open."""


def true_next(step: LearnerStep) -> Obs:
    """Return the observation that followed the action, (N, …): the last of its episode where that ended."""
    if "final_obs" not in step.info or "_final_obs" not in step.info:
        return step.obs
    final, ended = step.info["final_obs"], step.info["_final_obs"]
    return {
        name: torch.where(ended.reshape(-1, *([1] * (rows.dim() - 1))), final[name], rows)
        for name, rows in step.obs.items()
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


class OwnLearner(Learner):
    """Our own small PPO, which steps the environment itself."""

    library = "headrace"

    def __init__(self, env: AnyEnv, settings: PPOCfg) -> None:
        super().__init__(env, settings)
        self.ppo = PPO(env, settings)

    def iterate(self) -> Times:
        """One turn of ``PPO.learn``."""
        begin = time.perf_counter()
        self.core.ended.append(self.ppo.collect())
        between = time.perf_counter()
        self.ppo.improve()
        return Times(between - begin, time.perf_counter() - between)

    def content(self, meta: CheckpointMeta) -> dict[str, Any]:
        """Return what ``save_actor_critic`` writes, the optimizer, and our description."""
        more = {"optimizer": self.ppo.optimizer.state_dict(), META_KEY: meta.plain()}
        return actor_critic_content(self.ppo.policy, meta.task, meta.overrides) | more

    def load_content(self, content: dict[str, Any]) -> None:
        """Networks, statistics, and the optimizer where the file has it."""
        self.ppo.policy.load_state_dict(content["state_dict"])
        if "optimizer" in content:
            self.ppo.optimizer.load_state_dict(content["optimizer"])

    def state_dict(self) -> StateDict:
        """Environment, random stream, and the policy's memory."""
        return {"env": self.core.state_dict(), "learner": self.ppo.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Go on from :meth:`state_dict`."""
        self.core.load_state_dict(state["env"])
        self.ppo.load_state_dict(state["learner"])

    def policy(self, *, deterministic: bool = True) -> InferencePolicy:
        """Return the actor, with a memory of its own."""
        return _inference(self.ppo.policy, deterministic=deterministic)


def read_policy(path: Path, *, deterministic: bool, trust: bool = False) -> InferencePolicy:
    """Return a policy from a file, without a learner. Nothing in it is executed, unless ``trust``."""
    return _inference(load_actor_critic(path, trust=trust).policy, deterministic=deterministic)


def _inference(policy: Policy, *, deterministic: bool) -> InferencePolicy:
    recurrent = policy.memory is not None

    def act(obs: Obs, memory: MemoryState | None) -> tuple[Tensor, MemoryState | None]:
        state = policy.initial_state(len(obs[policy.encoder.names[0]])) if memory is None else memory[0]
        if deterministic:
            action, state = policy.act(obs, state)
        else:
            seen, state = policy.actor_features(obs, state)
            action = policy.distribution(seen).sample().clamp(policy.low, policy.high)
        return action, (state,) if recurrent else None

    return InferencePolicy(act, recurrent=recurrent)
