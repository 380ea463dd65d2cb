"""What a bridge holds of its environments: their last observations, and how a step's results are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs.bridges._exchange import Exchange, ExchangeLayout
from headrace.errors import DtypeError, ShapeError
from headrace.types import Obs

_FLOAT32_MAX = torch.finfo(torch.float32).max


class Results(NamedTuple):
    """What a step made of n rows."""

    reward: Tensor
    """float64 (n,)."""
    terminated: Tensor
    truncated: Tensor
    diverged: Tensor | None
    """bool (n,): rows with a number that is not finite; None if there are none."""


class HeldArrays:
    """The rows of a bridge over an exchange in this machine's memory; ``shown`` and ``rows`` give copies.

    Arrays, since torch cannot index every unsigned type of a space.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.device = torch.device("cpu")
        self._exchange = exchange
        self._held: dict[str, NDArray[Any]] = {
            group: np.zeros(rows.shape, rows.dtype) for group, rows in exchange.obs.items()
        }

    def write_actions(self, actions: Tensor, active_ids: Tensor | None) -> None:
        """Hand over the actions of the environments that act, in the dtype of the space; the others stay."""
        target = self._exchange.actions
        if active_ids is None:
            np.copyto(target, actions.detach().numpy(), casting="unsafe")
        else:
            target[active_ids.numpy()] = actions.detach().index_select(0, active_ids).numpy().astype(target.dtype)

    def results(self, rows: Tensor) -> Results:
        """What the last step made of ``rows``, int64 (n,)."""
        exchange, ids = self._exchange, rows.numpy()
        reward, terminated, truncated = exchange.reward[ids], exchange.terminated[ids], exchange.truncated[ids]
        # a reward of 1e60 is infinite as float32, which is what the caller would see
        finite = self._finite(ids) & (np.abs(reward) <= _FLOAT32_MAX)
        return Results(
            *map(torch.from_numpy, (reward, terminated, truncated)),
            diverged=None if finite.all() else torch.from_numpy(~finite),
        )

    def not_finite(self, rows: Tensor) -> Tensor | None:
        """bool (n,): which of ``rows`` have an observation that is not finite; None if none has."""
        finite = self._finite(rows.numpy())
        return None if finite.all() else torch.from_numpy(~finite)

    def _finite(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        finite = np.ones(len(ids), np.bool_)
        for values in self._exchange.obs.values():
            if values.dtype.kind == "f":
                finite &= np.isfinite(values[ids]).reshape(len(ids), -1).all(axis=1)
        return finite

    def success(self, rows: Tensor) -> Tensor:
        """int8 (n,): 1, 0, or that there is no such measure."""
        return torch.from_numpy(self._exchange.success[rows.numpy()])

    def hold(self, rows: Tensor) -> None:
        """Take over the observation of ``rows`` from the last step or reset."""
        ids = rows.numpy()
        for group, held in self._held.items():
            if len(ids) == len(held):  # one copy; choosing rows takes two
                np.copyto(held, self._exchange.obs[group])
            else:
                held[ids] = self._exchange.obs[group][ids]

    def shown(self) -> Obs:
        """The observation of every environment."""
        return {group: torch.from_numpy(held.copy()) for group, held in self._held.items()}

    def rows(self, rows: Tensor) -> Obs:
        """The observation of some environments."""
        return {group: torch.from_numpy(held[rows.numpy()]) for group, held in self._held.items()}

    def load(self, obs: Obs) -> None:
        """Take over the observations of a snapshot."""
        for group, values in self._held.items():
            np.copyto(values, obs[group].numpy())


class TensorExchange:
    """What crosses between a batched simulator and the bridge: tensors (N, …) on the simulator's device.

    The simulator's own tensors lie here between a step and the moment they are held; nothing is copied for it.
    """

    def __init__(self, layout: ExchangeLayout, device: torch.device, idle_action: Tensor) -> None:
        self.layout, self.device = layout, device
        self.idle_action = idle_action
        self.actions = idle_action.expand(layout.num_envs, *layout.action_shape).clone()
        """Fresh for each step; rows that nobody acts in have the idle action."""
        self.obs: dict[str, Tensor] = {}
        self.reward, self.terminated, self.truncated = (torch.empty(0),) * 3
        self.success: Tensor | None = None
        self._leaves = [(leaf, getattr(torch, str(leaf.dtype))) for leaf in layout.leaves]

    def write_obs(self, obs: object) -> None:
        """Take a batched observation, with its shapes and dtypes checked."""
        for leaf, dtype in self._leaves:
            value = as_tensor(leaf.of(obs), self.device)
            expected = (self.layout.num_envs, *leaf.shape)
            if tuple(value.shape) != expected:
                raise ShapeError(f"observation {leaf.name!r}: expected shape {expected}, got {tuple(value.shape)}")
            if value.dtype != dtype and value.is_floating_point() != dtype.is_floating_point:
                raise DtypeError(
                    f"observation {leaf.name!r}: expected {dtype} as its space says, got {value.dtype}; make the "
                    "simulator return what its observation_space declares"
                )
            self.obs[leaf.name] = value.to(dtype)


class HeldTensors:
    """As :class:`HeldArrays`, over tensors on the simulator's device."""

    def __init__(self, exchange: TensorExchange) -> None:
        self.device = exchange.device
        self._exchange = exchange
        layout = exchange.layout
        self._held: Obs = {
            leaf.name: torch.zeros(
                (layout.num_envs, *leaf.shape), dtype=getattr(torch, str(leaf.dtype)), device=self.device
            )
            for leaf in layout.leaves
        }

    def write_actions(self, actions: Tensor, active_ids: Tensor | None) -> None:
        """Hand over the actions of the environments that act."""
        exchange = self._exchange
        if active_ids is None:
            exchange.actions = actions.to(exchange.idle_action.dtype, copy=True)
            return
        shape = (exchange.layout.num_envs, *exchange.layout.action_shape)
        exchange.actions = exchange.idle_action.expand(shape).clone()
        exchange.actions.index_copy_(0, active_ids, actions.index_select(0, active_ids).to(exchange.actions.dtype))

    def results(self, rows: Tensor) -> Results:
        """What the last step made of ``rows``."""
        exchange = self._exchange
        everyone = rows.shape[0] == exchange.layout.num_envs
        reward, terminated, truncated = (
            values if everyone else values.index_select(0, rows)
            for values in (exchange.reward, exchange.terminated, exchange.truncated)
        )
        return Results(reward, terminated, truncated, self._diverged(rows, reward))

    def not_finite(self, rows: Tensor) -> Tensor | None:
        """bool (n,), or None."""
        return self._diverged(rows, torch.zeros((), device=self.device))

    def success(self, rows: Tensor) -> Tensor:
        """int8 (n,)."""
        success = self._exchange.success
        if success is None:
            return torch.full(rows.shape, -1, dtype=torch.int8, device=self.device)
        return success.index_select(0, rows)

    def hold(self, rows: Tensor) -> None:
        """Take over the observation of ``rows``."""
        for group, held in self._held.items():
            values = self._exchange.obs[group]
            if rows.shape[0] == held.shape[0]:
                held.copy_(values)
            else:
                held.index_copy_(0, rows, values.index_select(0, rows))

    def shown(self) -> Obs:
        """The observation of every environment."""
        return {group: held.clone() for group, held in self._held.items()}

    def rows(self, rows: Tensor) -> Obs:
        """The observation of some environments."""
        return {group: held.index_select(0, rows) for group, held in self._held.items()}

    def load(self, obs: Obs) -> None:
        """Take over the observations of a snapshot."""
        for group, held in self._held.items():
            held.copy_(obs[group])

    def _diverged(self, rows: Tensor, reward: Tensor) -> Tensor | None:
        everyone = rows.shape[0] == self._exchange.layout.num_envs
        floats = [
            values if everyone else values.index_select(0, rows)
            for values in self._exchange.obs.values()
            if values.is_floating_point()
        ]
        if self.device.type == "cpu":  # numpy's calls cost a third of torch's, which is most of it for small rows
            fine = bool((np.abs(reward.numpy()) <= _FLOAT32_MAX).all())
            fine = fine and all(bool(np.isfinite(values.numpy()).all()) for values in floats)
        else:
            # one wait for the device: a sum of finite numbers is finite, but for an overflow
            total = torch.where(reward.abs() <= _FLOAT32_MAX, 0.0, torch.inf).sum()
            for values in floats:
                total = total + values.sum(dtype=torch.float64)
            fine = bool(torch.isfinite(total))
        if fine:
            return None
        finite = (reward.abs() <= _FLOAT32_MAX).expand(rows.shape).clone()
        for values in floats:
            finite &= torch.isfinite(values).flatten(1).all(dim=1)
        return None if bool(finite.all()) else ~finite


def held_of(exchange: Exchange | TensorExchange) -> HeldArrays | HeldTensors:
    """What holds the rows of an exchange."""
    return HeldTensors(exchange) if isinstance(exchange, TensorExchange) else HeldArrays(exchange)


def as_tensor(value: Any, device: torch.device) -> Tensor:
    """A tensor on ``device`` of an array of torch, numpy, or whoever speaks DLPack; memory is shared where it can "
    "be."""
    if not isinstance(value, Tensor):
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
            value = torch.from_numpy(array if array.flags.writeable else array.copy())
        else:
            value = torch.from_dlpack(value)
    return value.detach().to(device)
