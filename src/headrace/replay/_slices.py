"""Samplers of several transitions in a row: slices of fixed length, whole trajectories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace._kernels.compiled import kernel
from headrace.errors import ConfigError
from headrace.replay import ring
from headrace.replay._blocks import Int64s, Namespace
from headrace.replay._pool import FramePool, Written
from headrace.replay._samplers import Picked, Sampler, attached, list_positions, refuse_if_empty, register_sampler
from headrace.replay.ring import ENDED, Float64s, Int32s


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


class _Queues:
    """One first-in first-out queue of ring slots per environment: items enter when they become valid and leave when
    their first transition is pushed out.
    """

    def __init__(self, pool: FramePool) -> None:
        self.items = np.zeros((pool.num_envs, pool.length), np.int32)
        self.heads = np.zeros(pool.num_envs, np.int64)
        self.sizes = np.zeros(pool.num_envs, np.int64)
        self._slots = pool.slots

    def push(self, envs: Int64s, positions: Int64s) -> None:
        _push(self.items, self.heads, self.sizes, envs, positions % self._slots)

    def drop(self, envs: Int64s, positions: Int64s) -> None:
        """Remove the oldest item of each environment, if it is this position."""
        _drop(self.items, self.heads, self.sizes, envs, positions % self._slots)

    def draw(self, tickets: Float64s, counts: Int64s, what: str, advice: str) -> tuple[Int64s, Int64s]:
        """Return environment and position of one item per ticket, with replacement."""
        ends = np.cumsum(self.sizes)
        refuse_if_empty(int(ends[-1]), what, advice)
        envs, place = ring.spread(tickets, ends)
        newest = counts[envs] - 1
        slots = self.items[envs, (self.heads[envs] + place) % self.items.shape[1]]
        return envs, newest - (newest - slots) % self._slots


Span = bool | int | Sequence[bool | int]


class SliceSampler(Sampler):
    """Runs of ``burn_in + length`` transitions of one trajectory; every possible start equally likely.

    A run never crosses an end, a cut or the write head. The batch is (B, burn_in + length); ``sample(batch_size)``
    counts runs.
    """

    kind = "slices"

    def __init__(self, length: int, *, burn_in: int = 0, strict: bool = True, span: Span = False) -> None:
        """Choose the runs.

        Args:
            length: transitions to learn from.
            burn_in: transitions before them that only warm up a recurrent state.
            strict: leave out trajectories that are shorter than a run. Otherwise such a one is a run, padded at its
                end; ``mask`` is False in padding rows, which repeat its last transition.
            span: how many transitions a run may begin before its trajectory, and end after it (one number, or two;
                True: all but one). The missing ones are padding. Without it, the first and last transitions of a
                trajectory are in fewer runs than the others.
        """
        check_run(length, burn_in)
        self.length, self.burn_in, self.strict = length, burn_in, strict
        self.run = length + burn_in
        before, after = (span, span) if isinstance(span, int) else span
        self.span = tuple(self.run - 1 if part is True else int(part) for part in (before, after))
        if not all(0 <= part < self.run for part in self.span):
            raise ConfigError(f"SliceSampler: expected span below the run of {self.run} transitions, got {span}")
        self._padded = not strict or any(self.span)
        self._starts: _Queues | None = None
        self._pieces: tuple[bytes, Int64s] | None = None

    def attach(self, pool: FramePool, memory: Namespace, seed: int) -> None:
        """See :class:`~headrace.replay.Sampler`."""
        check_fits(self.run, pool)
        super().attach(pool, memory, seed)
        self._pieces = None
        if not self._padded:
            self._starts = _Queues(pool)
            self._starts.push(*list_starts(pool, self.run))

    def written(self, write: Written) -> None:
        """See :class:`~headrace.replay.Sampler`."""
        if self._starts is not None:
            self._starts.drop(write.env_ids, write.positions - attached(self._pool).length)
            self._starts.push(*new_starts(attached(self._pool), write, self.run))

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`~headrace.replay.Sampler`."""
        what, advice = f"slices of {self.run} transitions", "no stored trajectory is that long: use shorter ones"
        if self._starts is None:
            return self._draw_padded(tickets, what, advice)
        envs, positions = self._starts.draw(tickets, attached(self._pool).counts, what, advice)
        return Picked(envs=envs, positions=positions, run=self.run, burn_in=self.burn_in)

    def _draw_padded(self, tickets: Float64s, what: str, advice: str) -> Picked:
        envs, first, last, ends = self._table()
        refuse_if_empty(int(ends[-1]) if ends.size else 0, what, advice)
        piece, offset = ring.spread(tickets, ends)
        first, last = first[piece, None], last[piece, None]
        positions = first - self.span[0] + offset[:, None] + np.arange(self.run)
        mask = (positions >= first) & (positions <= last)
        return Picked(envs[piece], positions.clip(first, last), run=self.run, burn_in=self.burn_in, mask=mask)

    def _table(self) -> Int64s:
        """Return stored pieces of trajectories: environment, first, last, running sum of their runs: (4, P).

        Made anew after a write, from one byte per stored transition.
        """
        pool = attached(self._pool)
        written = pool.counts.tobytes()
        if self._pieces is None or self._pieces[0] != written:
            table = pieces(pool)
            size, (before, after) = table[2] - table[1] + 1, self.span
            runs = before + 1 + np.minimum(np.maximum(size - self.run, 0) + after, size - 1)
            runs[(size < self.run) & self.strict] = 0
            self._pieces = written, np.concatenate([table, np.cumsum(runs)[None]])
        return self._pieces[1]

    @property
    def mass(self) -> float:
        """Possible starts of runs."""
        if self._starts is not None:
            return float(self._starts.sizes.sum())
        ends = self._table()[3]
        return float(ends[-1]) if ends.size else 0.0

    def config(self) -> dict[str, Any]:
        """See :class:`~headrace.replay.Sampler`."""
        settings: dict[str, Any] = {"length": self.length, "burn_in": self.burn_in, "strict": self.strict}
        return {**super().config(), **settings, "span": list(self.span)}

    @property
    def nbytes(self) -> int:
        """Four bytes per transition, or 32 per stored piece of a trajectory where runs are padded."""
        table = 0 if self._pieces is None else self._pieces[1].nbytes
        return table + (0 if self._starts is None else self._starts.items.nbytes)


