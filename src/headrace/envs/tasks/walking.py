"""What the walking tasks share: speed, health and effort."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from headrace import rng
from headrace.envs._task import TaskCfg


@dataclass(frozen=True, kw_only=True)
class WalkCfg(TaskCfg):
    """Settings of the walking tasks."""

    decimation: int = 5
    episode_length: int = 1000
    forward_reward_weight: float
    ctrl_cost_weight: float
    healthy_reward: float
    healthy_z_min: float
    healthy_z_max: float
    reset_noise: float


def walk_reward(cfg: WalkCfg, dt: float, before: Tensor, after: Tensor, fallen: Tensor, actions: Tensor) -> Tensor:
    """Forward speed, a bonus for staying healthy, less the effort: float64 (n,).

    Args:
        cfg: the weights.
        dt: seconds between the two positions.
        before: x before the step, float64 (n,).
        after: x after it, float64 (n,).
        fallen: bool (n,).
        actions: float64 (n, A).
    """
    if after.device.type != "cpu":
        return walk_reward_reference(cfg, dt, before, after, fallen, actions)
    out = np.empty(after.shape[0])
    rows = before.numpy(), after.numpy(), fallen.numpy(), actions.numpy()
    _kernels().walk_rewards(*rows, walk_weights(cfg, dt), out)
    return torch.from_numpy(out)


def walk_reward_reference(
    cfg: WalkCfg, dt: float, before: Tensor, after: Tensor, fallen: Tensor, actions: Tensor
) -> Tensor:
    """:func:`walk_reward` in torch operations, whose sums are taken in another order."""
    speed = (after - before) / dt
    healthy = (~fallen).to(torch.float64) * cfg.healthy_reward
    effort = cfg.ctrl_cost_weight * (actions * actions).sum(dim=1)
    return (cfg.forward_reward_weight * speed + healthy) - effort


def walk_weights(cfg: WalkCfg, dt: float) -> tuple[float, float, float, float]:
    """What the compiled rewards take: seconds per step, then the weights of speed, health and effort."""
    return dt, cfg.forward_reward_weight, cfg.healthy_reward, cfg.ctrl_cost_weight


def reset_keys(seed: int) -> tuple[int, int]:
    """The streams of initial positions and velocities."""
    return rng.stream_key(seed, "qpos"), rng.stream_key(seed, "qvel")


def mass_center_x(positions: Tensor, mass: Tensor, total: float) -> Tensor:
    """x of the center of mass, float64 (n,), from the bodies' positions (n, bodies, 3) and masses (bodies,)."""
    if positions.device.type != "cpu":
        return mass_center_x_reference(positions, mass, total)
    out = np.empty(positions.shape[0])
    _kernels().mass_centers(positions.numpy(), mass.numpy(), total, out)
    return torch.from_numpy(out)


def mass_center_x_reference(positions: Tensor, mass: Tensor, total: float) -> Tensor:
    """:func:`mass_center_x` in torch operations, whose sums are taken in another order."""
    return (mass * positions[:, :, 0]).sum(dim=1) / total


def outside(height: Tensor, lowest: float, highest: float) -> Tensor:
    """Whether a height (n,) is not in [lowest, highest], bool (n,); a NaN is not."""
    return height != height.clamp(lowest, highest)


def between(lowest: float, highest: float) -> tuple[float, float]:
    """The closed interval of the numbers that lie in the open one."""
    return math.nextafter(lowest, math.inf), math.nextafter(highest, -math.inf)


@functools.cache
def _kernels() -> ModuleType:
    from headrace._kernels import locomotion  # brings numba: on use

    return locomotion
