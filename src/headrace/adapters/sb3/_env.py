"""Stable-Baselines3's ``VecEnv`` over a batch of environments: numpy arrays, one ``info`` per environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices
from torch import Tensor

from headrace.adapters._learner import LearnerEnv, Turn
from headrace.rollout._groups import channels_first, is_image
from headrace.types import Obs

Array = NDArray[Any]
Arrays: TypeAlias = "Array | dict[str, Array]"


class Sb3Env(VecEnv):
    """One array where actor and critic read one group, else a dict of arrays, one per group that is read.

    Images keep their dtype, channels first. An ended environment's info has ``terminal_observation`` (the true last
    one), ``TimeLimit.truncated`` and ``episode``.
    """

    def __init__(self, core: LearnerEnv) -> None:
        self.core = core
        groups = core.read.all
        seen = {name: _space(core, name, shape) for name, shape in groups.items()}
        self._single = next(iter(groups)) if len(groups) == 1 else None
        space: spaces.Space[Any] = spaces.Dict(cast("Any", seen)) if self._single is None else seen[self._single]
        self.render_mode = "rgb_array"  # needed by the constructor below
        super().__init__(core.num_envs, space, spaces.Box(-1.0, 1.0, (core.action_dim,), np.float32))
        self._actions: Array | None = None
        self._on_cpu = core.device.type == "cpu"
        # most infos say nothing, and making hundreds of them costs more than the rest of a step does here
        self._blank: list[dict[str, Any]] = [{} for _ in range(core.num_envs)]

    def arrays(self, obs: Obs) -> Arrays:
        """The observation of SB3, from the groups."""
        if self._single is not None:
            return self._array(obs[self._single])
        return {name: self._array(obs[name]) for name in self.core.read.all}

    def _array(self, rows: Tensor) -> Array:
        if rows.dim() == 4 and rows.shape[-1] < rows.shape[1]:
            rows = rows.movedim(-1, 1).contiguous()
        return self._numpy(rows)

    def reset(self) -> Arrays:
        """Begin episodes everywhere; with the seed given to ``seed()`` before, where there was one."""
        seed = self._seeds[0]
        self._reset_seeds()
        return self.arrays(self.core.reset(seed))

    def step_async(self, actions: Array) -> None:
        """Take the actions of the coming step, within -1 to 1."""
        self._actions = actions

    def step_wait(self) -> tuple[Arrays, Array, Array, list[dict[str, Any]]]:
        """Observation, reward, dones, infos."""
        # SB3 cuts actions to the space it was given, and makes a new array of them at every step
        actions = torch.from_numpy(cast("Array", self._actions))
        turn = self.core.step(actions if self._on_cpu else actions.to(self.core.device), within=True)
        if any(self._blank):  # somebody wrote into an info of an earlier step
            self._blank = [{} for _ in range(self.num_envs)]
        obs, reward = self.arrays(turn.obs), self._numpy(turn.reward)
        if turn.any_ended:
            return obs, reward, self._numpy(turn.ended), self._told(turn)
        return obs, reward, np.zeros(self.num_envs, dtype=bool), list(self._blank)

    def _numpy(self, rows: Tensor) -> Array:
        return rows.numpy() if self._on_cpu else rows.cpu().numpy()

    def _told(self, turn: Turn) -> list[dict[str, Any]]:
        infos, ends = list(self._blank), turn.info.get("ends")
        assert ends is not None
        final = self.arrays(turn.info["final_obs"]) if "final_obs" in turn.info else None
        for place, slot in enumerate(ends.env_ids.tolist()):
            info = infos[slot] = {
                "episode": {"r": float(ends.returns[place]), "l": int(ends.lengths[place])},
                "TimeLimit.truncated": bool(turn.truncated[slot]),
            }
            if final is not None:
                info["terminal_observation"] = _row(final, slot)
            if ends.success is not None:
                info["is_success"] = bool(ends.success[place])
        return infos

    def close(self) -> None:
        """The environment is its maker's to close."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """An attribute that all environments share, once per environment."""
        value = getattr(self if attr_name == "render_mode" else self.core.env, attr_name)
        return [value] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: object, indices: VecEnvIndices = None) -> None:
        """Not possible for one environment of a batch."""
        del value, indices
        raise AttributeError(f"Sb3Env: {attr_name!r} cannot be set per environment; set it on the BatchEnv")

    def env_method(
        self, method_name: str, *method_args: object, indices: VecEnvIndices = None, **method_kwargs: object
    ) -> list[Any]:
        """Not possible for one environment of a batch."""
        del method_args, indices, method_kwargs
        raise AttributeError(f"Sb3Env: {method_name!r} cannot be called per environment; call it on the BatchEnv")

    def env_is_wrapped(self, wrapper_class: type, indices: VecEnvIndices = None) -> list[bool]:
        """No Gymnasium wrapper is inside."""
        del wrapper_class
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[Array | None]:
        """An image of each environment."""
        return list(self.core.env.render_each() or ())


def _row(rows: Arrays, slot: int) -> Arrays:
    return {name: values[slot] for name, values in rows.items()} if isinstance(rows, dict) else rows[slot]


def _space(core: LearnerEnv, name: str, shape: tuple[int, ...]) -> spaces.Space[Any]:
    space = cast("spaces.Dict", core.env.single_observation_space)[name]
    if not is_image(shape):
        return space
    low, high = (0, 255) if space.dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, channels_first(shape), cast("Any", space.dtype))
