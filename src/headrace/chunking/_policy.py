"""The contract between a chunk policy and the scheduler: observation rows in, a chunk of actions each out.

A model sees the rows that wait in batches. ``fast`` gives it whoever waits, padded to a bucket where the engine wants
fixed sizes. ``strict`` gives it batches of one fixed size in which an episode always has the same row (its id modulo
the size): a matrix product then adds up the same numbers in the same order, and neither the number of environments nor
neighbors change one bit of the answer.
"""

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

from headrace.chunking._context import PADDING, TENSOR_FIELDS, ChunkContext, EpisodeRows, named, signed
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
    takes_context: bool
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
            return call(obs, context) if self.takes_context else call(obs)


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
    own = cast("PolicyLike", written_policy(policy))
    if callable(getattr(own, "predict_action_chunk", None)):
        own = policy = adapt_lerobot(own)
    if not callable(own):
        raise ConfigError(
            "policy: expected a function, an nn.Module or an object with predict_action_chunk, "
            f"got {type(own).__name__}"
        )
    if callable(getattr(own, "begin", None)) != callable(getattr(own, "end", None)):
        raise ConfigError(
            "policy: expected begin(rows) and end(rows), or neither, got only one of them; begin is called when "
            "episodes start, end when what is kept for them can be released"
        )
    if isinstance(own, nn.Module):
        own.eval()
    return _Adapted(
        policy=own,
        takes_context=_takes_context(own),
        horizon=_size("horizon", horizon, getattr(policy, "horizon", None)),
        action_dim=_size("action_dim", action_dim, getattr(policy, "action_dim", None)),
        obs_steps=_size("obs_steps", obs_steps, getattr(policy, "obs_steps", None), default=1),
    )


def written_policy(policy: object) -> object:
    """What somebody wrote: the policy inside of what :func:`as_chunk_policy` made of it."""
    return policy.policy if isinstance(policy, _Adapted) else policy


def has_memory(policy: ChunkPolicy) -> bool:
    """Whether a policy keeps something from chunk to chunk of an episode."""
    own = written_policy(policy)
    # not isinstance: a protocol's takes 50 µs, and this is asked at every call of the model
    return callable(getattr(own, "begin", None)) and callable(getattr(own, "end", None))


def _size(name: str, given: int | None, own: object, default: int | None = None) -> int:
    """The size that the policy states; what the caller says must agree."""
    size = own if own is not None else given if given is not None else default
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


