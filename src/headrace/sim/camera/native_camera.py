"""The camera that needs nothing but pip: a depth buffer on the CPU, exact rays for primitives, triangles for meshes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.threads import run
from headrace.errors import ConfigError, LifecycleError
from headrace.sim.camera._buffers import Buffers, MirrorBuffers, ShadowBuffers, new_buffers
from headrace.sim.camera._render_light import copy_depth, copy_segmentation, find_normals, to_gray
from headrace.sim.camera._render_scene import (
    BOX,
    F32,
    F64,
    I32,
    OPAQUE,
    RenderRows,
    ShadowMaps,
)
from headrace.sim.camera._render_stages import cast_primitives, find_lines, find_mirror, paint, place, restore
from headrace.sim.camera._render_triangles import cast_triangles
from headrace.sim.camera._scene import (
    SceneLook,
    build_light_frame,
    build_look,
    build_row_frame,
    build_tables,
    camera_moves,
)
from headrace.sim.camera.camera import (
    CameraFrames,
    CameraSpec,
    DataType,
    FreeView,
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

    Attributes:
        free: where the free camera is; None for cameras of the model. The next picture is drawn from what is set.
    """

    def __init__(self, model: Model, spec: CameraSpec, *, threads: int | None = None, layers: bool = True) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads: expected at least 1, or None for all cores, got {threads}")
        self.spec = spec
        self.model = model
        self._camera = camera_id(model, spec.name)
        self.free = FreeView.around(model) if self._camera < 0 else None
        self._threads = threads
        self._uses_layers = layers
        # memory and layers are kept between calls: one at a time
        self._lock = threading.Lock()
        self._closed = False
        self._watch = ModelWatch(model)
        self._retextured = False
        """Whether rows may wear any texture of the model."""
        self._read_model()

    def _read_model(self) -> None:
        """Build everything that follows from the model."""
        model, spec = self.model, self.spec
        self._tables = tables = build_tables(model, spec, every_texture=self._retextured)
        self._frame, self._scene, self._casters = tables.look.frame, tables.scene, tables.casters
        self._light_frame = build_light_frame(model, self._frame)
        # of rows with model fields of their own
        self._looks: OrderedDict[bytes, SceneLook] = OrderedDict()
        self._has_primitives = bool((tables.scene.geom_shapes < 0).any())
        self._no_depths = np.empty((0, spec.height, spec.width), np.float32)
        # one set of memory for each thread that draws at the same time
        self._idle: list[Buffers] = []
        # moving shadows fall on what does not move
        still = not (camera_moves(model, spec.name) or tables.lights_move or self._casters)
        self._fade = np.array([tables.reflectance] * 3 + [1], np.float32)
        has_sky = tables.textures is not None and tables.textures.sky >= 0
        kept = self._uses_layers and still and (tables.static or has_sky)
        self._layers = StaticLayers(spec, tables.static) if kept else None

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
            retextured = self._retextured or not {"mat_texid", "geom_matid"}.isdisjoint(poses.looks or ())
            if self._watch.changed() or retextured != self._retextured:
                self._retextured = retextured
                self._read_model()
            looks, of_row = self._find_looks(poses)
            rows = self._rows(poses, looks, of_row)
            under = None
            if self._layers is not None:
                stills = np.stack([look.still for look in looks])[of_row]
                under = self._layers.find(rows, stills, partial(self._draw_layers, looks))
            self._draw(rows, looks, under, frames)
        return frames

    def close(self) -> None:
        """See :meth:`Camera.close`."""
        self._closed = True

    def _find_looks(self, poses: ScenePoses) -> tuple[list[SceneLook], I32]:
        """Return the looks of rows, and which one each has."""
        n, model = len(poses), self.model
        if not poses.looks:
            return [self._tables.look], np.zeros(n, np.int32)
        looks, index, of_row = list[SceneLook](), dict[bytes, int](), np.zeros(n, np.int32)
        for i in range(n):
            fields = {name: values[i] for name, values in poses.looks.items()}
            key = b"".join([name.encode() + values.tobytes() for name, values in fields.items()])
            if key not in index:
                if key not in self._looks:
                    zooms = self._camera >= 0 and not {"cam_fovy", "cam_intrinsic"}.isdisjoint(fields)
                    frame = build_row_frame(model, self.spec, fields) if zooms else self._frame
                    self._looks[key] = build_look(model, self._tables, frame, fields)
                    if len(self._looks) > _REMEMBERED:
                        self._looks.popitem(last=False)
                index[key] = len(looks)
                looks.append(self._looks[key])
            of_row[i] = index[key]
        return looks, of_row

    def _draw_layers(self, looks: list[SceneLook], rows: RenderRows, frames: CameraFrames) -> None:
        self._draw(rows, looks, None, frames, static_only=True)

    def _draw(
        self,
        rows: RenderRows,
        looks: list[SceneLook],
        under: Under | None,
        frames: CameraFrames,
        static_only: bool = False,
    ) -> None:
        """Draw rows on all threads, each over its layer."""
        few = max(1, -(-_FEW_PIXELS // (self.spec.height * self.spec.width)))
        args = rows, looks, under, frames, static_only
        run(self._draw_part, len(rows.camera_pos), *args, min_rows=few, threads=self._threads)

    def _rows(self, poses: ScenePoses, looks: list[SceneLook], of_row: I32) -> RenderRows:
        tables = self._tables
        rgba, tints = (np.stack(part) for part in zip(*[(look.rgba, look.tint) for look in looks], strict=True))
        if len(looks) > 1:
            rgba, tints = rgba[of_row], tints[of_row]
        shown = tables.poses
        diffuse, sizes = tables.diffuse, tables.sizes
        geoms = np.flatnonzero(tables.scene.geom_ids >= 0)
        ids = tables.scene.geom_ids[geoms]
        if poses.geom_rgba is not None and poses.light_diffuse is not None:
            rgba = np.repeat(rgba, len(poses) // len(rgba), 0)
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
            room = ((0, 0), (0, len(tables.shown) - tables.first_part), (0, 0))
            pos, mat = np.pad(pos, room), np.pad(mat, room)
            rgba = np.repeat(rgba, len(poses) // len(rgba), 0)
            sizes = np.repeat(sizes, len(poses) // len(sizes), 0)
        if self.free is None:
            eye, axes = poses.camera_pos[:, self._camera], poses.camera_mat[:, self._camera]
        else:
            eye, axes = (np.tile(part, (len(poses), 1)) for part in self.free.pose())
        return RenderRows(
            geom_pos=np.ascontiguousarray(pos),
            geom_mat=np.ascontiguousarray(mat),
            sizes=sizes,
            camera_pos=np.ascontiguousarray(eye),
            camera_mat=np.ascontiguousarray(axes),
            light_pos=np.ascontiguousarray(poses.light_pos),
            light_dir=np.ascontiguousarray(poses.light_dir),
            rgba=rgba * tints,
            diffuse=diffuse,
            look=of_row,
            soft=np.concatenate([np.empty((len(poses), 0)), *fields], axis=1),
        )

    def _new_buffers(self) -> Buffers:
        return new_buffers(self.model, self._tables, self._frame, self._light_frame, len(self._casters))

    def _draw_part(
        self,
        start: int,
        stop: int,
        rows: RenderRows,
        looks: list[SceneLook],
        under: Under | None,
        frames: CameraFrames,
        static_only: bool,
    ) -> None:
        """Draw rows start … stop into ``frames``.

        Args:
            start: first row.
            stop: past the last row.
            rows: all rows of the call.
            looks: what rows look like.
            under: what they are drawn over; None for nothing.
            frames: what to fill.
            static_only: leave out what moves and what is transparent: to make a layer.
        """
        try:
            buffers = self._idle.pop()
        except IndexError:
            buffers = self._new_buffers()
        try:
            at = start
            while at < stop:
                # rows of one look
                same = rows.look[at : min(at + buffers.rows, stop)] == rows.look[at]
                chunk = slice(at, at + (len(same) if same.all() else int(same.argmin())))
                at = chunk.stop
                buffers.wear(looks[rows.look[chunk.start]])
                over = None if under is None else under._replace(of_row=under.of_row[chunk])
                self._draw_chunk(buffers, pick_rows(rows, chunk), over, frames.rows(chunk), static_only)
        finally:
            self._idle.append(buffers)

    def _draw_chunk(
        self, buffers: Buffers, rows: RenderRows, under: Under | None, frames: CameraFrames, static_only: bool
    ) -> None:
        n, tables, scene, frame = len(rows.camera_pos), self._tables, self._scene, buffers.frame
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
            places_of = rows.geom_pos[0], rows.geom_mat[0], rows.sizes[0], rows.rgba[0]
            buffers.soft.lay_out(rows.soft[0], buffers.look.materials, *places_of)
            rows.rgba[0, slots] *= buffers.look.tint[slots]
        self._place(buffers, rows)
        # depths of the layer where the last chunk drew; everywhere where another layer was
        lines[buffers.layer[:n] != stamps] = 0, frame.width
        buffers.layer[:n] = stamps
        restore(lines, layer, depths, np.float32(frame.far), z, ids)
        bare = layer < 0
        nothing, everything = np.zeros(n, np.int32), np.full(n, len(scene.geom_types), np.int32)
        static = np.full(n, tables.static, np.int32)
        first = np.where(bare, np.int32(0), static)
        last = static if static_only else everything
        find_lines(places.bounds, places.alpha, first, last, OPAQUE, lines)
        lines[bare] = 0, frame.width
        # what does not move comes first, as in a layer: of two surfaces at the same depth the first one is seen
        self._cast(buffers, rows, first, static, OPAQUE)
        if not static_only:
            self._cast(buffers, rows, static, everything, OPAQUE)
        transparent = 0 if static_only else int(places.transparent[:n].max(initial=0))
        if rgb is not None:
            shadows = None if buffers.shadow is None else self._shadows(buffers.shadow, rows)
            reflection = None
            if buffers.mirror is not None:
                reflection = buffers.mirror.rgb[:n]
                if not static_only:
                    self._reflect(buffers, buffers.mirror, rows)
            self._paint(buffers, rows, shadows, np.ones(n, np.float32), bare, rgb, reflection)
            for turn in range(2 * transparent):
                self._draw_veil(buffers, rows, shadows, turn, transparent, rgb, reflection)
            if frames.gray is not None:
                to_gray(rgb.reshape(-1, 3), frames.gray.reshape(-1))
        if transparent and (frames.depth is not None or frames.segmentation is not None or frames.normals is not None):
            # depth and ids see all geoms as solid
            self._cast(buffers, rows, nothing, static, _VISIBLE, OPAQUE)
            self._cast(buffers, rows, static, everything, _VISIBLE, OPAQUE)
            find_lines(places.bounds, places.alpha, nothing, everything, _VISIBLE, lines)
            lines[bare] = 0, frame.width
        if frames.depth is not None:
            copy_depth(lines, z, frames.depth)
        if frames.segmentation is not None:
            copy_segmentation(lines, ids, scene.geom_ids, scene.face_bits, bare, frames.segmentation)
        if frames.normals is not None:
            triangles, scratch = buffers.triangles, buffers.scratch
            find_normals(
                *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, rows.camera_mat),
                *(places.rays, places.axes),
                *((None, None) if triangles is None else (triangles.ranges, triangles.planes)),
                *(lines, bare, scratch.line, scratch.work, scratch.xs, z, ids, frames.normals),
            )

    def _place(self, buffers: Buffers, rows: RenderRows) -> None:
        """Compute everything about the rows relative to their cameras."""
        scene = buffers.look.scene
        place(
            *(scene.geom_types, scene.geom_shapes, buffers.boxes, scene.light_source, scene.lighting.types),
            *(scene.lighting.ambient, scene.global_ambient, rows, buffers.frame, buffers.places),
        )

    def _cast(
        self,
        buffers: Buffers,
        rows: RenderRows,
        first: I32,
        last: I32,
        alpha: np.float32,
        below: np.float32 = np.float32(np.inf),  # noqa: B008
        both_sides: bool = False,
        floors: F32 | None = None,
    ) -> None:
        """Put geoms first … last of each row into the depth buffer, those of alpha … below that lie beyond a mirror."""
        scene, places, scratch, triangles = self._scene, buffers.places, buffers.scratch, buffers.triangles
        which, into = (first, last, alpha, below), (buffers.z[: len(first)], buffers.ids[: len(first)])
        if self._has_primitives:
            cast_primitives(
                *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, places.rays, places.bounds),
                *(places.alpha, *which, floors, scratch.line, scratch.xs, scratch.nears, *into),
            )
        if triangles is not None:
            cast_triangles(
                *(scene.geom_shapes, scene.face_bits, *triangles[:4], buffers.frame, places.rays, places.centers),
                *(places.axes, places.bounds, places.clipped, places.alpha, *which, both_sides, floors),
                *(scratch.vertices, scratch.pixels, scratch.faces, *into),
            )

    def _paint(
        self,
        buffers: Buffers,
        rows: RenderRows,
        shadows: ShadowMaps | None,
        alpha: F32,
        background: Any,
        rgb: Any,
        reflection: Any = None,
    ) -> None:
        """Colors of the surfaces in the depth buffer."""
        n, places, scratch, look = len(rgb), buffers.places, buffers.scratch, buffers.look
        scene, textures, lighting = look.scene, look.textures, look.scene.lighting
        if textures is not None:
            textures = textures._replace(corners=buffers.texels[0], packed=buffers.texels[1])
        if shadows is None:
            lighting = lighting._replace(maps=np.full_like(lighting.maps, -1))
        paint(
            *(scene.geom_types, scene.geom_shapes, scene.face_bits, scene.geom_emission, lighting, buffers.frame),
            *(rows.sizes, rows.rgba, rows.diffuse, places.rays, places.axes, places.lights, places.ambient),
            *(buffers.triangles, textures, look.wraps, rows.camera_mat, shadows),
            *(scene.geom_gloss if self.spec.specular else None, self._tables.mirror, reflection),
            *(buffers.lines[:n], alpha, background, scratch.line, scratch.work, scratch.xs),
            *(buffers.z[:n], buffers.ids[:n], rgb),
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
        veil = buffers.veil
        assert veil is not None  # a camera's, and a mirror's, has one
        lines = veil.lines[:n]
        find_lines(places.bounds, places.alpha, first, last, _VISIBLE, lines)
        restore(lines, np.arange(n, dtype=np.int32), buffers.z, np.float32(0), veil.z[:n], veil.ids[:n])
        self._cast(veil, rows, first, last, _VISIBLE, floors=floors)
        alpha = np.where(there, places.alpha[np.arange(n), first], np.float32(0)).astype(np.float32)
        self._paint(veil, rows, shadows, alpha, np.zeros(n, np.bool_), rgb, reflection)

    def _reflect(self, buffers: Buffers, mirror: MirrorBuffers, rows: RenderRows) -> None:
        """Draw what the mirror shows: the scene from behind it, where and beyond it is seen, without the sky."""
        n, scene, at, view = len(rows.camera_pos), self._scene, self._tables.mirror, mirror.view
        lines, rgb = view.lines[:n], mirror.rgb[:n]
        sizes = np.broadcast_to(rows.sizes[:, at], (n, 3))
        # sums in place of matrix products, whose bits depend on the number of rows
        cam, normal = rows.camera_mat.reshape(n, 3, 3), rows.geom_mat[:, at].reshape(n, 3, 3)[:, :, 2]
        top = rows.geom_pos[:, at] + (normal * sizes[:, 2:] if scene.geom_types[at] == BOX else 0)
        above = ((rows.camera_pos - top) * normal).sum(1)
        find_mirror(
            *(at, scene.face_bits, scene.geom_types[at], above, sizes, buffers.places, buffers.z, buffers.ids),
            *(lines, mirror.floors[:n]),
        )
        turned = cam - 2 * normal[:, :, None] * (normal[:, :, None] * cam).sum(1)[:, None]
        seen = rows._replace(
            camera_pos=rows.camera_pos - 2 * above[:, None] * normal,
            camera_mat=turned.reshape(n, 9),
            rgba=rows.rgba * self._fade,
        )
        self._place(view, seen)
        # the headlight shines from the camera before the mirror
        view.places.lights[:n, scene.light_source < 0, :3] = (turned * cam[:, :, 2:]).sum(1)[:, None]
        view.places.alpha[:n, at] = 0
        bounds, frame = view.places.bounds[:n], buffers.places.bounds[:n, at, None]
        np.maximum(bounds[..., ::2], frame[..., ::2], out=bounds[..., ::2])
        np.minimum(bounds[..., 1::2], frame[..., 1::2], out=bounds[..., 1::2])
        unlaid = np.full(n, -1, np.int32)
        restore(lines, unlaid, self._no_depths, np.float32(self._frame.far), view.z[:n], view.ids[:n])
        rgb[:] = 0
        nothing, everything = np.zeros(n, np.int32), np.full(n, len(scene.geom_types), np.int32)
        self._cast(view, seen, nothing, everything, OPAQUE, floors=mirror.floors)
        self._paint(view, seen, None, np.ones(n, np.float32), np.zeros(n, np.bool_), rgb)
        transparent = int(view.places.transparent[:n].max(initial=0))
        for turn in range(2 * transparent):
            self._draw_veil(view, seen, None, turn, transparent, rgb, floors=mirror.floors)

    def _shadows(self, own: ShadowBuffers, rows: RenderRows) -> ShadowMaps:
        """Depth maps from the lights that cast shadows."""
        n, scene, frame = len(rows.camera_pos), self._scene, self._light_frame
        everything, nothing = np.full(n, len(scene.geom_types), np.int32), np.zeros(n, np.int32)
        cam = rows.camera_mat.reshape(n, 3, 3)
        for m, light in enumerate(self._casters):
            source, view = scene.light_source[light], replace(own.view, z=own.maps[m])
            pos, along = rows.light_pos[:, source], rows.light_dir[:, source]
            helper = np.where(np.abs(along[:, 2:]) < 0.9, [[0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]])
            right = np.cross(along, helper)
            right /= np.sqrt((right * right).sum(1, keepdims=True))
            up = np.cross(right, along)
            seen = rows._replace(
                camera_pos=np.ascontiguousarray(pos), camera_mat=np.stack([right, up, -along], -1).reshape(n, 9)
            )
            self._place(view, seen)
            # sites cast no shadows
            view.places.alpha[:n, scene.geom_ids < 0] = 0
            view.z[:n] = frame.far
            self._cast(view, rows, nothing, everything, _VISIBLE, both_sides=True)
            for k, axis in enumerate((right, up, along, pos - rows.camera_pos)):
                # sums in place of matrix products, whose bits depend on the number of rows
                own.basis[:n, m, 3 * k : 3 * k + 3] = (cam * axis[:, :, None]).sum(1)
        return ShadowMaps(own.maps, own.basis, np.float32(frame.right))


MOST_BYTES = 64 << 20
"""What the layers of one camera may hold; the one unused for longest makes room."""
_REMEMBERED = 4096


class Under(NamedTuple):
    """What n rows are drawn over: pictures of what never moves."""

    frames: CameraFrames
    """P of them, with depth."""
    stamps: NDArray[np.int64]
    """(P,): a number that changes when a picture is replaced."""
    of_row: I32
    """(n,): the picture under each row, or -1 for none."""


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

    def find(self, rows: RenderRows, stills: F64, draw: Callable[[RenderRows, CameraFrames], None]) -> Under | None:
        """Return the layer of each row, None where no row has one; ``draw`` makes new ones.

        ``stills`` (n, 8) are hashes of what else rows look like.
        """
        n, static = len(rows.camera_pos), self._static
        seen = (
            stills,
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
        count = len(self.stamps)
        if size > count:
            size = min(self._most, max(size, 2 * count))
            old, self.frames = self.frames, CameraFrames.empty(self._spec, size)
            for kind in self._spec.data_types:
                getattr(self.frames, kind)[:count] = getattr(old, kind)
            self.stamps = np.concatenate([self.stamps, np.full(size - count, -1)])


def pick_rows(rows: RenderRows, index: slice | NDArray[np.int64]) -> RenderRows:
    """Return some rows; what serves all serves them, too."""
    parts: list[Any] = [part[index] if len(part) > 1 else part for part in rows]
    return RenderRows(*parts)
