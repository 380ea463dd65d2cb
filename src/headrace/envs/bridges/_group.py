"""Single environments that write into the rows of an exchange: what every executor runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from headrace.envs.bridges._exchange import NO_SUCCESS_MEASURE, Exchange, group_leaves, success_code
from headrace.envs.bridges._saving import restored_env, saved_env
from headrace.envs.bridges._texts import check_unchanged, instruction_of, instruction_path, text_at
from headrace.errors import ConfigError, EnvError, HeadraceError

AnyEnv: TypeAlias = "gymnasium.Env[Any, Any]"
EnvFactory: TypeAlias = Callable[[], AnyEnv]


class EnvGroup:
    """The environments of some rows of an exchange. Owns them: ``close`` closes each.

    Different environments may be stepped by different threads at once; one environment only by one.
    """

    def __init__(
        self, envs: Sequence[AnyEnv], exchange: Exchange, env_ids: Sequence[int], action_space: gymnasium.Space[Any]
    ) -> None:
        """Take over ``envs``, one per id, once it is known that all have the spaces of the exchange's layout."""
        self._envs = dict(zip(env_ids, envs, strict=True))
        self._exchange = exchange
        self._text_path = instruction_path(envs[0].observation_space) if envs else None
        self._texts: dict[int, str] = {}
        for env_id, env in self._envs.items():
            if group_leaves(env.observation_space) != exchange.layout.leaves or env.action_space != action_space:
                raise ConfigError(
                    f"environment {env_id}: expected the spaces of environment 0, got observations "
                    f"{env.observation_space} and actions {env.action_space}; bridge environments of one kind"
                )

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment from its seed; its first observation goes to the exchange.

        Returns:
            The instruction of each episode, "" where there is none.
        """
        envs, write_obs, env_id = self._envs, self._exchange.write_obs, env_ids[0]
        told: list[str] = []
        try:
            with np.errstate(over="ignore"):
                for env_id, seed in zip(env_ids, seeds, strict=True):
                    obs, info = envs[env_id].reset(seed=seed)
                    write_obs(env_id, obs)
                    told.append(instruction_of(obs, info, self._text_path))
                    if self._text_path is not None:
                        self._texts[env_id] = text_at(obs, self._text_path)
        # an environment that we did not write may raise anything: it is said which one it was, and raised as ours
        except Exception as error:
            raise _named(env_id, "reset", error) from error
        return told

    def step(self, env_ids: Sequence[int]) -> None:
        """Step each environment with its action on the exchange; the results go to its row."""
        # Python's own look-ups are most of what a cheap environment costs beside itself
        exchange, envs, env_id = self._exchange, self._envs, env_ids[0]
        actions, write_obs = exchange.actions, exchange.write_obs
        path, texts = self._text_path, self._texts
        rewards, ended, cut, success = exchange.reward, exchange.terminated, exchange.truncated, exchange.success
        try:
            with np.errstate(over="ignore"):
                for env_id in env_ids:
                    # a copy: an environment may keep its action, and the exchange's row is written again
                    obs, reward, terminated, truncated, info = envs[env_id].step(actions[env_id].copy())
                    write_obs(env_id, obs)
                    if path is not None:
                        check_unchanged(env_id, obs, path, texts[env_id])
                    rewards[env_id] = float(reward)
                    ended[env_id] = terminated
                    cut[env_id] = truncated
                    success[env_id] = success_code(info) if terminated or truncated else NO_SUCCESS_MEASURE
        # an environment that we did not write may raise anything: it is said which one it was, and raised as ours
        except Exception as error:
            raise _named(env_id, "step", error) from error

    def save(self, env_id: int) -> bytes:
        """The state of one environment; see :func:`saved_env`."""
        return saved_env(self._envs[env_id])

    def restore(self, env_id: int, state: bytes) -> None:
        """Put one environment back into a saved state."""
        restored_env(self._envs[env_id], state)

    def render(self, env_id: int) -> object:
        """What the environment's own ``render`` gives."""
        try:
            return self._envs[env_id].render()
        # an environment that we did not write may raise anything: it is said which one it was, and raised as ours
        except Exception as error:
            raise _named(env_id, "render", error) from error

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs.values():
            env.close()


def _named(env_id: int, call: str, error: Exception) -> EnvError:
    """Say which environment raised: there may be hundreds."""
    if isinstance(error, HeadraceError):
        return EnvError(f"environment {env_id} in {call}: {error}")
    return EnvError(
        f"environment {env_id} raised {type(error).__name__} in {call}: {error}; "
        "its neighbors may have stepped: reset all before going on"
    )
