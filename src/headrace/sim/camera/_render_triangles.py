"""A rasterizer for meshes and height fields, into the same depth buffer as the primitives.

Faces are culled by their plane against the camera in the shape's frame; vertices are projected once each; a face whose
vertices all fall between the same two columns or lines of pixel centers covers none and is dropped by comparing packed
integers. What is left (some thousand of a hundred thousand faces) is filled line by line. 1/depth is linear on the
picture (depth itself if orthographic). A shape that reaches across the near plane takes a slower path that clips each
face in float64.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from headrace._kernels.compiled import helper, kernel
from headrace.sim.camera._render_scene import F32, F64, I32, U32, RenderFrame, dot

Corner: TypeAlias = tuple[float, float, float]
"""Column, line and 1/depth (depth if orthographic) of a vertex, in pixels."""
Box: TypeAlias = tuple[int, int, int, int]
"""First and last column, first and last line, both included."""

_ZERO = np.float32(0)
_ONE = np.float32(1)
_EDGE = 1e-6
"""Pixels: how far outside a face a pixel center still counts, so that no rounding opens a gap between two faces."""
_NARROW = 4
"""Columns up to which testing pixels one by one is quicker than finding each line's span."""


@helper
def _fill(
    a: Corner, b: Corner, c: Corner, box: Box, deep: bool, code: np.int32, floor: F32 | None, z: F32, ids: I32
) -> None:
    """Draw one face over the pixels of ``box``, where it lies beyond ``floor`` if there is one."""
    x_0, y_0, w_0 = a
    x_1, y_1, w_1 = b
    x_2, y_2, w_2 = c
    left, right, top, bottom = box
    ax, ay, bx, by = x_1 - x_0, y_1 - y_0, x_2 - x_0, y_2 - y_0
    area = ax * by - bx * ay
    if not area > 0.0:
        return
    inv = 1.0 / area
    w_x = ((w_1 - w_0) * by - (w_2 - w_0) * ay) * inv
    w_y = ((w_2 - w_0) * ax - (w_1 - w_0) * bx) * inv
    # a face seen edge-on has a steep slope: what lies just outside must not leave the range of its corners
    low, high = np.float32(min(w_0, min(w_1, w_2))), np.float32(max(w_0, max(w_1, w_2)))
    cx, cy = x_2 - x_1, y_2 - y_1
    if right - left < _NARROW:
        slack_0 = -_EDGE * (abs(ax) + abs(ay))
        slack_1 = -_EDGE * (abs(cx) + abs(cy))
        slack_2 = -_EDGE * (abs(bx) + abs(by))
        for y in range(top, bottom + 1):
            e_0 = ax * (y - y_0) - ay * (left - x_0)
            e_1 = cx * (y - y_1) - cy * (left - x_1)
            e_2 = by * (left - x_2) - bx * (y - y_2)
            w = w_0 + w_x * (left - x_0) + w_y * (y - y_0)
            z_line, ids_line = z[np.uint64(y)], ids[np.uint64(y)]
            for x in range(left, right + 1):
                if e_0 >= slack_0 and e_1 >= slack_1 and e_2 >= slack_2:
                    depth = min(max(np.float32(w), low), high)
                    if deep:
                        depth = _ONE / depth
                    nearer = depth <= z_line[np.uint64(x)]
                    if floor is not None:
                        nearer &= depth > floor[y, x]
                    if nearer:
                        z_line[np.uint64(x)] = depth
                        ids_line[np.uint64(x)] = code
                e_0 -= ay
                e_1 -= cy
                e_2 += by
                w += w_x
        return
    per_0, per_1, per_2 = ax / ay, cx / cy, bx / by
    slope = np.float32(w_x)
    for y in range(top, bottom + 1):
        start, end = float(left), float(right)
        # each edge bounds the line from one side; a level one decides about the whole line
        if ay < 0.0:
            start = max(start, x_0 + per_0 * (y - y_0) - _EDGE)
        elif ay > 0.0:
            end = min(end, x_0 + per_0 * (y - y_0) + _EDGE)
        elif ax * (y - y_0) < -_EDGE * abs(ax):
            continue
        if cy < 0.0:
            start = max(start, x_1 + per_1 * (y - y_1) - _EDGE)
        elif cy > 0.0:
            end = min(end, x_1 + per_1 * (y - y_1) + _EDGE)
        elif cx * (y - y_1) < -_EDGE * abs(cx):
            continue
        if by > 0.0:
            start = max(start, x_2 + per_2 * (y - y_2) - _EDGE)
        elif by < 0.0:
            end = min(end, x_2 + per_2 * (y - y_2) + _EDGE)
        elif -bx * (y - y_2) < -_EDGE * abs(bx):
            continue
        if not start <= end:
            continue
        x_a = math.ceil(start)
        count = int(end) + 1 - x_a
        if count <= 0:
            continue
        w = np.float32(w_0 + w_x * (x_a - x_0) + w_y * (y - y_0))
        z_run, ids_run = z[np.uint64(y), x_a : x_a + count], ids[np.uint64(y), x_a : x_a + count]
        for k in range(count):
            depth = min(max(w + slope * np.float32(k), low), high)
            depth = _ONE / depth if deep else depth
            nearer = depth <= z_run[k]
            if floor is not None:
                nearer &= depth > floor[y, x_a + k]
            z_run[k] = depth if nearer else z_run[k]
            ids_run[k] = code if nearer else ids_run[k]


