"""How much memory an append takes beside the buffer, counted operation by operation: no GPU needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.history import CircularBuffer, DelayBuffer, FrameStack
from headrace.history.ordered import OrderedFrames
from headrace.ids import env_rows
from headrace.types import StackSpec
from pretend_cuda import pretend_cuda

N, K, FRAME = 6, 4, (8, 10, 3)


class Counter(TorchDispatchMode):
    """Bytes of every tensor that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.bytes += leaf.nbytes
        return out


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("which", ["all", "mask", "ids"])
def test_a_push_in_plain_torch_equals_the_kernel_and_takes_at_most_a_frame(axis, which):
    generator = torch.Generator().manual_seed(axis)
    device = torch.device("cpu")
    fast = OrderedFrames(K, N, FRAME, axis, torch.uint8, device)
    slow = OrderedFrames(K, N, FRAME, axis, torch.uint8, device)
    env_ids = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2])}[which]
    where = env_rows(env_ids, num_envs=N, device=device)
    flags = 64 * N * K * K  # masks and steps per environment
    for step in range(7):
        rows = torch.randint(0, 256, (where.row_count, *FRAME), generator=generator, dtype=torch.uint8)
        by = torch.randint(1, 3, (N,), generator=generator)
        fill = torch.rand(N, generator=generator) < (1.0 if step == 0 else 0.2)
        before = slow.data.clone()
        peeked = slow.peek(rows, where, by=by, fill=fill)
        assert torch.equal(slow.data, before)
        fast.push(rows, where, by=by, fill=fill)
        mask = where.mask
        full = rows
        if which == "ids":
            mask = torch.zeros(N, dtype=torch.bool).index_fill_(0, where.ids, True)
            full = torch.zeros((N, *FRAME), dtype=torch.uint8).index_copy_(0, where.ids, rows)
        with Counter() as counter:
            slow._move(slow.data, full, by, fill, mask)
        assert counter.bytes <= N * math.prod(FRAME) + flags
        assert torch.equal(slow.data, fast.data)
        assert torch.equal(peeked, where.select(fast.data))


def test_peek_takes_channel_first_normalized_stacks():
    spec = StackSpec(frames=3, dim=0)
    stack = FrameStack(spec, num_envs=2, frame_shape=(3, 5, 4), channels="first", normalize=True)
    frames = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8).movedim(-1, 1)
    stack.append(frames)
    stack.append(frames.flip(0))
    ids = torch.tensor([1])
    peeked = stack.peek(frames[ids], ids)
    stack.append(frames[ids], ids)
    assert torch.equal(peeked, stack.observe(ids))


LARGE = (32, 40, 3)
"""Frames beside which the flags of six environments do not count."""


@pytest.mark.parametrize("which", ["all", "mask", "ids"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_an_append_on_a_device_allocates_at_most_one_frame_and_peek_that_beside_its_result(which, axis):
    one_frame = N * math.prod(LARGE)
    flags = 64 * N * K * K
    spec = StackSpec(frames=K, dim=axis if axis < 0 else axis - 1)
    with pretend_cuda() as device:
        env_ids = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2])}[which]
        env_ids = None if env_ids is None else env_ids.cuda()
        rows = torch.zeros((3 if which == "ids" else N, *LARGE), dtype=torch.uint8, device="cuda")
        buffer = CircularBuffer(K, N, "cuda", stack_dim=axis)
        stack = FrameStack(spec, num_envs=N, frame_shape=LARGE, device="cuda")
        delay = DelayBuffer(K - 1, N, "cuda")
        buffer.append(rows, env_ids)
        delay.compute(rows, env_ids)
        for append in (buffer.append, stack.append):
            device.clear()
            append(rows, env_ids)
            assert 0 < device.allocated <= one_frame + flags
            assert device.waits == 0
        for peek in (buffer.peek, stack.peek):
            device.clear()
            result = peek(rows, env_ids)
            assert result.nbytes <= device.allocated <= result.nbytes + one_frame + flags
        device.clear()
        late = delay.compute(rows, env_ids)
        # with a mask the frames that stay are read and written back
        assert device.allocated <= late.nbytes + (2 if which == "mask" else 1) * one_frame + flags


@pytest.mark.parametrize("ids", [None, [4, 1, 2]])
def test_peek_on_the_cpu_allocates_at_most_one_frame_beside_its_result(ids):
    buffer = CircularBuffer(K, N, stack_dim=-1)
    stack = FrameStack(StackSpec(frames=K, dim=-1), num_envs=N, frame_shape=LARGE)
    rows = torch.zeros((N if ids is None else len(ids), *LARGE), dtype=torch.uint8)
    buffer.append(torch.zeros((N, *LARGE), dtype=torch.uint8))
    for peek in (buffer.peek, stack.peek):
        with Counter() as counter:
            result = peek(rows, ids)
        assert counter.bytes <= result.nbytes + N * math.prod(LARGE) + 64 * N * K * K
        before = result.clone()
        result.zero_()
        assert torch.equal(peek(rows, ids), before), "the result is the caller's own"


@pytest.mark.parametrize("which", ["all", "mask", "ids"])
@pytest.mark.parametrize(("channels", "dim"), [("last", -1), ("first", 0), ("last", 0)])
def test_a_normalized_peek_takes_one_frame_beside_what_it_gives(which, channels, dim):
    shape = FRAME if channels == "last" else (3, 8, 10)
    stack = FrameStack(StackSpec(frames=K, dim=dim), num_envs=N, frame_shape=shape, channels=channels, normalize=True)
    generator = torch.Generator().manual_seed(0)
    env_ids = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2])}[which]
    for step in range(6):
        stack.append(torch.randint(0, 256, (N, *shape), generator=generator, dtype=torch.uint8))
        if step == 3:
            stack.reset(torch.tensor([1, 4]))
            continue
        rows = 3 if which == "ids" else N
        frames = torch.randint(0, 256, (rows, *shape), generator=generator, dtype=torch.uint8)
        flags = 64 * N * K * K
        with Counter() as counter:
            peeked = stack.peek(frames, env_ids)
        # each slot's frame is given back before the next; the observation itself may come from a pool, uncounted
        assert counter.bytes <= K * rows * math.prod(shape) + peeked.nbytes + flags
        saved = stack.state_dict()
        stack.append(frames, env_ids)
        assert torch.equal(peeked, stack.observe(env_ids))
        stack.load_state_dict(saved)
