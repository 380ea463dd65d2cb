"""Single environments that write into the rows of an exchange: what every executor runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import gymnasium

from headrace.envs.bridges._exchange import Exchange, group_leaves
from headrace.envs.bridges._saving import restored_env, saved_env
from headrace.envs.bridges._texts import INSTRUCTION_KEYS, instruction_path
from headrace.envs.bridges.child import FailedError, Group, RefusedError
from headrace.errors import ConfigError, EnvError

AnyEnv: TypeAlias = "gymnasium.Env[Any, Any]"
EnvFactory: TypeAlias = Callable[[], AnyEnv]


class EnvGroup(Group):
    """The Gymnasium environments of some rows of an exchange; their whole state is saved, wrappers included."""

    def __init__(
        self, envs: Sequence[AnyEnv], exchange: Exchange, env_ids: Sequence[int], action_space: gymnasium.Space[Any]
    ) -> None:
        """Take over ``envs``, one per id, once it is known that all have the spaces of the exchange's layout."""
        super().__init__()
        self.envs = dict(zip(env_ids, envs, strict=True))
        leaves = exchange.layout.leaves
        for env_id, env in self.envs.items():
            if group_leaves(env.observation_space) != leaves or env.action_space != action_space:
                raise ConfigError(
                    f"environment {env_id}: expected the spaces of environment 0, got observations "
                    f"{env.observation_space} and actions {env.action_space}; bridge environments of one kind"
                )
        path = instruction_path(envs[0].observation_space) if envs else None
        self.bind(exchange.arrays, [(leaf.name, leaf.path) for leaf in leaves], path, INSTRUCTION_KEYS)

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Reset (more: seeds), step, save, restore (more: states) or render each of some environments."""
        try:
            return super().call(name, env_ids, more)
        except (RefusedError, FailedError) as error:
            hint = "; its neighbors may have stepped: reset all before going on" if error.__cause__ is not None else ""
            raise EnvError(f"{error}{hint}") from error.__cause__ or error

    def save(self, env_id: int) -> bytes:
        """The state of one environment; see :func:`saved_env`."""
        return saved_env(self.envs[env_id])

    def restore(self, env_id: int, state: bytes) -> None:
        """Put one environment back into a saved state."""
        restored_env(self.envs[env_id], state)

    def close(self) -> None:
        """Close every environment, also after one that cannot be closed, whose error is raised then."""
        with ExitStack() as stack:
            for env in reversed(self.envs.values()):
                stack.callback(env.close)
