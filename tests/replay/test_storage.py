"""Disk, checkpoints, compression, estimates: the same transitions wherever they are kept."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces
from killed_store import ACTION, LENGTH, NUM_ENVS, SPACES, STACK, bare, make_buffer, make_stream, size_of, steps_of
from replay_reference import NaiveStore, check_batch

from headrace.errors import CapacityError, ConfigError, DataError
from headrace.files import Manifest
from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer, SliceSampler, TrajectorySampler, estimate
from headrace.types import StackSpec, Step

PROGRAM = Path(__file__).with_name("killed_store.py")


def feed(buffer, store, stream, steps):
    for _ in range(steps):
        obs, action, step, active = stream.step(ACTION)
        store.extend(obs, action, step, active, "same_step")
        if buffer is not None:
            buffer.extend(obs[""], action, bare(step), active)


def everything(buffer):
    return buffer.get(buffer.indices()).clone()


def in_memory(**settings) -> ReplayBuffer:
    return ReplayBuffer(NUM_ENVS * LENGTH, NUM_ENVS, SPACES[""], ACTION, stack=STACK, **settings)


def test_a_store_on_disk_gives_what_one_in_memory_gives(tmp_path):
    disk, memory = make_buffer(tmp_path / "store"), in_memory(sampler=PrioritizedSampler())
    one, two = make_stream(1), make_stream(1)
    feed(disk, NaiveStore(NUM_ENVS, LENGTH), one, 60)
    feed(memory, NaiveStore(NUM_ENVS, LENGTH), two, 60)
    assert (everything(disk) == everything(memory)).all()
    assert (disk.sample(16) == memory.sample(16)).all()
    disk.flush()


def test_a_reopened_store_goes_on_where_it_stopped(tmp_path):
    buffer, store, stream = make_buffer(tmp_path), NaiveStore(NUM_ENVS, LENGTH), make_stream(2)
    feed(buffer, store, stream, 50)
    buffer.update_priorities(buffer.indices(), torch.arange(len(buffer)).double())
    del buffer
    for _ in range(3):
        buffer = ReplayBuffer.open(tmp_path)
        check_batch(everything(buffer), store, 1, 0.99)
        feed(buffer, store, stream, 15)
        check_batch(everything(buffer), store, 1, 0.99)
        check_batch(buffer.sample(30), store, 1, 0.99)
        buffer.close()


@pytest.mark.parametrize("runs", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_its_last_complete_write(tmp_path, runs):
    rng = np.random.default_rng(runs)
    for run in range(runs):
        directory = tmp_path / str(run)
        command = [sys.executable, str(PROGRAM), str(directory), str(run)]
        # past the first wrap-around in most runs; the kill itself comes at a random moment of a later write
        enough = int(rng.integers(1, 120))
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            for line in program.stdout:
                last = int(line)
                if last >= enough:
                    break
            time.sleep(rng.random() * 0.003)
            os.kill(program.pid, signal.SIGKILL)
            printed = [int(line) for line in program.stdout.read().split("\n")[:-1]]
        seen = printed[-1] if printed else last
        buffer = ReplayBuffer.open(directory)
        # the process may die between a complete write and its print
        written = steps_of(int(buffer.store.record.sequence))
        assert written in (seen, seen + size_of(seen))
        store, stream = NaiveStore(NUM_ENVS, LENGTH), make_stream(run)
        feed(None, store, stream, written)
        # a batch gives up the oldest transitions that it replaces before it writes
        missing = store.index().keys() - set(buffer.indices().tolist())
        assert len(missing) <= (size_of(written) if size_of(written) > 1 else 0) * NUM_ENVS
        assert all(place < 5 for _, place in map(store.index().get, missing))
        check_batch(everything(buffer), store, 1, 0.99)
        # and goes on, with the very step that was cut short
        feed(buffer, store, stream, 40)
        check_batch(everything(buffer), store, 1, 0.99)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_frames_are_exact(codec, tmp_path):
    buffer, store, stream = in_memory(codec=codec), NaiveStore(NUM_ENVS, LENGTH), make_stream(3)
    feed(buffer, store, stream, 40)
    check_batch(everything(buffer), store, 1, 0.99)
    buffer.save(tmp_path / "saved")
    loaded = ReplayBuffer.load(tmp_path / "saved", verify=True)
    feed(loaded, store, stream, 40)
    check_batch(everything(loaded), store, 1, 0.99)


def test_compression_pays_where_pictures_are_even():
    picture = torch.zeros(2, 84, 84, dtype=torch.uint8)
    picture[:, 20:40] = 200
    sizes = {}
    for codec in (None, "lz4", "zstd"):
        buffer = ReplayBuffer(64, 2, ArraySpec((84, 84), torch.uint8), ArraySpec((), torch.int64), codec=codec)
        for k in range(40):
            following = picture.clone()
            following[:, k] = k
            no = torch.zeros(2, dtype=torch.bool)
            buffer.extend(picture, torch.zeros(2, dtype=torch.int64), Step(following, torch.zeros(2), no, no, {}))
            picture = following
        sizes[codec] = buffer.nbytes
    assert sizes["lz4"] < sizes[None] / 5
    assert sizes["zstd"] < sizes[None] / 5


@pytest.mark.parametrize(
    "sampler", [lambda: None, PrioritizedSampler, lambda: SliceSampler(3, burn_in=1), TrajectorySampler]
)
def test_a_checkpoint_goes_on_like_the_buffer_it_was_made_of(sampler, tmp_path):
    buffer, store, stream = in_memory(sampler=sampler(), seed=5), NaiveStore(NUM_ENVS, LENGTH), make_stream(4)
    feed(buffer, store, stream, 60)
    if isinstance(buffer.sampler, PrioritizedSampler):
        buffer.update_priorities(buffer.indices(), torch.rand(len(buffer)) + 0.1)
    buffer.sample(2)
    buffer.save(tmp_path / "saved")
    loaded = ReplayBuffer.load(tmp_path / "saved")
    assert len(loaded) == len(buffer)
    for _ in range(3):
        assert (loaded.sample(2) == buffer.sample(2)).all()
        feed(buffer, store, stream, 0)
        obs, action, step, active = stream.step(ACTION)
        for each in (buffer, loaded):
            each.extend(obs[""], action, bare(step), active)
        store.extend(obs, action, step, active, "same_step")
    check_batch(everything(loaded), store, 1, 0.99)
    # the checkpoint itself has not changed
    assert len(ReplayBuffer.load(tmp_path / "saved", verify=True)) == NUM_ENVS * LENGTH


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("views", {}, "sampler named 'main'"),
        ("store", [], "store: expected a dictionary"),
        ("store", {"capacity": 1}, "store: num_envs: it is missing"),
        (
            "views",
            {"main": {"sampler": 3, "n_step": 1, "gamma": 0.9, "seed": 0}},
            "sampler: expected a valid dictionary",
        ),
    ],
)
def test_a_manifest_that_describes_no_store_is_refused(entry, value, message, tmp_path):
    path = tmp_path / "store"
    make_buffer(path).close()
    manifest = Manifest.read(path / "manifest.json", format="headrace-replay", versions=(3,))
    dataclasses.replace(manifest, about={**manifest.about, entry: value}).write(path / "manifest.json")
    with pytest.raises(DataError, match=message):
        ReplayBuffer.open(path)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    buffer = in_memory()
    feed(buffer, NaiveStore(NUM_ENVS, LENGTH), make_stream(1), 30)
    path = tmp_path / "saved"
    buffer.save(path)
    with pytest.raises(ConfigError, match="ever overwritten"):
        buffer.save(path)
    frames = path / "frames0.0000.bin"
    content = bytearray(frames.read_bytes())
    content[100] ^= 1
    frames.write_bytes(content)
    ReplayBuffer.load(path)
    with pytest.raises(DataError, match="checksum"):
        ReplayBuffer.load(path, verify=True)
    frames.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"expected .* bytes"):
        ReplayBuffer.load(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["about"]["gamma"] = 0.5
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="checksum"):
        ReplayBuffer.load(path)
    with pytest.raises(DataError, match=r"manifest\.json"):
        ReplayBuffer.load(tmp_path)


def test_live_stores_and_checkpoints_are_not_mixed_up(tmp_path):
    make_buffer(tmp_path / "live")
    with pytest.raises(DataError, match=r"ReplayBuffer\.open"):
        ReplayBuffer.load(tmp_path / "live")
    with pytest.raises(ConfigError, match="empty or new"):
        make_buffer(tmp_path / "live")
    in_memory().save(tmp_path / "saved")
    with pytest.raises(DataError, match=r"ReplayBuffer\.load"):
        ReplayBuffer.open(tmp_path / "saved")


def test_a_million_frames_load_lazily(tmp_path):
    buffer = ReplayBuffer(1_000_000, 10, ArraySpec((84, 84), torch.uint8), ArraySpec((), torch.int64))
    no, zero = torch.zeros(10, dtype=torch.bool), torch.zeros(10, dtype=torch.int64)
    obs = torch.zeros(10, 84, 84, dtype=torch.uint8)
    for k in range(20):
        following = torch.full_like(obs, k)
        buffer.extend(obs, zero, Step(following, torch.zeros(10), no, no, {}))
        obs = following
    buffer.save(tmp_path / "saved")
    used = sum(file.stat().st_blocks * 512 for file in (tmp_path / "saved").iterdir())
    assert sum(file.stat().st_size for file in (tmp_path / "saved").iterdir()) > 7_056_000_000
    assert used < 200_000_000
    before = resident()
    loaded = ReplayBuffer.load(tmp_path / "saved")
    assert (everything(loaded) == everything(buffer)).all()
    # seven gigabytes were mapped; only bookkeeping and the frames that were read are resident
    assert resident() - before < 150_000_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_estimate_is_what_a_full_buffer_takes():
    stack = {"cam": StackSpec(frames=4, dim=0)}
    space = spaces.Dict(
        {"cam": spaces.Box(0, 255, (4, 84, 84), np.uint8), "state": spaces.Box(-1, 1, (5,), np.float32)}
    )
    action = spaces.Discrete(4)
    expected = estimate(8_000, 8, space, action, stack=stack, episode_length=50)
    buffer = ReplayBuffer(8_000, 8, space, action, stack=stack)
    assert buffer.nbytes == expected.frame_bytes + expected.other_bytes
    assert expected.nbytes == buffer.nbytes + 160 * (7056 + 20)
    assert expected.bytes_per_transition < 7_300
    assert expected.stored_twice_nbytes > 7 * expected.nbytes


def test_what_cannot_fit_is_refused_with_the_numbers(tmp_path):
    picture = ArraySpec((84, 84), torch.uint8)
    with pytest.raises(CapacityError, match=r"66,\d{3}\.\d+ GiB .* memory has .* GiB free"):
        ReplayBuffer(10_000_000_000, 1, picture, ArraySpec((), torch.int64))
    with pytest.raises(CapacityError, match="free"):
        ReplayBuffer(10_000_000_000, 1, picture, ArraySpec((), torch.int64), directory=tmp_path / "store")
    with pytest.raises(ConfigError, match="codec"):
        ReplayBuffer(10, 1, picture, ArraySpec((), torch.int64), directory=tmp_path / "other", codec="lz4")
