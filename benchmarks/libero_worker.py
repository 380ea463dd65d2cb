"""Measure genuine LIBERO in its own interpreter: ``python libero_worker.py JOBS``, a list of [task, kind, steps].

Kinds: ``every`` draws both cameras in every step, as openpi's loop does; ``demand`` draws them once in 8 steps;
``physics`` draws nothing. CPU seconds of one process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

LIBERO = Path(__file__).resolve().parent.parent / "src" / "headrace" / "envs" / "tasks" / "libero"
sys.path[0] = str(LIBERO)  # in place of this directory, whose libero.py is not LIBERO
import export  # noqa: E402
import plain  # noqa: E402

CAMERAS, CHUNK, PIXELS = ["agentview", "robot0_eye_in_hand"], 8, 256


def measure(suites, name: str, kind: str, steps: int) -> dict[str, float]:
    suite, _, index = name.partition("/")
    task = suites[suite].get_task(int(index))
    bddl, file = export.task_files(task)
    import torch

    states = torch.load(file, weights_only=False)
    seen = {"use_camera_obs": kind == "every", "has_offscreen_renderer": kind != "physics"}
    seen |= {"camera_names": CAMERAS, "camera_heights": PIXELS, "camera_widths": PIXELS}
    env = export.make_env(bddl, **seen)
    begun = time.process_time()
    env.reset()
    env.set_init_state(states[0])
    reset = time.process_time() - begun
    rng = np.random.default_rng(0)
    for _ in range(2):
        env.step(np.array(plain.WAIT))
    begun = time.process_time()
    for step in range(steps):
        if kind == "demand" and step % CHUNK == 0:
            for camera in CAMERAS:
                env.sim.render(camera_name=camera, width=PIXELS, height=PIXELS)
        env.step(rng.uniform(-0.3, 0.3, 7))
    taken = (time.process_time() - begun) / steps
    env.close()
    return {"reset": reset, "step": taken}


def main() -> None:
    suites = export.load_benchmark(Path(os.environ["HEADRACE_LIBERO_ASSETS"]).resolve())
    for name, kind, steps in json.loads(sys.argv[1]):
        print("FOUND " + json.dumps(measure(suites, name, kind, steps)), flush=True)


if __name__ == "__main__":
    main()
