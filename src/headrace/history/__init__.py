"""History per environment: ring buffers, frame stacks, image normalization, output memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace._lazy import lazy_exports

if TYPE_CHECKING:
    from headrace.history._buffers import CircularBuffer as CircularBuffer
    from headrace.history._frame_stack import FrameStack as FrameStack
    from headrace.history._normalize import normalize_image as normalize_image
    from headrace.history.obs_history import image_observation as image_observation

__getattr__, __dir__ = lazy_exports(__name__, __file__)
