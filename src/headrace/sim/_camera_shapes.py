"""Meshes and height fields of a model as triangles, the way MuJoCo's renderer draws them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.render_scene import F32, F64, HFIELD, I32, RenderTriangles

_CREASE = 0.8
"""Where a corner's normal leans further from the face than this cosine, MuJoCo uses the face's own."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One mesh or height field in the frame of its geom."""

    vertices: F32
    """(V, 3)."""
    faces: I32
    """(F, 3): corners, counterclockwise from outside."""
    normals: F32
    """(F, 3, 3): of each corner."""
    texcoords: F32 | None
    """(F, 3, 2), or None."""

    @property
    def box(self) -> F64:
        """(6,): center and half sizes of the bounding box."""
        low, high = self.vertices.min(0).astype(np.float64), self.vertices.max(0).astype(np.float64)
        return np.concatenate([(low + high) / 2, (high - low) / 2])


def shape_of(raw: Any, geom: int) -> Shape | None:
    """The shape of a geom of the model; None for primitives and for meshes without faces."""
    number = int(raw.geom_dataid[geom])
    if number < 0:
        return None
    shape = _height_field(raw, number) if raw.geom_type[geom] == HFIELD else _mesh(raw, number)
    return shape if len(shape.faces) else None


def build_triangles(shapes: list[Shape]) -> RenderTriangles | None:
    """All shapes in one table; None where there are none."""
    if not shapes:
        return None
    ranges = np.zeros((len(shapes), 4), np.int32)
    first_texcoord = np.full(len(shapes), -1, np.int32)
    vertex = face = texcoord = 0
    for k, shape in enumerate(shapes):
        ranges[k] = vertex, vertex + len(shape.vertices), face, face + len(shape.faces)
        vertex, face = int(ranges[k, 1]), int(ranges[k, 3])
        if shape.texcoords is not None:
            first_texcoord[k] = texcoord
            texcoord += len(shape.faces)
    tables = [_face_tables(shape) for shape in shapes]
    coordinates = [shape.texcoords for shape in shapes if shape.texcoords is not None]
    at = np.concatenate([np.zeros((0, 3, 2), np.float32), *coordinates])
    return RenderTriangles(
        ranges=ranges,
        vertices=np.ascontiguousarray(np.concatenate([shape.vertices for shape in shapes]).T),
        corners=np.ascontiguousarray(np.concatenate([shape.faces for shape in shapes]).T.astype(np.uint32)),
        planes=np.ascontiguousarray(np.concatenate([planes for planes, _ in tables]).T.astype(np.float32)),
        normals=np.concatenate([normals for _, normals in tables]).astype(np.float32),
        texcoords=np.concatenate([at[:, 0], at[:, 1] - at[:, 0], at[:, 2] - at[:, 0]], 1),
        first_texcoord=first_texcoord,
    )


def _face_tables(shape: Shape) -> tuple[F64, F64]:
    """Planes (F, 4) and rows of ``RenderTriangles.normals`` (F, 17)."""
    a, b, c = (shape.vertices[shape.faces[:, k]].astype(np.float64) for k in range(3))
    across = np.cross(b - a, c - a)
    length = np.linalg.norm(across, axis=1, keepdims=True)
    # a degenerate face has no normal, looks nowhere, and is never drawn
    normal = np.divide(across, length, out=np.zeros_like(across), where=length > 0)
    planes = np.concatenate([normal, (normal * a).sum(1, keepdims=True)], 1)
    weights = [_weight(normal, a, b - a, c - a), _weight(normal, a, c - a, b - a)]
    corner = shape.normals.astype(np.float64)
    rows = [*weights, corner[:, 0], corner[:, 1] - corner[:, 0], corner[:, 2] - corner[:, 0]]
    return planes, np.concatenate(rows, 1)


def _weight(normal: F64, origin: F64, side: F64, other: F64) -> F64:
    """(F, 4): the affine function that is 0 along ``other`` and 1 at the end of ``side``."""
    gradient = np.cross(normal, other)
    reach = (gradient * side).sum(1, keepdims=True)
    gradient = np.divide(gradient, reach, out=np.zeros_like(gradient), where=reach != 0)
    return np.concatenate([gradient, -(gradient * origin).sum(1, keepdims=True)], 1)


def _unit_normals(vertices: NDArray[Any], faces: I32) -> F32:
    """(F, 3) of each face; zero for degenerate ones."""
    a, b, c = (vertices[faces[:, k]].astype(np.float64) for k in range(3))
    across = np.cross(b - a, c - a)
    length = np.linalg.norm(across, axis=1, keepdims=True)
    return np.divide(across, length, out=np.zeros_like(across), where=length > 0).astype(np.float32)


def _mesh(raw: Any, k: int) -> Shape:
    def part(name: str, kind: str) -> NDArray[Any]:
        start = getattr(raw, f"mesh_{kind}adr")[k]
        return np.array(getattr(raw, f"mesh_{name}")[start : start + getattr(raw, f"mesh_{kind}num")[k]])

    vertices, faces = part("vert", "vert").astype(np.float32), part("face", "face").astype(np.int32)
    normals = part("normal", "normal")[part("facenormal", "face")].astype(np.float32)
    texcoords = None
    if raw.mesh_texcoordadr[k] >= 0:
        texcoords = part("texcoord", "texcoord")[part("facetexcoord", "face")].astype(np.float32)
    else:
        own = _unit_normals(vertices, faces)
        lean = (normals * own[:, None]).sum(-1, keepdims=True)
        normals = np.where(lean < _CREASE, own[:, None], normals)
    return Shape(vertices, faces, normals, texcoords)


def _height_field(raw: Any, k: int) -> Shape:
    lines, columns, start = int(raw.hfield_nrow[k]), int(raw.hfield_ncol[k]), int(raw.hfield_adr[k])
    half_x, half_y, top, base = (float(size) for size in raw.hfield_size[k])
    heights = np.array(raw.hfield_data[start : start + lines * columns], np.float64).reshape(lines, columns) * top
    y, x = np.meshgrid(np.linspace(-half_y, half_y, lines), np.linspace(-half_x, half_x, columns), indexing="ij")
    upper = np.stack([x, y, heights], -1)
    lower = np.stack([x, y, np.full_like(x, -base)], -1)
    index = np.arange(lines * columns).reshape(lines, columns)
    # two triangles per cell, cut along the diagonal that MuJoCo cuts along
    a, b, c, d = (part.ravel() for part in (index[:-1, :-1], index[:-1, 1:], index[1:, 1:], index[1:, :-1]))
    vertices, faces = [upper.reshape(-1, 3)], [np.stack([d, a, c], 1), np.stack([a, b, c], 1)]
    sides = [np.s_[::-1, 0], np.s_[:, -1], np.s_[0, :], np.s_[-1, ::-1]]
    quads = [(lower[side], upper[side]) for side in sides]
    # the bottom, seen from below
    quads.append((lower[-1:, [0, -1]][0], lower[:1, [0, -1]][0]))
    for low, high in quads:
        first, n = sum(map(len, vertices)), len(low)
        vertices += [low, high]
        at = first + np.arange(n - 1)
        faces += [np.stack([at, at + 1, at + n + 1], 1), np.stack([at, at + n + 1, at + n], 1)]
    points = np.concatenate(vertices).astype(np.float32)
    corners = np.concatenate(faces).astype(np.int32)
    return Shape(points, corners, np.repeat(_unit_normals(points, corners)[:, None], 3, 1), None)
