"""Drives the camera's kernels over rows of poses, a chunk at a time, on whichever thread calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.ahead import KernelCall, compile_ahead
from headrace._kernels.render_frames import copy_depth, copy_segmentation, find_normals, to_gray
from headrace._kernels.render_scene import (
    F32,
    I32,
    OPAQUE,
    PLANE,
    TEXTURE_2D,
    WRAPS_PRIMITIVE,
    WRAPS_SHAPE,
    RenderFrame,
    RenderPlaces,
    RenderRows,
    RenderScratch,
    RenderTextures,
    ShadowMaps,
    new_places,
    new_scratch,
)
from headrace._kernels.render_stages import cast_primitives, find_lines, paint, place, restore
from headrace._kernels.render_triangles import cast_triangles
from headrace.sim._camera import CameraFrames
from headrace.sim._camera_scene import SceneTables
from headrace.sim._mujoco_api import Model

_CHUNK_BYTES = 1 << 19
"""Depths and ids of a chunk of rows: small enough to stay in a core's cache."""
_MOST_ROWS = 64
_VISIBLE = np.float32(1e-6)
"""The alpha from which something is seen at all."""


class Under(NamedTuple):
    """What n rows are drawn over: pictures of what never moves."""

    frames: CameraFrames
    """P of them, with depth."""
    stamps: NDArray[np.int64]
    """(P,): a number that changes when a picture is replaced."""
    of_row: I32
    """(n,): the picture under each row, or -1 for none."""


@dataclass(slots=True)
class _Buffers:
    """What one thread needs to draw a chunk of up to ``rows`` rows. Depths outside ``lines`` are those of ``layer``."""

    rows: int
    z: F32
    ids: I32
    lines: I32
    """(rows, H, 2): the spans that the last chunk may have drawn in."""
    layer: NDArray[np.int64]
    """(rows,): stamp of the layer that each row's depths belong to; -1 for none, -2 for none yet."""
    veil_z: F32
    veil_ids: I32
    veil_lines: I32
    places: RenderPlaces
    scratch: RenderScratch
    textures: RenderTextures | None
    """Those of the scene, with this thread's scratch."""
    shadow: _ShadowBuffers | None


@dataclass(slots=True)
class _ShadowBuffers:
    maps: F32
    basis: F32
    ids: I32
    places: RenderPlaces
    scratch: RenderScratch


