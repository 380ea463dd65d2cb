"""Everything about a row relative to its camera: rays, bounds and lights per geom."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace._kernels.compiled import inline, kernel
from headrace._kernels.raycast_bounds import pixel_bounds
from headrace._kernels.raycast_scene import (
    CAPSULE,
    CYLINDER,
    DIRECTIONAL,
    ELLIPSOID,
    F32,
    F64,
    I32,
    PLANE,
    SPHERE,
    U64,
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


class RaycastScratch(NamedTuple):
    """What drawing one picture needs besides the scene and its row: G geoms, L lights, a line of W pixels."""

    rays: F64
    """(G, 24), see ``place``."""
    bounds: I32
    """(G, 4): first and past-the-last column, first and past-the-last line."""
    axes: F32
    """(G, 9): each geom's axes in camera coordinates (x right, y up, z backward)."""
    lights: F32
    """(L, 6), see ``illuminate``."""
    ambient: F32
    """(3,): the light that falls everywhere alike."""
    alpha: F32
    """(G,)."""
    order: I32
    """(G,): transparent geoms from near to far."""
    sizes: F32
    """(G, 3)."""
    line: F32
    """(G, 18): the ray of the current line, see ``line_ray``."""
    work: F32
    """(11, W), see ``raycast_shade``."""
    corners: I32
    """(8, W), for textures."""
    packed: U64
    """(2, W), for textures."""
    xs: F32
    """(W,): 0, 1, 2, …"""
    z: F32
    """(W,): depth of the current line."""
    z_veil: F32
    """(W,): depth of one transparent geom."""
    ids: I32
    """(W,): which geom is seen."""


@kernel()
def new_scratch(scene: RaycastScene, width: int) -> RaycastScratch:
    """Memory for one picture; xs and sizes are filled."""
    count = scene.geom_types.shape[0]
    sizes = scene.geom_sizes.astype(np.float32)
    for g in range(count):
        if scene.geom_types[g] == SPHERE:
            sizes[g, 1] = sizes[g, 2] = sizes[g, 0]
    return RaycastScratch(
        np.empty((count, 24)),
        np.empty((count, 4), np.int32),
        np.empty((count, 9), np.float32),
        np.empty((scene.light_types.shape[0], 6), np.float32),
        np.empty(3, np.float32),
        np.empty(count, np.float32),
        np.empty(count, np.int32),
        sizes,
        np.empty((count, 18), np.float32),
        np.empty((11, width), np.float32),
        np.empty((8, width), np.int32),
        np.empty((2, width), np.uint64),
        np.arange(width).astype(np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.float32),
        np.empty(width, np.int32),
    )


@inline
def is_ball(kind: int) -> bool:
    """Whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)


@kernel(checked_division=False)
def place(scene: RaycastScene, rows: RaycastRows, frame: RaycastFrame, i: int, scratch: RaycastScratch) -> None:
    """Everything about row i relative to its camera, per geom.

    Fills ``bounds``, ``axes``, ``lights``, ``ambient`` and ``rays``: o, d at pixel (0, 0), steps of d in x and y, then
    the same three of n = o × d, and the distance of the geom.
    """
    step_x = (frame.right - frame.left) / frame.width
    step_y = (frame.top - frame.bottom) / frame.height
    first_x = frame.left + 0.5 * step_x
    first_y = frame.top - 0.5 * step_y
    cam, cam_pos = rows.camera_mat[i], rows.camera_pos[i]
    axes = np.empty((3, 3))
    center = np.empty(3)
    for g in range(scene.geom_types.shape[0]):
        mat, pos, ray = rows.geom_mat[i, g], rows.geom_pos[i, g], scratch.rays[g]
        away_x, away_y, away_z = cam_pos[0] - pos[0], cam_pos[1] - pos[1], cam_pos[2] - pos[2]
        for a in range(3):
            rel_x = mat[a] * cam[0] + mat[3 + a] * cam[3] + mat[6 + a] * cam[6]
            rel_y = mat[a] * cam[1] + mat[3 + a] * cam[4] + mat[6 + a] * cam[7]
            rel_z = mat[a] * cam[2] + mat[3 + a] * cam[5] + mat[6 + a] * cam[8]
            ray[a] = mat[a] * away_x + mat[3 + a] * away_y + mat[6 + a] * away_z
            ray[3 + a] = rel_x * first_x + rel_y * first_y - rel_z
            ray[6 + a] = rel_x * step_x
            ray[9 + a] = -rel_y * step_y
            axes[a, 0], axes[a, 1], axes[a, 2] = rel_x, rel_y, -rel_z
            scratch.axes[g, 3 * a] = np.float32(rel_x)
            scratch.axes[g, 3 * a + 1] = np.float32(rel_y)
            scratch.axes[g, 3 * a + 2] = np.float32(rel_z)
            center[a] = -(cam[a] * away_x + cam[3 + a] * away_y + cam[6 + a] * away_z)
        center[2] = -center[2]
        kind, size = scene.geom_types[g], scene.geom_sizes[g]
        pixel_bounds(kind, size, axes, center, frame, scratch.bounds[g])
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
    _place_lights(scene, rows, i, scratch)


@kernel()
def _place_lights(scene: RaycastScene, rows: RaycastRows, i: int, scratch: RaycastScratch) -> None:
    """Lights in camera coordinates, and what of their light falls everywhere."""
    cam, cam_pos = rows.camera_mat[i], rows.camera_pos[i]
    for a in range(3):
        scratch.ambient[a] = scene.global_ambient
        for k in range(scene.light_types.shape[0]):
            source, directional = scene.light_source[k], scene.light_types[k] == DIRECTIONAL
            if directional:
                scratch.ambient[a] += scene.light_ambient[k, a]
            if source < 0:
                # the headlight shines along the optical axis
                scratch.lights[k, a] = np.float32(1 if a == 2 else 0)
                continue
            pos, way = rows.light_pos[i, source], rows.light_dir[i, source]
            along = cam[a] * way[0] + cam[3 + a] * way[1] + cam[6 + a] * way[2]
            there = (
                cam[a] * (pos[0] - cam_pos[0]) + cam[3 + a] * (pos[1] - cam_pos[1]) + cam[6 + a] * (pos[2] - cam_pos[2])
            )
            scratch.lights[k, a] = np.float32(-along if directional else there)
            scratch.lights[k, 3 + a] = np.float32(along)


@inline
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
def transparent_order(scene: RaycastScene, rgba: F32, scratch: RaycastScratch) -> int:
    """Fill each geom's alpha and the transparent ones from near to far, as MuJoCo sorts them; return how many."""
    rays, alpha, order = scratch.rays, scratch.alpha, scratch.order
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
