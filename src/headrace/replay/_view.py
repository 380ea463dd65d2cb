"""One sampler over a store: what is drawn, when, and how positions become tensors.

There is one gather per observation leaf, of which observation and next observation are views.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from headrace._device import to_device
from headrace._rng_kernels import uniforms
from headrace.errors import ConfigError, IdError, LifecycleError, ShapeError
from headrace.history.output import OutputPool
from headrace.replay import ring
from headrace.replay._batches import Batches
from headrace.replay._blocks import Allocator, Int64s, Namespace
from headrace.replay._pool import AnyRowSpace, FramePool
from headrace.replay._priorities import PrioritizedSampler
from headrace.replay._samplers import Picked, Sampler
from headrace.replay._spec import ArraySpec, LeafSpec, ViewSpec, Window
from headrace.replay._store import Store
from headrace.replay.ring import Float64s
from headrace.rng import stream_key
from headrace.types import StackSpec, as_device

if TYPE_CHECKING:
    from tensordict import TensorDict

_ATTEMPTS = 1000

Branch: TypeAlias = "dict[str, Tensor | Branch]"
"""Names to tensors, nested."""

RESERVED = frozenset(
    (
        *("observation", "action", "index", "step_count", "collector", "next", "steps_to_next_obs", "gamma"),
        *("_weight", "burn_in", "mask"),
    )
)
"""Keys of a batch that extras cannot have."""


def assemble(store: Store, outputs: OutputPool, picked: Picked, n_step: int, gammas: Float64s) -> TensorDict:
    """Return the batch of the picked transitions: see :class:`headrace.replay.ReplayBuffer` for its keys."""
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
    ring.describe(
        picked.envs, picked.positions, run, n_step, gammas,
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
    """Return a ``TensorDict`` of nested dicts of tensors, all (*size, …); the dicts are used up.

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


def put_leaf(branch: Branch, leaf: LeafSpec, value: Tensor) -> None:
    """Set ``("observation", *leaf.path)``."""
    *parents, last = ("observation", *leaf.path)
    for name in parents:
        branch = cast("Branch", branch.setdefault(name, {}))
    branch[last] = value


def read_runs(pool: FramePool, leaf: LeafSpec, outputs: OutputPool, picked: Picked) -> tuple[Tensor, Tensor]:
    """Return observations of the picked runs and the ones after them, (B, …) or (B, run, …): windows of one gather.

    Neighboring observations share their frames in memory: clone before writing into one.
    """
    run = picked.run or 1
    frames = run + leaf.frames
    rows = np.empty((picked.envs.shape[0], frames), np.int64)
    ring.windows(picked.envs, picked.positions, pool.ring, pool.stacks[leaf.name], rows)
    block = read_frames(pool.rows[leaf.name], leaf, outputs, rows)
    shape, stride, hop, size = pool.windows.get((leaf.name, frames)) or _window(pool, leaf, frames)
    if picked.run is None:
        shape, stride = (rows.shape[0], *shape), (size, *stride)
    else:
        shape, stride = (rows.shape[0], run, *shape), (size, hop, *stride)
    return block.as_strided(shape, stride), block.as_strided(shape, stride, hop)


