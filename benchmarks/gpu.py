"""What a GPU makes of it: correctness against the CPU path, throughput, the cost of suspension, memory. One table.

No figure of this script is in the docs: it has not been run on a GPU. If you have one, send the table back.

  python benchmarks/gpu.py             about ten minutes: cartpole and ant with 256, 1024 and 4096 environments
  python benchmarks/gpu.py --quick     cartpole with 256, under a minute once kernels are compiled
  python benchmarks/gpu.py --check     exit 1 and name each bar that falls short; without a GPU that is every bar

Bars: every comparison of ``headrace doctor --gpu`` holds; a step with half of the environments suspended takes at most
1.25 times as long as one with none, with one in sixteen active at most 0.75 times.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import headrace
from headrace.testing.parts import check_gpu

WARM_UP, STEPS = 20, 100
BARS = {"half": 1.25, "a sixteenth": 0.75}


def seconds_per_step(env: headrace.BatchEnv, active: int) -> float:
    """The median of five rounds, with the first ``active`` environments acting."""
    env.resume(list(range(env.num_envs)))
    env.suspend(list(range(active, env.num_envs)))
    actions = torch.zeros(env.action_space.shape, device=env.device)
    for _ in range(WARM_UP):
        env.step(actions)
    rounds: list[float] = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS // 5):
            env.step(actions)
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / (STEPS // 5))
    return sorted(rounds)[2]


def measure(task: str, num_envs: int) -> tuple[list[str], list[str]]:
    """A row of the table, and what falls short."""
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    env = headrace.make(task, num_envs, device="cuda", sim="warp")
    env.reset(seed=0)
    whole = seconds_per_step(env, num_envs)
    shares = {"half": seconds_per_step(env, num_envs // 2), "a sixteenth": seconds_per_step(env, num_envs // 16)}
    used = (free - torch.cuda.mem_get_info()[0]) / 2**20
    diverged = env.divergences
    env.close()
    short = [
        f"{task}, {num_envs}: {share} active takes {taken / whole:.2f} of a whole step (bar {BARS[share]})"
        for share, taken in shares.items()
        if taken > BARS[share] * whole
    ]
    ratios = [f"{taken / whole:.2f}" for taken in shares.values()]
    return [task, f"{num_envs}", f"{num_envs / whole:,.0f}", *ratios, f"{used:,.0f}", f"{diverged}"], short


def main() -> int:
    """Print the table; the exit code says whether bars hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device that torch can use: nothing was measured")
        return 1 if options.check else 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, headrace {headrace.__version__}\n")
    short: list[str] = []
    print("| compared with the CPU | holds | found |\n|---|---|---|")
    for check in check_gpu():
        print(f"| {check.name} | {'yes' if check.ok else 'NO'} | {check.found} |")
        short += [] if check.ok else [f"{check.name}: {check.found}"]
    print("\n| task | environments | steps per second | half active | a sixteenth | MiB | diverged |")
    print("|---|---|---|---|---|---|---|")
    for task in ("cartpole",) if options.quick else ("cartpole", "ant"):
        for num_envs in (256,) if options.quick else (256, 1024, 4096):
            row, falls = measure(task, num_envs)
            print("| " + " | ".join(row) + " |", flush=True)
            short += falls
    for line in short:
        print(f"falls short: {line}")
    return 1 if options.check and short else 0


if __name__ == "__main__":
    sys.exit(main())