@helper
def _clip_and_fill(
    corners: F64,
    polygon: F64,
    frame: RenderFrame,
    both_sides: bool,
    code: np.int32,
    floor: F32 | None,
    z: F32,
    ids: I32,
) -> None:
    """Draw one face of a shape that reaches across the near plane.

    ``corners`` float64 (3, 3) in camera coordinates (x right, y up, depth); ``polygon`` (4, 3) is scratch.
    """
    deep, near = frame.perspective > 0.0, frame.near
    count = 0
    for a in range(3):
        b = 0 if a == 2 else a + 1
        z_a, z_b = corners[a, 2], corners[b, 2]
        if z_a >= near:
            for k in range(3):
                polygon[count, k] = corners[a, k]
            count += 1
        if (z_a >= near) != (z_b >= near):
            t = (near - z_a) / (z_b - z_a)
            for k in range(2):
                polygon[count, k] = corners[a, k] + t * (corners[b, k] - corners[a, k])
            polygon[count, 2] = near
            count += 1
    per_x = frame.width / (frame.right - frame.left)
    per_y = frame.height / (frame.top - frame.bottom)
    for a in range(count):
        inv = 1.0 / polygon[a, 2] if deep else 1.0
        polygon[a, 0] = (polygon[a, 0] * inv - frame.left) * per_x - 0.5
        polygon[a, 1] = (frame.top - polygon[a, 1] * inv) * per_y - 0.5
        if deep:
            polygon[a, 2] = inv
    for a in range(1, count - 1):
        # counterclockwise with y up is clockwise with y down
        o = polygon[0, 0], polygon[0, 1], polygon[0, 2]
        p = polygon[a + 1, 0], polygon[a + 1, 1], polygon[a + 1, 2]
        q = polygon[a, 0], polygon[a, 1], polygon[a, 2]
        if both_sides and (p[0] - o[0]) * (q[1] - o[1]) - (q[0] - o[0]) * (p[1] - o[1]) < 0.0:
            p, q = q, p
        x_min, x_max = min(o[0], min(p[0], q[0])), max(o[0], max(p[0], q[0]))
        y_min, y_max = min(o[1], min(p[1], q[1])), max(o[1], max(p[1], q[1]))
        if not (x_max >= 0.0 and y_max >= 0.0 and x_min <= frame.width and y_min <= frame.height):
            continue
        left, right = math.ceil(max(x_min - _EDGE, 0.0)), int(min(x_max + _EDGE, frame.width - 1.0))
        top, bottom = math.ceil(max(y_min - _EDGE, 0.0)), int(min(y_max + _EDGE, frame.height - 1.0))
        _fill(o, p, q, (left, right, top, bottom), deep, code, floor, z, ids)


