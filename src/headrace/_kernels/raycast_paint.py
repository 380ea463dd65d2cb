"""From depths and geoms of a line to its colors: normals and base colors by runs, light for all, textures by runs."""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import inline, kernel
from headrace._kernels.raycast_place import RaycastScratch, is_ball
from headrace._kernels.raycast_scene import (
    CAPSULE,
    F32,
    F64,
    I32,
    PLANE,
    TEXTURE_CUBE,
    U8,
    U64,
    RaycastFrame,
    RaycastScene,
)
from headrace._kernels.raycast_shade import blend_colors, illuminate, normals, write_colors
from headrace._kernels.raycast_texture import multiply_texture_2d, multiply_texture_cube

_ZERO = np.float32(0)
_ONE = np.float32(1)


@inline
def find_normals(scene: RaycastScene, scratch: RaycastScratch, z: F32) -> None:
    """Normals of a line into rows 0–2 of work, run by run."""
    ids, xs, work = scratch.ids, scratch.xs, scratch.work
    at, width = 0, ids.shape[0]
    while at < width:
        g = ids[at]
        end = at + 1
        while end < width and ids[end] == g:
            end += 1
        if g >= 0:
            nx, ny, nz = work[0, at:end], work[1, at:end], work[2, at:end]
            ray, size, axes = scratch.line[g], scratch.sizes[g], scratch.axes[g]
            normals(int(scene.geom_types[g]), z[at:end], xs[at:end], ray, size, axes, nx, ny, nz)
        at = end


@inline
def paint_line(
    scene: RaycastScene,
    scratch: RaycastScratch,
    frame: RaycastFrame,
    cam: F64,
    rgba: F32,
    diffuse: F32,
    y: int,
    z: F32,
    alpha: np.float32,
    out: U8,
) -> None:
    """Colors of line y into ``out`` uint8 (W, 3), from its depths, geoms and normals.

    An alpha below 1 blends over what is there, and leaves pixels without a geom alone.
    """
    ids, xs, work = scratch.ids, scratch.xs, scratch.work
    red, green, blue = work[6], work[7], work[8]
    step_x = np.float32((frame.right - frame.left) / frame.width)
    first_x = np.float32(frame.left + 0.5 * (frame.right - frame.left) / frame.width)
    at_y = np.float32(frame.top - (y + 0.5) * (frame.top - frame.bottom) / frame.height)
    ambient_r, ambient_g, ambient_b = scratch.ambient[0], scratch.ambient[1], scratch.ambient[2]
    at, width = 0, ids.shape[0]
    # light falls on geoms: nothing left of the first or right of the last one on the line is lit
    first, last = 0, width
    while first < width and ids[first] < 0:
        first += 1
    while last > first and ids[last - 1] < 0:
        last -= 1
    for k in range(first, last):
        red[k], green[k], blue[k] = ambient_r, ambient_g, ambient_b
    if first < last:
        lit = work[:, first:last]
        illuminate(scene, scratch.lights, diffuse, z[first:last], xs[first:last], first_x, step_x, at_y, lit)
    veil = alpha < _ONE
    while at < width:
        g = ids[at]
        end = at + 1
        while end < width and ids[end] == g:
            end += 1
        r, gr, b = red[at:end], green[at:end], blue[at:end]
        if g >= 0:
            tint_r, tint_g, tint_b, glow = rgba[g, 0], rgba[g, 1], rgba[g, 2], scene.geom_emission[g]
            for k in range(end - at):
                r[k], gr[k], b[k] = (r[k] + glow) * tint_r, (gr[k] + glow) * tint_g, (b[k] + glow) * tint_b
            texture = scene.geom_texture[g]
            infinite = scene.geom_types[g] == PLANE and scratch.sizes[g, 0] <= _ZERO and scratch.sizes[g, 1] <= _ZERO
            if texture >= 0:
                _apply_texture(
                    int(scene.geom_types[g]),
                    scene.geom_texture_scale[g],
                    scene.texture_kinds[texture] == TEXTURE_CUBE,
                    z[at:end],
                    xs[at:end],
                    at,
                    scratch.line[g],
                    scratch.sizes[g],
                    work,
                    scene.texels,
                    scene.levels[texture],
                    scratch.corners,
                    scratch.packed,
                )
            if infinite and scene.sky >= 0:
                _fade_into_haze(r, gr, b, z[at:end], xs[at:end], scratch.line[g], scene.haze)
            if veil:
                blend_colors(out[at:end], r, gr, b, alpha)
        elif not veil and scene.sky >= 0:
            _sky(
                cam,
                first_x,
                step_x,
                at_y,
                xs[at:end],
                at,
                work,
                scene.texels,
                scene.levels[scene.sky],
                scratch.corners,
                scratch.packed,
            )
        elif not veil:
            r[:] = _ZERO
            gr[:] = _ZERO
            b[:] = _ZERO
        at = end
    if not veil:
        write_colors(out, red, green, blue)


@kernel(checked_division=False)
def _texture_footprint(
    kind: int, z: F32, xs: F32, ray: F32, scale_u: np.float32, scale_v: np.float32, rho2: F32
) -> None:
    """Squared texels that a pixel spans, along whichever of its sides is longer.

    Exact on a plane; elsewhere as if the surface faced the camera.
    """
    tilt = _ONE if kind == PLANE else _ZERO
    # locals, since stores to rho2 might otherwise change what ray holds and the loop would not be vectorized
    dx0, dy0, dz0, dxs, dys, dzs = ray[3], ray[4], ray[5], ray[6], ray[7], ray[8]
    dxy, dyy, dzy = ray[15], ray[16], ray[17]
    for k in range(z.shape[0]):
        t, x = z[k], xs[k]
        slope = tilt / (dz0 + x * dzs)
        dx, dy = dx0 + x * dxs, dy0 + x * dys
        along_x, along_y = dzs * slope, dzy * slope
        ux = scale_u * t * (dxs - dx * along_x)
        vx = scale_v * t * (dys - dy * along_x)
        uy = scale_u * t * (dxy - dx * along_y)
        vy = scale_v * t * (dyy - dy * along_y)
        rho2[k] = max(ux * ux + vx * vx, uy * uy + vy * vy)


