"""Recording on the pretend CUDA device: one copy to the host per step, and the files of the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace._device import to_host
from headrace.recording import EpisodeDataset, EpisodeRecorder, RecorderCfg
from pretend_cuda import PretendCuda, pretend_cuda

N = 3
NUMBERS = ("obs", "actions", "rewards", "flags", "states", "substeps")


def record(path: Path, task: str, device: str, fields: tuple[str, ...], counts: PretendCuda | None = None) -> None:
    overrides: dict[str, object] = {"episode_length": 4}
    if "camera" in task:
        overrides["renderer"] = "warp"
    env = headrace.make(task, N, device=device, sim="warp", overrides=overrides)
    with EpisodeRecorder(path, RecorderCfg(fields=fields)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        env.suspend([1])
        for index in range(11):
            if index == 2:
                env.resume([1])
            actions = torch.full(env.action_space.shape, 0.1 * index, device=device)
            if counts is not None:
                counts.clear()
            step = env.step(actions)
            if counts is not None and index > 4:
                # the flags; what is recorded of the step; what is recorded of the episodes that begin
                assert counts.waits == (3 if "ends" in step.info else 2), (counts.to_host, counts.syncs)
                assert counts.to_host.total() == counts.waits
    env.close()


@pytest.mark.parametrize(
    ("task", "fields"),
    [("cartpole", NUMBERS), ("pusher-goal", ("obs", "actions", "flags")), ("cartpole-camera", ("cameras", "actions"))],
)
def test_a_recorded_step_is_one_more_copy_and_the_files_are_those_of_the_cpu(
    tmp_path: Path, task: str, fields: tuple[str, ...]
) -> None:
    record(tmp_path / "cpu", task, "cpu", fields)
    with pretend_cuda(warp=True) as counts:
        record(tmp_path / "cuda", task, "cuda", fields, counts)
    expected, got = EpisodeDataset(tmp_path / "cpu"), EpisodeDataset(tmp_path / "cuda")
    assert len(got) == len(expected) > 5
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.meta == theirs.meta
        assert ours.names == theirs.names
        for name in theirs.names:
            assert ours.read(name).dtype == theirs.read(name).dtype
            np.testing.assert_array_equal(ours.read(name), theirs.read(name))


def test_tensors_of_every_dtype_and_shape_come_to_the_host_in_one_copy() -> None:
    dtypes = (torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64, torch.int64, torch.complex128)
    given = {
        f"{dtype} {shape}": torch.ones(shape).to(dtype) for dtype in dtypes for shape in ((), (3,), (2, 0), (5, 3))
    }
    given["strided"] = torch.arange(12.0).view(3, 4).T
    with pretend_cuda() as device:
        there = {name: values.to("cuda") for name, values in given.items()}
        kept = there["here"] = torch.arange(3)
        device.clear()
        found = to_host(there)
        assert device.waits == device.to_host.total() == 1
        assert found["here"] is kept
        for name, values in given.items():
            assert found[name].dtype == values.dtype
            assert found[name].is_cpu
            assert torch.equal(found[name], values)
