"""A small policy for a task of LIBERO from nothing: record an expert, export to LeRobot, imitate, evaluate.

  python examples/imitate_libero.py record runs/libero --episodes 120 --num-envs 40
  python examples/imitate_libero.py imitate runs/libero --output runs/libero/policy.pt --updates 1600
  python examples/imitate_libero.py evaluate runs/libero/policy.pt

``record`` plays the scripted expert with a slow disturbance, and exports to DIRECTORY/lerobot, in LIBERO's usual keys.
What is recorded is what the expert wanted, so that a learner sees how it recovers. ``imitate`` keeps the policy after
each quarter of the updates. Of the benchmark's 50 initial states 40 are for demonstrations, 10 for evaluation; from
there the arm begins up to 0.1 rad and all things up to 1 cm away (``perturb``), drawn from the episode's id.

Needs exported tasks (docs/libero.md).
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

import headrace
from headrace import rng
from headrace.evaluation import PlayCfg
from headrace.imitation import imitate
from headrace.imitation.experts import Expert, expert_for
from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg, export_dataset
from headrace.types import ResetRecord, StepRecord

TASK, SEED, OTHER_SEED = "libero_object/0", 0, 1_000_003
SETTINGS = {"pixels": 96, "perturb": ("init",)}
CAMERAS = {"obs/agentview": "image", "obs/robot0_eye_in_hand": "image2"}
"""LIBERO's usual keys: ``observation.images.image`` and ``image2``, ``observation.state``, ``action``."""
EXECUTE = 8
DECAY, SPREAD = 0.9, 0.15
"""The disturbance of the hand: how much of it is left after a step, and what a step adds at most, in actions' units."""


class Wanted:
    """Hands a recorder the actions that the expert wanted in place of those that were played."""

    def __init__(self, recorder: EpisodeRecorder) -> None:
        self.recorder, self.needs = recorder, recorder.needs
        self.actions = torch.zeros(0)

    def after_reset(self, record: ResetRecord) -> None:
        self.recorder.after_reset(record)

    def after_step(self, record: StepRecord) -> None:
        self.recorder.after_step(replace(record, actions=self.actions))


def record(directory: Path, episodes: int, num_envs: int) -> None:
    """Add successful episodes to the dataset, in waves of ``num_envs``, and export it."""
    expert = expert_for(TASK)
    env = headrace.make(TASK, num_envs, seed=SEED, autoreset="disabled", final_obs=False, overrides=SETTINGS)
    cfg = RecorderCfg(fields=("obs/policy", "cameras", "actions", "flags"), keep="succeeded")
    with EpisodeRecorder(directory / "recorded", cfg, DatasetInfo.of(env)) as recorder:
        wanted, attempts = Wanted(recorder), 0
        env.attach(wanted)
        ids = (i for i in count() if i % 50 < 40)  # the others are for evaluation
        while recorder.committed < episodes:
            play(env, torch.tensor(list(islice(ids, num_envs))), expert, wanted)
            attempts += num_envs
            recorder.flush()
            print(f"{recorder.committed} of {attempts} episodes succeeded", flush=True)
    env.close()
    export_dataset(directory / "recorded", directory / "lerobot", "lerobot", fps=20, cameras=CAMERAS)


def play(env: headrace.BatchEnv, ids: Tensor, expert: Expert, wanted: Wanted) -> None:
    """Play a wave of episodes, each with as much disturbance as its id says."""
    obs, _ = env.reset(options={"episode_ids": ids})
    much = rng.uniform(SEED, ids, "how much", 1).to(torch.float32)
    moved = torch.zeros(len(ids), 7)
    for step in count():
        if not env.active.any():
            return
        wanted.actions = expert(obs)
        noise = rng.normal(SEED, ids, "disturbance", 3, draw=3 * step).to(torch.float32)
        moved[:, :3] = DECAY * moved[:, :3] + SPREAD * much * noise
        obs = env.step((wanted.actions + moved).clamp(-1.0, 1.0)).obs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("record", "imitate", "evaluate"))
    parser.add_argument("path", type=Path, help="directory of the datasets, or a policy to evaluate")
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--updates", type=int, default=1600)
    given = parser.parse_args()
    if given.job == "record":
        record(given.path, given.episodes, given.num_envs)
    elif given.job == "imitate":

        def report(stage: str, done: int, total: int) -> None:
            print(f"{stage}: {done} of {total}", flush=True)
            if done > 20 and done % (total // 4) == 20:  # a quarter is done and saved
                shutil.copy(given.output, given.output.with_stem(f"{given.output.stem}-{done - 20}"))

        found = imitate(
            TASK,
            given.output,
            dataset=given.path / "lerobot",
            settings={
                "updates": given.updates,
                "check_every": given.updates // 4,
                "batch": 32,
                "horizon": 16,
                "learning_rate": 5e-4,
            },
            episodes=0,
            seed=SEED,
            overrides=SETTINGS,
            on_progress=report,
        )
        print(*found.losses, sep="\n")
    else:
        ids = list(islice((i for i in count() if i % 50 >= 40), given.episodes))
        found = headrace.evaluate(
            TASK,
            str(given.path),
            episodes=ids,
            num_envs=given.num_envs,
            seed=OTHER_SEED,
            overrides=SETTINGS,
            play=PlayCfg(execute=EXECUTE),
        )
        Console().print(found.summary())


if __name__ == "__main__":
    main()
