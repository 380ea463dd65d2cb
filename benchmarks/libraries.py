"""Four RL libraries on our environments: learning, speed, memory, the cost of our adapters, and playing.

  learning   cartpole, 64 environments, three seeds: seconds of training until the last 50 episodes reach 95 % of the
             best return (300), and their mean return when the run ends; means with 95 % bootstrap intervals
  speed      cartpole, ant and cartpole-camera at a fixed number of frames: collecting and learning frames/s, and the
             peak memory of the process, which trains this one library on this one task
  overhead   the time to collect a rollout with our adapter over an environment that does nothing, against the library's
             own loop over an environment that does nothing in the library's own interface. Native: constant tensors or
             arrays, handed out as the library wants them. Ours: the same constants as a BatchEnv gives them, with all
             that an adapter does: scaled and cut actions, scaled rewards, groups, flags, infos. 256 environments, 48
             observations, 12 actions. rsl_rl runs OnPolicyRunner.learn, rl_games train_epoch, sb3 collect_rollouts in
             both; skrl runs its SequentialTrainer natively and our learner's loop over its agent with the adapter.
             The seconds of learning are left out, both sides have the same networks. Bar: <= 5 %
  play       each checkpoint saved, loaded into a fresh learner and played: frames/s, as a share of what env.step alone
             reaches with the same actions from the same state

One process a library and task, all warm and waiting; measured in turn, in reversed order every other round. Figures
are medians over rounds, ratios are medians of ratios within a round. One thread for torch. An absent library falls
short.

  python benchmarks/libraries.py             everything: three tasks, three seeds
  python benchmarks/libraries.py --quick     cartpole alone, one seed, two rounds
  python benchmarks/libraries.py --check     exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from interleaved import PeerMissingError, Worker

LIBRARIES = ("rsl_rl", "rl_games", "skrl", "sb3")
TASKS = ("cartpole", "ant", "cartpole-camera")
WORKER = Path(__file__).with_name("libraries_worker.py")
BEST = 300.0
BAR = 1.05

Row = tuple[str, str, str, str, str]
"""section, case, library, measure, ratio"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="cartpole alone, one seed, fewer rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--note", default="", help="a sentence for the Markdown page: what else the machine did")
    arguments = parser.parse_args()
    rows: list[Row] = []
    short: list[str] = []
    begin = time.perf_counter()
    for task in TASKS[:1] if arguments.quick else TASKS:
        found, missed = _measure(task, arguments.quick)
        rows += found
        short += missed
    rows.sort(key=lambda row: ("learning", "speed", "overhead", "play").index(row[0]))
    _print(rows)
    if arguments.markdown:
        minutes = (time.perf_counter() - begin) / 60
        Path(arguments.markdown).write_text(_markdown(rows, short, arguments, minutes))
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


# --- parent -------------------------------------------------------------------------------------------------------


