"""Env-steps per second of whole environments, compared with the peers and with the raw physics.

Contestants, one process each, measured in turn:
  headrace     headrace.make(task), 2 physics threads
  half, tenth  the same with half, or 90 %, of the environments suspended: milliseconds per step of the batch. Each
               environment acts in one of the two halves, or ten tenths, so that the same bodies are stepped as by all
  raw          mujoco.batch.Batch.step alone, over the very same states and controls: the physical limit
  envpool      EnvPool 1.2.5, 2 threads, without contact forces, as ours
  sync, async  Gymnasium's vector environments. Async runs a process per environment and is measured with 16.

Every measurement begins in the same states: those after 60 steps.

  python benchmarks/stepping.py            the whole table, about 12 minutes
  python benchmarks/stepping.py --sizes 16 only batches of 16, about two minutes
  python benchmarks/stepping.py --sizes 1024 --tasks ant     a part of it, in about a minute
  python benchmarks/stepping.py --quick    the three tasks at 256, without Gymnasium's, under a minute
  python benchmarks/stepping.py --check    exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import median_ratio, python_of, rounds, serve, started, verdict

GYMNASIUM = {
    "inverted-pendulum": ("InvertedPendulum-v5", {}),
    "ant": ("Ant-v5", {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0}),
    "humanoid": ("Humanoid-v5", {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0}),
}
ENVPOOL = {
    "inverted-pendulum": {},
    "ant": {"use_contact_force": False, "post_constraint": False, "contact_cost_weight": 0.0},
    "humanoid": {"use_contact_force": False, "post_constraint": False, "contact_cost_weight": 0.0},
}
ACTION = {"inverted-pendulum": (1, 3.0), "ant": (8, 1.0), "humanoid": (17, 0.4)}
SIZES = (1, 16, 256, 1024)
FIXED = {"inverted-pendulum": 100.0, "ant": 100.0, "humanoid": 130.0}  # most µs per step of 16, beside the physics
SUSPENDED = {"half": 2, "tenth": 10}  # the environments act in so many parts, one at a time
SETTLE = 60  # steps before measuring, so that bodies have fallen and episodes are out of phase


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: batches of 256, short rounds")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, help="how many environments; 1, 16, 256 and 1024"
    )
    parser.add_argument("--tasks", nargs="+", choices=list(ACTION), default=list(ACTION))
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--num-envs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _WORKERS[arguments.worker](arguments.task, arguments.num_envs, arguments.seconds)
        return 0
    return _compare(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(width=None if sys.stdout.isatty() else 160)
    quick = arguments.quick
    plan = [(task, size) for task in arguments.tasks for size in ((256,) if quick else arguments.sizes)]
    count, seconds = (3, 0.5) if quick else (5, 0.8)
    results: dict[tuple[str, int], dict[str, list[float]]] = {}
    missing: list[str] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("measuring", total=len(plan))
        for task, size in plan:
            progress.update(bar, description=f"{task} × {size}")
            results[task, size] = _measured(task, size, count, seconds, missing, quick)
            progress.advance(bar)
    imports = _import_seconds()
    memory = {} if quick else {task: _memory_per_env(task) for task in arguments.tasks}
    table, markdown = _tables(results, imports, memory)
    console.print(table)
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(markdown)
    return verdict(console, sorted(set(missing)) + _shortfalls(results, imports), check=arguments.check)


def _measured(
    task: str, size: int, count: int, seconds: float, missing: list[str], quick: bool
) -> dict[str, list[float]]:
    ours, envpool = sys.executable, str(python_of(".venv-envpool"))
    contestants = {"headrace": ours, "raw": ours, "envpool": envpool, "sync": ours, "async": ours}
    if size >= 256:
        contestants |= {"half": ours, "tenth": ours}
    if size > 256 or quick:
        del contestants["sync"]  # a Python loop is no faster with more of them; 1,024 models take minutes to load
    if size != 16:
        del contestants["async"]
    fixed = ["--task", task, "--num-envs", str(size), "--seconds", str(seconds)]
    here = os.path.abspath(__file__)
    commands = {name: [python, here, "--worker", name, *fixed] for name, python in contestants.items()}
    workers = started(commands, {}, missing)
    try:
        return rounds(workers, count)
    finally:
        for worker in workers:
            worker.close()


def _shortfalls(results: dict[tuple[str, int], dict[str, list[float]]], imports: float) -> list[str]:
    """Every bar that does not hold, with the figure reached."""
    failures: list[str] = []

    def bar(what: str, reached: float, wanted: float, *, at_most: bool = False) -> None:
        if (reached > wanted) if at_most else (reached < wanted):
            failures.append(f"{what}: {reached:.2f}, bar {'≤' if at_most else '≥'} {wanted}")

    for (task, size), values in results.items():
        where = f"{task} at {size}"
        big = task != "inverted-pendulum"
        if "envpool" in values and (big or size == 16):
            bar(f"{where} × EnvPool", median_ratio(values["headrace"], values["envpool"]), 1.05 if big else 0.9)
        peers = [values[name] for name in ("sync", "async") if name in values]
        if big and peers and size > 1:
            bar(f"{where} × the better Gymnasium", min(median_ratio(values["headrace"], p) for p in peers), 2.0)
        if "raw" in values and size > 1:
            least = {"ant": 0.92, "humanoid": 0.9}.get(task, 0.6) if size == 16 else 0.85 if big else 0.9
            bar(f"{where} × raw physics", median_ratio(values["headrace"], values["raw"]), least)
        if "raw" in values and size == 16:
            bar(f"{where}, µs per step beside the physics", _fixed(values, size), FIXED[task], at_most=True)
        for name, most in (("half", 0.6), ("tenth", 0.2)):
            if name in values:
                whole = [size / rate for rate in values["headrace"]]
                part = [1 / rate for rate in values[name]]
                bar(
                    f"{where}, {1 - 1 / SUSPENDED[name]:.0%} suspended, time",
                    median_ratio(part, whole),
                    most,
                    at_most=True,
                )
    bar("import headrace after torch, seconds", imports, 0.2, at_most=True)
    return failures


def _tables(
    results: dict[tuple[str, int], dict[str, list[float]]], imports: float, memory: dict[str, float]
) -> tuple[Any, str]:
    from rich.table import Table

    heads = [
        "task",
        "N",
        "headrace",
        "raw",
        "× raw",
        "fixed µs",
        "EnvPool",
        "× EnvPool",
        "Sync",
        "Async",
        "50 % susp.",
        "90 % susp.",
    ]
    table = Table(
        title="env-steps per second, medians of interleaved rounds; fixed: µs per step beside the physics; "
        "suspended: time of a step compared with all acting"
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for head in heads:
        table.add_column(head, justify="left" if head == "task" else "right")
    for (task, size), values in results.items():
        row = [task, str(size)]
        row += [_rate(values, "headrace"), _rate(values, "raw"), _ratio(values, "raw")]
        row.append(f"{_fixed(values, size):,.0f}" if "raw" in values else "–")
        row += [_rate(values, "envpool"), _ratio(values, "envpool"), _rate(values, "sync"), _rate(values, "async")]
        for name in SUSPENDED:
            if name in values:
                whole = [size / rate for rate in values["headrace"]]
                row.append(f"{median_ratio([1 / rate for rate in values[name]], whole):.2f}")
            else:
                row.append("–")
        table.add_row(*row)
        lines.append("| " + " | ".join(row) + " |")
    held = ", ".join(f"{task} {size / 1024:.1f} KiB" for task, size in memory.items()) or "not measured"
    table.caption = f"memory per environment: {held}; import headrace after torch: {imports:.3f} s"
    return table, "\n".join(
        lines
    ) + f"\n\nMemory per environment: {held}. `import headrace` adds {imports:.3f} s to torch's.\n"


def _rate(values: dict[str, list[float]], name: str) -> str:
    return f"{statistics.median(values[name]):,.0f}" if name in values else "–"


def _ratio(values: dict[str, list[float]], name: str) -> str:
    return f"{median_ratio(values['headrace'], values[name]):.2f}" if name in values else "–"


def _fixed(values: dict[str, list[float]], size: int) -> float:
    """µs per step of the batch beside the physics: resets, task, bookkeeping, tensors. Median over the rounds."""
    pairs = zip(values["headrace"], values["raw"], strict=True)
    return statistics.median((size / ours - size / raw) * 1e6 for ours, raw in pairs)


def _import_seconds() -> float:
    code = "import time, torch; t = time.perf_counter(); import headrace; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return statistics.median(float(run.stdout) for run in runs)


def _memory_per_env(task: str) -> float:
    """Bytes of resident memory that one more environment takes, from 64 and 2,112 of them."""
    code = (
        "import sys, torch, psutil, headrace; task, few, many = sys.argv[1], 64, 2112\n"
        "def held(n):\n"
        "    env = headrace.make(task, n, threads=2); env.reset()\n"
        "    for _ in range(3): env.step(torch.zeros(env.action_space.shape))\n"
        "    return env, psutil.Process().memory_info().rss\n"
        "a, first = held(few); b, second = held(many); print((second - first) / many)"
    )
    run = subprocess.run([sys.executable, "-c", code, task], capture_output=True, text=True, check=True)
    return max(0.0, float(run.stdout))


# --- workers ---------------------------------------------------------------------------------------------------------


def _timed(step: Any, per_step: int, seconds: float) -> float:
    """``per_step`` things a call, per second, over at least ``seconds``."""
    calls, begin = 0, time.perf_counter()
    while (spent := time.perf_counter() - begin) < seconds or calls < 3:
        step()
        calls += 1
    return calls * per_step / spent


def _numpy_actions(task: str, size: int) -> list[Any]:
    import numpy as np

    width, reach = ACTION[task]
    generator = np.random.default_rng(0)
    return [generator.uniform(-reach, reach, (size, width)).astype(np.float32) for _ in range(64)]


def _headrace_worker(task: str, size: int, seconds: float, parts: int = 1) -> None:
    """Env-steps per second; with several parts, of which one acts at a time, steps of the batch per second."""
    import torch

    import headrace

    torch.set_num_threads(1)
    env = headrace.make(task, size, seed=0, threads=2)
    env.reset(seed=0)
    actions = [torch.from_numpy(a) for a in _numpy_actions(task, size)]
    at = 0

    def step() -> None:
        nonlocal at
        env.step(actions[at % 64])
        at += 1

    for _ in range(SETTLE):
        step()
    begin = env.state_dict()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))

    def measure() -> float:
        nonlocal at
        spent = 0.0
        for part in range(parts):
            env.load_state_dict(begin)
            at = SETTLE
            env.suspend(order[torch.arange(size) % parts != part])
            spent += 1 / _timed(step, 1, seconds / parts)
        return (size if parts == 1 else 1) * parts / spent

    serve({}, measure)


def _raw_worker(task: str, size: int, seconds: float) -> None:
    """Replay what our environment did (controls, and the states its resets wrote) with nothing but the physics."""
    import torch

    import headrace

    torch.set_num_threads(1)
    env = headrace.make(task, size, seed=0, threads=2)
    env.reset(seed=0)
    actions = _numpy_actions(task, size)
    for i in range(SETTLE):
        env.step(torch.from_numpy(actions[i % 64]))
    first = env.sim.states(None).numpy().copy()
    script = []
    for i in range(SETTLE, SETTLE + (64 if size > 256 else 128)):
        step = env.step(torch.from_numpy(actions[i % 64]))
        ended = step.info["ends"].env_ids if "ends" in step.info else torch.empty(0, dtype=torch.int64)
        script.append((actions[i % 64], ended.numpy(), env.sim.states(ended).numpy()))
    import mujoco.batch

    batch = mujoco.batch.Batch(env.task.model, nsim=size, nthread=2)
    ctrl, substeps, at = batch.bind("ctrl"), env.task.cfg.decimation, 0

    def step_physics() -> None:
        nonlocal at
        if at == 0:
            batch.state[:] = first
        control, ended, states = script[at]
        ctrl[:] = control
        batch.step(nstep=substeps)
        batch.state[ended] = states
        at = (at + 1) % len(script)

    def measure() -> float:
        nonlocal at
        at = 0
        return _timed(step_physics, size, seconds)

    serve({}, measure)


def _envpool_worker(task: str, size: int, seconds: float) -> None:
    import envpool

    env = envpool.make(GYMNASIUM[task][0], env_type="gymnasium", num_envs=size, num_threads=2, seed=0, **ENVPOOL[task])
    env.reset()
    _serve_numpy(env, _numpy_actions(task, size), size, seconds)


def _gymnasium_worker(task: str, size: int, seconds: float, mode: str) -> None:
    import gymnasium

    name, settings = GYMNASIUM[task]
    env = gymnasium.make_vec(name, num_envs=size, vectorization_mode=mode, **settings)
    env.reset(seed=0)
    _serve_numpy(env, _numpy_actions(task, size), size, seconds)


def _serve_numpy(env: Any, actions: list[Any], size: int, seconds: float) -> None:
    at = 0

    def step() -> None:
        nonlocal at
        env.step(actions[at % 64])
        at += 1

    for _ in range(SETTLE):
        step()
    serve({}, lambda: _timed(step, size, seconds))


_WORKERS = {
    "headrace": _headrace_worker,
    "half": lambda task, size, seconds: _headrace_worker(task, size, seconds, SUSPENDED["half"]),
    "tenth": lambda task, size, seconds: _headrace_worker(task, size, seconds, SUSPENDED["tenth"]),
    "raw": _raw_worker,
    "envpool": _envpool_worker,
    "sync": lambda task, size, seconds: _gymnasium_worker(task, size, seconds, "sync"),
    "async": lambda task, size, seconds: _gymnasium_worker(task, size, seconds, "async"),
}

if __name__ == "__main__":
    sys.exit(main())
