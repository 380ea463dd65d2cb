"""Pictures of many small scenes made of primitives: exact ray hits inside screen-space bounds, then shading by runs.

A task is one band of lines of one row's picture. It works line by line: every geom whose bounds reach the line is
intersected over its span (vectorised, :mod:`raycast_hits`), then runs of pixels that see the same geom are shaded
(:mod:`raycast_shade`). Poses are made relative to the camera in float64, spans run in float32. A pixel is a function of
its row's poses alone: not of other rows, of their number or of threads.
"""

from __future__ import annotations

import numpy as np

from headrace.kernels.compiled import kernel, prange
from headrace.kernels.raycast_hits import hit_ball, hit_box, hit_capsule, hit_cylinder, hit_plane
from headrace.kernels.raycast_paint import shade, shade_sky
from headrace.kernels.raycast_place import OPAQUE, RaycastRows, is_ball, line_ray, place, transparent_order
from headrace.kernels.raycast_scene import BOX, CAPSULE, CYLINDER, F32, I32, PLANE, U8, RaycastFrame, RaycastScene
from headrace.kernels.raycast_shade import blend_colours, write_colours


@kernel(checked_division=False)
def _hit(kind: int, z: F32, ids: I32, xs: F32, ray: F32, size: F32, near: np.float32, g: int) -> None:
    if kind == PLANE:
        hit_plane(z, ids, xs, ray, size, near, g)
    elif is_ball(kind):
        hit_ball(z, ids, xs, ray, near, g)
    elif kind == CAPSULE:
        hit_capsule(z, ids, xs, ray, size, near, g)
    elif kind == CYLINDER:
        hit_cylinder(z, ids, xs, ray, size, near, g)
    elif kind == BOX:
        hit_box(z, ids, xs, ray, size, near, g)


@kernel(checked_division=False)
def _render_band(
    scene: RaycastScene,
    rows: RaycastRows,
    frame: RaycastFrame,
    i: int,
    y_0: int,
    y_1: int,
    rgb: U8,
    depth: F32,
    seg: I32,
) -> None:
    """Lines y_0 … y_1 of row i. An output that is not wanted has no rows."""
    count, width = scene.geom_types.shape[0], frame.width
    rays = np.empty((count, 24))
    bounds = np.empty((count, 4), np.int32)
    lights = np.empty((count, scene.light_types.shape[0], 6), np.float32)
    place(scene, rows, frame, i, rays, bounds, lights)
    rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
    diffuse = rows.diffuse[i if rows.diffuse.shape[0] > 1 else 0]
    alpha = np.empty(count, np.float32)
    order = np.empty(count, np.int32)
    transparent = transparent_order(scene, rgba, rays, alpha, order)
    sizes = scene.geom_sizes.astype(np.float32)
    line = np.empty((count, 18), np.float32)
    work = np.empty((10, width), np.float32)
    index = np.empty((8, width), np.int32)
    packed = np.empty((2, width), np.uint64)
    xs = np.arange(width).astype(np.float32)
    z = np.empty(width, np.float32)
    z_veil = np.empty(width, np.float32)
    ids = np.empty(width, np.int32)
    near, far = np.float32(frame.near), np.float32(frame.far)
    want_rgb = rgb.shape[0] > 0
    for y in range(y_0, y_1):
        z[:] = far
        ids[:] = -1
        for g in range(count):
            b = bounds[g]
            if b[2] <= y < b[3] and b[0] < b[1] and alpha[g] > np.float32(0):
                line_ray(rays[g], y, line[g])
                if alpha[g] >= OPAQUE:
                    span = slice(b[0], b[1])
                    _hit(scene.geom_types[g], z[span], ids[span], xs[span], line[g], sizes[g], near, g)
        if want_rgb:
            at = 0
            while at < width:
                g = ids[at]
                end = at + 1
                while end < width and ids[end] == g:
                    end += 1
                if g >= 0:
                    shade(
                        scene, g, rgba, diffuse, lights, z[at:end], xs[at:end], line[g], sizes[g], work, index, packed
                    )
                else:
                    shade_sky(scene, rows.camera_mat[i], frame, y, xs[at:end], work, index, packed)
                write_colours(rgb[i, y, at:end], work)
                at = end
            # MuJoCo blends transparent geoms from near to far and then from far to near
            for turn in range(2 * transparent):
                g = order[turn if turn < transparent else 2 * transparent - 1 - turn]
                b = bounds[g]
                if not (b[2] <= y < b[3] and b[0] < b[1]):
                    continue
                z_veil[:] = z
                ids[:] = -1
                span = slice(b[0], b[1])
                _hit(int(scene.geom_types[g]), z_veil[span], ids[span], xs[span], line[g], sizes[g], near, g)
                at = b[0]
                while at < b[1]:
                    end = at + 1
                    if ids[at] == g:
                        while end < b[1] and ids[end] == g:
                            end += 1
                        shade(
                            scene,
                            g,
                            rgba,
                            diffuse,
                            lights,
                            z_veil[at:end],
                            xs[at:end],
                            line[g],
                            sizes[g],
                            work,
                            index,
                            packed,
                        )
                        blend_colours(rgb[i, y, at:end], work, np.float32(alpha[g]))
                    at = end
        if depth.shape[0] > 0 or seg.shape[0] > 0:
            if transparent > 0:
                z[:] = far
                ids[:] = -1
                for g in range(count):
                    b = bounds[g]
                    if b[2] <= y < b[3] and b[0] < b[1] and alpha[g] > np.float32(0):
                        span = slice(b[0], b[1])
                        _hit(scene.geom_types[g], z[span], ids[span], xs[span], line[g], sizes[g], near, g)
            if depth.shape[0] > 0:
                depth[i, y, :] = z
            if seg.shape[0] > 0:
                for x in range(width):
                    seg[i, y, x] = scene.geom_ids[ids[x]] if ids[x] >= 0 else -1


@kernel(parallel=True, checked_division=False)
def render_primitives(
    scene: RaycastScene, rows: RaycastRows, frame: RaycastFrame, bands: int, rgb: U8, depth: F32, seg: I32
) -> None:
    """Draw n rows into ``rgb`` uint8 (n, H, W, 3), ``depth`` float32 (n, H, W) and ``seg`` int32 (n, H, W).

    An output with no rows at all is left out. ``bands`` cuts each picture into that many tasks.
    """
    n = rows.camera_pos.shape[0]
    for task in prange(n * bands):
        i, band = task // bands, task % bands
        first, last = band * frame.height // bands, (band + 1) * frame.height // bands
        _render_band(scene, rows, frame, i, first, last, rgb, depth, seg)
