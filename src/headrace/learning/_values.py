"""V(s) and V(s') of a rollout from one evaluation of each distinct observation, and data whose s' is missing.

A rollout of T steps of N environments has T·N observations, N that follow the last step, and E true last observations
of episodes that ended inside. Everything else that the estimators call a next observation is the observation of the
following step. So T·N + N + E rows are evaluated where two passes evaluate 2·T·N, and the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from headrace.errors import ConfigError, DataError, DtypeError, IdError, ShapeError
from headrace.learning._returns import find_following_rows
from headrace.types import Obs

if TYPE_CHECKING:
    from tensordict import TensorDict

ObsRows: TypeAlias = "Tensor | Obs"
"""Observations: one tensor, or named groups of them, with the same leading axes."""


class Values(NamedTuple):
    """What :func:`rollout_values` gives, (T, N) each; what the estimators take."""

    value: Tensor
    """V(s_t)."""
    next_value: Tensor
    """V(s_{t+1}): the following step's value, the true last observation's where one was given."""


def rollout_values(
    network: Callable[[ObsRows], Tensor],
    obs: ObsRows,
    last_obs: ObsRows,
    *,
    final_obs: ObsRows | None = None,
    final_step: Tensor | None = None,
    final_env: Tensor | None = None,
    active: Tensor | None = None,
    chunk_size: int | None = None,
) -> Values:
    """Evaluate a value network once on every distinct observation of a rollout.

    Gradients flow if the caller left them on; both results then share one graph.

    Args:
        network: observation rows → (rows,) or (rows, 1). It must treat rows independently (no batch statistics).
        obs: (T, N, …), what the policy saw at each step.
        last_obs: (N, …), what it would see next, after the last step.
        final_obs: (E, …), true last observations of episodes that ended inside. Truncated steps need theirs;
            for terminated ones it may be left out, as no estimator reads that next value.
        final_step: int64 (E,), the step each of these rows belongs to.
        final_env: int64 (E,), its environment.
        active: bool (T, N), False where the environment was suspended. Those rows are not evaluated; both results are 0
            there.
        chunk_size: most rows the network is given at once; caps the memory of its activations. None: no cap.

    Returns:
        ``value`` and ``next_value``, (T, N), in the network's dtype. Where an episode terminated and no final
        observation was given, ``next_value`` is that of the next episode's first observation.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ConfigError(f"chunk_size: expected at least 1 row, got {chunk_size}")
    steps, envs = _leading(obs, 2, "obs", "(T, N, …)")
    (last_rows,) = _leading(last_obs, 1, "last_obs", "(N, …)")
    if last_rows != envs:
        raise ShapeError(f"last_obs: expected {envs} rows, one per environment, got {last_rows}")
    if active is not None and (active.dtype != torch.bool or tuple(active.shape) != (steps, envs)):
        raise ShapeError(f"active: expected bool ({steps}, {envs}), got {active.dtype} {tuple(active.shape)}")
    extra = last_obs
    places: Tensor | None = None
    if final_obs is not None:
        places = _places(final_obs, final_step, final_env, steps, envs)
        extra = _pairwise(last_obs, final_obs, lambda last, final: torch.cat((last, final)))
    flat = _each(obs, lambda tensor: tensor.flatten(0, 1))
    if active is None:
        now = _evaluate(network, flat, steps * envs, chunk_size)
    else:
        live = active.flatten().nonzero().squeeze(1)
        seen = _evaluate(network, _each(flat, lambda tensor: tensor.index_select(0, live)), len(live), chunk_size)
        now = seen.new_zeros(steps * envs).index_copy(0, live, seen)
    beyond = _evaluate(network, extra, envs + (0 if places is None else len(places)), chunk_size)
    value = now.view(steps, envs)
    table = torch.cat((now, beyond))
    following = find_following_rows(steps, envs, active, now.device)
    if places is not None:
        following = following.flatten().index_copy(
            0, places, torch.arange(len(places), device=now.device) + (steps + 1) * envs
        )
    next_value = table.index_select(0, following.flatten()).view(steps, envs)
    return Values(value, next_value if active is None else next_value.masked_fill(~active, 0))


