"""How threads share the cores: env-steps per second of a loop of environment and policy under different settings.

  threads   of ``headrace.make``: physics and cameras (``HEADRACE_NUM_THREADS`` the same, for all kernels)
  torch     ``torch.set_num_threads``: the policy
  workers   processes, each with its share of the environments; their rates are added up

Loops: ``ant`` × 256 with a network of two layers of 256, and ``cartpole-camera`` × 64 with three convolutions. One
process per worker, all warm and waiting, measured in turn, round after round; the workers of one row run at once.
Bar: with one worker, ``threads`` = cores and one thread of torch are within 10 % of the best row of one worker.

  python benchmarks/threads.py            five rounds
  python benchmarks/threads.py --quick    two rounds, under a minute
  python benchmarks/threads.py --check    exit 1 if the bar falls short
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import Worker, serve

LOOPS = {"ant": 256, "cartpole-camera": 64}
CORES = len(os.sched_getaffinity(0))
BAR = 0.9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two short rounds; under a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if the bar falls short, naming it")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--torch", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _play(arguments)
        return 0
    return _compare(arguments)


def _settings() -> list[tuple[int, int, int]]:
    """(threads, torch, workers)."""
    alone = [(threads, torch, 1) for threads in (1, CORES) for torch in (1, CORES)]
    return [*alone, (1, 1, CORES), (CORES, CORES, CORES)]


def _compare(arguments: argparse.Namespace) -> int:
    rounds, seconds = (2, 0.6) if arguments.quick else (5, 1.0)
    rates: dict[tuple[int, int, int], dict[str, float]] = {setting: {} for setting in _settings()}
    for task in LOOPS:
        for setting, values in _measured(task, rounds, seconds).items():
            rates[setting][task] = statistics.median(values)
    heads = ["threads", "torch", "workers", *(f"{task} × {envs}" for task, envs in LOOPS.items())]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for setting, found in rates.items():
        row = [*(str(number) for number in setting), *(f"{found[task]:,.0f}" for task in LOOPS)]
        print("| " + " | ".join(row) + " |")
    short: list[str] = []
    for task in LOOPS:
        best = max(found[task] for setting, found in rates.items() if setting[2] == 1)
        ours = rates[CORES, 1, 1][task]
        if ours < BAR * best:
            short.append(f"{task}: threads={CORES}, torch=1 reaches {ours / best:.2f} of the best, bar ≥ {BAR}")
    for line in short:
        print(f"short: {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def _measured(task: str, rounds: int, seconds: float) -> dict[tuple[int, int, int], list[float]]:
    """Rates of every setting, round by round."""
    teams: dict[tuple[int, int, int], list[Worker]] = {setting: [] for setting in _settings()}
    try:
        for setting, team in teams.items():
            threads, torch, workers = setting
            command = [sys.executable, os.path.abspath(__file__), "--worker", task, "--seconds", str(seconds)]
            command += ["--envs", str(LOOPS[task] // workers), "--threads", str(threads), "--torch", str(torch)]
            numbers = {
                "HEADRACE_NUM_THREADS": str(threads),
                "OMP_NUM_THREADS": str(torch),
                "MKL_NUM_THREADS": str(torch),
            }
            for _ in range(workers):
                team.append(Worker(f"{task} {setting}", command, numbers))
        values: dict[tuple[int, int, int], list[float]] = {setting: [] for setting in teams}
        with ThreadPoolExecutor(CORES) as pool:
            for _ in range(rounds):
                for setting, team in teams.items():
                    values[setting].append(sum(pool.map(Worker.measure, team)))
        return values
    finally:
        for team in teams.values():
            for worker in team:
                worker.close()


def _play(arguments: argparse.Namespace) -> None:
    import torch

    import headrace

    torch.set_num_threads(arguments.torch)
    env = headrace.make(arguments.worker, arguments.envs, seed=0, threads=arguments.threads)
    obs, _ = env.reset(seed=0)
    policy = _policy(obs["policy"], env.single_action_space.shape[0])

    def step() -> None:
        nonlocal obs
        with torch.inference_mode():
            actions = policy(obs["policy"])
        obs = env.step(actions.clone()).obs

    def measure() -> float:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < arguments.seconds:
            step()
            steps += 1
        return steps * arguments.envs / (time.perf_counter() - start)

    for _ in range(5):
        step()
    serve({}, measure)


def _policy(obs: Any, actions: int) -> Any:
    """A small network of the usual kind, for numbers or for pictures."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if obs.dim() == 2:
        return nn.Sequential(
            nn.Linear(obs.shape[1], 256), nn.ELU(), nn.Linear(256, 256), nn.ELU(), nn.Linear(256, actions), nn.Tanh()
        )

    class Eye(nn.Module):
        """Three convolutions over (N, H, W, C) bytes."""

        def __init__(self) -> None:
            super().__init__()
            sizes = [int(obs.shape[-1]), 16, 32, 32]
            layers = [nn.Conv2d(a, b, 3, stride=2) for a, b in itertools.pairwise(sizes)]
            self.body = nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())], nn.Flatten())
            self.head = nn.LazyLinear(actions)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.head(self.body(image.permute(0, 3, 1, 2).float() / 255)))

    return Eye()


if __name__ == "__main__":
    sys.exit(main())
