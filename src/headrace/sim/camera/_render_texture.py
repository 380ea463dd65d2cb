"""Texture lookups with mip levels, filtered as OpenGL filters: bilinear within a level, blended between levels.

Colors of a run are multiplied by the texture in place. A texel is read as one uint64 with red, green and blue 21 bits
apart: weighting four texels by weights that sum to 4096 is then four multiplications for all three colors. Pixels of a
run that read the same level are looked up together: addresses and colors are vectorized, only the loads are not.

``rho2`` is the squared footprint of a pixel in texels of level 0; half its base-2 logarithm is the level. The logarithm
is read off the float's bits (exact at powers of two, linear between), which is cheap and the same on every machine.
"""

from __future__ import annotations

import math

import numpy as np

from headrace._kernels.compiled import helper
from headrace.sim.camera._render_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    ELLIPSOID,
    F32,
    F64,
    I32,
    PLANE,
    SPHERE,
    TEXTURE_CUBE,
    U32,
    U64,
    RenderTextures,
    RenderTriangles,
    along,
    dot,
    is_ball,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_HALF = np.float32(0.5)
_TWO = np.float32(2)
_QUARTER = np.float32(0.25)
_INF = np.float32(np.inf)
_EDGE_ON = np.float32(1e-12)  # a pixel that sees a surface edge-on would span all of it
_TO_UNIT = np.float32(1 / (255 * 4096))
_STEPS = np.float32(64)  # a position within a texel is rounded down to 1/64
_LOG_STEP = np.float32(2.0**-24)  # half of 2⁻²³: the level is half the logarithm
_LOG_BIAS = np.float32(127 / 2)
_GREEN = np.uint64(21)
_BLUE = np.uint64(42)
_LANE = np.uint64((1 << 21) - 1)


@helper
def _spread(texel: np.uint32) -> np.uint64:
    """Set the three colors of a texel 21 bits apart."""
    wide = np.uint64(texel)
    return (wide & np.uint64(0xFF)) | ((wide & np.uint64(0xFF00)) << np.uint64(13)) | (wide >> np.uint64(16)) << _BLUE


@helper
def _fetch(texels: U32, level: I32, repeat: bool, u: F32, v: F32, faces: I32, index: I32, out: U64) -> None:
    """Sample one level (row of ``TextureSet.levels``) at (u, v) in [0, 1]: packed colors times 4096, elsewhere at 0.

    ``faces`` int32 (n,) is the face of the cube that each pixel sees; ``index`` int32 (6, at least n) is scratch.
    """
    n = u.shape[0]
    first, w, h = level[0], level[1], level[2]
    a, b, c, d = index[0, :n], index[1, :n], index[2, :n], index[3, :n]
    part_u, part_v = index[4, :n], index[5, :n]
    last_u, last_v, area = np.int32(w - 1), np.int32(h - 1), level[3]
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
        upper = _spread(texels[np.uint64(a[k])]) * gu + _spread(texels[np.uint64(b[k])]) * fu
        lower = _spread(texels[np.uint64(c[k])]) * gu + _spread(texels[np.uint64(d[k])]) * fu
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
    cube: bool, work: F32, start: int, stop: int, texels: U32, levels: I32, index: I32, packed: U64
) -> None:
    """Multiply the colors of columns start … stop by a repeating texture at (u, v), or a cube in directions (u, v, w).

    ``work`` as in :mod:`render_stages`: rows 0–2 are u, v and w, 6–8 the colors, 9 is ``rho2``. u, v, w and rho2 are
    used up; ``index`` int32 (8, …) and ``packed`` uint64 (2, …) are scratch.
    """
    n = stop - start
    u, v, w, rho2 = work[0, start:stop], work[1, start:stop], work[2, start:stop], work[9, start:stop]
    red, green, blue = work[6, start:stop], work[7, start:stop], work[8, start:stop]
    bits = rho2.view(np.int32)
    last = np.float32(levels.shape[0] - 1)
    codes, faces = index[6, :n], index[7, :n]
    for k in range(n):
        level = min(max(np.float32(bits[k]) * _LOG_STEP - _LOG_BIAS, _ZERO), last)
        low = np.floor(level)
        # two levels are blended in the middle half between them; elsewhere the nearer one does
        part = min(max((level - low - _QUARTER) * _TWO, _ZERO), _ONE)
        blend = (part > _ZERO) & (part < _ONE)
        up = part >= _ONE
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
def scale_texture(kind: int, shape: int, cube: bool, repeats: F32, size: F32, out: F32) -> None:
    """Write how a geom of this size wears its texture, (5,).

    Of a cube: three factors from local meters to its direction. Of a 2D texture: factors and offset of (u, v) on the
    surface's own coordinates, or on local meters for planes and for shapes without texture coordinates.
    """
    for a in range(5):
        out[a] = _ZERO
    uniform = repeats[2] > _ZERO
    for a in range(3 if cube else 2):
        # a sphere has one size; capsules and cylinders have a radius and half a length
        long = (kind == CAPSULE) | (kind == CYLINDER)
        extent = size[0] if (kind == SPHERE) | (long & (a == 1)) else (size[1] if long & (a == 2) else size[a])
        # an infinite plane repeats per meter
        unit = extent if extent > _ZERO and not (kind == PLANE and a == 2) else _ONE
        if cube:
            # meshes are not scaled when they are drawn, so that their coordinates are meters
            out[a] = (unit if uniform else _ONE) if shape >= 0 else (_ONE if uniform else _ONE / unit)
        elif kind == PLANE or repeats[3] > _ZERO:
            out[a] = _HALF * repeats[a] * (_ONE if uniform else _ONE / unit)
            # it starts at the corner of a finite plane and half a repeat from the origin of anything else
            out[3 + a] = out[a] * extent if kind == PLANE and extent > _ZERO else -_HALF
        else:
            out[a] = (repeats[a] if repeats[a] > _ZERO else _ONE) * (unit if uniform else _ONE)


