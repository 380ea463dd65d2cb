"""What all buffers share: snapshots, dtypes that torch can only store, inference mode, gradients."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import DataError
from headrace.history import CircularBuffer, FrameStack
from headrace.types import StackSpec

N = 3
STORED_ONLY = [
    torch.bool,
    torch.complex64,
    torch.bfloat16,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def frames(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    numbers = torch.arange(N * 4).reshape(N, 4) % 7 + step
    return numbers.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype and bits, for dtypes that torch cannot compare."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("stack_dim", [None, 1, -1])
@pytest.mark.parametrize("appended", [0, 1, 5])
def test_a_circular_buffer_goes_on_from_its_state_bit_for_bit(stack_dim, appended) -> None:
    one, other = CircularBuffer(3, N, stack_dim=stack_dim), CircularBuffer(3, N, stack_dim=stack_dim)
    for step in range(appended):
        one.append(frames(step))
        if step == 2:
            one.reset([1])
    other.append(torch.zeros(N, 9, dtype=torch.int32))
    state = one.state_dict()
    other.load_state_dict(state)
    one.append(frames(7)[:2], [0, 2])  # the state is a copy
    other.append(frames(7)[:2], [0, 2])
    assert torch.equal(one.buffer, other.buffer)
    assert torch.equal(one.lengths, other.lengths)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    buffer = CircularBuffer(3, N, stack_dim=-1)
    for step in range(4):
        buffer.append(frames(step))
    kept = buffer.state_dict()
    longer, wider = CircularBuffer(4, N, stack_dim=-1), CircularBuffer(3, N + 1, stack_dim=-1)
    longer.append(frames(0))
    wider.append(torch.zeros(N + 1, 4))
    for bad in (longer.state_dict(), wider.state_dict(), {}, {**kept, "frames": 3}, {"frames": kept["frames"]}):
        with pytest.raises(DataError):
            buffer.load_state_dict(bad)
    assert all(torch.equal(value, kept[name]) for name, value in buffer.state_dict().items())


@pytest.mark.parametrize("dtype", STORED_ONLY)
@pytest.mark.parametrize("stack_dim", [None, -1])
def test_dtypes_that_torch_can_only_store_are_kept_bit_for_bit(dtype, stack_dim) -> None:
    plain, rare = CircularBuffer(3, N, stack_dim=stack_dim), CircularBuffer(3, N, stack_dim=stack_dim)
    late = CircularBuffer(3, N)
    spec = StackSpec(frames=3, dim=-1)
    stack = FrameStack(spec, num_envs=N, frame_shape=(4,), dtype=dtype)
    for step in range(5):
        plain.append(frames(step))
        rare.append(frames(step, dtype))
        stack.append(frames(step, dtype))
        late.append(frames(step, dtype))
        assert same(late[1], frames(max(step - 1, 0), dtype))
        for ids in ([1], torch.tensor([True, False, True])):
            if step == 2:
                for buffer in (plain, rare, stack, late):
                    buffer.reset(ids)
                plain.append(frames(9))
                rare.append(frames(9, dtype))
                stack.append(frames(9, dtype))
                late.append(frames(2, dtype))
    assert same(rare.buffer, plain.buffer.to(dtype))
    assert same(rare[1], plain[1].to(dtype))
    assert same(rare.peek(frames(8, dtype)), plain.peek(frames(8)).to(dtype))
    assert same(stack.observe(), spec.stack(plain.buffer).to(dtype))
    assert same(stack.observe([2, 0]), spec.stack(plain.buffer)[[2, 0]].to(dtype))
    restored = CircularBuffer(3, N, stack_dim=stack_dim)
    restored.load_state_dict(rare.state_dict())
    assert same(restored.buffer, rare.buffer)


def test_a_first_use_inside_inference_mode_does_not_break_later_use() -> None:
    with torch.inference_mode():
        buffer = CircularBuffer(3, N, stack_dim=-1)
        stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=N, frame_shape=(4,), dtype=torch.float32)
        buffer.append(frames(0))
        stack.append(frames(0))
    for ids in (None, [0], torch.tensor([True, False, True])):
        for each in (buffer, stack):
            each.reset(ids)
        buffer.append(frames(1))
        stack.append(frames(1))
        assert torch.equal(buffer[0], frames(1))
        assert torch.equal(stack.observe()[1], frames(1)[1].repeat(2))


def test_no_history_of_gradients_is_kept() -> None:
    weights = torch.ones(N, 4, requires_grad=True)
    buffer = CircularBuffer(3, N)
    stack = FrameStack(StackSpec(frames=2, dim=-1), num_envs=N, frame_shape=(4,), dtype=torch.float32)
    for step in range(4):
        rows = weights * step
        assert rows.requires_grad
        buffer.append(rows)
        buffer.append(rows[:1], [0])
        stack.append(rows)
        assert not buffer[1].requires_grad
        assert buffer[1][1, 0] == max(step - 1, 0)
    for kept in (buffer.buffer, buffer[0], buffer.peek(rows), stack.observe(), buffer.state_dict()["frames"]):
        assert not kept.requires_grad
