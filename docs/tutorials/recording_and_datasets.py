"""Lesson: recording and datasets.

Run it with ``python docs/tutorials/recording_and_datasets.py``. Everything it says is asserted.

Demonstrations and evaluations end in datasets. This lesson records episodes so that a crash costs only those that were
running or had just finished, reads them back, turns them into the formats that people train from, plays one again to
the last bit, and merges two recordings.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch

import headrace
from headrace.recording import (
    DatasetInfo,
    EpisodeDataset,
    EpisodeRecorder,
    RecorderCfg,
    export_dataset,
    make_replay_env,
    merge_datasets,
    replay_episode,
    verify_dataset,
)

folder = Path(tempfile.mkdtemp())

# A recorder is attached to an environment before its first reset. It sees the rows that acted, and nothing else.

env = headrace.make("cartpole", num_envs=4, overrides={"episode_length": 20})
info = DatasetInfo.of(env, instruction="balance the pole")  # task, settings, steps per second, spaces
cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))

with EpisodeRecorder(folder / "run", cfg, info) as recorder:
    env.attach(recorder)
    env.reset(seed=0)
    env.suspend([3])
    for _ in range(50):
        env.step(torch.rand(4, 1) * 2 - 1)
    env.detach(recorder)
print(recorder.report)

# Environment 3 slept all the time: its episode never acted, so it left nothing behind. Episodes still running at the
# end are given up; those that are finished are on disk, synced, with their hash in the journal.

dataset = EpisodeDataset(folder / "run")
assert 3 not in {episode.meta.episode_id for episode in dataset}
first = dataset[0]
assert first.read("obs/policy").shape[0] == first.meta.length + 1  # the true last observation is there
assert first.read("actions").shape == (first.meta.length, 1)

# Formats: robomimic and Isaac Lab (HDF5), LeRobot v3, Minari. A target appears when it is whole.

export_dataset(folder / "run", folder / "demos.hdf5", "robomimic")
export_dataset(folder / "run", folder / "lerobot", "lerobot")
for target in (folder / "run", folder / "demos.hdf5", folder / "lerobot"):
    assert verify_dataset(target).problems == ()

# An episode is a function of task, seed, episode id and actions. So it can be played again and compared, to the last
# bit.

replayed = replay_episode(first, make_replay_env(dataset.info))
assert replayed.exact
print("episode", first.meta.episode_id, "replays exactly")

# More episodes are recorded elsewhere, under another seed. Both recordings become one dataset, which is exported to
# a new target.

with EpisodeRecorder(folder / "more", cfg, info) as recorder:
    env.attach(recorder)
    env.reset(seed=1)
    env.resume([3])
    for _ in range(50):
        env.step(torch.rand(4, 1) * 2 - 1)
    env.detach(recorder)
merge_datasets([folder / "run", folder / "more"], folder / "both")
export_dataset(folder / "both", folder / "lerobot-both", "lerobot")
assert verify_dataset(folder / "lerobot-both").episodes == len(EpisodeDataset(folder / "both")) > len(dataset)

# A dataset is never overwritten. The same program run again completes what a crash cut short:

with EpisodeRecorder(folder / "run", cfg, info, resume=True) as recorder:
    assert recorder.has(0, first.meta.episode_id)
shutil.rmtree(folder)  # nothing is left behind
