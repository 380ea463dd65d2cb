"""Pictures of environments for people: one each, or tiled into one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.envs._scene_state import SceneState
from headrace.errors import ConfigError
from headrace.sim import CameraSpec, PoseReader, Simulation, make_camera

_GAP = 2


class Viewer:
    """Draws environments as they are now with one of the model's cameras; made at the first picture."""

    def __init__(
        self, sim: Simulation, *, camera: str | None = None, pixels: int = 240, renderer: str = "native"
    ) -> None:
        model = sim.model
        if model.ncam == 0:
            raise ConfigError("render: expected a model with a camera, got one without; add <camera> to its MJCF")
        self._poses = PoseReader(model)
        self._state = SceneState(sim)
        spec = CameraSpec(name=camera or model.camera(0).name, width=pixels, height=pixels)
        self._camera = make_camera(renderer, model, spec)

    def pictures(self, ids: Tensor | None = None) -> NDArray[np.uint8]:
        """uint8 (n, height, width, 3) of the environments ``ids`` (n,), or of all; the caller owns it."""
        self._state.refresh()
        rgb = self._camera.render(self._state.poses(self._poses, self._state.take(ids))).rgb
        assert rgb is not None  # the spec asks for it
        return rgb


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
