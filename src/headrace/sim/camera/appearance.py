"""Random looks per episode: colors, lights and where the camera stands.

A look is a pure function of (seed, episode id): the same episode looks the same in any slot, batch or run. It is
written into the poses, so frames stay a function of their row and can be kept and drawn later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError, ShapeError
from headrace.rng import uniform
from headrace.sim.camera.camera import F64, ModelWatch, ScenePoses, base_colors, base_diffuse, check_poses
from headrace.sim.mujoco_api import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class AppearanceSpec:
    """How far looks may stray from the model's. Zero leaves a quantity alone."""

    color: float = 0.0
    """Each channel of each geom's color moves by up to this much, within 0 … 1."""
    light: float = 0.0
    """Each light's strength is multiplied by 1 ± this."""
    light_direction: float = 0.0
    """Radians: each light's direction is turned by up to about this much."""
    camera_position: float = 0.0
    """Meters: each camera moves by up to this much along each of its axes."""
    camera_rotation: float = 0.0
    """Radians: each camera turns by up to this much about each of its axes."""

    def __post_init__(self) -> None:
        for name in ("color", "light", "light_direction", "camera_position", "camera_rotation"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"AppearanceSpec.{name}: expected a finite number from 0, got {getattr(self, name)}")
        if self.light > 1:
            raise ConfigError(f"AppearanceSpec.light: expected at most 1 (light cannot be negative), got {self.light}")


AS_MODELLED = AppearanceSpec()
"""Every episode looks as the model says."""


class Appearance:
    """Draws looks for episodes and writes them into poses. Keeps no episode between calls."""

    def __init__(self, model: Model, spec: AppearanceSpec, *, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._model = model
        self._watch = ModelWatch(model)
        self._rgba, self._diffuse = base_colors(model), base_diffuse(model)

    def apply(self, poses: ScenePoses, episode_ids: NDArray[np.int64]) -> ScenePoses:
        """Return the poses with the look of each row's episode; what does not change is shared.

        Args:
            poses: n rows as a PoseReader gives them.
            episode_ids: int64 (n,).
        """
        n = len(poses)
        if episode_ids.shape != (n,):
            raise ShapeError(f"episode_ids: expected ({n},), got {episode_ids.shape}; pass one per row of poses")
        check_poses("appearance", self._model, poses)
        if self._watch.changed():
            self._rgba, self._diffuse = base_colors(self._model), base_diffuse(self._model)
        geoms, lights, cameras = (part.shape[1] for part in (poses.geom_pos, poses.light_pos, poses.camera_pos))
        spec, changed = self.spec, dict[str, F64]()
        shift = self._draw(episode_ids, "appearance/color", 3 * geoms).reshape(n, geoms, 3)
        rgba = np.repeat(self._rgba[None], n, 0) if poses.geom_rgba is None else poses.geom_rgba.copy()
        rgba[..., :3] = np.clip(rgba[..., :3] + spec.color * shift, 0, 1)
        factor = 1 + spec.light * self._draw(episode_ids, "appearance/light", 1 + lights)
        diffuse = self._diffuse if poses.light_diffuse is None else poses.light_diffuse
        if lights and spec.light_direction:
            turn = self._draw(episode_ids, "appearance/light_direction", 3 * lights).reshape(n, -1, 3)
            direction = poses.light_dir + spec.light_direction * turn
            changed["light_dir"] = direction / np.sqrt((direction**2).sum(-1, keepdims=True))
        if cameras and (spec.camera_position or spec.camera_rotation):
            changed["camera_pos"], changed["camera_mat"] = self._moved(poses, episode_ids)
        return replace(poses, geom_rgba=rgba, light_diffuse=diffuse * factor[..., None], **changed)

    def _moved(self, poses: ScenePoses, episode_ids: NDArray[np.int64]) -> tuple[F64, F64]:
        """Camera positions and rotations after a small motion in each camera's own frame."""
        n, cameras = poses.camera_pos.shape[:2]
        axes = poses.camera_mat.reshape(n, cameras, 3, 3)
        step = self.spec.camera_position * self._draw(episode_ids, "appearance/camera_position", 3 * cameras)
        angles = self.spec.camera_rotation * self._draw(episode_ids, "appearance/camera_rotation", 3 * cameras)
        # sums in place of matrix products, whose bits depend on the number of rows
        position = poses.camera_pos + (axes * step.reshape(n, cameras, 1, 3)).sum(-1)
        rotation = _rotation(angles.reshape(n, cameras, 3))
        turned = (axes[..., :, :, None] * rotation[..., None, :, :]).sum(-2)
        return position, turned.reshape(n, cameras, 9)

    def _draw(self, episode_ids: NDArray[np.int64], stream: str, count: int) -> F64:
        """Return uniform numbers in [-1, 1), float64 (n, count)."""
        ids = torch.from_numpy(np.ascontiguousarray(episode_ids))
        return uniform(self.seed, ids, stream, count, low=-1.0, high=1.0).numpy()


def _rotation(angles: F64) -> F64:
    """Rotation matrices (…, 3, 3) from angles about x, then y, then z (…, 3)."""
    (sx, sy, sz), (cx, cy, cz) = (np.moveaxis(f(angles), -1, 0) for f in (np.sin, np.cos))
    rows = (
        (cz * cy, cz * sy * sx - sz * cx, cz * sy * cx + sz * sx),
        (sz * cy, sz * sy * sx + cz * cx, sz * sy * cx - cz * sx),
        (-sy, cy * sx, cy * cx),
    )
    return np.stack([np.stack(row, -1) for row in rows], -2)
