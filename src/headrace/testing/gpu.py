"""Whether the GPU paths compute what the CPU paths do: the checks behind ``doctor --gpu`` and ``benchmarks/gpu.py``."""

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
    return [_checked(name, limit, compare, where) for name, limit, compare in _COMPARISONS]


def _checked(
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


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


def _numbers(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace import rng

    ids = torch.arange(ENVS)
    return [(rng.uniform(5, ids.to(device), "check", 7), rng.uniform(5, ids, "check", 7))]


def _images(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace.history import normalize_image

    images = (_random(8, 30, 40, 3) * 255).to(torch.uint8)
    return [(normalize_image(images.to(device)), normalize_image(images))]


def _buffers(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace.history import CircularBuffer

    there, here = CircularBuffer(4, num_envs=ENVS, device=device), CircularBuffer(4, num_envs=ENVS, device="cpu")
    for index in range(6):
        rows = _random(ENVS, 5) + index
        there.append(rows.to(device))
        here.append(rows)
    return [(there.buffer, here.buffer)]


def _returns(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace.learning import gae, n_step

    reward, value, after = (_random(STEPS, ENVS) + index for index in range(3))
    ends = _random(STEPS, ENVS) < 0.1
    rollout = (reward, value, after, ends, torch.zeros_like(ends))
    there = tuple(part.to(device) for part in rollout)
    pairs: list[tuple[Tensor, Tensor]] = []
    for ours, theirs in (
        (gae(*there, gamma=0.99, lam=0.95), gae(*rollout, gamma=0.99, lam=0.95)),
        (n_step(*there, gamma=0.99, n=3), n_step(*rollout, gamma=0.99, n=3)),
    ):
        pairs += [(ours.advantage, theirs.advantage), (ours.value_target, theirs.value_target)]
    return pairs


def _recurrent(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    from headrace.learning import GRU, LSTM

    pairs: list[tuple[Tensor, Tensor]] = []
    x, resets = _random(STEPS, ENVS, 12), _random(STEPS, ENVS) < 0.1
    with torch.no_grad():
        for module in (GRU(12, 96), LSTM(12, 96)):
            expected = module(x, None, resets)[0]
            pairs.append((module.to(device)(x.to(device), None, resets.to(device))[0], expected))
    return pairs


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
    ("image normalization", 0.0, _images),
    ("history buffers", 0.0, _buffers),
    ("return estimators", 1e-4, _returns),
    ("recurrent networks", 1e-4, _recurrent),
    ("physics of cartpole, suspension and resets", 5e-3, _physics),
]
