"""From positions to tensors: one gather per observation leaf, of which observation and next observation are views."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace._kernels.gather import Int64s
from headrace.buffers._output import OutputPool
from headrace.replay import _arithmetic as arithmetic
from headrace.replay._pool import FramePool, Rows
from headrace.replay._samplers import Picked
from headrace.replay._spec import ArraySpec, Leaf, strides
from headrace.replay._store import Store

if TYPE_CHECKING:
    from tensordict import TensorDict

Branch: TypeAlias = "dict[str, Tensor | Branch]"
"""Names to tensors, nested."""


RESERVED = frozenset(
    (
        "observation",
        "action",
        "index",
        "step_count",
        "collector",
        "next",
        "steps_to_next_obs",
        "gamma",
        "_weight",
        "burn_in",
        "mask",
    )
)
"""Keys of a batch that extras cannot have."""


def assemble(store: Store, outputs: OutputPool, picked: Picked, n_step: int, gamma: float) -> TensorDict:
    """The batch of the picked transitions: see :class:`headrace.replay.ReplayBuffer` for its keys."""
    pool, mask = store.pool, picked.mask
    shape = (picked.envs.shape[0],) if picked.run is None else (picked.envs.shape[0], picked.run)
    if mask is not None and picked.run is not None:
        # padded runs are no windows of the ring: every transition of them is read alone
        envs, positions = np.repeat(picked.envs, picked.run), np.ascontiguousarray(picked.positions.reshape(-1))
        picked = picked._replace(envs=envs, positions=positions, run=None)
    run = picked.run or 1
    count, single = picked.envs.shape[0] * run, (*shape, 1)
    rows, ids = np.empty(count, np.int64), np.empty((2, *shape), np.int64)
    places, reals = np.empty((2, *single), np.int64), np.empty((2, *single), np.float32)
    flags = np.empty((4, *single), np.bool_)
    ahead = places.reshape(2, count)
    arithmetic.describe(
        picked.envs, picked.positions, run, n_step, gamma,
        pool.counts, store.rewards, pool.ring,
        rows, ids.reshape(2, count), ahead, reals.reshape(2, count), flags.reshape(4, count),
    )  # fmt: skip
    obs: Branch = {}
    following: Branch = {}
    for leaf in store.spec.leaves:
        if n_step == 1:
            here, there = read_runs(pool, leaf, outputs, picked)
            if mask is not None:
                here, there = here.unflatten(0, shape), there.unflatten(0, shape)
        else:
            here, there = read_pairs(pool, leaf, outputs, picked, ahead[1], shape)
        put_leaf(obs, leaf, here)
        put_leaf(following, leaf, there)
    index, traj = torch.from_numpy(ids).unbind()
    done, terminated, truncated, cut = torch.from_numpy(flags).unbind()
    following |= {
        "reward": torch.from_numpy(reals[0]),
        "done": done,
        "terminated": terminated,
        "truncated": truncated,
        "cut": cut,
    }
    content: Branch = {
        "index": index,
        "step_count": torch.from_numpy(places[0]),
        "collector": {"traj_ids": traj},
        **obs,
        "next": following,
    }
    for name, column in store.columns.items():
        content[name] = read_array(column, store.column_specs[name], rows, shape)
    if n_step > 1:
        content["steps_to_next_obs"] = torch.from_numpy(places[1])
        content["gamma"] = torch.from_numpy(reals[1])
    if picked.weights is not None:
        weights = torch.from_numpy(picked.weights)
        content["_weight"] = weights if len(shape) == 1 else weights[:, None].expand(shape)
    if picked.burn_in:
        content["burn_in"] = (torch.arange(shape[-1]) < picked.burn_in).expand(shape)
    if mask is not None:
        content["mask"] = torch.from_numpy(mask)
    return tree(content, torch.Size(shape))


def tree(content: Branch, size: torch.Size) -> TensorDict:
    """A ``TensorDict`` of nested dicts of tensors, all (*size, …); the dicts are used up.

    The checks of the public constructor take as long as the gather of a small batch; shapes are right by construction.
    """
    source: dict[str, Any] = content
    for name, value in content.items():
        if isinstance(value, dict):
            source[name] = tree(value, size)
    return _new_tensordict()(source=source, batch_size=size)


@functools.cache
def _new_tensordict() -> Callable[..., TensorDict]:
    """Found once: an import inside a function that is called for every branch costs more than the branch."""
    from tensordict import TensorDict

    return TensorDict._new_unsafe  # pyright: ignore[reportPrivateUsage]  # see :func:`tree`


def put_leaf(branch: Branch, leaf: Leaf, value: Tensor) -> None:
    """Set ``("observation", *leaf.path)``."""
    *parents, last = ("observation", *leaf.path)
    for name in parents:
        branch = cast("Branch", branch.setdefault(name, {}))
    branch[last] = value


def read_runs(pool: FramePool, leaf: Leaf, outputs: OutputPool, picked: Picked) -> tuple[Tensor, Tensor]:
    """Observations of the picked runs and the ones after them, (B, …) or (B, run, …): windows of one gather.

    Neighboring observations share their frames in memory: clone before writing into one.
    """
    run = picked.run or 1
    frames = run + leaf.frames
    rows = np.empty((picked.envs.shape[0], frames), np.int64)
    arithmetic.windows(picked.envs, picked.positions, pool.ring, pool.stacks[leaf.name], rows)
    block = read_frames(pool.rows[leaf.name], leaf, outputs, rows)
    shape, stride, hop, size = leaf.windows[frames]
    if picked.run is None:
        shape, stride = (rows.shape[0], *shape), (size, *stride)
    else:
        shape, stride = (rows.shape[0], run, *shape), (size, hop, *stride)
    return block.as_strided(shape, stride), block.as_strided(shape, stride, hop)


def read_pairs(
    pool: FramePool,
    leaf: Leaf,
    outputs: OutputPool,
    picked: Picked,
    ahead: Int64s,
    batch: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Observations and those ``ahead`` steps later, each (*batch, …). Memory is one gather, the two do not overlap."""
    frames = 2 * leaf.frames
    envs, positions = picked.envs, picked.positions
    if picked.run is not None:
        envs = np.repeat(envs, picked.run)
        positions = (positions[:, None] + np.arange(picked.run)).reshape(-1)
    rows = np.empty((envs.shape[0], frames), np.int64)
    arithmetic.observation_pairs(envs, positions, ahead, pool.ring, pool.stacks[leaf.name], rows)
    block = read_frames(pool.rows[leaf.name], leaf, outputs, rows)
    shape, stride, hop, size = leaf.windows[frames]
    shape, stride = (*batch, *shape), (*(size * step for step in strides(batch)), *stride)
    return block.as_strided(shape, stride), block.as_strided(shape, stride, leaf.frames * hop)


def read_frames(rows: Rows, leaf: Leaf, outputs: OutputPool, index: Int64s) -> Tensor:
    """Frames (B, F) in the layout of the leaf's stacks: F frames merged along the stacking axis, flat."""
    block = outputs.take((index.size * rows.row_bytes,), torch.uint8)
    rows.read(index, leaf.outer, block.numpy())
    return block.view(leaf.frame.dtype)


def read_array(rows: Rows, spec: ArraySpec, index: Int64s, batch: tuple[int, ...]) -> Tensor:
    """Rows of a plain array, fresh: (*batch, …)."""
    out = np.empty(index.shape[0] * rows.row_bytes, np.uint8)
    rows.read(index[:, None], 1, out)
    return torch.from_numpy(out).view(spec.dtype).view(*batch, *spec.shape)
