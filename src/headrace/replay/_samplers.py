"""Which transitions make a batch: uniform, slices of fixed length, whole trajectories.

A sampler keeps its index up to date at every write, so a draw costs the same however full the buffer is. The
prioritized sampler is in :mod:`headrace.replay._priorities`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace._kernels.gather import Bytes, Int64s
from headrace.errors import ConfigError, DataError, LifecycleError
from headrace.replay import _arithmetic as arithmetic
from headrace.replay._arithmetic import ENDED, Float64s, Int32s
from headrace.replay._pool import FramePool, Written
from headrace.replay._spec import Json

_T = TypeVar("_T")


class Picked(NamedTuple):
    """The transitions of one batch, as positions in their environments."""

    envs: Int64s
    positions: Int64s
    """First transition of each run."""
    run: int | None = None
    """Transitions in a row that belong to each pick, for batches (B, run); None: one, for batches (B,)."""
    weights: NDArray[np.float32] | None = None
    """Importance weights (B,)."""
    burn_in: int = 0
    """How many of a run's first transitions only warm up a recurrent state."""


class Sampler(Protocol):
    """Chooses transitions. One sampler serves one buffer; calls come under the buffer's lock."""

    def attach(self, pool: FramePool) -> None:
        """Take up work on a pool, empty or filled."""
        ...

    def written(self, write: Written) -> None:
        """Transitions were stored; those that they pushed out are gone."""
        ...

    def draw(self, tickets: Float64s) -> Picked:
        """Choose one item for each of the uniform numbers in [0, 1)."""
        ...

    def config(self) -> dict[str, Json]:
        """Kind and settings, for the manifest."""
        ...

    def blocks(self) -> dict[str, Bytes]:
        """What cannot be rebuilt from the pool, by block name, for saving."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its index."""
        ...


_SAMPLERS: dict[str, Callable[..., Sampler]] = {}


def register_sampler(kind: str, make: Callable[..., Sampler]) -> None:
    """Let stores on disk be opened with a sampler of your own.

    Args:
        kind: what its ``config()`` says as ``kind``.
        make: called with the rest of ``config()``.
    """
    if kind in _SAMPLERS:
        raise ConfigError(f"register_sampler: {kind!r} is taken; choose another kind")
    _SAMPLERS[kind] = make


def make_sampler(config: Mapping[str, Json]) -> Sampler:
    """The sampler that a manifest describes."""
    kind, settings = str(config.get("kind")), {name: value for name, value in config.items() if name != "kind"}
    if kind not in _SAMPLERS:
        raise DataError(
            f"manifest: unknown sampler {kind!r}; expected one of {sorted(_SAMPLERS)}. "
            "One of your own needs register_sampler() before the store is opened"
        )
    return _SAMPLERS[kind](**settings)


