"""The table form: the same numbers as the class form, and every part of a table does what it says."""

from __future__ import annotations

import dataclasses

import mujoco
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from term_examples import eventful_cartpole

from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import with_overrides
from headrace.envs.registry import make, task_cfg
from headrace.envs.task import Rows
from headrace.envs.tasks.cartpole import cartpole_terms
from headrace.envs.term_task import TermTask, TermTaskCfg
from headrace.envs.terms import (
    BodiesNear,
    BodyBelow,
    BodyPosition,
    Distance,
    Effort,
    IntervalEvent,
    JointPositions,
    JointVelocityL2,
    ObservationTerm,
    PositionTarget,
    Ramp,
    ResetEvent,
    ResetJoints,
    SuccessTerm,
    level_memory,
)
from headrace.errors import ConfigError, DtypeError, ShapeError
from headrace.types import Step


def assert_same(a: Step, b: Step) -> None:
    assert set(a.obs) == set(b.obs)
    assert all(torch.equal(a.obs[group], b.obs[group]) for group in a.obs)
    assert torch.equal(a.reward, b.reward)
    assert torch.equal(a.terminated, b.terminated)
    assert torch.equal(a.truncated, b.truncated)
    assert set(a.info) == set(b.info)
    if "ends" in a.info:
        for field in dataclasses.fields(a.info["ends"]):
            x, y = getattr(a.info["ends"], field.name), getattr(b.info["ends"], field.name)
            assert torch.equal(x, y), field.name
        assert torch.equal(a.info["final_obs"]["policy"], b.info["final_obs"]["policy"])


def now(env: BatchEnv) -> Rows:
    return env.rows()


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), num_envs=st.integers(1, 9), length=st.sampled_from([7, 300]), data=st.data())
def test_cartpole_as_a_table_gives_the_same_numbers_as_the_class(seed, num_envs, length, data) -> None:
    overrides = {"episode_length": length}
    a = make("cartpole", num_envs, seed=seed, overrides=overrides)
    b = make("cartpole-terms", num_envs, seed=seed, overrides=overrides)
    assert a.single_action_space == b.single_action_space
    assert a.single_observation_space == b.single_observation_space
    assert a.task.success_measure == b.task.success_measure
    first, second = a.reset()[0], b.reset()[0]
    assert torch.equal(first["policy"], second["policy"])
    generator = torch.Generator().manual_seed(seed)
    for _ in range(40):
        if data.draw(st.integers(0, 9)) == 0:
            mask = torch.rand(num_envs, generator=generator) < 0.5
            for env in (a, b):
                env.resume(range(num_envs))
                env.suspend(mask)
        if data.draw(st.integers(0, 19)) == 0:
            mask = torch.rand(num_envs, generator=generator) < 0.5
            again = [env.reset(options={"reset_mask": mask})[0]["policy"] for env in (a, b)]
            assert torch.equal(*again)
        actions = torch.rand((num_envs, 1), generator=generator) * 2 - 1
        assert_same(a.step(actions), b.step(actions))
        assert torch.equal(a.sim.states(None), b.sim.states(None))


def test_settings_of_the_table_reach_the_numbers_through_their_paths() -> None:
    plain = make("cartpole-terms", 3, seed=1)
    changed = make(
        "cartpole-terms",
        3,
        seed=1,
        overrides={
            "rewards.alive.weight": 2,
            "rewards.lean.weight": 0.0,
            "rewards.stray.weight": 0.0,
            "observations.policy.positions.scale": 10.0,
            "events.start.function.positions": (0.0, 0.0),
            "terminations.fallen.high": 0.0,
            "actions.push.scale": 0.5,
        },
    )
    obs = changed.reset()[0]["policy"]
    assert torch.equal(obs[:, :2], torch.zeros(3, 2))
    assert torch.equal(obs[:, 2:], plain.reset()[0]["policy"][:, 2:])
    step = changed.step(torch.full((3, 1), -1.0))
    assert torch.equal(step.reward, torch.full((3,), 2.0))
    assert bool((changed.sim.field("ctrl")[~(step.terminated)] == -0.5).all())
    leaning_right = step.info["final_obs"]["policy"][:, 1] > 0 if "final_obs" in step.info else step.terminated
    assert torch.equal(step.terminated, leaning_right)
    assert changed.single_action_space.high.tolist() == [2.0]