class _Library(Worker):
    """A library on a task, in a process of its own; answers questions with records of numbers."""

    def ask(self, question: str, **more: float) -> dict[str, Any]:
        """One measurement; everyone else waits."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"question": question, **more}) + "\n")
        self._process.stdin.flush()
        return self._answer()


def _measure(task: str, quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    short: list[str] = []
    with ThreadPoolExecutor(len(LIBRARIES)) as pool:
        starting = {name: pool.submit(_start, name, task) for name in LIBRARIES}
    workers: list[_Library] = []
    for name, one in starting.items():
        try:
            workers.append(one.result())
        except PeerMissingError as error:
            short.append(f"{task}: {name} is absent or broken: {error}")
            rows.append(("speed", task, name, "absent", ""))
    try:
        found = _rounds(workers, 2 if quick else 5, "train", iterations=2)
        rows += [_speed_row(task, name, found) for name in found]
        found = _rounds(workers, 2 if quick else 3, "play", steps=60)
        for name, answers in found.items():
            rate = statistics.median(answer["frames"] / answer["play"] for answer in answers)
            share = statistics.median(answer["bare"] / answer["play"] for answer in answers)
            rows.append(("play", task, name, f"{rate:,.0f} frames/s", f"{share:.2f} of env.step"))
        if task == "cartpole":
            found = _rounds(workers, 3 if quick else 15, "overhead", pairs=4)
            for name, answers in found.items():
                ratio = statistics.median(answer["adapter"] / answer["native"] for answer in answers)
                step = statistics.median(answer["native"] for answer in answers) * 1e6
                rows.append(("overhead", "do nothing", name, f"native {step:,.0f} µs/step", f"{ratio:.3f}×"))
                if ratio > BAR:
                    short.append(f"overhead of {name}: expected ≤ {BAR:.2f}× its own loop, got {ratio:.3f}×")
            rows += _learning(workers, quick)
    finally:
        for worker in workers:
            worker.close()
    return rows, short


def _start(library: str, task: str) -> _Library:
    return _Library(library, [sys.executable, str(WORKER), library, task])


def _rounds(workers: list[_Library], count: int, question: str, **more: float) -> dict[str, list[dict[str, Any]]]:
    answers: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for i in range(count):
        for worker in workers if i % 2 == 0 else list(reversed(workers)):
            answers[worker.name].append(worker.ask(question, **more))
    return answers


def _speed_row(task: str, name: str, found: dict[str, list[dict[str, Any]]]) -> Row:
    collect, learn = (
        statistics.median(answer["frames"] / answer[key] for answer in found[name]) for key in ("collect", "learn")
    )
    first = found[next(iter(found))]
    ratio = statistics.median(
        (a["collect"] + a["learn"]) / (b["collect"] + b["learn"]) for a, b in zip(first, found[name], strict=True)
    )
    frames = sum(answer["frames"] for answer in found[name])
    text = f"collect {collect:,.0f}, learn {learn:,.0f} frames/s, {found[name][-1]['megabytes']:,.0f} MB"
    return "speed", f"{task}, {frames:,} frames", name, text, f"{ratio:.2f} of {next(iter(found))}"


def _learning(workers: list[_Library], quick: bool) -> list[Row]:
    import numpy as np

    from headrace.statistics import bootstrap_interval

    seeds, iterations = (1, 15) if quick else (3, 80)
    found: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for seed in range(seeds):
        for worker in workers if seed % 2 == 0 else list(reversed(workers)):
            found[worker.name].append(worker.ask("learn", seed=seed, iterations=iterations))
    rows: list[Row] = []
    for name, runs in found.items():
        reached = [run["seconds"] for run in runs if run["seconds"] is not None]
        final = bootstrap_interval(np.array([run["final"] for run in runs]))
        text = f"return {final.value:.0f} [{final.low:.0f}, {final.high:.0f}] after {iterations} iterations"
        when = f"0 of {seeds} reached it"
        if reached:
            time_to = bootstrap_interval(np.array(reached))
            when = f"{time_to.value:.1f} s [{time_to.low:.1f}, {time_to.high:.1f}], {len(reached)} of {seeds} seeds"
        rows.append(("learning", f"cartpole to {0.95 * BEST:.0f}", name, text, when))
    return rows


# --- output -------------------------------------------------------------------------------------------------------


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="RL libraries")
    for column in ("section", "case", "library"):
        table.add_column(column)
    table.add_column("median", justify="right")
    table.add_column("ratio or time", justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def _markdown(rows: list[Row], short: list[str], arguments: argparse.Namespace, minutes: float) -> str:
    from headrace.adapters.library import library_version

    head = "| section | case | library | median | ratio or time |\n|---|---|---|---:|---:|\n"
    table = head + "".join("| " + " | ".join(row) + " |\n" for row in rows)
    bars = "\n".join(f"- **falls short**: {line}" for line in short) or "All of them hold."
    quick = " --quick" if arguments.quick else ""
    versions = ", ".join(f"{name} {library_version(name)}" for name in LIBRARIES)
    note = f" {arguments.note}" if arguments.note else ""
    return f"""# RL libraries side by side

Made by `python benchmarks/libraries.py --check{quick} --markdown docs/benchmarks/libraries.md` in {minutes:.1f} minutes
on two cores; torch has one thread. {versions}; `pip install 'headrace[rsl-rl,rl-games,skrl,sb3]'`.{note}

The same PPO for all ([settings](../training.md)): network, batch, epochs, learning rate, discount. One process a
library and task, measured in turn, medians over rounds.

{table}
- **learning**: 64 environments. Mean return of the last 50 episodes when the run ends, and seconds of training until
  that mean is 95 % of the best return (300); 95 % bootstrap intervals over seeds.
- **speed**: a fixed number of frames; collecting and learning apart, peak resident memory of the process, and frames/s
  of both together against the first library. `cartpole` has 256 environments, `ant` 64, `cartpole-camera` 32 with two
  gray pictures of 48 × 48.
- **overhead**: seconds to collect a step with our adapter over a do-nothing environment in the form of `BatchEnv`,
  divided by those of the library's own loop over a do-nothing environment in the library's own interface. Both hand
  out constants; 256 environments, 48 observations, 12 actions. The adapter's side has all that it does: actions cut
  and scaled, rewards scaled, groups, flags, infos. The loops are `OnPolicyRunner.learn` (rsl_rl), `train_epoch`
  (rl_games) and `collect_rollouts` (sb3) on both sides; skrl has its `SequentialTrainer` on the native side and our
  loop over its agent on the other. Learning is left out.
- **play**: a checkpoint saved, loaded into a fresh learner and played, and its share of the frames/s of `env.step`
  alone with the same actions from the same state.

## Bars

Adapters cost at most 5 % of the library's own loop; every library is there.

{bars}
"""


if __name__ == "__main__":
    sys.exit(main())
