"""Warp's kernels for frames, on its CPU device, against the compiled ones of the CPU; and compiled for three cards."""

from __future__ import annotations

import math

import pytest
import torch
import warp as wp

from headrace.history import CircularBuffer, DelayBuffer, FrameStack
from headrace.history import _warp as frames_warp
from headrace.history import _warp as normalize_warp
from headrace.history.ordered import OrderedFrames
from headrace.ids import env_rows
from headrace.types import StackSpec
from pretend_cuda import pretend_cuda

N, K = 6, 4
CPU = torch.device("cpu")
CHOICES = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2]), "none": []}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize(
    ("frame", "axis", "dtype"),
    [
        ((5, 7, 3), 2, torch.uint8),
        ((4, 8), 1, torch.uint8),
        ((3, 2), 0, torch.float32),
        ((5,), 0, torch.float64),
        ((), 0, torch.int64),
    ],
)
@pytest.mark.parametrize("which", CHOICES)
def test_a_push_equals_that_of_the_cpu(frame, axis, dtype, which) -> None:
    fast, slow = (OrderedFrames(K, N, frame, axis, dtype, CPU) for _ in range(2))
    where = env_rows(CHOICES[which], num_envs=N, device=CPU)
    # on a GPU a mask stays a mask
    ids = None if where.mask is not None else where.ids
    generator = torch.Generator().manual_seed(1)
    for step in range(7):
        rows = random(where.row_count, *frame, dtype=dtype, seed=step)
        by = torch.randint(1, K + 2, (N,), generator=generator)
        fill = torch.rand(N, generator=generator) < (1.0 if step == 0 else 0.2)
        slow.push(rows, where, by=by, fill=fill)
        inner = math.prod(frame[axis:]) * dtype.itemsize
        frames_warp.push_warp(fast.data, rows, ids, where.mask, by, fill, inner_bytes=inner, length=K)
        assert torch.equal(fast.data, slow.data)


def test_a_push_that_only_moves_keeps_the_frames_that_stay() -> None:
    frames = OrderedFrames(K, N, (2, 3), 0, torch.uint8, CPU)
    frames.data.copy_(random(N, K, 2, 3, dtype=torch.uint8, seed=0))
    before = frames.data.clone()
    by, still = torch.tensor([1, 2, 3, 4, 5, 1]), torch.zeros(N, dtype=torch.bool)
    frames_warp.push_warp(frames.data, None, None, None, by, still, inner_bytes=6, length=K)
    for env, steps in enumerate(by.clamp(max=K).tolist()):
        assert torch.equal(frames.data[env, : K - steps], before[env, steps:])


@pytest.mark.parametrize("which", CHOICES)
@pytest.mark.parametrize(("frame", "dtype"), [((3,), torch.float32), ((5, 3), torch.uint8), ((), torch.bool)])
def test_an_append_to_a_ring_equals_torchs(frame, dtype, which) -> None:
    fast, slow = torch.zeros(N, K, *frame, dtype=dtype), DelayBuffer(K - 1, N)
    where = env_rows(CHOICES[which], num_envs=N, device=CPU)
    ids = None if where.mask is not None else where.ids
    slow._pushed.copy_(torch.tensor([0, 3, 4, 7, 2**40 + 1, 5]))
    for step in range(6):
        rows = random(where.row_count, *frame, dtype=dtype, seed=step)
        frames_warp.append_warp(fast, rows, ids, where.mask, slow._pushed, length=K)
        slow.compute(rows, CHOICES[which])
        assert slow._frames is not None
        assert torch.equal(fast, slow._frames)


@pytest.mark.parametrize(("shape", "dtype"), [((3, 5), torch.uint8), ((2, 2), torch.float32), ((1,), torch.int64)])
def test_rows_are_gathered_into_their_places(shape, dtype) -> None:
    data, out = random(N, *shape, dtype=dtype, seed=0), torch.zeros(N, *shape, dtype=dtype)
    source, target = torch.tensor([5, 0, 2]), torch.tensor([1, 4, 3])
    frames_warp.copy_rows_warp(data, source, out, target)
    assert torch.equal(out, torch.zeros_like(out).index_copy_(0, target, data[source]))
    frames_warp.copy_rows_warp(data, source[:0], out, target[:0])


