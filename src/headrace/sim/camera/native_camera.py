"""The camera that needs nothing but pip: a depth buffer on the CPU, exact rays for primitives, triangles for meshes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from headrace._kernels.ahead import KernelCall, compile_ahead
from headrace._kernels.threads import run
from headrace.errors import ConfigError, LifecycleError
from headrace.sim.camera._buffers import Buffers, MirrorBuffers, ShadowBuffers, new_buffers
from headrace.sim.camera._layers import StaticLayers, Under, pick_rows
from headrace.sim.camera._render_frames import copy_depth, copy_segmentation, find_normals, to_gray
from headrace.sim.camera._render_scene import (
    BOX,
    F32,
    F64,
    I32,
    OPAQUE,
    RenderFrame,
    RenderPlaces,
    RenderRows,
    RenderScratch,
    RenderTriangles,
    ShadowMaps,
)
from headrace.sim.camera._render_stages import cast_primitives, find_lines, find_mirror, paint, place, restore
from headrace.sim.camera._render_triangles import cast_triangles
from headrace.sim.camera._scene import build_frame, build_light_frame, build_tables, camera_moves, find_wraps
from headrace.sim.camera.camera import (
    CameraFrames,
    CameraSpec,
    ModelWatch,
    ScenePoses,
    camera_id,
    check_poses,
    frames_for,
)
from headrace.sim.mujoco_api import Model

_FEW_PIXELS = 64 * 64
"""Waking a thread costs as much as it saves on fewer, and far more where the cores are busy."""

_VISIBLE = np.float32(1e-6)
"""The alpha from which something is seen at all."""


class NativeCamera:
    """A :class:`~headrace.sim.camera.camera.Camera` in numba, parallel over rows.

    Draws geoms and sites of the spec's groups with their materials, textures, transparency, sky and lights; shadows of
    directional lights, highlights and reflections where the spec asks for them; no antialiasing. A frame depends on
    its row of poses alone: not on the other rows, on their number, on threads or on what was drawn before.

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
        self._uses_layers = layers
        # memory and layers are kept between calls: one at a time
        self._lock = threading.Lock()
        self._closed = False
        self._watch = ModelWatch(model)
        self._read_model()

    def _read_model(self) -> None:
        """Build everything that follows from the model."""
        model, spec = self.model, self.spec
        self._tables = tables = build_tables(model, spec)
        self._frame = build_frame(model, spec)
        self._casters = tables.casters if spec.shadows else ()
        self._light_frame = build_light_frame(model, self._frame)
        maps = tables.scene.lighting.maps.copy()
        maps[list(self._casters)] = np.arange(len(self._casters))
        self._scene = tables.scene._replace(lighting=tables.scene.lighting._replace(maps=maps))
        self._gloss = tables.scene.geom_gloss if spec.specular else None
        self._has_primitives = bool((tables.scene.geom_shapes < 0).any())
        self._wraps = find_wraps(tables)
        self._no_depths = np.empty((0, spec.height, spec.width), np.float32)
        # one set of memory for each thread that draws at the same time
        self._idle: list[Buffers] = []
        # moving shadows fall on what does not move
        still = not (camera_moves(model, spec.name) or tables.lights_move or self._casters)
        self._fade = np.array([tables.reflectance] * 3 + [1], np.float32)
        has_sky = tables.textures is not None and tables.textures.sky >= 0
        kept = self._uses_layers and still and (tables.static or has_sky)
        self._layers = StaticLayers(spec, tables.static) if kept else None
        self._prepared = False

    def render(self, poses: ScenePoses, out: CameraFrames | None = None) -> CameraFrames:
        """See :meth:`Camera.render`."""
        if self._closed:
            raise LifecycleError(f"camera {self.spec.name!r} is closed; make a new one")
        check_poses(f"camera {self.spec.name!r}", self.model, poses)
        n = len(poses)
        frames = frames_for(self.spec, n, out)
        if n == 0:
            return frames
        with self._lock:
            if self._watch.changed():
                self._read_model()
            rows = self._rows(poses)
            if not self._prepared:
                self._prepare(rows, frames)
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
        run(self._draw_part, len(rows.camera_pos), *args, min_rows=few, threads=self._threads)

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
        pos = np.concatenate((poses.geom_pos, poses.site_pos), axis=1)[:, shown]
        mat = np.concatenate((poses.geom_mat, poses.site_mat), axis=1)[:, shown]
        fields = [values.reshape(len(poses), -1) for values in (poses.soft or {}).values()]
        if tables.parts:
            # each row lays out its own
            room = ((0, 0), (0, len(tables.tint) - tables.first_part), (0, 0))
            pos, mat = np.pad(pos, room), np.pad(mat, room)
            rgba = np.repeat(rgba, len(poses) // len(rgba), 0)
            sizes = np.repeat(sizes, len(poses) // len(sizes), 0)
        return RenderRows(
            geom_pos=np.ascontiguousarray(pos),
            geom_mat=np.ascontiguousarray(mat),
            sizes=sizes,
            camera_pos=np.ascontiguousarray(poses.camera_pos[:, self._camera]),
            camera_mat=np.ascontiguousarray(poses.camera_mat[:, self._camera]),
            light_pos=np.ascontiguousarray(poses.light_pos),
            light_dir=np.ascontiguousarray(poses.light_dir),
            rgba=rgba * tables.tint,
            diffuse=diffuse,
            soft=np.concatenate([np.empty((len(poses), 0)), *fields], axis=1),
        )

    def _prepare(self, rows: RenderRows, frames: CameraFrames) -> None:
        """Compile the large kernels that these rows need, several at a time, where that was never done."""
        buffers, frame = self._new_buffers(), self._frame
        ids, z, lines = np.zeros(1, np.int32), buffers.z[:1], buffers.lines[:1]
        bare = np.zeros(1, np.bool_)
        calls: list[KernelCall] = []
        if frames.rgb is not None or frames.gray is not None:
            rgb = np.empty((1, frame.height, frame.width, 3), np.uint8)
            shadows = None if buffers.shadow is None else self._shadow_maps(buffers.shadow)
            alpha = np.ones(1, np.float32)
            for mirror in (None, buffers.mirror) if buffers.mirror else (None,):
                image = None if mirror is None else mirror.rgb
                calls.append(self._paint(buffers, rows, shadows, lines, alpha, bare, z, buffers.ids[:1], rgb, image))
        for mirror in (None, buffers.mirror) if buffers.mirror else (None,):
            floors = None if mirror is None else mirror.floors
            solid = (
                buffers.triangles,
                buffers.scratch,
                rows,
                frame,
                buffers.places,
                ids,
                ids,
                OPAQUE,
                z,
                buffers.ids[:1],
            )
            calls += reversed(list(self._cast(*solid, floors=floors)))
        calls.append(self._place(rows, frame, buffers.places, buffers.boxes))
        if frames.normals is not None:
            calls.append(self._find_normals(buffers, rows, lines, bare, z, buffers.ids[:1], frames.normals[:1]))
        compile_ahead(calls)
        self._idle.append(buffers)

    def _new_buffers(self) -> Buffers:
        return new_buffers(
            self.model,
            self._tables,
            self._frame,
            self._light_frame,
            len(self._casters),
            mirror=self._tables.mirror >= 0,
        )

    def _draw_part(
        self, start: int, stop: int, rows: RenderRows, under: Under | None, frames: CameraFrames, static_only: bool
    ) -> None:
        """Draw rows start … stop into ``frames``.

        Args:
            start: first row.
            stop: past the last row.
            rows: all rows of the call.
            under: what they are drawn over; None for nothing.
            frames: what to fill.
            static_only: leave out what moves and what is transparent: to make a layer.
        """
        try:
            buffers = self._idle.pop()
        except IndexError:
            buffers = self._new_buffers()
        try:
            for at in range(start, stop, buffers.rows):
                chunk = slice(at, min(at + buffers.rows, stop))
                over = None if under is None else under._replace(of_row=under.of_row[chunk])
                self._draw_chunk(buffers, pick_rows(rows, chunk), over, frames.rows(chunk), static_only)
        finally:
            self._idle.append(buffers)

    def _draw_chunk(
        self, buffers: Buffers, rows: RenderRows, under: Under | None, frames: CameraFrames, static_only: bool
    ) -> None:
        n, tables, scene, frame = len(rows.camera_pos), self._tables, self._scene, self._frame
        places, z, ids, lines = buffers.places, buffers.z[:n], buffers.ids[:n], buffers.lines[:n]
        rgb = frames.rgb
        if rgb is None and frames.gray is not None:
            rgb = np.empty((*frames.gray.shape, 3), np.uint8)
        layer, stamps, depths = np.full(n, -1, np.int32), np.full(n, -1), self._no_depths
        if under is not None:
            layer, kept = under.of_row, under.frames
            assert kept.depth is not None  # every layer has it
            stamps, depths = np.where(layer < 0, -1, under.stamps[layer]), kept.depth
            drawn = (rgb, frames.depth, frames.segmentation, frames.normals)
            for out, laid in zip(drawn, (kept.rgb, kept.depth, kept.segmentation, kept.normals), strict=True):
                if out is not None and laid is not None:
                    # a row without a layer gets some other's, and all of it is drawn over
                    np.take(laid, layer, axis=0, out=out, mode="clip")
        if buffers.soft is not None and not static_only:
            slots = slice(tables.first_part, None)
            buffers.soft.lay_out(rows.soft[0], rows.geom_pos[0], rows.geom_mat[0], rows.sizes[0], rows.rgba[0])
            rows.rgba[0, slots] *= tables.tint[slots]
        _run(self._place(rows, frame, places, buffers.boxes))
        # depths of the layer where the last chunk drew; everywhere where another layer was
        lines[buffers.layer[:n] != stamps] = 0, frame.width
        buffers.layer[:n] = stamps
        restore(lines, layer, depths, np.float32(frame.far), z, ids)
        bare = layer < 0
        everything = np.full(n, len(scene.geom_types), np.int32)
        static = np.full(n, tables.static, np.int32)
        first = np.where(bare, np.int32(0), static)
        last = static if static_only else everything
        find_lines(places.bounds, places.alpha, first, last, OPAQUE, lines)
        lines[bare] = 0, frame.width
        # what does not move comes first, as in a layer: of two surfaces at the same depth the first one is seen
        _run(*self._cast(buffers.triangles, buffers.scratch, rows, frame, places, first, static, OPAQUE, z, ids))
        if not static_only:
            _run(
                *self._cast(buffers.triangles, buffers.scratch, rows, frame, places, static, everything, OPAQUE, z, ids)
            )
        transparent = 0 if static_only else int(places.transparent[:n].max(initial=0))
        if rgb is not None:
            shadows = None if buffers.shadow is None else self._shadows(buffers, buffers.shadow, rows)
            ones, reflection = np.ones(n, np.float32), None
            if buffers.mirror is not None:
                reflection = buffers.mirror.rgb[:n]
                if not static_only:
                    self._reflect(buffers, buffers.mirror, rows)
            _run(self._paint(buffers, rows, shadows, lines, ones, bare, z, ids, rgb, reflection))
            for turn in range(2 * transparent):
                self._draw_veil(buffers, rows, shadows, turn, transparent, rgb, reflection=reflection)
            if frames.gray is not None:
                to_gray(rgb.reshape(-1, 3), frames.gray.reshape(-1))
        if transparent and (frames.depth is not None or frames.segmentation is not None or frames.normals is not None):
            # depth and ids see all geoms as solid
            nothing = np.zeros(n, np.int32)
            for g_0, g_1 in ((nothing, static), (static, everything)):
                _run(
                    *self._cast(
                        buffers.triangles,
                        buffers.scratch,
                        rows,
                        frame,
                        places,
                        g_0,
                        g_1,
                        _VISIBLE,
                        z,
                        ids,
                        below=OPAQUE,
                    )
                )
            find_lines(places.bounds, places.alpha, nothing, everything, _VISIBLE, lines)
            lines[bare] = 0, frame.width
        if frames.depth is not None:
            copy_depth(lines, z, frames.depth)
        if frames.segmentation is not None:
            copy_segmentation(lines, ids, scene.geom_ids, scene.face_bits, bare, frames.segmentation)
        if frames.normals is not None:
            _run(self._find_normals(buffers, rows, lines, bare, z, ids, frames.normals))

    def _place(self, rows: RenderRows, frame: RenderFrame, places: RenderPlaces, boxes: F64) -> KernelCall:
        """Return everything about the rows relative to their cameras."""
        scene = self._scene
        return place, (
            *(scene.geom_types, scene.geom_shapes, boxes, scene.light_source),
            *(scene.lighting.types, scene.lighting.ambient, scene.global_ambient, rows, frame, places),
        )

    def _cast(
        self,
        triangles: RenderTriangles | None,
        scratch: RenderScratch,
        rows: RenderRows,
        frame: RenderFrame,
        places: RenderPlaces,
        first: I32,
        last: I32,
        alpha: np.float32,
        z: F32,
        ids: I32,
        below: np.float32 = np.float32(np.inf),  # noqa: B008
        both_sides: bool = False,
        floors: F32 | None = None,
    ) -> Iterator[KernelCall]:
        """Put geoms first … last of each row into the depth buffer, those of alpha … below that lie beyond a mirror."""
        scene = self._scene
        which = (first, last, alpha, below)
        if self._has_primitives:
            yield (
                cast_primitives,
                (
                    *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, places.rays),
                    *(places.bounds, places.alpha, *which, floors, scratch.line, scratch.xs, scratch.nears, z, ids),
                ),
            )
        if triangles is not None:
            yield (
                cast_triangles,
                (
                    *(scene.geom_shapes, scene.face_bits, *triangles[:4], frame, places.rays, places.centers),
                    *(places.axes, places.bounds, places.clipped, places.alpha, *which, both_sides, floors),
                    *(scratch.vertices, scratch.pixels, scratch.faces, z, ids),
                ),
            )

    def _paint(
        self,
        buffers: Buffers,
        rows: RenderRows,
        shadows: ShadowMaps | None,
        lines: I32,
        alpha: F32,
        background: Any,
        z: F32,
        ids: I32,
        rgb: Any,
        reflection: Any = None,
    ) -> KernelCall:
        """Colors of the surfaces in the depth buffer."""
        scene, places, scratch = self._scene, buffers.places, buffers.scratch
        return paint, (
            *(scene.geom_types, scene.geom_shapes, scene.face_bits, scene.geom_emission, scene.lighting, self._frame),
            *(rows.sizes, rows.rgba, rows.diffuse, places.rays, places.axes, places.lights, places.ambient),
            *(buffers.triangles, buffers.textures, self._wraps, rows.camera_mat, shadows, self._gloss),
            *(self._tables.mirror, reflection),
            *(lines, alpha, background, scratch.line, scratch.work, scratch.xs, z, ids, rgb),
        )

    def _find_normals(
        self, buffers: Buffers, rows: RenderRows, lines: I32, background: Any, z: F32, ids: I32, out: F32
    ) -> KernelCall:
        """Compute normals of the surfaces in the depth buffer."""
        scene, triangles, places, scratch = self._scene, buffers.triangles, buffers.places, buffers.scratch
        return find_normals, (
            *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, rows.camera_mat),
            *(places.rays, places.axes),
            *((None, None) if triangles is None else (triangles.ranges, triangles.planes)),
            *(lines, background, scratch.line, scratch.work, scratch.xs, z, ids, out),
        )

    def _draw_veil(
        self,
        buffers: Buffers,
        rows: RenderRows,
        shadows: ShadowMaps | None,
        turn: int,
        most: int,
        rgb: Any,
        reflection: Any = None,
        floors: F32 | None = None,
    ) -> None:
        """Blend one transparent geom per row: each from near to far and then from far to near, as MuJoCo does."""
        n, places = len(rgb), buffers.places
        count = places.transparent[:n]
        rank = turn - (most - count) if turn < most else (2 * most - 1 - turn)
        there = (rank >= 0) & (rank < count)
        g = places.order[np.arange(n), np.where(there, rank, 0)]
        first = np.where(there, g, 0).astype(np.int32)
        last = np.where(there, g + 1, 0).astype(np.int32)
        z, ids, lines = buffers.veil_z[:n], buffers.veil_ids[:n], buffers.veil_lines[:n]
        find_lines(places.bounds, places.alpha, first, last, _VISIBLE, lines)
        restore(lines, np.arange(n, dtype=np.int32), buffers.z, np.float32(0), z, ids)
        _run(
            *self._cast(
                buffers.triangles,
                buffers.scratch,
                rows,
                self._frame,
                places,
                first,
                last,
                _VISIBLE,
                z,
                ids,
                floors=floors,
            )
        )
        alpha = np.where(there, places.alpha[np.arange(n), first], np.float32(0)).astype(np.float32)
        _run(self._paint(buffers, rows, shadows, lines, alpha, np.zeros(n, np.bool_), z, ids, rgb, reflection))

    def _reflect(self, buffers: Buffers, mirror: MirrorBuffers, rows: RenderRows) -> None:
        """Draw what the mirror shows: the scene from behind it, where and beyond it is seen, without the sky."""
        n, scene, at, view = len(rows.camera_pos), self._scene, self._tables.mirror, mirror.view
        z, ids, lines, rgb = view.z[:n], view.ids[:n], view.lines[:n], mirror.rgb[:n]
        sizes = np.broadcast_to(rows.sizes[:, at], (n, 3))
        # sums in place of matrix products, whose bits depend on the number of rows
        cam, normal = rows.camera_mat.reshape(n, 3, 3), rows.geom_mat[:, at].reshape(n, 3, 3)[:, :, 2]
        top = rows.geom_pos[:, at] + (normal * sizes[:, 2:] if scene.geom_types[at] == BOX else 0)
        above = ((rows.camera_pos - top) * normal).sum(1)
        find_mirror(
            at,
            scene.face_bits,
            scene.geom_types[at],
            above,
            sizes,
            buffers.places,
            buffers.z,
            buffers.ids,
            lines,
            mirror.floors[:n],
        )
        turned = cam - 2 * normal[:, :, None] * (normal[:, :, None] * cam).sum(1)[:, None]
        seen = rows._replace(
            camera_pos=rows.camera_pos - 2 * above[:, None] * normal,
            camera_mat=turned.reshape(n, 9),
            rgba=rows.rgba * self._fade,
        )
        _run(self._place(seen, self._frame, view.places, buffers.boxes))
        # the headlight shines from the camera before the mirror
        view.places.lights[:n, scene.light_source < 0, :3] = (turned * cam[:, :, 2:]).sum(1)[:, None]
        view.places.alpha[:n, at] = 0
        bounds, frame = view.places.bounds[:n], buffers.places.bounds[:n, at, None]
        np.maximum(bounds[..., ::2], frame[..., ::2], out=bounds[..., ::2])
        np.minimum(bounds[..., 1::2], frame[..., 1::2], out=bounds[..., 1::2])
        restore(lines, np.full(n, -1, np.int32), self._no_depths, np.float32(self._frame.far), z, ids)
        rgb[:] = 0
        nothing, everything = np.zeros(n, np.int32), np.full(n, len(scene.geom_types), np.int32)
        solid = buffers.triangles, buffers.scratch, seen, self._frame, view.places, nothing, everything, OPAQUE, z, ids
        _run(*self._cast(*solid, floors=mirror.floors))
        _run(self._paint(view, seen, None, lines, np.ones(n, np.float32), np.zeros(n, np.bool_), z, ids, rgb))
        transparent = int(view.places.transparent[:n].max(initial=0))
        for turn in range(2 * transparent):
            self._draw_veil(view, seen, None, turn, transparent, rgb, floors=mirror.floors)

    def _shadows(self, buffers: Buffers, own: ShadowBuffers, rows: RenderRows) -> ShadowMaps:
        """Depth maps from the lights that cast shadows."""
        n, scene, frame = len(rows.camera_pos), self._scene, self._light_frame
        everything, nothing = np.full(n, len(scene.geom_types), np.int32), np.zeros(n, np.int32)
        cam = rows.camera_mat.reshape(n, 3, 3)
        for m, light in enumerate(self._casters):
            source = scene.light_source[light]
            pos, along = rows.light_pos[:, source], rows.light_dir[:, source]
            helper = np.where(np.abs(along[:, 2:]) < 0.9, [[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]])
            right = np.cross(along, helper)
            right /= np.sqrt((right * right).sum(1, keepdims=True))
            up = np.cross(right, along)
            seen = rows._replace(
                camera_pos=np.ascontiguousarray(pos), camera_mat=np.stack([right, up, -along], -1).reshape(n, 9)
            )
            _run(self._place(seen, frame, own.places, buffers.boxes))
            # sites cast no shadows
            own.places.alpha[:n, scene.geom_ids < 0] = 0
            z, ids = own.maps[m, :n], own.ids[:n]
            z[:] = frame.far
            seen_by = buffers.triangles, own.scratch, rows, frame, own.places, nothing, everything, _VISIBLE, z, ids
            _run(*self._cast(*seen_by, both_sides=True))
            for k, axis in enumerate((right, up, along, pos - rows.camera_pos)):
                # sums in place of matrix products, whose bits depend on the number of rows
                own.basis[:n, m, 3 * k : 3 * k + 3] = (cam * axis[:, :, None]).sum(1)
        return self._shadow_maps(own)

    def _shadow_maps(self, own: ShadowBuffers) -> ShadowMaps:
        return ShadowMaps(own.maps, own.basis, np.float32(self._light_frame.right))


def _run(*calls: KernelCall) -> None:
    for kernel, args in calls:
        kernel(*args)
