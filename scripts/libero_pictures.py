"""Compare native pictures of LIBERO with genuine ones, a task per suite: ``libero_pictures.py [FILE]``.

Writes the first pictures of an episode of each suite side by side, genuine and native, to a file, by default
docs/images/libero-pictures.jpg. Prints the mean difference, of 255, and the share of pixels within 8 in all colors.
Needs what ``make test-libero`` needs, and software GL.
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
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images/libero-pictures.jpg")
    shown = []
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
        first = [seen[sim][name][0] for name in CAMERAS for sim in ("robosuite", "mujoco")]
        shown.append(np.concatenate(first, axis=1))
        print(f"| {suite} | {cells[0]} | {cells[1]} |", flush=True)
    whole = Image.fromarray(np.concatenate(shown).astype(np.uint8))
    whole.resize((whole.width * 3 // 4, whole.height * 3 // 4), Image.Resampling.LANCZOS).save(out, quality=85)


if __name__ == "__main__":
    main()
