from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from headrace.envs.recipe import EnvRecipe
from headrace.envs.registry import make, make_task
from headrace.errors import ConfigError, DataError
from headrace.recording import (
    DatasetInfo,
    EpisodeDataset,
    EpisodeRecorder,
    RecorderCfg,
    make_replay_env,
    replay_episode,
)
from headrace.recording.dataset import Episode
from headrace.recording.playback import replay_dataset

FIELDS = ("obs", "actions", "rewards", "flags", "states")
SHORT = {"episode_length": 12}


def record_ants(path, *, num_envs=3, fraction=None, seed=7, steps=30):
    info = DatasetInfo(recipe={"source": "ant", "overrides": SHORT}, fps=20)
    env = make("ant", num_envs, seed=seed, threads=1, overrides=SHORT)
    chance = torch.Generator().manual_seed(0)
    with EpisodeRecorder(path, RecorderCfg(fields=FIELDS), info) as recorder:
        env.attach(recorder)
        env.reset(seed=seed)
        taken = torch.zeros(num_envs, dtype=torch.int64)
        while bool((taken < steps).any()):
            active = taken < steps
            if fraction is not None:
                active &= torch.rand(num_envs, generator=chance) < fraction
            env.suspend(~active)
            env.resume(active)
            # actions are a function of (episode, step) alone, whoever is suspended
            phase = (env.episode_ids * 31 + env.episode_steps).to(torch.float32)[:, None]
            actions = torch.sin(phase * torch.arange(1, 9)) * 0.8
            actions[~active] = float("nan")
            env.step(actions)
            taken += active
    env.close()


@pytest.fixture(scope="module")
def ants(tmp_path_factory):
    path = tmp_path_factory.mktemp("ants") / "d"
    record_ants(path)
    return path


def test_a_recorded_episode_replays_bit_exactly(ants):
    dataset = EpisodeDataset(ants)
    env = make_replay_env(dataset.info)
    assert len(dataset) >= 6
    for episode in dataset:
        result = replay_episode(episode, env)
        assert result.exact, str(result.difference)
        assert result.ended_at == result.steps == episode.meta.length
        assert {"states", "obs/policy", "rewards", "terminated", "truncated"} == set(result.compared)
    env.close()


def test_a_replay_says_where_it_first_differs(ants, tmp_path):
    dataset = EpisodeDataset(ants)
    env = make_replay_env(dataset.info)
    episode = dataset[1]

    class Changed:
        """The same episode with another action in step 4, or another state at the beginning."""

        def __init__(self, name, row):
            self.name, self.row = name, row
            self.meta, self.names, self.field = episode.meta, episode.names, episode.field

        def read(self, name):
            values = episode.read(name)
            if name == self.name:
                values[self.row, 2] += 0.25
            return values

    late = replay_episode(Changed("actions", 4), env)
    assert not late.exact
    assert late.difference.step == 5
    assert "after step 5: recorded" in str(late.difference)
    early = replay_episode(Changed("states", 0), env)
    assert early.difference.step == 0
    assert str(early.difference).startswith("states[2] at the beginning")
    reward = replay_episode(Changed("states", -1), env)
    assert reward.difference.step == episode.meta.length
    env.close()


def test_a_replay_in_a_changed_task_notices_the_other_length(ants):
    dataset = EpisodeDataset(ants)
    info = DatasetInfo(recipe={"source": "ant", "overrides": {"episode_length": 20}})
    env = make_replay_env(info)
    result = replay_episode(dataset[0], env)
    assert not result.exact
    assert result.difference.step == dataset[0].meta.length
    env.close()


def test_replay_needs_one_slot_and_a_named_task(ants):
    env = make("ant", 2, threads=1)
    with pytest.raises(ConfigError, match="one slot"):
        replay_episode(EpisodeDataset(ants)[0], env)
    env.close()
    with pytest.raises(ConfigError, match="does not name its task"):
        make_replay_env(DatasetInfo())


def test_ant_files_are_byte_equal_with_half_suspended_and_in_another_batch_size(ants, tmp_path):
    record_ants(tmp_path / "suspended", fraction=0.5)
    plain = {file.name: file.read_bytes() for file in (ants / "episodes").iterdir()}
    other = {file.name: file.read_bytes() for file in (tmp_path / "suspended" / "episodes").iterdir()}
    assert plain == other
    record_ants(tmp_path / "five", num_envs=5)
    five = {file.name: file.read_bytes() for file in (tmp_path / "five" / "episodes").iterdir()}
    shared = plain.keys() & five.keys()
    assert len(shared) >= 6
    assert all(plain[name] == five[name] for name in shared)
    lines = [set((path / "journal.jsonl").read_text().splitlines()) for path in (ants, tmp_path / "suspended")]
    assert lines[0] == lines[1]


