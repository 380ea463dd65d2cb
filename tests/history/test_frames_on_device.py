"""Buffers on a device against those of the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.history import CircularBuffer, FrameStack
from headrace.types import StackSpec
from pretend_cuda import pretend_cuda

N, K = 6, 4
CHOICES = {"all": None, "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "ids": torch.tensor([4, 1, 2]), "none": []}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("which", CHOICES)
@pytest.mark.parametrize("normalize", [False, True])
def test_buffers_and_stacks_on_the_device_are_those_of_the_cpu_and_take_no_frame_beside(which, normalize) -> None:
    frame = (16, 20, 3)
    spec = StackSpec(frames=K, dim=-1)

    def play(device: str) -> list[torch.Tensor]:
        chosen = CHOICES[which]
        env_ids = chosen.to(device) if isinstance(chosen, torch.Tensor) else chosen
        stack = FrameStack(spec, num_envs=N, frame_shape=frame, device=device, normalize=normalize)
        lags = (torch.arange(N) % K).to(device)
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
                # flags and places of frames per environment, no frame
                assert device == "cpu" or step == 0 or counts.allocated < 40 * N * K, counts.operations
                assert device == "cpu" or not counts.syncs
            seen += [buffer[lags].cpu(), buffer.stacked.cpu().clone(), stack.observe().cpu()]
            counts.clear()
            observed = stack.observe(torch.tensor([5, 0]).to(device))
            # normalizing computes in float64, at most 32 MiB of it at a time
            most = (4 if normalize else 2) * observed.nbytes + 4 * K * math.prod(frame) + 64 * N + N * K * 3 * 32
            assert device == "cpu" or counts.allocated < most
            seen.append(observed.cpu())
        return seen

    with pretend_cuda() as counts:
        for ours, theirs in zip(play("cuda"), play("cpu"), strict=True):
            assert torch.equal(ours, theirs)
