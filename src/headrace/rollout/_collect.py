"""Collecting a batch of steps as a ``TensorDict``, with or without next observations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from headrace.envs._batch_env import BatchEnv
from headrace.envs._recipe import EnvRecipe
from headrace.errors import ConfigError
from headrace.replay._delta import difference
from headrace.types import Obs

if TYPE_CHECKING:
    from tensordict import TensorDict


Entry: TypeAlias = dict[tuple[str, ...], Tensor]
"""Tensors by path, environments first. Not a TensorDict: workers would spend half of their start importing it."""


class Form(NamedTuple):
    """What a batch has of next observations: all, or differences, or nothing."""

    compact: bool = False
    delta: torch.dtype | None = None


def collect(
    env: BatchEnv | EnvRecipe,
    policy: Callable[[Obs], Tensor],
    steps: int,
    *,
    reset: bool = True,
    seed: int | None = None,
    compact: bool = False,
    delta: torch.dtype | None = None,
    workers: int | None = None,
) -> TensorDict:
    """Run a policy for some steps and return what happened, environments first: batch (N, steps).

    Keys: ``("observation", group)``, ``action``, ``active``, ``step_count``, ``("collector", "traj_ids")`` (the
    environments' episode ids), and under ``next``: ``("observation", group)``, ``reward``, ``done``, ``terminated``,
    ``truncated``. Next observations are the true last ones where an episode ended. Rewards, flags and ``step_count``
    are (N, steps, 1). :meth:`headrace.replay.ReplayBuffer.extend` takes the batch as it is, in every form.

    Args:
        env: stepped in its present state; environments that are suspended stay so, and ``active`` is False for them.
            With ``workers``, a recipe.
        policy: observation groups (N, …) → actions (N, …).
        steps: how many.
        reset: begin with ``env.reset(seed=seed)``; False goes on from where the environments are.
        seed: for the reset.
        compact: drop every ``("next", "observation")`` here, at the producer: half the memory. They can be put back
            where the following entry has them with :func:`headrace.replay.reconstruct_next`, and are lost at
            ends. A :class:`headrace.replay.ReplayBuffer` is smaller still and loses nothing.
        delta: keep ``("next", "delta")`` of this dtype instead, as :func:`headrace.replay.to_delta` makes it.
        workers: collect in so many processes; see :class:`Collector`, which keeps them for the next batch.
    """
    form = checked_form(steps, compact, delta)
    if isinstance(env, EnvRecipe):
        from headrace.rollout._collect_workers import Collector

        with Collector(env, policy, workers=workers or 1) as collector:
            return collector.collect(steps, seed=seed, compact=compact, delta=delta)
    if workers is not None:
        raise ConfigError("collect: workers make environments of their own; pass a recipe, such as env.recipe")
    obs = env.reset(seed=seed)[0] if reset else env.observe()
    batch: Entry = {}
    for t, (entry, _) in enumerate(collect_steps(env, policy, steps, obs, form)):
        batch = batch or new_batch(entry, env.num_envs, steps)
        for key, value in entry.items():
            batch[key][:, t] = value
    return as_tensordict(batch, env.num_envs, steps)


def checked_form(steps: int, compact: bool, delta: torch.dtype | None) -> Form:
    """The form of a batch, refused where it cannot be collected."""
    if steps < 1:
        raise ConfigError(f"collect: expected at least 1 step, got {steps}")
    if compact and delta is not None:
        raise ConfigError("collect: expected compact or delta, got both; choose one")
    return Form(compact, delta)


def new_batch(entry: Mapping[tuple[str, ...], Tensor], num_envs: int, steps: int) -> Entry:
    """Memory for ``steps`` entries like this one, (N, steps, …) each; of the entry, rows may be missing."""
    return {key: value.new_zeros((num_envs, steps, *value.shape[1:])) for key, value in entry.items()}


def as_tensordict(batch: Entry, num_envs: int, steps: int) -> TensorDict:
    """The batch with its keys nested, over the same memory."""
    from tensordict import TensorDict

    nested: dict[str, Any] = {}
    for (*parents, name), value in batch.items():
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[name] = value
    return TensorDict(nested, [num_envs, steps])


def collect_steps(
    env: BatchEnv, policy: Callable[[Obs], Tensor], steps: int, obs: Obs, form: Form
) -> Generator[tuple[Entry, Obs]]:
    """The entries (N, …) of some steps, each with the observation to go on with."""
    for _ in range(steps):
        active, ids, counts = env.active, env.episode_ids, env.episode_steps
        action = policy(obs)
        step = env.step(action)
        entry: Entry = {
            **{("observation", name): value for name, value in obs.items()},
            ("action",): action,
            ("active",): active,
            ("step_count",): counts[:, None],
            ("collector", "traj_ids"): ids,
            ("next", "reward"): step.reward[:, None],
            ("next", "done"): (step.terminated | step.truncated)[:, None],
            ("next", "terminated"): step.terminated[:, None],
            ("next", "truncated"): step.truncated[:, None],
        }
        if not form.compact:
            for name, value in _true_next(step.obs, step.info.get("final_obs"), step.info.get("_final_obs")).items():
                if form.delta is None:
                    entry["next", "observation", name] = value
                else:
                    entry["next", "delta", name] = difference(obs[name], value, form.delta, name)
        yield entry, step.obs
        obs = step.obs


def _true_next(obs: Obs, final: Obs | None, ended: Tensor | None) -> Obs:
    """The observation that follows each action: the last of its episode where that ended."""
    if final is None or ended is None:
        return obs
    return {
        name: torch.where(ended.reshape(-1, *([1] * (value.dim() - 1))), final[name], value)
        for name, value in obs.items()
    }
