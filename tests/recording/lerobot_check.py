"""Records, exports, and lets LeRobot read it: ``make test-lerobot``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from counting_env import CountingEnv

from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.recording._lerobot import LeRobotExporter

ROOT = Path(__file__).parents[2]


class SmoothEnv(CountingEnv):
    """With pictures that a video codec can hold: a bright bar that moves; and a grid of numbers."""

    def obs(self) -> dict:
        obs = super().obs()
        place = (self.episodes * 3 + self.steps * 4) % 32
        bar = ((torch.arange(32)[None, :] - place[:, None]).abs() < 4).to(torch.uint8) * 200
        obs["camera"] = bar[:, None, :, None].expand(-1, 32, -1, 3).contiguous()
        obs["grid"] = (self.steps[:, None, None] + torch.arange(6).view(2, 3)).to(torch.float32)
        return obs


def main() -> None:
    reader = ROOT / ".venv-lerobot" / "bin" / "python"
    if not reader.exists():
        sys.exit("LeRobot is not installed; run: make test-lerobot")
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "episodes", Path(folder) / "export"
        info = DatasetInfo(env_name="counting", fps=20, instruction="count to the end")
        fields = ("obs", "actions", "rewards", "flags", "states")
        with EpisodeRecorder(source, RecorderCfg(fields=fields), info) as recorder:
            env = SmoothEnv(4, [recorder])
            env.reset()
            for _ in range(60):
                env.step()
        LeRobotExporter.unit_bytes = 300_000
        export_dataset(source, out, "lerobot")
        assert len(list((out / "data" / "chunk-000").iterdir())) > 1
        assert verify_dataset(out).problems == ()
        subprocess.run([reader, Path(__file__).parent / "lerobot_reader.py", source, out], check=True)


if __name__ == "__main__":
    main()
