"""The first stage: everything about a row relative to its camera, per geom and per light."""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import helper, inline, kernel
from headrace._kernels.render_bounds import pixel_bounds
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
    RenderScene,
)

# a plane seen from behind keeps this much of its alpha, as in MuJoCo's renderer
_BEHIND = np.float32(0.3)


@inline
def is_ball(kind: int) -> bool:
    """Whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)


@kernel(checked_division=False)
def place(scene: RenderScene, rows: RenderRows, frame: RenderFrame, places: RenderPlaces) -> None:
    """Fill ``places`` for all rows."""
    step_x = (frame.right - frame.left) / frame.width
    step_y = (frame.top - frame.bottom) / frame.height
    first_x = frame.left + 0.5 * step_x
    first_y = frame.top - 0.5 * step_y
    deep = frame.perspective
    flat = 1.0 - deep
    # the fields of a named tuple are taken out once: each time costs a reference count, and time to compile
    types, shapes, boxes = scene.geom_types, scene.geom_shapes, scene.geom_boxes
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
                rel_x = mat[a] * cam[0] + mat[3 + a] * cam[3] + mat[6 + a] * cam[6]
                rel_y = mat[a] * cam[1] + mat[3 + a] * cam[4] + mat[6 + a] * cam[7]
                rel_z = mat[a] * cam[2] + mat[3 + a] * cam[5] + mat[6 + a] * cam[8]
                # balls work in coordinates divided by their size
                unit = 1.0 / (size[0] if kind == SPHERE else size[a]) if is_ball(kind) else 1.0
                to_x, to_y = rel_x * unit, rel_y * unit
                here = (mat[a] * away_x + mat[3 + a] * away_y + mat[6 + a] * away_z) * unit
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
                center[a] = -(cam[a] * away_x + cam[3 + a] * away_y + cam[6 + a] * away_z)
                extent += abs(center[a]) + abs(rel_x) + abs(rel_y) + abs(rel_z)
            center[2] = -center[2]
            # the moment is linear in the ray: o × d, and one of its factors is the same for all pixels
            _cross(ray, 0, 9, 18)
            for axis in range(2):
                at = 3 * (axis + 1)
                if deep > 0.0:
                    _cross(ray, 0, 9 + at, 18 + at)
                else:
                    _cross(ray, at, 9, 18 + at)
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
            scene.light_source,
            scene.light_types,
            scene.light_ambient,
            scene.global_ambient,
            cam,
            cam_pos,
            rows.light_pos[i],
            rows.light_dir[i],
            places.lights[i],
            places.ambient[i],
        )


@helper
def _cross(ray: F64, a: int, b: int, out: int) -> None:
    ray[out] = ray[a + 1] * ray[b + 2] - ray[a + 2] * ray[b + 1]
    ray[out + 1] = ray[a + 2] * ray[b] - ray[a] * ray[b + 2]
    ray[out + 2] = ray[a] * ray[b + 1] - ray[a + 1] * ray[b]


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
                along = cam[a] * way[0] + cam[3 + a] * way[1] + cam[6 + a] * way[2]
                there = (
                    cam[a] * (pos[0] - cam_pos[0])
                    + cam[3 + a] * (pos[1] - cam_pos[1])
                    + cam[6 + a] * (pos[2] - cam_pos[2])
                )
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


@inline
def line_ray(ray: F64, y: int, out: F32) -> None:
    """The ray of line y at column 0 and its steps in x: origin, direction, moment; then steps in y of the first two."""
    for a in range(3):
        out[a] = np.float32(ray[a] + y * ray[6 + a])
        out[3 + a] = np.float32(ray[3 + a])
        out[6 + a] = np.float32(ray[9 + a] + y * ray[15 + a])
        out[9 + a] = np.float32(ray[12 + a])
        out[12 + a] = np.float32(ray[18 + a] + y * ray[24 + a])
        out[15 + a] = np.float32(ray[21 + a])
        out[18 + a] = np.float32(ray[6 + a])
        out[21 + a] = np.float32(ray[15 + a])
