"""What the tasks that are seen by one camera share: the settings of its picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.envs.image_spec import ImageSpec
from headrace.sim.camera.appearance import AS_MODELLED, AppearanceSpec
from headrace.sim.camera.camera import CameraSpec


@dataclass(frozen=True, kw_only=True)
class PictureCfg:
    """Settings of a picture, for the settings of a task to extend."""

    frame_stack: int = 1
    pixels: int = 64
    """Height and width of a frame."""
    color: Literal["rgb", "gray"] = "rgb"
    layout: Literal["channels_last", "channels_first"] = "channels_last"
    normalize: bool = False
    """float32 observations, x / 255 less each frame's mean per channel, instead of uint8."""
    looks: AppearanceSpec = AS_MODELLED
    """How far colors, lights and the camera stray in each episode, for example ``looks.color=0.2``."""
    renderer: str = "auto"
    """See ``ImageSpec.renderer``: ``native`` on the CPU and ``warp`` on a GPU."""

    def picture(self, camera: str) -> ImageSpec:
        """Return what the model's ``camera`` shows, with these settings."""
        return ImageSpec(
            camera=CameraSpec(name=camera, width=self.pixels, height=self.pixels),
            frames=self.frame_stack,
            kind=self.color,
            layout=self.layout,
            normalize=self.normalize,
            looks=self.looks,
            renderer=self.renderer,
        )
