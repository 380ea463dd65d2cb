"""Texture coordinates of 2D textures on surfaces that are not planes, as MuJoCo wraps them.

Each function fills u, v and ``rho2``, the squared footprint of a pixel in texels: how far the coordinates move while
the ray moves by a pixel in the surface's tangent plane, along whichever of the pixel's sides is longer.
"""

from __future__ import annotations

import math

import numpy as np

from headrace._kernels.compiled import helper
from headrace.sim.camera._render_math import along, dot
from headrace.sim.camera._render_scene import BOX, CAPSULE, CYLINDER, F32, I32, RenderTriangles

_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_TURN = np.float32(1 / (2 * math.pi))
_TINY = np.float32(1e-12)


@helper
def _footprint(x: np.float32, t: np.float32, ray: F32, normal: F32, by_u: F32, by_v: F32) -> np.float32:
    """Squared texels of a pixel, from the gradients of texel coordinates and the surface's normal."""
    dx, dy, dz = ray[6] + x * ray[9], ray[7] + x * ray[10], ray[8] + x * ray[11]
    facing = dot(normal[0], normal[1], normal[2], dx, dy, dz)
    # edge-on, a pixel would span the whole surface
    facing = facing if abs(facing) > _TINY else _TINY
    widest = _ZERO
    for side in range(2):
        o, d = (3, 9) if side == 0 else (18, 21)
        mx, my, mz = ray[o] + t * ray[d], ray[o + 1] + t * ray[d + 1], ray[o + 2] + t * ray[d + 2]
        back = dot(normal[0], normal[1], normal[2], mx, my, mz) / facing
        mx, my, mz = mx - back * dx, my - back * dy, mz - back * dz
        u = dot(by_u[0], by_u[1], by_u[2], mx, my, mz)
        v = dot(by_v[0], by_v[1], by_v[2], mx, my, mz)
        widest = max(widest, u * u + v * v)
    return widest


@helper
def wrap_primitive(
    kind: int, scale: F32, z: F32, xs: F32, ray: F32, size: F32, levels: I32, u: F32, v: F32, rho2: F32
) -> None:
    """Color a run that sees a sphere, ellipsoid (both divided by their size), capsule, cylinder or box."""
    normal, by_u, by_v = np.empty(3, np.float32), np.empty(3, np.float32), np.empty(3, np.float32)
    local = np.empty(3, np.float32)
    for k in range(z.shape[0]):
        t, x = z[k], xs[k]
        for a in range(3):
            local[a] = along(ray[a], ray[3 + a], ray[6 + a], ray[9 + a], x, t)
            normal[a] = by_u[a] = by_v[a] = _ZERO
        px, py, pz = local[0], local[1], local[2]
        radius, half = size[0], size[1]
        across = max(px * px + py * py, _TINY)
        if kind == BOX:
            face, most = 0, _ZERO
            for a in range(3):
                if abs(local[a]) / size[a] > most:
                    face, most = a, abs(local[a]) / size[a]
            first, second = 0 if face != 0 else 1, 2 if face != 2 else 1
            normal[face] = _ONE
            by_u[first], by_v[second] = _HALF / size[first], -_HALF / size[second]
            u[k] = _HALF + local[first] * by_u[first]
            v[k] = _HALF + local[second] * by_v[second]
        elif kind == CYLINDER and pz * pz * radius * radius > across * half * half:
            normal[2] = _ONE
            by_u[0] = by_v[1] = _HALF / radius
            u[k], v[k] = _HALF + px * by_u[0], _HALF + py * by_v[1]
        else:
            turn = np.float32(math.atan2(py, px)) * _TURN
            u[k] = turn if turn >= _ZERO else turn + _ONE
            by_u[0], by_u[1] = -py * _TURN / across, px * _TURN / across
            normal[0], normal[1] = px, py
            on_tube = kind == CYLINDER or (kind == CAPSULE and abs(pz) <= half)
            if on_tube:
                v[k] = _HALF - _HALF * pz / half
                by_v[2] = -_HALF / half
            else:
                # a ball: height above its equator; the caps of a capsule have the texture once each
                cap = kind == CAPSULE
                unit = _ONE / radius if cap else _ONE
                pz = pz - (half if pz > _ZERO else -half) if cap else pz
                rim = np.sqrt(across)
                rise = np.float32(math.atan2(pz, rim)) * _TURN * np.float32(2)
                top = cap and pz > _ZERO
                v[k] = (_ONE if top else _ZERO) - np.float32(2) * rise if cap else _HALF - rise
                down = -np.float32(2) * _TURN * unit * (np.float32(2) if cap else _ONE) * unit
                normal[2] = pz
                by_v[0], by_v[1], by_v[2] = -down * pz * px / rim, -down * pz * py / rim, down * rim
        u[k], v[k] = u[k] * scale[0], v[k] * scale[1]
        for a in range(3):
            by_u[a] *= scale[0] * np.float32(levels[0, 1])
            by_v[a] *= scale[1] * np.float32(levels[0, 2])
        rho2[k] = _footprint(x, t, ray, normal, by_u, by_v)


@helper
def wrap_shape(
    triangles: RenderTriangles,
    shape: int,
    scale: F32,
    z: F32,
    xs: F32,
    ids: I32,
    mask: np.int32,
    ray: F32,
    levels: I32,
    u: F32,
    v: F32,
    rho2: F32,
) -> None:
    """Color a run that sees a shape, faces ``ids & mask``; without coordinates the texture lies along z."""
    first, first_texcoord = np.int64(triangles.ranges[shape, 2]), np.int64(triangles.first_texcoord[shape])
    faces, planes, texcoords = triangles.normals, triangles.planes, triangles.texcoords
    normal, by_u, by_v = np.empty(3, np.float32), np.empty(3, np.float32), np.empty(3, np.float32)
    for k in range(z.shape[0]):
        f, t, x = np.int64(ids[k] & mask), z[k], xs[k]
        px = along(ray[0], ray[3], ray[6], ray[9], x, t)
        py = along(ray[1], ray[4], ray[7], ray[10], x, t)
        pz = along(ray[2], ray[5], ray[8], ray[11], x, t)
        for a in range(3):
            normal[a] = planes[a, first + f]
            by_u[a] = by_v[a] = _ZERO
        if first_texcoord < 0:
            u[k], v[k] = scale[3] + scale[0] * px, scale[4] - scale[1] * py
            by_u[0], by_v[1] = scale[0], -scale[1]
        else:
            face, at = faces[first + f], texcoords[first_texcoord + f]
            second = dot(face[0], face[1], face[2], px, py, pz) + face[3]
            third = dot(face[4], face[5], face[6], px, py, pz) + face[7]
            u[k] = (at[0] + second * at[2] + third * at[4]) * scale[0]
            v[k] = (at[1] + second * at[3] + third * at[5]) * scale[1]
            for a in range(3):
                by_u[a] = (at[2] * face[a] + at[4] * face[4 + a]) * scale[0]
                by_v[a] = (at[3] * face[a] + at[5] * face[4 + a]) * scale[1]
        for a in range(3):
            by_u[a] *= np.float32(levels[0, 1])
            by_v[a] *= np.float32(levels[0, 2])
        rho2[k] = _footprint(x, t, ray, normal, by_u, by_v)
