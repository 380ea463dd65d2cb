"""A store that another process writes to: readers see whole transitions only, and may not write."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from followed_store import ACTION, LENGTH, NUM_ENVS, OBSERVATION

from headrace.errors import ConfigError, LifecycleError
from headrace.replay import PrioritizedSampler, ReplayBuffer, SamplerWithoutReplacement, SliceSampler, TrajectorySampler
from headrace.types import Step

PROGRAM = Path(__file__).with_name("followed_store.py")
SAMPLERS = {
    "uniform": lambda: None,
    "once": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(3),
    "short": lambda: SliceSampler(5, strict=False),
    "whole": TrajectorySampler,
    "prioritized": PrioritizedSampler,
    "favored": lambda: PrioritizedSampler(3),
}


def check_rows(batch) -> int:
    """Every value of a transition follows from its action; gives the newest index."""
    flat = batch.reshape(-1)
    obs, following, action = flat["observation"], flat["next", "observation"], flat["action"]
    newest = obs[:, 1]
    assert (newest == action[:, None]).all(), "frames of one moment"
    older, first = obs[:, 0], flat["step_count"][:, 0] == 0
    assert (older == (action - (~first).long())[:, None]).all()
    assert (following[:, 1] == action[:, None] + 1).all()
    assert torch.equal(following[:, 0], newest)
    assert torch.equal(flat["next", "reward"][:, 0], action.float())
    return int(flat["index"].max())


def read_all(path: Path, names: list[str], rounds: int) -> None:
    """Sample with every sampler, until the ring has turned over."""
    for name in names:
        reader = ReplayBuffer.open(path, read_only=True, sampler=SAMPLERS[name]())
        first = newest = check_rows(reader.sample(4))
        count, until = 1, time.monotonic() + 120
        while count < rounds or newest - first <= NUM_ENVS * LENGTH:
            assert time.monotonic() < until, f"{name}: the writer stands still"
            newest, count = max(newest, check_rows(reader.sample(4))), count + 1


@pytest.mark.parametrize("rounds", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_two_processes_that_read_never_see_a_torn_row_while_another_writes(tmp_path, rounds):
    command = [sys.executable, str(PROGRAM), str(tmp_path)]
    names = list(SAMPLERS)
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program,
        ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as readers,
    ):
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            reading = [readers.submit(read_all, tmp_path, part, rounds) for part in (names, names[::-1])]
            for part in reading:
                part.result()
        finally:
            program.kill()


def test_a_reader_follows_and_cannot_write(tmp_path):
    writer = ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, OBSERVATION, ACTION, directory=tmp_path, n_step=2, gamma=0.5)
    reader = ReplayBuffer.open(tmp_path, read_only=True)
    assert len(reader) == 0
    obs = torch.zeros(NUM_ENVS, *OBSERVATION.shape, dtype=torch.int64)
    action, no = torch.zeros(NUM_ENVS, dtype=torch.int64), torch.zeros(NUM_ENVS, dtype=torch.bool)
    step = Step(obs, torch.ones(NUM_ENVS), no, no, {})
    for count in range(4):
        writer.extend(obs, action, step)
        assert reader.lengths.tolist() == reader.written.tolist() == [count + 1] * NUM_ENVS
        assert len(reader) == NUM_ENVS * (count + 1)
    assert torch.equal(reader.indices(), writer.indices())
    assert (reader.get(reader.indices()) == writer.get(writer.indices())).all()
    assert reader.get(reader.indices())["next", "reward"].max() == 1.5, "n-step settings are the writer's"
    for call in (lambda: reader.extend(obs, action, step), reader.clear):
        with pytest.raises(LifecycleError, match="read_only=True"):
            call()
    with pytest.raises(ConfigError, match="save and copy it where it is written"):
        reader.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="has its samplers already"):
        ReplayBuffer.open(tmp_path, sampler=SliceSampler(2))


def test_an_epoch_of_a_reader_goes_on_while_the_writer_writes(tmp_path):
    writer = ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, OBSERVATION, ACTION, directory=tmp_path)
    obs = torch.zeros(NUM_ENVS, *OBSERVATION.shape, dtype=torch.int64)
    action, no = torch.zeros(NUM_ENVS, dtype=torch.int64), torch.zeros(NUM_ENVS, dtype=torch.bool)
    step = Step(obs, torch.ones(NUM_ENVS), no, no, {})
    for _ in range(4):
        writer.extend(obs, action, step)
    reader = ReplayBuffer.open(tmp_path, read_only=True, sampler=SamplerWithoutReplacement())
    seen, stored = [], writer.indices().tolist()
    for _ in range(4):
        seen += reader.sample(NUM_ENVS)["index"].tolist()
        writer.extend(obs, action, step)
    assert sorted(seen) == sorted(stored), "every transition that was there once, though there are more by now"


def test_a_cut_that_is_being_written_while_a_reader_opens_is_indexed_once(tmp_path, monkeypatch):
    writer = ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, OBSERVATION, ACTION, directory=tmp_path)
    action, no = torch.zeros(NUM_ENVS, dtype=torch.int64), torch.zeros(NUM_ENVS, dtype=torch.bool)

    def extend(value: int) -> None:
        obs = torch.full((NUM_ENVS, *OBSERVATION.shape), value)
        writer.extend(obs, action, Step(obs, torch.ones(NUM_ENVS), no, no, {}))

    for _ in range(3):
        extend(1)
    opened: list[ReplayBuffer] = []
    commit = writer.store.record.write

    def open_and_commit(*rows) -> None:
        opened.append(ReplayBuffer.open(tmp_path, read_only=True, sampler=TrajectorySampler()))
        commit(*rows)

    with monkeypatch.context() as patch:
        patch.setattr(writer.store.record, "write", open_and_commit)
        extend(2)  # does not go on from what is stored: the flag of the cut is there before the step counts
    (reader,) = opened
    assert set(reader.sample(1)["step_count"].flatten().tolist()) == {0, 1, 2}
    assert reader.sampler.mass == NUM_ENVS, "one whole trajectory per environment"
