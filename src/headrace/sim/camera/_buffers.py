"""The memory that a thread of the native camera draws with."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.sim.camera._render_scene import (
    F32,
    F64,
    I32,
    RenderFrame,
    RenderPlaces,
    RenderScratch,
    RenderTextures,
    RenderTriangles,
)
from headrace.sim.camera._scene import SceneTables
from headrace.sim.camera._soft import SoftParts
from headrace.sim.mujoco_api import Model

_CHUNK_BYTES = 1 << 19
"""Depths and ids of a chunk of rows: small enough to stay in a core's cache."""
_MOST_ROWS = 64


@dataclass(slots=True)
class Buffers:
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
    triangles: RenderTriangles | None
    """Those of the scene; with soft parts, this thread's copy."""
    boxes: F64
    """(G, 6), likewise."""
    soft: SoftParts | None
    shadow: ShadowBuffers | None
    mirror: MirrorBuffers | None


@dataclass(slots=True)
class ShadowBuffers:
    """What one thread needs to draw the depth maps of lights."""

    maps: F32
    basis: F32
    ids: I32
    places: RenderPlaces
    scratch: RenderScratch


@dataclass(slots=True)
class MirrorBuffers:
    """What one thread needs to draw what a mirror shows."""

    view: Buffers
    """Those of the camera behind the mirror, with the scratch of the one before it."""
    floors: F32
    """(rows, H, W): depth of the mirror in its pixels, infinite elsewhere: only what lies beyond is seen in it."""
    rgb: NDArray[np.uint8]
    """(rows, H, W, 3): the mirror image."""


def new_buffers(
    model: Model, tables: SceneTables, frame: RenderFrame, light_frame: RenderFrame, casters: int, mirror: bool = False
) -> Buffers:
    """Memory for one thread that draws ``frame``, with maps of ``casters`` lights that see ``light_frame``."""
    scene, triangles, boxes, soft = tables.scene, tables.triangles, tables.boxes, None
    height, width = frame.height, frame.width
    rows = max(1, min(_MOST_ROWS, _CHUNK_BYTES // (8 * height * width)))
    if tables.parts:
        # their triangles differ from row to row
        rows, boxes = 1, boxes.copy()
        triangles = copy.deepcopy(triangles)
        soft = SoftParts(model, tables.parts, tables.first_part, triangles, boxes)
    geoms, lights = len(scene.geom_types), len(scene.light_source)
    textures = tables.textures
    if textures is not None:
        scratch = np.empty((8, width), np.int32), np.empty((2, width), np.uint64)
        textures = textures._replace(corners=scratch[0], packed=scratch[1])
    vertices = faces = 0
    if triangles is not None:
        vertices, faces = (int((triangles.ranges[:, k + 1] - triangles.ranges[:, k]).max()) for k in (0, 2))
    shadow = None
    if casters:
        side = light_frame.width
        shadow = ShadowBuffers(
            maps=np.empty((casters, rows, side, side), np.float32),
            basis=np.empty((rows, casters, 12), np.float32),
            ids=np.empty((rows, side, side), np.int32),
            places=_new_places(rows, geoms, lights),
            scratch=_new_scratch(light_frame, vertices, faces, 0),
        )
    buffers = Buffers(
        rows=rows,
        z=np.empty((rows, height, width), np.float32),
        ids=np.empty((rows, height, width), np.int32),
        lines=np.empty((rows, height, 2), np.int32),
        layer=np.full(rows, -2),
        veil_z=np.empty((rows, height, width), np.float32),
        veil_ids=np.empty((rows, height, width), np.int32),
        veil_lines=np.empty((rows, height, 2), np.int32),
        places=_new_places(rows, geoms, lights),
        scratch=_new_scratch(frame, vertices, faces, casters),
        textures=textures,
        triangles=triangles,
        boxes=boxes,
        soft=soft,
        shadow=shadow,
        mirror=None,
    )
    if mirror:
        view = new_buffers(model, tables, frame, light_frame, 0)
        view.triangles, view.boxes = triangles, boxes
        shape = (rows, height, width)
        buffers.mirror = MirrorBuffers(view, np.empty(shape, np.float32), np.empty((*shape, 3), np.uint8))
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
