"""Whole batches (N, T) into a store: with next observations, as deltas, or compact."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from headrace._kernels import gather as kernels
from headrace._kernels.gather import Bools, Int64s
from headrace.errors import DataError, DtypeError, ShapeError
from headrace.replay._checks import check_array, flatten_obs
from headrace.replay._delta import restore
from headrace.replay._pool import Sourced, Write
from headrace.replay._spec import ArraySpec, Leaf
from headrace.replay._store import Store

if TYPE_CHECKING:
    from tensordict import TensorDict

_NUMBER = ArraySpec((), torch.float32)
_FLAG = ArraySpec((), torch.bool)
_ID = ArraySpec((), torch.int64)


class Batch:
    """A batch (N, T) as rows e · T + t, checked; see :meth:`headrace.replay.ReplayBuffer.extend`.

    Tensors are borrowed from the caller.
    """

    def __init__(self, store: Store, batch: TensorDict, fill_value: float | None) -> None:
        spec = store.spec
        shape: tuple[int, ...] = tuple(getattr(batch, "batch_size", ()))
        if len(shape) == 1 and spec.num_envs == 1:
            shape = (1, *shape)
        if len(shape) != 2 or shape[0] != spec.num_envs or shape[1] < 1:
            raise ShapeError(
                f"extend: expected a TensorDict of shape ({spec.num_envs}, T), environments first, with T >= 1, got "
                f"{type(batch).__name__} {shape}"
            )
        self._store, self._steps, self._count = store, shape[1], shape[0] * shape[1]
        given: dict[str, Any] = batch.reshape(-1).to_dict()
        after = given.get("next", {})
        missing = [name for name in ("observation", "action", "next", *spec.extras) if name not in given]
        missing += [f"next/{name}" for name in ("reward", "done", "terminated") if name not in after]
        if missing:
            raise DataError(f"extend: expected {', '.join(missing)} in the batch, got {sorted(given)}")
        self._obs = flatten_obs(spec.leaves, _contiguous(given["observation"]), "observation", self._count)
        self._columns = {name: self._array(given[name], column, name) for name, column in store.column_specs.items()}
        self._reward = self._array(after["reward"], _NUMBER, "next/reward").numpy()
        done = self._array(after["done"], _FLAG, "next/done").numpy()
        self._terminated = self._array(after["terminated"], _FLAG, "next/terminated").numpy()
        self._truncated = done & ~self._terminated
        if "truncated" in after:
            self._truncated = self._array(after["truncated"], _FLAG, "next/truncated").numpy()
        self._ended = self._terminated | self._truncated
        active = given.get("active")
        self._active = None if active is None else self._array(active, _FLAG, "active").numpy()
        ids = given.get("collector", {}).get("traj_ids")
        self._ids = None if ids is None else self._array(ids, _ID, "collector/traj_ids").numpy()
        self._next = self._delta = None
        if "observation" in after:
            self._next = flatten_obs(spec.leaves, _contiguous(after["observation"]), "next/observation", self._count)
        elif "delta" in after:
            self._delta = _leaves_of(spec.leaves, _contiguous(after["delta"]), self._count)
        else:
            self._fill = {leaf.name: _filled(leaf, fill_value) for leaf in spec.leaves}

    def _array(self, array: Tensor, spec: ArraySpec, name: str) -> Tensor:
        """One row per entry, (…, 1) as TorchRL has it included."""
        if array.dim() == len(spec.shape) + 2 and array.shape[-1] == 1:
            array = array.squeeze(-1)
        return check_array(array.contiguous(), spec, name, self._count)

    def write(self) -> None:
        """Store everything, in order of time; called with the lock held."""
        store, steps = self._store, self._steps
        before = self._previous()
        joined = self._joined(before)
        # on disk a write may touch nothing that counts: one step at a time. In memory a ring bounds it
        size = 1 if store.durable else min(steps, store.spec.length)
        for first in range(0, steps, size):
            stop = min(first + size, steps)
            grid = np.arange(first, stop)[:, None] + np.arange(store.spec.num_envs) * steps
            rows = grid.reshape(-1)
            if self._active is not None:
                rows = rows[self._active[rows]]
            self._write(rows, rows // steps, before[rows], joined[rows])

    def _write(self, rows: Int64s, ids: Int64s, before: Int64s, joined: Bools) -> None:
        store = self._store
        follows = None
        if self._next is None:
            # the frame after the newest transition was not known: this may be it
            counts, (at, trajectory) = store.pool.counts, store.heads
            follows = (at[ids] == counts[ids]) & (counts[ids] > 0) & joined
            first = before < 0
            follows[first] &= False if self._ids is None else trajectory[ids[first]] == self._ids[rows[first]]
        ended = self._terminated[rows], self._truncated[rows]
        heads = None if self._next is not None else self._heads(rows, ids)

        def following(which: Int64s) -> Sourced:
            return self._following(rows[which])

        reward, columns = self._reward[rows], self._columns
        store.write(Write(self._obs, ids, rows, *ended, reward, columns, following, following, joined, follows, heads))

    def _heads(self, rows: Int64s, ids: Int64s) -> Int64s:
        """The caller's trajectory id of the last transition of every environment, (N,)."""
        heads = self._store.heads[1].copy()
        if self._ids is not None:
            heads[ids] = self._ids[rows]  # in order of time: the last one stays
        return heads

    def _following(self, rows: Int64s) -> Sourced:
        """The true next observations of these rows, as far as the batch has them."""
        if self._next is not None:
            return self._next, rows
        if self._delta is None:
            return self._fill, np.zeros(rows.shape[0], np.int64)
        at = torch.from_numpy(rows)
        restored = {name: restore(self._obs[name][at], delta[at]) for name, delta in self._delta.items()}
        return restored, np.arange(rows.shape[0])

    def _previous(self) -> Int64s:
        """Row of the transition before each of the same environment; -1 for the first."""
        rows = np.arange(self._count).reshape(-1, self._steps)
        acted = rows if self._active is None else np.where(self._active.reshape(rows.shape), rows, -1)
        before = np.full(rows.shape, -1)
        before[:, 1:] = np.maximum.accumulate(acted, 1)[:, :-1]
        return before.reshape(-1)

    def _joined(self, before: Int64s) -> Bools:
        """Whether each transition goes on from the one before it in this batch; the first ones are left to the store.

        Trajectory ids are not believed where the batch can tell: the newest frame must be the one that came.
        """
        joined = np.ones(self._count, np.bool_)
        inside = before >= 0
        if self._ids is not None:
            joined[inside] = self._ids[inside] == self._ids[before[inside]]
        if self._next is not None:
            candidates = (inside & joined & ~self._ended[before]).nonzero()[0]
            differs = np.zeros(candidates.shape[0], np.bool_)
            for leaf in self._store.spec.leaves:
                obs, following = self._obs[leaf.name], self._next[leaf.name]
                # frames of a stack lie one after another, or are interleaved; without ids the older ones may tell
                newest = self._ids is not None and leaf.outer == 1
                offset = leaf.observed.nbytes - leaf.frame.nbytes if newest else 0
                size = leaf.observed.nbytes
                first = (obs.data_ptr() + offset, size, candidates)
                second = (following.data_ptr() + offset, size, before[candidates])
                kernels.rows_differ(first, second, size - offset, differs)
            joined[candidates[differs]] = False
        return joined


