"""The rectangle of pixels that a geom can touch.

A quadric with center c and shape matrix S (Σ sᵢ² aᵢaᵢᵀ over its axes) is touched by the plane X = u·Z through the
camera where (cₓ − u·c_z)² = Sₓₓ − 2u·Sₓ_z + u²·S_zz: the two roots are its exact extent on the picture. A disc is a
quadric with one axis of length zero, so balls, capsules (two balls) and cylinders (two discs) all use it; a box uses
its corners. Z is the depth, positive in front of the camera.
"""

from __future__ import annotations

import math

import numpy as np

from headrace._kernels.compiled import kernel
from headrace._kernels.raycast_scene import BOX, CAPSULE, CYLINDER, F64, I32, PLANE, SPHERE, RaycastFrame

_EVERYTHING = 1e30


@kernel(checked_division=False)
def _quadric_extent(c: float, depth: float, s_cc: float, s_cz: float, s_zz: float) -> tuple[float, float]:
    """Smallest and largest slope u = X/Z over a quadric that lies in front of the camera."""
    a = depth * depth - s_zz
    b = c * depth - s_cz
    root = math.sqrt(max(b * b - a * (c * c - s_cc), 0.0))
    return (b - root) / a, (b + root) / a


@kernel(checked_division=False)
def pixel_bounds(kind: int, size: F64, axes: F64, center: F64, frame: RaycastFrame, out: I32) -> None:
    """Write first and past-the-last column, first and past-the-last row; equal where nothing can be seen.

    Args:
        kind: mjtGeom.
        size: (3,) as in the model.
        axes: (3, 3): row i is axis i of the geom in camera coordinates (x right, y up, depth forward).
        center: (3,) of the geom in the same coordinates.
        frame: the frustum.
        out: int32 (4,).
    """
    u_0, u_1, v_0, v_1 = _EVERYTHING, -_EVERYTHING, _EVERYTHING, -_EVERYTHING
    nearest, farthest = _EVERYTHING, -_EVERYTHING
    if kind == PLANE:
        nearest, farthest = -1.0, _EVERYTHING
    elif kind == BOX:
        for corner in range(8):
            a = size[0] if corner & 1 else -size[0]
            b = size[1] if corner & 2 else -size[1]
            c = size[2] if corner & 4 else -size[2]
            x = center[0] + a * axes[0, 0] + b * axes[1, 0] + c * axes[2, 0]
            y = center[1] + a * axes[0, 1] + b * axes[1, 1] + c * axes[2, 1]
            depth = center[2] + a * axes[0, 2] + b * axes[1, 2] + c * axes[2, 2]
            nearest, farthest = min(nearest, depth), max(farthest, depth)
            if depth > 0.0:
                u_0, u_1 = min(u_0, x / depth), max(u_1, x / depth)
                v_0, v_1 = min(v_0, y / depth), max(v_1, y / depth)
    else:
        # squared half axes of each ball or disc, and how far its center lies along the geom's z axis
        s_x = size[0] * size[0]
        s_y = size[1] * size[1]
        s_z = size[2] * size[2]
        offset, pieces = 0.0, 1
        if kind == SPHERE:
            s_y = s_z = s_x
        elif kind == CAPSULE:
            s_y = s_z = s_x
            offset, pieces = size[1], 2
        elif kind == CYLINDER:
            s_y, s_z = s_x, 0.0
            offset, pieces = size[1], 2
        xx = s_x * axes[0, 0] ** 2 + s_y * axes[1, 0] ** 2 + s_z * axes[2, 0] ** 2
        yy = s_x * axes[0, 1] ** 2 + s_y * axes[1, 1] ** 2 + s_z * axes[2, 1] ** 2
        zz = s_x * axes[0, 2] ** 2 + s_y * axes[1, 2] ** 2 + s_z * axes[2, 2] ** 2
        xz = s_x * axes[0, 0] * axes[0, 2] + s_y * axes[1, 0] * axes[1, 2] + s_z * axes[2, 0] * axes[2, 2]
        yz = s_x * axes[0, 1] * axes[0, 2] + s_y * axes[1, 1] * axes[1, 2] + s_z * axes[2, 1] * axes[2, 2]
        reach = math.sqrt(zz)
        for piece in range(pieces):
            shift = offset if piece == 0 else -offset
            x = center[0] + shift * axes[2, 0]
            y = center[1] + shift * axes[2, 1]
            depth = center[2] + shift * axes[2, 2]
            nearest, farthest = min(nearest, depth - reach), max(farthest, depth + reach)
            if depth > reach:
                low, high = _quadric_extent(x, depth, xx, xz, zz)
                u_0, u_1 = min(u_0, low), max(u_1, high)
                low, high = _quadric_extent(y, depth, yy, yz, zz)
                v_0, v_1 = min(v_0, low), max(v_1, high)
    out[0], out[1], out[2], out[3] = 0, frame.width, 0, frame.height
    if farthest <= frame.near or nearest >= frame.far:
        out[1], out[3] = 0, 0
    elif nearest > 1e-9:
        per_u = frame.width / (frame.right - frame.left)
        per_v = frame.height / (frame.top - frame.bottom)
        out[0] = _clip(math.floor((u_0 - frame.left) * per_u - 0.5), frame.width)
        out[1] = _clip(math.ceil((u_1 - frame.left) * per_u - 0.5) + 1, frame.width)
        out[2] = _clip(math.floor((frame.top - v_1) * per_v - 0.5), frame.height)
        out[3] = _clip(math.ceil((frame.top - v_0) * per_v - 0.5) + 1, frame.height)


@kernel()
def _clip(pixel: float, size: int) -> np.int32:
    return np.int32(min(max(pixel, 0.0), float(size)))
