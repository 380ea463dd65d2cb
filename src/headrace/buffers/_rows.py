"""Which environments a call is about: one record for masks, indices and "all of them"."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import DeviceError, DtypeError, IdError, ShapeError
from headrace.types import Ids


@dataclass(frozen=True, slots=True)
class EnvRows:
    """The environments that a call addresses, and how the rows given with the call line up with them.

    Built by ``env_rows``. With a mask the rows of the call are full (N, …) and those outside the mask are ignored;
    with indices they are compact (n, …), in the order of the indices.
    """

    num_envs: int
    ids: Tensor | None
    """int64 (n,): the environments; None where ``mask`` decides on the device, or where all are meant."""
    mask: Tensor | None
    """bool (N,): given as a mask; on the CPU ``ids`` is then filled too."""

    @property
    def row_count(self) -> int:
        """How many rows a tensor that comes with the call must have."""
        if self.ids is None or self.mask is not None:
            return self.num_envs
        return int(self.ids.shape[0])

    def select(self, per_env: Tensor) -> Tensor:
        """The rows of a full (N, …) tensor that line up with the rows of the call: a copy for indices, else itself."""
        return per_env if self.ids is None or self.mask is not None else per_env.index_select(0, self.ids)

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Put ``rows`` (row_count, …) into a full (N, …) tensor, leaving other environments alone."""
        if self.mask is not None:
            target.copy_(torch.where(over(self.mask, target), rows, target))
        elif self.ids is not None:
            # whole rows at once; an indexed assignment goes element by element
            target.index_copy_(0, self.ids, rows.to(target.dtype))
        else:
            target.copy_(rows)

    def fill(self, target: Tensor, value: float | bool) -> None:
        """Set every element of the addressed environments in a full (N, …) tensor."""
        if self.ids is not None:
            target.index_fill_(0, self.ids, value)
        elif self.mask is not None:
            target.masked_fill_(over(self.mask, target), value)
        else:
            target.fill_(value)

    def add(self, target: Tensor, amount: int) -> None:
        """Add ``amount`` to the addressed environments of an integer tensor (N,)."""
        if self.ids is not None:
            target[self.ids] += amount
        elif self.mask is not None:
            target += amount * self.mask
        else:
            target += amount


def over(per_env: Tensor, like: Tensor) -> Tensor:
    """Reshape (N,) so that it broadcasts over the rows of ``like`` (N, …)."""
    return per_env.reshape(-1, *(1,) * (like.dim() - 1))


def env_rows(env_ids: Ids | None, *, num_envs: int, device: torch.device) -> EnvRows:
    """Check ``env_ids`` and say which environments are meant.

    None means all; a list of bools is a mask. Indices are checked for range and repetition on the CPU; on another
    device that would force a host synchronization at every step, so indices that already live there are taken as they
    are.
    """
    if env_ids is None:
        return EnvRows(num_envs, None, None)
    if not isinstance(env_ids, Tensor):
        given = _listed(env_ids)
        if given.dtype == torch.int64:
            _check_indices(given, num_envs)
            return EnvRows(num_envs, given.to(device), None)
        env_ids = given.to(device)
    if env_ids.device != device:
        raise DeviceError(f"env_ids: expected a tensor on {device}, got one on {env_ids.device}; move it with .to()")
    if env_ids.dim() != 1:
        raise ShapeError(f"env_ids: expected one dimension, got shape {tuple(env_ids.shape)}")
    if env_ids.dtype == torch.bool:
        if env_ids.shape[0] != num_envs:
            raise ShapeError(
                f"env_ids: expected a mask of {num_envs} environments, got {env_ids.shape[0]}; "
                "pass int64 indices to address a few"
            )
        ids = env_ids.nonzero().squeeze(1) if device.type == "cpu" else None
        return EnvRows(num_envs, ids, env_ids)
    if env_ids.dtype != torch.int64:
        raise DtypeError(f"env_ids: expected a bool mask or int64 indices, got {env_ids.dtype}")
    if device.type == "cpu":
        _check_indices(env_ids, num_envs)
    return EnvRows(num_envs, env_ids, None)


def check_rows(name: str, rows: Tensor, where: EnvRows, device: torch.device) -> None:
    """Refuse rows that are not a tensor, live elsewhere or do not line up with the environments."""
    if not isinstance(rows, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
        raise DtypeError(f"{name}: expected a torch tensor, got {type(rows).__name__}; use torch.as_tensor")
    if rows.device != device:
        raise DeviceError(f"{name}: expected a tensor on {device}, got one on {rows.device}; move it with .to()")
    if rows.dim() < 1 or rows.shape[0] != where.row_count:
        hint = "one row per index" if where.ids is not None and where.mask is None else "one row per environment"
        raise ShapeError(
            f"{name}: expected {where.row_count} rows, got shape {tuple(rows.shape)}; pass {hint} "
            "(rows outside a mask are ignored)"
        )


def check_frames(name: str, rows: Tensor, held: Tensor | None) -> None:
    """Refuse rows whose frames differ in shape or dtype from those ``held`` (any rows, …), or have no elements."""
    shape = tuple(rows.shape[1:])
    if held is None:
        if 0 in shape:
            raise ShapeError(f"{name}: expected frames with at least one element, got shape {shape}")
        return
    if shape != tuple(held.shape[1:]):
        raise ShapeError(f"{name}: expected frames of shape {tuple(held.shape[1:])}, as at first, got {shape}")
    if rows.dtype != held.dtype:
        raise DtypeError(f"{name}: expected {held.dtype}, as at first, got {rows.dtype}; convert with .to()")


def _listed(env_ids: list[int] | range) -> Tensor:
    """A list, range or array as a tensor (n,): bool as it is, else int64; nothing is rounded to an integer."""
    given = np.asarray(env_ids)
    if given.ndim != 1:
        raise ShapeError(f"env_ids: expected one dimension, got {env_ids!r}; pass a list of indices or a bool mask")
    if given.size and given.dtype.kind not in "biu":
        raise DtypeError(f"env_ids: expected integers or a bool mask, got {env_ids!r}")
    return torch.from_numpy(given.copy() if given.dtype == np.bool_ else given.astype(np.int64))


def _check_indices(ids: Tensor, num_envs: int) -> None:
    if ids.numel() == 0:
        return
    given = ids.numpy()  # numpy's small arrays cost a fraction of torch's
    lowest, highest = int(given.min()), int(given.max())
    if lowest < 0 or highest >= num_envs:
        raise IdError(f"env_ids: expected indices from 0 to {num_envs - 1}, got {lowest if lowest < 0 else highest}")
    # ascending, as most come, is quickly seen; sorting is not
    if not (given[1:] > given[:-1]).all() and len(np.unique(given)) != len(given):
        raise IdError(f"env_ids: expected each environment once, got repeats in {ids.tolist()[:20]}")
