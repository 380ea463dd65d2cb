"""What a camera observation is: which camera, what kind of image, how many frames, in which layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces

from headrace.errors import ConfigError, UnknownNameError
from headrace.sim.camera.appearance import AS_MODELLED, AppearanceSpec
from headrace.sim.camera.camera import FRAME_KINDS, CameraSpec, DataType
from headrace.sim.camera.names import check_camera_name
from headrace.types import StackSpec

_AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageNoise:
    """Noise of a camera, a function of (seed, episode, step). Zero leaves a quantity alone."""

    additive: float = 0.0
    """Standard deviation of nearly normal noise: of 255 for colors, in meters for depth."""
    salt_and_pepper: float = 0.0
    """Colors: share of pixels that become black or white."""
    depth_step: float = 0.0
    """Depth: meters that values are rounded to."""
    edge_dropout: float = 0.0
    """Depth: share of pixels beside an edge that show nothing."""
    edge: float = 0.05
    """Depth: an edge is where a neighbor differs by more than this part of a pixel's depth."""

    def __post_init__(self) -> None:
        for name in ("additive", "salt_and_pepper", "depth_step", "edge_dropout", "edge"):
            most = 1.0 if name in ("salt_and_pepper", "edge_dropout") else math.inf
            if not 0 <= getattr(self, name) <= most or math.isinf(getattr(self, name)):
                raise ConfigError(f"ImageNoise.{name}: expected a number from 0 to {most}, got {getattr(self, name)}")


def lag_range(delay: int | tuple[int, int]) -> tuple[int, int]:
    """Return the smallest and the largest lag of a delay."""
    return delay if isinstance(delay, tuple) else (delay, delay)