def test_the_true_last_observation_is_kept_with_and_without_final_obs(tmp_path):
    for final_obs in (True, False):
        path = tmp_path / str(final_obs)
        env = make("ant", 2, threads=1, overrides=SHORT, final_obs=final_obs)
        with EpisodeRecorder(path, RecorderCfg(fields=FIELDS)) as recorder:
            env.attach(recorder)
            env.reset(seed=1)
            for _ in range(12):
                env.step(torch.zeros(2, 8))
        env.close()
    with_it, without = (EpisodeDataset(tmp_path / name)[0] for name in ("True", "False"))
    np.testing.assert_array_equal(with_it.read("obs/policy"), without.read("obs/policy"))
    assert not np.array_equal(with_it.read("obs/policy")[-1], with_it.read("obs/policy")[0])


def test_images_are_replayed_and_one_pixel_is_noticed(tmp_path, monkeypatch):
    env = make("cartpole-camera", 2, threads=1, overrides={"episode_length": 6})
    fields = ("cameras/policy", "actions", "states")
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=fields), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=3)
        for _ in range(8):
            # the policy looks at nothing; the recorder has every frame all the same
            env.step(torch.full((2, 1), 0.4), observe=torch.zeros(2, dtype=torch.bool))
    env.close()
    dataset = EpisodeDataset(tmp_path / "d")
    replay_env = make_replay_env(dataset.info)
    for episode in dataset:
        result = replay_episode(episode, replay_env)
        assert result.exact, str(result.difference)
        assert set(result.compared) == {"obs/policy", "states"}
    read = Episode.read

    def changed(self, name, start=0, stop=None):
        values = read(self, name, start, stop)
        if name == "obs/policy" and start == 4:
            values[0, 10, 20, 1] ^= 1
        return values

    monkeypatch.setattr(Episode, "read", changed)
    difference = replay_episode(dataset[0], replay_env).difference
    assert difference is not None
    assert (difference.step, difference.field, difference.index) == (4, "obs/policy", (10, 20, 1))
    replay_env.close()


def test_a_dataset_without_a_task_replays_with_the_task_that_the_caller_names(tmp_path):
    env = make(make_task("cartpole"), 1)
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=1)
        while not recorder.report.finished:
            env.step(torch.ones(1, 1))
    env.close()
    dataset = EpisodeDataset(tmp_path / "d")
    with pytest.raises(ConfigError, match="does not name its task"):
        make_replay_env(dataset.info)
    for task in ("cartpole", make_task("cartpole")):
        replay_env = make_replay_env(dataset.info, task)
        assert replay_episode(dataset[0], replay_env).exact
        replay_env.close()


def test_a_dataset_cannot_have_a_module_imported(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="a file must not decide which module is imported"):
        make_replay_env(DatasetInfo(recipe={"source": "planted:cartpole"}))
    assert not (tmp_path / "planted.ran").exists()


@pytest.mark.parametrize("arguments", [{"overrides": 5}, {"num_envs": 0}, {"evil": 1}, {"source": 3}])
def test_a_recipe_of_a_dataset_that_cannot_be_is_refused(arguments):
    with pytest.raises(DataError, match=f"recipe: .*{next(iter(arguments))}"):
        make_replay_env(DatasetInfo(recipe={"source": "cartpole"} | arguments))


def test_a_dataset_is_replayed_whole_or_in_part(ants):
    dataset = EpisodeDataset(ants)
    shown = list(replay_dataset(dataset))
    assert [episode.meta.episode_id for episode, _ in shown] == [episode.meta.episode_id for episode in dataset]
    assert all(replay.exact and replay.steps == episode.meta.length for episode, replay in shown)
    ((one, replay),) = replay_dataset(dataset, [dataset[1]], task="ant")
    assert (one.meta, replay.exact) == (dataset[1].meta, True)


def test_a_dataset_does_not_decide_how_many_environments_replay_it():
    recipe = EnvRecipe("cartpole", num_envs=3, overrides={"episode_length": 9}, autoreset="same_step")
    env = make_replay_env(DatasetInfo(recipe=recipe.to_json()))
    assert (env.num_envs, env.task.cfg.episode_length, env.recipe.autoreset) == (1, 9, "disabled")
    env.close()


def test_another_instruction_is_not_the_same_episode(ants, monkeypatch):
    dataset = EpisodeDataset(ants)
    env = make_replay_env(dataset.info)
    entry = dataclasses.replace(dataset.entries[0], instruction="walk backwards")
    episode = Episode(dataset.path, entry)
    with pytest.raises(DataError, match="the instruction was 'walk backwards'"):
        replay_episode(episode, env)
    env.close()


def test_a_dataset_of_a_task_with_a_tuple_among_its_overrides_replays(tmp_path):
    overrides = {"events.start.function.positions": (0.1, 0.2), "episode_length": 3}
    env = make("cartpole-terms", 1, threads=1, overrides=overrides)
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=FIELDS), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=1)
        for _ in range(3):
            env.step(torch.ones(1, 1))
    env.close()
    dataset = EpisodeDataset(tmp_path / "d")
    replay_env = make_replay_env(dataset.info)
    assert replay_episode(dataset[0], replay_env).exact
    replay_env.close()