class UniformSampler:
    """Every stored transition equally likely, with replacement, also where environments hold different numbers."""

    def __init__(self) -> None:
        self._pool: FramePool | None = None

    def attach(self, pool: FramePool) -> None:
        """See :class:`Sampler`."""
        self._pool = attachable(self._pool, pool)

    def written(self, write: Written) -> None:
        """The pool's own counters are the index."""

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`Sampler`."""
        pool = attached(self._pool)
        envs, positions = np.empty(tickets.shape[0], np.int64), np.empty(tickets.shape[0], np.int64)
        stored = arithmetic.pick(tickets, pool.counts, pool.length, envs, positions)
        refuse_if_empty(stored, "transitions", "extend() it first")
        return Picked(envs=envs, positions=positions)

    def config(self) -> dict[str, Json]:
        """See :class:`Sampler`."""
        return {"kind": "uniform"}

    def blocks(self) -> dict[str, Bytes]:
        """Nothing: the index is rebuilt from the pool."""
        return {}

    @property
    def nbytes(self) -> int:
        """Nothing is kept."""
        return 0


@kernel()
def _push(items: Int32s, heads: Int64s, sizes: Int64s, envs: Int64s, slots: Int64s) -> None:
    for i in range(envs.shape[0]):
        e = envs[i]
        items[e, (heads[e] + sizes[e]) % items.shape[1]] = slots[i]
        sizes[e] += 1


@kernel()
def _drop(items: Int32s, heads: Int64s, sizes: Int64s, envs: Int64s, slots: Int64s) -> None:
    for i in range(envs.shape[0]):
        e = envs[i]
        if sizes[e] > 0 and items[e, heads[e]] == slots[i]:
            heads[e] = (heads[e] + 1) % items.shape[1]
            sizes[e] -= 1


@kernel()
def _draw(
    tickets: Float64s, items: Int32s, heads: Int64s, sizes: Int64s, counts: Int64s, slots: int, envs: Int64s, at: Int64s
) -> int:
    """Environment and position of each draw, every item equally likely; gives how many items there are.

    Where there are none, nothing is written.
    """
    ends = np.cumsum(sizes)
    total = ends[-1]
    if total > 0:
        arithmetic.spread(tickets, ends, envs, at)
        for b in range(tickets.shape[0]):
            e = envs[b]
            newest = counts[e] - 1
            at[b] = newest - (newest - items[e, (heads[e] + at[b]) % items.shape[1]]) % slots
    return total


class _Queues:
    """One first-in first-out queue of ring slots per environment: items enter when they become valid and leave when
    their first transition is pushed out.
    """

    def __init__(self, pool: FramePool) -> None:
        self.items = np.zeros((pool.num_envs, pool.length), np.int32)
        self.heads = np.zeros(pool.num_envs, np.int64)
        self.sizes = np.zeros(pool.num_envs, np.int64)
        self._episodes = pool.slots

    def push(self, envs: Int64s, positions: Int64s) -> None:
        _push(self.items, self.heads, self.sizes, envs, positions % self._episodes)

    def drop(self, envs: Int64s, positions: Int64s) -> None:
        """Remove the oldest item of each environment, if it is this position."""
        _drop(self.items, self.heads, self.sizes, envs, positions % self._episodes)

    def draw(self, tickets: Float64s, counts: Int64s, what: str, advice: str) -> tuple[Int64s, Int64s]:
        """Environment and position of one item per ticket, with replacement."""
        envs, at = np.empty(tickets.shape[0], np.int64), np.empty(tickets.shape[0], np.int64)
        stored = _draw(tickets, self.items, self.heads, self.sizes, counts, self._episodes, envs, at)
        refuse_if_empty(stored, what, advice)
        return envs, at


class SliceSampler:
    """Runs of ``burn_in + length`` transitions of one trajectory; every possible start equally likely.

    A run never crosses an end, a cut or the write head. The batch is (B, burn_in + length); ``sample(batch_size)``
    counts runs.
    """

    def __init__(self, length: int, *, burn_in: int = 0) -> None:
        if length < 1 or burn_in < 0:
            raise ConfigError(f"SliceSampler: expected length >= 1 and burn_in >= 0, got {length} and {burn_in}")
        self.length = length
        self.burn_in = burn_in
        self._pool: FramePool | None = None
        self._starts: _Queues | None = None

    def attach(self, pool: FramePool) -> None:
        """See :class:`Sampler`."""
        run = self.length + self.burn_in
        if run > pool.length:
            raise ConfigError(
                f"SliceSampler: slices of {run} transitions do not fit a buffer of {pool.length} per environment"
            )
        self._pool = attachable(self._pool, pool)
        self._starts = _Queues(pool)
        for e, positions in enumerate(stored_positions(pool)):
            slots = positions % pool.slots
            starts = positions[pool.steps[e, slots] >= run - 1] - (run - 1)
            starts = starts[starts >= positions[0]] if positions.size else starts
            self._starts.push(np.full(starts.shape[0], e), starts)

    def written(self, write: Written) -> None:
        """See :class:`Sampler`."""
        pool, starts, run = attached(self._pool), attached(self._starts), self.length + self.burn_in
        starts.drop(write.env_ids, write.positions - pool.length)
        complete = write.steps >= run - 1
        starts.push(write.env_ids[complete], write.positions[complete] - (run - 1))

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`Sampler`."""
        pool, starts = attached(self._pool), attached(self._starts)
        run = self.length + self.burn_in
        envs, positions = starts.draw(
            tickets, pool.counts, f"slices of {run} transitions", "no stored trajectory is that long: use shorter ones"
        )
        return Picked(envs=envs, positions=positions, run=run, burn_in=self.burn_in)

    def config(self) -> dict[str, Json]:
        """See :class:`Sampler`."""
        return {"kind": "slices", "length": self.length, "burn_in": self.burn_in}

    def blocks(self) -> dict[str, Bytes]:
        """Nothing: the index is rebuilt from the pool."""
        return {}

    @property
    def nbytes(self) -> int:
        """Four bytes per transition."""
        return 0 if self._starts is None else self._starts.items.nbytes


