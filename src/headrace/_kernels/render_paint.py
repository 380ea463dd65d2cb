"""From depths and ids to colors, line by line: normals and base colors by runs, light for all, textures by runs.

``work`` is float32 (12, W): rows 0–2 the normal (then texture coordinates), 6–8 red, green and blue, 9–10 scratch, from
11 on what of each light with a shadow arrives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import helper, kernel
from headrace._kernels.render_light import (
    add_highlights,
    blend_colors,
    darken,
    illuminate,
    local_points,
    primitive_normals,
    run_end,
    smooth_normals,
    turn,
    write_colors,
)
from headrace._kernels.render_math import along, line_ray
from headrace._kernels.render_place import is_ball
from headrace._kernels.render_scene import (
    CAPSULE,
    ELLIPSOID,
    F32,
    F64,
    I32,
    PLANE,
    TEXTURE_CUBE,
    U8,
    WRAPS_PRIMITIVE,
    WRAPS_SHAPE,
    RenderFrame,
    RenderLighting,
    RenderTextures,
    RenderTriangles,
    ShadowMaps,
)
from headrace._kernels.render_texture import multiply_texture
from headrace._kernels.render_wrap import wrap_primitive, wrap_shape

_ZERO = np.float32(0)
_ONE = np.float32(1)


@kernel(checked_division=False)
def paint(
    types: I32,
    shapes: I32,
    face_bits: int,
    emission: F32,
    lighting: RenderLighting,
    frame: RenderFrame,
    all_sizes: F64,
    all_rgba: F32,
    all_diffuse: F32,
    rays: F64,
    all_axes: F32,
    all_lights: F32,
    all_ambient: F32,
    triangles: RenderTriangles | None,
    textures: RenderTextures | None,
    wraps: I32 | None,
    camera_mat: F64,
    shadows: ShadowMaps | None,
    gloss: F32 | None,
    lines: I32,
    alpha: F32,
    background: NDArray[np.bool_],
    line: F32,
    work: F32,
    xs: F32,
    z: F32,
    ids: I32,
    rgb: U8,
) -> None:
    """Colors of n rows into ``rgb`` uint8 (n, H, W, 3), within the spans ``lines`` int32 (n, H, 2).

    An alpha float32 (n,) below 1 blends over what is there. Rows with ``background`` get the sky in pixels without a
    geom, other rows keep what is there. What a scene has not (triangles, textures, ``wraps``: 2D textures on what is
    not a plane, shadows, highlights) is None and not compiled. Arrays as in ``RenderScene``, ``RenderRows``,
    ``RenderPlaces`` and ``RenderScratch``, passed singly since each costs time to compile.
    """
    bits = face_bits
    mask = np.int32((1 << bits) - 1)
    # the fields of a named tuple are taken out once: each time costs a reference count, and time to compile
    kinds, cones, maps = lighting.types, lighting.shape, lighting.maps
    scattered, shine = lighting.ambient, lighting.specular
    step_y = (frame.top - frame.bottom) / frame.height
    lens = np.empty(5, np.float32)
    lens[0] = np.float32(frame.left + 0.5 * (frame.right - frame.left) / frame.width)
    lens[1] = np.float32((frame.right - frame.left) / frame.width)
    lens[3] = np.float32(frame.perspective)
    lens[4] = np.float32(1.0 - frame.perspective)
    size = np.empty(3, np.float32)
    for i in range(lines.shape[0]):
        sizes = all_sizes[i if all_sizes.shape[0] > 1 else 0]
        rgba = all_rgba[i if all_rgba.shape[0] > 1 else 0]
        diffuse = all_diffuse[i if all_diffuse.shape[0] > 1 else 0]
        lights, ambient = all_lights[i], all_ambient[i]
        veil, bare = alpha[i] < _ONE, background[i]
        for y in range(frame.height):
            first, last = int(np.int64(lines[i, y, 0])), int(np.int64(lines[i, y, 1]))
            if first >= last:
                continue
            z_line, ids_line, out = z[i, y], ids[i, y], rgb[i, y]
            lens[2] = np.float32(frame.top - (y + 0.5) * step_y)
            lit_first, lit_last = last, first
            at = first
            while at < last:
                end = run_end(ids_line, at, last, bits)
                g = ids_line[at] >> bits
                if g >= 0:
                    lit_first, lit_last = min(lit_first, at), end
                    line_ray(rays[i, g], y, line)
                    nx, ny, nz = work[0, at:end], work[1, at:end], work[2, at:end]
                    local_points(z_line[at:end], xs[at:end], line, nx, ny, nz)
                    if triangles is not None:  # noqa: SIM102  # only a bare None is not compiled
                        if shapes[g] >= 0:
                            face = int(triangles.ranges[shapes[g], 2])
                            smooth_normals(ids_line[at:end], mask, face, triangles.normals, nx, ny, nz)
                    if shapes[g] < 0:
                        primitive_normals(int(types[g]), sizes[g], nx, ny, nz)
                    turn(all_axes[i, g], nx, ny, nz)
                at = end
            for a in range(3):
                for k in range(lit_first, lit_last):
                    work[6 + a, k] = ambient[a]
            if lit_first < lit_last:
                illuminate(kinds, scattered, cones, lights, diffuse, z_line, xs, lit_first, lit_last, lens, work)
                if shadows is not None:
                    darken(
                        shadows.depth,
                        i,
                        maps,
                        shadows.basis[i],
                        shadows.half,
                        scattered,
                        lights,
                        diffuse,
                        z_line,
                        xs,
                        lit_first,
                        lit_last,
                        lens,
                        work,
                    )
            at = first
            while at < last:
                end = run_end(ids_line, at, last, bits)
                g = ids_line[at] >> bits
                red, green, blue = work[6, at:end], work[7, at:end], work[8, at:end]
                if g >= 0:
                    tint_r, tint_g, tint_b, glow = rgba[g, 0], rgba[g, 1], rgba[g, 2], emission[g]
                    for k in range(end - at):
                        red[k] = (red[k] + glow) * tint_r
                        green[k] = (green[k] + glow) * tint_g
                        blue[k] = (blue[k] + glow) * tint_b
                    if gloss is not None:  # noqa: SIM102  # as above
                        if gloss[g, 0] > _ZERO:
                            add_highlights(
                                kinds, shine, cones, lights, gloss[g], maps, z_line[at:end], xs[at:end], lens, at, work
                            )
                    if textures is not None:
                        texture = textures.of_geom[g]
                        plain = types[g] == PLANE
                        line_ray(rays[i, g], y, line)
                        if texture >= 0:
                            cube = textures.kinds[texture] == TEXTURE_CUBE
                            levels = textures.levels[texture]
                            scale = textures.scale[g]
                            for a in range(3):
                                size[a] = np.float32(sizes[g, a])
                            u, v, rho2 = work[0, at:end], work[1, at:end], work[9, at:end]
                            for k in range(end - at):
                                red[k], green[k], blue[k] = min(red[k], _ONE), min(green[k], _ONE), min(blue[k], _ONE)
                            if cube or plain:
                                _project_texture(
                                    int(types[g]), scale, cube, z_line, xs, at, end, line, size, work, levels
                                )
                            if wraps is not None:  # noqa: SIM102  # as above
                                if wraps[g] == WRAPS_PRIMITIVE:
                                    wrap_primitive(
                                        int(types[g]), scale, z_line[at:end], xs[at:end], line, size, levels, u, v, rho2
                                    )
                            if wraps is not None and triangles is not None:  # noqa: SIM102  # as above
                                if wraps[g] == WRAPS_SHAPE:
                                    wrap_shape(
                                        scale,
                                        z_line[at:end],
                                        xs[at:end],
                                        ids_line[at:end],
                                        mask,
                                        int(triangles.ranges[shapes[g], 2]),
                                        int(triangles.first_texcoord[shapes[g]]),
                                        triangles.normals,
                                        triangles.planes,
                                        triangles.texcoords,
                                        line,
                                        levels,
                                        u,
                                        v,
                                        rho2,
                                    )
                            corners, packed = textures.corners, textures.packed
                            multiply_texture(cube, work, at, end, textures.texels, levels, corners, packed)
                        if plain and textures.sky >= 0 and sizes[g, 0] <= 0.0 and sizes[g, 1] <= 0.0:
                            _fade_into_haze(red, green, blue, z_line[at:end], xs[at:end], line, textures.haze)
                    if veil:
                        blend_colors(out[at:end], red, green, blue, alpha[i])
                    elif not bare:
                        write_colors(out[at:end], red, green, blue)
                elif bare:
                    for a in range(3):
                        for k in range(at, end):
                            work[6 + a, k] = _ZERO
                    if textures is not None:  # noqa: SIM102  # as above
                        if textures.sky >= 0:
                            levels = textures.levels[textures.sky]
                            _sky(camera_mat[i], lens, xs, at, end, work, levels)
                            cube = textures.kinds[textures.sky] == TEXTURE_CUBE
                            corners, packed = textures.corners, textures.packed
                            multiply_texture(cube, work, at, end, textures.texels, levels, corners, packed)
                at = end
            if bare:
                write_colors(out[first:last], work[6, first:last], work[7, first:last], work[8, first:last])


@helper
def _project_texture(
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
def _fade_into_haze(red: F32, green: F32, blue: F32, z: F32, xs: F32, ray: F32, haze: F32) -> None:
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
def _sky(cam: F64, lens: F32, columns: F32, at: int, end: int, work: F32, levels: I32) -> None:
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
