"""LIBERO's native task on a scene of our own: controller, reference, contract, predicates, errors."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch

import headrace
from headrace import EnvRecipe, testing
from headrace.bench.story import film_libero
from headrace.envs.tasks.libero.exported import export_tasks, find_assets, find_missing_files, list_tasks, load_exported
from headrace.envs.tasks.libero.names import PERTURBATIONS, SUITES, libero_names
from headrace.envs.tasks.libero.plain import SUBSTEPS, WAIT, PlainLibero, load_plain, rotation, soften_tables
from headrace.errors import ConfigError, DataError, EnvError, UnknownNameError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from scene import GOALS, fixture_draws, write_scene  # noqa: E402

NAME = "libero_spatial/0"
STATE = {"cameras": ()}
SMALL = {"pixels": 48, "waits": 2}


@pytest.fixture(autouse=True)
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_LIBERO_EXPORT", str(tmp_path))
    write_scene(tmp_path / "libero_spatial-0.npz")
    return tmp_path / "libero_spatial-0.npz"


def play_plain(file: Path, episode: int, env: headrace.BatchEnv, row: int, waits: int = 10) -> PlainLibero:
    """Begin an episode of the plain reference with the cabinet where the environment has it."""
    plain, arrays = load_plain(str(file))
    at = plain.model.body("cabinet_main").id
    fields = env.sim.expanded
    pose = np.concatenate([fields["body_pos"][row, at].numpy(), fields["body_quat"][row, at].numpy()])
    plain.reset(arrays["states"][episode % len(arrays["states"])], {"cabinet_main": pose})
    for _ in range(waits):
        plain.step(np.array(WAIT))
    return plain


def name_a_lost_file(exported: Path, target: Path) -> None:
    """Write a task whose model names a file that has moved."""
    with np.load(exported) as data:
        arrays = dict(data)
    arrays["xml"] = np.array(str(arrays["xml"]).replace("<asset>", '<asset><mesh name="m" file="/no/mesh.stl"/>'))
    np.savez(target, **arrays)


def test_joints_are_those_of_robosuites_own_controller() -> None:
    reference = json.loads((HERE / "robosuite_reference.json").read_text())
    env = headrace.make(NAME, 1, overrides={**STATE, "waits": 0})
    env.reset(options={"episode_ids": torch.tensor([0])})
    at = [*range(9)]
    for action, joints in zip(np.random.default_rng(7).uniform(-1, 1, (20, 7)), reference["joints"], strict=True):
        env.step(torch.from_numpy(action[None]))
        assert np.abs(env.sim.field("qpos")[0, at].numpy() - joints).max() < 1e-7
    env.close()


@pytest.mark.parametrize("waits", [0, 3])
def test_every_row_is_the_plain_reference(exported: Path, waits: int) -> None:
    env = headrace.make(NAME, 3, overrides={**STATE, "waits": waits})
    obs, _ = env.reset(seed=3)
    plains = [play_plain(exported, row, env, row, waits) for row in range(3)]
    actions = np.random.default_rng(1).uniform(-1.5, 1.5, (12, 3, 7)).clip(-1, 1)
    actions[4:6, :, 3:6] = 0.0  # the orientation's goal is kept
    for step, action in enumerate(actions):
        for row, plain in enumerate(plains):
            seen = np.concatenate([plain.seen["eef_pos"], plain.seen["eef_quat"], plain.seen["gripper_qpos"]])
            assert np.abs(obs["critic"][row].numpy() - np.concatenate([seen, plain.seen["qpos"]])).max() < 1e-6, step
            assert np.abs(env.sim.field("qpos")[row].numpy() - plain.data.qpos).max() < 1e-10, step
        result = env.step(torch.from_numpy(action))
        assert [plain.step(action[row]) for row, plain in enumerate(plains)] == result.terminated.tolist()
        obs = result.obs
    env.close()


def test_observations_are_those_before_the_last_two_physics_steps(exported: Path) -> None:
    env = headrace.make(NAME, 1, overrides={**STATE, "waits": 0})
    env.reset(seed=0)
    seen: list[np.ndarray] = []

    class Watch:
        needs = frozenset({"substeps"})

        def after_step(self, record: object) -> None: ...
        def after_reset(self, record: object) -> None: ...
        def after_substep(self, record: headrace.types.SubstepRecord) -> None:
            seen.append(record.states[0].numpy().copy())

    env.attach(Watch())
    obs = env.step(torch.full((1, 7), 0.5)).obs["critic"][0].numpy()
    assert len(seen) == SUBSTEPS
    # the state vector begins with time and positions
    assert np.allclose(obs[9:], seen[22][1 : 1 + len(obs) - 9], atol=1e-6)
    assert np.allclose(obs[7:9], seen[23][8:10], atol=1e-7)
    assert not np.allclose(obs[9:16], seen[24][1:8], atol=1e-6)
    env.close()


@pytest.mark.parametrize("overrides", [STATE, SMALL], ids=["state", "cameras"])
def test_the_task_keeps_the_contract(overrides) -> None:
    make = partial(headrace.make, NAME, overrides={"episode_length": 5, "waits": 1, **overrides})
    results = testing.check_env(partial(make, threads=1), sizes=(1, 8, 32), steps=4)
    assert [str(result) for result in results if result.not_claimed] == []


def test_episodes_take_the_initial_state_of_their_id_and_fixtures_from_their_own_stream() -> None:
    env = headrace.make(NAME, 8, overrides={**STATE, "waits": 0})
    env.reset(options={"episode_ids": torch.arange(8)})
    states = load_exported(NAME).states
    assert np.array_equal(env.sim.field("qpos").numpy(), states[np.arange(8) % len(states), 1 : 1 + env.task.model.nq])
    poses = env.sim.expanded["body_pos"][:, env.task.model.body("cabinet_main").id, 0].numpy()
    assert set(poses) <= set(fixture_draws()[0, :, 0])
    assert len(set(poses)) > 1
    env.reset(options={"episode_ids": torch.arange(8)})
    again = env.sim.expanded["body_pos"][:, env.task.model.body("cabinet_main").id, 0].numpy()
    assert np.array_equal(again, poses)
    assert set(env.instructions()) == {"put the cube on the plate"}
    env.close()


@pytest.mark.parametrize("goal", GOALS)
def test_predicates_are_true_and_false_as_in_the_plain_reference(exported: Path, goal: str) -> None:
    write_scene(exported, goal)
    env = headrace.make(NAME, 1, overrides={**STATE, "waits": 0})
    env.reset(seed=0)
    plain = play_plain(exported, 0, env, 0, 0)
    rng, verdicts = np.random.default_rng(0), []
    targets = {"in-site": (0.3, 0.3, 0.1), "on-site": (0.3, 0.3, 0.18), "on-object": (0.1, -0.15, 0.035)}
    for _ in range(200):
        qpos = plain.data.qpos.copy()
        if goal in ("open", "close"):
            qpos[-2] = rng.choice([rng.uniform(-0.2, 0.2), 0.0, -0.14])
        elif goal.startswith("turn"):
            qpos[-1] = rng.choice([rng.uniform(-1.0, 1.0), 0.0, 0.5])
        else:
            center = targets.get(goal, (0.3, -0.3, 0.06))
            qpos[9:12] = np.array(center) + rng.uniform(-0.06, 0.06, 3) * (
                (1.8, 1.8, 0.8) if goal == "in-site" else (1.0, 1.0, 0.3)
            )
        env.sim.field("qpos")[0] = torch.from_numpy(qpos)
        env.sim.forward(None)
        plain.data.qpos[:] = qpos
        mujoco.mj_forward(plain.model, plain.data)
        verdict = bool(env.task.terminated(env.rows())[0])
        assert verdict == plain.holds(), qpos
        verdicts.append(verdict)
    assert 5 < sum(verdicts) < 195
    env.close()


def test_a_geom_that_libero_leaves_out_does_not_count_as_contact(exported: Path) -> None:
    write_scene(exported, "on-except")
    env = headrace.make(NAME, 1, overrides={**STATE, "waits": 0})
    env.reset(seed=0)
    for place, expected in (((0.3, -0.3, 0.0799), False), ((0.3, -0.275, 0.0599), True)):
        env.sim.field("qpos")[0, 9:12] = torch.tensor(place)  # on the geom alone; beside it, on the stove
        env.sim.forward(None)
        assert bool(env.task.terminated(env.rows())[0]) == expected
    env.close()


@pytest.mark.parametrize(("sunk", "speed"), [(0.02, 2.5), (0.0292, 3.65)])
def test_a_thing_that_begins_in_its_table_is_thrown_up_at_half_the_speed_of_mujoco_4(sunk: float, speed: float) -> None:
    """As in MuJoCo 3.3.2: LIBERO's ketchup begins 29.2 mm in its table, and leaves it at 1.826 m/s (3.653 in 4.0)."""
    xml = f"""<mujoco><option timestep="0.002" cone="elliptic" impratio="20"/>
      <default><geom solref="0.001 1" solimp="0.998 0.998 0.001"/></default>
      <worldbody><geom type="box" size="1 1 0.1" pos="0 0 -0.1"/>
        <body pos="0 0 {0.05 - sunk}"><freejoint/><geom type="box" size="0.05 0.03 0.05"/></body>
      </worldbody></mujoco>"""
    speeds = []
    for soften in (False, True):
        model = mujoco.MjModel.from_xml_string(xml)
        if soften:
            soften_tables(model)
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data)
        speeds.append(data.qvel[2])
    assert speeds[0] == pytest.approx(speed, rel=0.03)
    assert speeds[1] == pytest.approx(speed / 2, rel=0.03)


