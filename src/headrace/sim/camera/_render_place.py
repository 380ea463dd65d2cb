"""Geoms before a camera: the pixels that one can touch, lights, what is transparent, and exact rays for primitives.

A quadric with center c and shape matrix S (Σ sᵢ² aᵢaᵢᵀ over its axes) is touched by the plane X = u·Z through the
camera where (cₓ − u·c_z)² = Sₓₓ − 2u·Sₓ_z + u²·S_zz: the two roots are its exact extent on the picture. A disc is a
quadric with one axis of length zero, so balls, capsules (two balls) and cylinders (two discs) all use it; boxes and
the bounding boxes of shapes use their corners. Z is the depth, positive in front of the camera.

A ray is ``o + t·d`` in the frame of the geom. ``d`` is scaled so that t is the depth along the optical axis. Origin,
direction and moment ``n = o × d`` are affine in the pixel column x, so a span needs their values at x = 0 and their
steps (of a perspective camera the origin's step is zero, of an orthographic one the direction's). Silhouettes come from
the moment (disc = r²|d|² − |n|²), which keeps float32 exact enough for small, far geoms where b² − ac would cancel. All
primitives are convex, so the first entry is the only visible hit; a camera inside a geom sees through it, as with
culled back faces.

Every ``hit_`` function takes

- ``z`` float32 (k,), in and out: depth of the nearest hit so far,
- ``ids`` int32 (k,), in and out: which surface that was,
- ``xs`` float32 (k,): columns of the span,
- ``ray`` float32 (24,): see ``line_ray``,
- ``size`` float32 (3,) (balls have none: their ray is scaled), ``near`` float32 (k,) and the surface's number ``code``,

and overwrites z and ids where ``near < t ≤ z``: of two surfaces at the same depth the later one is seen, as in OpenGL.
"""

from __future__ import annotations

import math

import numpy as np

from headrace._kernels.compiled import helper
from headrace.sim.camera._render_scene import (
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    I32,
    OPAQUE,
    PLANE,
    SPHERE,
    RenderFrame,
    dot,
)

_EVERYTHING = 1e30
# a plane seen from behind keeps this much of its alpha, as in MuJoCo's renderer
_BEHIND = np.float32(0.3)


@helper
def _quadric_extent(c: float, depth: float, s_cc: float, s_cz: float, s_zz: float) -> tuple[float, float]:
    """Smallest and largest slope u = X/Z over a quadric that lies in front of the camera."""
    a = depth * depth - s_zz
    b = c * depth - s_cz
    root = math.sqrt(max(b * b - a * (c * c - s_cc), 0.0))
    return (b - root) / a, (b + root) / a


