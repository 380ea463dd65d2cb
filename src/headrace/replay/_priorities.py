"""Prioritized sampling: a sum tree of fan-out 8, whose node is one cache line.

Proportional prioritization as in Schaul et al. (2016), with P(i) = p_i^α / Σ p^α and importance weights
w_i = (P_min / P(i))^β, where P_min is the smallest over the whole buffer: the largest weight in the buffer is 1.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace.errors import ConfigError, ShapeError
from headrace.replay._blocks import Allocator, Int64s, Namespace
from headrace.replay._pool import FramePool, Written
from headrace.replay._samplers import Picked, Sampler, attached, refuse_if_empty, register_sampler
from headrace.replay._slices import check_fits, check_run, list_starts, new_starts
from headrace.replay.ring import Float64s

FAN = 8


@kernel()
def _assign(sums: Float64s, lows: Float64s, starts: Int64s, leaves: Float64s, index: Int64s, values: Float64s) -> None:
    """Set leaves and the sums and minima above them. A leaf of 0 is empty: it counts as no minimum.

    ``starts`` has the first node of each level, the level next to the leaves first. Sums are made anew from their
    children, never by differences, so they do not drift.
    """
    for i in range(index.shape[0]):
        leaves[index[i]] = values[i]
    for i in range(index.shape[0]):
        child = index[i]
        for level in range(starts.shape[0]):
            parent = child // FAN
            total, low = 0.0, math.inf
            for c in range(parent * FAN, parent * FAN + FAN):
                if level == 0:
                    total += leaves[c]
                    if leaves[c] > 0.0 and leaves[c] < low:
                        low = leaves[c]
                else:
                    total += sums[starts[level - 1] + c]
                    low = min(low, lows[starts[level - 1] + c])
            sums[starts[level] + parent] = total
            lows[starts[level] + parent] = low
            child = parent


@kernel()
def _find(sums: Float64s, starts: Int64s, leaves: Float64s, tickets: Float64s, out: Int64s) -> None:
    """Find the leaf of each ticket in [0, 1): the one in whose share of the sum it falls."""
    top = starts.shape[0] - 1
    for b in range(tickets.shape[0]):
        rest = tickets[b] * sums[starts[top]]
        node = 0
        for level in range(top, -1, -1):
            chosen, before = -1, rest
            for c in range(node * FAN, node * FAN + FAN):
                share = leaves[c] if level == 0 else sums[starts[level - 1] + c]
                if share > 0.0:
                    chosen, before = c, rest
                    if rest < share:
                        break
                    rest -= share
            # past every share only by rounding: then the last one that is not empty is right, and so on below
            node, rest = chosen, before
        out[b] = node


class SumTree:
    """Priorities of ``size`` leaves with their sum and minimum; owns the tree, borrows the leaves' memory."""

    def __init__(self, size: int, memory: Allocator | Namespace) -> None:
        padded = -(-size // FAN) * FAN
        self.block = memory.allocate("priorities", padded * 8)
        self.leaves: Float64s = self.block.view(np.float64)
        starts: list[int] = []
        nodes, total = padded, 0
        while nodes > 1:
            nodes = -(-nodes // FAN)
            starts.append(total)
            # a level is read in whole groups of children
            total += -(-nodes // FAN) * FAN
        self._starts = np.array(starts, np.int64)
        self._sums = np.zeros(total)
        self._lows = np.full(total, math.inf)

    @property
    def nbytes(self) -> int:
        """Bytes of the tree over the leaves."""
        return self._sums.nbytes + self._lows.nbytes

    @property
    def total(self) -> float:
        """Sum of the leaves."""
        return float(self._sums[self._starts[-1]])

    @property
    def lowest(self) -> float:
        """Smallest leaf that is not empty."""
        return float(self._lows[self._starts[-1]])

    def assign(self, index: Int64s, values: Float64s) -> None:
        """Set leaves; the last one counts where an index is repeated."""
        _assign(self._sums, self._lows, self._starts, self.leaves, index, values)

    def find(self, tickets: Float64s) -> Int64s:
        """Leaves drawn in proportion to their values; the sum must be positive."""
        out = np.empty(tickets.shape[0], np.int64)
        _find(self._sums, self._starts, self.leaves, tickets, out)
        return out


class PrioritizedSampler(Sampler):
    """Transitions, or runs of them, in proportion to priority^alpha, with replacement, with weights that undo the bias.

    A new item has the largest priority given so far. ``beta`` may be changed between draws, as schedules do.
    Samples carry ``_weight`` and ``index``; give new priorities with
    :meth:`ReplayBuffer.update_priorities <headrace.replay.ReplayBuffer.update_priorities>`. Priorities, ``beta`` and
    the largest priority are saved with the store.

    With ``length``, items are runs of ``burn_in + length`` transitions of one trajectory, never across an end, a cut or
    the write head, named by the ``index`` of their first transition. ``update_priorities`` then takes one priority per
    run, (B,), or ``index`` and TD errors of all transitions, (B, T), of which it makes eta · max + (1 − eta) · mean
    over what is learned from, as in R2D2 (Kapturowski et al., 2019).
    """

    kind = "prioritized"

    def __init__(
        self,
        length: int | None = None,
        *,
        burn_in: int = 0,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        eta: float = 0.9,
    ) -> None:
        if alpha < 0 or beta < 0 or eps <= 0 or not 0 <= eta <= 1:
            raise ConfigError(
                "PrioritizedSampler: expected alpha >= 0, beta >= 0, eps > 0 and eta between 0 and 1, got "
                f"{alpha}, {beta}, {eps} and {eta}"
            )
        if length is None and burn_in:
            raise ConfigError(f"PrioritizedSampler: burn_in={burn_in} is of runs; give their length, too")
        check_run(1 if length is None else length, burn_in)
        self.length, self.burn_in, self.eta = length, burn_in, eta
        self.run = (length or 1) + burn_in
        """Transitions in an item."""
        self.alpha = alpha
        self.eps = eps
        self._tree: SumTree | None = None
        self._state: Float64s = np.array([1.0, beta])
        self._seen: Int64s | None = None
        """Counts (N,) up to which priorities were given; what another process has written since has none of its own."""

    @property
    def beta(self) -> float:
        """How far the weights undo the bias: 1 is all of it."""
        return float(self._state[1])

    @beta.setter
    def beta(self, value: float) -> None:
        self._state[1] = value

    @property
    def largest(self) -> float:
        """The largest priority^alpha given so far, which new items get."""
        return float(self._state[0])

    @property
    def mass(self) -> float:
        """Sum of all priorities^alpha."""
        return attached(self._tree).total

    @property
    def lowest(self) -> float:
        """The smallest priority^alpha of an item."""
        return attached(self._tree).lowest

    def expect(self, largest: float) -> None:
        """Give new items at least this priority^alpha."""
        self._state[0] = max(self.largest, largest)

    def attach(self, pool: FramePool, memory: Namespace, seed: int) -> None:
        """See :class:`~headrace.replay.Sampler`. Priorities on disk or in a checkpoint are taken up."""
        check_fits(self.run, pool)
        super().attach(pool, memory, seed)
        tree = self._tree = SumTree(pool.first_side_row, memory)
        before, self._state = self._state, memory.allocate("priority_state", 16).view(np.float64)
        if self._state[0] <= 0:
            self._state[:] = before
        envs, positions = list_starts(pool, self.run)
        rows = envs * pool.slots + positions % pool.slots
        values = tree.leaves[rows].copy()
        # a crash can leave an item without its priority, or the priority of one that is gone
        if self._seen is not None:
            values[positions >= self._seen[envs]] = 0.0
        self._seen = pool.counts.copy()
        self._state[0] = max(float(values.max(initial=0.0)), self.largest)
        values[values <= 0.0] = self.largest
        tree.leaves[:] = 0.0
        tree.assign(rows, values)

    def written(self, write: Written) -> None:
        """Give new items the largest priority, and those pushed out none."""
        pool, tree = attached(self._pool), attached(self._tree)
        gone = write.positions >= pool.length
        envs = write.env_ids[gone]
        left = envs * pool.slots + (write.positions[gone] - pool.length) % pool.slots
        tree.assign(left, np.zeros(left.shape[0]))
        self._seen = pool.counts.copy()
        envs, positions = new_starts(pool, write, self.run)
        tree.assign(envs * pool.slots + positions % pool.slots, np.full(envs.shape[0], self.largest))

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`~headrace.replay.Sampler`."""
        pool, tree = attached(self._pool), attached(self._tree)
        run = None if self.length is None else self.run
        what = "transitions" if run is None else f"slices of {run} transitions"
        refuse_if_empty(int(tree.total > 0), what, "extend() it first")
        rows = tree.find(tickets)
        weights = (tree.lowest / tree.leaves[rows]) ** self.beta
        envs, slot = np.divmod(rows, pool.slots)
        newest = pool.counts[envs] - 1
        positions = newest - (newest - slot) % pool.slots
        return Picked(envs, positions, run=run, weights=weights.astype(np.float32), burn_in=self.burn_in)

    def update(self, envs: Int64s, positions: Int64s, priority: NDArray[np.float64]) -> None:
        """Set priorities |priority| + eps, see the class; items that were overwritten meanwhile are passed over."""
        pool, tree = attached(self._pool), attached(self._tree)
        if (
            self.length is not None
            and positions.ndim == 2
            and priority.shape == positions.shape == (len(envs), self.run)
        ):
            learned = np.abs(priority[:, self.burn_in :])
            priority = self.eta * learned.max(1) + (1 - self.eta) * learned.mean(1)
            envs, positions = envs[:, 0], positions[:, 0]
        if priority.shape != positions.shape:
            raise ShapeError(f"priority: expected {positions.shape}, one per index, got {priority.shape}")
        if not np.isfinite(priority).all():
            raise ConfigError("priority: expected finite numbers, got NaN or infinity; clip the TD errors")
        rows = envs * pool.slots + positions % pool.slots
        stored = (positions >= pool.oldest()[envs]) & (positions < pool.counts[envs]) & (tree.leaves[rows] > 0)
        values = (np.abs(priority[stored]) + self.eps) ** self.alpha
        self._state[0] = max(self.largest, float(values.max(initial=0.0)))
        tree.assign(rows[stored], values)

    def config(self) -> dict[str, Any]:
        """See :class:`~headrace.replay.Sampler`."""
        config: dict[str, Any] = {**super().config(), "alpha": self.alpha, "beta": self.beta, "eps": self.eps}
        if self.length is not None:
            config |= {"kind": "prioritized_slices", "length": self.length, "burn_in": self.burn_in, "eta": self.eta}
        return config

    @property
    def nbytes(self) -> int:
        """The tree over the priorities, which are counted with the store's own memory."""
        return 0 if self._tree is None else self._tree.nbytes


register_sampler("prioritized", PrioritizedSampler)
register_sampler("prioritized_slices", PrioritizedSampler)
