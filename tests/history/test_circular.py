"""CircularBuffer against a list-based reference, and its edges."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.errors import ConfigError, DeviceError, DtypeError, IdError, LifecycleError, ShapeError
from headrace.history import CircularBuffer
from headrace.history.ordered import OrderedFrames
from headrace.ids import env_rows
from pretend_cuda import pretend_cuda

NUM_ENVS = 4
CPU = torch.device("cpu")


@dataclass
class ListBuffer:
    """The obvious way: one Python list of frames per environment."""

    max_len: int
    frames: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(NUM_ENVS)])

    def append(self, env: int, frame: Tensor) -> None:
        self.frames[env] = (self.frames[env] + [frame.clone()])[-self.max_len :]

    def reset(self, env: int) -> None:
        self.frames[env] = []

    def slots(self, env: int, zero: Tensor) -> list[Tensor]:
        kept = self.frames[env]
        if not kept:
            return [zero] * self.max_len
        return [kept[0]] * (self.max_len - len(kept)) + kept

    def lagged(self, env: int, lag: int, zero: Tensor) -> Tensor:
        kept = self.frames[env]
        return kept[-1 - min(lag, len(kept) - 1)] if kept else zero


def identifiable(step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows whose every value tells environment, step and position."""
    size = max(1, int(torch.tensor(shape).prod())) if shape else 1
    values = (torch.arange(NUM_ENVS).reshape(-1, 1) * 1000 + step * 17 + torch.arange(size).reshape(1, -1)).reshape(
        NUM_ENVS, *shape
    )
    return (values % 251).to(dtype) if dtype == torch.uint8 else values.to(dtype)


masks = st.lists(st.booleans(), min_size=NUM_ENVS, max_size=NUM_ENVS)
operations = st.lists(st.tuples(st.sampled_from(["append", "mask", "ids", "reset", "peek"]), masks), max_size=14)
frame_kinds = st.sampled_from(
    [
        ((), torch.float64, None),
        ((3,), torch.float32, -1),
        ((2, 3), torch.int64, None),
        ((2, 3), torch.int64, 1),
        ((2, 3), torch.bfloat16, 2),
        ((5, 4, 3), torch.uint8, -1),
        ((5, 4, 1), torch.uint8, 3),
        ((3, 5, 4), torch.uint8, 1),
        ((37, 31, 3), torch.uint8, -1),
        ((3, 5, 4), torch.uint8, -2),
        ((5, 4, 3), torch.uint8, None),
    ]
)


@settings(deadline=None, max_examples=120)
@given(operations=operations, kind=frame_kinds, max_len=st.integers(1, 5))
def test_any_sequence_of_appends_and_resets_equals_a_list_per_environment(operations, kind, max_len) -> None:
    shape, dtype, stack_dim = kind
    buffer = CircularBuffer(max_len, NUM_ENVS, "cpu", stack_dim)
    lists = ListBuffer(max_len)
    zero = torch.zeros(shape, dtype=dtype)
    appended = False
    for step, (operation, mask) in enumerate(operations):
        rows = identifiable(step, shape, dtype)
        chosen = [env for env in range(NUM_ENVS) if mask[env]]
        if operation == "append":
            buffer.append(rows)
            chosen = list(range(NUM_ENVS))
        elif operation == "mask":
            buffer.append(rows, torch.tensor(mask))
        elif operation == "ids":
            order = torch.tensor(chosen[::-1], dtype=torch.int64)
            buffer.append(rows[order], order)
        elif operation == "reset":
            buffer.reset(torch.tensor(mask))
        else:
            peeked = buffer.peek(rows[chosen], chosen)
            after = ListBuffer(max_len, [list(kept) for kept in lists.frames])
            for env in chosen:
                after.append(env, rows[env])
            frames = [torch.stack(after.slots(env, zero)) for env in chosen]
            expected = torch.stack(frames) if frames else torch.empty(0, max_len, *shape, dtype=dtype)
            assert torch.equal(peeked, merged(expected, stack_dim))
            continue
        appended |= operation != "reset"
        for env in chosen:
            lists.reset(env) if operation == "reset" else lists.append(env, rows[env])
        if appended:
            expected = torch.stack([torch.stack(lists.slots(env, zero)) for env in range(NUM_ENVS)])
            assert torch.equal(buffer.buffer, expected)
            if stack_dim is not None:
                assert torch.equal(buffer.stacked, merged(expected, stack_dim))
                assert buffer.stacked.is_contiguous()
            for lag in range(max_len):
                expected = torch.stack([lists.lagged(env, lag, zero) for env in range(NUM_ENVS)])
                assert torch.equal(buffer[lag], expected)
            lags = torch.arange(NUM_ENVS) % max_len
            expected = torch.stack([lists.lagged(env, int(lags[env]), zero) for env in range(NUM_ENVS)])
            assert torch.equal(buffer[lags], expected)
        assert buffer.lengths.tolist() == [len(kept) for kept in lists.frames]


