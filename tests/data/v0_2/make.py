"""Writes the files of this directory. Run it with headrace 0.2 (commit 80843bd), in an empty directory.

``cd EMPTY && PYTHONPATH=CHECKOUT_OF_0_2/src:CHECKOUT/tests python CHECKOUT/tests/data/v0_2/make.py``

Its imports are those of 0.2, and stay so. ``expected.json`` has what 0.2 itself reads from the files and makes of them:
exact values and hashes of decoded values where no network is involved, and rows to compare within a tolerance where one
is. ``planner.py`` beside this program has the policies of a user, which journals know by their source.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import gymnasium
import torch

import headrace
from headrace.__main__ import main
from headrace.bench import metrics, read_bundle
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg
from headrace.replay import ArraySpec, PrioritizedSampler, ReplayBuffer, SliceSampler
from headrace.rollout import PusherWordsPolicy, load_chunk_policy
from headrace.rollout._policy_id import policy_hash
from v0_2_values import COMMANDS, dataset_values, digest, options_of, rows_of, store_values, weights_of

SHORT = {"episode_length": 60, "max_angle": 0.2}
USUAL: dict[str, Any] = {"num_envs": 2, "threads": 1, "progress": False}
TRAINING: dict[str, Any] = {
    "settings": {"hidden": (8,), "steps": 16, "minibatches": 2, "epochs": 2},
    "num_envs": 4,
    "seed": 2,
    "threads": 1,
    "overrides": {"max_angle": 0.3},
}
LIBRARIES = ("headrace", "rsl_rl", "rl_games", "skrl", "sb3")
PLAYED = 3
"""Episodes of a journal, at least, before it is cut short."""


def train_all() -> dict[str, Any]:
    """A training per library, what its policy plays, and what one more iteration gives."""
    found = {}
    for library in LIBRARIES:
        folder, forms = f"trainings/{library}", ("schema", "isaaclab") if library == "headrace" else ("schema",)
        headrace.train("cartpole", library=library, iterations=3, output=folder, formatters=forms, **TRAINING)
        more = f"more/{library}"
        again = headrace.train(
            "cartpole", library=library, iterations=1, resume_from=folder, output=more, series=True, **TRAINING
        )
        played = headrace.evaluate("cartpole", folder, episodes=4, **USUAL)
        found[library] = {"rows": rows_of(played), "learning": again.bundle.learning.model_dump(mode="json")}
        found[library]["weights"] = weights_of(Path(more))
        del found[library]["learning"]["wall_time_s"]
    shutil.rmtree("more")
    return found


def write_journals() -> dict[str, Any]:
    """A part of a plan in each journal, and the rows of the whole plan."""
    os.mkdir("journals")
    found: dict[str, Any] = {
        "shipped": {"task": "pusher-solid", "settings": {}},
        "words": {"task": "pusher-words", "settings": {"execute": 8}},
        "run": {"task": "cartpole", "policy": "trainings/headrace", "settings": {}},
        "class": {
            "task": "cartpole",
            "policy": "planner:Lean",
            "settings": {"overrides": SHORT, "execute": 2, "seed": 3},
        },
        "function": {"task": "cartpole", "policy": "planner:rest", "settings": {"overrides": SHORT, "horizon": 1}},
    }
    for name, plan in found.items():
        task, policy, settings = plan["task"], plan.get("policy"), {"episodes": 8, **USUAL, **plan["settings"]}
        file, done = Path(f"journals/{name}.jsonl"), 0

        def stop(rows: list[Any]) -> None:
            nonlocal done
            done += len(rows)
            if done >= PLAYED:
                os.kill(os.getpid(), signal.SIGINT)

        part = headrace.evaluate(task, policy, journal=file, on_episodes=stop, **settings)
        assert PLAYED <= len(part.episodes) < 8
        plan["rows"] = rows_of(headrace.evaluate(task, policy, **settings))
    torn = Path("journals/class.jsonl")  # as a kill in the middle of a write leaves it
    torn.write_text(torn.read_text() + torn.read_text().splitlines()[-1][:40])
    return found


def write_suite() -> dict[str, Any]:
    """The journals of a suite that one task of was played."""
    Path("suite.toml").write_text(
        'episodes = 3\n\n[[task]]\ntask = "cartpole"\nname = "short"\noverrides = {episode_length = 20}\n\n'
        '[[task]]\ntask = "cartpole"\nseeds = [4, 5]\noverrides = {episode_length = 30}\n'
    )
    settings: dict[str, Any] = {"execute": 4, **USUAL}
    whole = headrace.evaluate_suite("suite.toml", "planner:Lean", journal="suite", **settings)
    for seed in (4, 5):
        Path(f"suite/cartpole-{seed}.jsonl").unlink()
    return {f"{name}-{seed}": rows_of(part) for (name, seed), part in whole.parts.items()}


def write_evaluations() -> dict[str, Any]:
    """A saved evaluation, two overlapping parts of its plan, and one with instructions."""
    os.mkdir("evaluations")
    settings: dict[str, Any] = {"overrides": SHORT, "execute": 2, **USUAL}
    found = {}
    for name, ids in {"whole": range(12), "first": range(7), "second": range(5, 12)}.items():
        output = f"evaluations/{name}.json"
        found[name] = rows_of(headrace.evaluate("cartpole", "planner:Lean", episodes=ids, output=output, **settings))
    rest = headrace.evaluate(
        "cartpole", "planner:rest", episodes=12, horizon=1, overrides=SHORT, output="evaluations/rest.json", **USUAL
    )
    words = headrace.evaluate("pusher-words", episodes=4, execute=8, output="evaluations/words.json", **USUAL)
    return {**found, "rest": rows_of(rest), "words": rows_of(words)}


def record_datasets() -> dict[str, Any]:
    """Episodes of random actions: one dataset with physics states, one with small images."""
    found: dict[str, Any] = {}
    plans = {
        "state": ("cartpole", {"episode_length": 12}, ("obs", "actions", "rewards", "flags", "substeps")),
        "images": ("cartpole-camera", {"episode_length": 5, "pixels": 16}, ("obs", "actions", "rewards", "flags")),
    }
    for name, (task, overrides, fields) in plans.items():
        env = headrace.make(task, 2, seed=5, threads=1, overrides=overrides)
        info = DatasetInfo.of(env, instruction="keep the pole up")
        with EpisodeRecorder(f"datasets/{name}", RecorderCfg(fields=(*fields, "states")), info) as recorder:
            env.attach(recorder)
            env.reset()
            generator = torch.Generator().manual_seed(1)
            for _ in range(25 if name == "state" else 6):
                env.step(torch.rand(2, 1, generator=generator) * 2 - 1)
        env.close()
        found[name] = dataset_values(EpisodeDataset(f"datasets/{name}"))
    return found


def imitate() -> dict[str, Any]:
    """The policy of a training on a dataset that was stopped half-way, and what its end gives."""
    act = {"horizon": 4, "width": 8, "heads": 2, "hidden": 8, "memory_tokens": 2, "batch": 4, "check_every": 20}
    settings: dict[str, Any] = {
        "dataset": "datasets/state",
        "keep": "all",
        "updates": 40,
        "settings": act,
        "episodes": 0,
    }

    def stop(stage: str, done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    os.mkdir("imitation")
    with contextlib.suppress(KeyboardInterrupt):
        headrace.imitate(output="imitation/policy.pt", on_progress=stop, **settings)
    whole = headrace.imitate(output="whole.pt", **settings)
    played = headrace.evaluate("cartpole", "imitation/policy.pt", episodes=3, overrides=SHORT, **USUAL)
    Path("whole.pt").unlink()
    return {"settings": settings, "losses": [list(loss) for loss in whole.losses], "rows": rows_of(played)}


def write_bundles() -> dict[str, Any]:
    """Two runs of each kind, in every form that can be read, the numbers in them and the verdicts on them."""
    for side, angle in (("a", 0.3), ("b", 0.2)):
        shared: dict[str, Any] = {"num_envs": 2, "threads": 1, "overrides": {"max_angle": 0.3}}
        forms = ("schema", "isaaclab")
        headrace.runtime("cartpole", num_steps=20, warmup_steps=5, output=f"bundles/{side}", formatters=forms, **shared)
        headrace.startup("cartpole", top_n=2, output=f"bundles/{side}", formatters=forms, **shared)
        policy = f"trainings/{'headrace' if side == 'a' else 'rsl_rl'}"
        headrace.play(
            "cartpole", policy=policy, episodes=24, warmup_steps=2, output=f"bundles/{side}", formatters=forms, **shared
        )
        seeded = TRAINING | {"overrides": {"max_angle": angle}}
        headrace.train("cartpole", iterations=3, output=f"training-{side}", formatters=forms, **seeded)
        for file in Path(f"training-{side}").glob("*training*.json"):
            file.rename(f"bundles/{side}/{file.name}")
        shutil.rmtree(f"training-{side}")
    for file in [*Path("bundles").glob("*/*.json"), *Path("trainings").glob("*/*.json")]:
        trim(file)
    found = {
        str(file): {metric.path: metric.value for metric in metrics(read_bundle(file))}
        for file in sorted(Path("bundles").glob("*/*.json"))
    }
    compared = {
        "bundles": headrace.compare("bundles/a", "bundles/b", allow=("settings", "library")),
        "evaluations": headrace.compare("evaluations/whole.json", "evaluations/rest.json", allow=("settings",)),
    }
    verdicts = {
        f"{name} {found.kind}": {row.path: [row.verdict, row.effect] for row in found.rows}
        for name, result in compared.items()
        for found in result.comparisons
    }
    return {"metrics": found, "verdicts": verdicts}


def trim(file: Path) -> None:
    """Remove what names the machine, and the depth of call trees."""
    content, machine = (
        json.loads(file.read_text()),
        {"hostname": "machine", "platform": "Linux", "command": ["make.py"]},
    )

    def walk(value: Any, depth: int = 0) -> Any:
        if isinstance(value, dict):
            return {
                name: machine.get(name, [] if name == "children" and depth > 3 else walk(part, depth + 1))
                for name, part in value.items()
            }
        return [walk(part, depth + 1) for part in value] if isinstance(value, list) else value

    file.write_text(json.dumps(walk(content), indent=1) + "\n")


def fill_stores() -> dict[str, Any]:
    """A store on disk that lives on, and the checkpoint of one in memory with three samplers."""
    for name, task in (("live", "cartpole"), ("saved", "cartpole-camera")):
        env = headrace.make(
            task, 2, seed=6, threads=1, overrides={"episode_length": 9} | ({} if name == "live" else {"pixels": 8})
        )
        stack = {group: image.stack for group, image in env.task.images.items() if image.frames > 1}
        store = ReplayBuffer(
            48 if name == "live" else 24,
            2,
            env.single_observation_space,
            env.single_action_space,
            stack=stack or None,
            extras={"log_prob": ArraySpec((), torch.float32)} if name == "live" else None,
            sampler=PrioritizedSampler() if name == "saved" else None,
            n_step=3,
            directory="stores/live" if name == "live" else None,
            seed=3,
        )
        if name == "saved":
            store.with_sampler(SliceSampler(3), "slices", seed=4)
        obs, _ = env.reset()
        generator = torch.Generator().manual_seed(2)
        for _ in range(30):
            action = torch.rand(2, 1, generator=generator) * 2 - 1
            step = env.step(action)
            extras = {"log_prob": action[:, 0] * 2} if name == "live" else None
            store.extend(obs, action, step, torch.ones(2, dtype=torch.bool), extras)
            obs = {group: values.clone() for group, values in step.obs.items()}
        if name == "saved":
            batch = store.sample(6)
            store.update_priorities(batch["index"], torch.arange(1.0, 7.0))
            store.save("stores/saved")
        env.close()
        store.close()
    shutil.copytree("stores/live", "live")  # drawing from a store on disk changes it
    found = {"live": store_values(ReplayBuffer.open("live")), "saved": store_values(ReplayBuffer.load("stores/saved"))}
    shutil.rmtree("live")
    return found


def save_state() -> dict[str, Any]:
    """The state of environments with a camera, some of them suspended, and what they do next."""
    env = headrace.make("cartpole-camera", 3, seed=8, threads=1, overrides={"pixels": 8, "episode_length": 12})
    env.reset()
    for number in range(7):
        env.step(torch.full((3, 1), 0.1 * number))
    env.suspend([1])
    torch.save(env.state_dict(), "state.pt")
    steps = [env.step(torch.full((3, 1), 0.2)) for _ in range(2)]
    found = {name: digest(values) for name, values in steps[-1].obs.items()}
    env.close()
    recipe = headrace.EnvRecipe("pusher-words", num_envs=2, seed=4, overrides={"goal_range": 0.1}, threads=1)
    recipe.save("recipe.json")
    return found


def name_policies() -> dict[str, str]:
    """The identities of the policies that ship: task → hash."""
    shipped = {task: policy_hash(load_chunk_policy(task)) for task in ("pusher-solid", "aloha-transfer-cube-state")}
    return {**shipped, "pusher-words": policy_hash(PusherWordsPolicy())}


def list_names() -> dict[str, Any]:
    """Names that others write down: options of commands, Gymnasium ids, environment variables."""
    home = Path(headrace.__file__).parent
    words = {word for file in home.rglob("*.py") for word in re.findall(r"HEADRACE_[A-Z_]+", file.read_text())}
    return {
        "options": {command: options_of(main, command) for command in COMMANDS},
        "ids": sorted(name for name in gymnasium.registry if name.startswith("headrace/")),
        "variables": sorted(words),
    }


if __name__ == "__main__":
    if not headrace.__version__.startswith("0.2") or any(Path().iterdir()):
        sys.exit("run this program with headrace 0.2, in an empty directory")
    expected = {
        "policies": name_policies(),
        "runs": train_all(),
        "journals": write_journals(),
        "suite": write_suite(),
        "evaluations": write_evaluations(),
        "datasets": record_datasets(),
        "imitation": imitate(),
        "bundles": write_bundles(),
        "stores": fill_stores(),
        "state": save_state(),
    }
    for lock in Path().rglob(".lock"):
        lock.unlink()
    Path("names.json").write_text(json.dumps(list_names(), indent=1) + "\n")
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n")
