"""The image path: normalisation, observations by kind of camera data, frame stacks."""

from headrace.vision.normalize import Channels, normalize_image
from headrace.vision.observation import ImageKind, image_observation
from headrace.vision.stack import FrameStack, MissingFrames
from headrace.vision.vector import FrameStackVector

__all__ = [
    "Channels",
    "FrameStack",
    "FrameStackVector",
    "ImageKind",
    "MissingFrames",
    "image_observation",
    "normalize_image",
]
