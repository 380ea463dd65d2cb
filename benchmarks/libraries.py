"""Four RL libraries on our environments: learning, speed, memory, the cost of our adapters, and playing.

  speed      cartpole, ant and cartpole-camera at a fixed number of frames: collecting and learning frames/s, and the
             peak memory of the process, which trains this one library on this one task
  learning   cartpole, 64 environments, three seeds: seconds of training until the last 50 episodes reach 95 % of the
             best return (300), and their mean return when the run ends; means with 95 % bootstrap intervals
  overhead   the time to collect a rollout with our adapter over an environment that does nothing, against the library's
             own loop over an environment that does nothing in the library's own interface; see libraries_nothing.py.
             Bar: <= 5 %
  play       each published checkpoint as 'headrace play' loads it: frames/s, as a share of what env.step alone reaches
             with the same actions from the same state

One process a library (speed: a library and task), all warm and waiting; measured in turn, in reversed order every other
round. Figures are medians over rounds, ratios are medians of ratios within a round. One thread for torch. Every
measurement is a bundle file, and the table is made from the bundles alone: parts that are run one by one make the same
table as a whole run. An absent library falls short.

  python benchmarks/libraries.py                    everything, about ten minutes
  python benchmarks/libraries.py --part overhead    one part; the others' bundles stay as they are
  python benchmarks/libraries.py --part none        nothing is measured: the table of the bundles that are there
  python benchmarks/libraries.py --quick            cartpole alone, few rounds, into a folder that is thrown away
  python benchmarks/libraries.py --check            exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from interleaved import PeerMissingError, Worker
from libraries_table import LIBRARIES, PARTS, TASKS, print_table, read_rows

WORKER = Path(__file__).with_name("libraries_worker.py")
ROUNDS = {"speed": 6, "learning": 3, "overhead": 30, "play": 7}
"""Of a whole run; a round of learning is a seed."""
QUICK = {"speed": 2, "learning": 1, "overhead": 3, "play": 2}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="cartpole alone, one short seed, few rounds")
    parser.add_argument(
        "--part", action="append", choices=(*PARTS, "none"), help="only this; repeatable (default: all)"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/libraries"), help="of bundles (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    arguments = parser.parse_args()
    parts = [part for part in PARTS if part in (arguments.part or PARTS)]
    with tempfile.TemporaryDirectory() as thrown_away:
        folder = Path(thrown_away) if arguments.quick else arguments.output
        absent = _measure(parts, folder, quick=arguments.quick)
        found = read_rows(folder, quick=arguments.quick)
        short = absent + found.short
        print_table(found)
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


class _Library(Worker):
    """A library in a process of its own; opens sections, measures a round of one, and closes it into bundles."""

    def ask(self, question: str, **more: object) -> dict[str, Any]:
        """One request; everyone else waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"question": question, **more}) + "\n")
        self._process.stdin.flush()
        return self._answer()


Assignment = tuple[str, str, dict[str, object]]
"""Which library's process, the name of the section there, and what it is."""


def _measure(parts: Sequence[str], folder: Path, *, quick: bool) -> list[str]:
    """Run parts, each anew; returns the libraries that are absent or broke."""
    rounds = QUICK if quick else ROUNDS
    tasks = TASKS[:1] if quick else TASKS
    short: list[str] = []
    for part in parts:
        shutil.rmtree(folder / part, ignore_errors=True)
    if "speed" in parts and not quick:
        for task in tasks:
            with _Libraries(short) as workers:
                _run(workers, [_speed(name, task, folder) for name in LIBRARIES], rounds["speed"])
        parts = [part for part in parts if part != "speed"]
    if parts:
        with _Libraries(short) as workers:
            for part in parts:
                _run(workers, _assignments(part, folder, quick=quick), rounds[part])
    return short


def _speed(library: str, task: str, folder: Path) -> Assignment:
    return library, f"speed-{task}", {"task": task, "folder": str(folder / "speed" / f"{task}-{library}")}


def _assignments(part: str, folder: Path, *, quick: bool) -> list[Assignment]:
    if part == "speed":
        return [_speed(name, TASKS[0], folder) for name in LIBRARIES]
    if part == "play":
        from headrace._published import read_published

        shipped = {name: entry for name, entry in read_published().items() if not quick or entry["task"] == TASKS[0]}
        # checkpoints of our own need no library: they are dealt out
        owners = {
            name: entry["library"] if entry["library"] in LIBRARIES else LIBRARIES[place % len(LIBRARIES)]
            for place, (name, entry) in enumerate(shipped.items())
        }
        return [
            (owner, f"play-{name}", {"checkpoint": name, "folder": str(folder / part / name), "whole": not quick})
            for name, owner in owners.items()
        ]
    more: dict[str, object] = {"iterations": 8 if quick else 80} if part == "learning" else {}
    return [(name, part, {**more, "folder": str(folder / part / name)}) for name in LIBRARIES]


def _run(workers: dict[str, _Library], sections: Sequence[Assignment], rounds: int) -> None:
    """Open all sections, measure them in turn, close them. Only one process works at a time, but for the opening."""
    known = [section for section in sections if section[0] in workers]
    by_worker = {name: [section for section in known if section[0] == name] for name in workers}
    with ThreadPoolExecutor(max(1, len(workers))) as pool:
        list(pool.map(lambda name: _open(workers[name], by_worker[name]), workers))
    for number in range(rounds):
        for owner, name, _ in known if number % 2 == 0 else list(reversed(known)):
            workers[owner].ask("round", name=name)
    for owner, name, _ in known:
        workers[owner].ask("close", name=name)


def _open(worker: _Library, sections: Sequence[Assignment]) -> None:
    for _, name, more in sections:
        worker.ask("open", name=name, **more)


class _Libraries:
    """A process for every library that there is; those that cannot start are named in ``short``."""

    def __init__(self, short: list[str]) -> None:
        self._short = short
        self._workers: dict[str, _Library] = {}

    def __enter__(self) -> dict[str, _Library]:
        with ThreadPoolExecutor(len(LIBRARIES)) as pool:
            starting = {name: pool.submit(_Library, name, [sys.executable, str(WORKER), name]) for name in LIBRARIES}
        for name, one in starting.items():
            try:
                self._workers[name] = one.result()
            except PeerMissingError as error:
                self._short.append(f"{name} is absent or broken: {error}")
        return self._workers

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()


if __name__ == "__main__":
    sys.exit(main())