def merged(frames: Tensor, stack_dim: int | None) -> Tensor:
    """The stack by definition: concatenate the frames (n, K, …) along ``stack_dim``."""
    return frames if stack_dim is None else torch.cat(list(frames.unbind(1)), stack_dim)


@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(st.tuples(masks, st.lists(st.integers(1, 5), min_size=NUM_ENVS, max_size=NUM_ENVS), st.booleans())),
    length=st.integers(1, 5),
    axis=st.integers(0, 3),
)
def test_frames_that_are_pushed_and_written_late_are_those_of_a_list(steps, length, axis) -> None:
    shape = (2, 4, 3)
    compiled = OrderedFrames(length, NUM_ENVS, shape, axis, torch.uint8, CPU)
    lists = [[torch.zeros(shape, dtype=torch.uint8)] * length for _ in range(NUM_ENVS)]
    for step, (mask, by, pushes) in enumerate(steps):
        rows = identifiable(step, shape, torch.uint8)
        chosen = [env for env in range(NUM_ENVS) if mask[env]]
        fill = torch.tensor([env % 2 == 0 and step % 3 == 0 for env in range(NUM_ENVS)])
        if pushes:
            compiled.push(rows, env_rows(torch.tensor(mask), num_envs=NUM_ENVS, device=CPU), fill=fill)
        else:
            by = [min(steps, length) for steps in by]
            compiled.make_room(torch.tensor(chosen, dtype=torch.int64), torch.tensor(by)[torch.tensor(mask)])
            free = [(env, slot) for env in chosen for slot in range(length - by[env], length)]
            ids, slots = torch.tensor(free, dtype=torch.int64).reshape(-1, 2).unbind(1)
            compiled.write(ids, slots, rows, ids)
        for env in chosen:
            count = length if pushes and fill[env] else 1 if pushes else by[env]
            lists[env] = (lists[env] + [rows[env]] * count)[-length:]
        assert torch.equal(compiled.frames, torch.stack([torch.stack(frames) for frames in lists]))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("length", range(1, 9))
def test_frames_of_three_channels_are_woven_like_in_plain_torch(length: int, offset: int, filled: bool) -> None:
    compiled = OrderedFrames(length, NUM_ENVS, (5, 8, 3), 2, torch.uint8, CPU)
    generator = torch.Generator().manual_seed(0)
    compiled.load(torch.randint(0, 256, compiled.shape, dtype=torch.uint8, generator=generator))
    # one byte off: an odd address
    memory = torch.randint(0, 256, (NUM_ENVS * 120 + 1,), dtype=torch.uint8, generator=generator)
    rows = memory[offset : offset + NUM_ENVS * 120].view(NUM_ENVS, 5, 8, 3)
    older = [] if filled else list(compiled.frames.clone().unbind(1)[1:])
    expected = torch.stack([*older, *[rows] * (length - len(older))], dim=3)
    fill = torch.full((NUM_ENVS,), filled)
    compiled.push(rows, env_rows(None, num_envs=NUM_ENVS, device=CPU), fill=fill)
    assert torch.equal(compiled.data, expected)
    # rows of a larger block, others of which must stay as they are
    block = torch.full((NUM_ENVS + 2, *expected.shape[1:]), 7, dtype=torch.uint8)
    ids = torch.arange(NUM_ENVS).flip(0)[:2]
    compiled.gather(ids, block, torch.tensor([3, 1]))
    assert torch.equal(block[[3, 1]], expected[ids])
    assert (block[[0, 2, *range(4, NUM_ENVS + 2)]] == 7).all()


def test_many_large_frames_move_like_few_small_ones() -> None:
    # enough bytes that all threads take part
    buffer = CircularBuffer(4, 16, "cpu", stack_dim=-1)
    frames = [torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8) for _ in range(7)]
    for rows in frames:
        buffer.append(rows)
    assert torch.equal(buffer.stacked, torch.cat(frames[-4:], -1))
    buffer.append(frames[0], torch.arange(16) % 3 != 1)
    moved = torch.where(
        (torch.arange(16) % 3 != 1)[:, None, None, None],
        torch.cat([*frames[-3:], frames[0]], -1),
        torch.cat(frames[-4:], -1),
    )
    assert torch.equal(buffer.stacked, moved)


