"""Every way to name an environment, in every command: stepped, shown, evaluated, trained, recorded, found again."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import gymnasium
import pytest

import headrace
from headrace import EnvRecipe
from headrace.cli import main
from headrace.envs import registry
from headrace.errors import ConfigError, DataError
from headrace.recording import EpisodeDataset, make_replay_env

MODULE = '''
import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from headrace import TaskEntry, register_task

HOME = "headrace.envs.tasks.cartpole"
MINE = TaskEntry(name="source-mine", task=f"{HOME}:Cartpole", cfg=f"{HOME}:CartpoleCfg", summary="by its place")
POINTED = TaskEntry(name="source-pointed", task=f"{HOME}:Cartpole", cfg=f"{HOME}:CartpoleCfg", summary="by entry point")


class Walk(gymnasium.Env):
    """Five steps of a walk with noise of its own; draws its place."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None, scale=1.0):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.render_mode, self.scale = render_mode, scale

    def _obs(self):
        return np.array([self.place, self.count, self.scale], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.place = 0, float(self.np_random.normal())
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        self.place += self.scale * float(action[0]) + float(self.np_random.normal())
        return self._obs(), self.place, False, self.count == 5, {"is_success": self.place > 0}

    def render(self):
        return np.full((16, 16, 3), self.count, np.uint8)


gymnasium.register("SourceWalk-v0", entry_point=Walk)


def walk(scale=1.0):
    return Walk("rgb_array", scale)


class Plan:
    horizon, action_dim = 2, 1

    def __call__(self, obs, context=None):
        return obs["policy"][:, None, :1].clamp(-1, 1).expand(-1, 2, 1) * 0.5
'''
SOURCES = {
    "a task's name": "cartpole",
    "module:NAME": "source_forms:MINE",
    "an entry point": "source-pointed",
    "gym:ID": "gym:Pendulum-v1",
    "gym:module:ID": "gym:source_forms:SourceWalk-v0",
    "a recipe file of a task": "recipe.yaml",
    "a recipe file of another interpreter": "foreign.json",
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of one's own, an installed package that names a task, and recipe files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source_forms.py").write_text(MODULE)
    info = tmp_path / "source_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: source-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace.tasks]\nsource-pointed = source_forms:POINTED\n")
    (tmp_path / "recipe.yaml").write_text("source: cartpole\nnum_envs: 2\noverrides:\n  episode_length: 7\n")
    EnvRecipe("entry:source_forms:walk", python=sys.executable, num_envs=2, workers=1, overrides={"scale": 0.5}).save(
        tmp_path / "foreign.json"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_TASKS", dict(registry._TASKS))
    monkeypatch.setattr(registry, "_entry_points", functools.cache(registry._entry_points.__wrapped__))
    monkeypatch.delitem(sys.modules, "source_forms", raising=False)
    monkeypatch.delitem(gymnasium.registry, "SourceWalk-v0", raising=False)
    return tmp_path


@pytest.mark.parametrize("form", SOURCES)
def test_every_command_takes_every_source_and_finds_it_again(
    place: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = SOURCES[form]
    native = form in ("a task's name", "module:NAME", "an entry point", "a recipe file of a task")
    length = 200 if form == "gym:ID" else 7
    few = ["--num-envs", "2"]
    short = ["--set", f"episode_length={length}"] if native else []

    def does(*words: str) -> str:
        assert main(list(words)) == 0, words
        return capsys.readouterr().out

    does("run", source, *few, *short, "--num-steps", str(length + 1), "--record", "set")
    told = (
        [] if form in ("a task's name", "a recipe file of a task", "gym:ID", "an entry point") else ["--task", source]
    )
    assert "bit-exact" in does("record", "replay", "set", *told)
    assert len(EpisodeDataset("set")) >= 2
    does("view", source, *few, *short, "--num-steps", "1", "--port", "0")
    does("picture", source, *short, "-o", "shot.png", *(["--width", "32", "--height", "32"] if native else []))
    policy = ["--policy", "source_forms:Plan", "--journal", "book.jsonl", *few, *short]
    does("evaluate", source, *policy, "--episode-ids", "0:2", "--output", "first.json")
    does("evaluate", source, *policy, "--episode-ids", "0:4", "--resume", "--output", "whole.json")
    does("evaluate", source, "--policy", "source_forms:Plan", *few, *short, "--episodes", "4", "--output", "fresh.json")
    rows = [[row.reward for row in headrace.evaluation.merge(name).episodes] for name in ("whole.json", "fresh.json")]
    assert rows[0] == rows[1], "what was resumed is what was played at once"
    learn = ["--iterations", "1", "--ppo", "steps=4", "--ppo", "minibatches=1", "--ppo", "epochs=1", *few, *short]
    does("train", source, *learn, "--output", "trained")
    resume = ["train", source, *learn, "--resume-from", "trained", "--output", "resumed"]
    if native:
        does(*resume)
    else:  # their state is a pickle, which a resumed run does not load
        assert main(resume) == 2
        assert "runs of bridged environments keep none" in capsys.readouterr().err
    does("play", source, *few, "--policy", "trained/checkpoints/last.pt", "--warmup-steps", "0", "--output", "played")
    assert len(json.loads(Path("played/play.json").read_text())["per_episode"]["rewards"]) == 2
    does("runtime", source, *few, *short, "--num-steps", "3", "--warmup-steps", "1", "--output", "timed")
    bundle = json.loads(Path("timed/runtime.json").read_text())
    assert EnvRecipe.from_json(bundle["run"]["recipe"]).resolve().num_envs == 2
    does(
        "imitate",
        source,
        *short,
        *few,
        "--dataset",
        "set",
        "--keep",
        "all",
        "--updates",
        "2",
        "--episodes",
        "2",
        "--output",
        "p.pt",
    )


def test_a_recipe_file_says_what_the_command_line_does_not(place: Path) -> None:
    assert headrace.bench.run("recipe.yaml", num_steps=8).num_envs == 2
    changed = headrace.bench.run("recipe.yaml", num_steps=8, num_envs=3, overrides={"episode_length": 4})
    assert (changed.num_envs, changed.mean_length) == (3, 4.0)
    recipe = EnvRecipe.load("foreign.json")
    assert recipe.python == sys.executable
    recipe.save("again.json")
    assert EnvRecipe.load("again.json") == recipe


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("none.yaml", None, ConfigError, "there is none"),
        ("bad.yaml", "a: [", DataError, "expected YAML"),
        ("bad.json", "{", DataError, "expected JSON"),
        ("bad.json", '{"num_envs": 2}', DataError, "expected an object with source"),
        (
            "bad.json",
            '{"source": "ant", "num_enws": 2}',
            DataError,
            "unknown field 'num_enws'; did you mean 'num_envs'",
        ),
        ("bad.json", '{"source": "entry:a:b"}', DataError, "expected an interpreter"),
        ("bad.yaml", "source: antt", ConfigError, "did you mean 'ant'"),
    ],
)
def test_a_recipe_file_that_cannot_work_is_refused(place: Path, name, content, error, message) -> None:
    if content is not None:
        (place / name).write_text(content)
    with pytest.raises(error, match=message):
        headrace.bench.run(name, num_steps=1)


def test_a_dataset_does_not_decide_what_is_imported_or_started(place: Path) -> None:
    headrace.bench.run("foreign.json", num_steps=6, record="set")
    info = EpisodeDataset("set").info
    assert info.recipe["python"] == sys.executable
    with pytest.raises(ConfigError, match="must not decide which program is started"):
        make_replay_env(info)
    with pytest.raises(ConfigError, match="must not decide which program is started"):
        headrace.imitation.imitate(dataset="set", output="p.pt")
    headrace.bench.run("gym:source_forms:SourceWalk-v0", num_steps=6, record="walks")
    sys.modules.pop("source_forms")
    with pytest.raises(ConfigError, match="must not decide which module is imported"):
        make_replay_env(EpisodeDataset("walks").info)


def test_settings_are_booleans_in_every_spelling_and_unknown_ones_are_named(place: Path) -> None:
    from headrace.envs.recipe import parse_assignments

    said = parse_assignments(["a=true", "b=False", "c=null", "d=FALSE", "e=truth"])
    assert said == {"a": True, "b": False, "c": None, "d": False, "e": "truth"}
    with pytest.raises(ConfigError, match="did you mean 'episode_length'"):
        headrace.bench.run("recipe.yaml", num_steps=1, overrides={"episode_lenght": 3})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'scael'"):
        headrace.bench.run("gym:source_forms:SourceWalk-v0", num_steps=1, overrides={"scael": 3})