def test_chosen_rows_are_normalized_into_their_places() -> None:
    images = random(N * 2, 5, 7, 3, dtype=torch.uint8, seed=0)
    whole, out = torch.empty(N * 2, 5, 7, 3), torch.full((N * 2, 5, 7, 3), -7.0)
    normalize_warp.normalize_warp(images, whole)
    source, target = torch.tensor([5, 0, 2]), torch.tensor([1, 4, 3])
    normalize_warp.normalize_warp(images, out, (source, target), 2)
    expected = torch.full((N, 2, 5, 7, 3), -7.0).index_copy_(0, target, whole.view(N, 2, 5, 7, 3)[source])
    assert torch.equal(out.view(expected.shape), expected)


@pytest.mark.parametrize("which", CHOICES)
@pytest.mark.parametrize("normalize", [False, True])
def test_buffers_and_stacks_on_the_device_are_those_of_the_cpu_and_take_no_frame_beside(which, normalize) -> None:
    frame = (16, 20, 3)
    spec = StackSpec(frames=K, dim=-1)

    def play(device: str) -> list[torch.Tensor]:
        chosen = CHOICES[which]
        env_ids = chosen.to(device) if isinstance(chosen, torch.Tensor) else chosen
        stack = FrameStack(spec, num_envs=N, frame_shape=frame, device=device, normalize=normalize)
        delay = DelayBuffer(K - 1, N, device)
        buffer = CircularBuffer(K, N, device, stack_dim=-1)
        seen: list[torch.Tensor] = []
        for step in range(6):
            count = N if chosen is None or which == "mask" else len(chosen)
            rows = random(count, *frame, dtype=torch.uint8, seed=step).to(device)
            given = None if step == 0 else env_ids
            rows = random(N, *frame, dtype=torch.uint8, seed=9).to(device) if step == 0 else rows
            for append in (stack.append, buffer.append):
                counts.clear()
                append(rows, given)
                # flags and steps per environment, and which row comes from where
                assert device == "cpu" or step == 0 or counts.allocated < 64 * N, counts.operations
                assert device == "cpu" or not counts.syncs
            seen += [delay.compute(rows, given).cpu(), buffer.stacked.cpu().clone(), stack.observe().cpu()]
            counts.clear()
            observed = stack.observe(torch.tensor([5, 0]).to(device))
            assert device == "cpu" or counts.allocated < observed.nbytes + 64 * N + N * K * 3 * 32
            seen.append(observed.cpu())
        return seen

    with pretend_cuda(warp=True) as counts:
        for ours, theirs in zip(play("cuda"), play("cpu"), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("card", [80, 89, 90])
def test_the_kernels_compile_for_real_cards(tmp_path, card) -> None:
    # kernels for any dtype exist once they have been launched with one
    flags, longs = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)
    for dtype in (torch.uint8, torch.int32):
        data, rows = torch.zeros(2, 3, 4, dtype=dtype), torch.zeros(2, 4, dtype=dtype)
        data, rows = (data, rows) if dtype == torch.int32 else (data[..., :3].contiguous(), rows[:, :3].contiguous())
        inner = rows[0].nbytes
        frames_warp.push_warp(data, rows, None, None, longs, flags, inner_bytes=inner, length=3)
        frames_warp.append_warp(data, rows, None, None, longs, length=3)
        frames_warp.copy_rows_warp(data, longs, data.clone(), longs)
    for module in (frames_warp, normalize_warp):
        (binary,) = wp.compile_aot_module(module, arch=card, module_dir=tmp_path, use_ptx=True)
        text = binary.read_text()
        assert f".target sm_{card}" in text
        assert text.count(".entry") >= 3
