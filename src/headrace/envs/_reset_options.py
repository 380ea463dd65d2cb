"""What a reset may ask for, checked before anything is changed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.errors import ConfigError, DtypeError, IdError, ShapeError
from headrace.ids import as_tensor, check_ids

_OPTIONS = {"reset_mask", "episode_ids", "observe"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetRequest:
    """Which environments to reset, and into which episodes."""

    ids: Tensor | None
    """int64 (m,), ascending; None for all."""
    episode_ids: Tensor | None
    """int64 (m,); None for their next ones."""
    observe: Tensor | None
    """int64 (k,): environments whose cameras are drawn if they are reset; None for all."""


def parse_reset_options(options: dict[str, object] | None, num_envs: int, device: torch.device) -> ResetRequest:
    """Check ``reset(options=…)`` before anything is changed."""
    if not options:
        return ResetRequest(ids=None, episode_ids=None, observe=None)
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise ConfigError(f"reset options: expected {sorted(_OPTIONS)}, got {unknown}")
    mask, wanted = options.get("reset_mask"), options.get("episode_ids")
    ids = None
    if mask is not None:
        mask = as_tensor(mask, "reset_mask")
        if mask.dtype != torch.bool:
            raise DtypeError(f"reset_mask: expected bool ({num_envs},), got {mask.dtype}")
        ids = check_ids(mask, num_envs, device, name="reset_mask")
        ids = None if len(ids) == num_envs else ids
    observe = options.get("observe")
    return ResetRequest(
        ids=ids,
        episode_ids=None if wanted is None else _checked_episode_ids(wanted, ids, num_envs, device),
        observe=None if observe is None else check_ids(as_tensor(observe, "observe"), num_envs, device, name="observe"),
    )


def _checked_episode_ids(values: object, ids: Tensor | None, num_envs: int, device: torch.device) -> Tensor:
    wanted = as_tensor(values, "episode_ids")
    if wanted.dtype.is_floating_point or wanted.dtype == torch.bool:
        raise DtypeError(f"episode_ids: expected int64, got {wanted.dtype}")
    count = num_envs if ids is None else len(ids)
    wanted = wanted.to(device=device, dtype=torch.int64)
    if tuple(wanted.shape) == (count,):
        chosen = wanted
    elif ids is not None and tuple(wanted.shape) == (num_envs,):
        chosen = wanted.index_select(0, ids)
    else:
        raise ShapeError(
            f"episode_ids: expected one per reset environment ({count},) or one per environment ({num_envs},), "
            f"got {tuple(wanted.shape)}"
        )
    lowest = int(chosen.min()) if chosen.numel() else 0
    if lowest < 0:
        raise IdError(f"episode_ids: expected ids of at least 0, got {lowest}")
    return chosen
