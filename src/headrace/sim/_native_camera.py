"""The camera that needs nothing but pip: ray casting on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace._kernels.compiled import kernel_threads, run
from headrace._kernels.raycast import render_primitives
from headrace._kernels.raycast_given import pixel_rays, render_given
from headrace._kernels.raycast_place import RaycastRows
from headrace._kernels.raycast_scene import BOX, F32, HFIELD, PLANE
from headrace.errors import ConfigError, LifecycleError
from headrace.sim._camera import (
    CameraFrames,
    CameraSpec,
    ScenePoses,
    camera_id,
    frames_for,
    pose_layout,
    require_layout,
)
from headrace.sim._camera_scene import SHOWN_GROUPS, build_frame, build_tables
from headrace.sim._mujoco_api import Model, new_batch

_NO_RGB = np.empty((0, 0, 0, 3), np.uint8)
_NO_DEPTH = np.empty((0, 0, 0), np.float32)
_NO_SEGMENTATION = np.empty((0, 0, 0), np.int32)

_FEW_PIXELS = 2 * 64 * 64
"""Waking threads costs as much as they save on so few, and far more where the cores are busy."""


class NativeCamera:
    """A :class:`~headrace.sim.Camera` in numba: exact hits on every primitive, parallel over rows.

    Draws geoms of groups 0–2 with their materials, textures, transparency, sky and lights, without shadows,
    reflections, highlights and antialiasing. A frame depends on its row of poses alone: not on the other rows, on
    their number or on threads.

    A model that shows meshes or height fields is drawn through MuJoCo's own batched rays with the same light; there
    transparent geoms are opaque, and a mesh has the mean color of its texture.
    """

    def __init__(self, model: Model, spec: CameraSpec, *, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: expected at least 1, or None for all cores, got {threads}")
        self.spec = spec
        self.model = model
        self._camera = camera_id(model, spec.name)
        self._layout = pose_layout(model)
        self._frame = build_frame(model, spec)
        self._tables = build_tables(model)
        self._threads = kernel_threads() if threads is None else threads
        kinds = self._tables.scene.geom_types
        primitive = (kinds >= PLANE) & (kinds <= BOX) & (kinds != HFIELD)
        self._rays = None if bool(primitive.all()) else _MujocoRays(model, self._threads)
        self._closed = False

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """See :meth:`Camera.render`."""
        if self._closed:
            raise LifecycleError(f"camera {self.spec.name!r} is closed; make a new one")
        require_layout(self.spec, self._layout, poses)
        n = len(poses)
        frames = frames_for(self.spec, n, out)
        if n == 0:
            return frames
        rows = self._rows(poses)
        outputs = (
            _NO_RGB if frames.rgb is None else frames.rgb,
            _NO_DEPTH if frames.depth is None else frames.depth,
            _NO_SEGMENTATION if frames.segmentation is None else frames.segmentation,
        )
        scene, frame, threads = self._tables.scene, self._frame, self._threads
        if n * self.spec.height * self.spec.width <= _FEW_PIXELS:
            threads = 1
        if self._rays is None:
            # fewer rows than threads: cut pictures into bands
            bands = min(-(-threads // n), self.spec.height)
            run(render_primitives, n * bands, scene, rows, frame, bands, *outputs, threads=threads)
        else:
            directions = np.empty((n, self.spec.height * self.spec.width, 3))
            pixel_rays(rows, frame, directions)
            hits = self._rays.cast(poses, rows.camera_pos, directions)
            run(render_given, n, scene, rows, frame, self._tables.slots, *hits, *outputs, threads=threads)
        return frames

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._closed = True

    def _rows(self, poses: ScenePoses) -> RaycastRows:
        tables = self._tables
        geoms = tables.scene.geom_ids
        rgba, diffuse = tables.rgba, tables.diffuse
        if poses.geom_rgba is not None and poses.light_diffuse is not None:
            rgba: F32 = poses.geom_rgba[:, geoms].astype(np.float32)
            diffuse: F32 = poses.light_diffuse[:, tables.scene.light_source + 1].astype(np.float32)
        return RaycastRows(
            geom_pos=np.ascontiguousarray(poses.geom_pos[:, geoms]),
            geom_mat=np.ascontiguousarray(poses.geom_mat[:, geoms]),
            camera_pos=np.ascontiguousarray(poses.camera_pos[:, self._camera]),
            camera_mat=np.ascontiguousarray(poses.camera_mat[:, self._camera]),
            light_pos=np.ascontiguousarray(poses.light_pos),
            light_dir=np.ascontiguousarray(poses.light_dir),
            rgba=rgba * tables.tint,
            diffuse=diffuse,
        )


class _MujocoRays:
    """MuJoCo's rays into rows of state: meshes and height fields included. Owns a batch that grows with the rows."""

    def __init__(self, model: Model, threads: int) -> None:
        self._model = model
        self._threads = threads
        self._capacity = 0
        self._groups = np.array([1] * SHOWN_GROUPS + [0] * (6 - SHOWN_GROUPS), np.uint8)

    def cast(self, poses: ScenePoses, origin: np.ndarray, directions: np.ndarray) -> tuple[Any, Any, Any]:
        """Depth (n, rays), geom ids (n, rays) and normals (n, rays, 3) of rays from origin (n, 3)."""
        n = len(poses)
        if n > self._capacity:
            self._batch: Any = new_batch(self._model, n, self._threads)
            self._capacity = n
        at = 0
        for name in ("qpos", "mocap_pos", "mocap_quat"):
            field = self._batch.bind(name)
            width = field[0].size
            field[:n] = poses.state[:, at : at + width].reshape(field[:n].shape)
            at += width
        ids = np.arange(n, dtype=np.int32)
        return self._batch.ray(origin[:, None, :], directions, geomgroup=self._groups, ids=ids, normal=True)
