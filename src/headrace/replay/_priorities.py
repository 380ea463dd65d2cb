"""Prioritized sampling: a sum tree of fan-out 8, whose node is one cache line.

Proportional prioritization as in Schaul et al. (2016), with P(i) = p_i^α / Σ p^α and importance weights
w_i = (P_min / P(i))^β, where P_min is the smallest over the whole buffer: the largest weight in the buffer is 1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace._kernels.gather import Bytes, Int64s
from headrace.errors import ConfigError, ShapeError
from headrace.replay._arithmetic import Float64s
from headrace.replay._memory import Memory
from headrace.replay._pool import FramePool, Written
from headrace.replay._samplers import Picked, attachable, attached, refuse_if_empty, register_sampler, stored_positions
from headrace.replay._spec import Json

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
    """Leaf of each ticket in [0, 1): the one in whose share of the sum it falls."""
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

    def __init__(self, size: int, memory: Memory) -> None:
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
        """Bytes of leaves and tree."""
        return self.block.nbytes + self._sums.nbytes + self._lows.nbytes

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


class PrioritizedSampler:
    """Transitions in proportion to priority^alpha, with replacement, with weights that undo the bias.

    A new transition has the largest priority given so far. ``beta`` may be changed between draws, as schedules do.
    Samples carry ``_weight`` and ``index``; give new priorities with
    :meth:`ReplayBuffer.update_priorities <headrace.replay.ReplayBuffer.update_priorities>`.
    """

    def __init__(self, *, alpha: float = 0.6, beta: float = 0.4, eps: float = 1e-8) -> None:
        if alpha < 0 or beta < 0 or eps <= 0:
            raise ConfigError(
                f"PrioritizedSampler: expected alpha >= 0, beta >= 0 and eps > 0, got {alpha}, {beta} and {eps}"
            )
        self.alpha = alpha
        self.beta = beta
        self.eps = eps
        self._pool: FramePool | None = None
        self._tree: SumTree | None = None
        self._largest = 1.0

    def attach(self, pool: FramePool) -> None:
        """See :class:`~headrace.replay._samplers.Sampler`. Priorities on disk or in a checkpoint are taken up."""
        self._pool = attachable(self._pool, pool)
        self._tree = SumTree(pool.first_side_row, pool.memory)
        self._state_block = pool.memory.allocate("priority_state", 16)
        self._state: Float64s = self._state_block.view(np.float64)
        rows = np.concatenate([e * pool.slots + p % pool.slots for e, p in enumerate(stored_positions(pool))])
        values = self._tree.leaves[rows].copy()
        # a crash can leave a transition without its priority, or the priority of one that is gone
        largest, beta = self._state
        if largest > 0:
            self.beta = float(beta)
        self._largest = max(float(values.max(initial=0.0)), float(largest) or 1.0)
        self._keep_state()
        values[values <= 0.0] = self._largest
        self._tree.leaves[:] = 0.0
        self._tree.assign(rows, values)

    def written(self, write: Written) -> None:
        """New transitions get the largest priority, those pushed out none."""
        pool, tree = attached(self._pool), attached(self._tree)
        gone = write.positions >= pool.length
        envs = write.env_ids[gone]
        left = envs * pool.slots + (write.positions[gone] - pool.length) % pool.slots
        tree.assign(left, np.zeros(left.shape[0]))
        tree.assign(write.rows, np.full(write.rows.shape[0], self._largest))

    def draw(self, tickets: Float64s) -> Picked:
        """See :class:`~headrace.replay._samplers.Sampler`."""
        pool, tree = attached(self._pool), attached(self._tree)
        refuse_if_empty(int(pool.lengths().sum()), "transitions", "extend() it first")
        self._keep_state()
        rows = tree.find(tickets)
        weights = (tree.lowest / tree.leaves[rows]) ** self.beta
        envs, slot = np.divmod(rows, pool.slots)
        newest = pool.counts[envs] - 1
        return Picked(envs=envs, positions=newest - (newest - slot) % pool.slots, weights=weights.astype(np.float32))

    def blocks(self) -> dict[str, Bytes]:
        """See :class:`~headrace.replay._samplers.Sampler`: the priorities."""
        self._keep_state()
        return {"priorities": attached(self._tree).block, "priority_state": self._state_block}

    def _keep_state(self) -> None:
        """Put what changes over time where it is stored with the buffer."""
        self._state[:] = self._largest, self.beta

    def update(self, envs: Int64s, positions: Int64s, priority: NDArray[np.float64]) -> None:
        """Set priorities |priority| + eps; transitions that were overwritten meanwhile are passed over."""
        pool, tree = attached(self._pool), attached(self._tree)
        if priority.shape != positions.shape:
            raise ShapeError(f"priority: expected {positions.shape}, one per index, got {priority.shape}")
        if not np.isfinite(priority).all():
            raise ConfigError("priority: expected finite numbers, got NaN or infinity; clip the TD errors")
        stored = (positions >= pool.oldest()[envs]) & (positions < pool.counts[envs])
        values = (np.abs(priority[stored]) + self.eps) ** self.alpha
        self._largest = max(self._largest, float(values.max(initial=0.0)))
        self._keep_state()
        tree.assign(envs[stored] * pool.slots + positions[stored] % pool.slots, values)

    def config(self) -> dict[str, Json]:
        """See :class:`~headrace.replay._samplers.Sampler`."""
        return {"kind": "prioritized", "alpha": self.alpha, "beta": self.beta, "eps": self.eps}

    @property
    def nbytes(self) -> int:
        """About ten bytes per transition."""
        return 0 if self._tree is None else self._tree.nbytes


register_sampler("prioritized", PrioritizedSampler)
