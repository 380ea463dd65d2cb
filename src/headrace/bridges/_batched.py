"""Batched simulators in this process: the row protocol under the contract of ``BatchEnv``.

EnvPool as a batched simulator of the row protocol: it steps any subset by itself.

MuJoCo Playground as a batched simulator of the row protocol: pure functions, so rows are selected, not put back.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.bridges._exchange import as_action_space, exchange_layout, idle_action, instruction_path, instructions_of
from headrace.bridges._frames import space_from_json
from headrace.bridges.bridge_env import TensorExchange, as_tensor
from headrace.bridges.child import RefusedError, RowSimulation, space_to_json, success_of
from headrace.bridges.child import UnsupportedError as ChildUnsupportedError
from headrace.bridges.executors import Backend, Fidelity
from headrace.errors import ConfigError, EnvError, HeadraceError, UnsupportedError

_T = TypeVar("_T")
MJLAB_ENTRY = f"{Path(__file__).with_name('mjlab_rows.py')}:make"
"""The ``entry`` of mjlab's tasks, for ``headrace.bridge(python=…, entry=MJLAB_ENTRY, env_kwargs={"task": …})``."""
_NUMBERS = ("float32", "uint8", "int8", "int16", "int32", "int64", "bool")


class RowSimulator(Protocol):
    """A batched simulator: what :func:`headrace.bridge` takes in this process, and an entry that takes ``num_envs``
    gives in another.

    A simulator with a ``device`` (of torch) gets actions as a tensor there; one without gets numpy arrays. What it
    returns may be torch's, numpy's, or those of any library with DLPack. Masks, ids and seeds are numpy arrays. Further
    attributes, all
    optional: ``name``, ``reseeds`` (False: episodes are not functions of their seeds; ``no_identity`` is a text that
    says why), ``close()``, ``render(row)``, and

    - ``save_rows(mask)`` and ``restore_rows(mask, saved)``: fidelity ``restore``, and snapshots;
    - ``step_rows(actions, mask)``: only the rows of the mask change; fidelity ``native``, ``step`` is not needed then.
    """

    @property
    def num_envs(self) -> int:
        """N, the number of rows."""
        ...

    @property
    def observation_space(self) -> Any:
        """Of one row: Gymnasium's, or plain dicts as in ``child.py``."""
        ...

    @property
    def action_space(self) -> Any:
        """Of one row."""
        ...

    def reset_rows(self, ids: NDArray[np.int64], seeds: NDArray[np.int64]) -> tuple[Any, Mapping[str, Any]]:
        """Start an episode in each of some rows from its seed.

        Returns:
            The observation of all rows, (N, …), of which those of ``ids`` are read; and an info, in which
            ``instruction`` is a text, or one per row.
        """
        ...

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, Mapping[str, Any]]:
        """Advance every row, reset none.

        Returns:
            Observations, rewards, terminated, truncated, each (N, …), and an info, in which ``success`` is (N,).
        """
        ...


