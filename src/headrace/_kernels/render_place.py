"""The first stage: everything about a row relative to its camera, per geom and per light."""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import helper, kernel
from headrace._kernels.render_bounds import pixel_bounds
from headrace._kernels.render_math import dot
from headrace._kernels.render_scene import (
    BOX,
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    I32,
    OPAQUE,
    PLANE,
    SPHERE,
    RenderFrame,
    RenderPlaces,
    RenderRows,
)

# a plane seen from behind keeps this much of its alpha, as in MuJoCo's renderer
_BEHIND = np.float32(0.3)


@helper
def is_ball(kind: int) -> bool:
    """Whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)


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
            if not extent < 1e15:
                # a diverged simulation: poses that are not numbers are not drawn
                for a in range(4):
                    bounds[a] = 0
            distance[i, g] = np.sqrt(away_x * away_x + away_y * away_y + away_z * away_z)
        rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
        sizes = all_sizes[i if all_sizes.shape[0] > 1 else 0]
        places.transparent[i] = _transparent_order(
            types, sizes, rgba, rays[i], distance[i], places.alpha[i], places.order[i]
        )
        _place_lights(
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


@helper
def _place_lights(
    sources: I32,
    types: I32,
    ambient: F32,
    global_ambient: np.float32,
    cam: F64,
    cam_pos: F64,
    light_pos: F64,
    light_dir: F64,
    out: F32,
    everywhere: F32,
) -> None:
    """Lights in camera coordinates, and what of their light falls everywhere."""
    for a in range(3):
        everywhere[a] = global_ambient
        for k in range(types.shape[0]):
            source, directional = sources[k], types[k] == DIRECTIONAL
            if directional:
                everywhere[a] += ambient[k, a]
            if source < 0:
                # the headlight shines along the optical axis
                out[k, a] = np.float32(1 if a == 2 else 0)
            else:
                pos, way = light_pos[source], light_dir[source]
                along = dot(cam[a], cam[3 + a], cam[6 + a], way[0], way[1], way[2])
                x, y, z = pos[0] - cam_pos[0], pos[1] - cam_pos[1], pos[2] - cam_pos[2]
                there = dot(cam[a], cam[3 + a], cam[6 + a], x, y, z)
                out[k, a] = np.float32(-along if directional else there)
                out[k, 3 + a] = np.float32(along)


@helper
def _transparent_order(types: I32, sizes: F64, rgba: F32, rays: F64, distance: F64, alpha: F32, order: I32) -> int:
    """Fill each geom's alpha and the transparent ones from near to far, as MuJoCo sorts them; return how many."""
    count = 0
    for g in range(alpha.shape[0]):
        alpha[g] = rgba[g, 3]
        kind = types[g]
        size = sizes[g]
        if kind == PLANE:
            distance[g] = 1e10
            if rays[g, 2] < 0.0:
                alpha[g] *= _BEHIND
        elif kind == SPHERE:
            distance[g] -= size[0]
        elif kind == CAPSULE:
            distance[g] -= size[0] + size[1]
        elif kind == CYLINDER:
            distance[g] -= np.sqrt(size[0] ** 2 + size[1] ** 2)
        elif kind == ELLIPSOID:
            distance[g] -= max(size[0], max(size[1], size[2]))
        else:
            distance[g] -= np.sqrt(size[0] ** 2 + size[1] ** 2 + size[2] ** 2)
        if np.float32(0) < alpha[g] < OPAQUE:
            at = count
            while at > 0 and distance[order[at - 1]] > distance[g]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = g
            count += 1
    return count
