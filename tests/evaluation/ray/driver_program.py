"""A driver that a test kills: ``driver_program.py ADDRESS JOURNAL DIRECTORY EPISODES``; ``own`` is its own cluster."""

from __future__ import annotations

import sys
from pathlib import Path

from worker_policies import RECIPE, Deadly

import headrace
from headrace.evaluation import WorkersCfg

if __name__ == "__main__":
    address, journal, directory, episodes = sys.argv[1:]
    headrace.evaluate(
        RECIPE,
        Deadly(Path(directory), episode=-1),
        episodes=int(episodes),
        workers=WorkersCfg(count=2, block=1, ray_address=None if address == "own" else address),
        journal=journal,
        progress=False,
    )
