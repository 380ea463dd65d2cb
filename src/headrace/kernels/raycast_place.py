"""Everything about a row relative to its camera: rays, bounds and lights per geom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.kernels.compiled import inline, kernel
from headrace.kernels.raycast_bounds import pixel_bounds
from headrace.kernels.raycast_scene import (
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    I32,
    PLANE,
    SPHERE,
    RaycastFrame,
    RaycastScene,
)

# a geom below this alpha is blended, and a plane seen from behind keeps this much of its alpha, as in MuJoCo's renderer
OPAQUE = np.float32(0.995)
_BEHIND = np.float32(0.3)


class RaycastRows(NamedTuple):
    """What differs between the n rows of a call."""

    geom_pos: F64
    """(n, G, 3) of the visible geoms."""
    geom_mat: F64
    """(n, G, 9)."""
    camera_pos: F64
    """(n, 3)."""
    camera_mat: F64
    """(n, 9)."""
    light_pos: F64
    """(n, lights of the model, 3)."""
    light_dir: F64
    """(n, lights of the model, 3)."""
    rgba: F32
    """(n or 1, G, 4): one row serves all."""
    diffuse: F32
    """(n or 1, L, 3): one row serves all."""


@inline
def is_ball(kind: int) -> bool:
    """Whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)


@kernel(checked_division=False)
def place(
    scene: RaycastScene, rows: RaycastRows, frame: RaycastFrame, i: int, rays: F64, bounds: I32, lights: F32
) -> None:
    """Everything about row i relative to its camera, per geom.

    ``rays`` float64 (G, 24): o, d at pixel (0, 0), steps of d in x and y, then the same three of n = o × d, unused, and
    the depth order. ``bounds`` int32 (G, 4). ``lights`` float32 (G, L, 6), see ``illuminate``.
    """
    step_x = (frame.right - frame.left) / frame.width
    step_y = (frame.top - frame.bottom) / frame.height
    first_x = frame.left + 0.5 * step_x
    first_y = frame.top - 0.5 * step_y
    cam = rows.camera_mat[i]
    axes = np.empty((3, 3))
    centre = np.empty(3)
    for g in range(scene.geom_types.shape[0]):
        mat = rows.geom_mat[i, g]
        ray = rays[g]
        rel = np.empty((3, 3))
        away_x = rows.camera_pos[i, 0] - rows.geom_pos[i, g, 0]
        away_y = rows.camera_pos[i, 1] - rows.geom_pos[i, g, 1]
        away_z = rows.camera_pos[i, 2] - rows.geom_pos[i, g, 2]
        for a in range(3):
            for b in range(3):
                rel[a, b] = mat[a] * cam[b] + mat[3 + a] * cam[3 + b] + mat[6 + a] * cam[6 + b]
            ray[a] = mat[a] * away_x + mat[3 + a] * away_y + mat[6 + a] * away_z
            axes[a, 0], axes[a, 1], axes[a, 2] = rel[a, 0], rel[a, 1], -rel[a, 2]
            ray[3 + a] = rel[a, 0] * first_x + rel[a, 1] * first_y - rel[a, 2]
            ray[6 + a] = rel[a, 0] * step_x
            ray[9 + a] = -rel[a, 1] * step_y
            centre[a] = -(cam[a] * away_x + cam[3 + a] * away_y + cam[6 + a] * away_z)
        centre[2] = -centre[2]
        kind, size = scene.geom_types[g], scene.geom_sizes[g]
        pixel_bounds(kind, size, axes, centre, frame, bounds[g])
        if is_ball(kind):
            for a in range(3):
                inv = 1.0 / (size[0] if kind == SPHERE else size[a])
                ray[a] *= inv
                ray[3 + a] *= inv
                ray[6 + a] *= inv
                ray[9 + a] *= inv
        for b in range(3):
            at = 3 * (b + 1)
            ray[12 + 3 * b] = ray[1] * ray[at + 2] - ray[2] * ray[at + 1]
            ray[13 + 3 * b] = ray[2] * ray[at] - ray[0] * ray[at + 2]
            ray[14 + 3 * b] = ray[0] * ray[at + 1] - ray[1] * ray[at]
        ray[21] = np.sqrt(away_x * away_x + away_y * away_y + away_z * away_z)
        for k in range(scene.light_types.shape[0]):
            source = scene.light_source[k]
            for a in range(3):
                if source < 0:
                    # the headlight shines along the optical axis
                    lights[g, k, a] = rel[a, 2]
                elif scene.light_types[k] == DIRECTIONAL:
                    lights[g, k, a] = -(
                        mat[a] * rows.light_dir[i, source, 0]
                        + mat[3 + a] * rows.light_dir[i, source, 1]
                        + mat[6 + a] * rows.light_dir[i, source, 2]
                    )
                else:
                    lights[g, k, a] = (
                        mat[a] * (rows.light_pos[i, source, 0] - rows.geom_pos[i, g, 0])
                        + mat[3 + a] * (rows.light_pos[i, source, 1] - rows.geom_pos[i, g, 1])
                        + mat[6 + a] * (rows.light_pos[i, source, 2] - rows.geom_pos[i, g, 2])
                    )
                    lights[g, k, 3 + a] = (
                        mat[a] * rows.light_dir[i, source, 0]
                        + mat[3 + a] * rows.light_dir[i, source, 1]
                        + mat[6 + a] * rows.light_dir[i, source, 2]
                    )


@kernel(checked_division=False)
def line_ray(ray: F64, y: int, out: F32) -> None:
    """The affine ray of line y: o, d, step of d in x, n, step of n in x, step of d in y (three numbers each)."""
    for a in range(3):
        out[a] = np.float32(ray[a])
        out[3 + a] = np.float32(ray[3 + a] + y * ray[9 + a])
        out[6 + a] = np.float32(ray[6 + a])
        out[9 + a] = np.float32(ray[12 + a] + y * ray[18 + a])
        out[12 + a] = np.float32(ray[15 + a])
        out[15 + a] = np.float32(ray[9 + a])


@kernel()
def transparent_order(scene: RaycastScene, rgba: F32, rays: F64, alpha: F32, order: I32) -> int:
    """Fill each geom's alpha and the transparent ones from near to far, as MuJoCo sorts them; return how many."""
    count = 0
    for g in range(alpha.shape[0]):
        alpha[g] = rgba[g, 3]
        kind = scene.geom_types[g]
        size = scene.geom_sizes[g]
        if kind == PLANE:
            rays[g, 21] = 1e10
            if rays[g, 2] < 0.0:
                alpha[g] *= _BEHIND
        elif kind == SPHERE:
            rays[g, 21] -= size[0]
        elif kind == CAPSULE:
            rays[g, 21] -= size[0] + size[1]
        elif kind == CYLINDER:
            rays[g, 21] -= np.sqrt(size[0] ** 2 + size[1] ** 2)
        elif kind == ELLIPSOID:
            rays[g, 21] -= max(size[0], max(size[1], size[2]))
        else:
            rays[g, 21] -= np.sqrt(size[0] ** 2 + size[1] ** 2 + size[2] ** 2)
        if np.float32(0) < alpha[g] < OPAQUE:
            at = count
            while at > 0 and rays[order[at - 1], 21] > rays[g, 21]:
                order[at] = order[at - 1]
                at -= 1
            order[at] = g
            count += 1
    return count