def compact_values(
    network: Callable[[ObsRows], Tensor], obs: ObsRows | TensorDict, done: Tensor, joined: Tensor | None = None
) -> Values:
    """V(s) and V(s') of a compact batch, which has no next observations: one forward, shifted by one step.

    Where the following entry is not the next step (at ends, cuts and the last entry) the next value is V(s_t), as in
    TorchRL's ``shifted="compact"``: exact for terminated steps, whose next value is not read, and an approximation
    for truncated and cut ones. :class:`headrace.replay.ReplayBuffer` and ``RolloutBuffer`` keep the observations that
    are missing here.

    Args:
        network: observation rows → (rows,) or (rows, 1).
        obs: (N, T, …), environments first, as :func:`headrace.learning.collect` gives it.
        done: bool (N, T).
        joined: bool (N, T): whether the following entry is the next step of the same trajectory, for example the same
            trajectory id; None where only ``done`` separates trajectories.

    Returns:
        ``value`` and ``next_value``, (N, T).
    """
    rows = _plain(obs)
    envs, steps = _leading(rows, 2, "obs", "(N, T, …)")
    if done.dtype != torch.bool or tuple(done.shape) != (envs, steps):
        raise ShapeError(f"done: expected bool ({envs}, {steps}), got {done.dtype} {tuple(done.shape)}")
    value = _evaluate(network, _each(rows, lambda tensor: tensor.flatten(0, 1)), envs * steps, None).view(envs, steps)
    goes_on = ~done if joined is None else ~done & joined
    goes_on = torch.cat((goes_on[:, :-1], torch.zeros_like(goes_on[:, :1])), 1)
    return Values(value, torch.where(goes_on, value.roll(-1, 1), value))


class Repaired(NamedTuple):
    """What :func:`repair_next_obs` gives; masks are bool, in the shape of ``terminated``."""

    next_obs: ObsRows
    """Free of NaN; the given object itself where nothing had to be replaced."""
    replaced: Tensor
    """ObsRows whose next observation was missing and is now their own observation."""
    approximate: Tensor
    """Those of them that did not terminate: they bootstrap V(s_t) in the place of V(s_{t+1})."""
    approximate_count: int
    """How many are approximate. Report it; 0 means that every result is exact."""


def repair_next_obs(obs: ObsRows | TensorDict, next_obs: ObsRows | TensorDict, terminated: Tensor) -> Repaired:
    """Replace next observations that are NaN or infinite by the row's own observation, and say where that is not exact.

    A store that keeps each frame once may not have the observation after the last step of a trajectory, and hands out
    NaN. A network turns NaN into NaN, and multiplying by "not terminated" does not help: 0·NaN is NaN. With the row's
    own observation in its place, terminated rows are exact, as nothing reads their next value; other rows, truncated or
    cut, bootstrap V(s_t) instead of V(s_{t+1}), which is an approximation, so they are reported and counted.

    Args:
        obs: rows of observations, one tensor or groups (a dict or a ``TensorDict``), with the leading axes of
            ``terminated``. Must be finite in the rows that are replaced.
        next_obs: the same, with NaN or infinity in any element of any group of a row that is missing. Not changed.
        terminated: bool, (B,) or (T, N), or with one more axis of size 1, as TorchRL has it.
    """
    obs, next_obs = _plain(obs), _plain(next_obs)
    first = next(iter(obs.values())) if isinstance(obs, dict) else obs
    if terminated.dim() and terminated.shape[-1] == 1 and first.shape[: terminated.dim()] != terminated.shape:
        terminated = terminated.squeeze(-1)
    if terminated.dtype != torch.bool:
        raise DtypeError(f"terminated: expected torch.bool, got {terminated.dtype}; convert it with .bool()")
    rank = terminated.dim()
    for name, rows in (("obs", obs), ("next_obs", next_obs)):
        got = _leading(rows, rank, name, "the leading axes of terminated")
        if got != tuple(terminated.shape):
            raise ShapeError(f"{name}: expected leading axes {tuple(terminated.shape)} as terminated has, got {got}")
    replaced = _missing(next_obs, rank)
    if not bool(replaced.any()):
        return Repaired(next_obs, replaced, torch.zeros_like(replaced), 0)
    unusable = int((replaced & _missing(obs, rank)).sum())
    if unusable:
        raise DataError(
            f"obs: {unusable} rows are not finite where next_obs is not either, so nothing can stand in for it; "
            "drop these rows before learning from them"
        )

    def substitute(own: Tensor, following: Tensor) -> Tensor:
        mask = replaced.view(*replaced.shape, *[1] * (own.dim() - rank))
        return torch.where(mask, own, following)

    approximate = replaced & ~terminated
    return Repaired(_pairwise(obs, next_obs, substitute), replaced, approximate, int(approximate.sum()))


