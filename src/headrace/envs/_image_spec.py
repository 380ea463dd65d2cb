"""What a camera observation is: which camera, how many frames, in which layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from gymnasium import spaces

from headrace.sim._appearance import AS_MODELLED, AppearanceSpec
from headrace.sim._camera import CameraSpec
from headrace.types import StackSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """One observation group that a camera fills: uint8, or float32 with ``normalize``."""

    camera: CameraSpec
    frames: int = 1
    """K: how many frames are stacked, oldest first, along the channel axis."""
    color: Literal["rgb", "gray"] = "rgb"
    layout: Literal["channels_last", "channels_first"] = "channels_last"
    normalize: bool = False
    """float32 instead of uint8: x / 255 less the mean of each frame's channel, after the stack."""
    renderer: str = "native"
    """What draws: ``native``, ``gl`` (MuJoCo's renderer), ``warp``, or a name of ``headrace.sim.register_camera``."""
    reset: Literal["repeat", "zero"] = "repeat"
    """What fills the stack at the start of an episode."""
    looks: AppearanceSpec = AS_MODELLED
    """How far colors, lights and the camera stray from the model's, drawn anew for every episode."""

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of one frame."""
        sides, channels = (self.camera.height, self.camera.width), 3 if self.color == "rgb" else 1
        return (*sides, channels) if self.layout == "channels_last" else (channels, *sides)

    @property
    def stack(self) -> StackSpec:
        """How frames make the observation."""
        dim = -1 if self.layout == "channels_last" else 0
        return StackSpec(frames=self.frames, dim=dim, reset=self.reset)

    @property
    def space(self) -> spaces.Box:
        """The space of one environment's observation."""
        shape = self.stack.stacked_shape(self.frame_shape)
        return spaces.Box(-1.0, 1.0, shape, np.float32) if self.normalize else spaces.Box(0, 255, shape, np.uint8)
