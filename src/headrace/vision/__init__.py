"""The image path: normalization, observations by kind of camera data, frame stacks."""

from headrace.vision._normalize import Channels, normalize_image
from headrace.vision._observation import ImageKind, image_observation
from headrace.vision._stack import FrameStack, MissingFrames
from headrace.vision._vector import FrameStackVector

__all__ = [
    "Channels",
    "FrameStack",
    "FrameStackVector",
    "ImageKind",
    "MissingFrames",
    "image_observation",
    "normalize_image",
]
