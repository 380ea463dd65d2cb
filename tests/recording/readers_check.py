"""Lets the genuine readers open what is exported, each in its own environment: ``make test-readers``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from counting_env import CountingEnv

import headrace
from headrace.imitation.experts import expert_for
from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.recording.export._lerobot import LeRobotExporter

ROOT = Path(__file__).parents[2]
FIELDS = ("obs", "actions", "rewards", "flags", "states")


class SmoothEnv(CountingEnv):
    """With images that a video codec can hold: a bright bar that moves; and a grid of numbers."""

    def obs(self) -> dict:
        obs = super().obs()
        place = (self.episodes * 3 + self.steps * 4) % 32
        bar = ((torch.arange(32)[None, :] - place[:, None]).abs() < 4).to(torch.uint8) * 200
        obs["camera"] = bar[:, None, :, None].expand(-1, 32, -1, 3).contiguous()
        obs["grid"] = (self.steps[:, None, None] + torch.arange(6).view(2, 3)).to(torch.float32)
        del obs["nothing"]  # an empty dimension, which only Minari takes
        return obs


def record_docs_example(folder: Path) -> Path:
    """The first program of docs/recording.md, as it stands there."""
    program = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "recording.md").read_text(), re.DOTALL)
    assert program
    subprocess.run([sys.executable, "-c", program[1]], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "runs" / "ant"


def record_counting(folder: Path) -> Path:
    """Nested observations of many dtypes, episodes of all lengths, success."""
    info = DatasetInfo(fps=20, instruction="count to the end")
    with EpisodeRecorder(folder / "counting", RecorderCfg(fields=FIELDS), info) as recorder:
        env = SmoothEnv(4, [recorder])
        env.reset()
        for _ in range(60):
            env.step()
    return folder / "counting"


def record_camera(folder: Path) -> Path:
    """A camera task of ours: frame stacks."""
    env = headrace.make("cartpole-camera", 3, overrides={"episode_length": 20})
    info = DatasetInfo.of(env, instruction="keep the pole up")
    with EpisodeRecorder(folder / "camera", RecorderCfg(fields=FIELDS), info) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        for step in range(40):
            env.step(torch.full((3, 1), 1.0 if step % 8 < 4 else -1.0))
    env.close()
    return folder / "camera"


def record_aloha(folder: Path) -> Path:
    """Demonstrations of an expert on a robot of meshes, with pictures."""
    env = headrace.make("aloha-transfer-cube", 2, autoreset="disabled", overrides={"width": 128, "height": 96})
    with EpisodeRecorder(folder / "aloha", RecorderCfg(fields=FIELDS), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        obs, _ = env.reset(seed=0)
        while bool(env.active.any()):
            obs = env.step(expert_for("aloha-transfer-cube")(obs)).obs
    env.close()
    return folder / "aloha"


def read(reader: str, source: Path, export: Path) -> None:
    python = ROOT / f".venv-{reader}" / "bin" / "python"
    if not python.exists():
        sys.exit(f"{reader} is not installed; run: make test-readers")
    script = Path(__file__).parent / "readers" / f"{reader}_reader.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([python, script, source, export], check=True, env=environment)


def main() -> None:
    LeRobotExporter.unit_bytes = 300_000  # several files
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for record in (record_docs_example, record_counting, record_camera, record_aloha):
            source = record(folder)
            targets = {
                "lerobot": (folder / f"{source.name}_lerobot", "lerobot"),
                "minari": (folder / f"{source.name}-v0", "minari"),
                "robomimic": (folder / f"{source.name}.hdf5", "robomimic"),
            }
            print(f"--- {source.name}", flush=True)
            for reader, (target, form) in targets.items():
                export_dataset(source, target, form, fps=20 if form == "lerobot" else None)
                assert verify_dataset(target).problems == ()
                read(reader, source, target)


if __name__ == "__main__":
    main()