@helper
def _project(
    vertices: F32,
    first: int,
    axes: F32,
    center: F64,
    deep: bool,
    lens: F32,
    width: np.float32,
    height: np.float32,
    out: F32,
    pixels: U32,
) -> None:
    """Vertices first … of a shape to pixels: column, line, 1/depth, and the pixel at or after them, packed."""
    ax, ay, az = axes[0], axes[1], axes[2]
    bx, by, bz = axes[3], axes[4], axes[5]
    cx, cy, cz = axes[6], axes[7], axes[8]
    tx, ty, tz = np.float32(center[0]), np.float32(center[1]), np.float32(center[2])
    from_x, per_x, from_y, per_y = lens[0], lens[1], lens[2], lens[3]
    n = pixels.shape[0]
    px, py, pz = vertices[0, first : first + n], vertices[1, first : first + n], vertices[2, first : first + n]
    out_x, out_y, out_w = out[0], out[1], out[2]
    # a flat picture is one whose depths do not divide
    near, far = (_ONE, _ZERO) if deep else (_ZERO, _ONE)
    for k in range(n):
        depth = tz - dot(az, bz, cz, px[k], py[k], pz[k])
        inv = _ONE / (near * depth + far)
        x = from_x + per_x * inv * (dot(ax, bx, cx, px[k], py[k], pz[k]) + tx)
        y = from_y - per_y * inv * (dot(ay, by, cy, px[k], py[k], pz[k]) + ty)
        out_x[k], out_y[k], out_w[k] = x, y, near * inv + far * depth
        # comparisons with NaN are false: whatever comes, the pixel lies within the picture
        x = x if x > _ZERO else _ZERO
        x = x if x < width else width
        y = y if y > _ZERO else _ZERO
        y = y if y < height else height
        pixels[k] = np.uint32((np.int32(np.ceil(x)) << np.int32(16)) | np.int32(np.ceil(y)))


@helper
def _facing(planes: F32, first: int, last: int, q: F64, deep: bool, every: bool, out: U32) -> int:
    """Write which of faces first … last look at the camera, which is at q (or looks along q from afar); how many."""
    p_x, p_y, p_z, p_d = planes[0, first:last], planes[1, first:last], planes[2, first:last], planes[3, first:last]
    sign, scale = (_ONE, _ONE) if deep else (-_ONE, _ZERO)
    q_x, q_y, q_z = sign * np.float32(q[0]), sign * np.float32(q[1]), sign * np.float32(q[2])
    count = np.uint64(0)
    if every:
        for k in range(p_x.shape[0]):
            out[k] = np.uint32(k)
        return p_x.shape[0]
    for k in range(p_x.shape[0]):
        out[count] = np.uint32(k)
        count += np.uint64(dot(p_x[k], p_y[k], p_z[k], q_x, q_y, q_z) > p_d[k] * scale)
    return int(count)


@helper
def _draw_shape(
    corners: U32,
    f_0: int,
    f_1: int,
    projected: F32,
    pixels: U32,
    faces: U32,
    count: int,
    deep: bool,
    both: bool,
    code: np.int32,
    floor: F32 | None,
    z: F32,
    ids: I32,
) -> None:
    """Fill the ``count`` faces listed in ``faces`` of a shape, f_0 … f_1, whose vertices were projected."""
    first, second, third = corners[0, f_0:f_1], corners[1, f_0:f_1], corners[2, f_0:f_1]
    x, y, w = projected[0], projected[1], projected[2]
    left = np.uint64(0)
    for k in range(count):
        f = faces[k]
        p = pixels[first[f]]
        differs = (p ^ pixels[second[f]]) | (p ^ pixels[third[f]])
        faces[left] = f
        left += np.uint64((differs & np.uint32(0xFFFF)) != 0) & np.uint64((differs >> np.uint32(16)) != 0)
    for k in range(int(left)):
        f = faces[k]
        # counterclockwise with y up is clockwise with y down
        a, b, c = first[f], third[f], second[f]
        if both and (x[b] - x[a]) * (y[c] - y[a]) < (x[c] - x[a]) * (y[b] - y[a]):
            b, c = c, b
        p_a, p_b, p_c = int(np.int64(pixels[a])), int(np.int64(pixels[b])), int(np.int64(pixels[c]))
        x_a, x_b, x_c = p_a >> 16, p_b >> 16, p_c >> 16
        y_a, y_b, y_c = p_a & 0xFFFF, p_b & 0xFFFF, p_c & 0xFFFF
        left, right = min(x_a, min(x_b, x_c)), max(x_a, max(x_b, x_c)) - 1
        top, bottom = min(y_a, min(y_b, y_c)), max(y_a, max(y_b, y_c)) - 1
        _fill(
            (np.float64(x[a]), np.float64(y[a]), np.float64(w[a])),
            (np.float64(x[b]), np.float64(y[b]), np.float64(w[b])),
            (np.float64(x[c]), np.float64(y[c]), np.float64(w[c])),
            (left, right, top, bottom),
            deep,
            np.int32(code | np.int32(f)),
            floor,
            z,
            ids,
        )


