"""Buffers with one owner: history per environment, delays, the pool of outputs."""

from headrace.buffers._circular import CircularBuffer
from headrace.buffers._delay import DelayBuffer

__all__ = ["CircularBuffer", "DelayBuffer"]