@helper
def pixel_bounds(
    kind: int, corners: bool, box: F64, size: F64, axes: F64, center: F64, frame: RenderFrame, out: I32
) -> bool:
    """Write first and past-the-last column, first and past-the-last row; equal where nothing can be seen.

    Args:
        kind: mjtGeom.
        corners: whether the bounds are those of ``box``: boxes and triangles.
        box: (6,): center and half sizes in the geom's frame.
        size: (3,) as in the model.
        axes: (3, 3): row i is axis i of the geom in camera coordinates (x right, y up, depth forward).
        center: (3,) of the geom in the same coordinates.
        frame: the frustum.
        out: int32 (4,).

    Returns:
        Whether some of it lies in front of the near plane and some behind it.
    """
    u_0, u_1, v_0, v_1 = _EVERYTHING, -_EVERYTHING, _EVERYTHING, -_EVERYTHING
    nearest, farthest = _EVERYTHING, -_EVERYTHING
    flat = frame.perspective == 0.0
    if kind == PLANE:
        nearest, farthest = -1.0, _EVERYTHING
    elif corners:
        for corner in range(8):
            a = box[0] + (box[3] if corner & 1 else -box[3])
            b = box[1] + (box[4] if corner & 2 else -box[4])
            c = box[2] + (box[5] if corner & 4 else -box[5])
            x = center[0] + dot(a, b, c, axes[0, 0], axes[1, 0], axes[2, 0])
            y = center[1] + dot(a, b, c, axes[0, 1], axes[1, 1], axes[2, 1])
            depth = center[2] + dot(a, b, c, axes[0, 2], axes[1, 2], axes[2, 2])
            nearest, farthest = min(nearest, depth), max(farthest, depth)
            scale = 1.0 if flat else 1.0 / max(depth, 1e-300)
            u_0, u_1 = min(u_0, x * scale), max(u_1, x * scale)
            v_0, v_1 = min(v_0, y * scale), max(v_1, y * scale)
    else:
        # squared half axes of each ball or disc, and how far its center lies along the geom's z axis
        s_x = size[0] * size[0]
        s_y = size[1] * size[1]
        s_z = size[2] * size[2]
        offset, pieces = 0.0, 1
        if kind == SPHERE:
            s_y = s_z = s_x
        elif kind == CAPSULE:
            s_y = s_z = s_x
            offset, pieces = size[1], 2
        elif kind == CYLINDER:
            s_y, s_z = s_x, 0.0
            offset, pieces = size[1], 2
        x_0, x_1, x_2 = axes[0, 0], axes[1, 0], axes[2, 0]
        y_0, y_1, y_2 = axes[0, 1], axes[1, 1], axes[2, 1]
        z_0, z_1, z_2 = axes[0, 2], axes[1, 2], axes[2, 2]
        xx = dot(s_x, s_y, s_z, x_0 * x_0, x_1 * x_1, x_2 * x_2)
        yy = dot(s_x, s_y, s_z, y_0 * y_0, y_1 * y_1, y_2 * y_2)
        zz = dot(s_x, s_y, s_z, z_0 * z_0, z_1 * z_1, z_2 * z_2)
        xz = dot(s_x, s_y, s_z, x_0 * z_0, x_1 * z_1, x_2 * z_2)
        yz = dot(s_x, s_y, s_z, y_0 * z_0, y_1 * z_1, y_2 * z_2)
        reach = math.sqrt(zz)
        for piece in range(pieces):
            shift = offset if piece == 0 else -offset
            x = center[0] + shift * axes[2, 0]
            y = center[1] + shift * axes[2, 1]
            depth = center[2] + shift * axes[2, 2]
            nearest, farthest = min(nearest, depth - reach), max(farthest, depth + reach)
            if flat:
                u_0, u_1 = min(u_0, x - math.sqrt(xx)), max(u_1, x + math.sqrt(xx))
                v_0, v_1 = min(v_0, y - math.sqrt(yy)), max(v_1, y + math.sqrt(yy))
            elif depth > reach:
                low, high = _quadric_extent(x, depth, xx, xz, zz)
                u_0, u_1 = min(u_0, low), max(u_1, high)
                low, high = _quadric_extent(y, depth, yy, yz, zz)
                v_0, v_1 = min(v_0, low), max(v_1, high)
    out[0], out[1], out[2], out[3] = 0, frame.width, 0, frame.height
    if not (farthest > frame.near and nearest < frame.far):
        # this is also where poses that are not numbers end
        out[1], out[3] = 0, 0
    elif kind != PLANE and (flat or nearest > 1e-9):
        per_u = frame.width / (frame.right - frame.left)
        per_v = frame.height / (frame.top - frame.bottom)
        out[0] = _clip(math.floor((u_0 - frame.left) * per_u - 0.5), frame.width)
        out[1] = _clip(math.ceil((u_1 - frame.left) * per_u - 0.5) + 1, frame.width)
        out[2] = _clip(math.floor((frame.top - v_1) * per_v - 0.5), frame.height)
        out[3] = _clip(math.ceil((frame.top - v_0) * per_v - 0.5) + 1, frame.height)
        if out[0] >= out[1] or out[2] >= out[3]:
            out[0], out[1], out[2], out[3] = 0, 0, 0, 0
    return nearest <= frame.near


@helper
def _clip(pixel: float, size: int) -> np.int32:
    # a comparison with NaN is false: never beyond the picture
    return np.int32(pixel if 0.0 < pixel < size else (0.0 if not pixel >= size else size))


@helper
def place_lights(
    sources: I32,
    types: I32,
    ambient: F32,
    global_ambient: np.float32,
    cam: F64,
    cam_pos: F64,
    light_pos: F64,
    light_dir: F64,
    out: F32,
    everywhere: F32,
) -> None:
    """Lights in camera coordinates, and what of their light falls everywhere."""
    for a in range(3):
        everywhere[a] = global_ambient
        for k in range(types.shape[0]):
            source, directional = sources[k], types[k] == DIRECTIONAL
            if directional:
                everywhere[a] += ambient[k, a]
            if source < 0:
                # the headlight shines along the optical axis
                out[k, a] = np.float32(1 if a == 2 else 0)
            else:
                pos, way = light_pos[source], light_dir[source]
                along = dot(cam[a], cam[3 + a], cam[6 + a], way[0], way[1], way[2])
                x, y, z = pos[0] - cam_pos[0], pos[1] - cam_pos[1], pos[2] - cam_pos[2]
                there = dot(cam[a], cam[3 + a], cam[6 + a], x, y, z)
                out[k, a] = np.float32(-along if directional else there)
                out[k, 3 + a] = np.float32(along)


