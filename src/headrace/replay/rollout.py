"""The on-policy store: T steps of N environments, every frame once, handed to a learner and filled again."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from headrace import rng
from headrace.errors import ConfigError, LifecycleError, ShapeError
from headrace.history.output import OutputPool
from headrace.replay import ring
from headrace.replay._blocks import Allocator, Int64s
from headrace.replay._extending import NestedObs, check_transition
from headrace.replay._pool import FramePool
from headrace.replay._spec import Autoreset, LeafSpec, SpaceLike, store_spec
from headrace.replay._store import StackCheck
from headrace.replay._view import Branch, put_leaf, read_frames, tree
from headrace.replay.ring import CUT, ENDED
from headrace.replay.row_space import ZERO_ROW
from headrace.types import Obs, StackSpec, Step

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A filled rollout as plain tensors; the receiver owns them. T steps, N environments, E ends inside.

    Observations are by leaf name; the name is empty where the store was declared over one array.
    """

    obs: Obs
    """(T, N, …): what the policy saw; zeros where the environment was not active. Empty with ``observations=False``."""
    last_obs: Obs
    """(N, …): what it would see next; zeros for environments that never acted."""
    final_obs: Obs
    """(E, …): true last observations of the trajectories that ended or were cut inside."""
    final_step: Tensor
    """int64 (E,): the step of each of them."""
    final_env: Tensor
    """int64 (E,)."""
    action: Tensor
    """(T, N, …)."""
    reward: Tensor
    """float32 (T, N)."""
    terminated: Tensor
    """bool (T, N): do not bootstrap."""
    truncated: Tensor
    """bool (T, N): bootstrap from ``final_obs``."""
    cut: Tensor
    """bool (T, N): the caller reset in between; to an estimator this is a truncation: give it ``truncated | cut``."""
    active: Tensor
    """bool (T, N)."""
    extras: Obs
    """(T, N, …): what was declared as extras."""


