"""What is kept on disk, by a process that may have 64 open files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import torch, headrace
from headrace.evaluation import Evaluation, JournalCfg
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, export_dataset, verify_dataset
from headrace.replay import ReplayBuffer
place = Path(sys.argv[1])
env = headrace.make("cartpole", 50, seed=0, overrides={"episode_length": 4})
store = ReplayBuffer(5_000, 50, env.single_observation_space, env.single_action_space, directory=place / "store")
with EpisodeRecorder(place / "dataset", info=DatasetInfo.of(env)) as recorder:
    env.attach(recorder)
    obs, _ = env.reset(seed=0)
    for _ in range(40):
        action = torch.zeros(50, 1)
        step = env.step(action)
        store.extend(obs, action, step)
        obs = step.obs
store.close()
assert len(ReplayBuffer.open(place / "store")) == 2_000
assert len(EpisodeDataset(place / "dataset")) == 500
assert verify_dataset(place / "dataset").problems == ()
for to, name in (("robomimic", "demos.hdf5"), ("lerobot", "lerobot"), ("minari", "minari-v0")):
    export_dataset(place / "dataset", place / name, to, fps=50)
    assert verify_dataset(place / name).episodes == 500
journal = JournalCfg(path=place / "run.jsonl")
headrace.evaluate("cartpole", lambda obs: 0 * obs["policy"][:, :1], episodes=100, progress=False, journal=journal)
assert len(Evaluation.load(place / "run.jsonl").episodes) == 100
print("done")
"""


def test_stores_recordings_exports_and_journals_need_few_open_files(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("done\n"), done.stderr
