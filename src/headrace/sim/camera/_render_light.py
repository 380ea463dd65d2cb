"""Normals and light along a line of pixels, in camera coordinates (x right, y up, z backward).

``work`` is float32 (12, W): rows 0–2 the normal, 6–8 red, green and blue, 11 what of a light's rays arrives, the others
scratch. Light is Lambert's: ambient and diffuse of each light, spot cone and attenuation as in OpenGL; highlights and
shadows where asked for. Normals are found run by run (pixels that see the same geom); light is added to the whole line
at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, kernel
from headrace.sim.camera._render_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    I32,
    PLANE,
    U8,
    ShadowMaps,
    along,
    dot,
    line_ray,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TOP = np.float32(255)
_HALF = np.float32(0.5)
_TINY = np.float32(1e-30)


@helper
def run_end(ids: I32, at: int, end: int, bits: int) -> int:
    """Past the last pixel that shows the same geom as pixel ``at``."""
    g = ids[at] >> bits
    at += 1
    while at < end and ids[at] >> bits == g:
        at += 1
    return at


@helper
def local_points(z: F32, xs: F32, ray: F32, px: F32, py: F32, pz: F32) -> None:
    """Find where the rays of a run meet the surface at depths z, in the geom's frame (balls divided by their size)."""
    ox, oy, oz, ux, uy, uz = ray[0], ray[1], ray[2], ray[3], ray[4], ray[5]
    dx, dy, dz, sx, sy, sz = ray[6], ray[7], ray[8], ray[9], ray[10], ray[11]
    for k in range(z.shape[0]):
        px[k] = along(ox, ux, dx, sx, xs[k], z[k])
        py[k] = along(oy, uy, dy, sy, xs[k], z[k])
        pz[k] = along(oz, uz, dz, sz, xs[k], z[k])


@helper
def turn(axes: F32, x: F32, y: F32, z: F32) -> None:
    """From the geom's frame to the camera's, in place. ``axes`` float32 (9,): the geom's, in camera coordinates."""
    ax, ay, az, bx, by, bz, cx, cy, cz = axes[0], axes[1], axes[2], axes[3], axes[4], axes[5], axes[6], axes[7], axes[8]
    for k in range(x.shape[0]):
        a, b, c = x[k], y[k], z[k]
        x[k], y[k], z[k] = dot(a, b, c, ax, bx, cx), dot(a, b, c, ay, by, cy), dot(a, b, c, az, bz, cz)


@helper
def primitive_normals(kind: int, sizes: F64, nx: F32, ny: F32, nz: F32) -> None:
    """Compute unit normals of a run that sees a primitive, in its frame, from the points where it sees it, in place.

    A sphere's points, divided by its radius, are its normals.
    """
    n, radius, h = nx.shape[0], np.float32(sizes[0]), np.float32(sizes[1])
    ia, ib, ic = _ONE / radius, _ONE / h, _ONE / np.float32(sizes[2])
    if kind == PLANE:
        for k in range(n):
            nx[k], ny[k], nz[k] = _ZERO, _ZERO, _ONE
    elif kind == ELLIPSOID:
        for k in range(n):
            a, b, c = nx[k] * ia, ny[k] * ib, nz[k] * ic
            inv = _ONE / np.sqrt(dot(a, b, c, a, b, c))
            nx[k], ny[k], nz[k] = a * inv, b * inv, c * inv
    elif kind == CAPSULE:
        for k in range(n):
            nx[k], ny[k], nz[k] = nx[k] * ia, ny[k] * ia, (nz[k] - max(-h, min(h, nz[k]))) * ia
    elif kind == CYLINDER:
        r2, h2 = radius * radius, h * h
        for k in range(n):
            a, b, c = nx[k], ny[k], nz[k]
            # on a cap where the point is relatively farther along the axis than across it
            cap = c * c * r2 > (a * a + b * b) * h2
            side = _ONE if c > _ZERO else -_ONE
            nx[k], ny[k], nz[k] = _ZERO if cap else a * ia, _ZERO if cap else b * ia, side if cap else _ZERO
    elif kind == BOX:
        for k in range(n):
            a, b, c = nx[k] * ia, ny[k] * ib, nz[k] * ic
            on_a = (abs(a) >= abs(b)) & (abs(a) >= abs(c))
            on_b = (abs(b) >= abs(c)) & (not on_a)
            side = a if on_a else (b if on_b else c)
            side = _ONE if side > _ZERO else -_ONE
            nx[k] = side if on_a else _ZERO
            ny[k] = side if on_b else _ZERO
            nz[k] = _ZERO if on_a | on_b else side


