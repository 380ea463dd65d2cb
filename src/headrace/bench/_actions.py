"""Actions of runs that measure the environment alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from headrace.errors import UnsupportedError

if TYPE_CHECKING:
    import torch
    from gymnasium import Space
    from torch import Tensor


def action_maker(
    kind: Literal["random", "zero"], space: Space[object], num_envs: int, device: torch.device, seed: int
) -> Callable[[], Tensor]:
    """A function that gives fresh actions for all environments, uniform in the space or all zero.

    Args:
        kind: which.
        space: of one environment's action: Box, Discrete, MultiDiscrete or MultiBinary. Unbounded sides of a Box
            count as ±1.
        num_envs: rows, N.
        device: of the tensor.
        seed: the same seed gives the same actions.
    """
    import numpy as np
    import torch
    from gymnasium import spaces

    generator = torch.Generator(device=device).manual_seed(seed)
    if isinstance(space, spaces.Box):
        shape = (num_envs, *space.shape)
        # the nearest allowed to zero
        rest = torch.as_tensor(np.clip(0.0, space.low, space.high), dtype=torch.float32, device=device)
        if kind == "zero":
            return lambda: rest.expand(shape).clone()
        low = torch.as_tensor(np.where(np.isfinite(space.low), space.low, -1.0), dtype=torch.float32, device=device)
        high = torch.as_tensor(np.where(np.isfinite(space.high), space.high, 1.0), dtype=torch.float32, device=device)
        return lambda: torch.rand(shape, generator=generator, device=device).mul_(high - low).add_(low)
    if isinstance(space, spaces.Discrete):
        first, choices = int(space.start), int(space.n)
        if kind == "zero":
            return lambda: torch.full((num_envs,), first, device=device)
        return lambda: torch.randint(first, first + choices, (num_envs,), generator=generator, device=device)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        shape = (num_envs, *space.shape)
        counts = np.full(space.shape, 2) if isinstance(space, spaces.MultiBinary) else space.nvec
        tops = torch.as_tensor(counts, dtype=torch.float64, device=device)
        if kind == "zero":
            return lambda: torch.zeros(shape, dtype=torch.int64, device=device)
        return lambda: (torch.rand(shape, generator=generator, dtype=torch.float64, device=device) * tops).long()
    raise UnsupportedError(f"actions: expected Box, Discrete, MultiDiscrete or MultiBinary, got {space}")
