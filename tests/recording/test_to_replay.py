"""Datasets as replay buffers: every transition of every format, compared with the recorded arrays."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from counting_env import CountingEnv

import headrace
from headrace.errors import ConfigError, DataError, HeadraceError, UnknownNameError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.replay import Mixture, ReplayBuffer, SliceSampler
from headrace.types import StackSpec

NAMES = ("policy", "camera", "inner/count", "inner/flags", "inner/deep/half")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "counting"
    info = DatasetInfo(recipe={"source": "counting", "sim": "none"}, fps=20, instruction="count to the end")
    with EpisodeRecorder(path, RecorderCfg(fields=("obs", "actions", "rewards", "flags")), info) as recorder:
        env = CountingEnv(4, [recorder], image=32)
        env.reset(seed=3)
        for _ in range(30):
            env.step()
    return path


def key(name: str) -> tuple[str, ...]:
    return ("observation", *name.split("/"))


def check_whole(buffer: ReplayBuffer, recorded: Path, names: tuple[str, ...] = NAMES) -> None:
    """All transitions, in order, are those of the recording."""
    batch, at = buffer.at(torch.arange(len(buffer))), 0
    dataset = EpisodeDataset(recorded)
    assert len(buffer) == dataset.steps
    for episode in dataset:
        rows = batch[at : at + episode.meta.length]
        at += episode.meta.length
        assert rows["step_count"][:, 0].tolist() == list(range(episode.meta.length))
        np.testing.assert_array_equal(rows["action"], episode.read("actions"))
        np.testing.assert_array_equal(rows["next", "reward"][:, 0], episode.read("rewards"))
        for flag in ("terminated", "truncated"):
            np.testing.assert_array_equal(rows["next", flag][:, 0], episode.read(flag))
        for name in names:
            whole = episode.read(f"obs/{name}")
            np.testing.assert_array_equal(rows[key(name)], whole[:-1])
            np.testing.assert_array_equal(rows["next", *key(name)], whole[1:])


def test_a_recording_of_ours_is_stored_whole(recorded: Path) -> None:
    check_whole(ReplayBuffer.from_dataset(recorded), recorded)


def test_demonstrations_of_robomimic_are_stored_whole_and_their_frames_once(recorded: Path, tmp_path: Path) -> None:
    export_dataset(recorded, tmp_path / "demos.hdf5", "robomimic")
    buffer = ReplayBuffer.from_dataset(tmp_path / "demos.hdf5")
    check_whole(buffer, recorded)
    frame = 32 * 32 * 3
    assert buffer.bytes_per_transition < 1.5 * frame  # the file has each twice


def test_a_dataset_of_lerobot_lacks_only_what_it_does_not_have(recorded: Path, tmp_path: Path) -> None:
    export_dataset(recorded, tmp_path / "lerobot", "lerobot")
    buffer = ReplayBuffer.from_dataset(tmp_path / "lerobot", groups=("policy", "inner/count"))
    dataset = EpisodeDataset(recorded)
    at = 0
    for episode in dataset:
        # the last action of an episode that was no success is left out: what followed is not in the format
        steps = episode.meta.length - (not episode.meta.success)
        rows = buffer.at(torch.arange(at, at + steps))
        at += steps
        whole = episode.read("obs/policy")
        np.testing.assert_array_equal(rows[key("policy")], whole[:steps])
        known = steps - bool(episode.meta.success)
        np.testing.assert_array_equal(rows["next", *key("policy")][:known], whole[1 : known + 1])
        np.testing.assert_array_equal(rows["action"], episode.read("actions")[:steps])
        np.testing.assert_array_equal(rows["next", "reward"][:, 0], episode.read("rewards")[:steps])
        assert rows["next", "terminated"][:, 0].tolist() == [False] * (steps - 1) + [bool(episode.meta.success)]
        assert rows["next", "done"][:, 0].tolist() == [False] * (steps - 1) + [True]
    assert len(buffer) == at


@pytest.mark.parametrize("reset", ["repeat", "zero"])
def test_stacks_and_n_step_rewards_are_made_of_single_frames(recorded: Path, reset, monkeypatch) -> None:
    from headrace.recording import to_replay

    monkeypatch.setattr(to_replay, "_STEPS", 5)  # several batches per episode
    spec = StackSpec(frames=3, dim=-1, reset=reset)
    buffer = ReplayBuffer.from_dataset(recorded, groups=("camera",), stack={"camera": spec}, n_step=2, gamma=0.5)
    at = 0
    for episode in EpisodeDataset(recorded):
        frames, rewards = episode.read("obs/camera"), episode.read("rewards")
        rows = buffer.at(torch.arange(at, at + episode.meta.length))
        at += episode.meta.length
        for t in range(episode.meta.length):
            ahead = min(2, episode.meta.length - t)
            for where, step in ((("observation", "camera"), t), (("next", "observation", "camera"), t + ahead)):
                parts = [frames[max(k, 0)] * (k >= 0 or reset == "repeat") for k in range(step - 2, step + 1)]
                np.testing.assert_array_equal(rows[where][t], np.concatenate(parts, -1))
            expected = np.float32(sum(0.5**k * float(rewards[t + k]) for k in range(ahead)))
            assert rows["next", "reward"][t, 0].numpy() == expected


def test_a_recording_of_stacks_keeps_the_newest_frame(tmp_path: Path) -> None:
    env = headrace.make("cartpole-camera", 2, seed=0, overrides={"frame_stack": 3, "pixels": 16})
    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags"))
    with EpisodeRecorder(tmp_path / "stacked", cfg, DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        for _ in range(120):
            env.step(torch.ones(2, 1))
    env.close()
    buffer = ReplayBuffer.from_dataset(tmp_path / "stacked")
    assert len(EpisodeDataset(tmp_path / "stacked")) >= 2
    check_whole(buffer, tmp_path / "stacked", ("policy",))
    (leaf,) = (leaf for leaf in buffer.spec.leaves if leaf.frames == 3)
    assert leaf.frame.nbytes * 3 == leaf.observed.nbytes
    with pytest.raises(ConfigError, match="recorded as a stack"):
        ReplayBuffer.from_dataset(tmp_path / "stacked", stack={"policy": StackSpec(frames=2, dim=-1)})


def test_settings_reach_the_buffer_and_parts_can_be_mixed(recorded: Path, tmp_path: Path) -> None:
    slices = ReplayBuffer.from_dataset(recorded, groups=("policy",), sampler=SliceSampler(2))
    assert slices.sample(5).batch_size == (5, 2)
    small = ReplayBuffer.from_dataset(recorded, groups=("policy",), capacity=7, directory=tmp_path / "store")
    assert len(small) == 7
    small.close()
    plain = ReplayBuffer.from_dataset(recorded, groups=("policy",))
    assert Mixture([plain, ReplayBuffer.open(tmp_path / "store")]).sample(10).batch_size == (10,)


def test_what_a_dataset_lacks_is_named(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="wrist"):
        ReplayBuffer.from_dataset(recorded, groups=("wrist",))
    file = tmp_path / "demos.hdf5"
    with h5py.File(file, "w") as made:
        made.create_dataset("data/demo_0/actions", data=np.zeros((4, 2)))
        made.create_dataset("data/demo_0/obs/state", data=np.arange(12.0).reshape(4, 3))
        made.create_dataset("data/demo_0/dones", data=np.array([0, 1, 0, 0]))
    with pytest.raises(ConfigError, match=r"reward=0\.0"):
        ReplayBuffer.from_dataset(file)
    buffer = ReplayBuffer.from_dataset(file, reward=-1.0)
    # the last of four actions is left out: nothing says what followed
    batch = buffer.at(torch.arange(len(buffer)))
    assert batch["next", "terminated"][:, 0].tolist() == [False, True, False]
    assert batch["next", "truncated"][:, 0].tolist() == [False, False, True]
    assert batch["observation", "state"].tolist() == np.arange(12.0).reshape(4, 3)[:3].tolist()
    assert batch["next", "observation", "state"].tolist() == np.arange(12.0).reshape(4, 3)[1:].tolist()


def test_links_out_of_a_file_are_refused(tmp_path: Path) -> None:
    secret, file = tmp_path / "secret.hdf5", tmp_path / "demos.hdf5"
    with h5py.File(secret, "w") as made:
        made["state"] = np.zeros((3, 1))
    raw = tmp_path / "raw.bin"
    raw.write_bytes(bytes(64))
    for kind in ("external", "soft", "raw"):
        with h5py.File(file, "w") as made:
            made["data/demo_0/actions"] = np.zeros((2, 1))
            made["data/demo_0/rewards"] = np.zeros(2)
            made["data/demo_0/obs/position"] = np.zeros((3, 1))
            if kind == "raw":
                made.create_dataset("data/demo_0/obs/state", (3, 1), "f8", external=[(str(raw), 0, 24)])
            else:
                link = h5py.ExternalLink(str(secret), "state") if kind == "external" else h5py.SoftLink("/data/demo_0")
                made["data/demo_0/obs/state"] = link
        with pytest.raises(DataError, match="got a link"):
            ReplayBuffer.from_dataset(file)
    os.symlink(file, tmp_path / "link.hdf5")
    with pytest.raises(DataError, match="symbolic links"):
        ReplayBuffer.from_dataset(tmp_path / "link.hdf5")


@pytest.mark.parametrize("what", ["link", "pipe", "list of others"])
@pytest.mark.parametrize("pattern", ["videos/**/*.mp4", "data/**/*.parquet", "meta/episodes/**/*.parquet"])
def test_files_of_a_lerobot_dataset_lead_nowhere_else(recorded: Path, tmp_path: Path, pattern: str, what: str) -> None:
    dataset, elsewhere = tmp_path / "lerobot", tmp_path / "elsewhere"
    export_dataset(recorded, dataset, "lerobot")
    (file,) = dataset.glob(pattern)
    file.rename(elsewhere)
    if what == "link":
        file.symlink_to(elsewhere)
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.write_text("ffconcat version 1.0\nfile other.mp4\n")
        elsewhere.rename(file.with_name("other.mp4"))
    with pytest.raises(DataError, match=re.escape(str(file))):
        ReplayBuffer.from_dataset(dataset, groups=("camera",), reward=0.0)
    if pattern.startswith("videos"):
        assert file.name in "".join(verify_dataset(dataset).problems)
    else:
        with pytest.raises(DataError, match=re.escape(str(file))):
            verify_dataset(dataset)


def test_hostile_metadata_of_a_lerobot_dataset_is_refused(recorded: Path, tmp_path: Path) -> None:
    export_dataset(recorded, tmp_path / "lerobot", "lerobot")
    info = tmp_path / "lerobot/meta/info.json"
    text = info.read_text()
    for place in ("videos/{video_key}/{chunk_index:099999999d}/{file_index}.mp4", "/etc/{video_key}", "../{video_key}"):
        info.write_text(json.dumps(json.loads(text) | {"video_path": place}))
        with pytest.raises(DataError, match="expected videos at videos/"):
            ReplayBuffer.from_dataset(tmp_path / "lerobot", groups=("camera",), reward=0.0)
    info.write_text(text)
    (file,) = (tmp_path / "lerobot/data").glob("**/*.parquet")
    arrow = pytest.importorskip("pyarrow")
    zeros = arrow.table({"index": np.zeros(60_000_000, np.int64)})
    pytest.importorskip("pyarrow.parquet").write_table(zeros, file, compression="zstd")
    assert file.stat().st_size < 1_000_000
    with pytest.raises(DataError, match="expected a sane size, got 480,000,000 bytes"):
        ReplayBuffer.from_dataset(tmp_path / "lerobot", reward=0.0)


def test_damaged_files_raise_no_raw_errors(recorded: Path, tmp_path: Path) -> None:
    export_dataset(recorded, tmp_path / "demos.hdf5", "robomimic")
    whole = (tmp_path / "demos.hdf5").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(60):
        damaged = bytearray(whole)
        for at in rng.integers(0, min(len(damaged), 20_000), 8):
            damaged[at] ^= 1 << int(rng.integers(8))
        if number % 3 == 0:
            del damaged[int(rng.integers(len(damaged))) :]
        file = tmp_path / f"{number}.hdf5"
        file.write_bytes(damaged)
        try:
            ReplayBuffer.from_dataset(file)
        except HeadraceError:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": np.array([0.0, 1e300, 0.0])}, "episode 0: expected rewards that float32 can hold, got 1e\\+300"),
        ({"rewards": np.array([0.0, 0.0, -np.inf])}, "float32 can hold"),
        ({"dones": np.array([0.0, np.nan, 1.0])}, "dones: expected 0 or 1"),
        ({"dones": np.array([0, 2, 1])}, "dones: expected 0 or 1"),
        ({"actions": np.zeros((3, 0), np.float32)}, "action: expected at least one element"),
    ],
)
def test_numbers_that_no_replay_can_hold_are_refused(change, words, tmp_path: Path) -> None:
    arrays = {"actions": np.zeros((3, 2), np.float32), "rewards": np.zeros(3), "dones": np.array([0, 0, 1])}
    arrays |= {"obs/state": np.zeros((3, 2)), "next_obs/state": np.zeros((3, 2)), **change}
    with h5py.File(tmp_path / "demos.hdf5", "w") as file:
        for name, values in arrays.items():
            file[f"data/demo_0/{name}"] = values
    with pytest.raises((DataError, ConfigError), match=words):
        ReplayBuffer.from_dataset(tmp_path / "demos.hdf5")