def test_stacked_is_a_view_of_one_block_that_partial_appends_keep_in_order() -> None:
    buffer = CircularBuffer(3, NUM_ENVS, "cpu", stack_dim=-1)
    buffer.append(identifiable(0, (2, 2, 3), torch.uint8))
    pointer = buffer.stacked.data_ptr()
    for step in range(1, 8):
        buffer.append(identifiable(step, (2, 2, 3), torch.uint8)[step % 4 :], range(step % 4, 4))
        assert buffer.stacked.data_ptr() == pointer
        assert buffer.buffer.data_ptr() == pointer
        assert buffer.stacked.shape == (NUM_ENVS, 2, 2, 9)


def test_partial_reset_zeroes_that_environment_and_touches_no_other() -> None:
    for stack_dim in (None, -1):
        buffer = CircularBuffer(3, NUM_ENVS, "cpu", stack_dim)
        for step in range(3):
            buffer.append(identifiable(step, (2, 3), torch.float32))
        before = buffer.buffer.clone()
        buffer.reset([2])
        assert torch.equal(buffer.buffer[2], torch.zeros(3, 2, 3))
        others = torch.tensor([0, 1, 3])
        assert torch.equal(buffer.buffer[others], before[others])
        assert not buffer._require_filled().data[2].any(), "the storage itself is zeroed, not only what is read of it"


def test_reading_before_the_first_append_says_to_append() -> None:
    buffer = CircularBuffer(2, NUM_ENVS, "cpu", stack_dim=1)
    for read in (lambda: buffer.buffer, lambda: buffer.stacked, lambda: buffer[0]):
        with pytest.raises(LifecycleError, match="call append"):
            read()


def test_stacked_without_stack_dim_says_to_set_it_whether_or_not_data_is_there() -> None:
    buffer = CircularBuffer(2, NUM_ENVS, "cpu")
    with pytest.raises(ConfigError, match="stack_dim"):
        _ = buffer.stacked
    buffer.append(torch.zeros(NUM_ENVS, 3))
    with pytest.raises(ConfigError, match="stack_dim"):
        _ = buffer.stacked


@pytest.mark.parametrize("sizes", [(0, 4), (-1, 4), (3, 0), (3, -2)])
def test_sizes_below_one_are_refused(sizes) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        CircularBuffer(*sizes)


def test_the_batch_axis_cannot_be_stacked_into() -> None:
    with pytest.raises(ConfigError, match="batch axis"):
        CircularBuffer(2, NUM_ENVS, "cpu", stack_dim=0)
    for stack_dim in (-3, 3):
        buffer = CircularBuffer(2, NUM_ENVS, "cpu", stack_dim)
        with pytest.raises(ShapeError, match="stack_dim"):
            buffer.append(torch.zeros(NUM_ENVS, 2, 3)[..., 0])
        assert buffer.nbytes == 0


def test_bad_rows_and_ids_raise_and_change_nothing() -> None:
    for stack_dim in (None, 1):
        buffer = CircularBuffer(3, NUM_ENVS, "cpu", stack_dim)
        with pytest.raises(ShapeError, match="at least one element"):
            buffer.append(torch.zeros(NUM_ENVS, 0, 2))
        buffer.append(identifiable(0, (2,), torch.float32))
        buffer.append(identifiable(1, (2,), torch.float32))
        before, lengths = buffer.buffer.clone(), buffer.lengths
        good = identifiable(2, (2,), torch.float32)
        bad: list[tuple[object, object, type[Exception]]] = [
            (good.double(), None, DtypeError),
            (good.numpy(), None, DtypeError),
            (good[:, :1], None, ShapeError),
            (good[..., None], None, ShapeError),
            (good[:3], None, ShapeError),
            (good, [0, 1], ShapeError),
            (good[:2], torch.tensor([True, True, False, False]), ShapeError),
            (good[:2], [0, 0], IdError),
            (good[:2], [0, 4], IdError),
            (good[:2], [-1, 0], IdError),
            (good, torch.ones(3, dtype=torch.bool), ShapeError),
            (good[:2], torch.tensor([0, 1], dtype=torch.int32), DtypeError),
            (good[:2], torch.tensor([[0, 1]]), ShapeError),
            (good[:2], [[0, 1]], ShapeError),
            (good[:2], [0.0, 1.5], DtypeError),
            (good[:2], [True, True, False], ShapeError),
            (good.to("meta"), None, DeviceError),
            (good[:2], torch.tensor([0, 1], device="meta"), DeviceError),
        ]
        for rows, ids, error in bad:
            with pytest.raises(error):
                buffer.append(rows, ids)  # type: ignore[arg-type]  # wrong on purpose
            with pytest.raises(error):
                buffer.peek(rows, ids)  # type: ignore[arg-type]  # wrong on purpose
            assert torch.equal(buffer.buffer, before)
            assert torch.equal(buffer.lengths, lengths)
        with pytest.raises(IdError):
            buffer.reset([4])


