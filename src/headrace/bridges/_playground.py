"""MuJoCo Playground as a batched simulator of the row protocol: pure functions, so rows are selected, not put back."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError

_GROUPS = {"state": "policy", "privileged_state": "critic"}
_WIDTH = 16


class PlaygroundRows:
    """A task of MuJoCo Playground in ``num_envs`` rows; ``headrace.bridge("playground:CartpoleBalance", 64)`` makes
    one.

    A row that does not act keeps its state by selection, bit for bit; an episode is a function of the key that is made
    of its seed. Two functions are compiled at their first use: the step of all rows, and the step of some.

    Rows are computed in full vectors, with padding rows where ``num_envs`` is no multiple of 16: XLA compiles the rest
    of a loop to other instructions, whose last bits differ, and an episode must not depend on the row that it is in.
    """

    def __init__(
        self,
        task: str,
        num_envs: int,
        *,
        config_overrides: Mapping[str, Any] | None = None,
        episode_length: int | None = None,
        instruction: str = "",
    ) -> None:
        """Load the task.

        Args:
            task: its name in Playground's registry.
            num_envs: how many rows.
            config_overrides: of Playground's own configuration, for example ``{"impl": "jax"}``.
            episode_length: steps after which an episode is truncated; None for what the configuration says.
            instruction: what every episode is told; Playground has no texts.
        """
        try:
            import jax  # pyright: ignore[reportMissingImports]  # in an environment of its own
            from mujoco_playground import registry  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError(
                f"playground:{task}: expected MuJoCo Playground to be installed, got {error}; pip install playground"
            ) from error
        if task not in registry.ALL_ENVS:
            raise ConfigError(f"playground:{task}: expected one of {', '.join(registry.ALL_ENVS)}, got {task!r}")
        self.name, self.num_envs = f"playground:{task}", num_envs
        self._count = -(-num_envs // _WIDTH) * _WIDTH
        self._begun = False
        self._jax: Any = jax
        config = registry.get_default_config(task)
        try:
            env: Any = registry.load(task, config=config, config_overrides=dict(config_overrides or {}))
        except (OSError, subprocess.SubprocessError) as error:
            raise ConfigError(
                f"playground:{task}: Playground cannot load it: {error}; it fetches robots by git: "
                "load the task once where it can reach the network"
            ) from error
        config = env._config
        self._length = int(config.episode_length) if episode_length is None else episode_length
        self._repeat = int(config.get("action_repeat", 1))
        self._instruction = instruction
        self._env = env
        self._functions()
        self.action_space = {"type": "box", "shape": [int(env.action_size)], "low": -1.0, "high": 1.0}
        shapes = jax.eval_shape(self._fresh, np.zeros(self._count, np.uint32))
        self._state: Any = jax.tree.map(_zeros, shapes)
        described = {
            name: {"type": "box", "shape": list(leaf.shape[1:]), "dtype": str(leaf.dtype)}
            for name, leaf in self._groups(shapes[0].obs).items()
        }
        self.observation_space = {"type": "dict", "spaces": described}

    def reset_rows(self, ids: NDArray[np.int64], seeds: NDArray[np.int64]) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode in each of some rows, from the key of its seed."""
        mask, all_seeds = np.zeros(self._count, np.bool_), np.zeros(self._count, np.uint32)
        mask[ids], all_seeds[ids] = True, seeds.astype(np.uint32)
        if not self._begun:  # padding rows have one state for ever
            mask[self.num_envs :], self._begun = True, True
        self._state, obs = self._begin(self._state, all_seeds, mask)
        return self._groups(obs), {"instruction": self._instruction}

    def step(self, actions: NDArray[Any]) -> tuple[Any, ...]:
        """Advance every row."""
        if self._count != self.num_envs:
            return self.step_rows(actions, np.ones(self.num_envs, np.bool_))
        self._state, result = self._advance(self._state, actions)
        return self._answer(result)

    def step_rows(self, actions: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[Any, ...]:
        """Advance some rows; the others keep their state."""
        if self._count != self.num_envs:
            padding = self._count - self.num_envs
            actions = np.concatenate([actions, np.zeros((padding, *actions.shape[1:]), actions.dtype)])
            mask = np.concatenate([mask, np.zeros(padding, np.bool_)])
        self._state, result = self._advance_some(self._state, actions, mask)
        return self._answer(result)

    def save_rows(self, mask: NDArray[np.bool_]) -> list[NDArray[Any]]:
        """Return every leaf of the state that has rows; scratch memory that rows share is none."""
        leaves, rows = self._jax.tree.leaves(self._state), np.flatnonzero(mask)
        return [_signed(np.array(self._plain(leaf))[rows]) for leaf in leaves if leaf.shape[:1] == (self._count,)]

    def restore_rows(self, mask: NDArray[np.bool_], saved: list[NDArray[Any]]) -> None:
        """Put rows back."""
        leaves, structure = self._jax.tree.flatten(self._state)
        left, restored, rows = iter(saved), list[Any](), np.flatnonzero(mask)
        for leaf in leaves:
            if leaf.shape[:1] != (self._count,):
                restored.append(leaf)
                continue
            plain = np.array(self._plain(leaf))
            plain[rows] = next(left).view(plain.dtype)
            restored.append(self._jax.random.wrap_key_data(plain) if self._is_key(leaf) else plain)
        self._state = self._jax.tree.unflatten(structure, restored)

    def _plain(self, leaf: Any) -> Any:
        """Return a leaf as numbers: typed keys have none of their own."""
        return self._jax.random.key_data(leaf) if self._is_key(leaf) else leaf

    def _is_key(self, leaf: Any) -> bool:
        return bool(self._jax.dtypes.issubdtype(leaf.dtype, self._jax.dtypes.prng_key))

    def _functions(self) -> None:
        """Define the pure functions of the state, (state of the task, steps of each episode), and compile them."""
        jax, env, length, repeat, count = self._jax, self._env, self._length, self._repeat, self._count
        jnp, shown = jax.numpy, self.num_envs

        def without_padding(tree: Any) -> Any:
            return tree if shown == count else jax.tree.map(_first(shown), tree)

        def select(mask: Any, new: Any, old: Any) -> Any:
            def one(a: Any, b: Any) -> Any:
                # scratch memory that rows share has no row to keep
                if a.shape[:1] != (count,):
                    return a
                return jnp.where(mask.reshape(mask.shape + (1,) * (a.ndim - 1)), a, b)

            return jax.tree.map(one, new, old)

        def fresh(seeds: Any) -> Any:
            state = jax.vmap(env.reset)(jax.vmap(jax.random.PRNGKey)(seeds))
            return state, jnp.zeros(count, jnp.int32)

        def begin(state: Any, seeds: Any, mask: Any) -> Any:
            after = select(mask, fresh(seeds), state)
            return after, without_padding(after[0].obs)

        def advance(state: Any, actions: Any) -> Any:
            inner, steps = state

            def once(carry: Any, _: Any) -> Any:
                after = jax.vmap(env.step)(carry, actions)
                return after, after.reward

            if repeat == 1:
                inner, reward = once(inner, None)
            else:
                inner, rewards = jax.lax.scan(once, inner, None, repeat)
                reward = rewards.sum(axis=0)
            steps = steps + repeat
            terminated = inner.done > 0.5
            truncated = (steps >= length) & ~terminated
            said = inner.metrics.get("success", inner.info.get("success"))
            return (inner, steps), without_padding((inner.obs, reward, terminated, truncated, said))

        def advance_some(state: Any, actions: Any, mask: Any) -> Any:
            after, result = advance(state, actions)
            return select(mask, after, state), result

        self._fresh = fresh
        self._begin, self._advance, self._advance_some = jax.jit(begin), jax.jit(advance), jax.jit(advance_some)

    def _answer(self, result: Any) -> tuple[Any, ...]:
        obs, reward, terminated, truncated, said = result
        return self._groups(obs), reward, terminated, truncated, {} if said is None else {"success": said}

    def _groups(self, obs: Any) -> dict[str, Any]:
        if not isinstance(obs, Mapping):
            return {"policy": obs}
        return {_GROUPS.get(name, name): part for name, part in cast("Mapping[str, Any]", obs).items()}


def _zeros(leaf: Any) -> NDArray[Any]:
    return np.zeros(leaf.shape, leaf.dtype)


def _first(count: int) -> Callable[[Any], Any]:
    return lambda part: part[:count]


def _signed(values: NDArray[Any]) -> NDArray[Any]:
    """Return the same bits in a type that every reader of snapshots has."""
    wide = values.dtype.kind == "u" and values.dtype.itemsize > 1
    return values.view(f"i{values.dtype.itemsize}") if wide else values
