"""A TorchRL ``EnvBase`` over ``BatchEnv``: partial resets and partial steps without waste."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from headrace.envs.batch_env import BatchEnv
from headrace.errors import ConfigError
from headrace.types import Obs


class TorchRLEnv(EnvBase):
    """N environments with batch size (N,). ``observation`` is a tensor where there is one group, else nested by group.

    ``_reset`` masks reset only those environments. ``_step`` masks advance only those: the others are suspended for the
    step, which costs nothing and changes nothing in them; their next observation is the one they hold, their reward 0.
    """

    def __init__(self, env: BatchEnv) -> None:
        """Take over an environment made with ``autoreset="disabled"``: TorchRL asks for resets itself."""
        if env.autoreset != "disabled":
            raise ConfigError('TorchRLEnv: expected make(…, autoreset="disabled"), as TorchRL resets by itself')
        super().__init__(device=env.device, batch_size=torch.Size([env.num_envs]))
        self.env = env
        self._seed: int | None = None
        groups = env.single_observation_space
        if not isinstance(groups, spaces.Dict):
            raise ConfigError(f"TorchRLEnv: expected a Dict observation space, got {groups!r}")
        specs = {name: _spec(space, env.num_envs) for name, space in groups.spaces.items()}
        self._single = next(iter(specs)) if len(specs) == 1 else None
        size = torch.Size([env.num_envs])
        inner = specs[self._single] if self._single is not None else Composite(specs, shape=size)
        self.observation_spec = Composite({"observation": inner}, shape=size)
        self.action_spec = _spec(env.single_action_space, env.num_envs)
        self.reward_spec = Unbounded(shape=torch.Size([env.num_envs, 1]))
        flag = Categorical(2, dtype=torch.bool, shape=torch.Size([env.num_envs, 1]))
        self.done_spec = Composite({"done": flag, "terminated": flag.clone(), "truncated": flag.clone()}, shape=size)

    def _reset(self, tensordict: TensorDict | None = None, **_kwargs: Any) -> TensorDict:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None:
            obs, _ = self.env.reset(seed=self._seed)
            self._seed = None
        else:
            obs, _ = self.env.reset(options={"reset_mask": cast("Tensor", mask).reshape(self.env.num_envs)})
        no = torch.zeros(self.env.num_envs, 1, dtype=torch.bool)
        return self._result(obs, {"done": no, "terminated": no.clone(), "truncated": no.clone()})

    def _step(self, tensordict: TensorDict) -> TensorDict:
        mask = tensordict.get("_step", None)
        action = cast("Tensor", tensordict["action"])
        held = torch.zeros(self.env.num_envs, dtype=torch.bool)
        if mask is not None:
            held = ~cast("Tensor", mask).reshape(self.env.num_envs) & ~self.env.suspended
            self.env.suspend(held)
        step = self.env.step(action)
        if mask is not None:
            self.env.resume(held)
        flags = {"terminated": step.terminated[:, None], "truncated": step.truncated[:, None]}
        if mask is not None:
            # what was done before the step stays so where nothing was stepped
            still = held[:, None]
            for name, value in flags.items():
                before = tensordict.get(name, None)
                flags[name] = value | (still & before) if before is not None else value
        flags["done"] = flags["terminated"] | flags["truncated"]
        return self._result(step.obs, {"reward": step.reward[:, None], **flags})

    def _set_seed(self, seed: int | None) -> None:
        self._seed = seed

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the environment."""
        super().close(raise_if_closed=raise_if_closed)
        self.env.close()

    def _result(self, obs: Obs, other: dict[str, Tensor]) -> TensorDict:
        size = [self.env.num_envs]
        value = obs[self._single] if self._single is not None else TensorDict({**obs}, size)
        return TensorDict({"observation": value, **other}, size)


def _spec(space: spaces.Space[Any], count: int) -> TensorSpec:
    """Return the spec of ``count`` rows of a space."""
    if isinstance(space, spaces.Box):
        shape = torch.Size([count, *space.shape])
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        low, high = (torch.from_numpy(np.asarray(edge)).expand(shape) for edge in (space.low, space.high))
        if dtype.is_floating_point and not bool(low.isfinite().all() and high.isfinite().all()):
            return Unbounded(shape=shape, dtype=dtype)
        return Bounded(low=low, high=high, shape=shape, dtype=dtype)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), shape=torch.Size([count]), dtype=torch.int64)
    raise ConfigError(f"TorchRLEnv: expected Box and Discrete spaces, got {space!r}")
