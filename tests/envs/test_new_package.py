"""``headrace new``: the package that it writes works as it is."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import torch

import headrace
from headrace.cli import main
from headrace.envs.new_package import new_package
from headrace.errors import ConfigError

PUSHER = Path(gymnasium.__file__).parent / "envs/mujoco/assets/pusher_v5.xml"
URDF = """<robot name="two"><link name="base"><inertial><mass value="1"/><inertia ixx="1" iyy="1" izz="1" ixy="0" ixz="0" iyz="0"/></inertial></link>
<link name="rod"><inertial><origin xyz="0 0 .2"/><mass value="1"/><inertia ixx=".1" iyy=".1" izz=".1" ixy="0" ixz="0" iyz="0"/></inertial>
<visual><geometry><box size=".1 .1 .4"/></geometry></visual></link>
<joint name="swing" type="revolute"><parent link="base"/><child link="rod"/><axis xyz="0 1 0"/><limit lower="-1" upper="1" effort="3" velocity="1"/></joint></robot>"""  # noqa: E501


def test_the_tests_of_a_new_package_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my-arm"]) == 0
    run = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd="my-arm", capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
    assert "4 passed" in run.stdout


@pytest.mark.parametrize("source", ["pusher", "urdf"])
def test_a_model_file_becomes_tasks_with_three_kinds_of_actions(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = PUSHER
    if source == "urdf":
        model = tmp_path / "urdf" / "two.urdf"
        model.parent.mkdir()
        model.write_text(URDF)
    name = f"from-{source}"
    root = new_package(name, tmp_path / "package", model=model)
    monkeypatch.syspath_prepend(str(root))
    module = importlib.import_module(name.replace("-", "_"))
    joints = 7 if source == "pusher" else 1
    reached: dict[str, float] = {}
    for actions in ("TORQUE", "POSITION", "DELTA"):
        env = headrace.make(f"{module.__name__}:{actions}", 2, seed=0)
        env.reset()
        assert env.single_action_space.shape == (joints,)
        before = env.sim.field("qpos")[:, 0].clone()
        for _ in range(5):
            step = env.step(torch.full((2, joints), 0.5))
        assert bool(torch.isfinite(step.reward).all())
        reached[actions] = float((env.sim.field("qpos")[:, 0] - before).mean())
        env.close()
    assert all(change > 0 for change in reached.values()), "a positive action moves the joint forward"
    assert reached["DELTA"] < 5 * 0.05 + 0.1, "a delta is a distance from where the joint is"


def test_what_cannot_become_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a name such as my-robot"):
        new_package("My Robot", tmp_path / "a")
    with pytest.raises(ConfigError, match="not there yet"):
        new_package("mine", tmp_path)
    with pytest.raises(ConfigError, match="there is none"):
        new_package("mine", tmp_path / "a", model=tmp_path / "robot.xml")
    (tmp_path / "broken.xml").write_text("<mujoco><worldbody><geom/></worldbody></mujoco>")
    with pytest.raises(ConfigError, match="cannot be compiled"):
        new_package("mine", tmp_path / "a", model=tmp_path / "broken.xml")
    (tmp_path / "still.xml").write_text("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
    with pytest.raises(ConfigError, match="one actuator per joint"):
        new_package("mine", tmp_path / "a", model=tmp_path / "still.xml")
    assert not (tmp_path / "a").exists()


def test_the_files_that_a_model_names_are_copied_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "here/meshes").mkdir(parents=True)
    (tmp_path / "here/notes.txt").write_text("no part of the robot")
    corners = "".join(f"v {i & 1} {i >> 1 & 1} {i >> 2}\n" for i in range(8))
    (tmp_path / "here/meshes/part.obj").write_text(corners + "f 1 2 3\nf 5 6 7\nf 1 5 8\n")
    xml = """<mujoco><compiler meshdir="{}"/><asset><mesh name="part" file="part.obj"/></asset><worldbody><body>
    <joint name="hinge" type="hinge"/><geom type="mesh" mesh="part"/></body></worldbody></mujoco>"""
    model = tmp_path / "here/robot.xml"
    model.write_text(xml.format("meshes"))
    home = new_package("mine", tmp_path / "mine", model=model) / "mine/model"
    assert sorted(str(file.relative_to(home)) for file in home.rglob("*.*")) == ["meshes/part.obj", "robot.xml"]
    (tmp_path / "here/below").mkdir()
    (tmp_path / "here/below/robot.xml").write_text(xml.format("../meshes"))
    with pytest.raises(ConfigError, match="expected meshes and textures below"):
        new_package("other", tmp_path / "other", model=tmp_path / "here/below/robot.xml")
    assert not (tmp_path / "other").exists()
