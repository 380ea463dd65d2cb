"""Goals and rewards that are decided when a transition is drawn: hindsight experience replay, learned rewards.

Nothing is stored for it: goals are observations of the same trajectory, found by index arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, ShapeError
from headrace.replay import ring
from headrace.replay._batches import Batches
from headrace.replay._blocks import Int64s
from headrace.replay._samplers import Picked
from headrace.replay._spec import LeafSpec
from headrace.replay._view import Drawn, SamplerView, Tickets, assemble, read_runs

if TYPE_CHECKING:
    from tensordict import TensorDict

Goals: TypeAlias = Literal["final", "future", "episode"]


class Relabeled(Batches):
    """Batches of a buffer or of one of its samplers with new goals, new rewards, or both.

    With ``goals`` this is hindsight experience replay (Andrychowicz et al., 2017): the first ``share`` of the rows get
    as desired goal what was achieved later in their trajectory, in observation and next observation, and the reward for
    it. Rows after them are as they were stored. Without ``goals`` all rows get a new reward.
    """

    def __init__(
        self,
        view: SamplerView,
        reward: Callable[[TensorDict], Tensor],
        *,
        goals: Goals | None = None,
        share: float = 0.8,
        achieved: str = "achieved_goal",
        desired: str = "desired_goal",
    ) -> None:
        """Choose what is relabeled.

        Args:
            view: a buffer or a sampler of single transitions.
            reward: rewards (B,) or (B, 1) of a batch of single steps, which it only reads. With ``goals``, for example
                of ``batch["next", "observation", "achieved_goal"]`` and ``batch["observation", "desired_goal"]``. With
                n-step returns it is called once per step, and rewards are discounted and summed as stored ones are.
            goals: ``future``: achieved by this transition or a later one of its trajectory, each equally likely;
                ``episode``: by any stored one of it; ``final``: by the last one. In a trajectory that still goes on,
                the last one is the newest.
            share: of rows with new goals; 0.8 is SB3's ``n_sampled_goal=4``.
            achieved: name of the observation that has what was achieved.
            desired: name of the observation that has the goal.
        """
        if goals is not None and goals not in get_args(Goals):
            raise ConfigError(f"goals: expected one of {get_args(Goals)} or None, got {goals!r}")
        if not 0.0 <= share <= 1.0:
            raise ConfigError(f"share: expected a number between 0 and 1, got {share}")
        self.device = view.device
        self.prioritized = view.prioritized
        self._view, self._reward = view, reward
        self._goals: Goals | None = goals
        self._share = share if goals is not None else 1.0
        self._tickets = Tickets(view.settings.seed, "replay-goals")
        if goals is not None:
            self._achieved, self._desired = self._leaf(achieved), self._leaf(desired)
            if self._achieved.observed != self._desired.observed:
                raise ConfigError(
                    f"goals: expected {achieved!r} and {desired!r} of one shape and dtype, got "
                    f"{self._achieved.observed} and {self._desired.observed}"
                )

    def _leaf(self, name: str) -> LeafSpec:
        leaves = {leaf.name: leaf for leaf in self._view.store.spec.leaves}
        if name not in leaves or leaves[name].stack is not None:
            raise ConfigError(f"goals: expected an observation {name!r} without a stack, got {sorted(leaves)}")
        return leaves[name]

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch; its keys are those of the view."""
        return self._view.draw(batch_size, self._relabel)

    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Give what was drawn new priorities; see :meth:`ReplayBuffer.update_priorities`."""
        self._view.update_priorities(index, priority)

    def _relabel(self, drawn: Drawn) -> Picked:
        """Change a batch and return what was read for it; called with the lock held."""
        batch, picked = drawn.batch, drawn.picked
        if picked.run is not None:
            raise ConfigError("Relabeled: expected a sampler of single transitions, got one of slices")
        count = int(self._share * batch.batch_size[0])
        here = Picked(picked.envs[:count], picked.positions[:count])
        read, goal = here, None
        if self._goals is not None:
            read = Picked(here.envs, self._choose(here, self._goals, drawn.number))
            goal = read_runs(self._view.store.pool, self._achieved, self._view.outputs, read)[1]
        rows: TensorDict = batch[:count]
        self._set_goal(rows, goal)
        settings = self._view.settings
        if settings.n_step == 1:
            rewards = self._rewards(rows)
        else:
            rewards, steps = torch.zeros(count, 1, dtype=torch.float64), cast("Tensor", rows["steps_to_next_obs"])
            for k in range(settings.n_step):
                step = Picked(here.envs, here.positions + np.minimum(k, steps[:, 0].numpy() - 1))
                single = assemble(self._view.store, self._view.outputs, step, 1, self._view.gammas)
                self._set_goal(single, goal)
                weight = torch.from_numpy(self._view.gammas[here.envs, None] ** k)
                rewards += torch.where(k < steps, weight * self._rewards(single).double(), 0.0)
        rows["next", "reward"].copy_(rewards)
        return read

    def _rewards(self, rows: TensorDict) -> Tensor:
        """Return rewards (B, 1)."""
        count, given = rows.batch_size[0], self._reward(rows)
        if given.shape not in ((count,), (count, 1)):
            raise ShapeError(f"reward: expected ({count},) or ({count}, 1), got {tuple(given.shape)}")
        return given.detach().view(count, 1)

    def _set_goal(self, rows: TensorDict, goal: Tensor | None) -> None:
        if goal is not None:
            key = ("observation", *self._desired.path)
            rows[key].copy_(goal)
            rows[("next", *key)].copy_(goal)

    def _choose(self, here: Picked, goals: Goals, number: int) -> Int64s:
        """Return the positions of the transitions that achieved the new goals, (B,)."""
        pool, envs = self._view.store.pool, here.envs
        last = np.empty(envs.shape[0], np.int64)
        ring.last_of_trajectory(envs, here.positions, pool.counts, pool.flags, last)
        if goals == "final":
            return last
        first = here.positions
        if goals == "episode":
            begin = here.positions - pool.steps[envs, here.positions % pool.slots]
            first = np.maximum(begin, pool.oldest()[envs])
        tickets = self._tickets.of(number, max(envs.shape[0], 1))[: envs.shape[0]]
        return np.minimum(first + (tickets * (last - first + 1)).astype(np.int64), last)