@helper
def face_normals(ids: I32, mask: np.int32, first: int, planes: F32, nx: F32, ny: F32, nz: F32) -> None:
    """Compute unit normals of the faces that a run sees of a shape whose first face is ``first``, in its frame."""
    for k in range(ids.shape[0]):
        f = np.uint64(first + (ids[k] & mask))
        nx[k], ny[k], nz[k] = planes[0, f], planes[1, f], planes[2, f]


@helper
def smooth_normals(ids: I32, mask: np.int32, first: int, faces: F32, nx: F32, ny: F32, nz: F32) -> None:
    """Compute unit normals between those of the corners, in the shape's frame, from the points seen, in place.

    ``first`` is the shape's first face in ``RenderTriangles.normals``.
    """
    for k in range(ids.shape[0]):
        face = faces[np.uint64(first + (ids[k] & mask))]
        p, q, r = nx[k], ny[k], nz[k]
        v = min(max(dot(face[0], face[1], face[2], p, q, r) + face[3], _ZERO), _ONE)
        w = min(max(dot(face[4], face[5], face[6], p, q, r) + face[7], _ZERO), _ONE)
        a = dot(_ONE, v, w, face[8], face[11], face[14])
        b = dot(_ONE, v, w, face[9], face[12], face[15])
        c = dot(_ONE, v, w, face[10], face[13], face[16])
        inv = _ONE / np.sqrt(max(dot(a, b, c, a, b, c), _TINY))
        nx[k], ny[k], nz[k] = a * inv, b * inv, c * inv


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
    fade, facing = work[3, first:last], work[4, first:last]
    first_x, step_x, at_y, deep, flat = lens[0], lens[1], lens[2], lens[3], lens[4]
    for i in range(types.shape[0]):
        lx, ly, lz = lights[i, 0], lights[i, 1], lights[i, 2]
        dr, dg, db = diffuse[i, 0], diffuse[i, 1], diffuse[i, 2]
        if types[i] == DIRECTIONAL:
            for k in range(n):
                cosine = max(dot(nx[k], ny[k], nz[k], lx, ly, lz), _ZERO)
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
            distance = np.sqrt(dot(vx, vy, vz, vx, vy, vz))
            power[k] = -dot(vx, vy, vz, ax, ay, az) / distance
            strength[k] = _ONE if power[k] >= cutoff else _ZERO
            fade[k] = _ONE / (k_0 + k_1 * distance + k_2 * distance * distance)
            facing[k] = max(dot(vx, vy, vz, nx[k], ny[k], nz[k]) / distance, _ZERO)
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
            s = strength[k] * fade[k]
            red[k] += s * (ar + dr * facing[k])
            green[k] += s * (ag + dg * facing[k])
            blue[k] += s * (ab + db * facing[k])


