"""Batched simulators in this process: the row protocol under the contract of ``BatchEnv``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.bridges._exchange import (
    INSTRUCTION_KEYS,
    as_action_space,
    exchange_layout,
    idle_action,
    instruction_path,
)
from headrace.bridges.bridge_env import TensorExchange, as_tensor
from headrace.bridges.child import RefusedError, RowSimulation, read_instruction, space_to_json, success_of
from headrace.bridges.child import UnsupportedError as ChildUnsupportedError
from headrace.bridges.executors import Backend, Fidelity
from headrace.bridges.interpreter import space_from_json
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
    attributes: ``name``, ``reseeds`` (False: episodes are not functions of their seeds; ``no_identity`` is a text that
    says why), ``close()``, ``render(row)``, all optional, and at least one of

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
        self._rows = _convert_errors("bridge", lambda: RowSimulation(sim))
        self.fidelity: Fidelity = cast("Fidelity", self._rows.fidelity)
        self.reseeds = self._rows.reseeds
        self.no_identity = str(getattr(sim, "no_identity", ""))
        # of a tensor: "cuda" alone is not equal to the device that tensors say they are on
        self._device = torch.empty(0, device=getattr(sim, "device", "cpu")).device
        self._takes_tensors = hasattr(sim, "device")
        self.observation_space, self.action_space = (
            space_from_json(_convert_errors("bridge", lambda space=space: space_to_json(space)))
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

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment."""
        obs, info = self._call("reset_rows", lambda: self._rows.reset(env_ids, seeds))
        self._exchange.write_obs(obs)
        return [read_instruction(info, INSTRUCTION_KEYS, env_id) or "" for env_id in env_ids]

    def step(self, env_ids: Sequence[int]) -> None:
        """Step the environments of ``env_ids``; the others stand still."""
        exchange = self._exchange
        count = exchange.layout.num_envs
        active = np.ones(count, np.bool_)
        if len(env_ids) != count:
            active[:] = False
            active[env_ids] = True
        actions = exchange.actions if self._takes_tensors else exchange.actions.numpy()
        obs, reward, terminated, truncated, info = self._call("step", lambda: self._rows.step(actions, active))
        exchange.write_obs(obs)
        exchange.reward = self._flags("reward", reward, torch.float64)
        exchange.terminated = self._flags("terminated", terminated, torch.bool)
        exchange.truncated = self._flags("truncated", truncated, torch.bool)
        said = success_of(info)
        exchange.success = None if said is None else (self._flags("success", said, torch.float64) > 0).to(torch.int8)

    def save(self) -> list[object]:
        """Return the state of all rows; arrays of numpy as tensors, which a file may hold without being unpickled."""
        return [
            _map_leaves(
                _convert_errors("state_dict", self._rows.save), np.ndarray, lambda array: torch.from_numpy(array.copy())
            )
        ]

    def restore(self, states: Sequence[object]) -> None:
        """Put every row back."""
        state = states[0] if self._takes_tensors else _map_leaves(states[0], Tensor, Tensor.numpy)
        self._call("restore_rows", lambda: self._rows.restore(cast("dict[str, Any]", state)))

    def render(self, env_ids: Sequence[int]) -> list[object]:
        """Return one picture of each of some environments."""
        return [self._call("render", lambda row=row: self.sim.render(row)) for row in env_ids]

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

    def _call(self, call: str, function: Callable[[], _T]) -> _T:
        try:
            return _convert_errors(call, function)
        except HeadraceError:
            raise
        # a simulator that we did not write may raise anything: it is said whose call it was, and raised as ours
        except Exception as error:
            raise EnvError(
                f"{type(self.sim).__name__} raised {type(error).__name__} in {call}: {error}; "
                "some environments may have stepped: reset all before going on"
            ) from error


def _convert_errors(call: str, function: Callable[[], _T]) -> _T:
    """Return the same errors as of a simulator in another interpreter."""
    try:
        return function()
    except ChildUnsupportedError as error:
        raise UnsupportedError(str(error)) from error
    except RefusedError as error:
        raise ConfigError(f"{call}: {error}") from error


def _map_leaves(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Nested dicts, lists and tuples with every leaf of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_leaves(part, kind, change) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map_leaves(part, kind, change) for part in cast("list[Any]", value))  # pyright: ignore[reportCallIssue]  # of a list or tuple
    return value
