"""Pictures of scenes whose hits are found elsewhere: MuJoCo's rays for meshes and height fields, the same paint."""

from __future__ import annotations

import numpy as np

from headrace.kernels.compiled import kernel, prange
from headrace.kernels.raycast_paint import paint, shade_sky
from headrace.kernels.raycast_place import RaycastRows, is_ball, line_ray, place
from headrace.kernels.raycast_scene import F32, F64, I32, U8, RaycastFrame, RaycastScene
from headrace.kernels.raycast_shade import write_colours


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
def _local_surface(mat: F64, normal: F64, z: F32, xs: F32, ray: F32, size: F32, ball: bool, work: F32) -> None:
    """Rows 0–5 of work from world normals (k, 3) and depths."""
    for k in range(z.shape[0]):
        for a in range(3):
            dot = mat[a] * normal[k, 0] + mat[3 + a] * normal[k, 1] + mat[6 + a] * normal[k, 2]
            work[a, k] = np.float32(dot)
            at = ray[a] + z[k] * (ray[3 + a] + xs[k] * ray[6 + a])
            work[3 + a, k] = at * (size[a] if ball else np.float32(1))


@kernel(checked_division=False)
def _paint_row(
    scene: RaycastScene, rows: RaycastRows, frame: RaycastFrame, i: int, z: F32, ids: I32, normal: F64, rgb: U8
) -> None:
    count, width = scene.geom_types.shape[0], frame.width
    rays = np.empty((count, 24))
    bounds = np.empty((count, 4), np.int32)
    lights = np.empty((count, scene.light_types.shape[0], 6), np.float32)
    place(scene, rows, frame, i, rays, bounds, lights)
    rgba = rows.rgba[i if rows.rgba.shape[0] > 1 else 0]
    diffuse = rows.diffuse[i if rows.diffuse.shape[0] > 1 else 0]
    work = np.empty((10, width), np.float32)
    index = np.empty((8, width), np.int32)
    packed = np.empty((2, width), np.uint64)
    xs = np.arange(width).astype(np.float32)
    ray = np.empty(18, np.float32)
    size = np.empty(3, np.float32)
    for y in range(frame.height):
        at = 0
        while at < width:
            g = ids[y, at]
            end = at + 1
            while end < width and ids[y, end] == g:
                end += 1
            if g >= 0:
                line_ray(rays[g], y, ray)
                ball = is_ball(int(scene.geom_types[g]))
                for a in range(3):
                    size[a] = np.float32(scene.geom_sizes[g, a])
                if ball and size[1] == np.float32(0):
                    size[1] = size[0]
                    size[2] = size[0]
                first = y * width
                near = normal[first + at : first + end]
                span, columns = z[y, at:end], xs[at:end]
                _local_surface(rows.geom_mat[i, g], near, span, columns, ray, size, ball, work)
                paint(scene, g, rgba, diffuse, lights, span, columns, ray, size, work, index, packed)
            else:
                shade_sky(scene, rows.camera_mat[i], frame, y, xs[at:end], work, index, packed)
            write_colours(rgb[y, at:end], work)
            at = end


@kernel(parallel=True, checked_division=False)
def render_given(
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
    n, width = rows.camera_pos.shape[0], frame.width
    for task in prange(n):
        i = int(np.int64(task))
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