@kernel(checked_division=False)
def _apply_texture(
    kind: int,
    scale: F32,
    cube: bool,
    z: F32,
    xs: F32,
    at: int,
    ray: F32,
    size: F32,
    work: F32,
    texels: U64,
    levels: I32,
    corners: I32,
    packed: U64,
) -> None:
    """Multiply the colors of a run that begins in column ``at`` by the geom's texture; its normals are used up."""
    n = z.shape[0]
    u, v, w, rho2 = work[0, at : at + n], work[1, at : at + n], work[2, at : at + n], work[9, at : at + n]
    red, green, blue = work[6, at : at + n], work[7, at : at + n], work[8, at : at + n]
    by_u, by_v, by_w = scale[0], scale[1], scale[2]
    ox, oy, oz = ray[0], ray[1], ray[2]
    dx, dy, dz, sx, sy, sz = ray[3], ray[4], ray[5], ray[6], ray[7], ray[8]
    if is_ball(kind):
        # its ray is in units of its size
        by_u, by_v, by_w = by_u * size[0], by_v * size[1], by_w * size[2]
    if cube:
        widest = np.float32(0.5) * np.float32(levels[0, 1]) * max(by_u, max(by_v, by_w)) * (abs(sx) + abs(sy) + abs(sz))
        for k in range(n):
            t, x = z[k], xs[k]
            rho2[k] = (widest * t) * (widest * t)
            u[k] = by_u * (ox + t * (dx + x * sx))
            v[k] = by_v * (oy + t * (dy + x * sy))
            w[k] = by_w * (oz + t * (dz + x * sz))
        if kind == CAPSULE:
            # the caps go on beyond the ends of the tube, in units of the radius
            reach = by_w * size[1]
            per_cap = size[1] / size[0]
            for k in range(n):
                beyond = abs(w[k]) - reach
                end = reach + per_cap * beyond
                w[k] = w[k] if beyond <= _ZERO else (end if w[k] > _ZERO else -end)
        multiply_texture_cube(red, green, blue, u, v, w, rho2, texels, levels, corners, packed)
    else:
        from_u, from_v = scale[3], scale[4]
        for k in range(n):
            t, x = z[k], xs[k]
            u[k] = from_u + by_u * (ox + t * (dx + x * sx))
            v[k] = from_v - by_v * (oy + t * (dy + x * sy))
        _texture_footprint(kind, z, xs, ray, by_u * np.float32(levels[0, 1]), by_v * np.float32(levels[0, 2]), rho2)
        multiply_texture_2d(red, green, blue, u, v, rho2, texels, levels, corners, packed)


@kernel(checked_division=False)
def _fade_into_haze(red: F32, green: F32, blue: F32, z: F32, xs: F32, ray: F32, haze: F32) -> None:
    """Blend an infinite plane into the haze with the distance from the foot of the camera."""
    dx, dy, sx, sy = ray[3], ray[4], ray[6], ray[7]
    hr, hg, hb, inner = haze[0], haze[1], haze[2], haze[3]
    inv = _ONE / (haze[4] - haze[3])
    for k in range(z.shape[0]):
        a, b = z[k] * (dx + xs[k] * sx), z[k] * (dy + xs[k] * sy)
        w = min(max((np.sqrt(a * a + b * b) - inner) * inv, _ZERO), _ONE)
        red[k] += w * (hr - red[k])
        green[k] += w * (hg - green[k])
        blue[k] += w * (hb - blue[k])


@kernel(checked_division=False)
def _sky(
    cam: F64,
    first_x: np.float32,
    step_x: np.float32,
    at_y: np.float32,
    xs: F32,
    at: int,
    work: F32,
    texels: U64,
    levels: I32,
    corners: I32,
    packed: U64,
) -> None:
    """Colors of a run that begins in column ``at`` and sees the sky."""
    n = xs.shape[0]
    s, t, r, rho2 = work[0, at : at + n], work[1, at : at + n], work[2, at : at + n], work[9, at : at + n]
    red, green, blue = work[6, at : at + n], work[7, at : at + n], work[8, at : at + n]
    span = np.float32(0.5) * step_x * np.float32(levels[0, 1])
    footprint = span * span
    # MuJoCo's sky is turned by 90° about x: (s, t, r) = (x, z, −y) of the world
    base_s = np.float32(cam[0] * first_x + cam[1] * at_y - cam[2])
    base_r = np.float32(-(cam[3] * first_x + cam[4] * at_y - cam[5]))
    base_t = np.float32(cam[6] * first_x + cam[7] * at_y - cam[8])
    by_s, by_r, by_t = np.float32(cam[0] * step_x), np.float32(-cam[3] * step_x), np.float32(cam[6] * step_x)
    for k in range(n):
        x = xs[k]
        s[k], t[k], r[k] = base_s + x * by_s, base_t + x * by_t, base_r + x * by_r
        rho2[k] = footprint
        red[k], green[k], blue[k] = _ONE, _ONE, _ONE
    multiply_texture_cube(red, green, blue, s, t, r, rho2, texels, levels, corners, packed)
