"""Texture lookups with mip levels, filtered as OpenGL filters: bilinear within a level, blended between levels.

Colors of a run are multiplied by the texture in place. A texel is one uint64 with red, green and blue 21 bits apart:
weighting four texels by weights that sum to 4096 is then four multiplications for all three colors. Pixels of a run
that read the same level are looked up together: addresses and colors are vectorized, only the loads are not.

``rho2`` is the squared footprint of a pixel in texels of level 0; half its base-2 logarithm is the level. The logarithm
is read off the float's bits (exact at powers of two, linear between), which is cheap and the same on every machine.
"""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import helper
from headrace._kernels.render_math import along, is_ball
from headrace._kernels.render_scene import CAPSULE, ELLIPSOID, F32, F64, I32, U64

_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_TWO = np.float32(2)
_QUARTER = np.float32(0.25)
_TO_UNIT = np.float32(1 / (255 * 4096))
_STEPS = np.float32(64)  # a position within a texel is rounded down to 1/64
_LOG_STEP = np.float32(2.0**-24)  # half of 2⁻²³: the level is half the logarithm
_LOG_BIAS = np.float32(127 / 2)
_GREEN = np.uint64(21)
_BLUE = np.uint64(42)
_LANE = np.uint64((1 << 21) - 1)


@helper
def _fetch(texels: U64, level: I32, repeat: bool, u: F32, v: F32, faces: I32, index: I32, out: U64) -> None:
    """One level (first texel, width, height) at (u, v) in [0, 1]: packed colors times 4096; elsewhere that at 0.

    ``faces`` int32 (n,) is the face of the cube that each pixel sees; ``index`` int32 (6, at least n) is scratch.
    """
    n = u.shape[0]
    first, w, h = level[0], level[1], level[2]
    a, b, c, d = index[0, :n], index[1, :n], index[2, :n], index[3, :n]
    part_u, part_v = index[4, :n], index[5, :n]
    last_u, last_v, area = np.int32(w - 1), np.int32(h - 1), np.int32(w * h)
    # beyond an edge: the opposite one of a repeating texture, the same one of a face
    before_u, before_v = (last_u, last_v) if repeat else (np.int32(0), np.int32(0))
    after_u, after_v = (np.int32(0), np.int32(0)) if repeat else (last_u, last_v)
    scale_u, scale_v = np.float32(w) * _STEPS, np.float32(h) * _STEPS
    for k in range(n):
        # a direction of length zero (the center of a plane in a cube) is NaN here, and would be read beyond the texels
        safe_u = u[k] if (u[k] >= _ZERO) & (u[k] <= _ONE) else _ZERO
        safe_v = v[k] if (v[k] >= _ZERO) & (v[k] <= _ONE) else _ZERO
        at_u = np.int32(np.int32(safe_u * scale_u) - np.int32(32))
        at_v = np.int32(np.int32(safe_v * scale_v) - np.int32(32))
        iu, iv = np.int32(at_u >> np.int32(6)), np.int32(at_v >> np.int32(6))
        iu_1, iv_1 = np.int32(iu + np.int32(1)), np.int32(iv + np.int32(1))
        iu_1 = iu_1 if iu_1 < w else after_u
        iv_1 = iv_1 if iv_1 < h else after_v
        iu = iu if iu >= 0 else before_u
        iv = iv if iv >= 0 else before_v
        base = np.int32(first + np.int32(faces[k] * area))
        low, high = np.int32(base + np.int32(iv * w)), np.int32(base + np.int32(iv_1 * w))
        a[k], b[k] = np.int32(low + iu), np.int32(low + iu_1)
        c[k], d[k] = np.int32(high + iu), np.int32(high + iu_1)
        part_u[k], part_v[k] = np.int32(at_u & np.int32(63)), np.int32(at_v & np.int32(63))
    for k in range(n):
        fu, fv = np.uint64(part_u[k]), np.uint64(part_v[k])
        gu, gv = np.uint64(64) - fu, np.uint64(64) - fv
        upper = texels[np.uint64(a[k])] * gu + texels[np.uint64(b[k])] * fu
        lower = texels[np.uint64(c[k])] * gu + texels[np.uint64(d[k])] * fu
        out[k] = upper * gv + lower * fv


@helper
def _multiply(red: F32, green: F32, blue: F32, fine: U64) -> None:
    for k in range(red.shape[0]):
        red[k] *= np.float32(np.int32(fine[k] & _LANE)) * _TO_UNIT
        green[k] *= np.float32(np.int32((fine[k] >> _GREEN) & _LANE)) * _TO_UNIT
        blue[k] *= np.float32(np.int32(fine[k] >> _BLUE)) * _TO_UNIT


