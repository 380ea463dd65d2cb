"""Pictures of many small scenes made of primitives: exact ray hits inside screen-space bounds, then shading by runs.

A task is one band of lines of one row's picture. It works line by line: every geom whose bounds reach the line is
intersected over its span (vectorized, :mod:`raycast_hits`), then runs of pixels that see the same geom are shaded
(:mod:`raycast_shade`). Poses are made relative to the camera in float64, spans run in float32. A pixel is a function of
its row's poses alone: not of other rows, of their number or of threads.
"""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import inline, kernel
from headrace._kernels.raycast_hits import hit_ball, hit_box, hit_capsule, hit_cylinder, hit_plane
from headrace._kernels.raycast_paint import find_normals, paint_line
from headrace._kernels.raycast_place import (
    OPAQUE,
    RaycastRows,
    RaycastScratch,
    is_ball,
    line_ray,
    new_scratch,
    place,
    transparent_order,
)
from headrace._kernels.raycast_scene import BOX, CAPSULE, CYLINDER, F32, I32, PLANE, U8, RaycastFrame, RaycastScene


@inline
def _cast(
    scene: RaycastScene, scratch: RaycastScratch, y: int, near: np.float32, z: F32, only: int, veils: bool
) -> None:
    """Put the geoms of line y into ``z`` and ``ids``: one of them, or all (``veils``: the transparent ones too)."""
    ids, xs, bounds = scratch.ids, scratch.xs, scratch.bounds
    for g in range(bounds.shape[0]):
        x_0, x_1 = bounds[g, 0], bounds[g, 1]
        there = (bounds[g, 2] <= y) & (y < bounds[g, 3]) & (x_0 < x_1) & (scratch.alpha[g] > np.float32(0))
        wanted = g == only if only >= 0 else veils | (scratch.alpha[g] >= OPAQUE)
        if there & wanted:
            ray, size, kind = scratch.line[g], scratch.sizes[g], scene.geom_types[g]
            line_ray(scratch.rays[g], y, ray)
            z_run, ids_run, xs_run = z[x_0:x_1], ids[x_0:x_1], xs[x_0:x_1]
            if kind == PLANE:
                hit_plane(z_run, ids_run, xs_run, ray, size, near, g)
            elif is_ball(kind):
                hit_ball(z_run, ids_run, xs_run, ray, near, g)
            elif kind == CAPSULE:
                hit_capsule(z_run, ids_run, xs_run, ray, size, near, g)
            elif kind == CYLINDER:
                hit_cylinder(z_run, ids_run, xs_run, ray, size, near, g)
            elif kind == BOX:
                hit_box(z_run, ids_run, xs_run, ray, size, near, g)


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
    scratch = new_scratch(scene, frame.width)
    place(scene, rows, frame, i, scratch)
    rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
    diffuse = rows.diffuse[i if rows.diffuse.shape[0] > 1 else 0]
    transparent = transparent_order(scene, rgba, scratch)
    near, far = np.float32(frame.near), np.float32(frame.far)
    want_rgb, want_hits = rgb.shape[0] > 0, depth.shape[0] > 0 or seg.shape[0] > 0
    # a line takes the solid geoms, then each transparent one from near to far and from far to near, as MuJoCo draws
    # them; depth and ids see all geoms as solid
    veils = 2 * transparent if want_rgb else 0
    turns = 1 + veils + (1 if want_hits and transparent > 0 else 0)
    for y in range(y_0, y_1):
        for turn in range(turns):
            only, z, alpha = -1, scratch.z, np.float32(1)
            if 0 < turn <= veils:
                only = scratch.order[turn - 1 if turn <= transparent else veils - turn]
                z, alpha = scratch.z_veil, np.float32(scratch.alpha[only])
                z[:] = scratch.z
            else:
                z[:] = far
            scratch.ids[:] = -1
            _cast(scene, scratch, y, near, z, only, turn > veils)
            if want_rgb and turn <= veils:
                find_normals(scene, scratch, z)
                paint_line(scene, scratch, frame, rows.camera_mat[i], rgba, diffuse, y, z, alpha, rgb[i, y])
        if depth.shape[0] > 0:
            depth[i, y, :] = scratch.z
        if seg.shape[0] > 0:
            for x in range(frame.width):
                seg[i, y, x] = scene.geom_ids[scratch.ids[x]] if scratch.ids[x] >= 0 else -1


@kernel(checked_division=False)
def render_primitives(
    start: int,
    stop: int,
    scene: RaycastScene,
    rows: RaycastRows,
    frame: RaycastFrame,
    bands: int,
    rgb: U8,
    depth: F32,
    seg: I32,
) -> None:
    """Draw bands into ``rgb`` uint8 (n, H, W, 3), ``depth`` float32 (n, H, W) and ``seg`` int32 (n, H, W).

    An output with no rows at all is left out. ``bands`` cuts each picture into that many rows of this kernel.
    """
    for task in range(start, stop):
        i, band = task // bands, task % bands
        first, last = band * frame.height // bands, (band + 1) * frame.height // bands
        _render_band(scene, rows, frame, i, first, last, rgb, depth, seg)
