"""The contract between a chunk policy and the scheduler: observation rows in, a chunk of actions each out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from headrace import rng
from headrace.errors import ConfigError, PolicyError
from headrace.types import Obs


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkContext:
    """What a policy is told beside the observation. Row i of everything belongs to the same environment.

    The tensors are the policy's to keep; nothing in them depends on which other environments are in the batch.
    """

    seed: int
    env_ids: Tensor
    """int64 (n,). For messages; a policy that decides by slot is not reproducible."""
    episode_ids: Tensor
    """int64 (n,)."""
    chunk_index: Tensor
    """int64 (n,): which chunk of its episode is asked for, from 0."""
    rest: Tensor
    """float32 (n, horizon, A): what is left of the previous chunk, row 0 = now; zeros beyond ``rest_length``."""
    rest_length: Tensor
    """int64 (n,): valid rows of ``rest``; 0 for the first chunk of an episode."""
    delay: Tensor
    """int64 (n,): steps of the previous chunk that will still be played before the answer takes over."""

    def noise(self, *shape: int) -> Tensor:
        """Standard normal numbers keyed by (seed, episode id, chunk index), float32 (n, *shape): not by batch order."""
        count = math.prod(shape)
        draw = self.chunk_index * count
        flat = rng.normal(self.seed, self.episode_ids, "chunk noise", count, draw=draw)
        return flat.to(torch.float32).reshape(len(self.episode_ids), *shape)

    def rows(self, index: Tensor) -> ChunkContext:
        """The context of some rows, int64 (m,)."""
        pick = {name: getattr(self, name).index_select(0, index) for name in _ROWS}
        return ChunkContext(seed=self.seed, **pick)


_ROWS = ("env_ids", "episode_ids", "chunk_index", "rest", "rest_length", "delay")


class ChunkPolicy(Protocol):
    """A policy that plans ``horizon`` actions a call and keeps no state per environment."""

    @property
    def horizon(self) -> int:
        """Rows of a chunk: what others call action horizon or chunk size."""
        ...

    @property
    def action_dim(self) -> int:
        """Size of an action."""
        ...

    @property
    def obs_steps(self) -> int:
        """Observations the policy wants, newest last: (n, obs_steps, …) each if more than 1, else (n, …)."""
        ...

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        """Plan float (n, horizon, action_dim) for n rows of observations."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """Something callable with the sizes that the contract wants."""

    horizon: int
    action_dim: int
    obs_steps: int
    plan: Callable[[Obs, ChunkContext], Tensor]

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        with torch.no_grad():
            return self.plan(obs, context)


def as_chunk_policy(
    policy: object, *, horizon: int | None = None, action_dim: int | None = None, obs_steps: int | None = None
) -> ChunkPolicy:
    """Fit a policy into the contract without subclassing.

    Args:
        policy: a :class:`ChunkPolicy`; an object with ``predict_action_chunk(obs)`` as in LeRobot; a plain
            ``nn.Module`` or function of the observation groups, or of groups and context.
        horizon: rows of a chunk, where the policy does not say (``horizon``, or LeRobot's ``config.chunk_size``).
        action_dim: size of an action, where the policy does not say (``action_dim``).
        obs_steps: observations wanted, where the policy does not say (``obs_steps``); 1 if nobody does.
    """
    told = getattr(policy, "config", None)
    sizes = {
        "horizon": horizon or getattr(policy, "horizon", None) or getattr(told, "chunk_size", None),
        "action_dim": action_dim or getattr(policy, "action_dim", None),
    }
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name}: expected a policy that says it, or {name}=… with at least 1, got {size!r}")
    steps = obs_steps or getattr(policy, "obs_steps", None) or getattr(told, "n_obs_steps", None) or 1
    if isinstance(policy, nn.Module):
        policy.eval()
    return _Adapted(
        horizon=cast("int", sizes["horizon"]),
        action_dim=cast("int", sizes["action_dim"]),
        obs_steps=int(steps),
        plan=_planner(policy),
    )


def checked_chunk(actions: object, policy: ChunkPolicy, context: ChunkContext, read: Tensor) -> Tensor:
    """The rows ``read`` (m,) of a policy's answer as float32 (m, horizon, A); errors name their environments.

    The other rows are padding: whatever they hold, nobody looks at it.
    """
    asked = context.rows(read)
    expected = (len(context.env_ids), policy.horizon, policy.action_dim)
    if not isinstance(actions, Tensor):
        raise PolicyError(f"policy: expected a tensor {expected}, got {type(actions).__name__}{_asked(asked)}")
    if tuple(actions.shape) != expected:
        raise PolicyError(
            f"policy: expected actions {expected} (rows, horizon, size), got {tuple(actions.shape)}{_asked(asked)}"
        )
    actions = actions.index_select(0, read.to(actions.device))
    fine = torch.isfinite(actions).flatten(1).all(dim=1)
    if not bool(fine.all()):
        bad = (~fine).nonzero().squeeze(1).to(context.env_ids.device)
        raise PolicyError(f"policy: expected finite actions, got NaN or infinity{_asked(asked.rows(bad))}")
    return actions.to(dtype=torch.float32)


def _asked(context: ChunkContext) -> str:
    envs, episodes = context.env_ids.tolist(), context.episode_ids.tolist()
    shown = ", ".join(f"{env} (episode {episode})" for env, episode in zip(envs[:8], episodes, strict=False))
    return f", for environments {shown}" + (", …" if len(envs) > 8 else "")


def _planner(policy: object) -> Callable[[Obs, ChunkContext], Tensor]:
    predict = getattr(policy, "predict_action_chunk", None)
    if callable(predict):
        return lambda obs, _: cast("Tensor", predict(obs))
    if not callable(policy):
        raise ConfigError(
            "policy: expected a function, an nn.Module or an object with predict_action_chunk, "
            f"got {type(policy).__name__}"
        )
    if _takes_context(policy):
        return lambda obs, context: cast("Tensor", policy(obs, context))
    return lambda obs, _: cast("Tensor", policy(obs))


def _takes_context(policy: Callable[..., object]) -> bool:
    import inspect

    target = policy.forward if isinstance(policy, nn.Module) else policy
    parameters = inspect.signature(target).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional for p in parameters) >= 2
