"""The image path: normalization, observations by kind of camera data, frame stacks."""

from headrace.vision._normalize import normalize_image
from headrace.vision._observation import image_observation
from headrace.vision._stack import FrameStack
from headrace.vision._vector import FrameStackVector

__all__ = ["FrameStack", "FrameStackVector", "image_observation", "normalize_image"]
