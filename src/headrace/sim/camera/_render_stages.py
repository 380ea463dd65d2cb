"""The stages that every picture passes, as kernels over a chunk of rows; what they call is in the modules beside it.

Place: everything about a row relative to its camera. Restore: depths of what lies under the row. Cast: the nearest
surface of each pixel (shapes of triangles: :mod:`render_triangles`). Paint: from depths and ids to colors, line by
line: normals and base colors by runs, light for all, textures by runs.

``work`` is float32 (12, W): rows 0–2 the normal (then texture coordinates), 6–8 red, green and blue, 9–10 scratch, from
11 on what of each light with a shadow arrives.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace.sim.camera._render_light import (
    add_highlights,
    add_reflection,
    blend_colors,
    darken,
    face_normals,
    illuminate,
    local_points,
    primitive_normals,
    run_end,
    smooth_normals,
    turn,
    write_colors,
)
from headrace.sim.camera._render_place import (
    hit_ball,
    hit_box,
    hit_capsule,
    hit_cylinder,
    hit_plane,
    is_behind,
    order_transparent,
    pixel_bounds,
    place_lights,
)
from headrace.sim.camera._render_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    F32,
    F64,
    I32,
    PLANE,
    SPHERE,
    TEXTURE_CUBE,
    U8,
    WRAPS_PRIMITIVE,
    WRAPS_SHAPE,
    RenderFrame,
    RenderLighting,
    RenderPlaces,
    RenderRows,
    RenderTextures,
    RenderTriangles,
    ShadowMaps,
    along,
    dot,
    is_ball,
    line_ray,
)
from headrace.sim.camera._render_texture import (
    blend_haze,
    multiply_texture,
    project_cube,
    project_plane,
    scale_texture,
    see_sky,
    weigh_haze,
    wrap_primitive,
    wrap_shape,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)


@kernel(checked_division=False)
def place(
    types: I32,
    shapes: I32,
    boxes: F64,
    light_source: I32,
    light_types: I32,
    light_ambient: F32,
    global_ambient: float,
    rows: RenderRows,
    frame: RenderFrame,
    places: RenderPlaces,
) -> None:
    """Fill ``places`` for all rows; tables of geoms and lights as in ``RenderScene``."""
    step_x = (frame.right - frame.left) / frame.width
    step_y = (frame.top - frame.bottom) / frame.height
    first_x = frame.left + 0.5 * step_x
    first_y = frame.top - 0.5 * step_y
    deep = frame.perspective
    flat = 1.0 - deep
    # the fields of a named tuple are taken out once: each time costs a reference count, and time to compile
    all_mat, all_pos, all_sizes = rows.geom_mat, rows.geom_pos, rows.sizes
    rays, centers, all_axes, all_bounds = places.rays, places.centers, places.axes, places.bounds
    all_clipped, distance = places.clipped, places.distance
    axes = np.empty((3, 3))
    box = np.empty(6)
    for i in range(rows.camera_pos.shape[0]):
        cam, cam_pos = rows.camera_mat[i], rows.camera_pos[i]
        for g in range(types.shape[0]):
            mat, pos, ray = all_mat[i, g], all_pos[i, g], rays[i, g]
            kind, size = types[g], all_sizes[i if all_sizes.shape[0] > 1 else 0, g]
            center = centers[i, g]
            away_x, away_y, away_z = cam_pos[0] - pos[0], cam_pos[1] - pos[1], cam_pos[2] - pos[2]
            extent = 0.0
            for a in range(3):
                m_0, m_1, m_2 = mat[a], mat[3 + a], mat[6 + a]
                rel_x = dot(m_0, m_1, m_2, cam[0], cam[3], cam[6])
                rel_y = dot(m_0, m_1, m_2, cam[1], cam[4], cam[7])
                rel_z = dot(m_0, m_1, m_2, cam[2], cam[5], cam[8])
                # balls work in coordinates divided by their size
                unit = 1.0 / (size[0] if kind == SPHERE else size[a]) if is_ball(kind) else 1.0
                to_x, to_y = rel_x * unit, rel_y * unit
                here = dot(m_0, m_1, m_2, away_x, away_y, away_z) * unit
                ray[a] = here + flat * (to_x * first_x + to_y * first_y)
                ray[3 + a] = flat * to_x * step_x
                ray[6 + a] = -flat * to_y * step_y
                ray[9 + a] = deep * (to_x * first_x + to_y * first_y) - rel_z * unit
                ray[12 + a] = deep * to_x * step_x
                ray[15 + a] = -deep * to_y * step_y
                axes[a, 0], axes[a, 1], axes[a, 2] = rel_x, rel_y, -rel_z
                all_axes[i, g, 3 * a] = np.float32(rel_x)
                all_axes[i, g, 3 * a + 1] = np.float32(rel_y)
                all_axes[i, g, 3 * a + 2] = np.float32(rel_z)
                center[a] = -dot(cam[a], cam[3 + a], cam[6 + a], away_x, away_y, away_z)
                extent += abs(center[a]) + abs(rel_x) + abs(rel_y) + abs(rel_z)
            center[2] = -center[2]
            # the moment is linear in the ray: o × d, and one of its factors is the same for all pixels
            for k in range(3):
                o, d, out = (0, 9 + 3 * k, 18 + 3 * k) if deep > 0.0 else (3 * k, 9, 18 + 3 * k)
                ray[out] = ray[o + 1] * ray[d + 2] - ray[o + 2] * ray[d + 1]
                ray[out + 1] = ray[o + 2] * ray[d] - ray[o] * ray[d + 2]
                ray[out + 2] = ray[o] * ray[d + 1] - ray[o + 1] * ray[d]
            for a in range(3):
                box[a] = 0.0 if kind == BOX else boxes[g, a]
                box[3 + a] = size[a] if kind == BOX else boxes[g, 3 + a]
            bounds = all_bounds[i, g]
            corners = kind == BOX or shapes[g] >= 0
            clipped = pixel_bounds(kind, corners, box, size, axes, center, frame, bounds)
            all_clipped[i, g] = 1 if clipped else 0
            # parallel rays may meet a plane from its other side, which MuJoCo culls
            hidden = (
                kind == PLANE
                and deep == 0.0
                and not frame.light
                and (ray[11] > 0.0) != is_behind(all_axes[i, g], center)
            )
            if hidden or not extent < 1e15:
                # a diverged simulation: poses that are not numbers are not drawn
                for a in range(4):
                    bounds[a] = 0
            distance[i, g] = np.sqrt(away_x * away_x + away_y * away_y + away_z * away_z)
        rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
        sizes = all_sizes[i if all_sizes.shape[0] > 1 else 0]
        places.transparent[i] = order_transparent(
            types, sizes, rgba, all_axes[i], centers[i], distance[i], places.alpha[i], places.order[i]
        )
        place_lights(
            light_source,
            light_types,
            light_ambient,
            np.float32(global_ambient),
            cam,
            cam_pos,
            rows.light_pos[i],
            rows.light_dir[i],
            places.lights[i],
            places.ambient[i],
        )


@kernel()
def restore(lines: I32, under: I32, layers: F32, far: np.float32, z: F32, ids: I32) -> None:
    """Put depths back within the spans, and no surface: those of layers[under[i]], or ``far`` where that is -1."""
    for i in range(lines.shape[0]):
        layer = under[i]
        for y in range(lines.shape[1]):
            if layer >= 0:
                for x in range(lines[i, y, 0], lines[i, y, 1]):
                    z[i, y, x] = layers[layer, y, x]
            else:
                for x in range(lines[i, y, 0], lines[i, y, 1]):
                    z[i, y, x] = far
            for x in range(lines[i, y, 0], lines[i, y, 1]):
                ids[i, y, x] = -1


@kernel(checked_division=False)
def find_mirror(
    g: int,
    face_bits: int,
    kind: int,
    above: F64,
    sizes: F64,
    places: RenderPlaces,
    z: F32,
    ids: I32,
    lines: I32,
    floors: F32,
) -> None:
    """Write depths float32 (n, H, W) where geom ``g`` shows its upper side, infinity elsewhere; and spans around it.

    ``above`` (n,) is how far the camera is in front of that side, ``sizes`` (n, 3) the geom's.
    """
    all_rays, bounds, line = places.rays, places.bounds, np.empty(24, np.float32)
    for i in range(floors.shape[0]):
        for y in range(floors.shape[1]):
            floors[i, y, :] = np.float32(np.inf)
            lines[i, y, 0] = lines[i, y, 1] = 0
        x_0, x_1 = bounds[i, g, 0], bounds[i, g, 1]
        if not above[i] > 0.0 or x_0 >= x_1:
            continue
        for y in range(bounds[i, g, 2], bounds[i, g, 3]):
            lines[i, y, 0], lines[i, y, 1] = x_0, x_1
            line_ray(all_rays[i, g], y, line)
            for x in range(x_0, x_1):
                up = np.float32(0)
                if kind == BOX:
                    up = along(line[2], line[5], line[8], line[11], np.float32(x), z[i, y, x]) - np.float32(sizes[i, 2])
                # the sides of a box show nothing
                if ids[i, y, x] >> face_bits == g and up > np.float32(-1e-4 * sizes[i, 2]) - np.float32(1e-6):
                    floors[i, y, x] = z[i, y, x]


@kernel()
def find_lines(bounds: I32, alphas: F32, first: I32, last: I32, alpha: np.float32, lines: I32) -> None:
    """Spans int32 (n, H, 2) that geoms first[i] … last[i] of at least alpha can touch; empty ones are (0, 0)."""
    for i in range(first.shape[0]):
        for y in range(lines.shape[1]):
            lines[i, y, 0], lines[i, y, 1] = 32767, 0
        for g in range(first[i], last[i]):
            x_0, x_1 = bounds[i, g, 0], bounds[i, g, 1]
            if x_0 < x_1 and alphas[i, g] >= alpha:
                for y in range(bounds[i, g, 2], bounds[i, g, 3]):
                    lines[i, y, 0], lines[i, y, 1] = min(lines[i, y, 0], x_0), max(lines[i, y, 1], x_1)
        for y in range(lines.shape[1]):
            lines[i, y, 0] = min(lines[i, y, 0], lines[i, y, 1])


@kernel(checked_division=False)
def cast_primitives(
    types: I32,
    shapes: I32,
    face_bits: int,
    sizes: F64,
    rays: F64,
    bounds: I32,
    alphas: F32,
    first: I32,
    last: I32,
    alpha: np.float32,
    below: np.float32,
    all_floors: F32 | None,
    line: F32,
    xs: F32,
    nears: F32,
    z: F32,
    ids: I32,
) -> None:
    """Put the primitives among geoms first[i] … last[i] of each row i into its depth buffer, those of alpha … below.

    ``types`` and ``shapes`` as in ``RenderScene``, ``rays``, ``bounds`` and ``alphas`` as in ``RenderPlaces`` (single
    arrays, since each one that is passed costs time to compile); ``sizes`` float64 (n or 1, G, 3) as in the model;
    ``line`` float32 (24,) is scratch. Surfaces nearer than ``nears`` (W,) are not seen, in a mirror those nearer than
    ``all_floors`` (n, H, W).
    """
    size = np.empty(3, np.float32)
    for i in range(first.shape[0]):
        for g in range(first[i], last[i]):
            kind = types[g]
            x_0, x_1 = bounds[i, g, 0], bounds[i, g, 1]
            if shapes[g] >= 0 or x_0 >= x_1 or not alpha <= alphas[i, g] < below:
                continue
            code = np.int32(g << face_bits)
            for a in range(3):
                size[a] = np.float32(sizes[i if sizes.shape[0] > 1 else 0, g, a])
            for y in range(bounds[i, g, 2], bounds[i, g, 3]):
                line_ray(rays[i, g], y, line)
                z_run, ids_run, xs_run = z[i, y, x_0:x_1], ids[i, y, x_0:x_1], xs[x_0:x_1]
                least = nears[x_0:x_1] if all_floors is None else all_floors[i, y, x_0:x_1]
                if kind == PLANE:
                    hit_plane(z_run, ids_run, xs_run, line, size, least, code)
                elif is_ball(kind):
                    hit_ball(z_run, ids_run, xs_run, line, least, code)
                elif kind == CAPSULE:
                    hit_capsule(z_run, ids_run, xs_run, line, size, least, code)
                elif kind == CYLINDER:
                    hit_cylinder(z_run, ids_run, xs_run, line, size, least, code)
                elif kind == BOX:
                    hit_box(z_run, ids_run, xs_run, line, size, least, code)


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
    mirror: int,
    reflection: U8 | None,
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
    geom, other rows keep what is there. ``reflection`` (n, H, W, 3) is added to geom ``mirror``. What a scene has not
    (triangles, textures, ``wraps``: 2D textures on what is not a plane, shadows, highlights, a mirror) is None and not
    compiled. Arrays as in ``RenderScene``, ``RenderRows``, ``RenderPlaces`` and ``RenderScratch``, passed singly since
    each costs time to compile.
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
    size, scale = np.empty(3, np.float32), np.empty(5, np.float32)
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
                    darken(shadows, i, maps, scattered, lights, diffuse, z_line, xs, lit_first, lit_last, lens, work)
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
                            for a in range(3):
                                size[a] = np.float32(sizes[g, a])
                            scale_texture(int(types[g]), int(shapes[g]), cube, textures.repeats[g], size, scale)
                            u, v, rho2 = work[0, at:end], work[1, at:end], work[9, at:end]
                            for k in range(end - at):
                                red[k], green[k], blue[k] = min(red[k], _ONE), min(green[k], _ONE), min(blue[k], _ONE)
                            if cube:
                                w = work[2, at:end]
                                if triangles is not None:  # noqa: SIM102  # as above
                                    if shapes[g] >= 0:
                                        face = int(triangles.ranges[shapes[g], 2])
                                        face_normals(ids_line[at:end], mask, face, triangles.planes, u, v, w)
                                if shapes[g] < 0:
                                    local_points(z_line[at:end], xs[at:end], line, u, v, w)
                                    if not is_ball(int(types[g])):  # whose points are its normals
                                        primitive_normals(int(types[g]), sizes[g], u, v, w)
                                project_cube(
                                    int(types[g]), scale, z_line[at:end], xs[at:end], line, size, levels, u, v, w, rho2
                                )
                            elif plain:
                                project_plane(scale, z_line[at:end], xs[at:end], line, levels, u, v, rho2)
                            if wraps is not None:  # noqa: SIM102  # as above
                                if wraps[g] == WRAPS_PRIMITIVE:
                                    wrap_primitive(
                                        int(types[g]), scale, z_line[at:end], xs[at:end], line, size, levels, u, v, rho2
                                    )
                            if wraps is not None and triangles is not None:  # noqa: SIM102  # as above
                                if wraps[g] == WRAPS_SHAPE:
                                    of, ids_run, z_run = int(shapes[g]), ids_line[at:end], z_line[at:end]
                                    wrap_shape(
                                        triangles, of, scale, z_run, xs[at:end], ids_run, mask, line, levels, u, v, rho2
                                    )
                            corners, packed = textures.corners, textures.packed
                            multiply_texture(cube, work, at, end, textures.texels, levels, corners, packed)
                    if reflection is not None:  # noqa: SIM102  # as above
                        if g == mirror:
                            add_reflection(reflection[i, y, at:end], red, green, blue)
                    if textures is not None:  # noqa: SIM102  # as above
                        if g == textures.haze_plane and not veil:
                            line_ray(rays[i, g], y, line)
                            weight, beyond = work[9, at:end], work[10, at:end]
                            if weigh_haze(xs[at:end], line, textures.haze, weight, beyond):
                                for a in range(3):
                                    for k in range(at, end):
                                        work[3 + a, k] = work[6 + a, k]
                                see_sky(camera_mat[i], lens, xs, at, end, work, textures)
                                weigh_haze(xs[at:end], line, textures.haze, weight, beyond)
                                for a in range(3):
                                    for k in range(at, end):
                                        work[6 + a, k] = work[6 + a, k] if work[10, k] > _ZERO else work[3 + a, k]
                            blend_haze(red, green, blue, weight, textures.haze)
                    if veil:
                        blend_colors(out[at:end], red, green, blue, alpha[i])
                    elif not bare:
                        write_colors(out[at:end], red, green, blue)
                elif bare:
                    for a in range(3):
                        for k in range(at, end):
                            work[6 + a, k] = _ZERO
                    if textures is not None:
                        if textures.sky >= 0:
                            see_sky(camera_mat[i], lens, xs, at, end, work, textures)
                        if textures.haze_plane >= 0:
                            line_ray(rays[i, textures.haze_plane], y, line)
                            weigh_haze(xs[at:end], line, textures.haze, work[9, at:end], work[10, at:end])
                            blend_haze(red, green, blue, work[9, at:end], textures.haze)
                at = end
            if bare:
                write_colors(out[first:last], work[6, first:last], work[7, first:last], work[8, first:last])
