"""Pictures on the wire: resized with padding as openpi does, and compressed where both sides know how."""

from __future__ import annotations

import io
import math
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from headrace.errors import DataError, ShapeError, require_extra

Images = NDArray[np.uint8]
IMAGE_MARK = b"__images__"
MOST_VALUES = 1 << 28
"""Of all pictures of a frame; a small one must not unpack into all of the memory."""


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
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="resizing pictures for a policy server")
    ratio = max(columns / width, rows / height)
    inner_rows, inner_columns = int(rows / ratio), int(columns / ratio)
    top, left = max(0, (height - inner_rows) // 2), max(0, (width - inner_columns) // 2)
    flat = images.reshape(-1, rows, columns, channels)
    fitted = np.zeros((len(flat), height, width, channels), np.uint8)
    for image, target in zip(flat, fitted, strict=True):
        picture = pillow.fromarray(image if channels == 3 else image[..., 0])
        small = np.asarray(picture.resize((inner_columns, inner_rows), resample=pillow.Resampling.BILINEAR))
        target[top : top + inner_rows, left : left + inner_columns] = small.reshape(inner_rows, inner_columns, channels)
    return fitted.reshape(*images.shape[:-3], height, width, channels)


def resize_to_fill(images: Images, height: int, width: int) -> Images:
    """Resize pictures (…, H, W, C) to (…, height, width, C) with Lanczos' filter, whatever their proportions."""
    return _resample(images, height, width, "LANCZOS", None)


def crop_middle(images: Images, area: float) -> Images:
    """Cut a share of the area from the middle of pictures (…, H, W, C), resized to their size, bilinear."""
    rows, columns = images.shape[-3:-1]
    down, across = ((1 - math.sqrt(area)) / 2 * size for size in (rows, columns))
    return _resample(images, rows, columns, "BILINEAR", (across, down, columns - across, rows - down))


def through_jpeg(images: Images, quality: int) -> Images:
    """Write pictures (…, H, W, C) to JPEG files and read them back."""
    message = encode_images(images, "jpeg", quality=quality)
    return decode_images({**message, b"shape": list(images.shape)})


def _resample(
    images: Images, height: int, width: int, name: str, box: tuple[float, float, float, float] | None
) -> Images:
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="resizing pictures for a policy")
    flat = images.reshape(-1, *images.shape[-3:])
    found = np.zeros((len(flat), height, width, images.shape[-1]), np.uint8)
    for image, target in zip(flat, found, strict=True):
        picture = pillow.fromarray(image if image.shape[-1] == 3 else image[..., 0])
        target[:] = np.asarray(picture.resize((width, height), getattr(pillow.Resampling, name), box=box)).reshape(
            target.shape
        )
    return found.reshape(*images.shape[:-3], *found.shape[1:])


def encode_images(images: Images, coding: Literal["png", "jpeg"], *, quality: int = 90) -> dict[bytes, object]:
    """Return the map that stands for pictures (…, H, W, C) or (…, C, H, W). PNG is exact, JPEG is not."""
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="compressing pictures for a policy server")
    shown = channels_last(images)
    files: list[bytes] = []
    for image in shown.reshape(-1, *shown.shape[-3:]):
        file = io.BytesIO()
        options = {"quality": quality} if coding == "jpeg" else {"compress_level": 1}
        picture = pillow.fromarray(np.ascontiguousarray(image if image.shape[-1] == 3 else image[..., 0]))
        picture.save(file, format=coding, **options)
        files.append(file.getvalue())
    return {IMAGE_MARK: coding, b"shape": images.shape, b"files": files}


def decode_images(message: dict[Any, Any]) -> Images:
    """Return the pictures of such a map; files of another size than it says are refused before they are decoded."""
    coding, shape, files = message.get(IMAGE_MARK), message.get(b"shape"), message.get(b"files")
    if (
        coding not in ("png", "jpeg")
        or not isinstance(files, list)
        or not isinstance(shape, list)
        or len(cast("list[object]", shape)) < 3
        or any(not isinstance(size, int) or size < 0 for size in cast("list[object]", shape))
    ):
        raise DataError("frame: expected compressed pictures with coding, shape and files, got something else")
    sizes = tuple(cast("list[int]", shape))
    last = sizes[-1] in (1, 3)
    rows, columns, channels = sizes[-3:] if last else (sizes[-2], sizes[-1], sizes[-3])
    count = math.prod(sizes[:-3])
    if channels not in (1, 3) or len(cast("list[object]", files)) != count or math.prod(sizes) > MOST_VALUES:
        raise DataError(f"frame: expected {count} pictures of at most {MOST_VALUES} values, got shape {sizes}")
    pillow: Any = require_extra("PIL.Image", extra="serve", purpose="reading compressed pictures")
    images = np.zeros((count, rows, columns, channels), np.uint8)
    for target, data in zip(images, cast("list[object]", files), strict=True):
        try:
            picture = pillow.open(io.BytesIO(cast("bytes", data)), formats=[str(coding)])
            if picture.size != (columns, rows) or picture.mode != ("RGB" if channels == 3 else "L"):
                raise DataError(f"frame: expected a picture {columns}×{rows}×{channels}, got {picture.size}")
            target[:] = np.asarray(picture).reshape(rows, columns, channels)
        except (OSError, SyntaxError, TypeError, ValueError, pillow.DecompressionBombError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"frame: expected a {coding} file, got {error}") from error
    shaped = images.reshape(*sizes[:-3], rows, columns, channels)
    return shaped if last else np.ascontiguousarray(np.moveaxis(shaped, -1, -3))
