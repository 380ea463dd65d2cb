"""EnvPool as a batched simulator of the row protocol: it steps any subset by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError

_SEEDS = 2**31


class EnvPoolRows:
    """An EnvPool of ``num_envs`` environments; ``headrace.bridge("envpool:Ant-v4", 64)`` makes one.

    Environments that do not act are not stepped. EnvPool seeds them when they are made and ignores the seeds of
    resets, so that an episode depends on those before it: ``reseeds`` is False.
    """

    reseeds = False
    no_identity = (
        "EnvPool seeds its environments when they are made and ignores the seed of a reset, so that an episode "
        "depends on "
        "the ones before it in its environment"
    )

    def __init__(self, task: str, num_envs: int, *, seed: int = 0, instruction: str = "", **settings: Any) -> None:
        """Make the pool; ``settings`` are those of ``envpool.make``, for example ``max_episode_steps``."""
        try:
            import envpool  # pyright: ignore[reportMissingImports]  # in an environment of its own
        except ImportError as error:
            raise ConfigError(
                f"envpool:{task}: expected EnvPool to be installed, got {error}; pip install envpool"
            ) from error
        if task not in envpool.list_all_envs():
            raise ConfigError(f"envpool:{task}: expected one of envpool.list_all_envs(), got {task!r}")
        self.name, self.num_envs = f"envpool:{task}", num_envs
        self._instruction = instruction
        try:
            self._pool: Any = envpool.make(
                task, env_type="gymnasium", num_envs=num_envs, seed=seed % (_SEEDS - num_envs), **settings
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"envpool:{task}: EnvPool does not take the settings {settings}: {error}") from error
        self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        # what each environment gave last
        self._last: dict[str, Any] = {}

    def reset_rows(self, ids: NDArray[np.int64], seeds: NDArray[np.int64]) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode in each of some environments; the seeds are not used."""
        del seeds
        obs, info = self._pool.reset(ids.astype(np.int32))
        return self._kept("obs", obs, info["env_id"]), {"instruction": self._instruction}

    def step(self, actions: NDArray[Any]) -> tuple[Any, ...]:
        """Step every environment."""
        obs, reward, terminated, truncated, info = self._pool.step(actions)
        return self._results(obs, reward, terminated, truncated, info)

    def step_rows(self, actions: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[Any, ...]:
        """Step some environments."""
        rows = np.flatnonzero(mask)
        obs, reward, terminated, truncated, info = self._pool.step(actions[rows], rows.astype(np.int32))
        return self._results(obs, reward, terminated, truncated, info)

    def close(self) -> None:
        """Release the pool."""
        self._pool.close()

    def _results(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, info: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        rows = info["env_id"]
        more = {"success": self._kept("success", info["success"], rows)} if "success" in info else {}
        return (
            self._kept("obs", obs, rows),
            self._kept("reward", reward, rows),
            self._kept("terminated", terminated, rows),
            self._kept("truncated", truncated, rows),
            more,
        )

    def _kept(self, name: str, values: Any, rows: NDArray[np.int32]) -> Any:
        """Return the values of all environments, those of ``rows`` being new."""
        if isinstance(values, Mapping):
            return {key: self._kept(f"{name}/{key}", part, rows) for key, part in values.items()}
        if len(rows) == self.num_envs and (rows[1:] > rows[:-1]).all():
            self._last[name] = values
            return values
        last = self._last.get(name)
        # not in place: what was given away before is not written to
        last = np.zeros((self.num_envs, *values.shape[1:]), values.dtype) if last is None else last.copy()
        last[rows] = values
        self._last[name] = last
        return last
