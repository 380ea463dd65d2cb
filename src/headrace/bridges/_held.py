"""What a bridge holds of its environments: their last observations, and how a step's results are read."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.bridges._exchange import Exchange, ExchangeLayout
from headrace.bridges.child import NO_SUCCESS_MEASURE
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


class TensorExchange:
    """What crosses between environments and the bridge: tensors (N, …) on one device.

    Those of a batched simulator are its own, and lie here between a step and the moment they are held; nothing is
    copied for it. Those of an :class:`Exchange` are views of its memory (:meth:`over`).
    """

    def __init__(
        self, layout: ExchangeLayout, device: torch.device, idle_action: Tensor | None, actions: Tensor
    ) -> None:
        self.layout, self.device = layout, device
        self.idle_action = idle_action
        """For simulators that get fresh actions for each step: what rows without an action play."""
        self.actions = actions
        self.obs: dict[str, Tensor] = {}
        self.reward, self.terminated, self.truncated = (torch.empty(0),) * 3
        self.success: Tensor | None = None
        self._leaves = [(leaf, getattr(torch, str(leaf.dtype))) for leaf in layout.leaves]

    @classmethod
    def over(cls, exchange: Exchange) -> TensorExchange:
        """Return views of an exchange in the memory of this machine."""
        views = cls(exchange.layout, torch.device("cpu"), None, _view(exchange.actions))
        views.obs = {name: _view(rows) for name, rows in exchange.obs.items()}
        for name in ("reward", "terminated", "truncated", "success"):
            setattr(views, name, torch.from_numpy(exchange.arrays[name]))
        return views

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


class HeldRows:
    """The rows of a bridge on one device; ``shown`` and ``rows`` give copies."""

    def __init__(self, exchange: Exchange | TensorExchange) -> None:
        self._exchange = exchange if isinstance(exchange, TensorExchange) else TensorExchange.over(exchange)
        self.device = self._exchange.device
        layout = exchange.layout
        self._dtypes = {leaf.name: getattr(torch, str(leaf.dtype)) for leaf in layout.leaves}
        # torch cannot index every unsigned type of a space: these are held as signed ones of the same bits
        self._held: Obs = {
            leaf.name: _view(np.zeros((layout.num_envs, *leaf.shape), leaf.dtype)).to(self.device)
            for leaf in layout.leaves
        }

    def write_actions(self, actions: Tensor, active_ids: Tensor | None) -> None:
        """Hand over the actions of the environments that act, in the dtype of the space; the others stay."""
        exchange = self._exchange
        if exchange.idle_action is not None:
            exchange.actions = exchange.idle_action.expand(exchange.actions.shape).clone()
        target = exchange.actions
        if active_ids is None:
            target.copy_(actions)
        else:
            target.index_copy_(0, active_ids, actions.index_select(0, active_ids).to(target.dtype))

    def results(self, rows: Tensor) -> Results:
        """Return what the last step made of ``rows``, int64 (n,)."""
        exchange = self._exchange
        all_rows = rows.shape[0] == exchange.layout.num_envs
        reward, terminated, truncated = (
            values if all_rows else values.index_select(0, rows)
            for values in (exchange.reward, exchange.terminated, exchange.truncated)
        )
        return Results(reward, terminated, truncated, self._diverged(rows, reward))

    def not_finite(self, rows: Tensor) -> Tensor | None:
        """Return bool (n,): which of ``rows`` have an observation that is not finite; None if none has."""
        return self._diverged(rows, torch.zeros((), device=self.device))

    def success(self, rows: Tensor) -> Tensor:
        """int8 (n,): 1, 0, or that there is no such measure."""
        success = self._exchange.success
        if success is None:
            return torch.full(rows.shape, NO_SUCCESS_MEASURE, dtype=torch.int8, device=self.device)
        return success.index_select(0, rows)

    def hold(self, rows: Tensor) -> None:
        """Take over the observation of ``rows`` from the last step or reset."""
        for group, held in self._held.items():
            values = self._exchange.obs[group]
            if rows.shape[0] == held.shape[0]:  # one copy; choosing rows takes two
                held.copy_(values)
            else:
                held.index_copy_(0, rows, values.index_select(0, rows))

    def shown(self) -> Obs:
        """Return the observation of every environment."""
        return {group: held.clone().view(self._dtypes[group]) for group, held in self._held.items()}

    def rows(self, rows: Tensor) -> Obs:
        """Return the observation of some environments."""
        return {group: held.index_select(0, rows).view(self._dtypes[group]) for group, held in self._held.items()}

    def load(self, obs: Obs) -> None:
        """Take over the observations of a snapshot."""
        for group, held in self._held.items():
            held.copy_(obs[group].view(held.dtype))

    def _diverged(self, rows: Tensor, reward: Tensor) -> Tensor | None:
        """Return a reward of 1e60 is infinite as float32, which is what the caller would see."""
        all_rows = rows.shape[0] == self._exchange.layout.num_envs
        floats = [
            values if all_rows else values.index_select(0, rows)
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
            # a number alone has no axis but that of the rows
            finite &= torch.isfinite(values)[:, None].flatten(1).all(dim=1)
        return None if bool(finite.all()) else ~finite


def as_tensor(value: Any, device: torch.device) -> Tensor:
    """Return an array of torch, numpy or DLPack as a tensor on ``device``; memory is shared where it can be."""
    if not isinstance(value, Tensor):
        if isinstance(value, np.ndarray) or not hasattr(value, "__dlpack__"):
            array = np.asarray(value)
            value = torch.from_numpy(array if array.flags.writeable else array.copy())
        else:
            value = torch.from_dlpack(value)
    return value.detach().to(device)


def _view(array: NDArray[Any]) -> Tensor:
    """Return a tensor over the memory of an array, unsigned numbers of several bytes as signed ones."""
    wide = array.dtype.kind == "u" and array.dtype.itemsize > 1
    return torch.from_numpy(array.view(f"i{array.dtype.itemsize}") if wide else array)