class RolloutBuffer:
    """T×N transitions over a frame pool, dense with an ``active`` mask; filled with ``extend``, emptied with ``clear``.

    Stacks, next observations and true last observations are index arithmetic, as in
    :class:`~headrace.replay.ReplayBuffer`; a rollout that begins in the middle of an episode keeps the older frames of
    its first stacks. Fields that the learner wants per step (log-probabilities, hidden states) are declared as
    ``extras``.
    """

    def __init__(
        self,
        steps: int,
        num_envs: int,
        observation: SpaceLike,
        action: SpaceLike,
        *,
        stack: Mapping[str, StackSpec] | StackSpec | None = None,
        extras: Mapping[str, SpaceLike] | None = None,
        autoreset: Autoreset = "same_step",
    ) -> None:
        """Make an empty buffer for ``steps`` steps; other arguments as in :class:`~headrace.replay.ReplayBuffer`."""
        if steps < 1 or num_envs < 1:
            raise ConfigError(f"RolloutBuffer: expected steps >= 1 and num_envs >= 1, got {steps} and {num_envs}")
        if extras and "action" in extras:
            raise ConfigError("extras: action is a key of every rollout; choose another name")
        self.steps, self.num_envs = steps, num_envs
        self.spec = store_spec(steps * num_envs, num_envs, observation, action, stack, extras, autoreset)
        self._pool = FramePool(self.spec, Allocator())
        self._outputs = OutputPool()
        self._stacks = StackCheck(self.spec)
        self._filled = 0
        grid = (steps, num_envs)
        self._position = np.full(grid, -1, np.int64)
        self._reward = np.zeros(grid, np.float32)
        self._terminated, self._truncated = np.zeros((2, *grid), np.bool_)
        self._columns = {
            name: torch.zeros(*grid, *column.shape, dtype=column.dtype)
            for name, column in {"action": self.spec.action, **self.spec.extras}.items()
        }

    def __len__(self) -> int:
        """Return steps filled."""
        return self._filled

    @property
    def full(self) -> bool:
        """Whether all T steps are there."""
        return self._filled == self.steps

    @property
    def nbytes(self) -> int:
        """Bytes of frames, side rows used so far, bookkeeping and dense fields."""
        dense = [self._position, self._reward, self._terminated, self._truncated, *self._columns.values()]
        return self._pool.nbytes + sum(array.nbytes for array in dense)

    def clear(self) -> None:
        """Begin the next rollout."""
        self._pool.clear(restart=True)
        self._filled = 0

    def extend(
        self,
        obs: NestedObs,
        action: Tensor,
        step: Step,
        active: Tensor | None = None,
        extras: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Store one step of all environments; see :meth:`headrace.replay.ReplayBuffer.extend`.

        ``extras``: (N, …) each, all that were declared. Everything is copied.
        """
        if self.full:
            raise LifecycleError(f"extend: all {self.steps} steps are filled; hand them over, then call clear()")
        write = check_transition(self.spec, obs, action, step, active, extras or {})
        self._stacks.check_step(write)
        stored = self._pool.write(write)
        self._pool.side.settle()
        t, ids = self._filled, write.ids
        self._position[t] = -1
        self._position[t, ids] = stored.positions
        for dense, values in (
            (self._reward, write.reward),
            (self._terminated, write.terminated),
            (self._truncated, write.truncated),
        ):
            dense[t] = 0
            dense[t, ids] = values
        at = torch.from_numpy(ids)
        for name, source in write.columns.items():
            self._columns[name][t].zero_()
            self._columns[name][t, at] = source[at]
        self._filled += 1

    def observations(self, envs: Tensor) -> Obs:
        """Return what the policy saw in these environments, int64 (n,): (T, n, …) each, fresh, zeros where inactive.

        For learners that read a rollout a part at a time, so that the stacks of all environments are never written out.
        """
        columns = envs.cpu().numpy()
        grid = self._position[: self._filled, columns]
        step, place = (grid >= 0).nonzero()
        obs: Obs = {}
        for leaf in self.spec.leaves:
            table = np.full((*grid.shape, leaf.frames), ZERO_ROW)
            table[step, place] = self._windows(leaf, columns[place], grid[step, place])[:, :-1]
            obs[leaf.name] = self._read(leaf, table.reshape(-1, leaf.frames)).unflatten(0, grid.shape)
        return obs

    def rollout(self, *, observations: bool = True) -> Rollout:
        """Return everything stored so far, as fresh plain tensors. Stacks are written out: K frames per observation.

        ``observations=False`` leaves out ``obs``, which :meth:`observations` gives a part at a time.
        """
        t = self._filled
        envs, positions, _ = self._list_stored()
        ends, cut = self._ends(envs, positions)
        live = self._position[:t].reshape(-1) >= 0
        last: Obs = {}
        final: Obs = {}
        for leaf in self.spec.leaves:
            last[leaf.name] = self._read(leaf, self._last(leaf))
            final[leaf.name] = self._read(leaf, self._windows(leaf, envs[ends], positions[ends])[:, 1:])
        where = live.nonzero()[0]
        cuts = torch.zeros(t * self.num_envs, dtype=torch.bool)
        cuts[torch.from_numpy(where)] = torch.from_numpy(cut)
        step, env = np.divmod(where[ends], self.num_envs)
        columns = {name: value[:t].clone() for name, value in self._columns.items()}
        return Rollout(
            obs=self.observations(torch.arange(self.num_envs)) if observations else {},
            last_obs=last,
            final_obs=final,
            final_step=torch.from_numpy(step),
            final_env=torch.from_numpy(env),
            action=columns.pop("action"),
            reward=torch.from_numpy(self._reward[:t].copy()),
            terminated=torch.from_numpy(self._terminated[:t].copy()),
            truncated=torch.from_numpy(self._truncated[:t].copy()),
            cut=cuts.view(t, self.num_envs),
            active=torch.from_numpy(live).view(t, self.num_envs),
            extras=columns,
        )

    def minibatches(self, count: int, *, seed: int, epoch: int = 0) -> Generator[TensorDict]:
        """Yield all active transitions in random order, in ``count`` batches of nearly the same size.

        Keys: ``observation``, ``action``, the extras, and ``place`` (t · N + e), which indexes flattened (T, N) tensors
        such as advantages. The order is a function of seed and epoch.
        """
        envs, positions, flat = self._list_stored()
        total = flat.shape[0]
        if not 1 <= count <= total:
            raise ShapeError(
                f"minibatches: expected a count between 1 and {total}, the transitions stored, got {count}"
            )
        bits = rng.random_bits(seed, torch.arange(total), "minibatches", epoch, 1)
        order = bits[:, 0].argsort(stable=True).numpy()
        for piece in np.array_split(order, count):
            place = torch.from_numpy(flat[piece])
            content: Branch = {"place": place}
            content |= {name: value.flatten(0, 1)[place] for name, value in self._columns.items()}
            for leaf in self.spec.leaves:
                rows = self._windows(leaf, envs[piece], positions[piece])[:, :-1]
                put_leaf(content, leaf, self._read(leaf, np.ascontiguousarray(rows)))
            yield tree(content, torch.Size((piece.shape[0],)))

    def _list_stored(self) -> tuple[Int64s, Int64s, Int64s]:
        """Return environment, position and place t · N + e of every stored transition, in the order of steps."""
        grid = self._position[: self._filled]
        step, env = (grid >= 0).nonzero()
        return env, grid[step, env], step * self.num_envs + env

    def _ends(self, envs: Int64s, positions: Int64s) -> tuple[np.ndarray[tuple[int], np.dtype[np.bool_]], ...]:
        """Return which transitions ended their trajectory, and which of them because they were cut."""
        flags = self._pool.flags[envs, positions % self._pool.slots]
        return (flags & ENDED) != 0, (flags & CUT) != 0

    def _windows(self, leaf: LeafSpec, envs: Int64s, positions: Int64s) -> Int64s:
        """Return rows (M, K + 1) of observation and next observation."""
        pool, rows = self._pool, np.empty((envs.shape[0], leaf.frames + 1), np.int64)
        ring.windows(envs, positions, pool.ring, pool.stacks[leaf.name], rows)
        return rows

    def _last(self, leaf: LeafSpec) -> Int64s:
        """Return rows (N, K) of what follows the newest transition; after an end, of an episode's first observation."""
        pool, envs = self._pool, np.arange(self.num_envs)
        rows = envs * pool.slots + pool.counts % pool.slots
        fresh = (pool.counts == 0) | ((pool.flags[envs, (pool.counts - 1) % pool.slots] & ENDED) != 0)
        table = np.repeat(rows[:, None], leaf.frames, 1)
        if leaf.zero_filled:
            table[:, :-1] = ZERO_ROW
        ring.pending(envs, fresh, pool.counts, pool.ring, pool.stacks[leaf.name], table)
        table[pool.counts == 0] = ZERO_ROW
        return table

    def _read(self, leaf: LeafSpec, rows: Int64s) -> Tensor:
        """Return observations (M, …) of rows (M, K)."""
        frames = read_frames(self._pool.rows[leaf.name], leaf, self._outputs, np.ascontiguousarray(rows))
        return frames.view(rows.shape[0], *leaf.observed.shape)
