"""Nothing in the steady state reads a value back to the host.

Tensors on the ``meta`` device have shapes and no values: whatever would wait for a GPU (``bool()``, ``nonzero``,
``item``) raises there.
"""

from __future__ import annotations

import pytest
import torch

from headrace.history import CircularBuffer, FrameStack, normalize_image
from headrace.types import StackSpec

META = torch.device("meta")
NUM_ENVS = 4


def test_the_meta_device_refuses_to_be_read() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(torch.zeros(1, device=META).any())


@pytest.mark.parametrize("stack_dim", [None, -1])
def test_circular_buffer(stack_dim) -> None:
    buffer = CircularBuffer(3, NUM_ENVS, META, stack_dim)
    rows = torch.zeros(NUM_ENVS, 5, 2, dtype=torch.uint8, device=META)
    mask = torch.ones(NUM_ENVS, dtype=torch.bool, device=META)
    ids = torch.zeros(2, dtype=torch.int64, device=META)
    for _ in range(2):
        buffer.append(rows)
        buffer.append(rows, mask)
        buffer.append(rows[:2], ids)
        buffer.reset(mask)
        buffer.reset(ids)
        assert buffer.buffer.shape == (NUM_ENVS, 3, 5, 2)
        assert buffer[torch.zeros(NUM_ENVS, dtype=torch.int64, device=META)].shape == rows.shape
        assert buffer[1].shape == rows.shape
        assert buffer.peek(rows, mask).shape[0] == NUM_ENVS
    if stack_dim is not None:
        assert buffer.stacked.shape == (NUM_ENVS, 5, 6)


def test_frame_stack() -> None:
    stack = FrameStack(
        StackSpec(frames=2, dim=-1), num_envs=NUM_ENVS, frame_shape=(8, 8, 3), device=META, normalize=True
    )
    frames = torch.zeros(NUM_ENVS, 8, 8, 3, dtype=torch.uint8, device=META)
    mask = torch.ones(NUM_ENVS, dtype=torch.bool, device=META)
    for _ in range(2):
        stack.append(frames)
        stack.append(frames, mask)
        stack.reset(mask)
        assert stack.observe().shape == (NUM_ENVS, 8, 8, 6)
        assert stack.peek(frames, mask).shape == (NUM_ENVS, 8, 8, 6)
    assert normalize_image(frames).dtype == torch.float32
