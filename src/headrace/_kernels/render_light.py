"""Normals and light along a line of pixels, in camera coordinates (x right, y up, z backward).

``work`` is float32 (12, W): rows 0–2 the normal, 6–8 red, green and blue, 11 what of a light's rays arrives, the others
scratch. Light is Lambert's: ambient and diffuse of each light, spot cone and attenuation as in OpenGL; highlights and
shadows where asked for. Normals are found run by run (pixels that see the same geom); light is added to the whole line
at once.
"""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import helper
from headrace._kernels.render_scene import (
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
_TINY = np.float32(1e-30)


@helper
def primitive_normals(kind: int, z: F32, xs: F32, ray: F32, size: F32, axes: F32, nx: F32, ny: F32, nz: F32) -> None:
    """Unit normals of a run that sees a primitive at depths z.

    ``axes`` float32 (9,): the geom's three axes in camera coordinates.
    """
    n = z.shape[0]
    ox, oy, oz, px, py, pz = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    ax, ay, az = axes[0], axes[1], axes[2]
    bx, by, bz = axes[3], axes[4], axes[5]
    cx, cy, cz = axes[6], axes[7], axes[8]
    if kind == PLANE:
        for k in range(n):
            nx[k], ny[k], nz[k] = cx, cy, cz
    elif kind == SPHERE:
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == ELLIPSOID:
        ia, ib, ic = _ONE / size[0], _ONE / size[1], _ONE / size[2]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            a, b, c = a * ia, b * ib, c * ic
            inv = _ONE / np.sqrt(a * a + b * b + c * c)
            a, b, c = a * inv, b * inv, c * inv
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == CAPSULE:
        inv, h = _ONE / size[0], size[1]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            a, b, c = a * inv, b * inv, (c - max(-h, min(h, c))) * inv
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == CYLINDER:
        inv, r2, h2 = _ONE / size[0], size[0] * size[0], size[1] * size[1]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            # on a cap where the point is relatively farther along the axis than across it
            cap = c * c * r2 > (a * a + b * b) * h2
            side = _ONE if c > _ZERO else -_ONE
            a, b, c = _ZERO if cap else a * inv, _ZERO if cap else b * inv, side if cap else _ZERO
            nx[k], ny[k], nz[k] = a * ax + b * bx + c * cx, a * ay + b * by + c * cy, a * az + b * bz + c * cz
    elif kind == BOX:
        ia, ib, ic = _ONE / size[0], _ONE / size[1], _ONE / size[2]
        for k in range(n):
            t, x = z[k], xs[k]
            a, b, c = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            a, b, c = a * ia, b * ib, c * ic
            on_a = (abs(a) >= abs(b)) & (abs(a) >= abs(c))
            on_b = (abs(b) >= abs(c)) & (not on_a)
            side = a if on_a else (b if on_b else c)
            side = _ONE if side > _ZERO else -_ONE
            nx[k] = side * (ax if on_a else (bx if on_b else cx))
            ny[k] = side * (ay if on_a else (by if on_b else cy))
            nz[k] = side * (az if on_a else (bz if on_b else cz))


@helper
def shape_normals(
    z: F32,
    xs: F32,
    ids: I32,
    mask: np.int32,
    first: int,
    faces: F32,
    planes: F32,
    smooth: bool,
    ray: F32,
    axes: F32,
    nx: F32,
    ny: F32,
    nz: F32,
) -> None:
    """Unit normals of a run that sees a shape: between the corners' normals where ``smooth``, else the face's own.

    ``first`` is the shape's first face in ``RenderTriangles.normals`` and ``planes``.
    """
    ox, oy, oz, px, py, pz = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    for k in range(z.shape[0]):
        f = np.uint64(first + (ids[k] & mask))
        if smooth:
            face, t, x = faces[f], z[k], xs[k]
            p, q, r = ox + x * px + t * (dx + x * sx), oy + x * py + t * (dy + x * sy), oz + x * pz + t * (dz + x * sz)
            v = min(max(face[0] * p + face[1] * q + face[2] * r + face[3], _ZERO), _ONE)
            w = min(max(face[4] * p + face[5] * q + face[6] * r + face[7], _ZERO), _ONE)
            a = face[8] + v * face[11] + w * face[14]
            b = face[9] + v * face[12] + w * face[15]
            c = face[10] + v * face[13] + w * face[16]
            inv = _ONE / np.sqrt(max(a * a + b * b + c * c, _TINY))
            a, b, c = a * inv, b * inv, c * inv
        else:
            a, b, c = planes[0, f], planes[1, f], planes[2, f]
        nx[k] = a * axes[0] + b * axes[3] + c * axes[6]
        ny[k] = a * axes[1] + b * axes[4] + c * axes[7]
        nz[k] = a * axes[2] + b * axes[5] + c * axes[8]


@helper
def illuminate(
    types: I32,
    ambient: F32,
    shape: F32,
    lights: F32,
    diffuse: F32,
    z_line: F32,
    columns: F32,
    first: int,
    last: int,
    lens: F32,
    work: F32,
) -> None:
    """Add every light to the colors of columns first … last of a line.

    Args:
        types: see ``RenderScene.light_types``; ambient and shape likewise.
        lights: float32 (L, 6): the unit vector to a directional light, or position and direction of a spot light.
        diffuse: float32 (L, 3).
        z_line: depths of the line.
        columns: 0, 1, 2, …
        first: column.
        last: past the last column.
        lens: float32 (5,): x of column 0 and its step, y of the line; 1, 0 if perspective, else 0, 1.
        work: normals in, colors in and out.
    """
    n, z, xs = last - first, z_line[first:last], columns[first:last]
    nx, ny, nz = work[0, first:last], work[1, first:last], work[2, first:last]
    red, green, blue = work[6, first:last], work[7, first:last], work[8, first:last]
    strength, power = work[9, first:last], work[10, first:last]
    first_x, step_x, at_y, deep, flat = lens[0], lens[1], lens[2], lens[3], lens[4]
    for i in range(types.shape[0]):
        lx, ly, lz = lights[i, 0], lights[i, 1], lights[i, 2]
        dr, dg, db = diffuse[i, 0], diffuse[i, 1], diffuse[i, 2]
        if types[i] == DIRECTIONAL:
            for k in range(n):
                cosine = max(nx[k] * lx + ny[k] * ly + nz[k] * lz, _ZERO)
                red[k] += dr * cosine
                green[k] += dg * cosine
                blue[k] += db * cosine
            continue
        ax, ay, az = lights[i, 3], lights[i, 4], lights[i, 5]
        ar, ag, ab = ambient[i, 0], ambient[i, 1], ambient[i, 2]
        cutoff, exponent = shape[i, 0], shape[i, 1]
        k_0, k_1, k_2 = shape[i, 2], shape[i, 3], shape[i, 4]
        for k in range(n):
            s = deep * z[k] + flat
            vx, vy, vz = lx - s * (first_x + xs[k] * step_x), ly - s * at_y, lz + z[k]
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
            s = deep * z[k] + flat
            vx, vy, vz = lx - s * (first_x + xs[k] * step_x), ly - s * at_y, lz + z[k]
            distance = np.sqrt(vx * vx + vy * vy + vz * vz)
            s = strength[k] / (k_0 + k_1 * distance + k_2 * distance * distance)
            cosine = max((nx[k] * vx + ny[k] * vy + nz[k] * vz) / distance, _ZERO)
            red[k] += s * (ar + dr * cosine)
            green[k] += s * (ag + dg * cosine)
            blue[k] += s * (ab + db * cosine)


@helper
def darken(
    maps: F32,
    light: I32,
    basis: F32,
    half: np.float32,
    ambient: F32,
    lights: F32,
    diffuse: F32,
    z: F32,
    xs: F32,
    first: int,
    last: int,
    lens: F32,
    work: F32,
) -> None:
    """Take a directional light away again where something stands between; note what arrives in rows 11 … of work.

    ``maps`` float32 (maps, R, R), ``basis`` float32 (maps, 12): see ``ShadowMaps``.
    """
    size = maps.shape[1]
    per_meter = np.float32(0.5 * size) / half
    texel = _ONE / per_meter
    first_x, step_x, at_y, deep, flat = lens[0], lens[1], lens[2], lens[3], lens[4]
    for i in range(light.shape[0]):
        m = light[i]
        if m < 0:
            continue
        b, seen = basis[m], work[11 + m]
        for k in range(first, last):
            nx, ny, nz = work[0, k], work[1, k], work[2, k]
            s = deep * z[k] + flat
            # a texel off the surface, so that it does not shade itself
            x = s * (first_x + xs[k] * step_x) + texel * nx - b[9]
            y = s * at_y + texel * ny - b[10]
            d = -z[k] + texel * nz - b[11]
            u = (b[0] * x + b[1] * y + b[2] * d + half) * per_meter
            v = (half - (b[3] * x + b[4] * y + b[5] * d)) * per_meter
            away = b[6] * x + b[7] * y + b[8] * d
            seen[k] = _ONE
            # comparisons with NaN are false: never beyond the map
            if (u >= _ZERO) and (u < np.float32(size)) and (v >= _ZERO) and (v < np.float32(size)):
                seen[k] = _ONE if away <= maps[m, int(v), int(u)] + texel else _ZERO
            hidden = _ONE - seen[k]
            cosine = max(nx * lights[i, 0] + ny * lights[i, 1] + nz * lights[i, 2], _ZERO)
            for a in range(3):
                work[6 + a, k] = max(work[6 + a, k] - hidden * (ambient[i, a] + diffuse[i, a] * cosine), _ZERO)


@helper
def add_highlights(
    types: I32,
    specular: F32,
    shape: F32,
    lights: F32,
    reflectance: np.float32,
    exponent: np.float32,
    maps: I32,
    z: F32,
    xs: F32,
    lens: F32,
    at: int,
    work: F32,
) -> None:
    """Blinn's highlights of a run that begins in column ``at``, with the viewer at the camera, as OpenGL has them.

    ``maps`` int32 (L,): shadow map of each light, whose row of work says where its light arrives, or -1.
    """
    first_x, step_x, at_y, deep, flat = lens[0], lens[1], lens[2], lens[3], lens[4]
    for i in range(types.shape[0]):
        directional = types[i] == DIRECTIONAL
        for k in range(z.shape[0]):
            nx, ny, nz = work[0, at + k], work[1, at + k], work[2, at + k]
            s = deep * z[k] + flat
            px, py, pz = s * (first_x + xs[k] * step_x), s * at_y, -z[k]
            lx, ly, lz = lights[i, 0], lights[i, 1], lights[i, 2]
            strength = _ONE
            if maps[i] >= 0:
                strength = work[11 + maps[i], at + k]
            if not directional:
                lx, ly, lz = lx - px, ly - py, lz - pz
                distance = np.sqrt(lx * lx + ly * ly + lz * lz)
                lx, ly, lz = lx / distance, ly / distance, lz / distance
                along = -(lx * lights[i, 3] + ly * lights[i, 4] + lz * lights[i, 5])
                if along < shape[i, 0]:
                    strength = _ZERO
                elif shape[i, 0] > -_ONE:
                    strength *= max(along, _ZERO) ** shape[i, 1]
                strength /= shape[i, 2] + shape[i, 3] * distance + shape[i, 4] * distance * distance
            if not nx * lx + ny * ly + nz * lz > _ZERO:
                continue
            inv = _ONE / np.sqrt(px * px + py * py + pz * pz)
            hx, hy, hz = lx - px * inv, ly - py * inv, lz - pz * inv
            cosine = max((nx * hx + ny * hy + nz * hz) / np.sqrt(hx * hx + hy * hy + hz * hz), _ZERO)
            strength *= reflectance * cosine**exponent
            for a in range(3):
                work[6 + a, at + k] += strength * specular[i, a]


@helper
def write_colors(out: U8, red: F32, green: F32, blue: F32) -> None:
    """Store colors into ``out`` uint8 (k, 3), rounded."""
    for k in range(out.shape[0]):
        out[k, 0] = np.uint8(np.int32(min(red[k], _ONE) * _TOP + _HALF))
        out[k, 1] = np.uint8(np.int32(min(green[k], _ONE) * _TOP + _HALF))
        out[k, 2] = np.uint8(np.int32(min(blue[k], _ONE) * _TOP + _HALF))


@helper
def blend_colors(out: U8, red: F32, green: F32, blue: F32, alpha: np.float32) -> None:
    """Blend colors over ``out`` uint8 (k, 3)."""
    rest = _ONE - alpha
    for k in range(out.shape[0]):
        out[k, 0] = np.uint8(np.int32(alpha * min(red[k], _ONE) * _TOP + rest * np.float32(out[k, 0]) + _HALF))
        out[k, 1] = np.uint8(np.int32(alpha * min(green[k], _ONE) * _TOP + rest * np.float32(out[k, 1]) + _HALF))
        out[k, 2] = np.uint8(np.int32(alpha * min(blue[k], _ONE) * _TOP + rest * np.float32(out[k, 2]) + _HALF))
