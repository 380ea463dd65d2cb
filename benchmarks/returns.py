"""Returns of ant and humanoid at equal frames: our learner and rsl_rl, and SB3 over headrace and over Gymnasium's own.

  ours, rsl_rl            headrace.train with 64 environments; rsl_rl with the adaptive schedule of Isaac Lab's ant
  SB3 over headrace       stable-baselines3's PPO with its VecNormalize over 16 environments of ours
  SB3 over Gymnasium      the same algorithm with the same arguments over its own make_vec_env of Ant-v5, Humanoid-v5,
                          with include_cfrc_ext_in_observation=False and contact_cost_weight=0

A figure is the mean return of the last 100 training episodes, actions being sampled; the table has its mean over seeds
and its lowest and highest. Each run is a process of its own with one thread for torch, and leaves TASK-WHO-SEED.json; a
run that is there is not repeated, so a call that was cut off goes on. Bar: every contestant over headrace reaches the
mean of SB3 over Gymnasium, less its spread over seeds.

  python benchmarks/returns.py runs/returns             three seeds of 2,000,000 frames: some hours
  python benchmarks/returns.py runs/returns --check     exit 1 and name each bar that falls short
  python benchmarks/returns.py --quick                  one seed of ant, 8,192 frames, into a directory that is removed
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

OURS = "ours"
REFERENCE = "sb3-gymnasium"
WHO = {
    OURS: "our learner",
    "rsl_rl": "rsl_rl over headrace",
    "sb3-headrace": "SB3 over headrace",
    REFERENCE: "SB3 over Gymnasium",
}
COLORS = dict(zip(WHO, ("#0b6e99", "#d1495b", "#edae49", "#5b6472"), strict=True))
PEERS = {"ant": "Ant-v5", "humanoid": "Humanoid-v5"}
OPTIONS = {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0}
SB3 = {
    "n_steps": 256,
    "batch_size": 256,
    "n_epochs": 10,
    "learning_rate": 3e-4,
    "gae_lambda": 0.95,
    "gamma": 0.99,
    "policy_kwargs": {"net_arch": [256, 256]},
}
NETWORK = {"hidden_dims": [400, 200, 100], "activation": "elu", "obs_normalization": True}
RSL_RL = {
    "num_steps_per_env": 32,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "clip_param": 0.2,
        "gamma": 0.99,
        "lam": 0.95,
        "value_loss_coef": 1.0,
        "entropy_coef": 0.0,
        "learning_rate": 5e-4,
        "max_grad_norm": 1.0,
        "use_clipped_value_loss": True,
        "schedule": "adaptive",
        "desired_kl": 0.01,
    },
    "actor": {
        "class_name": "MLPModel",
        "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0},
        **NETWORK,
    },
    "critic": {"class_name": "MLPModel", **NETWORK},
}
LAST = 100


def train_here(task: str, who: str, seed: int, frames: int) -> list[tuple[int, float]]:
    """One training by ``headrace.train``: (frames, return) of every episode."""
    import headrace
    from headrace.learning import PPOCfg

    envs, steps = 64, 32
    found: list[tuple[int, float]] = []

    def note(done: Any) -> None:
        found.extend((done.number * envs * steps, value) for value in done.finished.returns.tolist())

    own = {"ppo": PPOCfg(steps=steps, gamma=0.99, lam=0.95)} if who == OURS else {"library": who, "agent": RSL_RL}
    with tempfile.TemporaryDirectory() as folder:
        headrace.train(
            task,
            iterations=max(1, frames // (envs * steps)),
            num_envs=envs,
            seed=seed,
            threads=1,
            run=headrace.RunCfg(output=Path(folder) / "run"),
            on_iteration=note,
            **own,
        )
    return found


def train_sb3(task: str, who: str, seed: int, frames: int) -> list[tuple[int, float]]:
    """One training by SB3 itself, over our environments or Gymnasium's."""
    import gymnasium
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

    import headrace
    from headrace.libraries.learner import LearnerEnv
    from headrace.libraries.sb3 import Sb3Env

    envs, found = 16, list[tuple[int, float]]()

    class Note(BaseCallback):
        def _on_step(self) -> bool:
            infos = self.locals["infos"]
            found.extend((self.num_timesteps, float(info["episode"]["r"])) for info in infos if "episode" in info)
            return True

    if who == REFERENCE:
        made = make_vec_env(lambda: gymnasium.make(PEERS[task], **OPTIONS), n_envs=envs, seed=seed)
    else:
        made = VecMonitor(Sb3Env(LearnerEnv(headrace.make(task, envs, seed=seed, threads=1))))
    model = PPO("MlpPolicy", VecNormalize(made), seed=seed, device="cpu", **SB3)
    model.learn(frames, callback=Note())
    return found


