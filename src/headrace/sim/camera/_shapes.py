"""Meshes and height fields of a model as triangles, the way MuJoCo's renderer draws them."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace.sim.camera._render_scene import F32, F64, I32, U32, RenderTriangles

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


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ShapeSet:
    """Some meshes and height fields of a model, each once however often the model has it."""

    triangles: RenderTriangles | None
    slots: tuple[int, ...]
    """Of each shape that was asked for: its number in ``triangles``, or -1 if it has no faces."""
    boxes: F64
    """(S, 6): center and half sizes of each bounding box in the frame of the geom."""


_shared: weakref.WeakValueDictionary[bytes, ShapeSet] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def load_shapes(raw: Any, which: Sequence[tuple[bool, int]]) -> ShapeSet:
    """Return shapes of a model, (whether it is a height field, its number): another camera's if equal, or new ones."""
    sources = [_field_arrays(raw, k) if is_field else _mesh_arrays(raw, k) for is_field, k in which]
    keys = [_digest(arrays) for arrays in sources]
    with _lock:
        whole = hashlib.sha256(b"".join(keys)).digest()
        found = _shared.get(whole)
        if found is None:
            build = {key: (_height_field if which[k][0] else _mesh, sources[k]) for k, key in enumerate(keys)}
            made = {key: make(*arrays) for key, (make, arrays) in build.items()}
            places = {key: k for k, key in enumerate(key for key, shape in made.items() if len(shape.faces))}
            shapes = [made[key] for key in places]
            found = _shared[whole] = ShapeSet(
                triangles=_build_triangles(shapes),
                slots=tuple(places.get(key, -1) for key in keys),
                boxes=np.array([shape.box for shape in shapes]).reshape(-1, 6),
            )
    return found