def test_a_burner_is_seen_one_step_after_its_knob_is_turned() -> None:
    env = headrace.make(NAME, 2, overrides={"pixels": 64, "waits": 0, "cameras": ("agentview",), "specular": False})
    obs, _ = env.reset(seed=0)
    still = torch.zeros(2, 7)
    env.sim.field("qpos")[1, -1] = 1.0  # past 0.5
    before = env.step(still).obs["agentview"][1]
    red = (before[..., 0].int() - before[..., 1].int() > 100).sum()
    assert red > (obs["agentview"][1][..., 0].int() - obs["agentview"][1][..., 1].int() > 100).sum()
    env.sim.field("qpos")[1, -1] = 0.0
    after = env.step(still).obs["agentview"][1]
    assert (after[..., 0].int() - after[..., 1].int() > 100).sum() < red
    env.close()


def test_unread_cameras_and_state_alone_do_not_change_the_physics() -> None:
    action = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (6, 2, 7)))
    ends = []
    for overrides in (STATE, {"pixels": 16}):
        env = headrace.make(NAME, 2, overrides=overrides)
        env.reset(seed=0)
        for each in action:
            env.step(each, observe=torch.zeros(2, dtype=torch.bool))
        ends.append(env.sim.states(None).numpy())
        env.close()
    assert np.array_equal(*ends)