@helper
def project_plane(scale: F32, z: F32, xs: F32, ray: F32, levels: I32, u: F32, v: F32, rho2: F32) -> None:
    """Coordinates and squared footprint of a run in a 2D texture on a plane."""
    by_u, by_v, from_u, from_v = scale[0], scale[1], scale[3], scale[4]
    ox, oy, px, py, pz = ray[0], ray[1], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    oxy, oyy, ozy, dxy, dyy, dzy = ray[18], ray[19], ray[20], ray[21], ray[22], ray[23]
    scale_u, scale_v = by_u * np.float32(levels[0, 1]), by_v * np.float32(levels[0, 2])
    for k in range(z.shape[0]):
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
def project_cube(
    kind: int, scale: F32, z: F32, xs: F32, ray: F32, size: F32, levels: I32, s: F32, t: F32, r: F32, rho2: F32
) -> None:
    """Directions and squared footprint of a run in a cube, in place of the surface's normals in the geom's frame."""
    by_s, by_t, by_r = scale[0], scale[1], scale[2]
    ox, oy, oz, px, py, pz = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    qx, qy, qz, tx, ty, tz = ray[18], ray[19], ray[20], ray[21], ray[22], ray[23]
    if is_ball(kind):
        # its ray is in units of its size; a sphere's size is its radius
        by_s *= size[0]
        by_t *= size[0] if kind != ELLIPSOID else size[1]
        by_r *= size[0] if kind != ELLIPSOID else size[2]
    # the caps of a capsule go on beyond the ends of the tube, in units of the radius
    end, per_cap = (size[1], size[1] / size[0]) if kind == CAPSULE else (_INF, _ONE)
    texels = _HALF * np.float32(levels[0, 1])
    for k in range(z.shape[0]):
        x, depth = xs[k], z[k]
        nx, ny, nz = s[k], t[k], r[k]
        wx, wy, wz = dx + x * sx, dy + x * sy, dz + x * sz
        a, b, c = ox + x * px + depth * wx, oy + x * py + depth * wy, oz + x * pz + depth * wz
        beyond = abs(c) - end
        on_cap = beyond > _ZERO
        cap = end + per_cap * beyond
        c = (cap if c > _ZERO else -cap) if on_cap else c
        by_c = by_r * per_cap if on_cap else by_r
        a, b, c = a * by_s, b * by_t, c * by_r
        s[k], t[k], r[k] = a, b, c
        # how far the direction moves while the ray moves by a pixel in the surface's tangent plane
        facing = dot(nx, ny, nz, wx, wy, wz)
        inv = _ONE / (facing if abs(facing) > _EDGE_ON else _EDGE_ON)
        ax, ay, az = px + depth * sx, py + depth * sy, pz + depth * sz
        bx, by, bz = qx + depth * tx, qy + depth * ty, qz + depth * tz
        back_a, back_b = dot(nx, ny, nz, ax, ay, az) * inv, dot(nx, ny, nz, bx, by, bz) * inv
        ax, ay, az = by_s * (ax - back_a * wx), by_t * (ay - back_a * wy), by_c * (az - back_a * wz)
        bx, by, bz = by_s * (bx - back_b * wx), by_t * (by - back_b * wy), by_c * (bz - back_b * wz)
        # ... on the face that it meets: the two shorter components over the longest
        on_s = (abs(a) >= abs(b)) & (abs(a) >= abs(c))
        on_t = (abs(b) >= abs(c)) & (not on_s)
        m = a if on_s else (b if on_t else c)
        am, bm = (ax, bx) if on_s else ((ay, by) if on_t else (az, bz))
        g, ag, bg = (b, ay, by) if on_s else (a, ax, bx)
        h, ah, bh = (b, ay, by) if not (on_s | on_t) else (c, az, bz)
        per = texels / m
        am, bm = am / m, bm / m
        ag, ah = (ag - g * am) * per, (ah - h * am) * per
        bg, bh = (bg - g * bm) * per, (bh - h * bm) * per
        rho2[k] = max(ag * ag + ah * ah, bg * bg + bh * bh)


