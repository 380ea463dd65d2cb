"""Does a pixel policy need a stack? Cart-pole from the state, from one frame, and from two, with the small PPO.

  python examples/cartpole_camera.py runs                     train nine policies: three kinds, three seeds
  python examples/cartpole_camera.py runs --kinds two-frames --seeds 0
  python examples/cartpole_camera.py draw runs curves.svg     draw the learning curves of a folder

Each run takes one core and a fixed number of steps, so a seed gives the same policy again on one machine. It leaves
KIND-SEED.json (the curve, and the score of the final policy, acting without noise, on 100 held-out episodes) and
KIND-SEED.pt, which ``load_actor_critic`` of ``headrace.learning.actor_critic`` reads. A run that is there already is
not repeated. With NUMBA_NUM_THREADS=1 in the environment nothing uses a second core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

import headrace
from headrace.learning import PPO, PPOCfg
from headrace.learning.actor_critic import Policy, save_actor_critic

PICTURE = {"pixels": 48, "color": "gray"}
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "state": ("cartpole", {}, "#5b6472"),
    "two-frames": ("cartpole-camera", {**PICTURE, "frame_stack": 2}, "#0b6e99"),
    "one-frame": ("cartpole-camera", {**PICTURE, "frame_stack": 1}, "#d1495b"),
}
SETTINGS = PPOCfg(steps=32, epochs=4, minibatches=8, learning_rate=1e-3, max_learning_rate=1e-3)
ENVS, ITERATIONS = 64, 100
HELD_OUT = 1_000_003


def train(kind: str, seed: int, folder: Path, iterations: int) -> None:
    """One run: learn, judge, save."""
    task, overrides, _ = KINDS[kind]
    env = headrace.make(task, ENVS, seed=seed, threads=1, overrides=overrides)
    learner = PPO(env, replace(SETTINGS, seed=seed))
    curve: list[dict[str, float]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    begun = time.process_time()
    with Progress(*columns) as bars:
        bar = bars.add_task(f"{kind}, seed {seed}", total=iterations)
        for report in learner.learn(iterations):
            bars.advance(bar)
            if report.episodes:
                curve.append({"steps": report.steps, "return": round(report.mean_return, 2)})
                shown = f"{kind}, seed {seed}: {report.steps:,} steps, return {report.mean_return:.0f}"
                bars.update(bar, description=shown)
    spent = time.process_time() - begun
    returns = judge(learner.policy, task, overrides)
    score = {"episodes": len(returns), "mean_return": round(statistics.fmean(returns), 2)}
    digest = save_actor_critic(learner.policy, folder / f"{kind}-{seed}.pt", task=task, overrides=overrides)
    result = {"kind": kind, "seed": seed, "task": task, "overrides": overrides, "steps": learner.steps}
    result |= {"cpu_s": round(spent), "score": score, "sha256": digest, "curve": curve}
    (folder / f"{kind}-{seed}.json").write_text(json.dumps(result) + "\n")
    print(f"{kind}, seed {seed}: {learner.steps:,} steps, {spent:.0f} s of CPU, {score['mean_return']:.1f} of 300")


def judge(policy: Policy, task: str, overrides: dict[str, Any], episodes: int = 100) -> list[float]:
    """Returns of held-out episodes, acting without noise."""
    env = headrace.make(task, episodes, seed=HELD_OUT, threads=1, overrides=overrides, autoreset="disabled")
    returns: dict[int, float] = {}
    obs, _ = env.reset()
    state = policy.initial_state(episodes)
    while len(returns) < episodes:
        action, state = policy.act(obs, state)
        step = env.step(action)
        obs = step.obs
        if (ends := step.info.get("ends")) is not None:
            returns |= dict(zip(ends.env_ids.tolist(), ends.returns.tolist(), strict=True))
    return list(returns.values())


def draw(folder: Path, picture: Path) -> None:
    """The curves of a folder as an SVG, drawn by hand: return of training episodes over processor time."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    width, height, left, top, bottom = 760, 380, 56, 18, 46
    longest = max(run["curve"][-1]["steps"] for run in runs)

    def place(steps: float, value: float) -> str:
        x = left + (width - left - 150) * steps / longest
        return f"{x:.1f},{top + (height - top - bottom) * (1 - value / 300):.1f}"

    font = 'font-family="sans-serif" font-size="12"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for value in range(0, 301, 60):
        (x, y), (end, _) = (place(s, value).split(",") for s in (0, longest))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end" {font}>{value}</text>')
    for thousands in range(0, int(longest) // 1000 + 1, 50):
        x = place(1000 * thousands, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - bottom + 18}" text-anchor="middle" {font}>{thousands}k</text>')
    parts.append(f'<text x="{left}" y="{height - 8}" {font}>environment steps; return of training episodes</text>')
    for place_of, (kind, (_, _, color)) in enumerate(KINDS.items()):
        mine = [run for run in runs if run["kind"] == kind]
        for run in mine:
            points = " ".join(place(p["steps"], p["return"]) for p in _smooth(run["curve"]))
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if mine:
            score = statistics.fmean(run["score"]["mean_return"] for run in mine)
            words, y = f"{kind}: {score:.0f}", top + 16 + 20 * place_of
            parts.append(f'<text x="{width - 140}" y="{y}" fill="{color}" font-weight="bold" {font}>{words}</text>')
    picture.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _smooth(curve: list[dict[str, float]], window: int = 5) -> list[dict[str, float]]:
    """Means over a few iterations: one has few episodes."""
    return [
        {
            "steps": point["steps"],
            "return": statistics.fmean(p["return"] for p in curve[max(0, i - window + 1) : i + 1]),
        }
        for i, point in enumerate(curve)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+", help="where results go; or: draw FOLDER PICTURE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=ITERATIONS, help=f"of {ENVS} × {SETTINGS.steps} steps each")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if str(arguments.folder[0]) == "draw":
        draw(*arguments.folder[1:])
        return
    folder: Path = arguments.folder[0]
    folder.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for kind in arguments.kinds:
            if not (folder / f"{kind}-{seed}.json").exists():
                train(kind, seed, folder, arguments.iterations)


if __name__ == "__main__":
    main()
