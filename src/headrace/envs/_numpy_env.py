"""The same environments with numpy arrays, for Gymnasium's own loops and wrappers.

``gymnasium.make_vec`` gives :class:`NumpyEnv`, ``gymnasium.make`` :class:`SingleEnv`. Where a task has one observation
group, its array is the observation, as loops written for Gymnasium expect; ``dict_obs=True`` keeps the dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make
from headrace.errors import ConfigError, DtypeError
from headrace.ids import as_tensor
from headrace.types import EpisodeEnds, Ids

NumpyObs = NDArray[Any] | dict[str, NDArray[Any]]
"""An array where there is one group, else one array per group."""


class NumpyEnv(VectorEnv[NumpyObs, NDArray[Any], NDArray[Any]]):
    """A :class:`BatchEnv` on the CPU whose arrays are numpy's. The arrays are the caller's own.

    ``infos`` has the same entries as arrays; ``ends`` is flattened into ``ends_env_ids``, ``ends_returns``, … so that
    wrappers that walk through infos find arrays only, and ``episode`` is left to ``RecordEpisodeStatistics``. With
    ``next_step``, the step after an episode's end starts the next one: it ignores the action, its reward is 0.
    Everything else of ``BatchEnv`` is reached through ``env.batch``.
    """

    def __init__(self, batch: BatchEnv, *, dict_obs: bool = False, next_step: bool = False) -> None:
        self.batch = batch
        self.num_envs = batch.num_envs
        self.metadata = {**batch.metadata, **({"autoreset_mode": AutoresetMode.NEXT_STEP} if next_step else {})}
        self.render_mode = batch.render_mode
        self._group = None if dict_obs else _only_group(batch)
        self.observation_space = _space_of(batch.observation_space, self._group)
        self.single_observation_space = _space_of(batch.single_observation_space, self._group)
        self.action_space = batch.action_space
        self.single_action_space = batch.single_action_space
        self._next_step, self._ended = next_step, np.zeros(batch.num_envs, bool)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NumpyObs, dict[str, Any]]:
        """As :meth:`BatchEnv.reset`, with one seed for the batch: an episode's id tells its environments apart."""
        if isinstance(seed, list):
            raise DtypeError(f"seed: expected one integer or None, got a list of {len(seed)}; ids tell episodes apart")
        obs, info = self.batch.reset(seed=seed, options=options)
        self._ended &= ~self.batch.active.numpy()
        return self._obs(obs), self._info(cast("Mapping[str, object]", info))

    def step(
        self, actions: NDArray[Any], observe: NDArray[np.bool_] | None = None
    ) -> tuple[NumpyObs, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """As :meth:`BatchEnv.step`."""
        mask = None if observe is None else as_tensor(observe, "observe")
        step = self.batch.step(as_tensor(actions, "actions"), observe=mask)
        arrays = (step.reward.numpy(), step.terminated.numpy(), step.truncated.numpy())
        obs = step.obs
        if self._next_step:
            if self._ended.any():
                obs, _ = self.batch.reset(options={"reset_mask": self._ended})
            self._ended = arrays[1] | arrays[2]
        return self._obs(obs), *arrays, self._info(cast("Mapping[str, object]", step.info))

    def _obs(self, obs: Mapping[str, Tensor]) -> NumpyObs:
        arrays = {name: values.numpy() for name, values in obs.items()}
        return arrays if self._group is None else arrays[self._group]

    def _info(self, info: Mapping[str, object]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in info.items():
            if isinstance(value, EpisodeEnds):
                for field in ("env_ids", "episode_ids", "returns", "lengths", "success", "diverged"):
                    entry = getattr(value, field)
                    if entry is not None:
                        flat[f"ends_{field}"] = entry.numpy()
            elif name == "final_obs":
                flat[name] = self._obs(cast("Mapping[str, Tensor]", value))
            elif name not in ("episode", "_episode"):
                flat[name] = _as_numpy(value)
        return flat

    @property
    def active(self) -> NDArray[np.bool_]:
        """bool (N,): the environments that the next step will advance."""
        return self.batch.active.numpy()

    def suspend(self, ids: Ids) -> None:
        """As :meth:`BatchEnv.suspend`."""
        self.batch.suspend(ids)

    def resume(self, ids: Ids) -> None:
        """As :meth:`BatchEnv.resume`."""
        self.batch.resume(ids)

    suspend_envs = suspend
    resume_envs = resume

    def render(self) -> tuple[NDArray[np.uint8], ...] | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # Gymnasium says None or a tuple
        """Return one picture per environment, as Gymnasium's vector environments give."""
        return self.batch.render_each()

    def close_extras(self, **kwargs: Any) -> None:
        """Close the batch."""
        self.batch.close(**kwargs)


def make_numpy(task: str, num_envs: int = 1, *, dict_obs: bool = False, **kwargs: Any) -> NumpyEnv:
    """Return the entry point behind ``gymnasium.make_vec("headrace/…")``.

    Args:
        task: the task of the id.
        num_envs: how many environments, N.
        dict_obs: keep the dictionary of groups where there is only one.
        **kwargs: as for :func:`headrace.make`; ``autoreset`` may also be ``next_step``, Gymnasium's own default.
    """
    render_mode = kwargs.pop("render_mode", None)
    if render_mode not in (None, "rgb_array"):
        raise ConfigError(f'render_mode: expected "rgb_array", got {render_mode!r}; show what env.render() gives')
    next_step = kwargs.get("autoreset") == "next_step"
    if next_step:
        kwargs["autoreset"] = "disabled"
    return NumpyEnv(make(task, num_envs, **kwargs), dict_obs=dict_obs, next_step=next_step)


def _as_numpy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {name: _as_numpy(entry) for name, entry in cast("dict[str, object]", value).items()}
    return value


def _only_group(batch: BatchEnv) -> str | None:
    groups = list(cast("spaces.Dict", batch.single_observation_space).spaces)
    return groups[0] if len(groups) == 1 else None


def _space_of(space: spaces.Space[Any], group: str | None) -> spaces.Space[Any]:
    return space if group is None else cast("spaces.Dict", space)[group]


class SingleEnv(gymnasium.Env[NumpyObs, Any]):
    """A batch of one without the batch axis; numpy arrays, which the caller owns. The batch is ``env.batch``.

    Without a seed, of ``reset`` or of ``make``, the first reset draws one, so that two such environments differ.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (Gymnasium's own name and type)

    def __init__(
        self, batch: BatchEnv, render_mode: str | None = None, *, dict_obs: bool = False, seeded: bool = True
    ) -> None:
        self.batch = batch
        self.render_mode = render_mode
        self._group, self._seeded = None if dict_obs else _only_group(batch), seeded
        self.observation_space = _space_of(batch.single_observation_space, self._group)
        self.action_space = batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NumpyObs, dict[str, Any]]:
        """Start the next episode; with ``seed`` the first one of that seed."""
        super().reset(seed=seed)
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(2**31))
        self._seeded = True
        obs, _ = self.batch.reset(seed=seed, options=options)
        return self._first(obs), {}

    def step(self, action: Any) -> tuple[NumpyObs, float, bool, bool, dict[str, Any]]:
        """Advance by one step; an episode that ended needs ``reset``."""
        step = self.batch.step(torch.from_numpy(np.asarray(action)[None]))
        ends = step.info.get("ends")
        success = ends.success if ends is not None else None
        info = {} if success is None else {"success": bool(success[0]), "is_success": bool(success[0])}
        return self._first(step.obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> NDArray[np.uint8] | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # one picture
        """Return a picture, uint8 (height, width, 3), where ``render_mode`` is ``rgb_array``."""
        return self.batch.render_each()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Release the simulation."""
        self.batch.close()

    def _first(self, obs: Mapping[str, Tensor]) -> NumpyObs:
        arrays = {name: values[0].cpu().numpy() for name, values in obs.items()}
        return arrays if self._group is None else arrays[self._group]


def make_single(
    task: str, render_mode: str | None = None, *, dict_obs: bool = False, seed: int | None = None, **settings: Any
) -> SingleEnv:
    """Return the entry point of our Gymnasium ids; ``settings`` as for ``headrace.make``."""
    batch = make(task, 1, autoreset="disabled", threads=1, seed=seed or 0, **settings)
    return SingleEnv(batch, render_mode, dict_obs=dict_obs, seeded=seed is not None)