class RowBackend(Backend):
    """A batched simulator behind an exchange of tensors on its device."""

    def __init__(self, sim: RowSimulator) -> None:
        """Take over ``sim``; ``close`` closes it."""
        self.sim: Any = sim
        self._rows = _refused("bridge", lambda: RowSimulation(sim))
        self.fidelity: Fidelity = cast("Fidelity", self._rows.fidelity)
        self.reseeds = self._rows.reseeds
        self.no_identity = str(getattr(sim, "no_identity", ""))
        # of a tensor: "cuda" alone is not equal to the device that tensors say they are on
        self._device = torch.empty(0, device=getattr(sim, "device", "cpu")).device
        self._takes_tensors = hasattr(sim, "device")
        self.observation_space, self.action_space = (
            space_from_json(_refused("bridge", lambda space=space: space_to_json(space)))
            for space in (sim.observation_space, sim.action_space)
        )
        if instruction_path(self.observation_space) is not None:
            raise ConfigError(
                "observation space: expected numbers of a batched simulator, got a Text space; give instructions in "
                "the "
                "info of reset_rows"
            )
        layout = exchange_layout(self._rows.num_envs, self.observation_space, self.action_space)
        for leaf in layout.leaves:
            if str(leaf.dtype) not in _NUMBERS:
                raise ConfigError(f"observation {leaf.name!r}: expected one of {_NUMBERS}, got {leaf.dtype}")
        idle = torch.from_numpy(idle_action(as_action_space(self.action_space))).to(self._device)
        actions = idle.expand(layout.num_envs, *layout.action_shape).clone()
        self.exchange = self._exchange = TensorExchange(layout, self._device, idle, actions)

    @property
    def held_ends(self) -> int:
        """How many episodes ended only because a resting row was held, not frozen."""
        return self._rows.held_ends

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment."""
        obs, info = self._called("reset_rows", lambda: self._rows.reset(env_ids, seeds))
        self._exchange.write_obs(obs)
        return instructions_of(obs, info, None, env_ids)

    def step(self, env_ids: Sequence[int]) -> None:
        """Step the environments of ``env_ids``; the others stand still."""
        exchange = self._exchange
        count = exchange.layout.num_envs
        active = np.ones(count, np.bool_)
        if len(env_ids) != count:
            active[:] = False
            active[env_ids] = True
        actions = exchange.actions if self._takes_tensors else exchange.actions.numpy()
        obs, reward, terminated, truncated, info = self._called("step", lambda: self._rows.step(actions, active))
        exchange.write_obs(obs)
        exchange.reward = self._flags("reward", reward, torch.float64)
        exchange.terminated = self._flags("terminated", terminated, torch.bool)
        exchange.truncated = self._flags("truncated", truncated, torch.bool)
        said = success_of(info)
        exchange.success = None if said is None else (self._flags("success", said, torch.float64) > 0).to(torch.int8)

    def save(self) -> list[object]:
        """Return the state of all rows; arrays of numpy as tensors, which a file may hold without being unpickled."""
        return [
            _mapped(_refused("state_dict", self._rows.save), np.ndarray, lambda array: torch.from_numpy(array.copy()))
        ]

    def restore(self, states: Sequence[object]) -> None:
        """Put every row back."""
        state = states[0] if self._takes_tensors else _mapped(states[0], Tensor, Tensor.numpy)
        self._called("restore_rows", lambda: self._rows.restore(cast("dict[str, Any]", state)))

    def render(self, env_ids: Sequence[int]) -> list[object]:
        """Return one picture of each of some environments."""
        return [self._called("render", lambda row=row: self.sim.render(row)) for row in env_ids]

    def close(self) -> None:
        """Close the simulator."""
        if hasattr(self.sim, "close"):
            self.sim.close()

    def _flags(self, name: str, values: Any, dtype: torch.dtype) -> Tensor:
        tensor = as_tensor(values, self._device).to(dtype)
        expected = (self._exchange.layout.num_envs,)
        if tuple(tensor.shape) != expected:
            raise EnvError(f"{name}: expected one per row, {expected}, of step, got {tuple(tensor.shape)}")
        return tensor

    def _called(self, call: str, function: Callable[[], _T]) -> _T:
        try:
            return _refused(call, function)
        except HeadraceError:
            raise
        # a simulator that we did not write may raise anything: it is said whose call it was, and raised as ours
        except Exception as error:
            raise EnvError(
                f"{type(self.sim).__name__} raised {type(error).__name__} in {call}: {error}; "
                "some environments may have stepped: reset all before going on"
            ) from error


def _refused(call: str, function: Callable[[], _T]) -> _T:
    """Return the same errors as of a simulator in another interpreter."""
    try:
        return function()
    except ChildUnsupportedError as error:
        raise UnsupportedError(str(error)) from error
    except RefusedError as error:
        raise ConfigError(f"{call}: {error}") from error


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with every leaf of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, kind, change) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, kind, change) for part in cast("list[Any]", value))  # pyright: ignore[reportCallIssue]  # of a list or tuple
    return value


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
