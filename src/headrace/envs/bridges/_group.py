"""Single environments that write into the rows of an exchange: what every executor runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np

from headrace.envs.bridges._exchange import NO_SUCCESS_MEASURE, Exchange, observation_leaves, success_code
from headrace.envs.bridges._saving import restored_env, saved_env
from headrace.envs.bridges._texts import check_unchanged, instruction_of, instruction_path, text_at
from headrace.errors import ConfigError, EnvError, HeadraceError

AnyEnv: TypeAlias = "gymnasium.Env[Any, Any]"
EnvFactory: TypeAlias = Callable[[], AnyEnv]


class EnvGroup:
    """The environments of some slots of an exchange. Owns them: ``close`` closes each.

    Different slots may be stepped by different threads at once; one slot only by one.
    """

    def __init__(
        self, envs: Sequence[AnyEnv], exchange: Exchange, slots: Sequence[int], action_space: gymnasium.Space[Any]
    ) -> None:
        """Take over ``envs``, one per slot, once it is known that all have the spaces of the exchange's layout."""
        self._envs = dict(zip(slots, envs, strict=True))
        self._exchange = exchange
        self._text_path = instruction_path(envs[0].observation_space) if envs else None
        self._texts: dict[int, str] = {}
        for slot, env in self._envs.items():
            if observation_leaves(env.observation_space) != exchange.layout.leaves or env.action_space != action_space:
                raise ConfigError(
                    f"environment {slot}: expected the spaces of environment 0, got observations "
                    f"{env.observation_space} and actions {env.action_space}; bridge environments of one kind"
                )

    def reset(self, slots: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each slot from its seed; its first observation goes to the exchange.

        Returns:
            The instruction of each episode, "" where there is none.
        """
        envs, write_obs, slot = self._envs, self._exchange.write_obs, slots[0]
        told: list[str] = []
        try:
            with np.errstate(over="ignore"):
                for slot, seed in zip(slots, seeds, strict=True):
                    obs, info = envs[slot].reset(seed=seed)
                    write_obs(slot, obs)
                    told.append(instruction_of(obs, info, self._text_path))
                    if self._text_path is not None:
                        self._texts[slot] = text_at(obs, self._text_path)
        except Exception as error:
            raise _named(slot, "reset", error) from error
        return told

    def step(self, slots: Sequence[int]) -> None:
        """Step each slot with its action on the exchange; the results go to its row."""
        # Python's own look-ups are most of what a cheap environment costs beside itself
        exchange, envs, slot = self._exchange, self._envs, slots[0]
        actions, write_obs = exchange.actions, exchange.write_obs
        path, texts = self._text_path, self._texts
        rewards, ended, cut, success = exchange.reward, exchange.terminated, exchange.truncated, exchange.success
        try:
            with np.errstate(over="ignore"):
                for slot in slots:
                    # a copy: an environment may keep its action, and the exchange's row is written again
                    obs, reward, terminated, truncated, info = envs[slot].step(actions[slot].copy())
                    write_obs(slot, obs)
                    if path is not None:
                        check_unchanged(slot, obs, path, texts[slot])
                    rewards[slot] = float(reward)
                    ended[slot] = terminated
                    cut[slot] = truncated
                    success[slot] = success_code(info) if terminated or truncated else NO_SUCCESS_MEASURE
        except Exception as error:
            raise _named(slot, "step", error) from error

    def save(self, slot: int) -> bytes:
        """The state of one environment; see :func:`saved_env`."""
        return saved_env(self._envs[slot])

    def restore(self, slot: int, state: bytes) -> None:
        """Put one environment back into a saved state."""
        restored_env(self._envs[slot], state)

    def render(self, slot: int) -> object:
        """What the environment's own ``render`` gives."""
        try:
            return self._envs[slot].render()
        except Exception as error:
            raise _named(slot, "render", error) from error

    def close(self) -> None:
        """Close every environment."""
        for env in self._envs.values():
            env.close()


def _named(slot: int, call: str, error: Exception) -> EnvError:
    """Say which environment raised: there may be hundreds."""
    if isinstance(error, HeadraceError):
        return EnvError(f"environment {slot} in {call}: {error}")
    return EnvError(
        f"environment {slot} raised {type(error).__name__} in {call}: {error}; "
        "its neighbors may have stepped: reset all before going on"
    )
