"""``--policy``: where the actions of a command come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace._named import load
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.envs import BatchEnv
    from headrace.types import Obs

Policy = Callable[["Obs"], "Tensor"]


def action_source(name: str, env: BatchEnv, seed: int) -> Policy:
    """What acts in every step: random or zero actions of the right kind, or the user's own function."""
    import torch
    from gymnasium import spaces

    space, count = env.single_action_space, env.num_envs
    if name in ("random", "zero"):
        generator = torch.Generator(device=env.device).manual_seed(seed)
        if isinstance(space, spaces.Discrete):
            top = int(space.n) if name == "random" else 1
            return lambda _: torch.randint(top, (count,), generator=generator, device=env.device) + int(space.start)
        box = cast("spaces.Box", space)
        low, high = (torch.as_tensor(bound, device=env.device) for bound in (box.low, box.high))
        if name == "zero":
            return lambda _: torch.zeros((count, *box.shape), device=env.device)
        return lambda _: low + (high - low) * torch.rand((count, *box.shape), generator=generator, device=env.device)
    if ":" not in name:
        raise ConfigError(f"--policy: expected random, zero or module:function, got {name!r}")
    return cast("Policy", load(name, "--policy"))