def read_pairs(
    pool: FramePool, leaf: LeafSpec, outputs: OutputPool, picked: Picked, ahead: Int64s, batch: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return observations and those ``ahead`` steps later, each (*batch, …).

    Memory is one gather, the two do not overlap.
    """
    frames = 2 * leaf.frames
    envs, positions = picked.envs, picked.positions
    if picked.run is not None:
        envs = np.repeat(envs, picked.run)
        positions = (positions[:, None] + np.arange(picked.run)).reshape(-1)
    rows = np.empty((envs.shape[0], frames), np.int64)
    ring.observation_pairs(envs, positions, ahead, pool.ring, pool.stacks[leaf.name], rows)
    block = read_frames(pool.rows[leaf.name], leaf, outputs, rows)
    shape, stride, hop, size = pool.windows.get((leaf.name, frames)) or _window(pool, leaf, frames)
    shape, stride = (*batch, *shape), (*(size * step for step in _strides(batch)), *stride)
    return block.as_strided(shape, stride), block.as_strided(shape, stride, leaf.frames * hop)


def read_frames(rows: AnyRowSpace, leaf: LeafSpec, outputs: OutputPool, index: Int64s) -> Tensor:
    """Return frames (B, F) in the layout of the leaf's stacks: F frames merged along the stacking axis, flat."""
    block = outputs.take((index.size * rows.row_bytes,), torch.uint8)
    rows.read(index, leaf.outer, block.numpy())
    return _view_as(block, leaf.frame.dtype)


def read_array(rows: AnyRowSpace, spec: ArraySpec, index: Int64s, batch: tuple[int, ...]) -> Tensor:
    """Return rows of a plain array, fresh: (*batch, …)."""
    out = np.empty(index.shape[0] * rows.row_bytes, np.uint8)
    rows.read(index[:, None], 1, out)
    return _view_as(torch.from_numpy(out), spec.dtype).view(*batch, *spec.shape)


def _view_as(block: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements; torch gives no view of none."""
    return block.view(dtype) if block.numel() else torch.empty(0, dtype=dtype)


def _window(pool: FramePool, leaf: LeafSpec, frames: int) -> Window:
    """Lay out a block in which so many frames are merged along the stacking axis; the pool remembers it."""
    shape, stack = leaf.frame.shape, leaf.stack
    stride, hop = _strides(shape), math.prod(shape)
    if stack is not None:
        axis = stack.axis(len(shape))
        stride = _strides(StackSpec(frames=frames, dim=axis, layout=stack.layout).stacked_shape(shape))
        hop = (1 if stack.layout == "new_axis" else shape[axis]) * stride[axis]
    window = Window(leaf.observed.shape, stride, hop, frames * math.prod(shape))
    pool.windows[leaf.name, frames] = window
    return window


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbors along each axis of a contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class Tickets:
    """The uniform numbers of draws, made for several draws at a time; which those are changes none of them."""

    _AHEAD = 32

    def __init__(self, seed: int, stream: str) -> None:
        self._key = stream_key(seed, stream)
        self._first = 0
        self._made = np.empty((0, 0))

    def of(self, draw: int, count: int) -> Float64s:
        """Return numbers in [0, 1) of this draw, (count,): a function of seed, draw and place."""
        row = draw - self._first
        if self._made.shape[1] != count or not 0 <= row < self._made.shape[0]:
            made = np.empty((count, self._AHEAD))
            uniforms(self._key, np.arange(count), np.full(count, draw), 0.0, 1.0, made)
            self._made, self._first, row = np.ascontiguousarray(made.T), draw, 0
        return self._made[row]


class Drawn(NamedTuple):
    """A batch on the CPU, before it is handed over."""

    batch: TensorDict
    picked: Picked
    number: int
    """Of the draw."""


Edit: TypeAlias = Callable[[Drawn], Picked]
"""Changes a batch, and returns what was read for it."""


class SamplerView(Batches):
    """Batches of a store, drawn by one sampler; made by :meth:`ReplayBuffer.with_sampler`.

    Any number of them may read one store, each with n-step returns, draws and a device of its own. See
    :class:`headrace.replay.ReplayBuffer` for the keys of a batch.
    """

    def __init__(
        self, store: Store, name: str, sampler: Sampler, settings: ViewSpec, device: torch.device | str
    ) -> None:
        self.name, self.sampler, self.settings = name, sampler, settings
        self.device = as_device(device)
        self.memory = Namespace(Allocator() if store.follows else store.memory, f"{name}.")
        """What is saved with the store."""
        self.store = store
        """What is sampled from, shared by all of its samplers."""
        self.gammas: Float64s = np.full(store.spec.num_envs, settings.gamma, np.float64)
        """Discount of each environment."""
        self._tickets = Tickets(settings.seed, "replay")
        self.outputs = OutputPool(pinned=self.device.type == "cuda")
        """Memory of batches."""
        with store.lock:
            self._draws = self.memory.allocate("draws", 8).view(np.int64)
            self.attach()
            store.add(self)

    def attach(self) -> None:
        """Let the sampler begin anew with what is stored; called by the store."""
        self.sampler.attach(self.store.pool, self.memory, self.settings.seed)

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch: ``batch_size`` transitions, slices or trajectories, as the sampler says."""
        return self.draw(batch_size)

    def draw(self, batch_size: int, edit: Edit | None = None) -> TensorDict:
        """Draw a batch that ``edit`` may change before it is handed over."""
        if batch_size < 1:
            raise ShapeError(f"batch_size: expected at least 1, got {batch_size}")
        with self.store.lock:
            tickets = self._tickets.of(int(self._draws[0]), batch_size)
            batch = self._read(lambda: self.sampler.draw(tickets), edit)
            self._draws[0] += 1
            return batch

    @property
    def prioritized(self) -> bool:
        """Whether the sampler takes priorities."""
        return isinstance(self.sampler, PrioritizedSampler)

    def get(self, index: Tensor) -> TensorDict:
        """Return the transitions of these ``index`` values, int64 (B,), as :meth:`sample` gives them."""
        if index.dim() != 1:
            raise IdError(f"index: expected int64 (B,), got {tuple(index.shape)}")
        envs, positions = self._locate(index)
        with self.store.lock:
            return self._read(lambda: self._find_stored(envs, positions, index))

    def _find_stored(self, envs: Int64s, positions: Int64s, index: Tensor) -> Picked:
        pool = self.store.pool
        stored = (positions >= pool.oldest()[envs]) & (positions < pool.counts[envs])
        if not stored.all():
            raise IdError(f"index: {index[torch.from_numpy(~stored)].tolist()[:8]} are not stored, or no longer")
        return Picked(envs=envs, positions=positions)

    def at(self, place: Tensor) -> TensorDict:
        """Return the transitions at places 0 ≤ place < len, int64 (B,), counted by environment, oldest first."""
        pool, where = self.store.pool, place.numpy()

        def pick() -> Picked:
            ends = np.cumsum(pool.lengths())
            if where.ndim != 1 or (where < 0).any() or (where >= ends[-1]).any():
                raise IdError(f"place: expected int64 (B,) between 0 and {int(ends[-1]) - 1}, got {place}")
            envs = np.searchsorted(ends, where, side="right")
            return Picked(envs=envs, positions=pool.oldest()[envs] + where - (ends - pool.lengths())[envs])

        with self.store.lock:
            return self._read(pick)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Give what was drawn new priorities, usually absolute TD errors; both (B,). Overwritten ones are passed over.

        A :class:`PrioritizedSampler` of runs also takes both as (B, T), those of all transitions.
        """
        if not isinstance(self.sampler, PrioritizedSampler):
            raise ConfigError("update_priorities: the sampler has no priorities; use PrioritizedSampler()")
        envs, positions = self._locate(index)
        values = priority.detach().to("cpu", torch.float64).numpy()
        if values.ndim == positions.ndim + 1 and values.shape[-1] == 1:
            values = values[..., 0]
        with self.store.lock:
            self.sampler.update(envs, positions, values)

    def _locate(self, index: Tensor) -> tuple[Int64s, Int64s]:
        if index.dtype != torch.int64 or (index < 0).any():
            raise IdError(f"index: expected int64, not negative, got {index.dtype} {tuple(index.shape)}")
        positions, envs = np.divmod(index.cpu().numpy(), self.store.spec.num_envs)
        return envs, positions

    def _read(self, pick: Callable[[], Picked], edit: Edit | None = None) -> TensorDict:
        """Return what was picked; called with the lock held."""
        batch = self._read_whole(pick, edit) if self.store.follows else self._assemble(pick(), edit)[0]
        if self.device.type == "cpu":
            return batch
        return cast("TensorDict", batch.apply(functools.partial(to_device, device=self.device), device=self.device))

    def _assemble(self, picked: Picked, edit: Edit | None) -> tuple[TensorDict, Picked]:
        batch = assemble(self.store, self.outputs, picked, self.settings.n_step, self.gammas)
        return batch, picked if edit is None else edit(Drawn(batch, picked, int(self._draws[0])))

    def _read_whole(self, pick: Callable[[], Picked], edit: Edit | None) -> TensorDict:
        """Return the same where another process writes meanwhile: again, until nothing was overwritten."""
        # what a draw changes; a draw by priority changes nothing
        store, blocks = self.store, {} if self.prioritized else self.memory.blocks
        for _ in range(_ATTEMPTS):
            before = {name: block.copy() for name, block in blocks.items()}
            store.follow()
            picked, heads = pick(), store.head_flags()
            batch, read = self._assemble(picked, edit)
            if store.is_whole(picked, heads) and (read is picked or store.is_whole(read, heads)):
                return batch
            for name, block in before.items():
                blocks[name][:] = block
            store.index_again()
        raise LifecycleError("sample: the writer overwrites transitions faster than they can be read; make it larger")