def check_delay(name: str, delay: int | tuple[int, int]) -> None:
    """Refuse a delay that is no number of steps, or a range of them."""
    low, high = lag_range(delay)
    if not 0 <= low <= high:
        raise ConfigError(f"{name}: expected steps from 0 on, or a range (fewest, most), got {delay}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpec:
    """One observation group that a camera fills.

    | kind | one frame | normalize=True |
    |---|---|---|
    | rgb | uint8, 3 channels | float32: x/255 less the mean of each frame's channel |
    | gray | uint8, 1 channel | as rgb |
    | depth | float32 meters, 1 channel | with ``max_depth``: clipped and in [0, 1] |
    | segmentation | int32 geom ids, 1 channel, -1 for nothing | – |
    | normals | float32 in [-1, 1], 3 channels | (x + 1) / 2 |

    Groups that differ only in kind and layout are drawn in one pass and share a history.
    """

    camera: CameraSpec
    """Which camera, and how large; ``data_types`` follows from the kind."""
    kind: DataType = "rgb"
    renderer: str = "auto"
    """What draws: ``native``, ``gl`` (MuJoCo's own picture, needs EGL), ``warp`` (an extra), or a name of
    ``headrace.sim.camera.names.register_camera``; ``auto`` is ``native`` on the CPU and ``warp`` on a GPU."""
    frames: int = 1
    """K: how many frames are stacked, oldest first, along the channel axis."""
    layout: Literal["channels_last", "channels_first"] = "channels_last"
    normalize: bool = False
    reset: Literal["repeat", "zero"] = "repeat"
    """What fills the stack at the start of an episode."""
    looks: AppearanceSpec = AS_MODELLED
    """How far colors, lights and the camera stray from the model's, drawn anew for every episode."""
    missing: float | None = None
    """Depth where nothing is; None for that of the far plane."""
    max_depth: float | None = None
    """With ``normalize``: the depth that becomes 1."""
    delay: int | tuple[int, int] = 0
    """Steps by which pictures are late, or a range (fewest, most) of which every episode draws one."""
    hold: float = 0.0
    """Probability that a step shows the picture of the step before once more."""
    period: int = 1
    """Steps from one picture of the camera to its next."""
    noise: ImageNoise | None = None
    samples: int = 1
    """Colors: s × s samples per pixel are drawn and averaged."""

    def __post_init__(self) -> None:
        check_delay("ImageSpec.delay", self.delay)
        if not 0 <= self.hold < 1:
            raise ConfigError(f"ImageSpec.hold: expected a probability from 0 to below 1, got {self.hold}")
        for name in ("period", "samples"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ImageSpec.{name}: expected at least 1, got {getattr(self, name)}")
        colors = self.kind in ("rgb", "gray")
        if self.samples > 1 and not colors:
            raise ConfigError(f"ImageSpec.samples: only colors can be averaged, got kind {self.kind!r}")
        if self.noise is not None and not colors and self.kind != "depth":
            raise ConfigError(f"ImageSpec.noise: colors and depth can have some, got kind {self.kind!r}")
        if self.noise is not None:
            other = ("depth_step", "edge_dropout") if colors else ("salt_and_pepper",)
            for name in other:
                if getattr(self.noise, name):
                    raise ConfigError(f"ImageSpec.noise: {name} is not for images of kind {self.kind!r}")
        if self.kind not in FRAME_KINDS:
            raise UnknownNameError("kind of image", self.kind, FRAME_KINDS)
        if self.camera.data_types not in (("rgb",), (self.kind,)):
            raise ConfigError(
                f"ImageSpec: camera.data_types is {self.camera.data_types}, but an image group has the one kind that "
                f"``kind`` names, {self.kind!r}; leave data_types out and declare one group per kind"
            )
        if self.renderer != _AUTO:
            check_camera_name(self.renderer)
        if self.kind != "depth" and (self.missing is not None or self.max_depth is not None):
            raise ConfigError(f"ImageSpec: missing and max_depth belong to depth, got kind {self.kind!r}")
        if self.kind == "depth" and self.normalize != (self.max_depth is not None):
            raise ConfigError("ImageSpec: a depth image is normalized by max_depth; give both or neither")
        if self.kind == "segmentation" and self.normalize:
            raise ConfigError("ImageSpec: geom ids cannot be normalized; leave normalize out")
        if self.renderer in ("gl", "warp") and self.kind == "normals":
            raise ConfigError(f"ImageSpec: the {self.renderer} renderer has no normals; use renderer='native'")

    def renderer_on(self, device: torch.device) -> str:
        """Return the name of the camera that draws for environments on ``device``."""
        if self.renderer != _AUTO:
            return self.renderer
        return "warp" if device.type == "cuda" else "native"

    @property
    def source(self) -> ImageSpec:
        """What groups that are drawn together have in common."""
        camera = replace(self.camera, data_types=("rgb",))
        names = ("renderer", "frames", "reset", "looks", "delay", "hold", "period", "samples")
        return ImageSpec(camera=camera, **{name: getattr(self, name) for name in names})

    @property
    def dtype(self) -> type[np.generic]:
        """Of a frame in the history."""
        return FRAME_KINDS[self.kind][1]

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """Shape of one frame."""
        sides, channels = (self.camera.height, self.camera.width), FRAME_KINDS[self.kind][0] or (1,)
        return (*sides, *channels) if self.layout == "channels_last" else (*channels, *sides)

    @property
    def stack(self) -> StackSpec:
        """How frames make the observation."""
        dim = -1 if self.layout == "channels_last" else 0
        return StackSpec(frames=self.frames, dim=dim, reset=self.reset)

    @property
    def space(self) -> spaces.Box:
        """The space of one environment's observation."""
        shape = self.stack.stacked_shape(self.frame_shape)
        if self.dtype == np.uint8:
            return spaces.Box(-1.0, 1.0, shape, np.float32) if self.normalize else spaces.Box(0, 255, shape, np.uint8)
        if self.kind == "segmentation":
            return spaces.Box(-1, np.iinfo(np.int32).max, shape, np.int32)
        low = 0.0 if self.normalize or self.kind == "depth" else -1.0
        high = np.inf if self.kind == "depth" and not self.normalize else 1.0
        return spaces.Box(min(low, self.missing or 0.0), high, shape, np.float32)


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


def show_groups(images: Mapping[str, ImageSpec], spec: CameraSpec) -> CameraSpec:
    """Return ``spec`` with the groups of geoms and sites that the first image shows; as it is where there is none."""
    cameras = [image.camera for image in images.values()] or [spec]
    return replace(spec, groups=cameras[0].groups, site_groups=cameras[0].site_groups)
