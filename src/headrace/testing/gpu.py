"""Whether random numbers and physics on a GPU are those of the CPU; the rest there is plain torch.

The checks behind ``doctor --gpu`` and ``benchmarks/gpu.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.envs.recipe import SimName

ENVS, STEPS = 32, 20


class GpuCheck(NamedTuple):
    """One comparison of a device with the CPU."""

    name: str
    ok: bool
    found: str
    """The largest difference, or the error."""


def check_gpu(device: torch.device | str = "cuda") -> list[GpuCheck]:
    """Compare every GPU path on ``device`` with its CPU reference; about a minute, most of it compiling."""
    where = torch.device(device)
    return [_check_path(name, limit, compare, where) for name, limit, compare in _COMPARISONS]


def _check_path(
    name: str, limit: float, compare: Callable[[torch.device], list[tuple[Tensor, Tensor]]], device: torch.device
) -> GpuCheck:
    try:
        pairs = compare(device)
        worst = max((_difference(ours.cpu(), theirs) for ours, theirs in pairs), default=0.0)
    # what a driver, a compiler or an extra may miss
    except (HeadraceError, RuntimeError, ImportError, OSError) as error:
        return GpuCheck(name, False, f"{type(error).__name__}: {error}")
    wish = "bit-equal" if limit == 0.0 else f"within {limit:.0e}"
    return GpuCheck(name, worst <= limit, f"differs by {worst:.1e}; expected {wish}")


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    gap = (ours.double() - theirs.double()).abs()
    return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0


def _numbers(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace import rng

    ids = torch.arange(ENVS)
    return [(rng.uniform(5, ids.to(device), "check", 7), rng.uniform(5, ids, "check", 7))]


def _physics(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """MuJoCo Warp against native MuJoCo, with suspended environments and episodes that end."""
    import headrace

    def play(sim: SimName, where: torch.device) -> list[Tensor]:
        env = headrace.make("cartpole", ENVS, seed=1, sim=sim, device=where, overrides={"episode_length": 9})
        seen = [env.reset(seed=1)[0]["policy"].cpu()]
        for index in range(STEPS):
            env.suspend(list(range(index % 4, ENVS, 4)))
            step = env.step(torch.full((ENVS, 1), 0.1 * (index % 3), device=where))
            env.resume(list(range(ENVS)))
            seen += [step.obs["policy"].cpu(), step.truncated.cpu()]
        env.close()
        return seen

    there, here = play("warp", device), play("mujoco", torch.device("cpu"))
    return list(zip(there, here, strict=True))


_COMPARISONS: list[tuple[str, float, Callable[[torch.device], list[tuple[Tensor, Tensor]]]]] = [
    ("random numbers", 0.0, _numbers),
    ("physics of cartpole, suspension and resets", 5e-3, _physics),
]
