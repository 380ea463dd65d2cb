"""Many pictures in one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def tiled(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Pictures (H, W, 3) of one size, row by row in a grid that is about square; empty places are black."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    height, width, channels = pictures[0].shape
    sheet = np.zeros((rows, height, columns, width, channels), dtype=np.uint8)
    for index, picture in enumerate(pictures):
        sheet[index // columns, :, index % columns] = picture
    return sheet.reshape(rows * height, columns * width, channels)