def test_observation_noise_is_new_each_step_has_its_size_and_belongs_to_the_episode() -> None:
    overrides = {"observations.policy.positions.noise_std": 0.1}
    env = make("cartpole-terms", 400, seed=3, overrides=overrides)
    env.reset()
    seen = []
    for _ in range(5):
        env.step(torch.zeros(400, 1))
        rows = now(env)
        true = rows.get("qpos")
        seen.append(env.task.observe(rows)["policy"][:, :2] - true)
        assert torch.equal(env.task.observe(rows)["policy"][:, :2] - true, seen[-1])
        assert torch.equal(env.task.observe(rows)["policy"][:, 2:], rows.get("qvel"))
    noise = torch.stack(seen)
    assert len(noise.unique()) == noise.numel()
    # 4,000 draws: the standard error of the standard deviation is 0.1/sqrt(8000) = 0.0011, of the mean 0.0016
    assert abs(float(noise.std()) - 0.1) < 0.006
    assert abs(float(noise.mean())) < 0.008


def test_interval_events_come_after_the_drawn_number_of_steps() -> None:
    fired: list[tuple[int, int]] = []

    def note(rows: Rows, stream: str) -> None:
        assert stream == "push"
        fired.extend(zip(rows.ids.tolist(), rows.steps.tolist(), strict=True))

    cfg = dataclasses.replace(
        task_cfg("cartpole-terms", {"terminations.fallen.high": 1e3, "terminations.fallen.low": -1e3}),
        events={"push": IntervalEvent(function=note, interval=(3, 5))},
    )
    env = make(TermTask(cfg), 20, seed=4)
    env.reset()
    for _ in range(100):
        env.step(torch.zeros(20, 1))
    gaps: list[int] = []
    for i in range(20):
        times = [0, *(at for row, at in fired if row == i)]
        gaps.extend(np.diff(times).tolist())
        assert times[-1] > 90
    assert set(gaps) == {3, 4, 5}
    # about 500 gaps: each third is within 5 standard deviations (10.5) of its share
    assert all(abs(gaps.count(gap) - len(gaps) / 3) < 53 for gap in (3, 4, 5))


def test_a_push_changes_the_velocity_only_of_the_rows_that_are_due() -> None:
    quiet = task_cfg("cartpole-terms")
    cfg = dataclasses.replace(quiet, events={**quiet.events, "push": eventful_cartpole().events["push"]})
    pushed, calm = make(TermTask(cfg), 32, seed=5), make("cartpole-terms", 32, seed=5)
    pushed.reset()
    calm.reset()
    still_equal = torch.ones(32, dtype=torch.bool)
    changes = []
    for at in range(8):
        a, b = pushed.step(torch.zeros(32, 1)), calm.step(torch.zeros(32, 1))
        equal = (a.obs["policy"] == b.obs["policy"]).all(dim=1)
        if at < 3:
            assert bool(equal.all())
        changes.append(int((still_equal & ~equal).sum()))
        still_equal &= equal
    assert changes[:3] == [0, 0, 0]
    assert all(count > 0 for count in changes[3:])
    assert not bool(still_equal.any())


def test_an_interval_event_may_read_derived_fields_that_nothing_else_reads() -> None:
    seen: list[torch.Tensor] = []

    def look(rows: Rows, stream: str) -> None:
        seen.append(rows.get("subtree_com")[:, 1])

    cfg = dataclasses.replace(cartpole_terms(), events={"look": IntervalEvent(function=look, interval=(1, 1))})
    env = make(TermTask(cfg), 2)
    env.reset()
    env.step(torch.zeros(2, 1))
    env.step(torch.zeros(2, 1))
    assert len(seen[-1]) == 2
    assert bool((seen[-1] != 0).any())


def test_curriculum_levels_are_a_function_of_the_episode_id() -> None:
    env = make(TermTask(eventful_cartpole()), 4, seed=0)
    env.reset(options={"episode_ids": torch.tensor([0, 25, 100, 1000])})
    assert now(env).recall(level_memory("difficulty")).tolist() == [0.0, 0.25, 1.0, 1.0]
    damping = now(env).get_model("dof_damping")[:, 1]
    assert float(damping[0]) == 0.0
    assert bool((damping[1:] > 0.0).all())
    assert float(damping[1]) <= 0.025


def test_randomization_moves_from_nothing_to_its_whole_range_with_the_level() -> None:
    cfg = eventful_cartpole()
    whole = dataclasses.replace(cfg.randomization["damping"], curriculum=None)
    without = dataclasses.replace(cfg, randomization={**cfg.randomization, "damping": whole})
    ids = torch.tensor([10, 50, 100])
    damping = []
    for table in (cfg, without):
        env = make(TermTask(table), 3, seed=0)
        env.reset(options={"episode_ids": ids})
        damping.append(now(env).get_model("dof_damping")[:, 1])
    # the model's own damping is 0: the level is a plain factor
    assert torch.equal(damping[0], torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64) * damping[1])


