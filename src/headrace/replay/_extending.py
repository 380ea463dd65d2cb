"""What ``extend`` takes, checked once, before anything is written: steps of all environments, or whole batches (N, T).

Batches come with next observations, as deltas, or compact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace._leaves import SEPARATOR
from headrace.errors import DataError, DtypeError, LifecycleError, ShapeError
from headrace.replay._blocks import Int64s
from headrace.replay._pool import Sourced, Write
from headrace.replay._spec import ArraySpec, LeafSpec, StoreSpec
from headrace.replay._store import Store
from headrace.replay.forms import restore
from headrace.replay.row_space import Bools, rows_differ
from headrace.types import Step

if TYPE_CHECKING:
    from tensordict import TensorDict

NestedObs: TypeAlias = "Tensor | Mapping[str, NestedObs]"
"""One tensor (N, …), or names to such, nested as deep as the space is."""


_NUMBER = ArraySpec((), torch.float32)
_FLAG = ArraySpec((), torch.bool)
_ID = ArraySpec((), torch.int64)
_NO_ID = -1
"""Stands for the id of a trajectory that the caller did not name."""


def check_transition(
    spec: StoreSpec, obs: NestedObs, action: Tensor, step: Step, active: Tensor | None, extras: Mapping[str, Tensor]
) -> Write:
    """Check one step of all environments, and find the true last observations.

    What is stored of it is a transition of every environment that acted. Tensors are borrowed from the caller.
    """
    leaves, num_envs = spec.leaves, spec.num_envs
    flat = flatten_obs(leaves, obs, "obs", num_envs)
    flat_next = flatten_obs(leaves, step.obs, "step.obs", num_envs)
    columns = {"action": check_array(action, spec.action, "action", num_envs)}
    if extras.keys() != spec.extras.keys():
        raise ShapeError(f"extras: expected {sorted(spec.extras)}, as declared, got {sorted(extras)}")
    for name, extra in spec.extras.items():
        columns[name] = check_array(extras[name], extra, f"extras[{name!r}]", num_envs)
    reward = check_array(step.reward, _NUMBER, "step.reward", num_envs).numpy()
    terminated = check_array(step.terminated, _FLAG, "step.terminated", num_envs).numpy()
    truncated = check_array(step.truncated, _FLAG, "step.truncated", num_envs).numpy()
    ids: Int64s = np.arange(num_envs)
    if active is not None:
        ids = check_array(active, _FLAG, "active", num_envs).numpy().nonzero()[0]
        reward, terminated, truncated = reward[ids], terminated[ids], truncated[ids]
    done = terminated | truncated
    final = flat_next
    if spec.autoreset == "same_step" and np.count_nonzero(done):
        if "final_obs" not in step.info or "_final_obs" not in step.info:
            raise LifecycleError(
                "step.info: expected final_obs and _final_obs in a step that ends an episode; keep final_obs=True when "
                'you make the environment, or say autoreset="disabled" if step.obs is the last observation itself'
            )
        given = check_array(step.info["_final_obs"], _FLAG, "step.info['_final_obs']", num_envs)
        missing = ids[done & ~given.numpy()[ids]].tolist()
        if missing:
            raise ShapeError(f"step.info['_final_obs']: expected every environment that ended, missing {missing}")
        final = flatten_obs(leaves, step.info["final_obs"], "step.info['final_obs']", num_envs)

    def final_of(which: Int64s) -> Sourced:
        return final, ids[which]

    def next_of(which: Int64s) -> Sourced:
        return flat_next, ids[which]

    return Write(flat, ids, ids, terminated, truncated, reward, columns, final_of, next_of)


def flatten_obs(leaves: tuple[LeafSpec, ...], obs: NestedObs, what: str, num_envs: int) -> dict[str, Tensor]:
    """Return leaf name → (N, …), every leaf present and as declared.

    A store declared over one bare array also takes a dict of one group: environments always give a dict.
    """
    flat: dict[str, Tensor] = {}
    for leaf in leaves:
        found = _find(obs, leaf.path, what)
        flat[leaf.name] = check_array(found, leaf.observed, what, num_envs, leaf.name)
    return flat


def check_array(array: Tensor, spec: ArraySpec, what: str, num_envs: int, name: str = "") -> Tensor:
    """Raise unless ``array`` is contiguous, (N, *spec.shape), of the declared dtype; give it on the CPU.

    A tensor of another device is copied; one on the CPU is borrowed. ``name`` is that of the leaf of ``what``, if any.
    """
    shape = (num_envs, *spec.shape)
    if isinstance(array, Tensor) and array.shape == shape and array.dtype == spec.dtype and array.is_contiguous():  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        array = array.detach() if array.requires_grad else array
        if array.is_cpu:
            return array
        # pinned where a CUDA device is there to copy faster into it
        return torch.empty(array.shape, dtype=array.dtype, pin_memory=torch.cuda.is_available()).copy_(array)
    what = f"{what}[{name!r}]" if name else what
    if not isinstance(array, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"{what}: expected a torch tensor, got {type(array).__name__}; use torch.as_tensor")
    if array.shape != shape:
        raise ShapeError(
            f"{what}: expected {shape}, got {tuple(array.shape)}; "
            "pass one row per environment, inactive ones included (their rows are ignored)"
        )
    if array.dtype != spec.dtype:
        raise DtypeError(f"{what}: expected {spec.dtype}, got {array.dtype}; convert it, or declare that space")
    raise ShapeError(f"{what}: expected a contiguous tensor, got strides {array.stride()}; call .contiguous()")


def _find(obs: NestedObs, path: tuple[str, ...], what: str) -> Tensor:
    found = obs
    for name in path:
        if isinstance(found, Tensor) or name not in found:
            got = "one tensor" if isinstance(found, Tensor) else sorted(found)
            raise ShapeError(f"{what}: expected an observation named {SEPARATOR.join(path)!r}, got {got}")
        found = found[name]
    if isinstance(found, Mapping) and not path and len(found) == 1:
        found = next(iter(found.values()))
    return cast("Tensor", found)


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
            self._truncated = self._truncated | self._array(after["truncated"], _FLAG, "next/truncated").numpy()
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
            self._fill = {leaf.name: _make_missing(leaf, fill_value) for leaf in spec.leaves}

    def _array(self, array: Tensor, spec: ArraySpec, name: str) -> Tensor:
        """Return one row per entry, (…, 1) as TorchRL has it included."""
        if array.dim() == len(spec.shape) + 2 and array.shape[-1] == 1:
            array = array.squeeze(-1)
        return check_array(array.contiguous(), spec, name, self._count)

    def write(self) -> None:
        """Store everything, in order of time; called with the lock held."""
        store, steps = self._store, self._steps
        before = self._previous()
        joined = self._find_joined(before)
        self._check_stacks(before, joined)
        size, num_envs = min(steps, store.spec.length), store.spec.num_envs
        acted = np.ones((num_envs, steps), np.bool_) if self._active is None else self._active.reshape(num_envs, steps)
        with store.adding(acted.sum(1)):
            for first in range(0, steps, size):
                grid = np.arange(first, min(first + size, steps))[:, None] + np.arange(num_envs) * steps
                rows = grid.reshape(-1)
                rows = rows[acted.reshape(-1)[rows]]
                self._write(rows, rows // steps, before[rows], joined[rows])

    def _check_stacks(self, before: Int64s, joined: Bools) -> None:
        """Refuse stacks that are not the stack before them and one more frame."""
        rows = np.arange(self._count) if self._active is None else self._active.nonzero()[0]
        earlier = rows
        if self._next is None:
            rows = rows[(before[rows] >= 0) & joined[rows] & ~self._ended[before[rows]]]
            earlier = before[rows]
        later = self._obs if self._next is None else self._next
        self._store.stacks.check(rows // self._steps, (self._obs, earlier), (later, rows))

    def _write(self, rows: Int64s, ids: Int64s, before: Int64s, joined: Bools) -> None:
        store = self._store
        follows = None
        if self._next is None:
            # the frame after the newest transition was not known: this may be it
            counts, (at, trajectory) = store.pool.counts, store.heads
            follows = (at[ids] == counts[ids]) & (counts[ids] > 0) & joined
            first = before < 0
            follows[first] &= trajectory[ids[first]] == (_NO_ID if self._ids is None else self._ids[rows[first]])
            at_first = (follows & first).nonzero()[0]
            follows[at_first] = store.pool.goes_on(ids[at_first], self._obs, rows[at_first])
        ended = self._terminated[rows], self._truncated[rows]
        heads = None if self._next is not None else self._heads(rows, ids)

        def following(which: Int64s) -> Sourced:
            return self._following(rows[which])

        reward, columns = self._reward[rows], self._columns
        store.write(Write(self._obs, ids, rows, *ended, reward, columns, following, following, joined, follows, heads))

    def _heads(self, rows: Int64s, ids: Int64s) -> Int64s:
        """Return the caller's trajectory id of the last transition of every environment, (N,)."""
        heads = self._store.heads[1].copy()
        heads[ids] = _NO_ID if self._ids is None else self._ids[rows]  # in order of time: the last one stays
        return heads

    def _following(self, rows: Int64s) -> Sourced:
        """Return the true next observations of these rows, as far as the batch has them."""
        if self._next is not None:
            return self._next, rows
        if self._delta is None:
            return self._fill, np.zeros(rows.shape[0], np.int64)
        at = torch.from_numpy(rows)
        restored = {name: restore(self._obs[name][at], delta[at]) for name, delta in self._delta.items()}
        return restored, np.arange(rows.shape[0])

    def _previous(self) -> Int64s:
        """Return row of the transition before each of the same environment; -1 for the first."""
        rows = np.arange(self._count).reshape(-1, self._steps)
        acted = rows if self._active is None else np.where(self._active.reshape(rows.shape), rows, -1)
        before = np.full(rows.shape, -1)
        before[:, 1:] = np.maximum.accumulate(acted, 1)[:, :-1]
        return before.reshape(-1)

    def _find_joined(self, before: Int64s) -> Bools:
        """Return whether each transition goes on from the one before it in this batch, (N · T,), the first ones aside.

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
                rows_differ(first, second, size - offset, differs)
            joined[candidates[differs]] = False
        return joined


def _contiguous(nested: Any) -> Any:
    if isinstance(nested, Mapping):
        return {name: _contiguous(value) for name, value in cast("Mapping[str, Any]", nested).items()}
    return nested.contiguous()


def _leaves_of(leaves: tuple[LeafSpec, ...], nested: Any, count: int) -> dict[str, Tensor]:
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


def _make_missing(leaf: LeafSpec, fill_value: float | None) -> Tensor:
    """Return one observation that says that there is none."""
    value = math.nan if fill_value is None else fill_value
    dtype = leaf.observed.dtype
    if not dtype.is_floating_point and (math.isnan(value) or value != int(value)):
        raise DtypeError(
            f"extend: the batch has no next observations, and {dtype} has no NaN for those at ends; expected a whole "
            f"number as fill_value, got {fill_value}"
        )
    return torch.full((1, *leaf.observed.shape), value, dtype=dtype)
