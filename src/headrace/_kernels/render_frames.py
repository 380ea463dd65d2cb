"""The small stages around the cameras' big ones: clearing, the static layer, and what is not color."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace._kernels.compiled import kernel
from headrace._kernels.render_light import primitive_normals, shape_normals
from headrace._kernels.render_place import line_ray
from headrace._kernels.render_scene import (
    F32,
    F64,
    I32,
    U8,
    RenderPlaces,
    RenderScene,
    RenderScratch,
    RenderTriangles,
)


@kernel()
def find_lines(places: RenderPlaces, first: I32, last: I32, alpha: np.float32, lines: I32) -> None:
    """Spans int32 (n, H, 2) that geoms first[i] … last[i] of at least alpha can touch; empty ones are (0, 0)."""
    for i in range(first.shape[0]):
        for y in range(lines.shape[1]):
            lines[i, y, 0], lines[i, y, 1] = 32767, 0
        for g in range(first[i], last[i]):
            x_0, x_1 = places.bounds[i, g, 0], places.bounds[i, g, 1]
            if x_0 < x_1 and places.alpha[i, g] >= alpha:
                for y in range(places.bounds[i, g, 2], places.bounds[i, g, 3]):
                    lines[i, y, 0], lines[i, y, 1] = min(lines[i, y, 0], x_0), max(lines[i, y, 1], x_1)
        for y in range(lines.shape[1]):
            lines[i, y, 0] = min(lines[i, y, 0], lines[i, y, 1])


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


@kernel()
def copy_bytes(under: I32, layers: U8, out: U8) -> None:
    """Copy layers[under[i]] to out[i], uint8 (…, bytes), where under[i] is not -1."""
    for i in range(under.shape[0]):
        if under[i] >= 0:
            source, target = layers[under[i]], out[i]
            for k in range(target.shape[0]):
                target[k] = source[k]


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
    scene: RenderScene,
    sizes: F64,
    camera_mat: F64,
    places: RenderPlaces,
    triangles: RenderTriangles | None,
    lines: I32,
    background: NDArray[np.bool_],
    scratch: RenderScratch,
    z: F32,
    ids: I32,
    out: F32,
) -> None:
    """Unit normals of the surfaces in the world into float32 (n, H, W, 3); zero where nothing is."""
    work, xs, line, bits = scratch.work, scratch.xs, scratch.line, scene.face_bits
    mask = np.int32((1 << bits) - 1)
    size = np.empty(3, np.float32)
    for i in range(lines.shape[0]):
        cam = camera_mat[i]
        for y in range(lines.shape[1]):
            at, last = int(lines[i, y, 0]), int(lines[i, y, 1])
            z_line, ids_line = z[i, y], ids[i, y]
            while at < last:
                g = ids_line[at] >> bits
                end = at + 1
                while end < last and ids_line[end] >> bits == g:
                    end += 1
                if g >= 0:
                    line_ray(places.rays[i, g], y, line)
                    nx, ny, nz = work[0, at:end], work[1, at:end], work[2, at:end]
                    axes = places.axes[i, g]
                    if triangles is not None:
                        shape = scene.geom_shapes[g]
                        if shape >= 0:
                            shape_normals(
                                z_line[at:end],
                                xs[at:end],
                                ids_line[at:end],
                                mask,
                                int(triangles.ranges[shape, 2]),
                                triangles.normals,
                                triangles.planes,
                                False,
                                line,
                                axes,
                                nx,
                                ny,
                                nz,
                            )
                    if scene.geom_shapes[g] < 0:
                        for a in range(3):
                            size[a] = np.float32(sizes[i if sizes.shape[0] > 1 else 0, g, a])
                        primitive_normals(
                            int(scene.geom_types[g]), z_line[at:end], xs[at:end], line, size, axes, nx, ny, nz
                        )
                    for a in range(3):
                        to_x, to_y, to_z = (
                            np.float32(cam[3 * a]),
                            np.float32(cam[3 * a + 1]),
                            np.float32(cam[3 * a + 2]),
                        )
                        for k in range(end - at):
                            out[i, y, at + k, a] = to_x * nx[k] + to_y * ny[k] + to_z * nz[k]
                elif background[i]:
                    for k in range(at, end):
                        for a in range(3):
                            out[i, y, k, a] = np.float32(0)
                at = end