@helper
def weigh_haze(xs: F32, ray: F32, haze: F32, weight: F32, beyond: F32) -> bool:
    """Write how much haze lies before each pixel of a run, and 1 where the sky hides the plane; return whether it does.

    ``ray`` is that of the infinite plane. MuJoCo's haze is a cone around the camera: from the plane, at 1 − haze of the
    sky's radius, up to the horizon, densest where the plane meets the sky. A ray that falls by ``drop`` per meter meets
    it at the share ``height`` of its height.
    """
    fades, radius, above = haze[3], haze[4], ray[2]
    dense = fades / (_ONE + fades)
    hides = False
    for k in range(xs.shape[0]):
        dx, dy, dz = ray[6] + xs[k] * ray[9], ray[7] + xs[k] * ray[10], ray[8] + xs[k] * ray[11]
        drop = -dz / np.sqrt(dx * dx + dy * dy)
        height = _ONE - drop * radius / (above + drop * radius * fades)
        seen = (above >= _ZERO) & (drop > _ZERO) & (height > _ZERO)
        far = height > dense
        share = (_ONE - height) / (_ONE - dense) if far else height / dense
        weight[k] = share if seen else _ZERO
        beyond[k] = _ONE if far & seen else _ZERO
        hides |= far & seen
    return hides


@helper
def blend_haze(red: F32, green: F32, blue: F32, weight: F32, haze: F32) -> None:
    """Blend colors into the haze."""
    hr, hg, hb = haze[0], haze[1], haze[2]
    for k in range(red.shape[0]):
        w = weight[k]
        red[k] = min(red[k], _ONE) + w * (hr - min(red[k], _ONE))
        green[k] = min(green[k], _ONE) + w * (hg - min(green[k], _ONE))
        blue[k] = min(blue[k], _ONE) + w * (hb - min(blue[k], _ONE))


@helper
def see_sky(cam: F64, lens: F32, columns: F32, at: int, end: int, work: F32, textures: RenderTextures) -> None:
    """Write the colors of the sky in columns at … end."""
    n, xs, levels = end - at, columns[at:end], textures.levels[textures.sky]
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
    cube = textures.kinds[textures.sky] == TEXTURE_CUBE
    multiply_texture(cube, work, at, end, textures.texels, levels, textures.corners, textures.packed)


_TURN = np.float32(1 / (2 * math.pi))


@helper
def _footprint(x: np.float32, t: np.float32, ray: F32, normal: F32, by_u: F32, by_v: F32) -> np.float32:
    """Squared texels of a pixel, from the gradients of texel coordinates and the surface's normal."""
    dx, dy, dz = ray[6] + x * ray[9], ray[7] + x * ray[10], ray[8] + x * ray[11]
    facing = dot(normal[0], normal[1], normal[2], dx, dy, dz)
    # edge-on, a pixel would span the whole surface
    facing = facing if abs(facing) > _EDGE_ON else _EDGE_ON
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
        across = max(px * px + py * py, _EDGE_ON)
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