def _digest(arrays: tuple[NDArray[Any], ...]) -> bytes:
    digest = hashlib.sha256(repr([(array.shape, str(array.dtype)) for array in arrays]).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.digest()


def _build_triangles(shapes: list[Shape]) -> RenderTriangles | None:
    """Collect shapes in one table."""
    if not shapes:
        return None
    counts = np.array([[len(shape.vertices), len(shape.faces)] for shape in shapes])
    ends = counts.cumsum(0)
    with_texcoords = np.array([0 if shape.texcoords is None else len(shape.faces) for shape in shapes])
    first_texcoord = np.where(with_texcoords > 0, with_texcoords.cumsum() - with_texcoords, -1)
    vertices = np.ascontiguousarray(np.concatenate([shape.vertices for shape in shapes]).T)
    corners = np.ascontiguousarray(np.concatenate([shape.faces for shape in shapes]).T.astype(np.uint32))
    planes, normals = np.empty((4, corners.shape[1]), np.float32), np.empty((corners.shape[1], 17), np.float32)
    for shape, (v_0, f_0), (v_1, f_1) in zip(shapes, ends - counts, ends, strict=True):
        at = vertices[:, v_0:v_1], corners[:, f_0:f_1], np.ascontiguousarray(shape.normals, np.float32)
        fill_faces(*at, planes[:, f_0:f_1], normals[f_0:f_1])
    coordinates = [shape.texcoords for shape in shapes if shape.texcoords is not None]
    at = np.concatenate([np.zeros((0, 3, 2), np.float32), *coordinates])
    return RenderTriangles(
        ranges=np.stack([ends - counts, ends], -1).reshape(-1, 4).astype(np.int32),
        vertices=vertices,
        corners=corners,
        planes=planes,
        normals=normals,
        texcoords=np.concatenate([at[:, 0], at[:, 1] - at[:, 0], at[:, 2] - at[:, 0]], 1),
        first_texcoord=first_texcoord.astype(np.int32),
    )


@kernel(checked_division=False)
def fill_faces(vertices: F32, corners: U32, normals: F32, planes: F32, rows: F32) -> None:
    """Fill ``RenderTriangles.planes`` (4, F) and ``normals`` (F, 17) of one shape.

    ``vertices`` (3, V) and ``corners`` (3, F) as there, ``normals`` (F, 3, 3) of each corner.
    """
    across, weight = np.empty(3), np.empty(3)
    sides = np.empty((2, 3))
    for f in range(corners.shape[1]):
        origin = vertices[:, corners[0, f]]
        for k in range(2):
            for a in range(3):
                sides[k, a] = np.float64(vertices[a, corners[k + 1, f]]) - origin[a]
        length = 0.0
        for a in range(3):
            b, c = (a + 1) % 3, (a + 2) % 3
            across[a] = sides[0, b] * sides[1, c] - sides[0, c] * sides[1, b]
            length += across[a] * across[a]
        # a degenerate face has no normal, looks nowhere, and is never drawn
        length = np.sqrt(length)
        distance = 0.0
        for a in range(3):
            across[a] = across[a] / length if length > 0.0 else 0.0
            planes[a, f] = across[a]
            distance += across[a] * origin[a]
        planes[3, f] = distance
        for k in range(2):
            # the affine function that is 0 along the other side and 1 at the end of this one
            reach, offset = 0.0, 0.0
            for a in range(3):
                b, c = (a + 1) % 3, (a + 2) % 3
                weight[a] = across[b] * sides[1 - k, c] - across[c] * sides[1 - k, b]
                reach += weight[a] * sides[k, a]
            for a in range(3):
                weight[a] = weight[a] / reach if reach != 0.0 else 0.0
                rows[f, 4 * k + a] = weight[a]
                offset -= weight[a] * origin[a]
            rows[f, 4 * k + 3] = offset
        for a in range(3):
            rows[f, 8 + a] = normals[f, 0, a]
            rows[f, 11 + a] = normals[f, 1, a] - normals[f, 0, a]
            rows[f, 14 + a] = normals[f, 2, a] - normals[f, 0, a]


def _unit_normals(vertices: NDArray[Any], faces: I32) -> F32:
    """(F, 3) of each face; zero for degenerate ones."""
    a, b, c = (vertices[faces[:, k]].astype(np.float64) for k in range(3))
    across = np.cross(b - a, c - a)
    length = np.linalg.norm(across, axis=1, keepdims=True)
    return np.divide(across, length, out=np.zeros_like(across), where=length > 0).astype(np.float32)


def _mesh_arrays(raw: Any, k: int) -> tuple[NDArray[Any], ...]:
    """Vertices, faces, normals, faces of normals, and texture coordinates with their faces where there are some."""
    parts = [("vert", "vert"), ("face", "face"), ("normal", "normal"), ("facenormal", "face")]
    if raw.mesh_texcoordadr[k] >= 0:
        parts += [("texcoord", "texcoord"), ("facetexcoord", "face")]
    starts = {kind: int(getattr(raw, f"mesh_{kind}adr")[k]) for _, kind in parts}
    counts = {kind: int(getattr(raw, f"mesh_{kind}num")[k]) for _, kind in parts}
    return tuple(getattr(raw, f"mesh_{name}")[starts[kind] : starts[kind] + counts[kind]] for name, kind in parts)


def _mesh(*arrays: NDArray[Any]) -> Shape:
    vertices, faces = np.array(arrays[0], np.float32), np.array(arrays[1], np.int32)
    normals = arrays[2][arrays[3]].astype(np.float32)
    if len(arrays) > 4:
        return Shape(vertices, faces, normals, arrays[4][arrays[5]].astype(np.float32))
    own = _unit_normals(vertices, faces)
    lean = (normals * own[:, None]).sum(-1, keepdims=True)
    return Shape(vertices, faces, np.where(lean < _CREASE, own[:, None], normals), None)


def _field_arrays(raw: Any, k: int) -> tuple[NDArray[Any], ...]:
    """Heights in 0 … 1, (lines, columns), and half sizes, top and base."""
    lines, columns, start = int(raw.hfield_nrow[k]), int(raw.hfield_ncol[k]), int(raw.hfield_adr[k])
    return raw.hfield_data[start : start + lines * columns].reshape(lines, columns), raw.hfield_size[k]


def _height_field(data: NDArray[Any], size: NDArray[Any]) -> Shape:
    lines, columns = data.shape
    half_x, half_y, top, base = (float(side) for side in size)
    heights = np.array(data, np.float64) * top
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
