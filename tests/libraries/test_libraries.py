"""Libraries by name, ours and those of other packages; settings that a library cannot honor are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import headrace
from headrace.errors import ConfigError, UnknownNameError
from headrace.learning import PPOCfg
from headrace.libraries import library_run, make_learner
from headrace.libraries.registry import BUILT_IN, libraries, library, library_names


def test_the_built_in_libraries_are_described_without_importing_them() -> None:
    code = (
        "import sys; from headrace.libraries.registry import libraries; found = [spec.name for spec in libraries()];"
        "print(found, [m for m in ('torch', 'rsl_rl', 'rl_games', 'skrl', 'stable_baselines3') if m in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == f"{sorted(BUILT_IN)} []"


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_library_names_itself_its_extra_and_its_suffix(name: str) -> None:
    spec = library(name)
    assert spec.name == name
    assert spec.suffix.startswith(".")
    assert (spec.module is None) == (spec.extra is None) == (name == "headrace")
    assert {"vector", "image", "several", "critic"} <= spec.reads["none"]
    settings = set(vars(PPOCfg()))
    assert set(spec.cannot_honor) <= settings


def test_extras_of_the_libraries_are_those_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for spec in libraries():
        if spec.extra is not None:
            needs = " ".join(project["optional-dependencies"][spec.extra])
            assert spec.distribution in needs


def test_an_unknown_library_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rsl_rl'"):
        library("rslrl")


CHANGED = {
    "steps": 8,
    "epochs": 1,
    "minibatches": 2,
    "learning_rate": 3e-4,
    "gamma": 0.9,
    "lam": 0.5,
    "clip": 0.01,
    "value_weight": 50.0,
    "entropy_weight": 0.5,
    "max_grad_norm": 0.01,
    "hidden": (8,),
    "memory": "gru",
    "initial_std": 0.1,
    "normalize_obs": False,
    "reward_scale": 5.0,
    "target_kl": 1e-4,
    "max_learning_rate": 1e-4,
    "actor_groups": ("policy",),
    "critic_groups": ("policy",),
    "seed": 1,
}
SEEN_ELSEWHERE = {"memory_size", "image_features", "guess_weight", "actor_groups", "critic_groups", "seed"}
"""They act only with a memory, with images, with several groups; the seed is the caller's to use."""


def weights(name: str, settings: PPOCfg) -> list[torch.Tensor]:
    with library_run(seed=4):
        env = headrace.make("cartpole", 8, seed=5, threads=1, overrides={"episode_length": 6})
        learner = make_learner(name, env, settings)
        for _ in range(2):
            learner.iterate()
        return [learner.policy()(env.observe()).clone()]


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_setting_either_changes_the_training_or_is_refused(name: str) -> None:
    """``normalize_obs=False, value_weight=50`` once trained bit-identically to the defaults in our own learner."""
    spec = library(name)
    assert set(CHANGED) | SEEN_ELSEWHERE == set(vars(PPOCfg()))
    base = {"steps": 12, "epochs": 2, "minibatches": 4, "hidden": (16,)}
    plain = weights(name, PPOCfg(**base))
    for setting, value in CHANGED.items():
        if setting in SEEN_ELSEWHERE:
            continue
        settings = PPOCfg(**(base | {setting: value}))
        if setting in spec.cannot_honor or (setting == "memory" and value not in spec.reads):
            with pytest.raises(ConfigError, match=setting):
                make_learner(name, headrace.make("cartpole", 8, threads=1), settings)
            continue
        changed = weights(name, settings)
        assert any(not torch.equal(a, b) for a, b in zip(plain, changed, strict=True)), f"{setting} changes nothing"


def test_a_refusal_names_the_settings_that_are_honored_and_the_libraries_that_can() -> None:
    with pytest.raises(ConfigError) as caught:
        library("headrace").check_settings(PPOCfg(reward_scale=1.0))
    said = str(caught.value)
    assert "headrace cannot honor reward_scale=1.0" in said
    assert "rl_games, rsl_rl, sb3, skrl" in said
    assert "value_weight, entropy_weight" in said
    with pytest.raises(ConfigError, match="use a library that can: headrace"):
        library("sb3").check_settings(PPOCfg(target_kl=0.02))
    with pytest.raises(ConfigError, match="no recurrent PPO"):
        library("skrl").check_settings(PPOCfg(memory="gru"))


PACKAGE = '''
from headrace.libraries import LibrarySpec
from headrace.libraries.learner import OwnLearner


class Learner(OwnLearner):
    """Our own, under another name."""

    library = "dummy"


SPEC = LibrarySpec(
    name="dummy", distribution="headrace-dummy", module="headrace_dummy", learner="headrace_dummy:Learner",
    suffix=".dummy", marks=frozenset({"format", "network", "state_dict", "optimizer", "headrace"}),
    reads={"none": frozenset({"vector"})},
    cannot_honor={"gamma": "it is fixed"},
)
WRONG = "not a specification"
'''


def install(site: Path, entries: str) -> None:
    """What an installer leaves behind: a module and the metadata of its distribution."""
    (site / "headrace_dummy.py").write_text(PACKAGE)
    info = site / "headrace_dummy-1.2.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-dummy\nVersion: 1.2.3\n")
    (info / "entry_points.txt").write_text(f"[headrace.libraries]\n{entries}\n")


def python(code: str, site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    import os

    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env={**os.environ, "PYTHONPATH": path}
    )


def test_an_installed_package_adds_a_library_that_trains_and_plays_from_the_command_line(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "dummy = headrace_dummy:SPEC")
    code = """
from headrace.cli.main import main
from headrace.libraries.registry import library_names
from headrace.bench import read_bundle
assert "dummy" in library_names()
quick = ["--num-envs", "4", "--threads", "1", "--ppo", "steps=8", "--ppo", "minibatches=2"]
assert main(["train", "cartpole", "--library", "dummy", *quick, "--iterations", "1", "--output", "runs/a"]) == 0
found = read_bundle("runs/a/training.json")
assert (found.library.name, found.library.version) == ("dummy", "1.2.3"), found.library
assert found.checkpoint_path.endswith("last.dummy")
assert main(["play", "cartpole", "--library", "dummy", "--num-envs", "2", "--threads", "1", "--output", "p"]) == 0
assert read_bundle("p/play.json").checkpoint.library == "dummy"
assert main(["train", "cartpole", "--library", "dummy", *quick, "--ppo", "gamma=0.5"]) == 2
assert main(["train", "cartpole-camera", "--library", "dummy", *quick, "--iterations", "1", "--output", "c"]) == 2
"""
    run = python(code, site, tmp_path)
    assert run.returncode == 0, run.stderr
    assert "dummy cannot honor gamma=0.5" in run.stderr
    assert "observation group 'policy': dummy cannot read images" in " ".join(run.stderr.split())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("sb3 = headrace_dummy:SPEC", "headrace has a library of that name"),
        ("other = headrace_dummy:SPEC", "expected a LibrarySpec of that name, got one named 'dummy'"),
        ("other = headrace_dummy:WRONG", "expected a LibrarySpec of that name, got str"),
    ],
)
def test_an_entry_point_that_is_not_a_library_is_refused(entry: str, message: str, tmp_path: Path) -> None:
    install(tmp_path, entry)
    code = "from headrace.libraries.registry import libraries; libraries()"
    run = python(code, tmp_path, tmp_path)
    assert run.returncode == 1
    assert message in run.stderr


def test_library_names_are_those_of_the_specifications() -> None:
    assert [spec.name for spec in libraries()] == library_names()
