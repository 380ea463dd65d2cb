"""The other interpreter's side of ``bridges.py``: a toy with images, and environments stepped bare.

Runs under any Python 3.8 with numpy: it imports neither headrace nor Gymnasium.

  python bridges_worker.py ENTRY COUNT   makes COUNT environments, then steps them whenever a line says how often
"""

import importlib.util
import os
import sys
import time

import numpy as np

_SIDE = 84


class Disc:
    """A disc that is pushed about, drawn on 84 x 84 pixels by its distance to every pixel, with smooth edges."""

    def __init__(self):
        image = {"type": "box", "shape": [_SIDE, _SIDE, 3], "dtype": "uint8"}
        self.observation_space = {"type": "dict", "spaces": {"policy": {"type": "box", "shape": [2]}, "camera": image}}
        self.action_space = {"type": "box", "shape": [2], "low": -1, "high": 1}
        self._rows, self._columns = np.mgrid[0:_SIDE, 0:_SIDE].astype(np.float32)

    def _obs(self):
        y, x = 42 + 30 * np.tanh(self.place)
        away = np.sqrt((self._rows - y) ** 2 + (self._columns - x) ** 2)
        inside = np.clip(8 - away, 0, 1)
        shade = np.clip(1 - away / 120, 0, 1)
        image = np.stack((255 * inside, 128 * shade, 255 * (1 - inside) * shade), axis=-1).astype(np.uint8)
        return {"policy": self.place.astype(np.float32), "camera": image}

    def reset(self, seed=None):
        self.place = np.random.default_rng(seed).normal(size=2)
        return self._obs(), {}

    def step(self, action):
        self.place = self.place + 0.1 * np.asarray(action)
        return self._obs(), float(-np.abs(self.place).sum()), False, False, {}


def load(entry):
    """What ``file.py:name`` means."""
    path, _, name = entry.rpartition(":")
    spec = importlib.util.spec_from_file_location("bench_entry", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_entry"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def main():
    entry, count = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")  # what a simulator prints must not be taken for an answer
    os.dup2(2, 1)
    envs = [load(entry)() for _ in range(count)]
    space = envs[0].action_space
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        rng = np.random.default_rng(0)
        steps = int(line)
        actions = rng.uniform(-0.1, 0.1, (steps, count, *space["shape"])).astype(np.float32)
        begun = time.perf_counter()
        for row in actions:
            for env, action in zip(envs, row):  # noqa: B905  (strict= is not in Python 3.8)
                env.step(action)
        print(time.perf_counter() - begun, file=answers, flush=True)
        for seed, env in enumerate(envs):
            env.reset(seed=seed)
        print("ready", file=answers, flush=True)


if __name__ == "__main__":
    main()
