"""Surface points, normals and light along a run of pixels that see the same geom.

Everything is in the frame of the geom. ``work`` is float32 (10, at least k): rows 0–2 the normal, 3–5 the point, 6–8
red, green and blue, 9 scratch; a run of k pixels uses the first k columns. Light is Lambert's: ambient and diffuse of
each light, spot cone and attenuation as in OpenGL; neither highlights, shadows nor reflections.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.compiled import kernel
from headrace.kernels.raycast_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    I32,
    PLANE,
    SPHERE,
    U8,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TOP = np.float32(255)
_HALF = np.float32(0.5)


@kernel(checked_division=False)
def surface(kind: int, z: F32, xs: F32, ray: F32, size: F32, work: F32) -> None:
    """Points and unit normals where the rays of a run hit the geom at depths z."""
    n = z.shape[0]
    nx, ny, nz = work[0, :n], work[1, :n], work[2, :n]
    px, py, pz = work[3, :n], work[4, :n], work[5, :n]
    ox, oy, oz = ray[0], ray[1], ray[2]
    dx, dy, dz, sx, sy, sz = ray[3], ray[4], ray[5], ray[6], ray[7], ray[8]
    for k in range(n):
        t, x = z[k], xs[k]
        px[k] = ox + t * (dx + x * sx)
        py[k] = oy + t * (dy + x * sy)
        pz[k] = oz + t * (dz + x * sz)
    if kind == PLANE:
        for k in range(n):
            nx[k], ny[k], nz[k] = _ZERO, _ZERO, _ONE
    elif kind == SPHERE:
        radius = size[0]
        for k in range(n):
            nx[k], ny[k], nz[k] = px[k], py[k], pz[k]
            px[k], py[k], pz[k] = px[k] * radius, py[k] * radius, pz[k] * radius
    elif kind == ELLIPSOID:
        a, b, c = size[0], size[1], size[2]
        for k in range(n):
            u, v, w = px[k] / a, py[k] / b, pz[k] / c
            inv = _ONE / np.sqrt(u * u + v * v + w * w)
            nx[k], ny[k], nz[k] = u * inv, v * inv, w * inv
            px[k], py[k], pz[k] = px[k] * a, py[k] * b, pz[k] * c
    elif kind == CAPSULE:
        inv, h = _ONE / size[0], size[1]
        for k in range(n):
            centre = max(-h, min(h, pz[k]))
            nx[k], ny[k], nz[k] = px[k] * inv, py[k] * inv, (pz[k] - centre) * inv
    elif kind == CYLINDER:
        inv, r2, h2 = _ONE / size[0], size[0] * size[0], size[1] * size[1]
        for k in range(n):
            # on a cap where the point is relatively farther along the axis than across it
            cap = pz[k] * pz[k] * r2 > (px[k] * px[k] + py[k] * py[k]) * h2
            side = _ONE if pz[k] > _ZERO else -_ONE
            nx[k] = _ZERO if cap else px[k] * inv
            ny[k] = _ZERO if cap else py[k] * inv
            nz[k] = side if cap else _ZERO
    elif kind == BOX:
        ia, ib, ic = _ONE / size[0], _ONE / size[1], _ONE / size[2]
        for k in range(n):
            a, b, c = abs(px[k]) * ia, abs(py[k]) * ib, abs(pz[k]) * ic
            on_x = (a >= b) & (a >= c)
            on_y = (b >= c) & (not on_x)
            on_z = (not on_x) & (not on_y)
            nx[k] = (_ONE if px[k] > _ZERO else -_ONE) if on_x else _ZERO
            ny[k] = (_ONE if py[k] > _ZERO else -_ONE) if on_y else _ZERO
            nz[k] = (_ONE if pz[k] > _ZERO else -_ONE) if on_z else _ZERO


@kernel(checked_division=False)
def illuminate(
    n: int,
    work: F32,
    rgba: F32,
    emission: np.float32,
    ambient: np.float32,
    kinds: I32,
    lights: F32,
    light_ambient: F32,
    light_diffuse: F32,
    light_shape: F32,
) -> None:
    """Colours of a run of n pixels: rgba · (emission + Σ lights).

    ``lights`` is float32 (L, 6): the unit vector to a directional light, or the position and the direction of a spot
    light, in the frame of the geom.
    """
    nx, ny, nz = work[0, :n], work[1, :n], work[2, :n]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    base_r = base_g = base_b = emission + ambient
    for i in range(kinds.shape[0]):
        if kinds[i] == DIRECTIONAL:
            base_r += light_ambient[i, 0]
            base_g += light_ambient[i, 1]
            base_b += light_ambient[i, 2]
    red[:] = base_r
    green[:] = base_g
    blue[:] = base_b
    for i in range(kinds.shape[0]):
        if kinds[i] == DIRECTIONAL:
            lx, ly, lz = lights[i, 0], lights[i, 1], lights[i, 2]
            dr, dg, db = light_diffuse[i, 0], light_diffuse[i, 1], light_diffuse[i, 2]
            for k in range(n):
                cosine = max(nx[k] * lx + ny[k] * ly + nz[k] * lz, _ZERO)
                red[k] += dr * cosine
                green[k] += dg * cosine
                blue[k] += db * cosine
        else:
            _spot(n, work, lights[i], light_ambient[i], light_diffuse[i], light_shape[i])
    r, g, b = rgba[0], rgba[1], rgba[2]
    for k in range(n):
        red[k] *= r
        green[k] *= g
        blue[k] *= b


@kernel(checked_division=False)
def _spot(n: int, work: F32, light: F32, ambient: F32, diffuse: F32, shape: F32) -> None:
    """Add one light with a position, a cone and an attenuation to the colours of a run."""
    nx, ny, nz = work[0, :n], work[1, :n], work[2, :n]
    px, py, pz = work[3, :n], work[4, :n], work[5, :n]
    red, green, blue, strength = work[6, :n], work[7, :n], work[8, :n], work[9, :n]
    cutoff, exponent = shape[0], shape[1]
    k_0, k_1, k_2 = shape[2], shape[3], shape[4]
    lx, ly, lz = light[0], light[1], light[2]
    ax, ay, az = light[3], light[4], light[5]
    ar, ag, ab = ambient[0], ambient[1], ambient[2]
    dr, dg, db = diffuse[0], diffuse[1], diffuse[2]
    for k in range(n):
        vx, vy, vz = lx - px[k], ly - py[k], lz - pz[k]
        strength[k] = -(vx * ax + vy * ay + vz * az) / np.sqrt(vx * vx + vy * vy + vz * vz)
    whole = int(exponent)
    if cutoff <= -_ONE:
        strength[:] = _ONE
    elif np.float32(whole) == exponent:
        # powers by squaring, the same for the whole run: no call to pow per pixel
        for k in range(n):
            c = strength[k]
            base = c
            power = _ONE
            left = whole
            while left > 0:
                power = power * base if left & 1 else power
                base = base * base
                left >>= 1
            strength[k] = power if c >= cutoff else _ZERO
    else:
        for k in range(n):
            strength[k] = strength[k] ** exponent if strength[k] >= cutoff else _ZERO
    for k in range(n):
        vx, vy, vz = lx - px[k], ly - py[k], lz - pz[k]
        distance = np.sqrt(vx * vx + vy * vy + vz * vz)
        s = strength[k] / (k_0 + k_1 * distance + k_2 * distance * distance)
        cosine = max((nx[k] * vx + ny[k] * vy + nz[k] * vz) / distance, _ZERO)
        red[k] += s * (ar + dr * cosine)
        green[k] += s * (ag + dg * cosine)
        blue[k] += s * (ab + db * cosine)


@kernel(checked_division=False)
def fade_into_haze(n: int, work: F32, haze: F32, cx: np.float32, cy: np.float32) -> None:
    """Blend an infinite plane into the haze with the distance from the foot of the camera at (cx, cy)."""
    px, py = work[3, :n], work[4, :n]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    hr, hg, hb, inner = haze[0], haze[1], haze[2], haze[3]
    inv = _ONE / (haze[4] - haze[3])
    for k in range(n):
        x, y = px[k] - cx, py[k] - cy
        w = min(max((np.sqrt(x * x + y * y) - inner) * inv, _ZERO), _ONE)
        red[k] += w * (hr - red[k])
        green[k] += w * (hg - green[k])
        blue[k] += w * (hb - blue[k])


@kernel()
def write_colours(out: U8, work: F32) -> None:
    """Store the colours of a run into ``out`` uint8 (k, 3), rounded."""
    n = out.shape[0]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    for k in range(n):
        out[k, 0] = np.uint8(np.int32(min(red[k], _ONE) * _TOP + _HALF))
        out[k, 1] = np.uint8(np.int32(min(green[k], _ONE) * _TOP + _HALF))
        out[k, 2] = np.uint8(np.int32(min(blue[k], _ONE) * _TOP + _HALF))


@kernel()
def blend_colours(out: U8, work: F32, alpha: np.float32) -> None:
    """Blend the colours of a run over ``out`` uint8 (k, 3)."""
    n = out.shape[0]
    red, green, blue = work[6, :n], work[7, :n], work[8, :n]
    rest = _ONE - alpha
    for k in range(n):
        out[k, 0] = np.uint8(np.int32(alpha * min(red[k], _ONE) * _TOP + rest * np.float32(out[k, 0]) + _HALF))
        out[k, 1] = np.uint8(np.int32(alpha * min(green[k], _ONE) * _TOP + rest * np.float32(out[k, 1]) + _HALF))
        out[k, 2] = np.uint8(np.int32(alpha * min(blue[k], _ONE) * _TOP + rest * np.float32(out[k, 2]) + _HALF))
