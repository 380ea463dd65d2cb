"""The contract between a chunk policy and the scheduler: observation rows in, a chunk of actions each out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace.chunking._context import ChunkContext, EpisodeRows, named
from headrace.chunking._lerobot import adapt_lerobot
from headrace.errors import ConfigError, PolicyError
from headrace.types import Obs


class ChunkPolicy(Protocol):
    """A policy that plans ``horizon`` actions per call and keeps no state per environment.

    One that does keep something from call to call is a :class:`RemembersEpisodes`, too.
    """

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


class RemembersEpisodes(Protocol):
    """A policy with memory. What it keeps is keyed by (seed, episode id), so that it stays a function of the episode.

    Rows of a context with episode id -1 only fill a batch up: nothing is kept for them.
    """

    def begin(self, rows: EpisodeRows) -> None:
        """These episodes begin: called before the first chunk of each is planned."""
        ...

    def end(self, rows: EpisodeRows) -> None:
        """These episodes are over, or will not be played on: release what is kept for them."""
        ...


class PredictsChunks(Protocol):
    """A policy as in LeRobot."""

    def predict_action_chunk(self, batch: Obs) -> Tensor:
        """Plan float (n, horizon, action_dim)."""
        ...


PolicyLike: TypeAlias = ChunkPolicy | PredictsChunks | nn.Module | Callable[..., Tensor]
"""What :func:`as_chunk_policy` fits into the contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapted:
    """A policy with the sizes that the contract wants. Can be pickled if the policy can."""

    policy: PolicyLike
    form: Literal["with context", "plain"]
    horizon: int
    action_dim: int
    obs_steps: int

    def begin(self, rows: EpisodeRows) -> None:
        if has_memory(self):
            with torch.no_grad():
                cast("RemembersEpisodes", self.policy).begin(rows)

    def end(self, rows: EpisodeRows) -> None:
        if has_memory(self):
            cast("RemembersEpisodes", self.policy).end(rows)

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        with torch.no_grad():
            call = cast("Callable[..., Tensor]", self.policy)
            return call(obs, context) if self.form == "with context" else call(obs)


def as_chunk_policy(
    policy: PolicyLike, *, horizon: int | None = None, action_dim: int | None = None, obs_steps: int | None = None
) -> ChunkPolicy:
    """Fit a policy into the contract without subclassing. A module is put into evaluation mode; no gradients are kept.

    Args:
        policy: a :class:`ChunkPolicy`; an object with ``predict_action_chunk(obs)`` as in LeRobot; a plain
            ``nn.Module`` or function of the observation groups, or of groups and context.
            The latter gets the groups, and what its ``config.input_features`` name beside them.
        horizon: rows of a chunk, where the policy does not say (``horizon``, or LeRobot's ``config.chunk_size``).
        action_dim: size of an action, where the policy does not say (``action_dim``, or LeRobot's
            ``config.output_features["action"]``).
        obs_steps: observations wanted, where the policy does not say (``obs_steps``, or LeRobot's
            ``config.n_obs_steps``); 1 if nobody does.
    """
    own = policy.policy if isinstance(policy, _Adapted) else policy
    if callable(getattr(own, "predict_action_chunk", None)):
        own = policy = adapt_lerobot(own)
    if callable(getattr(own, "begin", None)) != callable(getattr(own, "end", None)):
        raise ConfigError(
            "policy: expected begin(rows) and end(rows), or neither, got only one of them; begin is called when "
            "episodes start, end when what is kept for them can be released"
        )
    if isinstance(own, nn.Module):
        own.eval()
    return _Adapted(
        policy=own,
        form=_form(own),
        horizon=_size("horizon", horizon, getattr(policy, "horizon", None)),
        action_dim=_size("action_dim", action_dim, getattr(policy, "action_dim", None)),
        obs_steps=_size("obs_steps", obs_steps, getattr(policy, "obs_steps", None), default=1),
    )


