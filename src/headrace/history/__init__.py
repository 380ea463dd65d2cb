"""History per environment: ring buffers, delays, frame stacks, image normalization, output memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.history._buffers import CircularBuffer, DelayBuffer
    from headrace.history._frame_stack import FrameStack
    from headrace.history._frame_stack_vector import FrameStackVector
    from headrace.history._normalize import normalize_image
    from headrace.history.obs_history import image_observation

__all__ = ["CircularBuffer", "DelayBuffer", "FrameStack", "FrameStackVector", "image_observation", "normalize_image"]

__getattr__, __dir__ = lazy_exports(__name__, __file__, __all__)
