"""What recording costs: the share of a step, bytes a second, and memory.

64 environments on two physics threads, all measured in turn on the same seeds:
  state    ant, random actions: observations, actions, rewards, flags and physics states
  images   pusher-camera: the same and a 64 × 64 RGB picture of every environment in every step
with
  alone      no recorder
  headrace   EpisodeRecorder: pages in memory, a file per finished episode in a thread, synced, journaled
  least      what any recorder must do: one copy per field and step, and in a thread the plain bytes of each ended
             episode in a synced file; no format, no checksums, no journal, so nothing could be read after a crash
  one file   how robomimic files are recorded elsewhere: a list of clones per environment and field; when episodes end,
             inside the step, they are stacked and written to one gzip-compressed HDF5 file, flushed once per batch
  LeRobot    its own writer (add_frame, save_episode) in .venv-lerobot, fed the pictures of one environment; the time
             of 64 environments is 64 times that, since it takes one episode at a time

Both cores step the physics, so every microsecond of copying (the step waits for it) and of writing (the thread takes a
core) is missing there: the share of "least" is what the copy and the writer must cost, measured in the same rounds. A
bar is at least two points of a step above it.

The share of recording is the median of 1 − alone / recording over pairs of rounds of 100 steps, one right after the
other, the writer's thread running beside them; every third pair has a round of one file. Each contestant
waits for its disk before the next one runs; the table has the time with and without that wait.

  python benchmarks/recording.py             the whole table, about three minutes
  python benchmarks/recording.py --quick     under a minute
  python benchmarks/recording.py --check     exit 1 and name each bar that falls short:
                                             state ≤ 5 % of a step, images ≤ 15 %, or two points more than
                                             "least" takes where that is more; memory ≤ 2 episodes an environment
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import h5py
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from headrace.envs.registry import make
from headrace.recording import EpisodeDataset, EpisodeRecorder, RecorderCfg
from headrace.types import ResetRecord, StepRecord
from interleaved import verdict

ROOT = Path(__file__).resolve().parent.parent
NUM_ENVS = 64
STEPS = 100
FIELDS = ("obs", "actions", "rewards", "flags", "states")
BARS = {"state": 0.05, "images": 0.15}
EPISODES_HELD = 2.0
LEAST_ROWS = {"state": 1024, "images": 256}
"""Steps that the least recorder has room for: the longest episode of the ant, two of the pusher."""
OVER_LEAST = 0.02
"""Share of a step for finding out what is recorded, pages per episode, format, checksums and the journal."""


@dataclass
class OneFile:
    """One HDF5 file, flushed per batch of ended episodes: a re-statement of the usual recorder, for comparison."""

    path: Path
    needs: frozenset = frozenset({"states", "frames"})
    file: Any = None
    episodes: list[dict[str, list[torch.Tensor]]] = field(default_factory=list)
    count: int = 0
    shown: Any = None
    """What the environments showed before the step; nobody writes into it here."""

    def after_reset(self, record: ResetRecord) -> None:
        self.shown = record.obs
        if self.file is None:
            self.file = h5py.File(self.path, "w")
            self.file.create_group("data")
            self.episodes = [{} for _ in range(NUM_ENVS)]

    def after_step(self, record: StepRecord) -> None:
        values = {f"obs/{name}": value for name, value in self.shown.items()}
        self.shown = record.step.obs
        values |= {"actions": record.actions, "rewards": record.step.reward, "states": record.states}
        values |= {"terminated": record.step.terminated, "truncated": record.step.truncated}
        for name, value in values.items():
            for slot in range(NUM_ENVS):
                self.episodes[slot].setdefault(name, []).append(value[slot].clone())
        ended = torch.nonzero(record.step.terminated | record.step.truncated).flatten().tolist()
        for slot in ended:
            group = self.file["data"].create_group(f"demo_{self.count}")
            self.count += 1
            for name, rows in self.episodes[slot].items():
                group.create_dataset(name, data=torch.stack(rows).numpy(), compression="gzip")
            self.episodes[slot] = {}
        if ended:
            self.file.flush()

    def flush(self) -> None:
        """It has written all there is to write inside the step."""

    def close(self) -> None:
        self.file.close()


@dataclass
class Least:
    """What any recorder must do: copy the fields of each step, and bring ended episodes to synced files in a thread.

    One array per field for all environments, bytes without a format, no checksum, no journal: nothing could be read
    back after a crash, and an episode longer than ``rows`` loses its beginning.
    """

    path: Path
    rows: int
    needs: frozenset = frozenset({"states", "frames"})
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    begins: list[int] = field(default_factory=lambda: [0] * NUM_ENVS)
    step: int = 0
    count: int = 0
    waiting: queue.Queue[tuple[int, int, int]] = field(default_factory=queue.Queue)

    def after_reset(self, record: ResetRecord) -> None:
        del record
        if not self.fields:
            self.path.mkdir()
            threading.Thread(target=self._write, daemon=True).start()

    def after_step(self, record: StepRecord) -> None:
        values = {f"obs/{name}": value for name, value in record.step.obs.items()}
        values |= {"actions": record.actions, "rewards": record.step.reward, "states": record.states}
        values |= {"terminated": record.step.terminated, "truncated": record.step.truncated}
        if not self.fields:
            # filled: the system clears memory at its first touch
            self.fields = {
                name: torch.ones(self.rows, *value.shape, dtype=value.dtype) for name, value in values.items()
            }
        for name, value in values.items():
            self.fields[name][self.step % self.rows].copy_(value)
        self.step += 1
        for slot in torch.nonzero(record.step.terminated | record.step.truncated).flatten().tolist():
            self.waiting.put((slot, max(self.begins[slot], self.step - self.rows), self.step))
            self.begins[slot] = self.step

    def _write(self) -> None:
        os.nice(5)
        while True:
            slot, begin, end = self.waiting.get()
            at = torch.arange(begin, end) % self.rows
            handle = os.open(self.path / str(self.count), os.O_WRONLY | os.O_CREAT)
            for values in self.fields.values():
                os.write(handle, values[at, slot].numpy().data)
            os.fsync(handle)
            os.close(handle)
            self.count += 1
            self.waiting.task_done()

    def flush(self) -> None:
        self.waiting.join()

    def close(self) -> None:
        self.flush()


class Contestant:
    """An environment of its own with its own recorder; all contestants go through the same episodes."""

    def __init__(self, task: str, recorder: Any) -> None:
        self.env = make(task, NUM_ENVS, threads=2)
        self.recorder = recorder
        self._generator = torch.Generator().manual_seed(0)
        space: Any = self.env.single_action_space
        self._low, self._span = torch.as_tensor(space.low), torch.as_tensor(space.high - space.low)
        if recorder is not None:
            self.env.attach(recorder)
        self.env.reset(seed=0)

    def run(self, steps: int) -> tuple[float, float]:
        """Seconds of ``steps`` steps, and seconds until everything is on disk as well."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        stepped = time.perf_counter() - begin
        if self.recorder is not None:
            self.recorder.flush()
        return stepped, time.perf_counter() - begin

    def watch_memory(self, steps: int) -> int:
        """Most bytes that the recorder held after any of ``steps`` steps."""
        most = 0
        for _ in range(steps):
            self._step()
            most = max(most, self.recorder.held_bytes())
        return most

    def _step(self) -> None:
        shape = (NUM_ENVS, *self._low.shape)
        self.env.step(self._low + self._span * torch.rand(shape, generator=self._generator))

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.env.close()