def _takes_context(policy: Callable[..., object]) -> bool:
    """Whether a second argument must be given; one with a default is the policy's own affair, unless named so."""
    written: object = getattr(policy, "_orig_mod", policy)  # torch.compile's module takes anything: ask what is in it
    target = written.forward if isinstance(written, nn.Module) else policy
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        signature = inspect.signature(target)
    except ValueError:  # a traced module has none, and takes tensors only
        return False
    parameters = list(signature.parameters.values())
    if len(parameters) < 2 or parameters[1].kind not in positional:
        return False
    return parameters[1].default is inspect.Parameter.empty or parameters[1].name in ("context", "ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How model batches are formed."""

    mode: Literal["fast", "strict"] = "strict"
    size: int = 16
    """Rows of a batch in ``strict`` mode."""
    buckets: tuple[int, ...] = ()
    """Sizes that batches are padded to in ``fast`` mode, ascending; empty for any size."""

    def __post_init__(self) -> None:
        if self.mode not in ("fast", "strict"):
            raise ConfigError(f"batching mode: expected 'fast' or 'strict', got {self.mode!r}")
        if self.size < 1:
            raise ConfigError(f"batching size: expected at least 1 row, got {self.size}")
        if list(self.buckets) != sorted(set(self.buckets)) or min(self.buckets, default=1) < 1:
            raise ConfigError(f"batching buckets: expected ascending sizes of at least 1, got {self.buckets}")
        if self.mode == "strict" and self.buckets:
            raise ConfigError(
                "batching buckets: expected none in strict mode, whose batches all have one size; use mode='fast'"
            )

    @property
    def strict_size(self) -> int | None:
        """Rows of a strict batch; None in ``fast`` mode."""
        return self.size if self.mode == "strict" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, and what it cost."""

    actions: Tensor
    """float32 (n, horizon, A) on the host, in the order of the rows asked for."""
    calls: int
    padding: int
    """Wasted rows: computed, and read by no environment."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Some rows of a request in one batch of the model."""

    rows: Tensor
    """int64 (m,): rows of the request in this batch."""
    slots: Tensor
    """int64 (m,): where they stand in it."""
    size: int


def ask(
    policy: ChunkPolicy, obs: Obs, context: ChunkContext, batching: Batching, *, ended: EpisodeRows | None = None
) -> Answer:
    """Run the policy over n rows in batches, and check each answer; errors name the environments.

    A policy with memory is told first of the episodes that have ended, then of those that begin with this chunk.
    """
    if has_memory(policy):
        keeper = cast("RemembersEpisodes", policy)
        if ended is not None and len(ended):
            keeper.end(ended)
        if len(beginning := context.beginning()):
            keeper.begin(beginning)
    actions = torch.zeros((len(context), policy.horizon, policy.action_dim))
    if not len(context):
        return Answer(actions=actions, calls=0, padding=0)
    if batching.mode == "fast" and not batching.buckets:
        return Answer(actions=checked_chunk(policy(obs, context), policy, context, read=None), calls=1, padding=0)
    strict = batching.mode == "strict"
    ids = context.episode_ids
    placements = _strict_batches(ids, batching.size) if strict else _bucket_batches(ids, batching.buckets)
    padding = -len(context)
    for place in placements:
        whole = _placed_context(context, place)
        rows = {name: _placed(values, place) for name, values in obs.items()}
        actions[place.rows.cpu()] = checked_chunk(policy(rows, whole), policy, whole, read=place.slots)
        padding += place.size
    return Answer(actions=actions, calls=len(placements), padding=padding)


def _bucket_batches(episode_ids: Tensor, buckets: tuple[int, ...]) -> list[_Placement]:
    """Batches of the largest bucket, and the rest in the smallest that holds it."""
    everyone = torch.arange(len(episode_ids), device=episode_ids.device)
    return [
        _Placement(
            rows,
            torch.arange(len(rows), device=rows.device),
            next(size for size in buckets if size >= len(rows)),
        )
        for rows in everyone.split(buckets[-1])
    ]


def _strict_batches(episode_ids: Tensor, size: int) -> list[_Placement]:
    """Batches in which each row stands at its episode's place; rows that collide go into the next call."""
    slots = episode_ids % size
    left = torch.arange(len(episode_ids), device=episode_ids.device)
    placements: list[_Placement] = []
    while len(left):
        taken = slots.index_select(0, left)
        order = torch.argsort(taken, stable=True)
        repeated = taken[order][1:] == taken[order][:-1]
        first = torch.ones_like(left, dtype=torch.bool)
        first[order[1:][repeated]] = False
        placements.append(_Placement(left[first], taken[first], size))
        left = left[~first]
    return placements


def _placed_context(context: ChunkContext, place: _Placement) -> ChunkContext:
    """The context of a batch; rows that only fill it up have no episode."""
    texts = [""] * place.size
    for slot, row in zip(place.slots.tolist(), place.rows.tolist(), strict=True):
        texts[slot] = context.instructions[row]
    fill = {"env_ids": PADDING, "episode_ids": PADDING}
    tensors = {name: _placed(getattr(context, name), place, fill.get(name, 0)) for name in TENSOR_FIELDS}
    return ChunkContext(instructions=tuple(texts), **tensors)


def _placed(values: Tensor, place: _Placement, fill: int = 0) -> Tensor:
    """The rows of a batch (size, …): those of ``values`` (n, …) at their slots, ``fill`` elsewhere. Always fresh."""
    batch = torch.full((place.size, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
    signed(batch)[place.slots] = signed(values).index_select(0, place.rows)
    return batch
