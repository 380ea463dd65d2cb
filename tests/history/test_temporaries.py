"""How much memory an append takes beside the buffer, counted operation by operation: no GPU needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.history import CircularBuffer, FrameStack
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
def test_a_push_on_a_device_equals_the_kernel_and_so_does_a_peek(axis, which):
    generator = torch.Generator().manual_seed(axis)
    env_ids = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2])}[which]
    with pretend_cuda():
        fast = OrderedFrames(K, N, FRAME, axis, torch.uint8, torch.device("cpu"))
        slow = OrderedFrames(K, N, FRAME, axis, torch.uint8, torch.device("cuda"))
        where = env_rows(env_ids, num_envs=N, device=fast.device)
        there = env_rows(None if env_ids is None else env_ids.cuda(), num_envs=N, device=slow.like.device)
        for step in range(9):
            rows = torch.randint(0, 256, (where.row_count, *FRAME), generator=generator, dtype=torch.uint8)
            fill = torch.rand(N, generator=generator) < (1.0 if step == 0 else 0.2)
            before = slow.data.clone()
            peeked = slow.peek(rows.cuda(), there, fill=fill.cuda())
            assert torch.equal(slow.data, before)
            fast.push(rows, where, fill=fill)
            slow.push(rows.cuda(), there, fill=fill.cuda())
            if step % 3 == 2:
                ids, by, source = torch.tensor([5, 1]), torch.tensor([2, 1]), torch.tensor([0, 0, 1])
                envs, slots = torch.tensor([5, 5, 1]), torch.tensor([K - 2, K - 1, K - 1])
                late = torch.randint(0, 256, (2, *FRAME), generator=generator, dtype=torch.uint8)
                kept = fast.frames.clone()
                fast.make_room(ids, by)
                fast.write(envs, slots, late, source)
                slow.make_room(ids.cuda(), by.cuda())
                slow.write(envs.cuda(), slots.cuda(), late.cuda(), source.cuda())
                assert torch.equal(fast.frames[1], torch.cat((kept[1, 1:], late[1:])))
                assert torch.equal(fast.frames[5], torch.stack((*kept[5, 2:], late[0], late[0])))
            else:
                assert torch.equal(peeked.cpu(), where.select(fast.data))
            assert torch.equal(slow.data.cpu(), fast.data)


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
def test_an_append_on_a_device_allocates_at_most_one_frame_and_peek_twice_its_result(which, axis):
    one_frame = N * math.prod(LARGE)
    flags = 64 * N * K * K
    spec = StackSpec(frames=K, dim=axis if axis < 0 else axis - 1)
    with pretend_cuda() as device:
        env_ids = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2])}[which]
        env_ids = None if env_ids is None else env_ids.cuda()
        rows = torch.zeros((3 if which == "ids" else N, *LARGE), dtype=torch.uint8, device="cuda")
        buffer = CircularBuffer(K, N, "cuda", stack_dim=axis)
        stack = FrameStack(spec, num_envs=N, frame_shape=LARGE, device="cuda")
        buffer.append(rows, env_ids)
        for append in (buffer.append, stack.append):
            device.clear()
            append(rows, env_ids)
            assert 0 < device.allocated <= one_frame + flags
            assert device.waits == 0
        for peek in (buffer.peek, stack.peek):
            device.clear()
            result = peek(rows, env_ids)
            assert result.nbytes <= device.allocated <= 2 * result.nbytes + flags
        device.clear()
        late = buffer[torch.arange(N).cuda() % K]
        assert device.allocated <= late.nbytes + flags


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
