"""The memory that a thread of the native camera draws with."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headrace.sim.camera._render_scene import (
    F32,
    F64,
    I32,
    RenderFrame,
    RenderPlaces,
    RenderScratch,
    RenderTriangles,
)
from headrace.sim.camera._scene import SceneLook, SceneTables
from headrace.sim.camera._soft import SoftParts
from headrace.sim.mujoco_api import Model

_CHUNK_BYTES = 1 << 19
"""Depths and ids of a chunk of rows: small enough to stay in a core's cache."""
_MOST_ROWS = 64


@dataclass(slots=True)
class Buffers:
    """What one thread needs to draw a chunk of up to ``rows`` rows. Depths outside ``lines`` are those of ``layer``."""

    rows: int
    look: SceneLook
    frame: RenderFrame
    z: F32
    ids: I32
    lines: I32
    """(rows, H, 2): the spans that the last chunk may have drawn in."""
    layer: NDArray[np.int64]
    """(rows,): stamp of the layer that each row's depths belong to; -1 for none, -2 for none yet."""
    places: RenderPlaces
    scratch: RenderScratch
    texels: tuple[NDArray[np.int32], NDArray[np.uint64]]
    """Scratch for textures."""
    triangles: RenderTriangles | None
    """Those of the scene; with soft parts, this thread's copy."""
    boxes: F64
    """(G, 6), likewise."""
    soft: SoftParts | None = None
    veil: Buffers | None = None
    """The same with depths, ids and lines of its own, for one transparent geom after the other."""
    shadow: ShadowBuffers | None = None
    mirror: MirrorBuffers | None = None

    def wear(self, look: SceneLook) -> None:
        """Draw with this look from now on."""
        if look is self.look:
            return
        self.look, self.frame = look, look.frame
        for part in (self.veil, None if self.mirror is None else self.mirror.view):
            if part is not None:
                part.wear(look)
        if self.shadow is not None:
            self.shadow.view.look = look


@dataclass(slots=True)
class ShadowBuffers:
    """What one thread needs to draw the depth maps of lights."""

    view: Buffers
    """Those of the light, whose depths are one of the maps."""
    maps: F32
    basis: F32


@dataclass(slots=True)
class MirrorBuffers:
    """What one thread needs to draw what a mirror shows."""

    view: Buffers
    """Those of the camera behind the mirror."""
    floors: F32
    """(rows, H, W): depth of the mirror in its pixels, infinite elsewhere: only what lies beyond is seen in it."""
    rgb: NDArray[np.uint8]
    """(rows, H, W, 3): the mirror image."""


def new_buffers(
    model: Model, tables: SceneTables, frame: RenderFrame, light_frame: RenderFrame, casters: int
) -> Buffers:
    """Memory for one thread that draws ``frame``, with maps of ``casters`` lights that see ``light_frame``."""
    triangles, boxes, soft = tables.triangles, tables.boxes, None
    height, width = frame.height, frame.width
    rows = max(1, min(_MOST_ROWS, _CHUNK_BYTES // (8 * height * width)))
    if tables.parts:
        # their triangles differ from row to row
        rows, boxes = 1, boxes.copy()
        triangles = copy.deepcopy(triangles)
        soft = SoftParts(model, tables.parts, tables.first_part, triangles, boxes)
    texels = np.empty((8, width), np.int32), np.empty((2, width), np.uint64)
    vertices = faces = 0
    if triangles is not None:
        vertices, faces = (int((triangles.ranges[:, k + 1] - triangles.ranges[:, k]).max()) for k in (0, 2))

    def view(frame: RenderFrame, maps: int = 0) -> Buffers:
        shape = rows, frame.height, frame.width
        return Buffers(
            rows=rows,
            look=tables.look,
            frame=frame,
            z=np.empty(shape, np.float32),
            ids=np.empty(shape, np.int32),
            lines=np.empty((*shape[:2], 2), np.int32),
            layer=np.full(rows, -2),
            places=_new_places(rows, len(tables.scene.geom_types), len(tables.scene.light_source)),
            scratch=_new_scratch(frame, vertices, faces, maps),
            texels=texels,
            triangles=triangles,
            boxes=boxes,
        )

    def veil(buffers: Buffers) -> Buffers:
        z, ids, lines = (np.empty_like(part) for part in (buffers.z, buffers.ids, buffers.lines))
        return replace(buffers, z=z, ids=ids, lines=lines)

    buffers = view(frame, casters)
    buffers.soft, buffers.veil = soft, veil(buffers)
    if casters:
        maps = np.empty((casters, rows, light_frame.width, light_frame.width), np.float32)
        buffers.shadow = ShadowBuffers(view(light_frame), maps, np.empty((rows, casters, 12), np.float32))
    if tables.mirror >= 0:
        behind, shape = view(frame), (rows, height, width)
        behind.veil = veil(behind)
        buffers.mirror = MirrorBuffers(behind, np.empty(shape, np.float32), np.empty((*shape, 3), np.uint8))
    return buffers


def _new_places(rows: int, geoms: int, lights: int) -> RenderPlaces:
    """Uninitialized memory for a chunk of rows."""
    return RenderPlaces(
        rays=np.empty((rows, geoms, 27)),
        centers=np.empty((rows, geoms, 3)),
        axes=np.empty((rows, geoms, 9), np.float32),
        bounds=np.empty((rows, geoms, 4), np.int32),
        clipped=np.empty((rows, geoms), np.int32),
        lights=np.empty((rows, lights, 6), np.float32),
        ambient=np.empty((rows, 3), np.float32),
        alpha=np.empty((rows, geoms), np.float32),
        distance=np.empty((rows, geoms)),
        order=np.empty((rows, geoms), np.int32),
        transparent=np.empty(rows, np.int32),
    )


def _new_scratch(frame: RenderFrame, vertices: int, faces: int, maps: int) -> RenderScratch:
    """Memory for one thread."""
    width = frame.width
    return RenderScratch(
        line=np.empty(24, np.float32),
        work=np.empty((11 + maps, width), np.float32),
        xs=np.arange(width, dtype=np.float32),
        vertices=np.empty((3, vertices), np.float32),
        pixels=np.empty(vertices, np.uint32),
        # one more: the list of faces is written one past its end
        faces=np.empty(faces + 1, np.uint32),
        nears=np.full(width, frame.near, np.float32),
    )
