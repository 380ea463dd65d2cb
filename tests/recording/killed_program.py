"""Forks programs that record counting episodes until they are killed or have done their steps.

Reads lines ``DATASET STEPS SEED POINT``; answers each with the process id once it records, and with its status once it
has ended.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from counting_env import CountingEnv

from headrace import files
from headrace.recording import EpisodeRecorder, RecorderCfg

NUM_ENVS = 8


def crash_at(point: int) -> None:
    """Kill this process at the n-th moment just before or after a write, a sync or a rename."""
    passed = 0

    def count():
        nonlocal passed
        passed += 1
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    class Deadly(files.Disk):
        def write(self, handle, content):
            count()
            written = super().write(handle, content)
            count()
            return written

        def sync(self, handle):
            count()
            super().sync(handle)
            count()

        def rename(self, source, target):
            count()
            super().rename(source, target)
            count()

    files.disk = Deadly()


def progress_file(path: Path) -> Path:
    """When the last step returned, how many episodes this run had finished by then, and when each of them had."""
    return path.with_name(f"{path.name}.progress")


def record(path: Path, steps: int, seed: int) -> None:
    fields = ("obs", "actions", "rewards", "flags", "states")
    path.parent.mkdir(parents=True, exist_ok=True)
    # what is written to a mapping outlives a kill
    progress = np.memmap(progress_file(path), np.float64, "w+", shape=1 << 16)
    with EpisodeRecorder(path, RecorderCfg(fields=fields), resume=True) as recorder:
        env = CountingEnv(NUM_ENVS, [recorder], image=32)
        env.reset(seed)
        print(os.getpid(), flush=True)
        for _ in range(steps):
            env.step()
            finished = min(recorder.report.finished, len(progress) - 2)
            now = time.monotonic()
            progress[2 + int(progress[1]) : 2 + finished] = now
            progress[:2] = now, finished


if __name__ == "__main__":
    while line := sys.stdin.readline():
        dataset, steps, seed, point = line.split()
        child = os.fork()
        if child == 0:
            if int(point):
                crash_at(int(point))
            record(Path(dataset), int(steps), int(seed))
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
