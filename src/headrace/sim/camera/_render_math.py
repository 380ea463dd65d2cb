"""Arithmetic that the camera's kernels repeat. LLVM inlines it; numba types one call in place of six operations.

Numbers are float32 or float64, all alike.
"""

from __future__ import annotations

from typing import Any

from headrace._kernels.compiled import helper
from headrace.sim.camera._render_scene import ELLIPSOID, F32, F64, SPHERE


@helper
def dot(a: Any, b: Any, c: Any, x: Any, y: Any, z: Any) -> Any:
    """Return the inner product of (a, b, c) and (x, y, z)."""
    return a * x + b * y + c * z


@helper
def along(o: Any, p: Any, d: Any, s: Any, x: Any, t: Any) -> Any:
    """Return a coordinate of the point at depth t in column x: its origin, the origin's step, its direction, that's
    step."""
    return o + x * p + t * (d + x * s)


@helper
def line_ray(ray: F64, y: int, out: F32) -> None:
    """Write the ray of line y at column 0 and its steps in x: origin, direction, moment; then steps in y of two."""
    for a in range(3):
        out[a] = ray[a] + y * ray[6 + a]
        out[3 + a] = ray[3 + a]
        out[6 + a] = ray[9 + a] + y * ray[15 + a]
        out[9 + a] = ray[12 + a]
        out[12 + a] = ray[18 + a] + y * ray[24 + a]
        out[15 + a] = ray[21 + a]
        out[18 + a] = ray[6 + a]
        out[21 + a] = ray[15 + a]


@helper
def is_ball(kind: int) -> bool:
    """Return whether a geom's ray is given in coordinates divided by its size."""
    return (kind == SPHERE) | (kind == ELLIPSOID)