def test_what_is_written_through_some_rows_is_seen_in_all_of_them() -> None:
    env = make("cartpole", 3)
    env.reset()
    rows = now(env)
    before = rows.get("qpos")
    rows.where(torch.tensor([False, True, False])).where(torch.tensor([True])).set("qpos", torch.full((1, 2), 9.0))
    assert rows.get("qpos")[1].tolist() == [9.0, 9.0]
    assert torch.equal(rows.get("qpos")[[0, 2]], before[[0, 2]])


def test_ramp_goes_from_zero_to_one_between_first_and_last() -> None:
    ids = torch.tensor([0, 10, 15, 20, 99])
    assert Ramp(first=10, last=20)(ids).tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


def test_success_by_condition_is_reported_and_differs_from_termination() -> None:
    cfg = dataclasses.replace(
        cartpole_terms(),
        episode_length=3,
        success=SuccessTerm(
            measure="cart and pole are one body", condition=BodiesNear(first="cart", second="pole", distance=1e-9)
        ),
    )
    env = make(TermTask(cfg), 2)
    env.reset()
    for _ in range(3):
        step = env.step(torch.zeros(2, 1))
    assert step.info["ends"].success.tolist() == [True, True]
    without = make(TermTask(dataclasses.replace(cfg, success=None)), 2)
    without.reset()
    for _ in range(3):
        step = without.step(torch.zeros(2, 1))
    assert step.info["ends"].success is None


def test_library_terms_agree_with_the_plain_formulas() -> None:
    env = make(TermTask(eventful_cartpole()), 5, seed=2)
    env.reset()
    actions = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None]
    env.step(actions)
    env.step(2.0 * actions)
    rows = now(env)
    qpos, qvel = rows.get("qpos"), rows.get("qvel")
    critic, policy = env.task.observe(rows)["critic"], env.task.observe(rows)["policy"]
    torch.testing.assert_close(critic[:, 4], torch.full((5,), 0.04, dtype=torch.float64))
    # derived fields lag one substep (0.01 s), in which the pole turns by less than 0.05 rad
    torch.testing.assert_close(critic[:, 5], qpos[:, 1].cos(), rtol=0.0, atol=0.05)
    assert torch.equal(policy[:, 4:], 2.0 * actions)
    expected = 1.0 - qpos[:, 1] ** 2 - 0.02 * qpos[:, 0] ** 2 - 0.04 * actions[:, 0] ** 2 - 0.01 * actions[:, 0] ** 2
    # the same sum in another order of operations
    torch.testing.assert_close(env.task.reward(rows, actions), expected, rtol=1e-14, atol=0.0)
    assert torch.equal(JointPositions()(rows), qpos)
    assert torch.equal(JointPositions(joints=("hinge",))(rows), qpos[:, 1:])
    assert torch.equal(JointPositions(joints=("hinge", "slider"))(rows), qpos.flip(1))
    assert torch.equal(JointVelocityL2()(rows), (qvel * qvel).sum(dim=1))
    assert torch.equal(BodyPosition(body="pole")(rows), rows.get("xpos", 2))
    assert Distance(first="cart", second="pole")(rows).tolist() == [0.0] * 5
    assert BodyBelow(body="cart", height=1.0)(rows).all()
    assert not BodyBelow(body="cart", height=-1.0)(rows).any()


