"""Changes of pictures before a policy reads them, pixel by pixel as those who train policies make them."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ShapeError, require_extra

Images = NDArray[np.uint8]


def is_picture(shape: tuple[int, ...], dtype: object) -> bool:
    """Whether an array (…, H, W, C) or (…, C, H, W) is taken for pictures: uint8 with 1 or 3 channels."""
    return dtype == np.uint8 and len(shape) >= 3 and (shape[-1] in (1, 3) or shape[-3] in (1, 3))


def channels_last(images: Images) -> Images:
    """(…, H, W, C) of pictures in either layout; a view."""
    return images if images.shape[-1] in (1, 3) else np.moveaxis(images, -3, -1)


def resize_with_pad(images: Images, height: int, width: int) -> Images:
    """Pictures (…, H, W, C) fitted into (…, height, width, C): bilinear, undistorted, centered on black.

    The same pixels as ``openpi_client.image_tools.resize_with_pad``.
    """
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] not in (1, 3):
        raise ShapeError(f"resize: expected uint8 (…, H, W, 1 or 3), got {images.dtype} {images.shape}")
    rows, columns, channels = images.shape[-3:]
    if (rows, columns) == (height, width):
        return images
    ratio = max(columns / width, rows / height)
    inner_rows, inner_columns = int(rows / ratio), int(columns / ratio)
    top, left = max(0, (height - inner_rows) // 2), max(0, (width - inner_columns) // 2)
    fitted = np.zeros((*images.shape[:-3], height, width, channels), np.uint8)
    small = _resample(images, inner_rows, inner_columns, "BILINEAR")
    fitted[..., top : top + inner_rows, left : left + inner_columns, :] = small
    return fitted


def resize_to_fill(images: Images, height: int, width: int) -> Images:
    """Resize pictures (…, H, W, C) to (…, height, width, C) with Lanczos' filter, whatever their proportions."""
    return _resample(images, height, width, "LANCZOS")


def crop_middle(images: Images, area: float) -> Images:
    """Cut a share of the area from the middle of pictures (…, H, W, C), resized to their size, bilinear."""
    rows, columns = images.shape[-3:-1]
    down, across = ((1 - math.sqrt(area)) / 2 * size for size in (rows, columns))
    return _resample(images, rows, columns, "BILINEAR", (across, down, columns - across, rows - down))


def through_jpeg(images: Images, quality: int) -> Images:
    """Write pictures (…, H, W, C) to JPEG files and read them back."""

    def change(pillow: Any, picture: Any) -> Any:
        file = io.BytesIO()
        picture.save(file, format="jpeg", quality=quality)
        return pillow.open(file)

    return _change_each(images, images.shape[-3], images.shape[-2], change)


def _resample(
    images: Images, height: int, width: int, name: str, box: tuple[float, float, float, float] | None = None
) -> Images:
    return _change_each(
        images,
        height,
        width,
        lambda pillow, picture: picture.resize((width, height), getattr(pillow.Resampling, name), box=box),
    )


def _change_each(images: Images, height: int, width: int, change: Callable[[Any, Any], Any]) -> Images:
    """Return what ``change`` makes of each picture (H, W, C), given Pillow and the picture as Pillow's."""
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="changing pictures for a policy")
    flat = images.reshape(-1, *images.shape[-3:])
    found = np.zeros((len(flat), height, width, images.shape[-1]), np.uint8)
    for image, target in zip(flat, found, strict=True):
        picture = pillow.fromarray(np.ascontiguousarray(image if image.shape[-1] == 3 else image[..., 0]))
        target[:] = np.asarray(change(pillow, picture)).reshape(target.shape)
    return found.reshape(*images.shape[:-3], *found.shape[1:])