@helper
def is_behind(axes: F32, center: F64) -> bool:
    """Return whether the camera is behind a plane: its axes and center in camera coordinates, as in RenderPlaces."""
    return center[0] * axes[6] + center[1] * axes[7] - center[2] * axes[8] > 0.0


@helper
def order_transparent(
    types: I32, sizes: F64, rgba: F32, axes: F32, centers: F64, distance: F64, alpha: F32, order: I32
) -> int:
    """Fill each geom's alpha and the transparent ones from near to far, as MuJoCo sorts them; return how many."""
    count = 0
    for g in range(alpha.shape[0]):
        alpha[g] = rgba[g, 3]
        kind = types[g]
        size = sizes[g]
        if kind == PLANE:
            distance[g] = 1e10
            if is_behind(axes[g], centers[g]):
                alpha[g] *= _BEHIND
        elif kind == SPHERE:
            distance[g] -= size[0]
        elif kind == CAPSULE:
            distance[g] -= size[0] + size[1]
        elif kind == CYLINDER:
            distance[g] -= np.sqrt(size[0] ** 2 + size[1] ** 2)
        elif kind == ELLIPSOID:
            distance[g] -= max(size[0], max(size[1], size[2]))
        else:
            distance[g] -= np.sqrt(size[0] ** 2 + size[1] ** 2 + size[2] ** 2)
        if np.float32(0) < alpha[g] < OPAQUE:
            at = count
            while at > 0 and distance[order[at - 1]] > distance[g]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = g
            count += 1
    return count


_ZERO = np.float32(0)
_ONE = np.float32(1)
_INF = np.float32(np.inf)
_PARALLEL = np.float32(1e-12)
_TINY = np.float32(1e-20)  # keeps a ray along the axis of a cylinder from dividing zero by zero


@helper
def hit_plane(z: F32, ids: I32, xs: F32, ray: F32, size: F32, near: F32, code: np.int32) -> None:
    """Intersect the plane z = 0 within ±size; a size of zero is infinite. Seen from both sides."""
    ox0, oy0, oz0, oxs, oys, ozs = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx0, dy0, dz0, dxs, dys, dzs = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    half_x = size[0] if size[0] > _ZERO else _INF
    half_y = size[1] if size[1] > _ZERO else _INF
    for k in range(z.shape[0]):
        x = xs[k]
        t = -(oz0 + x * ozs) / (dz0 + x * dzs)
        px = abs(ox0 + x * oxs + t * (dx0 + x * dxs))
        py = abs(oy0 + x * oys + t * (dy0 + x * dys))
        hit = (t > near[k]) & (t <= z[k]) & (px <= half_x) & (py <= half_y)
        z[k] = t if hit else z[k]
        ids[k] = code if hit else ids[k]


@helper
def hit_ball(z: F32, ids: I32, xs: F32, ray: F32, near: F32, code: np.int32) -> None:
    """Intersect the unit sphere: spheres and ellipsoids, with the ray in coordinates divided by their size."""
    b0 = dot(ray[0], ray[1], ray[2], ray[6], ray[7], ray[8])
    # either the origin or the direction is the same in all columns
    bs = dot(ray[0], ray[1], ray[2], ray[9], ray[10], ray[11]) + dot(ray[3], ray[4], ray[5], ray[6], ray[7], ray[8])
    dx0, dy0, dz0, dxs, dys, dzs = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    nx0, ny0, nz0, nxs, nys, nzs = ray[12], ray[13], ray[14], ray[15], ray[16], ray[17]
    for k in range(z.shape[0]):
        x = xs[k]
        dx, dy, dz = dx0 + x * dxs, dy0 + x * dys, dz0 + x * dzs
        nx, ny, nz = nx0 + x * nxs, ny0 + x * nys, nz0 + x * nzs
        a = dot(dx, dy, dz, dx, dy, dz)
        disc = a - dot(nx, ny, nz, nx, ny, nz)
        t = (-(b0 + x * bs) - np.sqrt(max(disc, _ZERO))) / a
        hit = (disc > _ZERO) & (t > near[k]) & (t <= z[k])
        z[k] = t if hit else z[k]
        ids[k] = code if hit else ids[k]


