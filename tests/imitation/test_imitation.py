"""Demonstrations of an expert, and a chunk policy cloned from them."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

import headrace
from headrace import load_policy
from headrace._interrupts import SignalInterrupt
from headrace.cli.main import build_parser
from headrace.envs.batch_env import BatchEnv
from headrace.envs.registry import make, make_task
from headrace.errors import ConfigError, DataError, HeadraceError, ShapeError, UnknownNameError
from headrace.imitation.cloning import CloneCfg, CloneTraining, MeanAction, clone, make_untrained
from headrace.imitation.demonstrations import Demonstrations, record_demonstrations
from headrace.imitation.experts import expert_for
from headrace.imitation.experts._arm import HIGHEST, LOWEST, arm_pose
from headrace.policies.act import ActCfg, ActPolicy, save_policy
from headrace.policies.protocol import ChunkContext
from headrace.statistics import wilson_interval
from headrace.types import Obs

EXPERT = expert_for("pusher-solid")


def arms(num_envs: int) -> BatchEnv:
    return make("pusher-solid", num_envs, autoreset="disabled", final_obs=False)


def random_angles(count: int) -> Tensor:
    share = torch.rand(count, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    low, high = torch.tensor(LOWEST, dtype=torch.float64), torch.tensor(HIGHEST, dtype=torch.float64)
    return low + share * (high - low)


def numbered(lengths: list[int]) -> Demonstrations:
    """Demonstrations whose action is episode · 1000 + step."""
    actions = torch.cat([1000.0 * i + torch.arange(length) for i, length in enumerate(lengths)])[:, None]
    return Demonstrations(
        obs=actions.clone(),
        actions=actions,
        left=torch.cat([torch.arange(length, 0, -1) for length in lengths]),
        episode_ids=torch.arange(len(lengths)),
        attempted=len(lengths),
    )


def linear(count: int = 4000) -> Demonstrations:
    """Episodes of 20 steps; the action at step t is the first observation, turned, times 1 + t/20."""
    start = torch.randn(count // 20, 3, generator=torch.Generator().manual_seed(0))
    step = torch.arange(20.0).repeat(count // 20)
    turned = (start @ torch.tensor([[0.0, 1.0], [-2.0, 0.0], [1.0, 1.0]])).repeat_interleave(20, dim=0)
    return Demonstrations(
        obs=torch.cat((start.repeat_interleave(20, dim=0), step[:, None]), dim=1),
        actions=turned * (1 + step[:, None] / 20),
        left=(20 - step).to(torch.int64),
        episode_ids=torch.arange(count // 20),
        attempted=count // 20,
    )


def test_the_experts_arm_is_where_mujoco_says_it_is() -> None:
    model = make_task("pusher-solid").model
    data = mujoco.MjData(model)
    assert np.allclose(model.jnt_range[:7], np.stack((LOWEST, HIGHEST), axis=1), atol=1e-12)
    angles = random_angles(20)
    pose = arm_pose(angles)
    point = pose.point((0.1, 0.02, -0.03))
    jacobian = pose.jacobian(point)
    tips = model.body("tips_arm").id
    for row in range(20):
        data.qpos[:7] = angles[row].numpy()
        mujoco.mj_forward(model, data)
        # the same chain of rotations by quaternions and by columns: a few units in the last place each
        assert np.allclose(pose.wrist[row], data.xpos[tips], atol=1e-12)
        assert np.allclose(pose.frame[row].reshape(-1), data.xmat[tips], atol=1e-12)
        assert np.allclose(pose.axes[row], data.xaxis[:7], atol=1e-12)
        expected = np.zeros((3, model.nv))
        mujoco.mj_jac(model, data, expected, None, point[row].numpy(), tips)
        assert np.allclose(jacobian[row], expected[:, :7], atol=1e-12)


def test_the_expert_sees_the_observation_alone_and_each_row_by_itself() -> None:
    env = arms(12)
    obs, _ = env.reset(seed=8)
    together = EXPERT(obs)
    apart = torch.cat([EXPERT({"policy": obs["policy"][i : i + 1]}) for i in range(12)])
    # matrix products of another batch size round differently
    assert torch.allclose(together, apart, atol=1e-5)
    assert float(together.abs().max()) <= 2.0


def test_the_expert_solves_most_episodes_it_was_not_tuned_on() -> None:
    env = arms(64)
    obs, _ = env.reset(seed=4242)
    solved = 0
    while bool(env.active.any()):
        obs, _, _, _, info = env.step(EXPERT(obs))
        if "ends" in info:
            solved += int(info["ends"].success.sum())
    assert wilson_interval(solved, 64).low > 0.7


def test_demonstrations_are_whole_successful_episodes_with_the_actions_the_expert_wanted() -> None:
    env = arms(8)
    demos = record_demonstrations(env, EXPERT, 10, seed=1, noise=0.5)
    assert len(demos.episode_ids) == 10
    assert demos.episode_ids.tolist() == sorted(set(demos.episode_ids.tolist()))
    assert demos.attempted == int(demos.episode_ids[-1]) + 1
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), (demos.left == 1).nonzero().squeeze(1)[:-1] + 1))
    assert len(starts) == 10
    assert int(demos.left[starts].sum()) == len(demos.obs) == len(demos.actions)
    many = make("pusher-solid", 64, autoreset="disabled")
    first, _ = many.reset(seed=1, options={"episode_ids": torch.arange(64)})
    assert torch.equal(demos.obs[starts], first["policy"][demos.episode_ids])
    # the labels are the expert's, undisturbed; matrix products of another batch size round differently
    assert torch.allclose(demos.actions, EXPERT({"policy": demos.obs}), atol=1e-4)


def test_chunks_are_the_actions_ahead_and_end_with_their_episode() -> None:
    demos = numbered([5, 3, 4])
    chunks, inside = demos.chunks(torch.tensor([0, 3, 5, 11]), 4)
    assert [row[mask].tolist() for row, mask in zip(chunks[..., 0], inside, strict=True)] == [
        [0.0, 1.0, 2.0, 3.0],
        [3.0, 4.0],
        [1000.0, 1001.0, 1002.0],
        [2003.0],
    ]


def test_a_clone_predicts_the_actions_ahead_far_better_than_their_mean() -> None:
    demos = linear()
    policy = clone(demos, CloneCfg(updates=60, batch=32))
    index = torch.arange(0, 4000, 7)
    target, inside = demos.chunks(index, policy.horizon)
    planned = policy({"policy": demos.obs[index]})
    assert planned.shape == (len(index), 16, 2)
    error = (planned - target).abs()[inside].mean()
    ignorant = (demos.actions.mean(dim=0) - target).abs()[inside].mean()
    # a few seconds of training must do; a policy that ignores its input has 1
    assert float(error / ignorant) < 0.5


def test_training_starts_from_the_untrained_policy_of_its_seed_and_does_not_touch_the_global_generator() -> None:
    demos = numbered([30, 30])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, same, other = (make_untrained(demos, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(one.queries, same.queries)
    assert not torch.equal(one.queries, other.queries)


def test_a_column_that_never_changes_does_not_blow_up() -> None:
    demos = numbered([20])
    constant = torch.full((20, 3), 7.0)
    policy = make_untrained(demos, seed=0)
    wide = ActPolicy(ActCfg(obs_dim=3, action_dim=1))
    wide.set_statistics(constant, demos.actions)
    assert bool(torch.isfinite(wide({"policy": constant})).all())
    assert bool(torch.isfinite(policy({"policy": demos.obs})).all())


def test_an_action_that_never_changes_is_planned_exactly() -> None:
    """In LIBERO, only a turn of exactly 0 keeps the hand as it is."""
    demos = linear()
    still = replace(demos, actions=torch.cat((demos.actions, torch.full((len(demos.obs), 1), 0.1)), dim=1))
    training = CloneTraining(still, CloneCfg(updates=2, batch=16))
    training.run()
    plan = training.policy({"policy": demos.obs[:5]})
    assert torch.equal(plan[..., -1], torch.full((5, 16), 0.1))
    assert plan[..., :-1].std() > 0
    assert math.isfinite(training.losses[-1].train)


def test_the_mean_action_fits_the_contract() -> None:
    policy = MeanAction(torch.tensor([1.0, 2.0]))
    rows = torch.arange(3)
    context = ChunkContext(
        seeds=torch.zeros_like(rows),
        env_ids=rows,
        episode_ids=rows,
        chunk_index=rows,
        instructions=("", "", ""),
        left_over=torch.zeros(3, 16, 2),
        left_over_length=rows,
        delay=rows,
    )
    planned = policy({"policy": torch.zeros(3, 5)}, context)
    assert planned.shape == (3, policy.horizon, policy.action_dim)
    assert bool((planned == torch.tensor([1.0, 2.0])).all())


def test_a_checkpoint_reads_back_to_the_last_bit(tmp_path: Path) -> None:
    policy = make_untrained(linear(200), seed=3)
    save_policy(policy, tmp_path / "new" / "policy.pt", task="pusher-solid")
    loaded = load_policy(tmp_path / "new" / "policy.pt")
    obs = {"policy": linear(200).obs}
    assert torch.equal(loaded(obs), policy(obs))
    assert loaded.cfg == policy.cfg


def no_file(path: Path) -> None:
    path.unlink(missing_ok=True)


def garbage(path: Path) -> None:
    path.write_bytes(b"not a checkpoint" * 20)


def cut_short(path: Path) -> None:
    save_policy(make_untrained(linear(200), seed=3), path, task="pusher-solid")
    path.write_bytes(path.read_bytes()[:5000])


def something_else(path: Path) -> None:
    torch.save({"weights": torch.zeros(3)}, path)


def other_sizes(path: Path) -> None:
    save_policy(make_untrained(linear(200), seed=3), path, task="pusher-solid")
    content = torch.load(path, weights_only=True)
    content["cfg"]["width"] = 32
    torch.save(content, path)


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (no_file, ConfigError, "no such file"),
        (garbage, DataError, "damaged, or not the expected kind of file"),
        (cut_short, DataError, "damaged, or not the expected kind of file"),
        (something_else, DataError, "expected one of .* or a chunk policy"),
        (other_sizes, DataError, "do not match"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path, damage, error, message) -> None:
    damage(tmp_path / "policy.pt")
    with pytest.raises(error, match=message):
        load_policy(tmp_path / "policy.pt")


def test_an_unknown_policy_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'pusher-solid'"):
        load_policy("pusher-solod")
    with pytest.raises(UnknownNameError, match=r"choose from aloha-transfer-cube.*pusher-solid"):
        expert_for("ant")


def test_observations_of_another_task_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"expected observations \(n, 4\), got \(2, 3\)"):
        make_untrained(linear(200), seed=0)({"policy": torch.zeros(2, 3)})


def test_settings_that_cannot_work_are_refused() -> None:
    env = arms(2)
    with pytest.raises(ConfigError, match="at least 1 demonstration"):
        record_demonstrations(env, EXPERT, 0, seed=0)
    with pytest.raises(ConfigError, match="autoreset"):
        record_demonstrations(make("pusher-solid", 2), EXPERT, 1, seed=0)
    with pytest.raises(ConfigError, match=r"updates .*: expected at least 1, got 0"):
        clone(linear(200), CloneCfg(updates=0))
    with pytest.raises(ConfigError, match="measures success"):
        record_demonstrations(make("pusher", 2, autoreset="disabled"), EXPERT, 1, seed=0)


def test_an_expert_that_never_succeeds_is_reported_and_does_not_run_for_ever() -> None:
    def idle(obs: Obs) -> Tensor:
        return torch.zeros(len(obs["policy"]), 7)

    with pytest.raises(ConfigError, match="no success in 20 episodes"):
        record_demonstrations(arms(2), idle, 1, seed=0, noise=0.0)


def run_command(*words: str) -> int:
    parser = build_parser("imitate")
    parsed = parser.parse_args(["imitate", *words])
    return parsed.handler(parsed)


def test_the_command_writes_a_policy_and_prints_how_good_it_is(tmp_path: Path, capsys) -> None:
    out = tmp_path / "policy.pt"
    sizes = ("--demos", "4", "--updates", "3", "--episodes", "4", "--num-envs", "4")
    assert run_command("pusher-solid", *sizes, "--output", str(out)) == 0
    printed = capsys.readouterr().out
    for word in ("4 demonstrations", "trained", "untrained", "mean action", "sha256"):
        assert word in printed
    assert load_policy(out).cfg == ActCfg(obs_dim=23, action_dim=7)


def test_the_job_gives_the_policy_and_its_evaluations_from_python(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    found = headrace.imitation.imitate(
        *("pusher-solid", tmp_path / "policy.pt"),
        demos=2,
        settings={"updates": 3},
        episodes=4,
        num_envs=4,
        on_progress=lambda *what: told.append(what),
    )
    assert list(found.evaluations) == ["trained", "untrained", "mean action"]
    assert all(len(result.episodes) == 4 for result in found.evaluations.values())
    assert (found.demonstrations, found.interrupt) == (2, None)
    assert ("recording", 2, 2) in told
    saved = load_policy(found.path)
    assert all(torch.equal(value, found.policy.state_dict()[name]) for name, value in saved.state_dict().items())


def test_the_command_refuses_a_task_without_an_expert_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(HeadraceError, match="task with an expert"):
        run_command("ant", "--output", str(tmp_path / "policy.pt"))
    with pytest.raises(HeadraceError, match="expected a file to write"):
        run_command("pusher-solid", "--output", str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(HeadraceError, match=r"\(--output\): expected a place for a file"):
        run_command("pusher-solid", "--output", str(tmp_path / "file" / "policy.pt"))


def test_a_signal_during_the_evaluation_ends_the_command_and_keeps_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    interrupts: list[int] = []
    step = BatchEnv.step

    def interrupted(self: BatchEnv, *arguments: object, **more: object) -> object:
        if out.exists():  # the policy is written: this is the first evaluation
            interrupts.append(1)
            raise SignalInterrupt(signal.SIGTERM)
        return step(self, *arguments, **more)

    out = tmp_path / "policy.pt"
    monkeypatch.setattr(BatchEnv, "step", interrupted)
    sizes = ("--demos", "2", "--updates", "2", "--episodes", "4", "--num-envs", "4")
    assert run_command("pusher-solid", *sizes, "--output", str(out)) == 128 + signal.SIGTERM
    assert len(interrupts) == 1, "one signal, not one per contestant"
    assert "sha256" in capsys.readouterr().out


@pytest.mark.parametrize(("option", "value"), [("--execute", "17"), ("--updates", "0"), ("--demos", "0")])
def test_the_command_refuses_at_once_what_would_fail_after_training(tmp_path: Path, option, value) -> None:
    with pytest.raises(HeadraceError, match=rf"\({option}\): expected"):
        run_command("pusher-solid", "--output", str(tmp_path / "policy.pt"), option, value)


def test_training_tells_its_progress_and_the_same_seed_gives_the_same_policy() -> None:
    shown: list[tuple[int, float]] = []
    one = clone(linear(400), CloneCfg(updates=60, batch=16), progress=lambda *now: shown.append(now))
    assert [updates for updates, _ in shown] == [20, 40, 60]
    assert all(math.isfinite(loss) for _, loss in shown)
    same = clone(linear(400), CloneCfg(updates=60, batch=16))
    other = clone(linear(400), CloneCfg(updates=60, batch=16, seed=1))
    assert torch.equal(one.queries, same.queries)
    assert not torch.equal(one.queries, other.queries)
