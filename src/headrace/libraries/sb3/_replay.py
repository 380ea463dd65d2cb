"""A replay buffer for Stable-Baselines3's off-policy algorithms that keeps every frame once.

```python
model = DQN(
    "CnnPolicy", env, replay_buffer_class=FrameReplayBuffer,
    replay_buffer_kwargs={"stack": StackSpec(frames=4, dim=0)},
)
```
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.buffers import BaseBuffer, ReplayBuffer
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
from stable_baselines3.common.vec_env import VecNormalize
from torch import Tensor

from headrace import replay
from headrace.errors import ConfigError
from headrace.replay import ArraySpec
from headrace.types import StackSpec, Step

Array = NDArray[np.generic]
Observation = Array | dict[str, Array]


_HINDSIGHT = frozenset(("env", "goal_selection_strategy", "n_sampled_goal", "copy_info_dict"))


class FrameReplayBuffer(ReplayBuffer):
    """SB3's ``replay_buffer_class`` over :class:`headrace.replay.ReplayBuffer`, for DQN, SAC, TD3 and DDPG.

    Next observations are the true ones also at ends, which SB3's ``optimize_memory_usage`` gives up, and time-outs are
    separate at the same time: ``dones`` is 1 only where the task ended the episode. Dict observations work as well.
    """

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        stack: Mapping[str, StackSpec] | StackSpec | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
        seed: int = 0,
        directory: str | Path | None = None,
        **other: object,
    ) -> None:
        """Make an empty buffer; SB3 gives the first five arguments.

        Args:
            buffer_size: transitions, over all environments; rounded down to a multiple of ``n_envs`` as SB3 does.
            observation_space: as the learner sees it: after ``VecTransposeImage``, with stacks.
            action_space: as SB3 gives it.
            device: where samples go.
            n_envs: environments.
            optimize_memory_usage: must stay False: frames are stored once anyway.
            handle_timeout_termination: must stay True: time-outs are always distinguished.
            stack: how stacked observations are made of frames; for ``VecFrameStack`` over pictures, channels first,
                ``StackSpec(frames=K, dim=0, reset="zero")``.
            n_steps: steps to the next observation, as SB3 names it; with ``gamma``.
            gamma: discount of the n-step reward; the model's own.
            seed: of the draws.
            directory: keep the frames on disk.
            other: refused, with a reason where they are those of ``HerReplayBuffer``.
        """
        if other:
            hindsight = " new goals for stored episodes need SB3's HerReplayBuffer, which stores whole observations;"
            raise ConfigError(
                f"FrameReplayBuffer: unknown {', '.join(sorted(other))};"
                f"{hindsight if _HINDSIGHT & other.keys() else ''} leave them out"
            )
        if optimize_memory_usage or not handle_timeout_termination:
            raise ConfigError(
                "FrameReplayBuffer: leave optimize_memory_usage=False and handle_timeout_termination=True; frames are "
                "kept once and time-outs are handled in any case"
            )
        # the parent's own constructor would allocate what this class does not need
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False
        self.handle_timeout_termination = True
        kind = self._maybe_cast_dtype(action_space.dtype)
        self._action_spec = ArraySpec((self.action_dim,), torch.from_numpy(np.empty(0, kind)).dtype)
        self.frames = replay.ReplayBuffer(
            self.buffer_size * n_envs,
            n_envs,
            _describe_space(observation_space, self.obs_shape),
            self._action_spec,
            stack=stack,
            n_step=n_steps,
            gamma=gamma,
            # SB3 puts the true last observation into next_obs itself
            autoreset="disabled",
            seed=seed,
            directory=directory,
        )

    def add(
        self,
        obs: Observation,
        next_obs: Observation,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]],
    ) -> None:
        """Store one step of all environments, as SB3 calls it."""
        ended = torch.from_numpy(np.asarray(done, np.bool_))
        timeout = torch.tensor([bool(info.get("TimeLimit.truncated", False)) for info in infos])
        step = Step(
            cast("dict[str, Tensor]", self._tensors(next_obs)),
            torch.from_numpy(np.asarray(reward, np.float32)),
            ended & ~timeout,
            ended & timeout,
            {},
        )
        moved = torch.from_numpy(np.ascontiguousarray(action.reshape(self.n_envs, self.action_dim)))
        self.frames.extend(self._tensors(obs), moved.to(self._action_spec.dtype), step)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]  # dict observations have a record of their own
        self, batch_size: int, env: VecNormalize | None = None
    ) -> ReplayBufferSamples | DictReplayBufferSamples:
        """Return a batch as SB3's algorithms take it, on the buffer's device, normalized by ``env`` if given."""
        batch = self.frames.sample(batch_size)
        obs, following = (self._samples(batch[key], env) for key in ("observation", ("next", "observation")))
        reward, terminated = (cast("Tensor", batch["next", name]) for name in ("reward", "terminated"))
        if env is not None:
            reward = torch.from_numpy(env.normalize_reward(reward.numpy()).astype(np.float32))
        discount = batch.get("gamma", None)
        record: Any = DictReplayBufferSamples if isinstance(obs, dict) else ReplayBufferSamples
        return record(
            observations=obs,
            actions=cast("Tensor", batch["action"]).to(self.device),
            next_observations=following,
            dones=terminated.float().to(self.device),
            rewards=reward.to(self.device),
            discounts=None if discount is None else cast("Tensor", discount).to(self.device),
        )

    def reset(self) -> None:
        """Forget all transitions."""
        super().reset()
        self.frames.clear()

    def _tensors(self, obs: Observation) -> Tensor | dict[str, Tensor]:
        if isinstance(obs, dict):
            return {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in obs.items()}
        return torch.from_numpy(np.ascontiguousarray(obs).reshape(self.n_envs, *self.obs_shape))

    def _samples(self, obs: Any, env: VecNormalize | None) -> Any:
        """Observations as SB3 wants them: a tensor, or a plain dict of tensors."""
        if isinstance(obs, Tensor):
            value = obs if env is None else torch.from_numpy(np.asarray(env.normalize_obs(obs.numpy())))
            return value.to(self.device)
        plain = {str(name): cast("Tensor", value) for name, value in obs.items()}
        if env is not None:
            normal = env.normalize_obs({name: value.numpy() for name, value in plain.items()})
            plain = {
                name: torch.from_numpy(np.asarray(value)) for name, value in cast("dict[str, Array]", normal).items()
            }
        return {name: value.to(self.device) for name, value in plain.items()}


def _describe_space(space: spaces.Space[Any], shape: Any) -> ArraySpec | dict[str, ArraySpec]:
    """Return what SB3 stores for a space: (1,) for a discrete one, a dict of arrays for a dict."""
    if isinstance(space, spaces.Dict):
        parts = cast("dict[str, tuple[int, ...]]", shape)
        return {name: cast("ArraySpec", _describe_space(part, parts[name])) for name, part in space.spaces.items()}
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    return ArraySpec(tuple(int(size) for size in shape), dtype)
