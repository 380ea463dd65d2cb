"""A disk that fills up: an error that says so, and nothing that was stored is lost."""

from __future__ import annotations

import errno
import re
import subprocess

import numpy as np
import pytest
import torch
from killed_store import ACTION, LENGTH, NUM_ENVS, SPACES, STACK, as_batch, bare, make_stream
from replay_reference import NaiveStore, check_batch

from faulty_disk import FaultyDisk
from headrace import files
from headrace.errors import CapacityError, StorageError
from headrace.replay import PrioritizedSampler, ReplayBuffer

MOMENTS = [1, pytest.param(50, marks=pytest.mark.slow)]


def make(directory) -> ReplayBuffer:
    sampler = PrioritizedSampler()
    return ReplayBuffer(
        NUM_ENVS * LENGTH, NUM_ENVS, SPACES[""], ACTION, stack=STACK, sampler=sampler, directory=directory
    )


def write_until_full(buffer: ReplayBuffer, store: NaiveStore, seed: int):
    """Episodes of a step or two: every end needs a row beyond the ring, so the files grow. Gives what did not fit."""
    stream = make_stream(seed)
    stream.end_rate, stream.jump_rate = 0.85, 0.1 * (seed % 5)
    for _ in range(60):
        stepped = stream.step(ACTION)
        obs, action, step, active = stepped
        try:
            if seed % 2:
                buffer.extend(as_batch([stepped]))
            else:
                buffer.extend(obs[""], action, bare(step), active)
        except StorageError as error:
            if not re.search(r"the disk is full.*what was stored before is intact", str(error)):
                raise
            return stepped, stream
        store.extend(obs, action, step, active, "same_step")
    raise AssertionError("expected the disk to fill up")


def check_all(buffer: ReplayBuffer, store: NaiveStore) -> None:
    """Everything that counts, bit for bit."""
    assert sorted(buffer.indices().tolist()) == sorted(store.index())
    check_batch(buffer.get(buffer.indices()), store, 1, 0.99)
    check_batch(buffer.sample(50), store, 1, 0.99)


def go_on(buffer: ReplayBuffer, store: NaiveStore, stepped, stream) -> None:
    """The step that failed, and more."""
    for each in [stepped, *(stream.step(ACTION) for _ in range(40))]:
        obs, action, step, active = each
        store.extend(obs, action, step, active, "same_step")
        buffer.extend(obs[""], action, bare(step), active)
    check_all(buffer, store)


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_disk_that_fails_loses_nothing(tmp_path, monkeypatch, moments):
    for moment in range(moments):
        path = tmp_path / str(moment)
        buffer, store = make(path), NaiveStore(NUM_ENVS, LENGTH)
        with monkeypatch.context() as patch:
            patch.setattr(files, "disk", FaultyDisk(errno.ENOSPC, at="reserve"))
            left = write_until_full(buffer, store, moment)
            check_all(buffer, store)
            if moment % 3 == 0:
                buffer.close()
                buffer = ReplayBuffer.open(path)
                check_all(buffer, store)
        go_on(buffer, store, *left)


@pytest.mark.filterwarnings("ignore:ReplayBuffer.*did not go on")
@pytest.mark.parametrize("moments", MOMENTS)
def test_a_disk_that_is_full_loses_nothing(small_disk, moments):
    rng = np.random.default_rng(moments)
    for moment in range(moments):
        remount(small_disk, "64M")
        path = small_disk / str(moment)
        buffer, store = make(path), NaiveStore(NUM_ENVS, LENGTH)
        used = sum(file.stat().st_blocks * 512 for file in small_disk.rglob("*"))
        # room for less than another shard of frames
        remount(small_disk, str(used + int(rng.integers(8, 100)) * 1024))
        left = write_until_full(buffer, store, moment)
        check_all(buffer, store)
        if moment % 3 == 0:
            buffer.close()
            buffer = ReplayBuffer.open(path)
            check_all(buffer, store)
        remount(small_disk, "64M")
        go_on(buffer, store, *left)
        buffer.close()


def test_a_store_that_does_not_fit_is_refused_when_it_is_made(small_disk):
    with pytest.raises((CapacityError, StorageError), match=r"free|full"):
        ReplayBuffer(40_000, 2, SPACES[""], ACTION, stack=STACK, directory=small_disk / "store")
    assert torch.zeros(1).item() == 0.0  # the process is alive


def remount(place, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)
