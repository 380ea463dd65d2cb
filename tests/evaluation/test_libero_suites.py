"""Suites of LIBERO and the protocols of evaluation loops, on a scene of our own."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace
from headrace.bench import report
from headrace.cli.main import main
from headrace.errors import ConfigError, HeadraceError, UnknownNameError
from headrace.evaluation import JournalCfg, PlayCfg, merge
from headrace.evaluation.libero import PROTOCOLS, compare_sims, libero_suite
from headrace.evaluation.suites import evaluate_suite
from headrace.policies import ObservationMap

sys.path[:0] = [str(Path(__file__).parents[1] / "envs" / "tasks" / "libero"), str(Path(__file__).parent)]
from oft_pictures import SMALL, picture  # noqa: E402
from scene import write_scene  # noqa: E402


@pytest.fixture(autouse=True)
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_LIBERO_EXPORT", str(tmp_path))
    write_scene(tmp_path / "libero_spatial-0.npz", "turnoff")
    for index in range(1, 10):
        shutil.copy(tmp_path / "libero_spatial-0.npz", tmp_path / f"libero_spatial-{index}.npz")
    return tmp_path


def wander(obs: dict[str, torch.Tensor], context: object) -> torch.Tensor:
    """Plan 5 actions from the state that the policy reads."""
    wave = torch.sin(40 * obs["policy"][:, None, :7] + torch.arange(5)[None, :, None])
    return wave.clamp(-1, 1).to(torch.float32)


def short(trials: int, protocol: str = "openpi") -> tuple[headrace.evaluation.suites.SuiteTask, ...]:
    """Return two tasks of a suite with short episodes, without cameras."""
    rows = libero_suite("libero_spatial", protocol, trials)[:2]
    return tuple(
        replace(row, overrides={**row.overrides, "episode_length": 4, "waits": 1, "cameras": ()}) for row in rows
    )


def test_the_table_is_equal_to_the_last_bit_for_1_8_and_32_environments() -> None:
    tables = []
    for num_envs in (1, 8, 32):
        found = evaluate_suite(short(9), wander, num_envs=num_envs, play=PlayCfg(execute=5, horizon=5), progress=False)
        tables.append(found.total.episodes)
        assert found.unfinished == 0
        assert "model calls" in str(found.summary().caption)
    assert tables[0] == tables[1] == tables[2]
    assert len(tables[0]) == 18


def test_protocols_set_waits_horizon_pictures_and_gripper_of_every_task() -> None:
    rows = libero_suite("libero_10", "groot", 3)
    assert len(rows) == 10
    assert {row.episodes for row in rows} == {3}
    assert rows[4].task == "libero_10/4"
    assert rows[4].overrides["waits"] == 0
    assert rows[4].overrides["episode_length"] == 720
    assert rows[4].overrides["gripper"] == "unit"
    assert libero_suite("libero_spatial", "lerobot")[0].overrides["episode_length"] == 280
    assert libero_suite("libero_spatial", "openpi")[0].overrides["episode_length"] == 220
    assert PROTOCOLS["openpi"].execute == 5
    with pytest.raises(UnknownNameError, match="openpi"):
        libero_suite("libero_spatial", "openvla")
    with pytest.raises(UnknownNameError, match="libero_9"):
        libero_suite("libero_91")
    with pytest.raises(ConfigError, match="trials"):
        libero_suite("libero_spatial", trials=0)


def test_a_gripper_in_the_unit_interval_is_that_of_the_sign_inverted() -> None:
    states = []
    for gripper, command in (("signed", (-1.0, 1.0)), ("unit", (1.0, 0.0))):
        env = headrace.make("libero_spatial/0", 2, overrides={"gripper": gripper, "cameras": (), "waits": 2})
        env.reset(seed=0)
        action = torch.zeros(2, 7)
        action[:, 6] = torch.tensor(command)
        for _ in range(3):
            env.step(action)
        states.append(env.sim.states(None).numpy())
        env.close()
    assert np.array_equal(*states)


def test_tables_of_different_protocols_are_not_merged_and_of_another_mujoco_not_played(exported: Path) -> None:
    for protocol in ("openpi", "vla-eval"):
        journal = JournalCfg(path=exported / protocol)
        play = PlayCfg(execute=5, horizon=5, policy_id="w")
        evaluate_suite(short(2, protocol)[:1], wander, play=play, journal=journal, num_envs=2, progress=False)
    parts = [exported / protocol / "libero_spatial-0-0.jsonl" for protocol in ("openpi", "vla-eval")]
    with pytest.raises(HeadraceError, match="protocol"):
        merge(*parts)
    with pytest.raises(ConfigError, match="installed version"):
        headrace.make("libero_spatial/0", overrides={"mujoco": "3.3.2"})


def test_the_policy_receives_pictures_mirrored_and_padded_as_openpi_sends_them() -> None:
    picture = torch.arange(4 * 6 * 3, dtype=torch.uint8).reshape(1, 4, 6, 3)
    flipped = ObservationMap(keys={"x": "camera"}, flips=("columns",)).fill({"camera": picture})["x"]
    assert np.array_equal(flipped, picture.numpy()[:, :, ::-1])
    turned = ObservationMap(keys={"x": "camera"}, flips=("rows", "columns")).fill({"camera": picture})["x"]
    assert np.array_equal(turned, picture.numpy()[:, ::-1, ::-1])
    with pytest.raises(ConfigError, match="flips"):
        ObservationMap(flips=("up",))  # pyright: ignore[reportArgumentType]
    assert PROTOCOLS["openpi"].mapping.image_size == (224, 224)
    assert PROTOCOLS["openpi"].mapping.flips == ("columns",)


def test_the_policy_receives_pictures_as_openvla_oft_makes_them_with_tensorflow() -> None:
    recorded = np.load(Path(__file__).with_name("oft_pictures.npz"))
    rules = replace(PROTOCOLS["oft"].mapping, keys={"x": "camera"}, flips=(), image_size=(SMALL, SMALL))
    images = {"camera": torch.from_numpy(picture()[None])}
    whole, cut = (replace(rules, crop=crop).fill(images)["x"][0].astype(int) for crop in (None, rules.crop))
    apart = {form: np.abs(cut - recorded[form]) for form in ("accurate", "fast")}
    assert apart["accurate"].max() <= 2
    assert apart["accurate"].mean() < 0.5
    assert apart["fast"].mean() < 2  # the fast transform's own error, on a picture of hard edges
    assert np.abs(whole - recorded["accurate"]).mean() > 5
    assert rules.crop == 0.9


def test_a_report_shows_a_perturbed_suite_by_task_with_paired_differences(exported: Path) -> None:
    for name, perturb in (("plain", ()), ("moved", ("init",))):
        rows = libero_suite("libero_spatial", "openpi", 4, perturb)[:2]
        rows = tuple(replace(row, overrides={**row.overrides, "episode_length": 2, "cameras": ()}) for row in rows)
        play = PlayCfg(execute=5, horizon=5, policy_id="w")
        evaluate_suite(rows, wander, play=play, output=exported / name, num_envs=4, progress=False)
    report([exported / "plain", exported / "moved"], output=exported / "page.html")
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", (exported / "page.html").read_text())
    assert "w perturb=[&quot;init&quot;]" in cells
    at = cells.index("all of 2 tasks")
    assert cells[at + 1 : at + 3] == ["0% [0%, 32%]", "0% [0%, 32%]; +0% [-32%, +32%] over 8 pairs"]
    with pytest.raises(UnknownNameError, match="instruction"):
        libero_suite("libero_spatial", perturb=("words",))
    with pytest.raises(ConfigError, match="perturb"):
        headrace.EnvRecipe("libero_spatial/0", sim="mujoco-3.3", overrides={"perturb": ["init"]}).make()


def test_the_command_refuses_what_does_not_fit_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "libero_spatial", "--protocol", "nobody"]) == 2
    assert main(["evaluate", "ant", "--trials", "3"]) == 2
    assert main(["evaluate", "libero_spatial", "--perturb", "camera,words"]) == 2
    assert main(["evaluate", "libero_spatial", "--episodes", "3"]) == 2
    told = capsys.readouterr().err
    assert "unknown protocol" in told
    assert "suite of LIBERO" in told


def test_the_plain_reference_in_another_interpreter_plays_the_same_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_LIBERO_PYTHON", sys.executable)
    overrides = {"episode_length": 6, "waits": 2, "cameras": ()}
    seen = {}
    for sim in ("mujoco", "mujoco-3.3"):
        recipe = headrace.EnvRecipe("libero_spatial/0", num_envs=2, sim=sim, overrides=overrides)
        env = recipe.make(autoreset="disabled")
        rows = []
        for first in (3, 11):  # the second time the environment has played before
            obs, _ = env.reset(options={"episode_ids": torch.tensor([first, first + 1])})
            rows.append(obs["critic"])
            for step in range(3):
                rows.append(env.step(torch.full((2, 7), 0.3 * step)).obs["critic"])
        assert set(env.instructions()) == {"put the cube on the plate"}
        seen[sim] = torch.stack(rows)
        env.close()
    assert (seen["mujoco"] - seen["mujoco-3.3"]).abs().max() < 1e-6
    play = PlayCfg(execute=5, horizon=5)
    found = compare_sims("libero_spatial/0", wander, list(seen), episodes=3, overrides=overrides, play=play)
    assert found.disagreements == ()
    assert len(found.tables["mujoco-3.3"].episodes) == 3
    assert "0 episodes with different outcomes" in str(found.summary().caption)


def test_another_simulation_is_for_libero_alone_and_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="task of LIBERO"):
        headrace.EnvRecipe("ant", sim="robosuite")
    monkeypatch.setenv("HEADRACE_LIBERO_PYTHON", "/no/python")
    with pytest.raises(ConfigError, match=r"setup_libero\.sh"):
        headrace.EnvRecipe("libero_spatial/0", sim="mujoco-3.3").make()
    with pytest.raises(ConfigError, match="another interpreter"):
        headrace.make("libero_spatial/0", sim="robosuite")
