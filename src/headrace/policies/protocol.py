"""The contract between a chunk policy and the scheduler: observation rows in, a chunk of actions each out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headrace import rng
from headrace.errors import ConfigError, PolicyError
from headrace.types import Obs

PADDING = -1
"""The episode and environment id of rows that only fill a batch up."""
_NOISE_PER_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRows:
    """Episodes that begin or end: row i of everything is one of them. (seed, episode id) is an episode's identity."""

    seeds: Tensor
    """int64 (m,)."""
    episode_ids: Tensor
    """int64 (m,)."""
    instructions: tuple[str, ...]
    """One text each; empty where the task gives none."""

    def __len__(self) -> int:
        return len(self.instructions)

    def keys(self) -> list[tuple[int, int]]:
        """(seed, episode id) of each row: what a policy's memory is keyed by."""
        return list(zip(self.seeds.tolist(), self.episode_ids.tolist(), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkContext:
    """What a policy gets beside the observation. Row i of everything belongs to the same environment.

    The tensors are the policy's to keep, not to write into; nothing in them depends on which other environments are in
    the batch. The fields are the one list that the wire uses, too: see :meth:`to_arrays`.
    """

    seeds: Tensor
    """int64 (n,): with the episode id, the identity of the episode."""
    env_ids: Tensor
    """int64 (n,). For messages; a policy that decides by slot is not reproducible. -1 in padding rows."""
    episode_ids: Tensor
    """int64 (n,). -1 in rows that only fill a batch up."""
    chunk_index: Tensor
    """int64 (n,): which chunk of its episode is due, from 0."""
    instructions: tuple[str, ...]
    """n texts, constant within an episode; empty where the task gives none."""
    left_over: Tensor
    """float32 (n, horizon, A): what is left of the previous chunk, row 0 = now; zeros beyond ``left_over_length``."""
    left_over_length: Tensor
    """int64 (n,): valid rows of ``left_over``; 0 for the first chunk of an episode."""
    delay: Tensor
    """int64 (n,): steps of the previous chunk that will still be played before the answer takes over."""

    def __len__(self) -> int:
        return len(self.instructions)

    def noise(self, *shape: int, stream: str = "chunk noise") -> Tensor:
        """Return standard normal numbers keyed by (seed, episode id, chunk index), float32 (n, *shape): not by batch
        order.

        The same call gives the same numbers; a policy that draws more than once names a ``stream`` for each.
        """
        count = math.prod(shape)
        if count > _NOISE_PER_CHUNK:
            raise ConfigError(f"noise: expected at most {_NOISE_PER_CHUNK} numbers per row, got shape {shape}")
        draw = self.chunk_index * _NOISE_PER_CHUNK
        flat = torch.empty((len(self), count), device=self.seeds.device)
        for seed in self.seeds.unique().tolist():
            rows = (self.seeds == seed).nonzero().squeeze(1)
            flat[rows] = rng.normal(seed, self.episode_ids[rows], stream, count, draw=draw[rows]).to(torch.float32)
        return flat.reshape(len(self), *shape)

    def rows(self, index: Tensor) -> ChunkContext:
        """Return the context of some rows, int64 (m,)."""
        tensors = {name: getattr(self, name).index_select(0, index) for name in TENSOR_FIELDS}
        return ChunkContext(instructions=tuple(self.instructions[row] for row in index.tolist()), **tensors)

    def beginning(self) -> EpisodeRows:
        """Return the rows whose episode begins with this chunk."""
        first = ((self.chunk_index == 0) & (self.episode_ids != PADDING)).nonzero().squeeze(1)
        return EpisodeRows(
            seeds=self.seeds[first],
            episode_ids=self.episode_ids[first],
            instructions=tuple(self.instructions[row] for row in first.tolist()),
        )

    def to_arrays(self) -> dict[str, NDArray[np.generic] | list[str]]:
        """Every field by name as host arrays and a list of texts: what crosses a wire."""
        arrays: dict[str, NDArray[np.generic] | list[str]] = {
            name: getattr(self, name).cpu().numpy() for name in TENSOR_FIELDS
        }
        return arrays | {"instructions": list(self.instructions)}


TENSOR_FIELDS = tuple(field.name for field in fields(ChunkContext) if field.name != "instructions")
"""The fields of a context that are tensors with a row per environment."""


def one_row(
    instruction: str,
    *,
    seed: int = 0,
    env_id: int = 0,
    episode_id: int = 0,
    chunk_index: int = 0,
    size: tuple[int, int] = (1, 1),
) -> ChunkContext:
    """Return the context of one row with nothing left over; ``size`` is that of a chunk, (horizon, A)."""
    zero = torch.zeros(1, dtype=torch.int64)
    return ChunkContext(
        seeds=zero + seed,
        env_ids=zero + env_id,
        episode_ids=zero + episode_id,
        chunk_index=zero + chunk_index,
        instructions=(instruction,),
        left_over=torch.zeros((1, *size)),
        left_over_length=zero,
        delay=zero,
    )


def name_rows(context: ChunkContext) -> str:
    """Return the environments of a context in words, with their episodes; the first eight if there are more."""
    envs, episodes = context.env_ids.tolist(), context.episode_ids.tolist()
    shown = ", ".join(f"{env} (episode {episode})" for env, episode in zip(envs[:8], episodes[:8], strict=True))
    return f"environments {shown}" + (", …" if len(envs) > 8 else "")


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
        """Begin these episodes: called before the first chunk of each is planned."""
        ...

    def end(self, rows: EpisodeRows) -> None:
        """End these episodes, which are over or will not be played on: release what is kept for them."""
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
    has_memory: bool
    horizon: int
    action_dim: int
    obs_steps: int
    single: bool = False
    """It returns one action per row, (n, A) or (n,)."""

    def begin(self, rows: EpisodeRows) -> None:
        if self.has_memory:
            with torch.no_grad():
                cast("RemembersEpisodes", self.policy).begin(rows)

    def end(self, rows: EpisodeRows) -> None:
        if self.has_memory:
            cast("RemembersEpisodes", self.policy).end(rows)

    def __call__(self, obs: Obs, context: ChunkContext) -> Tensor:
        with torch.no_grad():
            call = cast("Callable[..., object]", self.policy)
            answer = call(obs, context) if self.takes_context else call(obs)
        # whatever else a policy returned is refused later, with the environments it was for
        if not isinstance(answer, Tensor | np.ndarray) or not (self.single or (self.horizon == 1 and answer.ndim == 2)):
            return cast("Tensor", answer)
        answer = cast("Tensor", answer)
        if answer.ndim > 2:
            raise PolicyError(
                f"policy: expected one action per row, (n, A), since it states no horizon, got {tuple(answer.shape)}; "
                "state the rows of a chunk with horizon= (--horizon)"
            )
        return answer[:, None, None] if answer.ndim == 1 else answer[:, None]


def as_chunk_policy(
    policy: PolicyLike,
    *,
    horizon: int | None = None,
    action_dim: int | None = None,
    obs_steps: int | None = None,
    single: bool = False,
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
            ``config.n_obs_steps``); 1 if it is not stated.
        single: a policy without a stated or given horizon returns one action per row, (n, A) or (n,).
    """
    own = cast("PolicyLike", unwrap_policy(policy))
    if callable(getattr(own, "predict_action_chunk", None)):
        from headrace.policies._lerobot import adapt_lerobot

        own = policy = adapt_lerobot(own)
    elif callable(getattr(own, "select_action", None)):
        raise ConfigError(
            f"policy: expected predict_action_chunk(batch), got a {type(own).__name__} with select_action only, whose "
            "queue of actions is that of a whole batch, not of an episode; pass a function that plans chunks of its "
            "rows, or returns one action per row"
        )
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
    if isinstance(policy, _Adapted):
        single = policy.single
    elif single := single and horizon is None and getattr(policy, "horizon", None) is None:
        horizon = 1
    return _Adapted(
        policy=own,
        single=single,
        takes_context=_takes_context(own),
        has_memory=callable(getattr(own, "begin", None)),
        horizon=_size("horizon", horizon, getattr(policy, "horizon", None)),
        action_dim=_size("action_dim", action_dim, getattr(policy, "action_dim", None)),
        obs_steps=_size("obs_steps", obs_steps, getattr(policy, "obs_steps", None), default=1),
    )


def unwrap_policy(policy: object) -> object:
    """Return the user's own object: the policy inside of what :func:`as_chunk_policy` made of it."""
    return policy.policy if isinstance(policy, _Adapted) else policy


def has_memory(policy: ChunkPolicy) -> bool:
    """Whether a policy keeps something from chunk to chunk of an episode."""
    if isinstance(policy, _Adapted):
        return policy.has_memory
    # not isinstance: a protocol's takes 50 µs, and this is asked at every call of the model
    return callable(getattr(policy, "begin", None)) and callable(getattr(policy, "end", None))


def _size(name: str, given: int | None, own: object, default: int | None = None) -> int:
    """Return the size that the policy states; what the caller says must agree."""
    size = own if own is not None else given if given is not None else default
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"{name}: expected a policy that says it, with at least 1, got {size!r}; "
            f"pass {name}=… where there is such an argument, or as_chunk_policy(policy, {name}=…)"
        )
    if given is not None and given != size:
        raise ConfigError(f"{name}: expected {given}, got a policy with {name} {size}")
    return size


def check_chunk(actions: object, policy: ChunkPolicy, context: ChunkContext, read: Tensor | None) -> Tensor:
    """Return the rows ``read`` (m,; None: all) of a policy's answer as float32 (m, horizon, A) on the host, fresh.

    The other rows are padding: whatever they hold is not read. Errors name environments.
    """
    expected = (len(context.instructions), policy.horizon, policy.action_dim)
    if isinstance(actions, np.ndarray) and actions.dtype.kind in "fiu":
        with np.errstate(over="ignore"):  # becomes an infinity, which is refused below
            actions = torch.from_numpy(cast("NDArray[np.generic]", actions).astype(np.float32))
    if not isinstance(actions, Tensor) or actions.is_complex():
        got = f"{actions.dtype} values" if isinstance(actions, Tensor | np.ndarray) else type(actions).__name__
        raise PolicyError(
            f"policy: expected a tensor or array {expected} of real numbers, got {got}{_name_env(_read(context, read))}"
        )
    if tuple(actions.shape) != expected:
        raise PolicyError(
            f"policy: expected actions {expected} (rows, horizon, size), got {tuple(actions.shape)}"
            f"{_name_env(_read(context, read))}"
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
            raise PolicyError(f"policy: expected finite actions, got NaN or infinity{_name_env(whose)}")
    return chosen


def _read(context: ChunkContext, rows: Tensor | None) -> ChunkContext:
    return context if rows is None else context.rows(rows.to(context.env_ids.device))


def _name_env(context: ChunkContext) -> str:
    return f", for {name_rows(context)}"


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