def _plain(rows: ObsRows | TensorDict) -> ObsRows:
    """Return groups as a dict, one level deep."""
    if isinstance(rows, (Tensor, dict)):
        return rows
    found: dict[str, Tensor] = {}
    for key, value in cast("Iterable[tuple[str | tuple[str, ...], Tensor]]", rows.items(True, True)):
        found[key if isinstance(key, str) else "/".join(key)] = value
    return found


def _missing(rows: ObsRows, rank: int) -> Tensor:
    """ObsRows with a NaN or an infinity anywhere. Integer groups have none."""
    tensors = list(rows.values()) if isinstance(rows, dict) else [rows]
    found = torch.zeros(tensors[0].shape[:rank], dtype=torch.bool, device=tensors[0].device)
    for tensor in tensors:
        if tensor.is_floating_point():
            found |= (~tensor.isfinite()).reshape(*tensor.shape[:rank], -1).any(-1)
    return found


def _evaluate(network: Callable[[ObsRows], Tensor], rows: ObsRows, count: int, chunk_size: int | None) -> Tensor:
    size = max(count, 1) if chunk_size is None else chunk_size
    # an empty rollout still asks the network once, for the dtype of its values
    starts = range(0, max(count, 1), size)
    return torch.cat([_column(network(_each(rows, lambda t, lo=lo: t[lo : lo + size]))) for lo in starts])


def _column(output: Tensor) -> Tensor:
    if output.dim() == 1:
        return output
    if output.dim() == 2 and output.shape[1] == 1:
        return output.squeeze(1)
    raise ShapeError(f"network: expected values (rows,) or (rows, 1), got {tuple(output.shape)}")


def _places(final_obs: ObsRows, step: Tensor | None, env: Tensor | None, steps: int, envs: int) -> Tensor:
    (count,) = _leading(final_obs, 1, "final_obs", "(E, …)")
    if step is None or env is None:
        raise ShapeError("final_obs: expected final_step and final_env with it, which say where each row belongs")
    for name, index, bound in (("final_step", step, steps), ("final_env", env, envs)):
        if index.dtype != torch.int64 or tuple(index.shape) != (count,):
            raise ShapeError(f"{name}: expected int64 ({count},), got {index.dtype} {tuple(index.shape)}")
        if count and not bool(((index >= 0) & (index < bound)).all()):
            raise IdError(f"{name}: expected indices from 0 to {bound - 1}, got {int(index.min())}…{int(index.max())}")
    return step * envs + env


def _leading(rows: ObsRows, rank: int, name: str, expected: str) -> tuple[int, ...]:
    tensors = rows if isinstance(rows, dict) else {"": rows}
    shapes = {key: tuple(tensor.shape[:rank]) for key, tensor in tensors.items()}
    if not shapes:
        raise ShapeError(f"{name}: expected at least one group, got none")
    if len(set(shapes.values())) != 1 or any(tensor.dim() < rank for tensor in tensors.values()):
        got = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        raise ShapeError(f"{name}: expected {expected} in every group, got {got}")
    return next(iter(shapes.values()))


def _each(rows: ObsRows, function: Callable[[Tensor], Tensor]) -> ObsRows:
    if isinstance(rows, dict):
        return {name: function(tensor) for name, tensor in rows.items()}
    return function(rows)


def _pairwise(first: ObsRows, second: ObsRows, function: Callable[[Tensor, Tensor], Tensor]) -> ObsRows:
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            raise ShapeError(f"observations: expected the same groups, got {sorted(first)} and {sorted(second)}")
        return {name: function(tensor, second[name]) for name, tensor in first.items()}
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return function(first, second)
    raise ShapeError("observations: expected both as one tensor or both as groups, got one of each")