@pytest.mark.parametrize("mask", [[False, True, True, False], np.array([False, True, True, False])])
def test_a_list_or_array_of_bools_is_a_mask_and_not_the_indices_0_and_1(mask) -> None:
    buffer = CircularBuffer(2, NUM_ENVS)
    buffer.append(identifiable(0, (2,), torch.float32), mask)
    assert buffer.lengths.tolist() == [0, 1, 1, 0]
    buffer.reset(np.array([1]))
    assert buffer.lengths.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("lag", [3, 100])
def test_a_lag_beyond_the_buffer_gives_the_oldest_frame_on_every_device(lag) -> None:
    for dtype in (torch.int32, torch.int64):
        buffer = CircularBuffer(3, NUM_ENVS, "cpu")
        for step in range(5):
            buffer.append(torch.full((NUM_ENVS, 2), float(step)))
        assert torch.equal(buffer[lag], buffer.buffer[:, 0])
        mixed = buffer[torch.tensor([0, 1, 0, lag], dtype=dtype)]
        assert mixed[:, 0].tolist() == [4.0, 3.0, 4.0, 2.0]
        with pretend_cuda():
            there = CircularBuffer(3, NUM_ENVS, "cuda")
            for step in range(5):
                there.append(torch.full((NUM_ENVS, 2), float(step), device="cuda"))
            assert torch.equal(there[torch.tensor([0, 1, 0, lag], dtype=dtype, device="cuda")].cpu(), mixed)


def test_iteration_ends_after_the_oldest_frame() -> None:
    buffer = CircularBuffer(3, NUM_ENVS, "cpu")
    for step in range(5):
        buffer.append(torch.full((NUM_ENVS, 2), step))
    assert [int(frames[0, 0]) for frames in buffer] == [4, 3, 2]


def test_a_lag_that_is_no_whole_number_of_appends_is_refused() -> None:
    for stack_dim in (None, -1):
        buffer = CircularBuffer(3, NUM_ENVS, "cpu", stack_dim)
        buffer.append(torch.zeros(NUM_ENVS, 2))
        with pytest.raises(IndexError, match="0 \\(the newest\\) or more"):
            _ = buffer[-1]
        with pytest.raises(IdError):
            _ = buffer[torch.tensor([0, 0, 0, -1])]
        with pytest.raises(DtypeError):
            _ = buffer[torch.zeros(NUM_ENVS)]
        with pytest.raises(ShapeError):
            _ = buffer[torch.zeros(2, dtype=torch.int64)]


def test_a_view_of_the_buffer_can_be_appended_to_it() -> None:
    # with one environment the newest frame is a contiguous view, which moves while it is read
    buffer = CircularBuffer(3, 1, "cpu", stack_dim=1)
    for step in range(3):
        buffer.append(identifiable(step, (3, 40, 40), torch.uint8)[:1])
    newest = buffer[0]
    buffer.append(buffer.buffer[:, 2])
    assert torch.equal(buffer[0], newest)
    assert torch.equal(buffer[1], newest)
    buffer.append(buffer.buffer[:, 0])
    assert torch.equal(buffer[0][0], identifiable(1, (3, 40, 40), torch.uint8)[0])


def test_an_append_copies_its_rows() -> None:
    for stack_dim in (None, -1):
        buffer = CircularBuffer(2, NUM_ENVS, "cpu", stack_dim)
        rows = identifiable(0, (3,), torch.float32)
        kept = rows.clone()
        buffer.append(rows)
        rows.zero_()
        assert torch.equal(buffer[0], kept)


def test_rows_may_be_strided() -> None:
    buffer = CircularBuffer(2, NUM_ENVS, "cpu", stack_dim=-1)
    rows = identifiable(0, (6, 8, 3), torch.uint8)[:, ::2, ::2]
    buffer.append(rows)
    assert torch.equal(buffer.stacked, torch.cat([rows, rows], -1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_a_single_element_of_any_strides_is_appended(dtype) -> None:
    rows = torch.arange(12).reshape(3, 4).to(dtype)[1:2, 2:3].t()
    assert rows.stride(-1) != 1
    ring = CircularBuffer(2, 1)
    ring.append(rows)
    assert ring[0].item() == 6
