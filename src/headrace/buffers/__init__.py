"""Buffers with one owner: history per environment, delays, the pool of outputs."""

from headrace.buffers.circular import CircularBuffer
from headrace.buffers.delay import DelayBuffer
from headrace.buffers.ordered import OrderedFrames
from headrace.buffers.pool import OutputPool
from headrace.buffers.rows import EnvRows, check_rows, env_rows

__all__ = ["CircularBuffer", "DelayBuffer", "EnvRows", "OrderedFrames", "OutputPool", "check_rows", "env_rows"]
