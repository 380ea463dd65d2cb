"""Colours of a run of pixels that see the same geom, or none: surface, light, texture, haze, sky."""

from __future__ import annotations

import numpy as np

from headrace.kernels.compiled import kernel
from headrace.kernels.raycast_place import is_ball
from headrace.kernels.raycast_scene import CAPSULE, F32, F64, I32, PLANE, TEXTURE_CUBE, U64, RaycastFrame, RaycastScene
from headrace.kernels.raycast_shade import fade_into_haze, illuminate, surface
from headrace.kernels.raycast_texture import multiply_texture_2d, multiply_texture_cube


@kernel(checked_division=False)
def _texture_footprint(
    kind: int, z: F32, xs: F32, ray: F32, scale_u: np.float32, scale_v: np.float32, rho2: F32
) -> None:
    """Squared texels that a pixel spans, along whichever of its sides is longer.

    Exact on a plane; elsewhere as if the surface faced the camera.
    """
    tilt = np.float32(1) if kind == PLANE else np.float32(0)
    # locals, since stores to rho2 might otherwise change what ray holds and the loop would not be vectorised
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
    scene: RaycastScene, g: int, z: F32, xs: F32, ray: F32, size: F32, work: F32, index: I32, packed: U64
) -> None:
    texture = scene.geom_texture[g]
    scale = scene.geom_texture_scale[g]
    levels = scene.levels[texture]
    kind = scene.geom_types[g]
    n = z.shape[0]
    px, py, pz = work[3, :n], work[4, :n], work[5, :n]
    u, v, w, rho2 = work[0, :n], work[1, :n], work[2, :n], work[9, :n]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    by_u, by_v, by_w = scale[0], scale[1], scale[2]
    if scene.texture_kinds[texture] == TEXTURE_CUBE:
        widest = np.float32(0.5) * np.float32(levels[0, 1]) * max(by_u, max(by_v, by_w))
        # a direction on a cube whose faces are one unit away; the ball's ray is in units of its size
        unit = size[0] if is_ball(kind) else np.float32(1)
        widest *= unit * (abs(ray[6]) + abs(ray[7]) + abs(ray[8]))
        for k in range(n):
            rho2[k] = (widest * z[k]) * (widest * z[k])
            u[k], v[k], w[k] = by_u * px[k], by_v * py[k], by_w * pz[k]
        if kind == CAPSULE:
            h, reach = size[1], by_w * size[1]
            per_cap = reach / size[0]
            for k in range(n):
                beyond = abs(pz[k]) - h
                end = reach + per_cap * beyond
                w[k] = w[k] if beyond <= np.float32(0) else (end if pz[k] > np.float32(0) else -end)
        multiply_texture_cube(red, green, blue, u, v, w, rho2, scene.texels, levels, index, packed)
    else:
        fu, fv = by_u * np.float32(levels[0, 1]), by_v * np.float32(levels[0, 2])
        if is_ball(kind):
            fu, fv = fu * size[0], fv * size[1]
        _texture_footprint(kind, z, xs, ray, fu, fv, rho2)
        from_u, from_v = scale[3], scale[4]
        for k in range(n):
            u[k], v[k] = from_u + by_u * px[k], from_v - by_v * py[k]
        multiply_texture_2d(red, green, blue, u, v, rho2, scene.texels, levels, index, packed)


@kernel(checked_division=False)
def shade(
    scene: RaycastScene,
    g: int,
    rgba: F32,
    diffuse: F32,
    lights: F32,
    z: F32,
    xs: F32,
    ray: F32,
    size: F32,
    work: F32,
    index: I32,
    packed: U64,
) -> None:
    """Colours of a run of pixels that see geom g, into rows 6–8 of work."""
    surface(scene.geom_types[g], z, xs, ray, size, work)
    paint(scene, g, rgba, diffuse, lights, z, xs, ray, size, work, index, packed)


@kernel(checked_division=False)
def paint(
    scene: RaycastScene,
    g: int,
    rgba: F32,
    diffuse: F32,
    lights: F32,
    z: F32,
    xs: F32,
    ray: F32,
    size: F32,
    work: F32,
    index: I32,
    packed: U64,
) -> None:
    """Colours of a run whose normals and points are in rows 0–5 of work, into rows 6–8."""
    kind = scene.geom_types[g]
    illuminate(
        z.shape[0],
        work,
        rgba[g],
        scene.geom_emission[g],
        scene.global_ambient,
        scene.light_types,
        lights[g],
        scene.light_ambient,
        diffuse,
        scene.light_shape,
    )
    if scene.geom_texture[g] >= 0:
        _apply_texture(scene, g, z, xs, ray, size, work, index, packed)
    if kind == PLANE and scene.sky >= 0 and size[0] <= np.float32(0) and size[1] <= np.float32(0):
        fade_into_haze(z.shape[0], work, scene.haze, ray[0], ray[1])


@kernel(checked_division=False)
def shade_sky(
    scene: RaycastScene, cam: F64, frame: RaycastFrame, y: int, xs: F32, work: F32, index: I32, packed: U64
) -> None:
    """Colours of a run of pixels that see no geom."""
    n = xs.shape[0]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    if scene.sky < 0:
        red[:] = np.float32(0)
        green[:] = np.float32(0)
        blue[:] = np.float32(0)
        return
    step_x = (frame.right - frame.left) / frame.width
    first_x = frame.left + 0.5 * step_x
    at_y = frame.top - (y + 0.5) * (frame.top - frame.bottom) / frame.height
    levels = scene.levels[scene.sky]
    span = np.float32(0.5 * step_x * levels[0, 1])
    # MuJoCo's sky is turned by 90° about x: (s, t, r) = (x, z, −y) of the world
    base_s = np.float32(cam[0] * first_x + cam[1] * at_y - cam[2])
    base_r = np.float32(-(cam[3] * first_x + cam[4] * at_y - cam[5]))
    base_t = np.float32(cam[6] * first_x + cam[7] * at_y - cam[8])
    by_s, by_r, by_t = np.float32(cam[0] * step_x), np.float32(-cam[3] * step_x), np.float32(cam[6] * step_x)
    s, t, r, rho2 = work[0, :n], work[1, :n], work[2, :n], work[9, :n]
    for k in range(n):
        x = xs[k]
        s[k], t[k], r[k] = base_s + x * by_s, base_t + x * by_t, base_r + x * by_r
        rho2[k] = span * span
        red[k], green[k], blue[k] = np.float32(1), np.float32(1), np.float32(1)
    multiply_texture_cube(red, green, blue, s, t, r, rho2, scene.texels, levels, index, packed)