def test_position_targets_are_reached_and_the_servo_runs_in_every_physics_step() -> None:
    cfg = dataclasses.replace(
        cartpole_terms(),
        decimation=10,
        episode_length=1000,
        actions={"place": PositionTarget(actuators=("push",), kp=50.0, kd=15.0, scale=0.5, offset=0.25)},
        terminations={},
        success=None,
    )
    task = TermTask(cfg)
    assert task.action_space.low.tolist() == [-1.0]
    env = make(task, 3, seed=0)
    env.reset()
    targets = torch.tensor([[-1.0], [0.0], [1.0]])
    for _ in range(100):
        env.step(targets)
    # the swinging pole (0.1 kg) pulls the servo off its target by at most some newtons over 50 N/m
    place = env.sim.field("qpos")[:, 0]
    torch.testing.assert_close(place, torch.tensor([-0.25, 0.25, 0.75], dtype=torch.float64), rtol=0.0, atol=0.1)

    # one control of ten substeps equals the formula applied by hand before each of them
    model, again = task.model, make(TermTask(cartpole_terms()), 1).task.model
    assert float(again.actuator_biasprm[0, 1]) == 0.0
    servo, motor = mujoco.MjData(model), mujoco.MjData(again)
    model.opt.integrator = again.opt.integrator = mujoco.mjtIntegrator.mjINT_EULER
    motor.qpos[0] = servo.qpos[0] = 0.02
    servo.ctrl[:] = 0.1
    for _ in range(200):
        motor.ctrl[:] = (50.0 * (0.1 - motor.qpos[0]) - 15.0 * motor.qvel[0]) / 10.0
        mujoco.mj_step(model, servo)
        mujoco.mj_step(again, motor)
    # rounding only: 200 steps of a stable motion
    np.testing.assert_allclose(servo.qpos, motor.qpos, rtol=0.0, atol=1e-12)
    assert abs(servo.qpos[0] - 0.1) < 0.02


def test_a_servo_is_no_stronger_than_the_motor_was() -> None:
    cfg = dataclasses.replace(cartpole_terms(), actions={"place": PositionTarget(kp=1e4, kd=0.0)})
    task = TermTask(cfg)
    assert task.model.actuator_forcerange.tolist() == [[-1.0, 1.0]]
    env = make(task, 1)
    env.reset()
    speed = env.sim.field("qvel")[0, 0].item()
    env.step(torch.ones(1, 1))
    # 10 N on 1 kg (and more with the pole) for 0.02 s
    assert 0.0 < env.sim.field("qvel")[0, 0].item() - speed < 0.21


def test_action_terms_share_the_action_by_columns() -> None:
    xml = (
        '<mujoco><worldbody><body><joint name="a" type="slide"/><geom size="0.1"/>'
        '<body pos="1 0 0"><joint name="b" type="slide"/><geom size="0.1"/></body></body></worldbody>'
        '<actuator><motor name="one" joint="a" ctrllimited="true" ctrlrange="-1 3"/>'
        '<position name="two" joint="b" kp="4"/></actuator></mujoco>'
    )
    cfg = dataclasses.replace(
        cartpole_terms(),
        model=xml,
        actions={
            "second": PositionTarget(actuators=("two",), scale=2.0),
            "first": Effort(actuators=("one",), offset=1.0),
        },
        observations={"policy": {"q": ObservationTerm(function=JointPositions())}},
        rewards={"alive": cartpole_terms().rewards["alive"]},
        terminations={},
        events={},
        success=None,
    )
    env = make(TermTask(cfg), 2)
    assert env.single_action_space.low.tolist() == [-1.0, -2.0]
    assert env.single_action_space.high.tolist() == [1.0, 2.0]
    env.reset()
    env.suspend([0])
    env.step(torch.tensor([[9.0, 9.0], [0.5, 0.25]]))
    assert env.sim.field("ctrl").tolist() == [[0.0, 0.0], [1.25, 1.0]]


def test_a_camera_of_a_table_shows_what_the_camera_of_the_class_shows() -> None:
    by_class = make("cartpole-camera", 2, seed=3)
    cfg = dataclasses.replace(
        cartpole_terms(),
        observations={"critic": cartpole_terms().observations["policy"]},
        images=by_class.task.images,
    )
    by_table = make(TermTask(cfg), 2, seed=3)
    assert by_table.single_observation_space == by_class.single_observation_space
    for envs in (by_class, by_table):
        envs.reset()
    for _ in range(3):
        assert_same(by_class.step(torch.ones(2, 1)), by_table.step(torch.ones(2, 1)))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"rewards.alive.function": lambda rows: torch.ones(1, 1, dtype=torch.float64)}, ShapeError, "rewards.alive"),
        ({"rewards.alive.function": lambda rows: torch.ones(1)}, DtypeError, "rewards.alive"),
        ({"terminations.fallen": lambda rows: torch.ones(1)}, DtypeError, "terminations.fallen"),
        ({"observations.policy.positions.function": lambda rows: torch.ones(3, 2)}, ShapeError, "policy.positions"),
        ({"terminations.fallen.joint": "hinges"}, ConfigError, "hinge"),
        ({"terminations.fallen.low": 5.0}, ConfigError, "low"),
        ({"events.start.function.positions": (0.1,)}, ConfigError, "one number for each"),
        ({"actions.push.scale": 0.0}, ConfigError, "other than 0"),
    ],
)
def test_a_wrong_term_is_named_when_the_task_is_made(change, error, words) -> None:
    with pytest.raises(error, match=words):
        TermTask(with_overrides(cartpole_terms(), change))


