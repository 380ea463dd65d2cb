"""Pictures of environments for people: one each, or tiled into one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headrace.errors import ConfigError
from headrace.sim._camera import CameraSpec, PoseReader
from headrace.sim._mujoco_api import Model
from headrace.sim._native_camera import NativeCamera

_GAP = 2


class Viewer:
    """Draws environments from their joint positions with the model's first camera; made at the first picture."""

    def __init__(self, model: Model, *, pixels: int = 240) -> None:
        if model.ncam == 0:
            raise ConfigError("render: expected a model with a camera, got one without; add <camera> to its MJCF")
        self._poses = PoseReader(model)
        spec = CameraSpec(name=model.camera(0).name, width=pixels, height=pixels)
        self._camera = NativeCamera(model, spec)

    def pictures(self, qpos: NDArray[np.float64]) -> NDArray[np.uint8]:
        """uint8 (n, height, width, 3) of float64 (n, nq); the caller owns it."""
        rgb = self._camera.render(self._poses.read(qpos)).rgb
        assert rgb is not None  # the spec asks for it
        return rgb

    def tiled(self, qpos: NDArray[np.float64]) -> NDArray[np.uint8]:
        """One uint8 picture of all rows, side by side in a grid that is about square."""
        return tile(self.pictures(qpos))


def tile(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Put uint8 (n, H, W, 3) into one picture, row by row, with a thin gap; missing tiles are black."""
    count, height, width, channels = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    sheet = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // columns * (height + _GAP), i % columns * (width + _GAP)
        sheet[top : top + height, left : left + width] = picture
    return sheet