class TrajectorySampler:
    """Whole trajectories, from their first transition to their end or cut, each equally likely.

    ``sample(batch_size)`` counts trajectories; the batch is flat, one trajectory after another, told apart by
    ``("collector", "traj_ids")``. A trajectory whose beginning was overwritten, or that still goes on, is not whole.
    """

    def __init__(self) -> None:
        self._pool: FramePool | None = None
        self._starts: _Queues | None = None
        self._sizes = np.zeros((0, 0), np.int32)

    def attach(self, pool: FramePool) -> None:
        """See :class:`Sampler`."""
        self._pool = attachable(self._pool, pool)
        self._starts = _Queues(pool)
        # length of the trajectory that starts in a slot
        self._sizes = np.zeros((pool.num_envs, pool.slots), np.int32)
        for e, positions in enumerate(stored_positions(pool)):
            slots = positions % pool.slots
            last = positions[(pool.flags[e, slots] & ENDED) != 0]
            self._complete(np.full(last.shape[0], e), last, int(positions[0]) if positions.size else 0)

    def written(self, write: Written) -> None:
        """See :class:`Sampler`."""
        pool, starts = attached(self._pool), attached(self._starts)
        starts.drop(write.env_ids, write.positions - pool.length)
        for done, positions in ((write.cut, write.positions - 1), (write.ended, write.positions)):
            if done.any():
                self._complete(write.env_ids[done], positions[done], None)

    def _complete(self, envs: Int64s, last: Int64s, oldest: int | None) -> None:
        pool, starts = attached(self._pool), attached(self._starts)
        sizes = pool.steps[envs, last % pool.slots] + 1
        first = last - sizes + 1
        whole = first >= (pool.oldest()[envs] if oldest is None else oldest)
        envs, first = envs[whole], first[whole]
        self._sizes[envs, first % pool.slots] = sizes[whole]
        starts.push(envs, first)

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`Sampler`."""
        pool, starts = attached(self._pool), attached(self._starts)
        envs, first = starts.draw(
            tickets, pool.counts, "whole trajectories", "none has both its first and its last transition stored"
        )
        sizes = self._sizes[envs, first % pool.slots].astype(np.int64)
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Picked(envs=np.repeat(envs, sizes), positions=np.repeat(first, sizes) + within)

    def config(self) -> dict[str, Json]:
        """See :class:`Sampler`."""
        return {"kind": "trajectories"}

    def blocks(self) -> dict[str, Bytes]:
        """Nothing: the index is rebuilt from the pool."""
        return {}

    @property
    def nbytes(self) -> int:
        """Eight bytes per transition."""
        return 0 if self._starts is None else self._starts.items.nbytes + self._sizes.nbytes


def stored_positions(pool: FramePool) -> list[Int64s]:
    """Positions of the stored transitions, oldest first, per environment."""
    return [np.arange(low, high) for low, high in zip(pool.oldest(), pool.counts, strict=True)]


def refuse_if_empty(stored: int, what: str, advice: str) -> None:
    """Raise unless there is something to draw; draws are with replacement, so one item is enough for any number."""
    if stored < 1:
        raise LifecycleError(f"sample: expected {what} in the buffer, got none; {advice}")


def attachable(current: FramePool | None, pool: FramePool) -> FramePool:
    """The pool to work on; a sampler that has one already refuses a second."""
    if current is not None and current is not pool:
        raise ConfigError("sampler: it serves another buffer already; make a new one")
    return pool


def attached(value: _T | None) -> _T:
    """What :meth:`Sampler.attach` has set."""
    if value is None:
        raise LifecycleError("sampler: not attached to a buffer; pass it to ReplayBuffer(sampler=…)")
    return value


register_sampler("uniform", UniformSampler)
register_sampler("slices", SliceSampler)
register_sampler("trajectories", TrajectorySampler)
