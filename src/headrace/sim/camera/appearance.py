"""Random looks per episode: colors, lights and where the camera stands.

A look is a pure function of (seed, episode id): the same episode looks the same in any slot, batch or run. It is
written into the poses, so frames stay a function of their row and can be kept and drawn later.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.errors import ConfigError, ShapeError
from headrace.rng import uniform
from headrace.sim.camera.camera import (
    F64,
    ROW_LOOKS,
    ScenePoses,
    base_colors,
    base_diffuse,
    check_poses,
)
from headrace.sim.mujoco_api import Kind, Model, mujoco, object_id


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
    cam_fovy: float = 0.0
    """Each camera's field of view is multiplied by 1 ± this; so is each of the following, all named as in MjModel."""
    cam_intrinsic: float = 0.0
    light_ambient: float = 0.0
    light_specular: float = 0.0
    light_attenuation: float = 0.0
    light_cutoff: float = 0.0
    mat_rgba: float = 0.0
    mat_emission: float = 0.0
    mat_specular: float = 0.0
    mat_shininess: float = 0.0
    mat_texrepeat: float = 0.0
    materials: tuple[str, ...] = ()
    """Materials of which each geom that has one wears any."""
    textures: tuple[str, ...] = ()
    """Textures of which each material that has one wears any."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not 0 <= value < float("inf"):
                raise ConfigError(f"AppearanceSpec.{field.name}: expected a finite number from 0, got {value}")
            light = field.name in ("light", "light_ambient", "light_specular")
            if (light and value > 1) or (not light and field.name in ROW_LOOKS and value >= 1):
                most = "at most 1 (light cannot be negative)" if light else "less than 1"
                raise ConfigError(f"AppearanceSpec.{field.name}: expected {most}, got {value}")


AS_MODELLED = AppearanceSpec()
"""Every episode looks as the model says."""


class Appearance:
    """Draws looks for episodes and writes them into poses. Keeps no episode between calls."""

    def __init__(self, model: Model, spec: AppearanceSpec, *, seed: int) -> None:
        self.spec = spec
        self.seed = seed
        self._model = model

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
        geoms, lights, cameras = (part.shape[1] for part in (poses.geom_pos, poses.light_pos, poses.camera_pos))
        spec, changed = self.spec, dict[str, Any]()
        looks = self._draw_looks(poses, episode_ids)
        if looks:
            changed["looks"] = {**(poses.looks or {}), **looks}
        shift = self._draw(episode_ids, "appearance/color", 3 * geoms).reshape(n, geoms, 3)
        own = base_colors(self._model, fields=poses.looks)
        rgba = np.resize(own, (n, geoms, 4)) if poses.geom_rgba is None else poses.geom_rgba.copy()
        if "mat_rgba" in looks or "geom_matid" in looks:
            # a geom with a color of its row keeps it
            worn = base_colors(self._model, fields=changed["looks"])
            rgba = np.where((rgba == own).all(-1, keepdims=True), worn, rgba)
        rgba[..., :3] = np.clip(rgba[..., :3] + spec.color * shift, 0, 1)
        factor = 1 + spec.light * self._draw(episode_ids, "appearance/light", 1 + lights)
        diffuse = base_diffuse(self._model) if poses.light_diffuse is None else poses.light_diffuse
        if lights and spec.light_direction:
            turn = self._draw(episode_ids, "appearance/light_direction", 3 * lights).reshape(n, -1, 3)
            direction = poses.light_dir + spec.light_direction * turn
            changed["light_dir"] = direction / np.sqrt((direction**2).sum(-1, keepdims=True))
        if cameras and (spec.camera_position or spec.camera_rotation):
            changed["camera_pos"], changed["camera_mat"] = self._move_cameras(poses, episode_ids)
        return replace(poses, geom_rgba=rgba, light_diffuse=diffuse * factor[..., None], **changed)

    def _draw_looks(self, poses: ScenePoses, episode_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the model fields of lenses, lights and materials that stray, (n, …) each."""
        n, model, found = len(poses), self._model, dict[str, NDArray[Any]]()
        for name in (field.name for field in fields(self.spec) if field.name in ROW_LOOKS):
            reach, own = getattr(self.spec, name), np.asarray(getattr(model, name), np.float64)
            if reach and len(own):
                factor = 1 + reach * self._draw(episode_ids, f"appearance/{name}", len(own))
                given = (poses.looks or {}).get(name, own[None])
                found[name] = given * factor.reshape(n, len(own), *(1,) * (own.ndim - 1))
                if name == "cam_fovy" and not ((given > 0) & (given * (1 + reach) < 180)).all():
                    raise ConfigError(f"AppearanceSpec.cam_fovy={reach}: fields of view could leave 0 to 180 degrees")
                if name == "mat_rgba":
                    found[name][..., 3] = given[..., 3]
        if self.spec.materials:
            found["geom_matid"] = self._choose(episode_ids, "material", self.spec.materials, model.geom_matid)
        if self.spec.textures:
            role = int(mujoco.mjtTextureRole.mjTEXROLE_RGB)
            found["mat_texid"] = np.repeat(model.mat_texid[None], n, 0)
            found["mat_texid"][..., role] = self._choose(
                episode_ids, "texture", self.spec.textures, model.mat_texid[:, role]
            )
        return found

    def _choose(
        self, episode_ids: NDArray[np.int64], kind: Kind, names: tuple[str, ...], own: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return one of the named things for each place that has one, int32 (n, places)."""
        numbers = np.array([object_id(self._model, kind, name) for name in names], np.int32)
        unit = self._draw(episode_ids, f"appearance/{kind}", len(own)) / 2 + 0.5
        return np.where(own >= 0, numbers[(unit * len(names)).astype(np.int64)], own)

    def _move_cameras(self, poses: ScenePoses, episode_ids: NDArray[np.int64]) -> tuple[F64, F64]:
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
