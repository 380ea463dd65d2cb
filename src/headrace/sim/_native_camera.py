"""The camera that needs nothing but pip: a depth buffer on the CPU, exact rays for primitives, triangles for meshes."""

from __future__ import annotations

import threading

import numpy as np

from headrace._kernels.render_scene import F32, F64, I32, RenderRows
from headrace._kernels.threads import run
from headrace.errors import ConfigError, LifecycleError
from headrace.sim._camera import CameraFrames, CameraSpec, camera_id, check_poses, frames_for
from headrace.sim._camera_layers import StaticLayers
from headrace.sim._camera_painter import Painter
from headrace.sim._camera_scene import build_frame, build_tables, camera_moves
from headrace.sim._mujoco_api import Model
from headrace.sim._poses import ScenePoses

_FEW_PIXELS = 64 * 64
"""Waking a thread costs as much as it saves on fewer, and far more where the cores are busy."""


class NativeCamera:
    """A :class:`~headrace.sim.Camera` in numba, parallel over rows.

    Draws geoms and sites of ``spec.groups`` with their materials, textures, transparency, sky and lights; shadows of
    directional lights and highlights where the spec asks for them; no reflections and no antialiasing. A frame depends
    on its row of poses alone: not on the other rows, on their number, on threads or on what was drawn before.

    What never moves before a camera that never moves is drawn once and kept (a static layer, see
    :class:`StaticLayers`); ``layers=False`` draws everything every time, to the same bits.
    """

    def __init__(self, model: Model, spec: CameraSpec, *, threads: int | None = None, layers: bool = True) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: expected at least 1, or None for all cores, got {threads}")
        self.spec = spec
        self.model = model
        self._camera = camera_id(model, spec.name)
        self._threads = threads
        self._tables = build_tables(model, spec.groups)
        frame = build_frame(model, spec)
        casters = self._tables.casters if spec.shadows else ()
        self._painter = Painter(model, self._tables, frame, specular=spec.specular, casters=casters)
        # moving shadows fall on what does not move
        still = not (camera_moves(model, spec.name) or self._tables.lights_move or casters)
        self._layers: StaticLayers | None = None
        if layers and still and (self._tables.static or self._painter.has_sky):
            self._layers = StaticLayers(spec, self._tables.static)
        # memory and layers are kept between calls: one at a time
        self._lock = threading.Lock()
        self._prepared = self._closed = False

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """See :meth:`Camera.render`."""
        if self._closed:
            raise LifecycleError(f"camera {self.spec.name!r} is closed; make a new one")
        check_poses(f"camera {self.spec.name!r}", self.model, poses)
        n = len(poses)
        frames = frames_for(self.spec, n, out)
        if n == 0:
            return frames
        rows = self._rows(poses)
        with self._lock:
            if not self._prepared:
                self._painter.prepare(rows, frames)
                self._prepared = True
            layer = None if self._layers is None else self._layers.find(rows, self._draw_layers)
            self._draw(rows, None if layer is None or (layer < 0).all() else layer, frames)
        return frames

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._closed = True

    def _draw_layers(self, rows: RenderRows, frames: CameraFrames) -> None:
        self._draw(rows, None, frames, static_only=True)

    def _draw(self, rows: RenderRows, layer: I32 | None, frames: CameraFrames, static_only: bool = False) -> None:
        """Draw rows on all threads, each over its layer."""
        pixels = self.spec.height * self.spec.width
        run(
            self._painter.draw,
            len(rows.camera_pos),
            rows,
            None if layer is None else self._layers,
            layer,
            frames,
            static_only,
            min_rows=max(1, -(-_FEW_PIXELS // pixels)),
            threads=self._threads,
        )

    def _rows(self, poses: ScenePoses) -> RenderRows:
        tables = self._tables
        shown = tables.poses
        rgba, diffuse, sizes = tables.rgba, tables.diffuse, tables.sizes
        geoms = np.flatnonzero(tables.scene.geom_ids >= 0)
        ids = tables.scene.geom_ids[geoms]
        if poses.geom_rgba is not None and poses.light_diffuse is not None:
            rgba: F32 = np.repeat(tables.rgba, len(poses), 0)
            rgba[:, geoms] = poses.geom_rgba[:, ids]
            # numpy's layout of some columns depends on the number of rows, and each layout is compiled apart
            lights = poses.light_diffuse[:, tables.scene.light_source + 1]
            diffuse: F32 = np.ascontiguousarray(lights, np.float32)
        if poses.geom_size is not None:
            sizes: F64 = np.repeat(tables.sizes, len(poses), 0)
            sizes[:, geoms] = poses.geom_size[:, ids]
        return RenderRows(
            geom_pos=np.ascontiguousarray(np.concatenate((poses.geom_pos, poses.site_pos), axis=1)[:, shown]),
            geom_mat=np.ascontiguousarray(np.concatenate((poses.geom_mat, poses.site_mat), axis=1)[:, shown]),
            sizes=sizes,
            camera_pos=np.ascontiguousarray(poses.camera_pos[:, self._camera]),
            camera_mat=np.ascontiguousarray(poses.camera_mat[:, self._camera]),
            light_pos=np.ascontiguousarray(poses.light_pos),
            light_dir=np.ascontiguousarray(poses.light_dir),
            rgba=rgba * tables.tint,
            diffuse=diffuse,
        )
