"""Normals and light along a line of pixels, in camera coordinates (x right, y up, z backward).

``work`` is float32 (11, W): rows 0–2 the normal, 6–8 red, green and blue, the others scratch. Light is Lambert's:
ambient and diffuse of each light, spot cone and attenuation as in OpenGL; neither highlights, shadows nor reflections.
Normals are found run by run (pixels that see the same geom); light is added to the whole line at once.
"""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import inline
from headrace._kernels.raycast_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    PLANE,
    SPHERE,
    U8,
    RaycastScene,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TOP = np.float32(255)
_HALF = np.float32(0.5)


@inline
def normals(kind: int, z: F32, xs: F32, ray: F32, size: F32, axes: F32, nx: F32, ny: F32, nz: F32) -> None:
    """Unit normals of a run that sees a geom at depths z.

    ``axes`` float32 (9,): the geom's three axes in camera coordinates.
    """
    n = z.shape[0]
    ox, oy, oz = ray[0], ray[1], ray[2]
    dx, dy, dz, sx, sy, sz = ray[3], ray[4], ray[5], ray[6], ray[7], ray[8]
    ax, ay, az = axes[0], axes[1], axes[2]
    bx, by, bz = axes[3], axes[4], axes[5]
    cx, cy, cz = axes[6], axes[7], axes[8]
    if kind == PLANE:
        for k in range(n):
            nx[k], ny[k], nz[k] = cx, cy, cz
    elif kind == SPHERE:
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + t * (dx + x * sx), oy + t * (dy + x * sy), oz + t * (dz + x * sz)
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == ELLIPSOID:
        ia, ib, ic = _ONE / size[0], _ONE / size[1], _ONE / size[2]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + t * (dx + x * sx), oy + t * (dy + x * sy), oz + t * (dz + x * sz)
            a, b, c = a * ia, b * ib, c * ic
            inv = _ONE / np.sqrt(a * a + b * b + c * c)
            a, b, c = a * inv, b * inv, c * inv
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == CAPSULE:
        inv, h = _ONE / size[0], size[1]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + t * (dx + x * sx), oy + t * (dy + x * sy), oz + t * (dz + x * sz)
            a, b, c = a * inv, b * inv, (c - max(-h, min(h, c))) * inv
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == CYLINDER:
        inv, r2, h2 = _ONE / size[0], size[0] * size[0], size[1] * size[1]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + t * (dx + x * sx), oy + t * (dy + x * sy), oz + t * (dz + x * sz)
            # on a cap where the point is relatively farther along the axis than across it
            cap = c * c * r2 > (a * a + b * b) * h2
            side = _ONE if c > _ZERO else -_ONE
            a, b, c = _ZERO if cap else a * inv, _ZERO if cap else b * inv, side if cap else _ZERO
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == BOX:
        ia, ib, ic = _ONE / size[0], _ONE / size[1], _ONE / size[2]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + t * (dx + x * sx), oy + t * (dy + x * sy), oz + t * (dz + x * sz)
            a, b, c = a * ia, b * ib, c * ic
            on_a = (abs(a) >= abs(b)) & (abs(a) >= abs(c))
            on_b = (abs(b) >= abs(c)) & (not on_a)
            side = a if on_a else (b if on_b else c)
            side = _ONE if side > _ZERO else -_ONE
            nx[k] = side * (ax if on_a else (bx if on_b else cx))
            ny[k] = side * (ay if on_a else (by if on_b else cy))
            nz[k] = side * (az if on_a else (bz if on_b else cz))


@inline
def illuminate(
    scene: RaycastScene,
    lights: F32,
    diffuse: F32,
    z: F32,
    xs: F32,
    first_x: np.float32,
    step_x: np.float32,
    at_y: np.float32,
    work: F32,
) -> None:
    """Add every light to the colors of a line.

    ``lights`` float32 (L, 6): the unit vector to a directional light, or position and direction of a spot light.
    """
    n = z.shape[0]
    nx, ny, nz = work[0], work[1], work[2]
    red, green, blue = work[6], work[7], work[8]
    strength, power = work[9], work[10]
    for i in range(scene.light_types.shape[0]):
        lx, ly, lz = lights[i, 0], lights[i, 1], lights[i, 2]
        dr, dg, db = diffuse[i, 0], diffuse[i, 1], diffuse[i, 2]
        if scene.light_types[i] == DIRECTIONAL:
            for k in range(n):
                cosine = max(nx[k] * lx + ny[k] * ly + nz[k] * lz, _ZERO)
                red[k] += dr * cosine
                green[k] += dg * cosine
                blue[k] += db * cosine
            continue
        ax, ay, az = lights[i, 3], lights[i, 4], lights[i, 5]
        ar, ag, ab = scene.light_ambient[i, 0], scene.light_ambient[i, 1], scene.light_ambient[i, 2]
        cutoff, exponent = scene.light_shape[i, 0], scene.light_shape[i, 1]
        k_0, k_1, k_2 = scene.light_shape[i, 2], scene.light_shape[i, 3], scene.light_shape[i, 4]
        for k in range(n):
            vx, vy, vz = lx - z[k] * (first_x + xs[k] * step_x), ly - z[k] * at_y, lz + z[k]
            along = -(vx * ax + vy * ay + vz * az) / np.sqrt(vx * vx + vy * vy + vz * vz)
            strength[k] = _ONE if along >= cutoff else _ZERO
            power[k] = along
        if cutoff > -_ONE:
            left = int(exponent)
            if np.float32(left) == exponent:
                # a whole power by squaring: no call to pow per pixel
                while left > 0:
                    if left & 1:
                        for k in range(n):
                            strength[k] *= power[k]
                    for k in range(n):
                        power[k] *= power[k]
                    left >>= 1
            else:
                for k in range(n):
                    strength[k] *= max(power[k], _ZERO) ** exponent
        for k in range(n):
            vx, vy, vz = lx - z[k] * (first_x + xs[k] * step_x), ly - z[k] * at_y, lz + z[k]
            distance = np.sqrt(vx * vx + vy * vy + vz * vz)
            s = strength[k] / (k_0 + k_1 * distance + k_2 * distance * distance)
            cosine = max((nx[k] * vx + ny[k] * vy + nz[k] * vz) / distance, _ZERO)
            red[k] += s * (ar + dr * cosine)
            green[k] += s * (ag + dg * cosine)
            blue[k] += s * (ab + db * cosine)


@inline
def write_colors(out: U8, red: F32, green: F32, blue: F32) -> None:
    """Store colors into ``out`` uint8 (k, 3), rounded."""
    for k in range(out.shape[0]):
        out[k, 0] = np.uint8(np.int32(min(red[k], _ONE) * _TOP + _HALF))
        out[k, 1] = np.uint8(np.int32(min(green[k], _ONE) * _TOP + _HALF))
        out[k, 2] = np.uint8(np.int32(min(blue[k], _ONE) * _TOP + _HALF))


@inline
def blend_colors(out: U8, red: F32, green: F32, blue: F32, alpha: np.float32) -> None:
    """Blend colors over ``out`` uint8 (k, 3)."""
    rest = _ONE - alpha
    for k in range(out.shape[0]):
        out[k, 0] = np.uint8(np.int32(alpha * min(red[k], _ONE) * _TOP + rest * np.float32(out[k, 0]) + _HALF))
        out[k, 1] = np.uint8(np.int32(alpha * min(green[k], _ONE) * _TOP + rest * np.float32(out[k, 1]) + _HALF))
        out[k, 2] = np.uint8(np.int32(alpha * min(blue[k], _ONE) * _TOP + rest * np.float32(out[k, 2]) + _HALF))