class Painter:
    """The stages of one camera. Keeps memory between calls, one set per thread that draws at the same time."""

    def __init__(
        self, model: Model, tables: SceneTables, frame: RenderFrame, *, specular: bool, casters: tuple[int, ...]
    ) -> None:
        self._tables = tables
        self._frame = frame
        maps = tables.scene.lighting.maps.copy()
        maps[list(casters)] = np.arange(len(casters))
        self._scene = tables.scene._replace(lighting=tables.scene.lighting._replace(maps=maps))
        self._gloss = tables.scene.geom_gloss if specular else None
        self._casters = casters
        self._light_frame = _light_frame(model, frame)
        self._has_primitives = bool((tables.scene.geom_shapes < 0).any())
        self._wraps = _wraps(tables)
        self.has_sky = tables.textures is not None and tables.textures.sky >= 0
        self._no_depths = np.empty((0, frame.height, frame.width), np.float32)
        self._idle: list[_Buffers] = []

    def prepare(self, rows: RenderRows, frames: CameraFrames) -> None:
        """Compile the large kernels that these rows need, several at a time, where that was never done."""
        buffers, frame = self._new_buffers(), self._frame
        ids, z, lines = np.zeros(1, np.int32), buffers.z[:1], buffers.lines[:1]
        bare = np.zeros(1, np.bool_)
        calls: list[KernelCall] = []
        if frames.rgb is not None or frames.gray is not None:
            rgb = np.empty((1, frame.height, frame.width, 3), np.uint8)
            shadows = None if buffers.shadow is None else self._shadow_maps(buffers.shadow)
            alpha = np.ones(1, np.float32)
            calls.append(self._paint(buffers, rows, shadows, lines, alpha, bare, z, buffers.ids[:1], rgb))
        calls += reversed(
            list(self._cast(buffers.scratch, rows, frame, buffers.places, ids, ids, OPAQUE, z, buffers.ids[:1]))
        )
        calls.append(self._place(rows, frame, buffers.places))
        if frames.normals is not None:
            calls.append(self._find_normals(buffers, rows, lines, bare, z, buffers.ids[:1], frames.normals[:1]))
        compile_ahead(calls)
        self._idle.append(buffers)

    def draw(
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
        self, buffers: _Buffers, rows: RenderRows, under: Under | None, frames: CameraFrames, static_only: bool
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
        _run(self._place(rows, frame, places))
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
        _run(*self._cast(buffers.scratch, rows, frame, places, first, static, OPAQUE, z, ids))
        if not static_only:
            _run(*self._cast(buffers.scratch, rows, frame, places, static, everything, OPAQUE, z, ids))
        transparent = 0 if static_only else int(places.transparent[:n].max(initial=0))
        if rgb is not None:
            shadows = None if buffers.shadow is None else self._shadows(buffers.shadow, rows)
            ones = np.ones(n, np.float32)
            _run(self._paint(buffers, rows, shadows, lines, ones, bare, z, ids, rgb))
            for turn in range(2 * transparent):
                self._draw_veil(buffers, rows, shadows, turn, transparent, rgb)
            if frames.gray is not None:
                to_gray(rgb.reshape(-1, 3), frames.gray.reshape(-1))
        if transparent and (frames.depth is not None or frames.segmentation is not None or frames.normals is not None):
            # depth and ids see all geoms as solid
            nothing = np.zeros(n, np.int32)
            for g_0, g_1 in ((nothing, static), (static, everything)):
                _run(*self._cast(buffers.scratch, rows, frame, places, g_0, g_1, _VISIBLE, z, ids, below=OPAQUE))
            find_lines(places.bounds, places.alpha, nothing, everything, _VISIBLE, lines)
            lines[bare] = 0, frame.width
        if frames.depth is not None:
            copy_depth(lines, z, frames.depth)
        if frames.segmentation is not None:
            copy_segmentation(lines, ids, scene.geom_ids, scene.face_bits, bare, frames.segmentation)
        if frames.normals is not None:
            _run(self._find_normals(buffers, rows, lines, bare, z, ids, frames.normals))

    def _place(self, rows: RenderRows, frame: RenderFrame, places: RenderPlaces) -> KernelCall:
        """Everything about the rows relative to their cameras."""
        scene = self._scene
        return place, (
            *(scene.geom_types, scene.geom_shapes, scene.geom_boxes, scene.light_source),
            *(scene.lighting.types, scene.lighting.ambient, scene.global_ambient, rows, frame, places),
        )

    def _cast(
        self,
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
    ) -> Iterator[KernelCall]:
        """Put geoms first … last of each row into the depth buffer, those of alpha … below."""
        scene, triangles = self._scene, self._tables.triangles
        which = (first, last, alpha, below)
        if self._has_primitives:
            yield (
                cast_primitives,
                (
                    *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, frame.near),
                    *(places.rays, places.bounds, places.alpha, *which, scratch.line, scratch.xs, z, ids),
                ),
            )
        if triangles is not None:
            yield (
                cast_triangles,
                (
                    *(scene.geom_shapes, scene.face_bits, *triangles[:4], frame, places.rays, places.centers),
                    *(places.axes, places.bounds, places.clipped, places.alpha, *which, both_sides),
                    *(scratch.vertices, scratch.pixels, scratch.faces, z, ids),
                ),
            )

    def _paint(
        self,
        buffers: _Buffers,
        rows: RenderRows,
        shadows: ShadowMaps | None,
        lines: I32,
        alpha: F32,
        background: Any,
        z: F32,
        ids: I32,
        rgb: Any,
    ) -> KernelCall:
        """Colors of the surfaces in the depth buffer."""
        scene, places, scratch = self._scene, buffers.places, buffers.scratch
        return paint, (
            *(scene.geom_types, scene.geom_shapes, scene.face_bits, scene.geom_emission, scene.lighting, self._frame),
            *(rows.sizes, rows.rgba, rows.diffuse, places.rays, places.axes, places.lights, places.ambient),
            *(self._tables.triangles, buffers.textures, self._wraps, rows.camera_mat, shadows, self._gloss),
            *(lines, alpha, background, scratch.line, scratch.work, scratch.xs, z, ids, rgb),
        )

    def _find_normals(
        self, buffers: _Buffers, rows: RenderRows, lines: I32, background: Any, z: F32, ids: I32, out: F32
    ) -> KernelCall:
        """Normals of the surfaces in the depth buffer."""
        scene, triangles, places, scratch = self._scene, self._tables.triangles, buffers.places, buffers.scratch
        return find_normals, (
            *(scene.geom_types, scene.geom_shapes, scene.face_bits, rows.sizes, rows.camera_mat),
            *(places.rays, places.axes),
            *((None, None) if triangles is None else (triangles.ranges, triangles.planes)),
            *(lines, background, scratch.line, scratch.work, scratch.xs, z, ids, out),
        )

    def _draw_veil(
        self, buffers: _Buffers, rows: RenderRows, shadows: ShadowMaps | None, turn: int, most: int, rgb: Any
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
        _run(*self._cast(buffers.scratch, rows, self._frame, places, first, last, _VISIBLE, z, ids))
        alpha = np.where(there, places.alpha[np.arange(n), first], np.float32(0)).astype(np.float32)
        _run(self._paint(buffers, rows, shadows, lines, alpha, np.zeros(n, np.bool_), z, ids, rgb))

    def _shadows(self, own: _ShadowBuffers, rows: RenderRows) -> ShadowMaps:
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
                camera_pos=np.ascontiguousarray(pos),
                camera_mat=np.stack([right, up, -along], -1).reshape(n, 9),
            )
            _run(self._place(seen, frame, own.places))
            # sites cast no shadows
            own.places.alpha[:n, scene.geom_ids < 0] = 0
            z, ids = own.maps[m, :n], own.ids[:n]
            z[:] = frame.far
            seen_by = own.scratch, rows, frame, own.places, nothing, everything, _VISIBLE, z, ids
            _run(*self._cast(*seen_by, both_sides=True))
            for k, axis in enumerate((right, up, along, pos - rows.camera_pos)):
                # sums in place of matrix products, whose bits depend on the number of rows
                own.basis[:n, m, 3 * k : 3 * k + 3] = (cam * axis[:, :, None]).sum(1)
        return self._shadow_maps(own)

    def _shadow_maps(self, own: _ShadowBuffers) -> ShadowMaps:
        return ShadowMaps(own.maps, own.basis, np.float32(self._light_frame.right))

    def _new_buffers(self) -> _Buffers:
        frame, scene, triangles = self._frame, self._scene, self._tables.triangles
        height, width = frame.height, frame.width
        rows = max(1, min(_MOST_ROWS, _CHUNK_BYTES // (8 * height * width)))
        geoms, lights = len(scene.geom_types), len(scene.light_source)
        textures = self._tables.textures
        if textures is not None:
            scratch = np.empty((8, width), np.int32), np.empty((2, width), np.uint64)
            textures = textures._replace(corners=scratch[0], packed=scratch[1])
        vertices = faces = 0
        if triangles is not None:
            vertices, faces = (int((triangles.ranges[:, k + 1] - triangles.ranges[:, k]).max()) for k in (0, 2))
        shadow = None
        if self._casters:
            side = self._light_frame.width
            shadow = _ShadowBuffers(
                maps=np.empty((len(self._casters), rows, side, side), np.float32),
                basis=np.empty((rows, len(self._casters), 12), np.float32),
                ids=np.empty((rows, side, side), np.int32),
                places=new_places(rows, geoms, lights),
                scratch=new_scratch(side, vertices, faces, 0),
            )
        return _Buffers(
            rows=rows,
            z=np.empty((rows, height, width), np.float32),
            ids=np.empty((rows, height, width), np.int32),
            lines=np.empty((rows, height, 2), np.int32),
            layer=np.full(rows, -2),
            veil_z=np.empty((rows, height, width), np.float32),
            veil_ids=np.empty((rows, height, width), np.int32),
            veil_lines=np.empty((rows, height, 2), np.int32),
            places=new_places(rows, geoms, lights),
            scratch=new_scratch(width, vertices, faces, len(self._casters)),
            textures=textures,
            shadow=shadow,
        )


def pick_rows(rows: RenderRows, index: slice | NDArray[np.int64]) -> RenderRows:
    """Some rows; what serves all serves them, too."""
    parts: list[Any] = [part[index] if len(part) > 1 else part for part in rows]
    return RenderRows(*parts)


def _run(*calls: KernelCall) -> None:
    for kernel, args in calls:
        kernel(*args)


def _wraps(tables: SceneTables) -> I32 | None:
    """(G,): how a geom that is no plane wears a 2D texture, 0 for not; None where none does."""
    textures, scene = tables.textures, tables.scene
    if textures is None:
        return None
    flat = (textures.of_geom >= 0) & (textures.kinds[textures.of_geom] == TEXTURE_2D) & (scene.geom_types != PLANE)
    wraps = np.where(flat, np.where(scene.geom_shapes < 0, WRAPS_PRIMITIVE, WRAPS_SHAPE), 0).astype(np.int32)
    return wraps if wraps.any() else None


def _light_frame(model: Model, frame: RenderFrame) -> RenderFrame:
    """What a directional light sees: MuJoCo's square around it, in a resolution that suits the picture."""
    raw: Any = model
    half = float(raw.vis.map.shadowclip * raw.stat.extent)
    side = min(max(256, 4 * max(frame.width, frame.height)), 2048)
    return frame._replace(width=side, height=side, left=-half, right=half, bottom=-half, top=half, perspective=0.0)
