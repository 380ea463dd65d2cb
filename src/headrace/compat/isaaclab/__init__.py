"""Isaac Lab's buffers and image terms, with its names, arguments and defaults, over our ``buffers`` and ``vision``.

What Isaac Lab leaves open or does silently wrong is decided here: depth is never written into the camera's own memory,
a lag that is refused changes nothing, and results are fresh memory.
"""

from headrace.compat.isaaclab._buffers import (
    CircularBuffer,
    DelayBuffer,
    image,
    is_depth_like,
    is_normals_like,
    is_rgb_like,
    normalize_camera_image,
    stacked_image,
)

__all__ = [
    "CircularBuffer",
    "DelayBuffer",
    "image",
    "is_depth_like",
    "is_normals_like",
    "is_rgb_like",
    "normalize_camera_image",
    "stacked_image",
]