@pytest.mark.parametrize("axis", PERTURBATIONS)
def test_a_perturbation_changes_its_axis_alone_and_is_a_function_of_the_episode(axis: str) -> None:
    seen, texts = {}, set[str]()
    for perturb, num_envs in (((), 4), ((axis,), 4), ((axis,), 1)):
        overrides = {"pixels": 32, "waits": 0, "specular": False, "perturb": perturb}
        env = headrace.make(NAME, num_envs, overrides=overrides)
        ids = torch.arange(4)[-num_envs:]
        obs, _ = env.reset(options={"episode_ids": ids})
        camera, hand = (obs[name][-1].int() for name in ("agentview", "robot0_eye_in_hand"))
        seen[perturb, num_envs] = camera, hand, obs["critic"][-1], env.instructions()[-1]
        texts |= set(env.instructions())
        env.close()
    plain, perturbed, alone = seen.values()
    changed = {
        "camera": not torch.equal(plain[0], perturbed[0]) and torch.equal(plain[1], perturbed[1]),
        "light": (plain[0] - perturbed[0]).abs().float().mean() > 1,
        "texture": (plain[0] - perturbed[0]).abs().float().mean() > 1,
        "init": 0.001 < (plain[2] - perturbed[2]).abs().max() <= 0.2,
        "instruction": len(texts) > 2,
    }
    assert changed[axis]
    assert torch.equal(plain[2], perturbed[2]) == (axis != "init")
    assert torch.equal(plain[0], perturbed[0]) == (axis == "instruction")
    assert all(a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(perturbed, alone, strict=True))
    if axis != "instruction":
        assert plain[3] == perturbed[3]


