"""What a picture shows besides color, from depths and ids: depth, geom ids and normals; and gray from colors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace.sim.camera._render_light import face_normals, local_points, primitive_normals, run_end, turn
from headrace.sim.camera._render_math import line_ray
from headrace.sim.camera._render_scene import F32, F64, I32, U8


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