@helper
def _multiply_blend(red: F32, green: F32, blue: F32, fine: U64, coarse: U64, weight: F32) -> None:
    for k in range(red.shape[0]):
        w, rest = weight[k] * _TO_UNIT, (_ONE - weight[k]) * _TO_UNIT
        red[k] *= rest * np.float32(np.int32(fine[k] & _LANE)) + w * np.float32(np.int32(coarse[k] & _LANE))
        green[k] *= rest * np.float32(np.int32((fine[k] >> _GREEN) & _LANE)) + w * np.float32(
            np.int32((coarse[k] >> _GREEN) & _LANE)
        )
        blue[k] *= rest * np.float32(np.int32(fine[k] >> _BLUE)) + w * np.float32(np.int32(coarse[k] >> _BLUE))


@helper
def _find_faces(s: F32, t: F32, r: F32, faces: I32) -> None:
    """From directions to the face of a cube that each meets, and to coordinates on it in place of s and t."""
    for k in range(s.shape[0]):
        x, y, z = abs(s[k]), abs(t[k]), abs(r[k])
        # OpenGL's choice of face: the longest component and its sign
        on_x = (x >= y) & (x >= z)
        on_y = (y >= z) & (not on_x)
        m = x if on_x else (y if on_y else z)
        major = s[k] if on_x else (t[k] if on_y else r[k])
        back = major <= _ZERO
        flip = -_ONE if back else _ONE
        a = (-flip * r[k]) if on_x else (s[k] if on_y else flip * s[k])
        b = flip * r[k] if on_y else -t[k]
        face = np.int32(0) if on_x else (np.int32(2) if on_y else np.int32(4))
        faces[k] = face + (np.int32(1) if back else np.int32(0))
        scale = _HALF / m
        s[k], t[k] = a * scale + _HALF, b * scale + _HALF


@helper
def multiply_texture(
    cube: bool, work: F32, start: int, stop: int, texels: U64, levels: I32, index: I32, packed: U64
) -> None:
    """Multiply the colors of columns start … stop by a repeating texture at (u, v), or a cube in directions (u, v, w).

    ``work`` as in :mod:`render_stages`: rows 0–2 are u, v and w, 6–8 the colors, 9 is ``rho2``. A cube is read from its
    nearest level. u, v, w and rho2 are used up; ``index`` int32 (8, …) and ``packed`` uint64 (2, …) are scratch.
    """
    n = stop - start
    u, v, w, rho2 = work[0, start:stop], work[1, start:stop], work[2, start:stop], work[9, start:stop]
    red, green, blue = work[6, start:stop], work[7, start:stop], work[8, start:stop]
    bits = rho2.view(np.int32)
    last = np.float32(levels.shape[0] - 1)
    codes, faces = index[6, :n], index[7, :n]
    shift = _HALF if cube else _ZERO
    for k in range(n):
        level = min(max(np.float32(bits[k]) * _LOG_STEP - _LOG_BIAS + shift, _ZERO), last)
        low = np.floor(level)
        # two levels are blended in the middle half between them; elsewhere the nearer one does
        part = min(max((level - low - _QUARTER) * _TWO, _ZERO), _ONE)
        blend = (part > _ZERO) & (part < _ONE) & (not cube)
        up = (part >= _ONE) & (not cube)
        codes[k] = np.int32(low * _TWO) + (np.int32(1) if blend else np.int32(0)) + (np.int32(2) if up else np.int32(0))
        rho2[k] = part
    if cube:
        _find_faces(u, v, w, faces)
    else:
        for k in range(n):
            u[k] -= np.floor(u[k])
            v[k] -= np.floor(v[k])
            faces[k] = np.int32(0)
    at = 0
    while at < n:
        code = codes[at]
        end = at + 1
        while end < n and codes[end] == code:
            end += 1
        low, fine, coarse = code // 2, packed[0, at:end], packed[1, at:end]
        _fetch(texels, levels[low], not cube, u[at:end], v[at:end], faces[at:end], index, fine)
        if code & 1:
            _fetch(texels, levels[low + 1], not cube, u[at:end], v[at:end], faces[at:end], index, coarse)
            _multiply_blend(red[at:end], green[at:end], blue[at:end], fine, coarse, rho2[at:end])
        else:
            _multiply(red[at:end], green[at:end], blue[at:end], fine)
        at = end


