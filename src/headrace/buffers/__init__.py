"""Buffers with one owner: history per environment, delays, the pool of outputs."""

from headrace.buffers._circular import CircularBuffer
from headrace.buffers._delay import DelayBuffer
from headrace.buffers._ordered import OrderedFrames
from headrace.buffers._pool import OutputPool, anonymous

__all__ = ["CircularBuffer", "DelayBuffer", "OrderedFrames", "OutputPool", "anonymous"]