def check_run(length: int, burn_in: int) -> None:
    """Raise unless a run can have these transitions."""
    if length < 1 or burn_in < 0:
        raise ConfigError(f"SliceSampler: expected length >= 1 and burn_in >= 0, got {length} and {burn_in}")


def check_fits(run: int, pool: FramePool) -> None:
    """Raise where no run could ever be stored."""
    if run > pool.length:
        raise ConfigError(
            f"SliceSampler: slices of {run} transitions do not fit a buffer of {pool.length} per environment"
        )


def pieces(pool: FramePool) -> Int64s:
    """Return environment, first and last position of every stored trajectory, as far as it is stored: (3, P)."""
    found: list[Int64s] = []
    for e, positions in enumerate(list_positions(pool)):
        if positions.size:
            ended = (pool.flags[e, positions % pool.slots] & ENDED) != 0
            ended[-1] = True
            last = positions[ended]
            first = np.concatenate([positions[:1], last[:-1] + 1])
            found.append(np.stack([np.full(last.shape[0], e), first, last]))
    return np.concatenate(found, 1) if found else np.empty((3, 0), np.int64)


def list_starts(pool: FramePool, run: int) -> tuple[Int64s, Int64s]:
    """Return environment and position of everything stored that begins a run of one trajectory, oldest first."""
    envs, first, last = pieces(pool)
    sizes = np.maximum(last - first + 2 - run, 0)
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(envs, sizes), np.repeat(first, sizes) + within


def new_starts(pool: FramePool, write: Written, run: int) -> tuple[Int64s, Int64s]:
    """Return environment and position of the runs that a write has completed and not pushed out as well."""
    starts = write.positions - (run - 1)
    complete = (write.steps >= run - 1) & (starts >= pool.oldest()[write.env_ids])
    return write.env_ids[complete], starts[complete]


class TrajectorySampler(Sampler):
    """Whole trajectories, from their first transition to their end or cut, each equally likely.

    ``sample(batch_size)`` counts trajectories; the batch is flat, one trajectory after another, told apart by
    ``("collector", "traj_ids")``. A trajectory whose beginning was overwritten, or that still goes on, is not whole.
    """

    kind = "trajectories"
    _table: tuple[bytes, Int64s] | None = None

    def attach(self, pool: FramePool, memory: Namespace, seed: int) -> None:
        """See :class:`~headrace.replay.Sampler`."""
        super().attach(pool, memory, seed)
        self._table = None

    def _whole(self) -> Int64s:
        """Return environment, first and last position of each whole trajectory, (3, P); made anew after a write."""
        pool = attached(self._pool)
        written = pool.counts.tobytes()
        if self._table is None or self._table[0] != written:
            envs, first, last = table = pieces(pool)
            ended = (pool.flags[envs, last % pool.slots] & ENDED) != 0
            self._table = written, table[:, ended & (pool.steps[envs, first % pool.slots] == 0)]
        return self._table[1]

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`~headrace.replay.Sampler`."""
        table = self._whole()
        count = table.shape[1]
        refuse_if_empty(count, "whole trajectories", "none has both its first and its last transition stored")
        envs, first, last = table[:, np.minimum((tickets * count).astype(np.int64), count - 1)]
        sizes = last - first + 1
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return Picked(envs=np.repeat(envs, sizes), positions=np.repeat(first, sizes) + within)

    @property
    def mass(self) -> float:
        """Whole trajectories."""
        return float(self._whole().shape[1])

    @property
    def nbytes(self) -> int:
        """24 bytes per whole trajectory."""
        return 0 if self._table is None else self._table[1].nbytes


register_sampler("slices", SliceSampler)
register_sampler("trajectories", TrajectorySampler)
