"""Pictures of scenes whose hits are found elsewhere: MuJoCo's rays for meshes and height fields, the same paint."""

from __future__ import annotations

import numpy as np

from headrace._kernels.compiled import kernel
from headrace._kernels.raycast_paint import paint_line
from headrace._kernels.raycast_place import RaycastRows, line_ray, new_scratch, place
from headrace._kernels.raycast_scene import F32, F64, I32, U8, RaycastFrame, RaycastScene


@kernel()
def pixel_rays(rows: RaycastRows, frame: RaycastFrame, out: F64) -> None:
    """Directions of all pixels in the world, float64 (n, H·W, 3), scaled to depth 1."""
    step_x = (frame.right - frame.left) / frame.width
    step_y = (frame.top - frame.bottom) / frame.height
    for i in range(out.shape[0]):
        cam = rows.camera_mat[i]
        for y in range(frame.height):
            v = frame.top - (y + 0.5) * step_y
            for x in range(frame.width):
                u = frame.left + (x + 0.5) * step_x
                for a in range(3):
                    out[i, y * frame.width + x, a] = cam[3 * a] * u + cam[3 * a + 1] * v - cam[3 * a + 2]


@kernel(checked_division=False)
def _paint_row(
    scene: RaycastScene,
    rows: RaycastRows,
    frame: RaycastFrame,
    i: int,
    z: F32,
    ids: I32,
    normal: F64,
    rgb: U8,
) -> None:
    scratch = new_scratch(scene, frame.width)
    place(scene, rows, frame, i, scratch)
    rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
    diffuse = rows.diffuse[i if rows.diffuse.shape[0] > 1 else 0]
    cam = rows.camera_mat[i]
    for y in range(frame.height):
        for x in range(frame.width):
            there = normal[y * frame.width + x]
            scratch.ids[x] = ids[y, x]
            for a in range(3):
                scratch.work[a, x] = np.float32(cam[a] * there[0] + cam[3 + a] * there[1] + cam[6 + a] * there[2])
        for g in range(scene.geom_types.shape[0]):
            line_ray(scratch.rays[g], y, scratch.line[g])
        paint_line(scene, scratch, frame, cam, rgba, diffuse, y, z[y], np.float32(1), rgb[y])


@kernel(checked_division=False)
def render_given(
    start: int,
    stop: int,
    scene: RaycastScene,
    rows: RaycastRows,
    frame: RaycastFrame,
    slots: I32,
    hit_depth: F64,
    hit_geom: I32,
    normal: F64,
    rgb: U8,
    depth: F32,
    seg: I32,
) -> None:
    """Draw n rows from hits: depth and geom id (n, H·W), normals in the world (n, H·W, 3).

    ``slots`` int32 (geoms of the model,) is each geom's place among the visible ones. Outputs as in
    ``render_primitives``.
    """
    width = frame.width
    for i in range(start, stop):
        z = np.empty((frame.height, width), np.float32)
        ids = np.empty((frame.height, width), np.int32)
        for y in range(frame.height):
            for x in range(width):
                k = y * width + x
                seen = hit_geom[i, k] >= 0 and frame.near < hit_depth[i, k] < frame.far
                z[y, x] = np.float32(hit_depth[i, k] if seen else frame.far)
                ids[y, x] = slots[hit_geom[i, k]] if seen else -1
                if seg.shape[0] > 0:
                    seg[i, y, x] = hit_geom[i, k] if seen else -1
        if depth.shape[0] > 0:
            depth[i] = z
        if rgb.shape[0] > 0:
            _paint_row(scene, rows, frame, i, z, ids, normal[i], rgb[i])