@pytest.mark.parametrize("part", ["actions", "observations", "rewards"])
def test_a_table_without_a_needed_part_is_refused(part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        dataclasses.replace(cartpole_terms(), **{part: {}})


def test_motors_without_gains_are_refused_as_position_targets() -> None:
    with pytest.raises(ConfigError, match="give kp and kd"):
        TermTask(dataclasses.replace(cartpole_terms(), actions={"place": PositionTarget()}))


@pytest.mark.parametrize("interval", [(0, 3), (4, 3), (3,)])
def test_an_impossible_interval_is_refused(interval) -> None:
    with pytest.raises(ConfigError, match="interval"):
        IntervalEvent(function=lambda rows, stream: None, interval=interval)


TWO_JOINTS = (
    '<mujoco><worldbody><body name="one"><joint name="a" type="slide"/><geom size="0.1"/>'
    '<body name="two" pos="1 0 0"><joint name="b" type="slide"/><geom size="0.1"/></body></body>'
    '<camera name="front" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/></worldbody>'
    '<actuator><motor name="left" joint="a"/><motor name="right" joint="b"/></actuator></mujoco>'
)


def two_joints(**parts: object) -> TermTaskCfg:
    plain = dataclasses.replace(
        cartpole_terms(),
        model=TWO_JOINTS,
        actions={"both": PositionTarget(kp=1.0, kd=0.0)},
        observations={"policy": {"q": ObservationTerm(function=JointPositions())}},
        rewards={"alive": cartpole_terms().rewards["alive"]},
        terminations={},
        events={},
        success=None,
    )
    return dataclasses.replace(plain, **parts)


def test_an_action_term_takes_a_number_per_actuator() -> None:
    servo = PositionTarget(scale=(1.0, 2.0), offset=(0.5, -0.5), kp=(3.0, 4.0), kd=(5.0, 6.0))
    task = TermTask(two_joints(actions={"both": servo}))
    assert task.model.actuator_gainprm[:, 0].tolist() == [3.0, 4.0]
    assert task.model.actuator_biasprm[:, 1:3].tolist() == [[-3.0, -5.0], [-4.0, -6.0]]
    env = make(task, 1)
    env.reset()
    env.step(torch.tensor([[0.5, 0.25]]))
    assert env.sim.field("ctrl").tolist() == [[1.0, 0.0]]
    changed = with_overrides(two_joints(), {"actions.both.offset": (1.0, 2.0)})
    assert changed.actions["both"].offset == (1.0, 2.0)  # a tuple where one number stood
    motors = make(TermTask(two_joints(actions={"both": Effort(scale=(2.0, 4.0))})), 1)
    motors.reset()
    motors.step(torch.tensor([[1.0, 1.0]]))
    assert motors.sim.field("ctrl").tolist() == [[2.0, 4.0]]


@pytest.mark.parametrize("setting", ["scale", "offset", "kp", "kd"])
def test_a_wrong_number_of_numbers_says_which_actuators_there_are(setting: str) -> None:
    servo = dataclasses.replace(PositionTarget(kp=1.0, kd=0.0), **{setting: (1.0, 1.0, 1.0)})
    with pytest.raises(ConfigError, match=rf"PositionTarget\.{setting}: .* 2, one per actuator \(left, right\), got 3"):
        TermTask(two_joints(actions={"both": servo}))


@pytest.mark.parametrize("wrong", ["much", (1.0, None), float("nan"), [1.0, 2.0]])
def test_what_is_no_number_is_refused_when_the_term_is_written(wrong) -> None:
    with pytest.raises(ConfigError, match=r"Effort\.offset: expected a number"):
        Effort(offset=wrong)


def test_joints_are_reset_around_a_pose() -> None:
    start = ResetJoints(joints=("a", "b"), positions=(0.1, 0.0), velocities=(0.0, 0.0), around=(1.0, -2.0))
    env = make(TermTask(two_joints(events={"start": ResetEvent(function=start)})), 8)
    places = env.reset()[0]["policy"]
    assert (places[:, 0] - 1.0).abs().max() <= 0.1
    assert len(places[:, 0].unique()) == 8
    assert (places[:, 1] == -2.0).all()
    with pytest.raises(ConfigError, match=r"ResetJoints\.around"):
        dataclasses.replace(start, around=(1.0,))