@kernel(checked_division=False)
def cast_triangles(
    shapes: I32,
    face_bits: int,
    ranges: I32,
    vertices: F32,
    corners: U32,
    planes: F32,
    frame: RenderFrame,
    rays: F64,
    centers: F64,
    all_axes: F32,
    bounds: I32,
    clipped: I32,
    alphas: F32,
    first: I32,
    last: I32,
    alpha: np.float32,
    below: np.float32,
    both_sides: bool,
    all_floors: F32 | None,
    projected: F32,
    pixels: U32,
    faces: U32,
    z: F32,
    ids: I32,
) -> None:
    """Put the shapes among geoms first[i] … last[i] of each row i into its depth buffer, those of alpha … below.

    Arrays as in ``RenderScene``, ``RenderTriangles`` and ``RenderPlaces``, passed singly since each costs time to
    compile; ``projected``, ``pixels`` and ``faces`` are scratch. ``both_sides`` draws back faces, too (they cast
    shadows). ``all_floors`` (n, H, W) are the depths beyond which a mirror image lies: left and right are swapped.
    """
    deep = frame.perspective > 0.0
    turned = both_sides or all_floors is not None
    lens = np.empty(4, np.float32)
    lens[1] = np.float32(frame.width / (frame.right - frame.left))
    lens[3] = np.float32(frame.height / (frame.top - frame.bottom))
    lens[0] = np.float32(-frame.left * frame.width / (frame.right - frame.left) - 0.5)
    lens[2] = np.float32(frame.top * frame.height / (frame.top - frame.bottom) - 0.5)
    face, polygon = np.empty((3, 3)), np.empty((4, 3))
    for i in range(first.shape[0]):
        for g in range(first[i], last[i]):
            shape = shapes[g]
            if shape < 0 or bounds[i, g, 0] >= bounds[i, g, 1] or not alpha <= alphas[i, g] < below:
                continue
            v_0, v_1, f_0, f_1 = ranges[shape, 0], ranges[shape, 1], ranges[shape, 2], ranges[shape, 3]
            code = np.int32(g << face_bits)
            eye = rays[i, g, 0:3] if deep else rays[i, g, 9:12]
            count = _facing(planes, f_0, f_1, eye, deep, both_sides, faces)
            axes, center = all_axes[i, g], centers[i, g]
            floor = None if all_floors is None else all_floors[i]
            if clipped[i, g] == 0:
                width, height = np.float32(frame.width), np.float32(frame.height)
                places = pixels[: v_1 - v_0]
                _project(vertices, v_0, axes, center, deep, lens, width, height, projected, places)
                _draw_shape(corners, f_0, f_1, projected, places, faces, count, deep, turned, code, floor, z[i], ids[i])
                continue
            for k in range(count):
                f = faces[k]
                for c in range(3):
                    v = v_0 + corners[c, f_0 + f]
                    x, y, w = np.float64(vertices[0, v]), np.float64(vertices[1, v]), np.float64(vertices[2, v])
                    for a in range(3):
                        along = axes[a] * x + axes[3 + a] * y + axes[6 + a] * w
                        face[c, a] = center[a] - along if a == 2 else center[a] + along
                _clip_and_fill(face, polygon, frame, turned, np.int32(code | np.int32(f)), floor, z[i], ids[i])