@helper
def darken(
    shadows: ShadowMaps,
    row: int,
    light: I32,
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
    """Take a directional light away again where something stands between; note what arrives in rows 11 … of work."""
    maps, basis, half = shadows.depth, shadows.basis[row], shadows.half
    size = maps.shape[2]
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
                seen[k] = _ONE if away <= maps[m, row, int(v), int(u)] + texel else _ZERO
            hidden = _ONE - seen[k]
            cosine = max(dot(nx, ny, nz, lights[i, 0], lights[i, 1], lights[i, 2]), _ZERO)
            for a in range(3):
                work[6 + a, k] = max(work[6 + a, k] - hidden * (ambient[i, a] + diffuse[i, a] * cosine), _ZERO)


@helper
def add_highlights(
    types: I32,
    specular: F32,
    shape: F32,
    lights: F32,
    gloss: F32,
    maps: I32,
    z: F32,
    xs: F32,
    lens: F32,
    at: int,
    work: F32,
) -> None:
    """Blinn's highlights of a run that begins in column ``at``, with the viewer at the camera, as OpenGL has them.

    ``gloss`` float32 (2,): reflectance and exponent. ``maps`` int32 (L,): shadow map of each light, whose row of work
    says where its light arrives, or -1.
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
            strength *= gloss[0] * cosine ** gloss[1]
            for a in range(3):
                work[6 + a, at + k] += strength * specular[i, a]


@helper
def add_reflection(reflection: U8, red: F32, green: F32, blue: F32) -> None:
    """Add what a mirror shows, uint8 (k, 3), to its own colors."""
    unit = _ONE / _TOP
    for k in range(red.shape[0]):
        red[k] = min(min(red[k], _ONE) + unit * np.float32(reflection[k, 0]), _ONE)
        green[k] = min(min(green[k], _ONE) + unit * np.float32(reflection[k, 1]), _ONE)
        blue[k] = min(min(blue[k], _ONE) + unit * np.float32(reflection[k, 2]), _ONE)


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


@kernel()
def copy_depth(lines: I32, z: F32, out: F32) -> None:
    """Depths within the spans into float32 (n, H, W)."""
    for i in range(lines.shape[0]):
        for y in range(lines.shape[1]):
            for x in range(lines[i, y, 0], lines[i, y, 1]):
                out[i, y, x] = z[i, y, x]


@kernel()
def copy_segmentation(lines: I32, ids: I32, geom_ids: I32, bits: int, background: NDArray[np.bool_], out: I32) -> None:
    """Geom ids within the spans into int32 (n, H, W); where nothing is -1 in rows with ``background``, else left."""
    for i in range(lines.shape[0]):
        for y in range(lines.shape[1]):
            for x in range(lines[i, y, 0], lines[i, y, 1]):
                if ids[i, y, x] >= 0:
                    out[i, y, x] = geom_ids[ids[i, y, x] >> bits]
                elif background[i]:
                    out[i, y, x] = -1


@kernel()
def to_gray(rgb: U8, out: U8) -> None:
    """Rec. 601 in integers, the same on every machine: uint8 (n, 3) to (n,)."""
    for k in range(out.shape[0]):
        weighted = np.int32(rgb[k, 0]) * 77 + np.int32(rgb[k, 1]) * 150 + np.int32(rgb[k, 2]) * 29
        out[k] = np.uint8(weighted >> 8)


@kernel(checked_division=False)
def find_normals(
    types: I32,
    shapes: I32,
    face_bits: int,
    sizes: F64,
    camera_mat: F64,
    rays: F64,
    all_axes: F32,
    ranges: I32 | None,
    planes: F32 | None,
    lines: I32,
    background: NDArray[np.bool_],
    line: F32,
    work: F32,
    xs: F32,
    z: F32,
    ids: I32,
    out: F32,
) -> None:
    """Write unit normals of the surfaces in the world into float32 (n, H, W, 3); zero where nothing is."""
    bits = face_bits
    mask, back = np.int32((1 << bits) - 1), np.empty(9, np.float32)
    for i in range(lines.shape[0]):
        # from the camera's coordinates to the world's
        for a in range(3):
            for k in range(3):
                back[3 * a + k] = np.float32(camera_mat[i, 3 * k + a])
        for y in range(lines.shape[1]):
            at, last = int(np.int64(lines[i, y, 0])), int(np.int64(lines[i, y, 1]))
            z_line, ids_line = z[i, y], ids[i, y]
            while at < last:
                g, end = ids_line[at] >> bits, run_end(ids_line, at, last, bits)
                nx, ny, nz = work[0, at:end], work[1, at:end], work[2, at:end]
                if g >= 0:
                    if ranges is not None and planes is not None:  # noqa: SIM102  # only a bare None is not compiled
                        if shapes[g] >= 0:
                            face_normals(ids_line[at:end], mask, int(ranges[shapes[g], 2]), planes, nx, ny, nz)
                    if shapes[g] < 0:
                        line_ray(rays[i, g], y, line)
                        local_points(z_line[at:end], xs[at:end], line, nx, ny, nz)
                        primitive_normals(int(types[g]), sizes[i if sizes.shape[0] > 1 else 0, g], nx, ny, nz)
                    turn(all_axes[i, g], nx, ny, nz)
                    turn(back, nx, ny, nz)
                if g >= 0 or background[i]:
                    for a in range(3):
                        for k in range(at, end):
                            out[i, y, k, a] = work[a, k] if g >= 0 else np.float32(0)
                at = end
