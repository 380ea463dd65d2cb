"""SIGKILL of Ray's raylet, the process that owns a machine's workers: the table stays that of one process."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from worker_policies import RECIPE, Deadly, Shove

from flat import evaluate
from headrace.evaluation import EpisodeResult

pytestmark = [pytest.mark.ray, pytest.mark.slow]

EPISODES = 24
PROGRAM = Path(__file__).with_name("driver_program.py")


@pytest.fixture(scope="module")
def alone() -> list[EpisodeResult]:
    """The table of one process."""
    return evaluate(RECIPE, Shove(), episodes=EPISODES, progress=False).episodes


def _rows(journal: Path) -> int:
    return max(0, journal.read_bytes().count(b"\n") - 1) if journal.exists() else 0


@pytest.mark.parametrize("moment", range(12))
def test_a_driver_whose_raylet_is_killed_ends_and_its_journal_is_completed(
    moment: int, tmp_path: Path, alone: list[EpisodeResult]
) -> None:
    draw = np.random.default_rng(moment)
    after, journal = int(draw.integers(-1, 20)), tmp_path / "journal"
    command = [sys.executable, str(PROGRAM), "own", str(journal), str(tmp_path), str(EPISODES)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as driver:
        raylets: list[psutil.Process] = []
        deadline = time.monotonic() + 120.0
        while _rows(journal) <= after or not raylets:
            family = psutil.Process(driver.pid).children(recursive=True)
            raylets = raylets or [each for each in family if each.name() == "raylet"]
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            assert driver.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.005)
        time.sleep(float(draw.uniform(0.0, 0.1)))
        raylets[0].kill()
        driver.wait(300.0)
    found = evaluate(RECIPE, Deadly(tmp_path, episode=-1), episodes=EPISODES, journal=journal, resume=True)
    assert found.episodes == alone


def test_workers_whose_raylet_is_killed_leave_their_episodes_to_those_of_another_machine(
    tmp_path: Path, alone: list[EpisodeResult]
) -> None:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    memory = {"num_cpus": 1, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=memory)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        for moment in range(12):
            draw = np.random.default_rng(100 + moment)
            node, after, count = cluster.add_node(**memory), int(draw.integers(0, 12)), 0
            (place := tmp_path / str(moment)).mkdir()

            def kill(
                rows: list[EpisodeResult],
                draw: np.random.Generator = draw,
                node: Any = node,
                after: int = after,
            ) -> None:
                nonlocal count
                count += len(rows)
                if count > after and node in cluster.list_all_nodes():
                    time.sleep(float(draw.uniform(0.0, 0.05)))
                    cluster.remove_node(node, allow_graceful=False)

            policy = Deadly(place, episode=-1)
            found = evaluate(
                RECIPE, policy, episodes=EPISODES, workers=2, block=int(draw.integers(1, 9)), on_episodes=kill
            )
            assert node not in cluster.list_all_nodes()
            assert (found.status, found.episodes) == ("completed", alone)
    finally:
        ray.shutdown()
        cluster.shutdown()