@helper
def project_texture(
    kind: int,
    scale: F32,
    cube: bool,
    z_line: F32,
    columns: F32,
    at: int,
    end: int,
    ray: F32,
    size: F32,
    work: F32,
    levels: I32,
) -> None:
    """Coordinates and squared footprint of columns at … end in a cube, or in a 2D texture on a plane.

    The normals in ``work`` are used up.
    """
    n, z, xs = end - at, z_line[at:end], columns[at:end]
    u, v, w, rho2 = work[0, at:end], work[1, at:end], work[2, at:end], work[9, at:end]
    by_u, by_v, by_w = scale[0], scale[1], scale[2]
    ox, oy, oz, px, py, pz = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    if is_ball(kind):
        # its ray is in units of its size; a sphere's size is its radius
        by_u *= size[0]
        by_v *= size[0] if kind != ELLIPSOID else size[1]
        by_w *= size[0] if kind != ELLIPSOID else size[2]
    if cube:
        step = abs(sx) + abs(sy) + abs(sz)
        fixed = abs(px) + abs(py) + abs(pz)
        widest = np.float32(0.5) * np.float32(levels[0, 1]) * max(by_u, max(by_v, by_w))
        for k in range(n):
            t, x = z[k], xs[k]
            rho = widest * (step * t + fixed)
            rho2[k] = rho * rho
            u[k] = by_u * along(ox, px, dx, sx, x, t)
            v[k] = by_v * along(oy, py, dy, sy, x, t)
            w[k] = by_w * along(oz, pz, dz, sz, x, t)
        if kind == CAPSULE:
            # the caps go on beyond the ends of the tube, in units of the radius
            reach = by_w * size[1]
            per_cap = size[1] / size[0]
            for k in range(n):
                beyond = abs(w[k]) - reach
                cap = reach + per_cap * beyond
                w[k] = w[k] if beyond <= _ZERO else (cap if w[k] > _ZERO else -cap)
        return
    from_u, from_v = scale[3], scale[4]
    scale_u, scale_v = by_u * np.float32(levels[0, 1]), by_v * np.float32(levels[0, 2])
    oxy, oyy, ozy, dxy, dyy, dzy = ray[18], ray[19], ray[20], ray[21], ray[22], ray[23]
    for k in range(n):
        t, x = z[k], xs[k]
        along_u, along_v, slope = dx + x * sx, dy + x * sy, _ONE / (dz + x * sz)
        u[k] = from_u + by_u * (ox + x * px + t * along_u)
        v[k] = from_v - by_v * (oy + x * py + t * along_v)
        # one pixel further the ray meets the plane at another depth
        t_x, t_y = (pz + t * sz) * slope, (ozy + t * dzy) * slope
        ux = scale_u * (px + t * sx - along_u * t_x)
        vx = scale_v * (py + t * sy - along_v * t_x)
        uy = scale_u * (oxy + t * dxy - along_u * t_y)
        vy = scale_v * (oyy + t * dyy - along_v * t_y)
        rho2[k] = max(ux * ux + vx * vx, uy * uy + vy * vy)


@helper
def fade_into_haze(red: F32, green: F32, blue: F32, z: F32, xs: F32, ray: F32, haze: F32) -> None:
    """Blend an infinite plane into the haze with the distance from the foot of the camera."""
    dx, dy, sx, sy = ray[6], ray[7], ray[9], ray[10]
    hr, hg, hb, inner = haze[0], haze[1], haze[2], haze[3]
    inv = _ONE / (haze[4] - haze[3])
    for k in range(z.shape[0]):
        a, b = z[k] * (dx + xs[k] * sx), z[k] * (dy + xs[k] * sy)
        w = min(max((np.sqrt(a * a + b * b) - inner) * inv, _ZERO), _ONE)
        red[k] += w * (hr - red[k])
        green[k] += w * (hg - green[k])
        blue[k] += w * (hb - blue[k])


@helper
def see_sky(cam: F64, lens: F32, columns: F32, at: int, end: int, work: F32, levels: I32) -> None:
    """White, and the directions in which columns at … end see the sky."""
    n, xs = end - at, columns[at:end]
    s, t, r, rho2 = work[0, at:end], work[1, at:end], work[2, at:end], work[9, at:end]
    first_x, step_x, at_y = lens[3] * lens[0], lens[3] * lens[1], lens[3] * lens[2]
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
    for a in range(3):
        for k in range(at, end):
            work[6 + a, k] = _ONE
