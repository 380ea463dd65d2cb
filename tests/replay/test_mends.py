"""Stores under a full disk, two writers, copies, drifting observations, extras, and memory that somebody changes."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

from headrace.errors import ConfigError, LifecycleError, ShapeError, StorageError
from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer, SliceSampler, TrajectorySampler
from headrace.replay._blocks import COMMIT, KEPT, FileAllocator
from headrace.types import Step
from pretend_cuda import pretend_cuda

N, LENGTH = 2, 16
SPACE, ACTION = spaces.Box(-10, 10, (3,), np.float32), spaces.Box(-1, 1, (1,), np.float32)


def make(**settings) -> ReplayBuffer:
    return ReplayBuffer(N * LENGTH, N, SPACE, ACTION, autoreset="disabled", **settings)


def feed(buffer: ReplayBuffer, steps: int, *, first: int = 0, end_every: int = 5, extras=None) -> None:
    """Observations are (env·1000 + step) everywhere; an episode ends every few steps."""
    for t in range(first, first + steps):
        obs, following = (torch.arange(N)[:, None] * 1000.0 + torch.full((1, 3), float(k)) for k in (t, t + 1))
        ended = torch.full((N,), (t + 1) % end_every == 0)
        step = Step(following, torch.full((N,), float(t)), ended, torch.zeros(N, dtype=torch.bool), {})
        buffer.extend(obs, torch.full((N, 1), float(t)), step, extras=None if extras is None else extras(t))


def everything(buffer: ReplayBuffer):
    return buffer.get(buffer.indices()).clone()


def test_a_store_that_the_disk_has_no_room_for_is_refused_and_a_growing_one_stays_intact(tmp_path, monkeypatch) -> None:
    def full(_descriptor: int, _offset: int, nbytes: int) -> None:
        if nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    buffer = make(directory=tmp_path / "store")
    feed(buffer, 3)
    kept = everything(buffer)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match=r"the disk is full.*more are needed; what was stored before is intact"):
            make(directory=tmp_path / "other")
        # what lies beyond the ring, the true last frames, is in files that are made when they are needed
        frames = next(iter(buffer.store.pool.rows.values()))
        with pytest.raises(StorageError, match="the disk is full"):
            frames.reserve(1 << 20)
    assert (everything(buffer) == kept).all()
    feed(buffer, 3, first=3)
    buffer.close()
    assert len(ReplayBuffer.open(tmp_path / "store")) == 12


def test_space_is_reserved_when_the_store_is_made(tmp_path) -> None:
    buffer = make(directory=tmp_path)
    for file in tmp_path.glob("frames*.bin"):
        assert file.stat().st_blocks * 512 >= file.stat().st_size
    del buffer


def test_a_live_store_has_one_writer(tmp_path) -> None:
    buffer = make(directory=tmp_path)
    feed(buffer, 3)
    with pytest.raises(LifecycleError, match="is writing here"):
        ReplayBuffer.open(tmp_path)
    program = "import sys; from headrace.replay import ReplayBuffer; ReplayBuffer.open(sys.argv[1])"
    run = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert f"process {os.getpid()} is writing here" in run.stderr
    buffer.close()
    again = ReplayBuffer.open(tmp_path)
    assert len(again) == 6
    with pytest.raises(LifecycleError, match="was closed; open the store again"):
        feed(buffer, 1, first=3)
    del again
    assert len(ReplayBuffer.open(tmp_path)) == 6, "a buffer that nobody holds is closed"


def test_flush_syncs_the_commit_record_after_everything_else(tmp_path, monkeypatch) -> None:
    buffer = make(directory=tmp_path, sampler=PrioritizedSampler())
    memory = buffer.store.memory
    assert isinstance(memory, FileAllocator)
    synced: list[str] = []

    class Watched:
        def __init__(self, name: str) -> None:
            self._name = name

        def flush(self) -> None:
            synced.append(self._name)

    monkeypatch.setattr(memory, "_maps", {name: Watched(name) for name in memory._maps})
    buffer.flush()
    assert synced[-2:] == [COMMIT, KEPT]
    assert {"rewards", "column0.0000", "main.priorities"} <= set(synced[:-2])


@pytest.mark.parametrize("sampler", [None, PrioritizedSampler(), SliceSampler(2), TrajectorySampler()])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_copies_of_a_buffer_draw_the_same_and_go_on_apart(sampler, duplicate) -> None:
    buffer = make(sampler=None if sampler is None else copy.deepcopy(sampler))
    feed(buffer, 23)
    if isinstance(sampler, PrioritizedSampler):
        buffer.update_priorities(buffer.indices(), torch.arange(len(buffer)).double())
    other = duplicate(buffer)
    assert (everything(other) == everything(buffer)).all()
    assert (other.sample(4) == buffer.sample(4)).all()
    before = everything(buffer)
    feed(other, 3, first=23)
    assert (everything(buffer) == before).all()


def test_a_store_on_disk_is_not_pickled(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"lives in .*ReplayBuffer.open\(\) it there"):
        pickle.dumps(make(directory=tmp_path))


@pytest.mark.parametrize("where", ["checkpoint", "store"])
def test_prioritized_sampling_keeps_beta_and_the_largest_priority(tmp_path, where) -> None:
    sampler = PrioritizedSampler(beta=0.4)
    buffer = make(sampler=sampler, directory=tmp_path / "store" if where == "store" else None)
    feed(buffer, 20)
    buffer.update_priorities(buffer.indices()[:1], torch.tensor([50.0]))
    buffer.update_priorities(buffer.indices(), torch.full((len(buffer),), 0.5))
    sampler.beta = 0.9
    buffer.sample(4)
    largest = sampler.largest
    if where == "checkpoint":
        buffer.save(tmp_path / "saved")
        again = ReplayBuffer.load(tmp_path / "saved")
    else:
        buffer.close()
        again = ReplayBuffer.open(tmp_path / "store")
    assert again.sampler.beta == 0.9
    assert again.sampler.largest == largest > 1
    again.sampler.beta = 1.0
    again.clear()
    assert (again.sampler.beta, again.sampler.largest) == (1.0, largest), "clear() forgets transitions, not settings"


@pytest.mark.parametrize("sampler", [None, PrioritizedSampler(), SliceSampler(2), TrajectorySampler()])
def test_draws_are_with_replacement_so_few_items_make_large_batches(sampler) -> None:
    buffer = make(sampler=sampler)
    with pytest.raises(LifecycleError, match="got none"):
        buffer.sample(1)
    feed(buffer, 5)
    assert buffer.sample(300).shape[0] >= 300


def test_slices_of_one_transition_have_a_time_axis_and_no_indices_give_an_empty_batch() -> None:
    buffer = make(sampler=SliceSampler(1))
    feed(buffer, 7)
    assert buffer.sample(4).shape == (4, 1)
    assert buffer.sample(4)["next", "observation"].shape == (4, 1, 3)
    empty = buffer.get(torch.empty(0, dtype=torch.int64))
    assert empty.shape == (0,)
    assert empty["observation"].shape == (0, 3)


def test_a_write_through_numpy_into_the_last_observation_is_seen() -> None:
    buffer = make()
    obs, following = torch.zeros(N, 3), torch.ones(N, 3)
    no = torch.zeros(N, dtype=torch.bool)
    buffer.extend(obs, torch.zeros(N, 1), Step(following, torch.zeros(N), no, no, {}))
    following.numpy()[0] = 7.0  # torch's count of in-place changes does not see this
    buffer.extend(following, torch.zeros(N, 1), Step(torch.full((N, 3), 2.0), torch.zeros(N), no, no, {}))
    batch = everything(buffer)
    assert batch["observation"][:, 0].tolist() == [0.0, 7.0, 0.0, 1.0]
    assert batch["next", "observation"][:, 0].tolist() == [1.0, 2.0, 1.0, 2.0]
    assert buffer.cuts == 1


def test_observations_that_drift_are_counted_and_warned_about_once() -> None:
    buffer = make(n_step=3)
    no = torch.zeros(N, dtype=torch.bool)

    def drift() -> None:
        for t in range(60):
            obs = torch.full((N, 3), t + 1e-3)
            buffer.extend(obs, torch.zeros(N, 1), Step(torch.full((N, 3), t + 1.0), torch.zeros(N), no, no, {}))

    with pytest.warns(UserWarning, match=r"did not go on from the observation stored before.*normalizer") as caught:
        drift()
    assert len(caught) == 1
    assert buffer.cuts == 59 * N


def test_resets_by_the_caller_are_not_warned_about() -> None:
    buffer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for episode in range(80):
            feed(buffer, 3, first=10 * episode, end_every=1000)
    assert buffer.cuts == 79 * N


@pytest.mark.parametrize("form", ["memory", "disk", "checkpoint", "copy"])
def test_extras_come_back_with_their_transitions(tmp_path, form) -> None:
    declared = {"log_prob": ArraySpec((), torch.float32), "state": ArraySpec((2, 4), torch.float64)}
    buffer = make(extras=declared, directory=tmp_path / "store" if form == "disk" else None, sampler=SliceSampler(3))

    def extras(t: int) -> dict[str, torch.Tensor]:
        return {
            "log_prob": torch.arange(N) * 1000.0 + t,
            "state": torch.full((N, 2, 4), float(t), dtype=torch.float64),
        }

    feed(buffer, 40, extras=extras)
    if form == "disk":
        del buffer
        buffer = ReplayBuffer.open(tmp_path / "store")
    elif form == "checkpoint":
        buffer.save(tmp_path / "saved")
        buffer = ReplayBuffer.load(tmp_path / "saved", verify=True)
    elif form == "copy":
        buffer = copy.deepcopy(buffer)
    batch = everything(buffer)
    assert torch.equal(batch["log_prob"], batch["observation"][:, 0])
    assert torch.equal(batch["state"][:, 1, 3].float(), batch["action"][:, 0])
    slices = buffer.sample(8)
    assert slices["state"].shape == (8, 3, 2, 4)
    assert torch.equal(slices["log_prob"], slices["observation"][..., 0])
    with pytest.raises(ShapeError, match=r"extras: expected \['log_prob', 'state'\].*got \[\]"):
        feed(buffer, 1, first=40)
    with pytest.raises(ConfigError, match="next are keys of every batch"):
        make(extras={"next": ArraySpec((), torch.float32)})


def test_tensors_of_a_device_are_taken_and_batches_come_back_on_it() -> None:
    with pretend_cuda():
        plain, buffer = make(sampler=PrioritizedSampler()), make(sampler=PrioritizedSampler(), device="cuda")
        no = torch.zeros(N, dtype=torch.bool)
        for t in range(6):
            given = [torch.full((N, 3), float(t)), torch.full((N, 1), float(t)), torch.full((N, 3), t + 1.0)]
            reward = torch.full((N,), float(t))
            plain.extend(given[0], given[1], Step(given[2], reward, no, no, {}))
            obs, action, following = (tensor.to("cuda") for tensor in given)
            flags = no.to("cuda")
            buffer.extend(obs, action, Step(following, reward.to("cuda"), flags, flags, {}), active=~flags)
        index = buffer.indices().to("cuda")
        buffer.update_priorities(index, torch.ones(len(buffer), device="cuda"))
        plain.update_priorities(plain.indices(), torch.ones(len(plain)))
        ours, theirs = buffer.sample(8), plain.sample(8)
        assert ours["observation"].device == torch.device("cuda:0")
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), "_weight"):
            assert torch.equal(ours[key].cpu(), theirs[key]), key
        assert buffer.get(index[:3])["action"].is_cuda


def test_environments_have_discounts_of_their_own_also_after_a_restart(tmp_path) -> None:
    gammas = (0.5, 0.9)
    buffer = make(n_step=3, gamma=gammas, directory=tmp_path / "d")
    feed(buffer, 12)
    each = [make(n_step=3, gamma=gamma) for gamma in gammas]
    for other in each:
        feed(other, 12)
    buffer.close()
    for found in (everything(ReplayBuffer.open(tmp_path / "d", read_only=False)), everything(buffer)):
        env = found["index"] % N
        for key in (("next", "reward"), "gamma"):
            expected = torch.stack([everything(other)[key] for other in each])[env, torch.arange(len(env))]
            assert torch.equal(found[key], expected)
    with pytest.raises(ConfigError, match="one for each of 2 environments, got 3"):
        make(gamma=(0.5, 0.9, 0.9))
    with pytest.raises(ConfigError, match="between 0 and 1"):
        make(gamma=(0.5, 1.9))
    with pytest.raises(ConfigError, match="one for each of 2 environments, got 1"):
        each[0].with_sampler(TrajectorySampler(), "other", gamma=[0.5])
