"""Which environments a call is about: masks and ids, checked once at the boundary. Inner stages take checked ids."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, DtypeError, IdError, ShapeError
from headrace.types import Ids


def check_ids(ids: Ids, num_envs: int, device: torch.device, *, name: str = "ids", ascending: bool = True) -> Tensor:
    """Ids as int64 (n,) on ``device``, from a bool mask (N,) or unique integers; ascending, or in the order given.

    Ids and masks may come from another device. Ids that live on a GPU cost one host synchronization.
    """
    given = _as_ids(ids, name)
    if given.is_meta:
        raise DeviceError(f"{name}: expected a tensor with data, got one on device meta")
    if given.dtype == torch.bool:
        _check_mask(given, num_envs, name)
        if given.is_cpu and device.type == "cpu":
            return torch.from_numpy(np.flatnonzero(given.numpy()))  # a third of the time of torch's own
        return given.to(device).nonzero().squeeze(1)
    given = given.to(torch.int64)
    in_order = _check_indices(given, num_envs, name)
    if ascending and not in_order:
        given = given.sort().values
    return given.to(device)


def check_mask(ids: Ids, num_envs: int, device: torch.device, *, name: str) -> Tensor:
    """Return the same as bool (N,) on ``device``; a mask that is one already is given back as it is."""
    if isinstance(ids, Tensor) and ids.dtype == torch.bool and ids.device == device and ids.dim() == 1:
        _check_mask(ids, num_envs, name)
        return ids
    mask = torch.zeros(num_envs, dtype=torch.bool, device=device)
    mask[check_ids(ids, num_envs, device, name=name)] = True
    return mask


def check_seed(seed: int, *, of_all: bool = True) -> int:
    """Return a seed as a Python integer; ``of_all`` says whether every environment will start a new episode with it."""
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise DtypeError(f"seed: expected an integer, got {type(seed).__name__} {seed!r}") from error
    if isinstance(seed, bool):
        raise DtypeError(f"seed: expected an integer, got bool {seed!r}")
    if not of_all:
        raise ConfigError(
            "seed: expected a reset of all environments with it, got a reset_mask of some; the others draw their "
            "numbers from the seed that their episodes began with. Use episode_ids to start other episodes"
        )
    return number


def as_tensor(values: object, name: str) -> Tensor:
    """Return an array or list as a tensor with its own memory; a tensor as it is."""
    if isinstance(values, Tensor):
        return values
    try:
        # a copy: torch cannot wrap arrays that are read-only or have negative strides
        return torch.from_numpy(np.array(values))
    except (TypeError, ValueError) as error:
        raise DtypeError(f"{name}: expected an array of numbers, a list or a tensor, got {values!r}") from error


@dataclass(frozen=True, slots=True)
class EnvRows:
    """The environments that a call addresses, and how the rows given with the call line up with them.

    Made by :func:`env_rows`. With a mask the rows of the call are full (N, …) and those outside the mask are ignored;
    with indices they are compact (n, …), in the order of the indices.
    """

    num_envs: int
    ids: Tensor | None
    """int64 (n,): the environments; None where ``mask`` decides on the device, or where all are meant."""
    mask: Tensor | None
    """bool (N,): given as a mask; on the CPU ``ids`` is then filled, too."""

    @property
    def row_count(self) -> int:
        """How many rows a tensor that comes with the call must have."""
        if self.ids is None or self.mask is not None:
            return self.num_envs
        return int(self.ids.shape[0])

    def select(self, per_env: Tensor) -> Tensor:
        """Return the rows of a full (N, …) tensor that belong to the call: a copy for indices, else itself."""
        return per_env if self.ids is None or self.mask is not None else per_env.index_select(0, self.ids)

    def write(self, target: Tensor, rows: Tensor) -> None:
        """Put ``rows`` (row_count, …) into a full (N, …) tensor; other environments keep theirs."""
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
    """Check ``env_ids`` and say which environments are meant; None means all.

    Lists are checked for range and repetition before they move to the device. Tensors must be on ``device``; on a GPU
    their values are not read, since that would wait for the GPU at every step.
    """
    if env_ids is None:
        return EnvRows(num_envs, None, None)
    given = _as_ids(env_ids, "env_ids")
    listed = given is not env_ids
    if not listed and given.device != device:
        raise DeviceError(f"env_ids: expected a tensor on {device}, got one on {given.device}; move it with .to()")
    if given.dtype == torch.bool:
        _check_mask(given, num_envs, "env_ids")
        mask = given.to(device)
        return EnvRows(num_envs, mask.nonzero().squeeze(1) if device.type == "cpu" else None, mask)
    if given.dtype != torch.int64:
        raise DtypeError(f"env_ids: expected a bool mask or int64 indices, got {given.dtype}")
    if listed or device.type == "cpu":
        _check_indices(given, num_envs, "env_ids")
    return EnvRows(num_envs, given.to(device), None)


def check_rows(name: str, rows: Tensor, where: EnvRows, device: torch.device) -> None:
    """Refuse rows that are not a tensor, are on another device or do not line up with the environments."""
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


def _as_ids(ids: Ids, name: str) -> Tensor:
    """Return a tensor as it is; a list, range, tuple or array as bool or int64 on the CPU.

    One dimension, integers or bool.
    """
    if not isinstance(ids, Tensor):
        if not isinstance(ids, list | range | tuple | np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may be untyped
            raise DtypeError(
                f"{name}: expected a list, array or tensor of integers, or a bool mask, got {type(ids).__name__}"
            )
        try:
            array = np.asarray(ids)
        except ValueError as error:
            raise DtypeError(f"{name}: expected integers or a bool mask, got {ids!r}") from error
        if array.ndim != 1:
            raise ShapeError(f"{name}: expected one dimension, got {ids!r}; pass a list of indices or a bool mask")
        # an empty list has no dtype; nothing is rounded to an integer
        if array.size and array.dtype.kind not in "biu":
            raise DtypeError(f"{name}: expected integers or a bool mask, got {ids!r}")
        return torch.from_numpy(array.copy() if array.dtype == np.bool_ else array.astype(np.int64))
    if ids.dim() != 1:
        raise ShapeError(f"{name}: expected one dimension, got shape {tuple(ids.shape)}; pass a list or a bool mask")
    if ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise DtypeError(f"{name}: expected integers or a bool mask, got {ids.dtype}")
    return ids


def _check_mask(mask: Tensor, num_envs: int, name: str) -> None:
    if mask.shape[0] != num_envs:
        raise ShapeError(
            f"{name}: expected a bool mask of shape ({num_envs},), got {tuple(mask.shape)}; "
            "pass int64 indices to address a few environments"
        )


def _check_indices(ids: Tensor, num_envs: int, name: str) -> bool:
    """Refuse ids that are out of range or repeated; whether they ascend."""
    if not ids.numel():
        return True
    # numpy's calls on small arrays cost a fraction of torch's; the copy is the one wait for a GPU
    given = ids.cpu().numpy()
    lowest, highest = int(given.min()), int(given.max())
    if lowest < 0 or highest >= num_envs:
        raise IdError(f"{name}: expected ids in [0, {num_envs}), got {lowest if lowest < 0 else highest}")
    if bool((given[1:] > given[:-1]).all()):
        return True
    ordered = np.sort(given)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise IdError(f"{name}: expected each id once, got {repeated[0]} more than once")
    return False