def written_policy(policy: object) -> object:
    """What somebody wrote: the policy inside of what :func:`as_chunk_policy` made of it."""
    return policy.policy if isinstance(policy, _Adapted) else policy


def has_memory(policy: ChunkPolicy) -> bool:
    """Whether a policy keeps something from chunk to chunk of an episode."""
    own = policy.policy if isinstance(policy, _Adapted) else policy
    # not isinstance: a protocol's takes 50 µs, and this is asked at every call of the model
    return callable(getattr(own, "begin", None)) and callable(getattr(own, "end", None))


def _size(name: str, given: int | None, own: object, default: int | None = None) -> int:
    """The size that the policy states; what the caller says must agree."""
    said = [size for size in (own, given) if size is not None][:1] or [default]
    size = said[0]
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{name}: expected a policy that says it, with at least 1, got {size!r}; "
            f"pass as_chunk_policy(policy, {name}=…)"
        )
    if given is not None and given != size:
        raise ConfigError(f"{name}: expected {given}, got a policy with {name} {size}")
    return size


def checked_chunk(actions: object, policy: ChunkPolicy, context: ChunkContext, read: Tensor | None) -> Tensor:
    """The rows ``read`` (m,; None: all) of a policy's answer as float32 (m, horizon, A) on the host, fresh.

    The other rows are padding: whatever they hold, nobody looks at it. Errors name environments.
    """
    expected = (len(context), policy.horizon, policy.action_dim)
    if isinstance(actions, np.ndarray) and actions.dtype.kind in "fiu":
        with np.errstate(over="ignore"):  # becomes an infinity, which is refused below
            actions = torch.from_numpy(cast("NDArray[np.generic]", actions).astype(np.float32))
    if not isinstance(actions, Tensor) or actions.is_complex():
        got = f"{actions.dtype} values" if isinstance(actions, Tensor | np.ndarray) else type(actions).__name__
        raise PolicyError(
            f"policy: expected a tensor or array {expected} of real numbers, got {got}{_asked(_read(context, read))}"
        )
    if tuple(actions.shape) != expected:
        raise PolicyError(
            f"policy: expected actions {expected} (rows, horizon, size), got {tuple(actions.shape)}"
            f"{_asked(_read(context, read))}"
        )
    if read is None:
        chosen = actions.detach().to(device="cpu", dtype=torch.float32, copy=True)
    else:
        chosen = actions.detach().to(device="cpu", dtype=torch.float32).index_select(0, read.cpu())
    # a finite sum has finite terms only; anything else (an overflow, too) is looked at closely
    if not math.isfinite(float(chosen.sum())):
        bad = (~torch.isfinite(chosen)).flatten(1).any(dim=1).nonzero().squeeze(1)
        if len(bad):
            whose = _read(context, read).rows(bad.to(context.env_ids.device))
            raise PolicyError(f"policy: expected finite actions, got NaN or infinity{_asked(whose)}")
    return chosen


def _read(context: ChunkContext, rows: Tensor | None) -> ChunkContext:
    return context if rows is None else context.rows(rows)


def _asked(context: ChunkContext) -> str:
    return f", for {named(context)}"


def _form(policy: PolicyLike) -> Literal["with context", "plain"]:
    if not callable(policy):
        raise ConfigError(
            "policy: expected a function, an nn.Module or an object with predict_action_chunk, "
            f"got {type(policy).__name__}"
        )
    return "with context" if _takes_context(policy) else "plain"


def _takes_context(policy: Callable[..., object]) -> bool:
    """Whether a second argument must be given; one with a default is the policy's own affair, unless named so."""
    written: object = getattr(policy, "_orig_mod", policy)  # torch.compile's module takes anything: ask what is in it
    target = written.forward if isinstance(written, nn.Module) else policy
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        signature = inspect.signature(target)
    except ValueError:  # a traced module has none, and takes tensors only
        return False
    parameters = [p for p in signature.parameters.values() if p.kind in positional]
    if len(parameters) < 2:
        return False
    return parameters[1].default is inspect.Parameter.empty or parameters[1].name in ("context", "ctx")