def test_rotations_are_rounded_as_robosuite_rounds_them() -> None:
    turn = rotation(np.array([0.3, -0.2, 0.1]))
    assert np.abs(turn @ turn.T - np.eye(3)).max() < 1e-6
    assert turn[0, 1] == np.float32(turn[0, 1])


def test_names_are_those_of_the_benchmark_and_others_are_refused() -> None:
    assert len(libero_names()) == 130
    assert EnvRecipe("libero_90/89").resolve().source == "libero_90/89"
    with pytest.raises(ConfigError, match="libero_goal/0 to libero_goal/9"):
        headrace.make("libero_goal/10")
    with pytest.raises(UnknownNameError, match="libero_spatial"):
        EnvRecipe("libero_spacial/0").resolve()
    assert [name for name, words in list_tasks() if words is not None] == [NAME]
    assert headrace.make(NAME, 1, overrides=STATE).task.cfg.episode_length == 220
    assert sum(SUITES.values()) == 130


def test_what_is_missing_is_an_error_before_anything_is_built(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="headrace libero export libero_goal"):
        headrace.make("libero_goal/1")
    name_a_lost_file(exported, exported)
    with pytest.raises(DataError, match=r"/no/mesh\.stl"):
        headrace.make(NAME)
    monkeypatch.setenv("HEADRACE_LIBERO_ASSETS", str(tmp_path))
    with pytest.raises(ConfigError, match="HEADRACE_LIBERO_ASSETS"):
        find_assets()
    with pytest.raises(ConfigError, match="decimation"):
        headrace.make(NAME, overrides={"decimation": 10})


def test_the_demo_leaves_libero_out_where_its_files_have_moved(exported: Path, tmp_path: Path) -> None:
    shown: list[object] = []
    assert film_libero(tmp_path, shown.append) == []
    assert shown == []  # not exported
    name_a_lost_file(exported, tmp_path / "libero_object-0.npz")
    assert film_libero(tmp_path, shown.append) == []
    assert "LIBERO is left out" in str(shown)
    assert "/no/mesh.stl" in str(shown)


def test_assets_are_found_by_variable_and_by_liberos_own_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assets = tmp_path / "assets"
    for name in ("articulated_objects", "scenes", "stable_scanned_objects", "textures"):
        (assets / name).mkdir(parents=True)
    monkeypatch.delenv("HEADRACE_LIBERO_ASSETS", raising=False)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        find_assets()
    (tmp_path / "config.yaml").write_text(f"assets: {assets}\n")
    assert find_assets() == assets.resolve()
    (assets / "scenes" / "a.xml").write_text('<a file="gone.png"/><!-- file="never.png" --><b file="/home/x.png"/>')
    assert find_missing_files(assets) == ["scenes/a.xml: gone.png"]


def test_an_export_reports_each_task_and_says_why_it_ended_too_soon(tmp_path: Path) -> None:
    child = tmp_path / "python"
    line = '{"name": "libero_goal/0", "cached": true, "error": null, "seconds": 0.1}'
    child.write_text(f"#!/bin/sh\necho '{line}'\necho 'no GL' >&2\n")
    child.chmod(0o755)
    lines = export_tasks(["libero_goal/0", "libero_goal/1"], child, tmp_path)
    assert next(lines).cached
    with pytest.raises(EnvError, match=r"after 1 of 2 tasks: no GL"):
        next(lines)
    with pytest.raises(ConfigError, match="interpreter"):
        next(export_tasks(["libero_goal/0"], tmp_path / "nowhere", tmp_path))
    with pytest.raises(DataError, match="libero export"):
        load_exported("libero_goal/0")
