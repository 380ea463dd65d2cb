"""The wheel that people install, tried outside the clone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "rsl_rl rl_games skrl stable_baselines3 torchrl onnxruntime onnx tensorboard warp h5py pyarrow av PIL"
PLAY = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS.split()}))  # None there: it cannot be imported
from headrace.cli.main import main
sys.exit(main(["play", "cartpole", "--num-envs", "4", "--output", "played"]))
"""
"""``headrace play cartpole`` where nothing but the core is installed."""


def test_the_built_wheel_has_models_and_types_and_runs_a_task(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").glob("headrace-*.whl")
    place = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert (place / "headrace" / "py.typed").exists()

    code = (
        "import headrace, torch\n"
        f"assert headrace.__file__.startswith({str(place)!r}), headrace.__file__\n"
        "env = headrace.make('cartpole', 2); env.reset(); step = env.step(torch.zeros(2, 1))\n"
        "print(tuple(step.obs['policy'].shape))"
    )
    environment = {**os.environ, "PYTHONPATH": str(place)}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "(2, 4)", run.stderr

    published = place / "headrace" / "checkpoints"
    files = json.loads((published / "manifest.json").read_text())["files"]
    assert files.keys() <= {file.name for file in published.iterdir()}
    run = subprocess.run(
        [sys.executable, "-c", PLAY], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "played" / "play.json").read_text())["reward"]["mean"] > 285.0
