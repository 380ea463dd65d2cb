"""What it costs to evaluate over many processes: useful steps per second, the journal, a killed worker, the driver.

throughput  one plan of pusher-solid with the shipped policy, in one process with two threads, and over two Ray workers
            with one thread each; 16 environments a process. Rounds in turn; starting Ray and workers stated apart
journal     500 episodes in one process with a journal: the share of the time that writing and syncing rows takes
killed      a worker is ended with SIGKILL in the middle of a plan: env-steps that were played again
driver      the driver with 1,000 workers that only pretend, in one process: its CPU time per row and per block; bytes
            of a row. docs/scale.md calculates with these figures

python benchmarks/distributed.py             everything, about four minutes
python benchmarks/distributed.py --quick     under a minute on an idle machine
python benchmarks/distributed.py --check     exit 1 and name each bar that falls short:
                                             two workers ≥ 0.9 of one process, the table equal to the last bit;
                                             journal ≤ 1 % of the time; repeated work ≤ one block of env-steps
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import statistics
import sys
import tempfile
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import gymnasium
import ray
import torch
from rich.console import Console
from rich.table import Table

import headrace
from headrace import EnvRecipe, files
from headrace.evaluation import EpisodeResult, PlayCfg, WorkersCfg
from headrace.evaluation import player as evaluate_module
from headrace.evaluation._journal import Header, Journal
from headrace.evaluation._result import Counters
from headrace.evaluation.player import open_player
from headrace.evaluation.workers import Driver, _driver, _spec
from headrace.policies import as_chunk_policy
from headrace.policies.load_policy import load_policy
from headrace.policies.protocol import ChunkContext
from headrace.types import Obs
from interleaved import verdict

TASK = "pusher-solid"
NUM_ENVS = 16
BLOCK = 32
WORKERS = 1000
PARTS = ("throughput", "journal", "killed", "resets", "driver")
BARS = {"throughput": 0.9, "journal": 0.01}


@dataclass(frozen=True)
class Effort:
    rounds: int
    episodes: int
    """Of a round of the throughput."""
    journaled: int
    rows: int
    """Of each worker that pretends."""


QUICK, FULL = Effort(3, 96, 150, 8), Effort(7, 192, 500, 40)


def throughput(effort: Effort) -> dict[str, Any]:
    """Env-steps per second of both ways, round by round; seconds until two workers are ready."""
    recipe = EnvRecipe(TASK, num_envs=NUM_ENVS, threads=2)
    torch.set_num_threads(2)
    headrace.set_kernel_threads(2)
    rates: dict[str, list[float]] = {"one process": [], "two workers": []}
    env = recipe.make(autoreset="disabled", final_obs=False)
    begin, team = time.perf_counter(), WorkersCfg(count=2, block=BLOCK)
    with (
        open_player(env, None, PlayCfg(), 0) as evaluator,
        _driver(_spec(recipe.replace(threads=1), None, PlayCfg(), team), team) as driver,
    ):
        while len(driver._headers) < 2:
            driver._take(driver._wait())
        ready = time.perf_counter() - begin
        evaluator.play(range(10_000, 10_000 + NUM_ENVS))
        driver.play(range(10_000, 10_000 + 2 * BLOCK), None, progress=False)
        equal = True
        for number in range(effort.rounds):
            ids = range(number * effort.episodes, (number + 1) * effort.episodes)
            rows: dict[str, list[EpisodeResult]] = {name: [] for name in rates}
            for name in rates if number % 2 == 0 else reversed(rates):
                begin = time.perf_counter()
                if name == "one process":
                    evaluator.play(ids, rows[name].extend)
                else:
                    driver.play(ids, rows[name].extend, progress=False)
                rates[name].append(sum(row.length for row in rows[name]) / (time.perf_counter() - begin))
            equal &= sorted(rows["one process"]) == sorted(rows["two workers"])
    env.close()
    return {
        "rates": {name: statistics.median(values) for name, values in rates.items()},
        "ratio": statistics.median(b / a for a, b in zip(*rates.values(), strict=True)),
        "equal": equal,
        "ready": ready,
    }


def journal(effort: Effort, folder: Path) -> dict[str, float]:
    """The share of an evaluation that its journal takes; seconds and bytes per row.

    What counts: the time that the caller spends in the journal, until all is on disk, and the processor's time of the
    thread that syncs.
    """
    spent: list[float] = []

    def timed(call: Any, clock: Any) -> Any:
        def watched(*arguments: Any) -> None:
            begin = clock()
            try:
                call(*arguments)
            finally:
                spent.append(clock() - begin)

        return watched

    class Timed(Journal):
        add = timed(Journal.add, time.perf_counter)
        close = timed(Journal.close, time.perf_counter)

    class TimedDisk(files.Disk):
        sync = timed(files.Disk.sync, time.thread_time)

    before, files.disk = files.disk, TimedDisk()
    evaluate_module.Journal = Timed
    path = folder / "journal"
    begin = time.perf_counter()
    recipe = EnvRecipe(TASK, num_envs=NUM_ENVS, threads=2)
    found = headrace.evaluate(recipe, episodes=effort.journaled, journal=path, progress=False)
    seconds = time.perf_counter() - begin
    files.disk, evaluate_module.Journal = before, Journal
    lines = path.read_bytes().splitlines()
    return {
        # beside the playing alone: making environments and policy is no part of it
        "share": sum(spent) / found.counters.seconds,
        "seconds": seconds,
        "per_row": sum(spent) / effort.journaled,
        "bytes": sum(map(len, lines[1:])) / effort.journaled + 1,
    }


@dataclass
class Counted:
    """The shipped policy; notes in a file of each process how many chunks it planned."""

    directory: Path
    chunks: int = 0
    policy: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.policy = load_policy(None, EnvRecipe(TASK))
        self.horizon, self.action_dim, self.obs_steps = (
            getattr(self.policy, name) for name in ("horizon", "action_dim", "obs_steps")
        )

    def __call__(self, obs: Obs, context: ChunkContext) -> torch.Tensor:
        planned = self.policy(obs, context)
        # a strict batch is filled up with copies of a row that is in it
        self.chunks += len({*zip(context.episode_ids.tolist(), context.chunk_index.tolist(), strict=True)})
        (self.directory / f"process-{os.getpid()}").write_text(str(self.chunks))
        return planned

    def total(self) -> int:
        return sum(int(path.read_text() or 0) for path in self.directory.glob("process-*"))


def killed(folder: Path) -> dict[str, Any]:
    """Env-steps that are played again after a worker was killed in the middle of a plan, and those of its block."""
    whole, usual, _ = _counted(folder / "undisturbed", kill=False)
    table, planned, execute = _counted(folder / "killed", kill=True)
    longest = sorted((row.length for row in table), reverse=True)[:BLOCK]
    return {"repeated": max(planned - usual, 0) * execute, "block": sum(longest), "equal": table == whole}


def _counted(directory: Path, *, kill: bool) -> tuple[list[EpisodeResult], int, int]:
    """The table of a plan over two workers, the chunks that were planned for it, and the steps of a chunk."""
    directory.mkdir()
    policy = Counted(directory)
    seen: list[EpisodeResult] = []
    victims: list[int] = []

    def strike(rows: list[EpisodeResult]) -> None:
        seen.extend(rows)
        if kill and not victims and len(seen) > BLOCK:
            victims.append(min(int(path.name.partition("-")[2]) for path in directory.glob("process-*")))
            os.kill(victims[0], signal.SIGKILL)

    found = headrace.evaluate(
        EnvRecipe(TASK, num_envs=NUM_ENVS, threads=1),
        policy,
        episodes=4 * BLOCK,
        play=PlayCfg(policy_id="counted"),
        workers=WorkersCfg(count=2, block=BLOCK),
        progress=strike,
    )
    assert bool(victims) == kill
    return found.episodes, policy.total(), policy.horizon


class Scene(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A pendulum whose scene takes a while to set up; an episode ends at random, after 40 steps on average."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))

    def reset(self, **how: Any) -> Any:
        time.sleep(0.2)
        return self.env.reset(**how)

    def step(self, action: Any) -> Any:
        time.sleep(0.001)
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated, truncated or self.np_random.random() < 1 / 40, info


def resets(effort: Effort) -> dict[str, Any]:
    """Seconds of the same plan with resets between steps and in the background."""
    policy = as_chunk_policy(lambda obs: obs["policy"][:, None, 2:].expand(-1, 4, -1), horizon=4, action_dim=1)
    seconds: dict[str, list[float]] = {"between steps": [], "in the background": []}
    tables: list[list[EpisodeResult]] = []
    for _ in range(max(effort.rounds // 2, 1)):
        for name, values in seconds.items():
            env = headrace.bridge([Scene] * 8, autoreset="disabled", final_obs=False, executor="threads", workers=8)
            env.overlaps_resets = name == "in the background"
            begin = time.perf_counter()
            tables.append(headrace.evaluate(env, policy, episodes=64, progress=False).episodes)
            values.append(time.perf_counter() - begin)
            env.close()
    found = {name: statistics.median(values) for name, values in seconds.items()}
    return {"seconds": found, "equal": all(table == tables[0] for table in tables)}


@ray.remote(max_concurrency=WORKERS)
class Many:
    """Every worker that pretends: sends its rows one by one, as fast as it can."""

    async def open(self, number: int) -> tuple[Header, str]:
        del number
        identity = {"source": TASK, "policy": "x", "strict_size": 16, "fidelity": "native"}
        return Header(identity=identity, circumstances={"processor": "x"}), "here"

    async def play(self, ids: list[int]) -> Any:
        for episode in ids:
            yield [_row(episode)]
        yield Counters(env_steps=100 * len(ids), batch_steps=1)


def _row(episode: int) -> EpisodeResult:
    return EpisodeResult(
        episode_id=episode, seed=0, reward=-31.123456789, length=100, success=True, diverged=False, instruction=""
    )


def driver_cost(effort: Effort) -> dict[str, float]:
    """CPU seconds of the driver with 1,000 workers, its Ray threads included."""
    many = Many.remote()
    ray.get(many.open.remote(0))

    def make(number: int) -> Any:
        opening = types.SimpleNamespace(remote=lambda: many.open.remote(number))
        return types.SimpleNamespace(open=opening, play=many.play)

    driver = Driver(make, workers=WORKERS, num_envs=64, block=effort.rows)
    while len(driver._headers) < WORKERS:
        driver._take(driver._wait())
    begin, wall = time.process_time(), time.perf_counter()
    rows = WORKERS * effort.rows
    found = driver.play(range(rows), None, progress=False)
    assert found.unfinished == 0
    cpu, wall = time.process_time() - begin, time.perf_counter() - wall
    ray.kill(many)
    return {"cpu_per_row": cpu / rows, "rows_per_s": rows / wall, "bytes": len(pickle.dumps([_row(10**6)]))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    parts = arguments.part or PARTS
    rows: list[list[str]] = []
    failures: list[str] = []
    begin = time.perf_counter()
    # room for two workers and for the one that pretends to be a thousand
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    rows.append(["Ray on this machine ready, s", f"{time.perf_counter() - begin:.1f}"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "throughput" in parts:
            _throughput_rows(throughput(effort), rows, failures)
        if "journal" in parts:
            found = journal(effort, folder)
            rows.append([f"journal of {effort.journaled} episodes, share of the time", f"{found['share']:.2%}"])
            rows.append(["journal, ms per row, synced", f"{found['per_row'] * 1e3:.2f}"])
            rows.append(["journal, bytes per row", f"{found['bytes']:.0f}"])
            if found["share"] > BARS["journal"]:
                failures.append(f"journal: {found['share']:.2%} of the time, bar ≤ {BARS['journal']:.0%}")
        if "killed" in parts:
            found = killed(folder)
            rows.append(["env-steps played again after a killed worker", f"{found['repeated']:,}"])
            rows.append([f"env-steps of a block of {BLOCK}", f"{found['block']:,}"])
            if found["repeated"] > found["block"]:
                failures.append(f"killed: {found['repeated']} env-steps again, bar ≤ {found['block']}, one block")
            if not found["equal"]:
                failures.append("killed: the table is another one")
        if "resets" in parts:
            found = resets(effort)
            for name, seconds in found["seconds"].items():
                rows.append([f"64 episodes, resets of 0.2 s {name}, s", f"{seconds:.2f}"])
            if not found["equal"]:
                failures.append("resets: the tables differ")
        if "driver" in parts:
            found = driver_cost(effort)
            rows.append([f"driver with {WORKERS:,} workers, CPU µs per row", f"{found['cpu_per_row'] * 1e6:.0f}"])
            rows.append(["the same, rows per second", f"{found['rows_per_s']:,.0f}"])
            rows.append(["a row on the wire, bytes", f"{found['bytes']:.0f}"])
    ray.shutdown()
    return _report(rows, failures, arguments)


def _throughput_rows(found: dict[str, Any], rows: list[list[str]], failures: list[str]) -> None:
    rows.append(["two workers ready, s", f"{found['ready']:.1f}"])
    for name, threads in (("one process", "two threads"), ("two workers", "one thread each")):
        rows.append([f"{name}, {threads}, useful steps/s", f"{found['rates'][name]:,.0f}"])
    rows.append(["two workers : one process", f"{found['ratio']:.2f}"])
    if found["ratio"] < BARS["throughput"]:
        failures.append(f"throughput: {found['ratio']:.2f} of one process, bar ≥ {BARS['throughput']}")
    if not found["equal"]:
        failures.append("throughput: the tables differ")


def _report(rows: list[list[str]], failures: list[str], arguments: argparse.Namespace) -> int:
    console = Console()
    table = Table("what", title="evaluation over processes, medians of interleaved rounds")
    table.add_column("measured", justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if arguments.markdown:
        lines = ["| what | measured |", "|---|---:|", *(f"| {' | '.join(row)} |" for row in rows)]
        Path(arguments.markdown).write_text("\n".join(lines) + "\n")
    return verdict(console, failures, check=arguments.check)


if __name__ == "__main__":
    sys.exit(main())
