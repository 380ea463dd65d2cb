"""The chunk policy learns from recorded datasets, ours and LeRobot's, images included, and can go on after a stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import headrace
from headrace import load_policy
from headrace._interrupts import SignalInterrupt
from headrace.cli import main
from headrace.envs.registry import make
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.imitation.cloning import CloneCfg, CloneTraining, act_cfg
from headrace.imitation.demonstrations import load_demonstrations
from headrace.imitation.experts import expert_for
from headrace.policies.act import ActCfg, ActPolicy, PolicyInputs
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, LeRobotDataset, RecorderCfg, export_dataset

TINY = {"horizon": 4, "width": 16, "hidden": 16}
SMALL = {**TINY, "batch": 8, "check_every": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The models are tiny: more threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record(path: Path, task: str, episodes: int, *, fields=("obs", "actions", "flags"), **overrides: object) -> Path:
    """A dataset of ``episodes`` random episodes of a task."""
    env = make(task, episodes, autoreset="disabled", overrides=overrides)
    generator = torch.Generator().manual_seed(1)
    with EpisodeRecorder(path, RecorderCfg(fields=fields), DatasetInfo.of(env, instruction="push")) as recorder:
        env.attach(recorder)
        env.reset(seed=3)
        while bool(env.active.any()):
            env.step(2 * torch.rand(episodes, env.single_action_space.shape[0], generator=generator) - 1)
    env.close()
    return path


@pytest.fixture(scope="module")
def state_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("imitate") / "state", "cartpole", 6, episode_length=9)


@pytest.fixture(scope="module")
def image_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("imitate") / "images"
    return record(place, "pusher-camera", 4, fields=("obs", "actions", "flags"), episode_length=6)


def test_demonstrations_are_the_recorded_rows_end_to_end(state_dataset: Path) -> None:
    demos = load_demonstrations(state_dataset)
    episodes = list(EpisodeDataset(state_dataset))
    assert demos.attempted == len(demos.episode_ids) == len(episodes) == 6
    expected = np.concatenate([episode.read("obs/policy")[: episode.meta.length] for episode in episodes])
    assert np.array_equal(demos.obs.numpy(), expected)
    assert np.array_equal(demos.actions.numpy(), np.concatenate([episode.read("actions") for episode in episodes]))
    assert demos.left.tolist() == [left for episode in episodes for left in range(episode.meta.length, 0, -1)]


def test_images_of_a_batch_are_those_of_their_steps(image_dataset: Path) -> None:
    demos = load_demonstrations(image_dataset, keep="all")
    name, rows = next(iter(demos.images.items()))
    whole = np.concatenate(
        [episode.read(f"obs/{name}", 0, episode.meta.length) for episode in EpisodeDataset(image_dataset)]
    )
    index = torch.tensor([0, 5, 6, 23, 11, 5])
    assert np.array_equal(rows.rows(index).numpy(), whole[index.numpy()])
    assert demos.inputs(index).images[0].shape == (6, *rows.shape)


def test_a_dataset_in_lerobots_layout_has_the_same_numbers_and_nearly_the_same_images(
    image_dataset: Path, tmp_path: Path
) -> None:
    export_dataset(image_dataset, tmp_path / "lerobot", "lerobot", fps=20)
    ours, theirs = load_demonstrations(image_dataset, keep="all"), load_demonstrations(tmp_path / "lerobot", keep="all")
    assert torch.equal(ours.actions, theirs.actions)
    assert torch.equal(ours.obs, theirs.obs)
    assert ours.vectors == theirs.vectors
    assert torch.equal(ours.left, theirs.left)
    index = torch.arange(len(ours.left))
    ours_images, theirs_images = ours.inputs(index).images[0], theirs.inputs(index).images[0]
    assert ours_images.shape == theirs_images.shape
    # the video is compressed: pictures of the same step are far closer than those of others
    same = (ours_images.float() - theirs_images.float()).abs().mean()
    assert float(same) < 3.0
    assert LeRobotDataset(tmp_path / "lerobot").recipe["source"] == "pusher-camera"


def test_features_of_a_foreign_lerobot_dataset_are_named_by_its_keys(image_dataset: Path, tmp_path: Path) -> None:
    export_dataset(image_dataset, tmp_path / "lerobot", "lerobot", fps=20, cameras={"obs/image": "top"})
    (tmp_path / "lerobot" / "meta" / "headrace.json").unlink()
    dataset = LeRobotDataset(tmp_path / "lerobot")
    assert {"obs/policy", "obs/top", "actions"} <= set(dataset.fields)
    assert [episode.meta.length for episode in dataset] == [6, 6, 6, 6]
    assert {episode.meta.instruction for episode in dataset} == {"push"}
    info = tmp_path / "lerobot" / "meta" / "info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps(content | {"codebase_version": "v2.1"}))
    with pytest.raises(DataError, match=r"expected LeRobot's codebase version v3, got v2.1"):
        LeRobotDataset(tmp_path / "lerobot")


@pytest.mark.parametrize(
    "wrong", ["length", "dataset_from_index", "videos/observation.images.image/chunk_index", "info"]
)
def test_damaged_metadata_of_a_lerobot_dataset_is_named(image_dataset: Path, tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "lerobot"
    export_dataset(image_dataset, folder, "lerobot", fps=20)
    if wrong == "info":
        info = folder / "meta/info.json"
        info.write_text(json.dumps({**json.loads(info.read_text()), "features": None}))
    else:
        (file,) = (folder / "meta/episodes").rglob("*.parquet")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = parquet.read_table(file)
        column = table.column_names.index(wrong)
        changed = table.remove_column(column)
        if wrong == "length":
            changed = table.set_column(column, wrong, [[10**12] * len(table)])
        parquet.write_table(changed, file)
    with pytest.raises(DataError, match="lerobot"):
        load_demonstrations(folder, keep="all").inputs(torch.arange(2))


def test_held_out_episodes_are_whole_and_never_learned_from(state_dataset: Path) -> None:
    demos = load_demonstrations(state_dataset)
    learned, held = demos.split(0.3, seed=5)
    assert sorted([*learned.tolist(), *held.tolist()]) == list(range(len(demos.left)))
    assert int((demos.left[held] == 1).sum()) == 2
    assert held.tolist() == demos.split(0.3, seed=5)[1].tolist()
    assert demos.split(0.3, seed=6)[1].tolist() != held.tolist()
    assert len(demos.split(0.0, seed=5)[1]) == 0
    single = load_demonstrations(state_dataset)
    assert int((single.left[single.split(0.99, seed=5)[0]] == 1).sum()) == 1, "one is always left to learn from"


def test_the_held_out_loss_falls_when_there_is_something_to_learn(state_dataset: Path) -> None:
    demos = load_demonstrations(state_dataset)
    # actions that hardly change within an episode, and that the observation decides
    easy = torch.linspace(-1, 1, len(demos.obs))[:, None] + 0.01 * demos.obs[:, :1]
    demos = type(demos)(
        obs=torch.cat((easy, demos.obs[:, 1:]), dim=1),
        actions=easy,
        left=demos.left,
        episode_ids=demos.episode_ids,
        attempted=demos.attempted,
    )
    cfg = CloneCfg(updates=90, batch=32, held_out=0.34, check_every=30, average=0.9)
    training = CloneTraining(demos, cfg, replace(act_cfg(demos), **TINY))
    before = training.measure_held_out_loss()
    losses = training.run()
    assert [loss.updates for loss in losses] == [30, 60, 90]
    assert losses[-1].held_out is not None
    assert losses[-1].held_out < 0.8 * before
    assert losses[-1].train < losses[0].train


def test_a_stopped_training_goes_on_to_the_same_weights(image_dataset: Path, tmp_path: Path) -> None:
    demos = load_demonstrations(image_dataset, keep="all")
    cfg = CloneCfg(updates=6, batch=4, held_out=0.25, check_every=2)
    act = replace(act_cfg(demos), **TINY)
    whole = CloneTraining(demos, cfg, act)
    whole.run()

    class StopError(Exception):
        pass

    def stop(so_far: CloneTraining) -> None:
        if so_far.updates == 4:
            so_far.save(tmp_path / "state")
            raise StopError

    first = CloneTraining(demos, cfg, act)
    with pytest.raises(StopError):
        first.run(on_check=stop)
    second = CloneTraining(load_demonstrations(image_dataset, keep="all"), cfg, act)
    second.load(tmp_path / "state")
    assert second.updates == 4
    second.run()
    assert second.losses == whole.losses
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, second.policy.state_dict()[name]), name


@pytest.mark.parametrize("change", [{"seed": 1}, {"updates": 7}, {"batch": 5}, {"held_out": 0.5}])
def test_a_training_does_not_go_on_with_other_settings(state_dataset: Path, tmp_path: Path, change) -> None:
    demos = load_demonstrations(state_dataset)
    settings = {"updates": 6, "batch": 4, "held_out": 0.25}
    CloneTraining(demos, CloneCfg(**settings)).save(tmp_path / "state")
    with pytest.raises(ConfigError, match=f"{next(iter(change))} was"):
        CloneTraining(demos, CloneCfg(**(settings | change))).load(tmp_path / "state")
    (tmp_path / "state").write_bytes(b"garbage")
    with pytest.raises(DataError, match="damaged, or not the expected kind of file"):
        CloneTraining(demos, CloneCfg(**settings)).load(tmp_path / "state")


def test_a_policy_reads_images_of_either_layout_and_refuses_others() -> None:
    cfg = ActCfg(obs_dim=3, action_dim=2, horizon=5, width=16, images=(("camera", (40, 30, 3)),), image_size=20)
    policy = ActPolicy(cfg).eval()
    images = torch.randint(0, 255, (4, 40, 30, 3), dtype=torch.uint8)
    obs = {"policy": torch.randn(4, 3), "camera": images}
    planned = policy(obs)
    assert planned.shape == (4, 5, 2)
    turned = policy(obs | {"camera": images.movedim(-1, 1)})
    assert torch.allclose(planned, turned, atol=1e-6)
    assert not torch.allclose(planned, policy(obs | {"camera": 255 - images}), atol=1e-3), "the image is read"
    with pytest.raises(headrace.errors.ShapeError, match="expected images 'camera'"):
        policy(obs | {"camera": images[:, :20]})
    with pytest.raises(ConfigError, match=r"expected the observation groups \['policy', 'camera'\]"):
        policy({"policy": obs["policy"]})


def test_a_policy_may_read_images_alone() -> None:
    policy = ActPolicy(ActCfg(obs_dim=0, action_dim=2, vectors=(), images=(("camera", (32, 32, 1)),)))
    assert policy({"camera": torch.zeros(3, 32, 32, 1, dtype=torch.uint8)}).shape == (3, 16, 2)
    with pytest.raises(ConfigError, match="vectors or images"):
        ActCfg(obs_dim=0, action_dim=2, vectors=())


def test_a_setting_that_is_given_twice_is_refused(tmp_path, capsys):
    words = ["imitate", "pusher-solid", "--updates", "4", "--act", "updates=8", "--output", str(tmp_path / "p.pt")]
    assert main(words) == 2
    assert "--updates and --act updates=…: expected one of them, got both" in " ".join(capsys.readouterr().err.split())


def test_the_command_trains_on_a_dataset_with_images_and_evaluates_in_its_environment(
    image_dataset: Path, tmp_path: Path, capsys
) -> None:
    out = tmp_path / "policy.pt"
    sizes = ["--updates", "3", "--episodes", "2", "--num-envs", "2", "--held-out", "0.25", "--keep", "all"]
    act = [word for name, value in SMALL.items() for word in ("--act", f"{name}={value}")]
    assert main(["imitate", "--dataset", str(image_dataset), *sizes, *act, "--output", str(out)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("4 demonstrations of 4 episodes, 1 of them held out", "held-out loss", "trained", "mean action"):
        assert words in printed
    assert "pusher-camera" in printed
    policy = load_policy(out)
    assert policy.horizon == 4
    assert [name for name, _ in policy.cfg.images] == ["image"]
    assert not (tmp_path / "policy.pt.training").exists()


def test_the_job_takes_lerobots_layout_and_groups_of_it(image_dataset: Path, tmp_path: Path) -> None:
    export_dataset(image_dataset, tmp_path / "lerobot", "lerobot", fps=20)
    found = headrace.imitation.imitate(
        dataset=tmp_path / "lerobot",
        output=tmp_path / "policy.pt",
        groups=["image"],
        keep="all",
        settings={**SMALL, "updates": 2},
        episodes=2,
        num_envs=2,
    )
    assert (found.policy.cfg.vectors, found.source) == ((), "pusher-camera")
    assert list(found.evaluations) == ["trained", "untrained", "mean action"]
    with pytest.raises(UnknownNameError, match="did you mean 'image'"):
        headrace.imitation.imitate(dataset=image_dataset, output=tmp_path / "p.pt", groups=["imagge"], keep="all")


def test_a_signal_in_training_keeps_the_policy_so_far_and_resume_ends_as_if_there_had_been_none(
    state_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"dataset": state_dataset, "settings": {**SMALL, "updates": 10}, "episodes": 2, "num_envs": 2}
    whole = headrace.imitation.imitate(output=tmp_path / "whole.pt", **arguments)
    update = CloneTraining._update

    def interrupted(self: CloneTraining) -> float:
        loss = update(self)
        if self.updates == 7:
            raise SignalInterrupt(signal.SIGTERM)
        return loss

    out = tmp_path / "policy.pt"
    with pytest.raises(ConfigError, match="expected a training that was stopped"):
        headrace.imitation.imitate(output=out, resume=True, **arguments)
    monkeypatch.setattr(CloneTraining, "_update", interrupted)
    with pytest.raises(SignalInterrupt):
        headrace.imitation.imitate(output=out, **arguments)
    monkeypatch.undo()
    assert load_policy(out).horizon == 4, "the policy so far can be used"
    found = headrace.imitation.imitate(output=out, resume=True, **arguments)
    assert found.losses == whole.losses
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, found.policy.state_dict()[name]), name
    assert not (tmp_path / "policy.pt.training").exists()


def test_instructions_of_a_dataset_are_followed(tmp_path: Path) -> None:
    env = make("pusher-words", 24, autoreset="disabled", overrides={"episode_length": 3})
    with EpisodeRecorder(tmp_path / "words", RecorderCfg(), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        while bool(env.active.any()):
            env.step(torch.zeros(24, 7))
    demos = load_demonstrations(tmp_path / "words", keep="all")
    assert set(demos.instructions) == {episode.meta.instruction for episode in EpisodeDataset(tmp_path / "words")}
    assert len(demos.instructions) == 5
    found = headrace.imitation.imitate(
        dataset=tmp_path / "words",
        output=tmp_path / "p.pt",
        keep="all",
        settings={**SMALL, "updates": 2},
        episodes=3,
        num_envs=3,
    )
    assert len(found.evaluations["trained"].episodes) == 3
    rows = PolicyInputs(torch.zeros(2, 20), (), torch.tensor([0, 1]))
    planned = found.policy.normalized(rows)
    assert not torch.equal(planned[0], planned[1]), "another instruction gives another plan"


def succeeded_none(path: Path) -> Path:
    return record(path, "pusher-solid", 2, episode_length=3)


def test_datasets_that_cannot_be_learned_from_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none"):
        load_demonstrations(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no dataset\.json"):
        load_demonstrations(tmp_path / "empty")
    with pytest.raises(DataError, match="none of them succeeded"):
        load_demonstrations(succeeded_none(tmp_path / "failed"))
    with pytest.raises(ConfigError, match="says which episodes succeeded"):
        load_demonstrations(record(tmp_path / "unjudged", "pusher", 2, episode_length=3), keep="succeeded")
    discrete = tmp_path / "discrete"
    env = make("cartpole-discrete", 2, autoreset="disabled", overrides={"episode_length": 3})
    with EpisodeRecorder(discrete, RecorderCfg(), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        while bool(env.active.any()):
            env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="continuous actions only"):
        load_demonstrations(discrete)
    hollow = record(tmp_path / "hollow", "cartpole", 2, fields=("obs", "flags"), episode_length=3)
    with pytest.raises(DataError, match="no actions were recorded"):
        load_demonstrations(hollow)


def test_an_environment_that_was_not_recorded_is_refused_before_the_training(
    state_dataset: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="numbers, those of the environment"):
        headrace.imitation.imitate("pusher-solid", tmp_path / "p.pt", dataset=state_dataset)
    with pytest.raises(ConfigError, match="got neither"):
        headrace.imitation.imitate(output=tmp_path / "p.pt")
    with pytest.raises(UnknownNameError, match="did you mean 'horizon'"):
        headrace.imitation.imitate(dataset=state_dataset, output=tmp_path / "p.pt", settings={"horison": 3})
    with pytest.raises(ConfigError, match="expected a dataset"):
        headrace.imitation.imitate("pusher-solid", tmp_path / "p.pt", keep="all")
    assert not (tmp_path / "p.pt").exists()


def test_a_dataset_without_an_environment_is_learned_from_and_not_evaluated(tmp_path: Path, capsys) -> None:
    env = make("cartpole", 2, autoreset="disabled", overrides={"episode_length": 3})
    with EpisodeRecorder(tmp_path / "set", RecorderCfg()) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        while bool(env.active.any()):
            env.step(torch.zeros(2, 1))
    words = ["imitate", "--dataset", str(tmp_path / "set"), "--updates", "2", "--output", str(tmp_path / "p.pt")]
    assert main(words) == 0
    assert "not evaluated" in capsys.readouterr().out


@pytest.mark.slow
def test_a_policy_learned_from_a_recorded_expert_solves_the_task(tmp_path: Path) -> None:
    env = make("pusher-solid", 64, autoreset="disabled")
    expert = expert_for("pusher-solid")
    with EpisodeRecorder(tmp_path / "demos", RecorderCfg(keep="succeeded"), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        for wave in range(4):
            obs, _ = env.reset(seed=0, options={"episode_ids": torch.arange(64 * wave, 64 * (wave + 1))})
            while bool(env.active.any()):
                action: Tensor = expert(obs)
                obs, *_ = env.step(action)
    found = headrace.imitation.imitate(
        dataset=tmp_path / "demos", output=tmp_path / "p.pt", settings={"updates": 4000}, episodes=100, num_envs=64
    )
    rates = {name: result.success_rate for name, result in found.evaluations.items()}
    assert rates["trained"].value > 0.4 > rates["untrained"].value + 0.2


def test_who_plays_a_clone_gets_the_settings_that_it_was_trained_with(image_dataset: Path, tmp_path: Path) -> None:
    out = tmp_path / "policy.pt"
    settings = {"episode_length": 7}
    headrace.imitation.imitate(
        "pusher-camera",
        dataset=image_dataset,
        output=out,
        keep="all",
        settings={**SMALL, "updates": 1},
        episodes=0,
        overrides=settings,
    )
    plan = {"episodes": 2, "num_envs": 2, "progress": False}
    found = headrace.evaluate("pusher-camera", out, **plan)
    assert {row.length for row in found.episodes} == {7}
    shorter = headrace.evaluate("pusher-camera", out, overrides={"episode_length": 5}, **plan)
    assert {row.length for row in shorter.episodes} == {5}