def _contiguous(nested: Any) -> Any:
    if isinstance(nested, Mapping):
        return {name: _contiguous(value) for name, value in cast("Mapping[str, Any]", nested).items()}
    return nested.contiguous()


def _leaves_of(leaves: tuple[Leaf, ...], nested: Any, count: int) -> dict[str, Tensor]:
    """Deltas by leaf: shaped as observations, of a dtype of their own."""
    found: dict[str, Tensor] = {}
    for leaf in leaves:
        value: Any = nested
        for name in leaf.path:
            value = value[name]
        if isinstance(value, Mapping) and not leaf.path:
            (value,) = cast("Mapping[str, Tensor]", value).values()
        delta = cast("Tensor", value)
        found[leaf.name] = check_array(delta, ArraySpec(leaf.observed.shape, delta.dtype), "next/delta", count)
    return found


def _filled(leaf: Leaf, fill_value: float | None) -> Tensor:
    """One observation that says that there is none."""
    value = math.nan if fill_value is None else fill_value
    dtype = leaf.observed.dtype
    if not dtype.is_floating_point and (math.isnan(value) or value != int(value)):
        raise DtypeError(
            f"extend: the batch has no next observations, and {dtype} has no NaN for those at ends; expected a whole "
            f"number as fill_value, got {fill_value}"
        )
    return torch.full((1, *leaf.observed.shape), value, dtype=dtype)
