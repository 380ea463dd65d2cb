"""The camera that needs nothing but pip: a depth buffer on the CPU, exact rays for primitives, triangles for meshes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.render_scene import F32, F64, RenderRows
from headrace._kernels.threads import run
from headrace.errors import ConfigError, LifecycleError
from headrace.sim._camera import CameraFrames, CameraSpec, DataType, ScenePoses, camera_id, check_poses, frames_for
from headrace.sim._camera_painter import Painter, Under, pick_rows
from headrace.sim._camera_scene import build_frame, build_tables, camera_moves
from headrace.sim._mujoco_api import Model

_FEW_PIXELS = 64 * 64
"""Waking a thread costs as much as it saves on fewer, and far more where the cores are busy."""

MOST_BYTES = 64 << 20
"""What the layers of one camera may hold; the one unused for longest makes room."""
_REMEMBERED = 4096


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
            under = None if self._layers is None else self._layers.find(rows, self._draw_layers)
            self._draw(rows, under, frames)
        return frames

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._closed = True

    def _draw_layers(self, rows: RenderRows, frames: CameraFrames) -> None:
        self._draw(rows, None, frames, static_only=True)

    def _draw(self, rows: RenderRows, under: Under | None, frames: CameraFrames, static_only: bool = False) -> None:
        """Draw rows on all threads, each over its layer."""
        few = max(1, -(-_FEW_PIXELS // (self.spec.height * self.spec.width)))
        args = rows, under, frames, static_only
        run(self._painter.draw, len(rows.camera_pos), *args, min_rows=few, threads=self._threads)

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


class StaticLayers:
    """The layers of one camera: pictures of what never moves before a camera that never moves, drawn once and kept.

    A layer holds depths, colors, ids and normals of the solid geoms that belong to the world. It belongs to the exact
    bits of everything that it was drawn from (those geoms, the camera, the lights, their looks): a row whose bits
    differ has another layer or none, so that a layer can never be wrong. Environments with looks of their own have
    their own layers, made when the same looks come a second time.
    """

    def __init__(self, spec: CameraSpec, static: int) -> None:
        self._static = static
        kinds: list[DataType] = ["depth", *("rgb" if kind == "gray" else kind for kind in spec.data_types)]
        self._spec = replace(spec, data_types=tuple(dict.fromkeys(kinds)))
        one = CameraFrames.empty(self._spec, 1)
        self._most = max(1, MOST_BYTES // sum(getattr(one, kind).nbytes for kind in self._spec.data_types))
        self.frames = CameraFrames.empty(self._spec, 0)
        self.stamps = np.zeros(0, np.int64)
        """(P,): a number that changes when a layer is replaced."""
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._drawn = 0

    def find(self, rows: RenderRows, draw: Callable[[RenderRows, CameraFrames], None]) -> Under | None:
        """The layer of each row, None where no row has one; ``draw`` makes new ones."""
        n, static = len(rows.camera_pos), self._static
        seen = (
            *(rows.geom_pos[:, :static], rows.geom_mat[:, :static], rows.rgba[:, :static], rows.sizes[:, :static]),
            *(rows.camera_pos, rows.camera_mat, rows.light_pos, rows.light_dir, rows.diffuse),
        )
        keys = np.concatenate([np.broadcast_to(part, (n, *part.shape[1:])).reshape(n, -1) for part in seen], axis=1)
        if n > 1 and bool((keys == keys[0]).all()):
            owners = {keys[0].tobytes(): np.arange(n)}
        else:
            lists: dict[bytes, list[int]] = {}
            for i in range(n):
                lists.setdefault(keys[i].tobytes(), []).append(i)
            owners = {key: np.array(rows) for key, rows in lists.items()}
        found = np.full(n, -1, np.int32)
        new: list[bytes] = []
        for key, members in owners.items():
            if key in self._places:
                self._places.move_to_end(key)
            elif len(members) > 1 or key in self._once:
                self._once.pop(key, None)
                new.append(key)
            else:
                self._once[key] = None
                if len(self._once) > _REMEMBERED:
                    self._once.popitem(last=False)
        if new:
            # none is dropped that this call needs
            room = self._most - sum(key in self._places for key in owners)
            self._make(new[:room], owners, rows, draw)
        for key, members in owners.items():
            found[members] = self._places.get(key, -1)
        return None if (found < 0).all() else Under(self.frames, self.stamps, found)

    def _make(
        self,
        new: list[bytes],
        owners: dict[bytes, NDArray[np.int64]],
        rows: RenderRows,
        draw: Callable[[RenderRows, CameraFrames], None],
    ) -> None:
        picked = np.array([owners[key][0] for key in new], np.int64)
        if not len(picked):
            return
        fresh = CameraFrames.empty(self._spec, len(new))
        draw(pick_rows(rows, picked), fresh)
        places: list[int] = []
        for key in new:
            full = len(self._places) >= self._most
            place = self._places.popitem(last=False)[1] if full else len(self._places)
            self._places[key] = place
            places.append(place)
        self._grow(max(places) + 1)
        for kind in self._spec.data_types:
            getattr(self.frames, kind)[places] = getattr(fresh, kind)
        self.stamps[places] = self._drawn + np.arange(len(places))
        self._drawn += len(places)

    def _grow(self, size: int) -> None:
        if size <= len(self.stamps):
            return
        count = len(self.stamps)
        size = min(self._most, max(size, 2 * count))
        old, self.frames = self.frames, CameraFrames.empty(self._spec, size)
        for kind in self._spec.data_types:
            getattr(self.frames, kind)[:count] = getattr(old, kind)
        self.stamps = np.concatenate([self.stamps, np.full(size - count, -1)])