def median_share(alone: list[float], recording: list[float]) -> float:
    """Share of a step that recording takes, from rounds that ran one after the other."""
    return statistics.median(1 - a / b for a, b in zip(alone, recording, strict=True))


def measure(kind: str, rounds: int, folder: Path, tick: Any) -> dict[str, Any]:
    task = "ant" if kind == "state" else "pusher-camera"
    contestants = {
        "alone": Contestant(task, None),
        "headrace": Contestant(task, EpisodeRecorder(folder / kind, RecorderCfg(fields=FIELDS))),
        "least": Contestant(task, Least(folder / f"{kind}-least", LEAST_ROWS[kind])),
        "one file": Contestant(task, OneFile(folder / f"{kind}.hdf5")),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    drained: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        # half a period: the pusher's episodes, all 100 steps long, then end in the middle of a round
        contestant.run(STEPS // 2)
    tick()
    for number in range(rounds):
        # a share is small against what a shared machine does in a minute: many pairs, close together in time
        names = ["alone", "headrace", "least"] if number % 2 else ["least", "headrace", "alone"]
        for name in [*names, *(["one file"] if number % 3 == 0 else [])]:
            stepped, done = contestants[name].run(STEPS)
            times[name].append(stepped / STEPS)
            drained[name].append(done / STEPS)
            # what one contestant left in the page cache is not written out at the cost of the next
            os.sync()
        tick()
    held = contestants["headrace"].watch_memory(2 * STEPS)
    for contestant in contestants.values():
        contestant.close()
    entries = EpisodeDataset(folder / kind).entries
    longest = max(entry.size for entry in entries)
    return {
        "step_ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "drained_ms": {name: statistics.median(values) * 1e3 for name, values in drained.items()},
        "share": {
            "headrace": median_share(times["alone"], times["headrace"]),
            "least": median_share(times["alone"], times["least"]),
            "one file": median_share(times["alone"][::3], times["one file"]),
        },
        "mb_per_step": sum(entry.size for entry in entries) / sum(entry.length for entry in entries) * NUM_ENVS / 1e6,
        "held": held / (NUM_ENVS * longest),
    }


def measure_disk(dataset: Path, folder: Path, rounds: int) -> dict[str, float]:
    """MB/s of committing episodes, and of writing the same bytes plainly, with and without waiting for the disk."""
    from headrace.recording import DatasetInfo
    from headrace.recording._episode_file import EpisodeFile
    from headrace.recording._store import EpisodeStore

    @dataclass
    class Loaded:
        """An episode in memory, whole columns instead of pages."""

        meta: Any
        columns_: list[Any]
        group: str = "episodes"

        def columns(self) -> Any:
            return self.columns_

    episodes, contents = [], []
    for entry in EpisodeDataset(dataset).entries[:NUM_ENVS]:
        file = EpisodeFile(dataset / entry.file)
        episodes.append(Loaded(file.meta, [(file.field(name), [file.read(name)]) for name in file.names]))
        contents.append((dataset / entry.file).read_bytes())
    total = sum(map(len, contents)) / 1e6
    rates: dict[str, list[float]] = {"headrace": [], "plain, synced": [], "plain": []}
    for number in range(rounds):
        target = folder / f"disk-{number}"
        os.sync()
        store = EpisodeStore(target / "store", DatasetInfo())
        begin = time.perf_counter()
        for start in range(0, len(episodes), 8):
            store.commit(episodes[start : start + 8])
        rates["headrace"].append(total / (time.perf_counter() - begin))
        store.close()
        for name in ("plain, synced", "plain"):
            os.sync()
            (target / name).mkdir()
            begin = time.perf_counter()
            for index, content in enumerate(contents):
                with (target / name / str(index)).open("wb") as file:
                    file.write(content)
                    if name == "plain, synced":
                        file.flush()
                        os.fsync(file.fileno())
            rates[name].append(total / (time.perf_counter() - begin))
        shutil.rmtree(target)
    return {name: statistics.median(values) for name, values in rates.items()}


def measure_lerobot(dataset: Path, frames: int) -> float | str:
    """Milliseconds that LeRobot's own writer takes for one step of 64 environments, or why it did not run."""
    python = ROOT / ".venv-lerobot" / "bin" / "python"
    if not python.exists():
        return "absent: run scripts/setup_lerobot.sh"
    entry = EpisodeDataset(dataset).entries[0]
    command = [python, Path(__file__).with_name("recording_lerobot.py"), dataset / entry.file, str(frames)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {done.stderr.strip().splitlines()[-1]}"
    return json.loads(done.stdout.splitlines()[-1])["seconds_per_frame"] * NUM_ENVS * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--folder", metavar="DIR", help="disk to write to (default: the temporary folder)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 5 if arguments.quick else 21
    console = Console()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        folder = Path(name)
        bar = progress.add_task("measuring", total=2 * (rounds + 1) + 2)

        def tick() -> None:
            progress.advance(bar)

        results = {kind: measure(kind, rounds, folder, tick) for kind in BARS}
        disk = measure_disk(folder / "images", folder, 3)
        tick()
        lerobot = measure_lerobot(folder / "images", 30 if arguments.quick else 100)
        tick()
    rows = table_rows(results, disk, lerobot)
    table = Table(title=f"recording {NUM_ENVS} environments, medians of {rounds} interleaved rounds of {STEPS} steps")
    for head in ("what", "state (ant)", "images (pusher-camera, 64 × 64)"):
        table.add_column(head, justify="left" if head == "what" else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if arguments.markdown:
        lines = ["| what | state (ant) | images (pusher-camera, 64 × 64) |", "|---|---:|---:|"]
        Path(arguments.markdown).write_text("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n")
    return verdict(console, shortfalls(results, lerobot), check=arguments.check)


def table_rows(results: dict[str, Any], disk: dict[str, float], lerobot: float | str) -> list[list[str]]:
    state, images = results["state"], results["images"]

    def line(label: str, show: Any) -> list[str]:
        return [label, show(state), show(images)]

    rows = [line("step alone, ms", lambda r: f"{r['step_ms']['alone']:.2f}")]
    for name in ("headrace", "least", "one file"):
        rows.append(line(f"step with {name}, ms", lambda r, name=name: f"{r['step_ms'][name]:.2f}"))
    for name in ("headrace", "least", "one file"):
        rows.append(line(f"share of the step, {name}", lambda r, name=name: f"{r['share'][name]:.1%}"))
    rows.append(line("the same until all is on disk, headrace, ms", lambda r: f"{r['drained_ms']['headrace']:.2f}"))
    shown = f"{lerobot:.0f}" if isinstance(lerobot, float) else lerobot
    rows.append(["LeRobot's writer, ms per step of 64", "", shown])
    rows.append(line("recorded, MB per step", lambda r: f"{r['mb_per_step']:.3f}"))
    rows.append(line("most memory held, episodes per environment", lambda r: f"{r['held']:.2f}"))
    for name, rate in disk.items():
        ratio = f" ({rate / disk['plain, synced']:.0%} of synced)" if name == "headrace" else ""
        rows.append([f"disk, {name}, MB/s", "", f"{rate:.0f}{ratio}"])
    return rows


def shortfalls(results: dict[str, Any], lerobot: float | str) -> list[str]:
    failures = []
    for kind, bar in BARS.items():
        share, held = results[kind]["share"]["headrace"], results[kind]["held"]
        most = max(bar, results[kind]["share"]["least"] + OVER_LEAST)
        if share > most:
            failures.append(f"{kind}: recording takes {share:.1%} of a step, bar ≤ {most:.1%}")
        if held > EPISODES_HELD:
            failures.append(f"{kind}: {held:.2f} episodes per environment in memory, bar ≤ {EPISODES_HELD:g}")
    if isinstance(lerobot, str):
        failures.append(f"peer LeRobot {lerobot}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