@helper
def hit_capsule(z: F32, ids: I32, xs: F32, ray: F32, size: F32, near: F32, code: np.int32) -> None:
    """Intersect a cylinder of radius size[0] and half length size[1] along z, with a sphere at each end."""
    r2, h = size[0] * size[0], size[1]
    ox0, oy0, oz0, oxs, oys, ozs = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx0, dy0, dz0, dxs, dys, dzs = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    nx0, ny0, nz0, nxs, nys, nzs = ray[12], ray[13], ray[14], ray[15], ray[16], ray[17]
    for k in range(z.shape[0]):
        x = xs[k]
        ox, oy, oz = ox0 + x * oxs, oy0 + x * oys, oz0 + x * ozs
        dx, dy, dz = dx0 + x * dxs, dy0 + x * dys, dz0 + x * dzs
        nx, ny, nz = nx0 + x * nxs, ny0 + x * nys, nz0 + x * nzs
        a2 = max(dx * dx + dy * dy, _TINY)
        a = a2 + dz * dz
        b2 = ox * dx + oy * dy
        disc = a2 * r2 - nz * nz
        t_side = (-b2 - np.sqrt(max(disc, _ZERO))) / a2
        t_side = t_side if (disc > _ZERO) & (abs(oz + t_side * dz) <= h) else _INF
        # moments about the centers of the two end spheres
        ux, uy = nx + h * dy, ny - h * dx
        lx, ly = nx - h * dy, ny + h * dx
        disc_up = a * r2 - (ux * ux + uy * uy + nz * nz)
        disc_low = a * r2 - (lx * lx + ly * ly + nz * nz)
        t_up = (-(b2 + (oz - h) * dz) - np.sqrt(max(disc_up, _ZERO))) / a
        t_low = (-(b2 + (oz + h) * dz) - np.sqrt(max(disc_low, _ZERO))) / a
        t_up = t_up if disc_up > _ZERO else _INF
        t_low = t_low if disc_low > _ZERO else _INF
        t = min(t_side, min(t_up, t_low))
        hit = (t > near[k]) & (t <= z[k])
        z[k] = t if hit else z[k]
        ids[k] = code if hit else ids[k]


@helper
def hit_cylinder(z: F32, ids: I32, xs: F32, ray: F32, size: F32, near: F32, code: np.int32) -> None:
    """Intersect a cylinder of radius size[0] and half length size[1] along z, closed."""
    r2, h = size[0] * size[0], size[1]
    ox0, oy0, oz0, oxs, oys, ozs = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx0, dy0, dz0, dxs, dys, dzs = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    nz0, nzs = ray[14], ray[17]
    for k in range(z.shape[0]):
        x = xs[k]
        ox, oy, oz = ox0 + x * oxs, oy0 + x * oys, oz0 + x * ozs
        dx, dy, dz = dx0 + x * dxs, dy0 + x * dys, dz0 + x * dzs
        moment = nz0 + x * nzs
        a2 = max(dx * dx + dy * dy, _TINY)
        b2 = ox * dx + oy * dy
        disc = a2 * r2 - moment * moment
        root = np.sqrt(max(disc, _ZERO))
        inv = _ONE / dz
        t_1, t_2 = (-h - oz) * inv, (h - oz) * inv
        # a ray along the axis never crosses the side: it is within or without
        parallel = a2 <= _PARALLEL * dz * dz
        enter = max(-_INF if parallel else (-b2 - root) / a2, min(t_1, t_2))
        leave = min(_INF if parallel else (root - b2) / a2, max(t_1, t_2))
        within = (ox * ox + oy * oy <= r2) if parallel else disc > _ZERO
        hit = within & (enter <= leave) & (enter > near[k]) & (enter <= z[k])
        z[k] = enter if hit else z[k]
        ids[k] = code if hit else ids[k]


@helper
def hit_box(z: F32, ids: I32, xs: F32, ray: F32, size: F32, near: F32, code: np.int32) -> None:
    """Intersect a box of half sizes size."""
    hx, hy, hz = size[0], size[1], size[2]
    ox0, oy0, oz0, oxs, oys, ozs = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx0, dy0, dz0, dxs, dys, dzs = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    for k in range(z.shape[0]):
        x = xs[k]
        ox, oy, oz = ox0 + x * oxs, oy0 + x * oys, oz0 + x * ozs
        ix, iy, iz = _ONE / (dx0 + x * dxs), _ONE / (dy0 + x * dys), _ONE / (dz0 + x * dzs)
        # entering |o + t·d| ≤ h: the nearer of two parallel faces is |1/d|·h before −o/d
        cx, cy, cz = -ox * ix, -oy * iy, -oz * iz
        wx, wy, wz = hx * abs(ix), hy * abs(iy), hz * abs(iz)
        enter = max(cx - wx, max(cy - wy, cz - wz))
        leave = min(cx + wx, min(cy + wy, cz + wz))
        hit = (enter <= leave) & (enter > near[k]) & (enter <= z[k])
        z[k] = enter if hit else z[k]
        ids[k] = code if hit else ids[k]
