"""SIGKILL at random moments, many times: what was kept is resumed to the same bits. Counts stand in reliability.md."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from headrace._published import read_weights
from headrace.evaluation import Evaluation
from headrace.libraries.training import read_index
from killed_programs import TRAINED, Programs

pytestmark = pytest.mark.slow
TIMES = int(os.environ.get("HEADRACE_KILLS", "40"))
"""How often each program is killed."""


@pytest.fixture(scope="module")
def programs() -> Generator[Programs]:
    with Programs() as found:
        yield found


def until(true: Callable[[], bool], log: Path, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.002)


def until_there(path: Path, log: Path) -> None:
    until(lambda: path.exists() or done(log), log)


def kill(process: int) -> None:
    """Kill a program, and wait until it is gone."""
    with contextlib.suppress(ProcessLookupError):  # it was done
        signal.pidfd_send_signal(process, signal.SIGKILL)
    finish(process)


def finish(process: int) -> None:
    assert select.select([process], [], [], 300)[0], "it did not end"
    os.close(process)


def done(log: Path) -> bool:
    """Whether a program has ended by itself; one that failed fails the test with its words."""
    words = log.read_text() if log.exists() else ""
    assert "Traceback" not in words, words
    return words.endswith("done\n")


def test_a_killed_training_is_resumed_to_the_weights_of_one_that_was_not(programs: Programs, tmp_path: Path) -> None:
    draw, log = random.Random(0), tmp_path / "log"
    finish(programs.start("train", output=str(tmp_path / "whole"), iterations=TRAINED, resume=None, log=str(log)))
    assert done(log), log.read_text()
    expected = read_weights(read_index(tmp_path / "whole").last, trust=False)["state_dict"]
    killed = parts = 0
    while killed < TIMES:
        run, log = tmp_path / f"killed-{killed}", tmp_path / f"log-{killed}"
        process = programs.start("train", output=str(run), iterations=TRAINED, resume=None, log=str(log))
        until_there(run / "checkpoint.json", log)
        time.sleep(draw.uniform(0.0, 1.5))
        kill(process)
        if done(log):
            continue
        parts += len(list((run / "checkpoints").glob(".*.part*")))
        left = TRAINED - read_meta_iteration(run)
        again, log = tmp_path / f"resumed-{killed}", tmp_path / f"resumed-{killed}.log"
        finish(programs.start("train", output=str(again), iterations=left, resume=str(run), log=str(log)))
        assert done(log), log.read_text()
        assert list((run / "checkpoints").glob(".*.part*")) == []
        found = read_weights(read_index(again).last, trust=False)["state_dict"]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        killed += 1
    print(f"training: {killed} kills after the first checkpoint, {parts} in the middle of a file")


def read_meta_iteration(run: Path) -> int:
    """Return the iteration of the checkpoint that a resumed training begins with."""
    from headrace.libraries.registry import library
    from headrace.libraries.training import read_meta

    meta = read_meta(read_index(run).last, library("headrace"))
    assert meta is not None
    return meta.iteration


def test_killed_servers_and_clients_leave_no_trace_in_the_table(programs: Programs, tmp_path: Path) -> None:
    draw, log, episodes = random.Random(1), tmp_path / "log", 40
    alone = {"address": None, "journal": str(tmp_path / "alone.jsonl"), "episodes": episodes}
    finish(programs.start("play", **alone, log=str(log)))
    assert done(log), log.read_text()
    expected = Evaluation.load(tmp_path / "alone.jsonl").episodes
    killed = {"server": 0, "client": 0}
    port, number = 0, 0

    def serve() -> int:
        nonlocal port, number
        number += 1
        words = tmp_path / f"server-{number}.log"
        process = programs.start("serve", port=port, log=str(words))
        place = words.with_suffix(".address")
        until(lambda: place.exists() and place.read_text().count(":") == 2, words)
        port = int(place.read_text().rpartition(":")[2])
        return process

    server = serve()
    while sum(killed.values()) < TIMES:
        journal, log = tmp_path / f"{number}-{sum(killed.values())}.jsonl", tmp_path / f"{number}.client"
        told = {"address": f"ws://127.0.0.1:{port}", "journal": str(journal), "episodes": episodes, "log": str(log)}
        client = programs.start("play", **told)
        until_there(journal, log)
        who = draw.choice(("server", "client"))
        time.sleep(draw.uniform(0.0, 0.6))
        if not done(log):
            killed[who] += 1
            kill(server if who == "server" else client)
            if who == "server":
                server = serve()
            else:
                client = programs.start("play", **told)
        finish(client)
        assert done(log), log.read_text()
        assert Evaluation.load(journal).episodes == expected
        log.unlink()
    kill(server)
    print(json.dumps(killed))
