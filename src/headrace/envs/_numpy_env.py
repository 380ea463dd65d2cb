"""The same environments with numpy arrays, for Gymnasium's own vector wrappers: what ``gymnasium.make_vec`` gives.

One environment for ``gymnasium.make``: what datasets recover, and what libraries for single environments take.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make
from headrace.errors import ConfigError, DtypeError
from headrace.ids import as_tensor
from headrace.types import EpisodeEnds, Ids

NumpyObs = dict[str, NDArray[np.float32]]


class NumpyEnv(VectorEnv[NumpyObs, NDArray[Any], NDArray[Any]]):
    """A :class:`BatchEnv` on the CPU whose arrays are numpy's. The arrays are the caller's own.

    ``infos`` has the same entries as arrays; ``ends`` is flattened into ``ends_env_ids``, ``ends_returns``, … so that
    wrappers that walk through infos find arrays only. Everything else of ``BatchEnv`` is reached through ``env.batch``.
    """

    def __init__(self, batch: BatchEnv) -> None:
        self.batch = batch
        self.num_envs = batch.num_envs
        self.metadata = batch.metadata
        self.render_mode = batch.render_mode
        self.observation_space = batch.observation_space
        self.single_observation_space = batch.single_observation_space
        self.action_space = batch.action_space
        self.single_action_space = batch.single_action_space

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NumpyObs, dict[str, Any]]:
        """As :meth:`BatchEnv.reset`, with one seed for the batch: an episode's id tells its environments apart."""
        if isinstance(seed, list):
            raise DtypeError(f"seed: expected one integer or None, got a list of {len(seed)}; ids tell episodes apart")
        obs, info = self.batch.reset(seed=seed, options=options)
        return cast("NumpyObs", _as_numpy(obs)), _flat_info(cast("Mapping[str, object]", info))

    def step(
        self, actions: NDArray[Any], observe: NDArray[np.bool_] | None = None
    ) -> tuple[NumpyObs, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """As :meth:`BatchEnv.step`."""
        mask = None if observe is None else as_tensor(observe, "observe")
        step = self.batch.step(as_tensor(actions, "actions"), observe=mask)
        info = _flat_info(cast("Mapping[str, object]", step.info))
        arrays = (step.reward.numpy(), step.terminated.numpy(), step.truncated.numpy())
        return cast("NumpyObs", _as_numpy(step.obs)), *arrays, info

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


def make_numpy(task: str, num_envs: int = 1, **kwargs: Any) -> NumpyEnv:
    """Return the entry point behind ``gymnasium.make_vec("headrace/…")``; takes what :func:`headrace.make` takes."""
    render_mode = kwargs.pop("render_mode", None)
    if render_mode not in (None, "rgb_array"):
        raise ConfigError(f'render_mode: expected "rgb_array", got {render_mode!r}; show what env.render() gives')
    return NumpyEnv(make(task, num_envs, **kwargs))


def _as_numpy(value: object) -> object:
    if isinstance(value, Tensor):
        return value.numpy()
    if isinstance(value, dict):
        return {name: _as_numpy(entry) for name, entry in cast("dict[str, object]", value).items()}
    return value


def _flat_info(info: Mapping[str, object]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, EpisodeEnds):
            for field in ("env_ids", "episode_ids", "returns", "lengths", "success", "diverged"):
                entry = getattr(value, field)
                if entry is not None:
                    flat[f"ends_{field}"] = entry.numpy()
        else:
            flat[name] = _as_numpy(value)
    return flat


class SingleEnv(gymnasium.Env[dict[str, NDArray[Any]], Any]):
    """A batch of one without the batch axis; numpy arrays, which the caller owns. The batch is ``env.batch``."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  (Gymnasium's own name and type)

    def __init__(self, batch: BatchEnv, render_mode: str | None = None) -> None:
        self.batch = batch
        self.render_mode = render_mode
        self.observation_space = batch.single_observation_space
        self.action_space = batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start the next episode; with ``seed`` the first one of that seed."""
        super().reset(seed=seed)
        obs, _ = self.batch.reset(seed=seed, options=options)
        return _first(obs), {}

    def step(self, action: Any) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Advance by one step; an episode that ended needs ``reset``."""
        step = self.batch.step(torch.from_numpy(np.asarray(action)[None]))
        ends = step.info.get("ends")
        success = ends.success if ends is not None else None
        info = {} if success is None else {"success": bool(success[0])}
        return _first(step.obs), float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), info

    def render(self) -> NDArray[np.uint8] | None:  # pyright: ignore[reportIncompatibleMethodOverride]  # one picture
        """Return a picture, uint8 (height, width, 3), where ``render_mode`` is ``rgb_array``."""
        return self.batch.render_each()[0] if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """Release the simulation."""
        self.batch.close()


def make_single(task: str, render_mode: str | None = None, **settings: Any) -> SingleEnv:
    """Return the entry point of our Gymnasium ids; ``settings`` as for ``headrace.make``."""
    return SingleEnv(make(task, 1, autoreset="disabled", threads=1, **settings), render_mode)


def _first(obs: dict[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    return {name: values[0].cpu().numpy() for name, values in obs.items()}
