"""Feeds observers from a vector environment that is not ours: any that gives Gymnasium's five."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.errors import LifecycleError, ShapeError
from headrace.types import Obs, ResetRecord, Step, StepObserver, StepRecord


class StepFeed:
    """Turns resets and steps of an environment into the records that observers take.

    Episode ids are counted as ``BatchEnv`` counts them: the k-th episode of slot i is ``i + k · num_envs``. The
    environment resets itself in the step that ends an episode, with the true last observation in
    ``info["final_obs"]`` under the mask ``info["_final_obs"]``.
    """

    def __init__(self, observers: Sequence[StepObserver], num_envs: int) -> None:
        self._observers = tuple(observers)
        self._num_envs = num_envs
        self._seed = 0
        self._obs: Obs | None = None
        self._episodes = torch.arange(num_envs)

    def reset(self, obs: Obs, seed: int, states: Tensor | None = None) -> None:
        """Report that all environments were reset. ``states`` is (N, S) where an observer needs it."""
        self._seed, self._obs = seed, obs
        self._episodes = torch.arange(self._num_envs)
        self._begin(self._episodes.clone(), states)

    def step(
        self,
        actions: Tensor,
        step: Step,
        active: Tensor | None = None,
        states: Tensor | None = None,
        first_states: Tensor | None = None,
    ) -> None:
        """Report a step.

        Args:
            actions: (N, A).
            step: its result.
            active: bool (N,), the environments that acted; all where None.
            states: (N, S) physics states after the step, before any reset.
            first_states: (N, S) states after the resets of this step.
        """
        if self._obs is None:
            raise LifecycleError("StepFeed: step before reset; call reset with the first observation")
        if actions.shape[0] != self._num_envs:
            raise ShapeError(f"actions: expected {self._num_envs} rows, got {tuple(actions.shape)}")
        env_ids = torch.arange(self._num_envs) if active is None else torch.nonzero(active).flatten()
        record = StepRecord(
            env_ids=env_ids,
            episode_ids=self._episodes[env_ids],
            actions=actions,
            step=step,
            states=states[env_ids] if states is not None else None,
        )
        for observer in self._observers:
            observer.after_step(record)
        self._obs = step.obs
        ended = env_ids[(torch.as_tensor(step.terminated) | torch.as_tensor(step.truncated))[env_ids]]
        if len(ended):
            self._episodes[ended] += self._num_envs
            self._begin(ended, first_states)

    def _begin(self, env_ids: Tensor, states: Tensor | None) -> None:
        assert self._obs is not None
        record = ResetRecord(
            env_ids=env_ids,
            episode_ids=self._episodes[env_ids],
            seed=self._seed,
            obs=self._obs,
            states=states[env_ids] if states is not None else None,
        )
        for observer in self._observers:
            observer.after_reset(record)
