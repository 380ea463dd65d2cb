"""Exact rays for primitives: where the rays of one line enter one geom, a vectorized loop per primitive.

A ray is ``o + t·d`` in the frame of the geom. ``d`` is scaled so that t is the depth along the optical axis. Origin,
direction and moment ``n = o × d`` are affine in the pixel column x, so a span needs their values at x = 0 and their
steps (of a perspective camera the origin's step is zero, of an orthographic one the direction's). Silhouettes come from
the moment (disc = r²|d|² − |n|²), which keeps float32 exact enough for small, far geoms where b² − ac would cancel. All
primitives are convex, so the first entry is the only visible hit; a camera inside a geom sees through it, as with
culled back faces.

Every function takes

- ``z`` float32 (k,), in and out: depth of the nearest hit so far,
- ``ids`` int32 (k,), in and out: which surface that was,
- ``xs`` float32 (k,): columns of the span,
- ``ray`` float32 (24,): see ``line_ray``,
- ``size`` float32 (3,) (balls have none: their ray is scaled), ``near`` float32 (k,) and the surface's number ``code``,

and overwrites z and ids where ``near < t ≤ z``: of two surfaces at the same depth the later one is seen, as in OpenGL.
"""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import helper
from headrace.sim.camera._render_math import dot
from headrace.sim.camera._render_scene import F32, I32

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
