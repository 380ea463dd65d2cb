"""Compares what two versions of headrace compute through networks, bit for bit, on this machine.

``python tests/data/v0_2/compare.py CHECKOUT_OF_0_2/src src`` runs the same commands with both and prints what each
wrote: tables of evaluations and plays, learning curves, weights of trainings that are resumed. The exit code is 1 if
anything differs. Commands and files are formats: no name of a module is in this program.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
LIBRARIES = ("headrace", "rsl_rl", "rl_games", "skrl", "sb3")
PLAY = ("--num-envs", "3", "--threads", "1")
PPO = {"hidden": "[8]", "steps": 16, "minibatches": 2, "epochs": 2}
ACT = {"horizon": 4, "width": 8, "heads": 2, "hidden": 8, "memory_tokens": 2, "batch": 4, "check_every": 20}


def _each(option: str, values: dict[str, object]) -> list[str]:
    return [word for name, value in values.items() for word in (option, f"{name}={value}")]


TRAIN = ("--num-envs", "4", "--threads", "1", "--seed", "2", "--set", "max_angle=0.3", *_each("--ppo", PPO))
IMITATE = (
    *("--dataset", "datasets/state", "--keep", "all", "--updates", "40", "--episodes", "0"),
    *_each("--act", ACT),
)


def commands() -> dict[str, list[str]]:
    """Output → the command that writes it, in a copy of this directory."""
    evaluate = {
        "pusher-solid.json": ["pusher-solid", "--episodes", "24"],
        "pusher-latency.json": ["pusher-solid", "--episodes", "6", "--latency", "3", "--offset", "1", "--execute", "8"],
        "pusher-ensemble.json": ["pusher-solid", "--episodes", "3", "--ensemble", "0.01"],
        "pusher-words.json": ["pusher-words", "--episodes", "8", "--execute", "8"],
        "imitated.json": ["cartpole", "--policy", "imitation/policy.pt", "--episodes", "8"],
    }
    found = {output: ["evaluate", *words, *PLAY, "--output", output] for output, words in evaluate.items()}
    for library in LIBRARIES:
        run = f"trainings/{library}"
        table, played, more = f"{library}.json", f"play-{library}", f"more-{library}"
        found[table] = ["evaluate", "cartpole", "--policy", run, "--episodes", "8", *PLAY, "--output", table]
        found[f"{played}/play.json"] = [
            *("play", "cartpole", "--policy", run, "--episodes", "8", "--warmup-steps", "0", *PLAY, "--output", played)
        ]
        found[f"{more}/training.json"] = [
            *("train", "cartpole", "--library", library, "--iterations", "2", *TRAIN, "--resume-from", run),
            *("--output", more),
        ]
    return found | {"imitation/policy.pt": ["imitate", *IMITATE, "--resume", "--output", "imitation/policy.pt"]}


def values(file: Path) -> dict[str, str]:
    """What must be equal of a file: rows, curves, weights; times and versions are not among it."""
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        if "learning" in content:
            del content["learning"]["wall_time_s"]
        kept = {key: content[key] for key in ("episodes", "per_episode", "learning", "success_rate") if key in content}
        return {key: json.dumps(value, sort_keys=True) for key, value in kept.items()}
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            parts = {name: archive.read(name) for name in archive.namelist() if name.endswith(".pth")}
        return {f"{name} {key}": text for name, raw in parts.items() for key, text in _tensors(_load(io.BytesIO(raw)))}
    return dict(_tensors(_load(file)))


def _load(file: Any) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


def _tensors(value: Any, path: str = "") -> list[tuple[str, str]]:
    """Every tensor in a nest of containers, by its path, as dtype, shape and hash."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [(path, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}")]
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [found for key, part in parts for found in _tensors(part, f"{path}/{key}")]


def outputs(source: Path, folder: Path) -> dict[str, str]:
    """Run the commands with the headrace in ``source``, in a copy of this directory; returns what was written."""
    shutil.copytree(HERE, folder)
    environment = os.environ | {"PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
    found: dict[str, str] = {}
    for output, words in commands().items():
        command = [sys.executable, "-m", "headrace", *words]
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{source}: {' '.join(words)}: {ended.stderr}")
        written = folder / output
        files = (
            [written, *sorted(written.parent.glob("checkpoints/*"))] if written.name == "training.json" else [written]
        )
        found |= {f"{file.relative_to(folder)} {key}": text for file in files for key, text in values(file).items()}
    return found


def main(before: str, after: str) -> int:
    """Compare two source directories; returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (outputs(Path(source), Path(folder) / name) for name, source in (("a", before), ("b", after)))
    differ = [name for name in first | second if first.get(name) != second.get(name)]
    for name in differ:
        print(f"{name}:\n  {first.get(name)}\n  {second.get(name)}")
    print(f"{len(first | second)} values compared, {len(differ)} differ")
    return int(bool(differ) or not first)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