def work(task: str, who: str, seed: int, frames: int, path: Path) -> None:
    """Run one training in this process and write its result."""
    import torch

    torch.set_num_threads(1)
    begin = time.perf_counter()
    episodes = (train_sb3 if who.startswith("sb3") else train_here)(task, who, seed, frames)
    step = max(1, len(episodes) // 200)
    returns = [value for _, value in episodes]
    curve = [
        [episodes[i][0], statistics.fmean(returns[max(0, i - LAST + 1) : i + 1])] for i in range(0, len(returns), step)
    ]
    result = {"task": task, "who": who, "seed": seed, "frames": frames, "seconds": time.perf_counter() - begin}
    result |= {
        "episodes": len(returns),
        "final": statistics.fmean(returns[-LAST:]) if returns else None,
        "curve": curve,
    }
    path.write_text(json.dumps(result) + "\n")


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves of one task as an SVG: return over frames, a line per run."""
    width, height, left, bottom = 720, 320, 64, 40
    points = [point for run in runs for point in run["curve"]]
    longest, low, high = max(x for x, _ in points), min(0.0, *(y for _, y in points)), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = left + (width - left - 10) * x / longest
        return f"{across:.1f},{(height - bottom) * (1 - (y - low) / max(high - low, 1e-9)) + 8:.1f}"

    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 10}">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for value in (low, (low + high) / 2, high):
        (x, y), (end, _) = (place(at, value).split(",") for at in (0, longest))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{left - 6}" y="{float(y) + 4}" text-anchor="end" {font}>{value:,.0f}</text>')
    words = f"return of the last {LAST} training episodes, over {longest:,.0f} frames"
    parts.append(f'<text x="{left}" y="{height}" {font}>{words}</text>')
    for run in runs:
        line = " ".join(place(x, y) for x, y in run["curve"])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[run["who"]]}" stroke-width="1.5"/>')
    for number, (who, name) in enumerate(WHO.items()):
        parts.append(f'<text x="{left + 10}" y="{22 + 16 * number}" fill="{COLORS[who]}" {font}>{name}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def report(folder: Path) -> list[str]:
    """Print the table of a directory and draw its curves; returns what falls short."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-*-*.json"))]
    short: list[str] = []
    print("| task | frames | who | seeds | return of the last 100 episodes | lowest to highest | seconds |")
    print("|---|---|---|---|---|---|---|")
    for task in PEERS:
        of_task = [run for run in runs if run["task"] == task and run["final"] is not None]
        finals = {who: [run["final"] for run in of_task if run["who"] == who] for who in WHO}
        for who, values in finals.items():
            if values:
                spent = statistics.fmean(run["seconds"] for run in of_task if run["who"] == who)
                ends = f"{min(values):,.0f} to {max(values):,.0f}"
                mean = f"{len(values)} | {statistics.fmean(values):,.0f}"
                print(f"| {task} | {of_task[0]['frames']:,} | {WHO[who]} | {mean} | {ends} | {spent:,.0f} |")
        if of_task:
            draw(of_task, folder / f"{task}.svg")
            print(f"\n{folder / f'{task}.svg'}\n")
        reference = finals[REFERENCE]
        if not reference:
            continue
        bar = statistics.fmean(reference) - (max(reference) - min(reference))
        for who, values in finals.items():
            if not values or statistics.fmean(values) < bar:
                got = f"{statistics.fmean(values):,.0f}" if values else "nothing"
                short.append(f"{task}, {WHO[who]}: {got}, expected at least {bar:,.0f}")
    return short


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/returns"))
    parser.add_argument("--tasks", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--frames", type=int, default=2_000_000)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--worker", nargs=3, metavar=("TASK", "WHO", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        task, who, seed = given.worker
        work(task, who, int(seed), given.frames, given.folder / f"{task}-{who}-{seed}.json")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        if given.quick:
            given.folder, given.tasks, given.seeds, given.frames = Path(scratch), ["ant"], [0], 8_192
        given.folder.mkdir(parents=True, exist_ok=True)
        for seed in given.seeds:
            for task in given.tasks:
                for who in WHO:
                    if not (given.folder / f"{task}-{who}-{seed}.json").is_file():
                        words = [str(given.folder), "--frames", str(given.frames), "--worker", task, who, str(seed)]
                        subprocess.run([sys.executable, __file__, *words], check=True)
                        print(f"{task}, {WHO[who]}, seed {seed}: done", file=sys.stderr)
        short = report(given.folder)
    for line in short:
        print(f"falls short: {line}")
    return 1 if given.check and short else 0


if __name__ == "__main__":
    sys.exit(main())
