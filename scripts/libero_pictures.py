"""Compare native pictures of LIBERO with genuine ones, a task per suite: ``libero_pictures.py DIRECTORY``.

Writes genuine and native pictures side by side to a new directory, which is not to be committed: they show LIBERO's
assets. Prints the mean difference, of 255, and the share of pixels within 8 in all colors. Needs what ``make
test-libero`` needs, and software GL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from headrace import EnvRecipe
from headrace.envs.tasks.libero.names import SUITES

CAMERAS = ("agentview", "robot0_eye_in_hand")
EPISODES = 3


def main() -> None:
    """Compare the first pictures of a few episodes."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    print("| suite | agentview: mean, within 8 | wrist: mean, within 8 |", "|---|---:|---:|", sep="\n", flush=True)
    for suite in SUITES:
        seen = {}
        for sim in ("robosuite", "mujoco"):
            env = EnvRecipe(f"{suite}/0", sim=sim).make()
            rows = [env.reset(options={"episode_ids": torch.tensor([i])})[0] for i in range(EPISODES)]
            seen[sim] = {name: torch.cat([row[name] for row in rows]).numpy().astype(int) for name in CAMERAS}
            env.close()
        cells = []
        for name in CAMERAS:
            genuine, native = (seen[sim][name] for sim in ("robosuite", "mujoco"))
            apart = np.abs(genuine - native)
            cells.append(f"{apart.mean():.1f}, {(apart.max(axis=-1) <= 8).mean():.0%}")
            pairs = np.concatenate([np.concatenate(pair, axis=1) for pair in zip(genuine, native, strict=True)])
            Image.fromarray(pairs.astype(np.uint8)).save(out / f"{suite}-{name}.png")
        print(f"| {suite} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
