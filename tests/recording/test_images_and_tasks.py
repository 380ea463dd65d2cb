"""Exports that lose nothing: frame stacks, camera names, instructions, spaces, environments."""

from __future__ import annotations

import json
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from counting_env import CountingEnv
from gymnasium import spaces

import headrace
from headrace import files
from headrace.envs.tasks.cartpole import Cartpole, CartpoleCfg
from headrace.errors import ConfigError, DataError, UnknownNameError
from headrace.recording import (
    DatasetInfo,
    EpisodeDataset,
    EpisodeRecorder,
    RecorderCfg,
    export_dataset,
    merge_datasets,
    verify_dataset,
)
from headrace.recording._video import decode_frames
from headrace.types import ResetRecord, StackSpec

parquet = pytest.importorskip("pyarrow.parquet")
FIELDS = ("obs", "actions", "rewards", "flags", "states")


def record(task: str, path: Path, steps: int, fields: tuple[str, ...] = FIELDS, seed: int = 0, **settings) -> Path:
    env = headrace.make(task, 2, **settings)
    with EpisodeRecorder(path, RecorderCfg(fields=fields), DatasetInfo.of(env), resume=path.exists()) as recorder:
        env.attach(recorder)
        env.reset(seed=seed)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            env.step(sample(env, generator))
    env.close()
    return path


def sample(env, generator: torch.Generator) -> torch.Tensor:
    space = env.single_action_space
    if isinstance(space, spaces.Discrete):
        return torch.randint(0, int(space.n), (env.num_envs,), generator=generator)
    return torch.rand((env.num_envs, *space.shape), generator=generator) * 2 - 1


@pytest.fixture(scope="module")
def camera_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("camera") / "d"
    return record("cartpole-camera", path, 12, overrides={"episode_length": 5})


def features(export: Path) -> dict:
    return json.loads((export / "meta" / "info.json").read_text())["features"]


def test_a_camera_task_becomes_a_camera_with_the_newest_frame_of_its_stack(camera_dataset: Path, tmp_path: Path):
    export_dataset(camera_dataset, tmp_path / "x", "lerobot", fps=25, cameras={"obs/policy": "front"})
    found = features(tmp_path / "x")
    camera = found["observation.images.front"]
    assert camera["dtype"] == "video"
    assert "observation.state" not in found
    dataset = EpisodeDataset(camera_dataset)
    stacked = dataset[0].field("obs/policy").shape
    assert camera["shape"] == [*stacked[:2], 3]
    frames = [*decode_frames(next((tmp_path / "x" / "videos" / "observation.images.front").rglob("*.mp4")))]
    newest = np.concatenate([episode.read("obs/policy", 0, episode.meta.length)[..., -3:] for episode in dataset])
    oldest = np.concatenate([episode.read("obs/policy", 0, episode.meta.length)[..., :3] for episode in dataset])
    assert len(frames) == len(newest)
    off = np.abs(np.stack(frames).astype(int) - newest).mean()
    # a lossy codec is some levels off; the frame before is further away, since the cart moves
    assert off < 6
    assert off < np.abs(np.stack(frames).astype(int) - oldest).mean()
    about = json.loads((tmp_path / "x" / "meta" / "headrace.json").read_text())
    assert about["features"]["observation.images.front"]["field"] == "obs/policy"
    assert verify_dataset(tmp_path / "x").problems == ()


def test_a_stack_that_the_dataset_does_not_describe_is_refused_and_can_be_described(
    camera_dataset: Path, tmp_path: Path
):
    bare = tmp_path / "bare"
    files.link_or_copy(camera_dataset / "journal.jsonl", bare / "journal.jsonl")
    for file in (camera_dataset / "episodes").iterdir():
        files.link_or_copy(file, bare / "episodes" / file.name)
    about = json.loads((camera_dataset / "dataset.json").read_text())
    (bare / "dataset.json").write_text(json.dumps({**about, "stacks": {}}))
    with pytest.raises(ConfigError, match=r"obs/policy is uint8.*DatasetInfo\.of\(env\).*--stack obs/policy=K"):
        export_dataset(bare, tmp_path / "x", "lerobot", fps=25)
    channels = EpisodeDataset(bare)[0].field("obs/policy").shape[-1]
    stacks = {"obs/policy": StackSpec(frames=channels // 3, dim=-1)}
    export_dataset(bare, tmp_path / "x", "lerobot", fps=25, stacks=stacks)
    assert "observation.images.policy" in features(tmp_path / "x")


def test_names_that_do_not_fit_are_refused(camera_dataset: Path, tmp_path: Path):
    with pytest.raises(UnknownNameError, match="obs/wrist"):
        export_dataset(camera_dataset, tmp_path / "x", "lerobot", fps=25, cameras={"obs/wrist": "wrist"})
    with pytest.raises(ConfigError, match="only LeRobot"):
        export_dataset(camera_dataset, tmp_path / "x.hdf5", "robomimic", cameras={"obs/policy": "front"})
    for name in ("", "a/b", "../x", "a\0b", "\ud800", "x" * 300):
        with pytest.raises(ConfigError, match="as the name of a camera"):
            export_dataset(camera_dataset, tmp_path / "x", "lerobot", fps=25, cameras={"obs/policy": name})
    with pytest.raises(ConfigError, match="got actions"):
        export_dataset(camera_dataset, tmp_path / "x", "lerobot", fps=25, cameras={"actions": "front"})
    for fps in (float("nan"), float("inf"), 0, -5, 2.5):
        with pytest.raises(ConfigError, match="fps"):
            export_dataset(camera_dataset, tmp_path / "x", "lerobot", fps=fps)


class ToldEnv(CountingEnv):
    """With an instruction per episode, of three."""

    def _tell_reset(self, ids: torch.Tensor) -> None:
        record = ResetRecord(
            env_ids=ids,
            episode_ids=self.episodes[ids],
            seed=self.seed,
            obs=self.obs(),
            states=self.states()[ids],
            instructions=tuple(f"task {int(episode) % 3}" if episode % 3 else "" for episode in self.episodes[ids]),
        )
        for observer in self.observers:
            observer.after_reset(record)


def record_told(path: Path, steps: int, seed: int = 0) -> Path:
    info = DatasetInfo(recipe={"source": "told"}, fps=20, instruction="whatever")
    with EpisodeRecorder(path, RecorderCfg(fields=FIELDS), info, resume=path.exists()) as recorder:
        env = ToldEnv(4, [recorder])
        env.reset(seed)
        for _ in range(steps):
            env.step()
    return path


def told(episode_id: int) -> str:
    return f"task {episode_id % 3}" if episode_id % 3 else "whatever"


def check_tasks(source: Path, export: Path, order: list[tuple[int, int]]) -> None:
    """Every row's task index leads to the text of its episode."""
    tasks = parquet.read_table(export / "meta" / "tasks.parquet").to_pydict()
    texts = dict(zip(tasks["task_index"], tasks["task"], strict=True))
    rows = [parquet.read_table(file).to_pydict() for file in sorted((export / "data").rglob("*.parquet"))]
    episodes = [number for table in rows for number in table["episode_index"]]
    indices = [index for table in rows for index in table["task_index"]]
    for number, index in zip(episodes, indices, strict=True):
        assert texts[index] == told(order[number][1])
    lines = parquet.read_table(next((export / "meta" / "episodes").rglob("*.parquet"))).to_pylist()
    assert [line["tasks"] for line in lines] == [[told(episode)] for _, episode in order]


def test_instructions_are_kept_and_become_task_texts(tmp_path: Path):
    source = record_told(tmp_path / "d", 30)
    dataset = EpisodeDataset(source)
    for episode in dataset:
        kind = episode.meta.episode_id % 3
        assert episode.meta.instruction == (f"task {kind}" if kind else "")
    export_dataset(source, tmp_path / "x", "lerobot")
    check_tasks(source, tmp_path / "x", [(entry.seed, entry.episode_id) for entry in dataset.entries])


class Told(Cartpole):
    """Has an instruction per episode."""

    def instructions(self, rows):
        return [f"hold episode {int(episode)}" for episode in rows.episode_ids]


def test_the_instructions_of_an_environment_reach_its_episodes(tmp_path: Path):
    env = headrace.make(Told(CartpoleCfg(episode_length=4)), 3)
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=("obs", "actions")), DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        for _ in range(8):
            env.step(torch.zeros(3, 1))
    env.close()
    texts = {episode.meta.episode_id: episode.meta.instruction for episode in EpisodeDataset(tmp_path / "d")}
    assert texts == {number: f"hold episode {number}" for number in range(6)}


def test_a_seed_of_any_size_is_exported(tmp_path: Path):
    source = record_told(tmp_path / "d", 20, seed=1 << 80)
    export_dataset(source, tmp_path / "x.hdf5", "robomimic")
    export_dataset(source, tmp_path / "x-v0", "minari")
    with h5py.File(tmp_path / "x.hdf5") as file:
        assert file["data/demo_0"].attrs["seed"] == str(1 << 80)


def test_datasets_are_merged_and_the_sources_stay(tmp_path: Path):
    parts = [record_told(tmp_path / name, 20, seed=seed) for seed, name in enumerate("abc")]
    merged = merge_datasets(parts, tmp_path / "m")
    assert verify_dataset(merged).problems == ()
    entries = [entry for part in parts for entry in EpisodeDataset(part).entries]
    assert EpisodeDataset(merged).entries == sorted(entries, key=lambda entry: entry.key)
    for part in parts:
        assert verify_dataset(part).problems == ()
        for file in (part / "episodes").iterdir():
            assert (merged / "episodes" / file.name).samefile(file)
    assert len(EpisodeDataset(record_told(merged, 20, seed=7))) > len(entries)


def test_what_must_not_be_merged_is_refused_and_leaves_nothing(tmp_path: Path):
    a, again = record_told(tmp_path / "a", 20), record_told(tmp_path / "again", 20)
    once = merge_datasets([a, again], tmp_path / "once")  # equal content, as two workers may record it
    assert EpisodeDataset(once).entries == EpisodeDataset(a).entries
    with EpisodeRecorder(tmp_path / "other", info=DatasetInfo(recipe={"source": "else"})) as recorder:
        env = CountingEnv(2, [recorder])
        env.reset(5)
        for _ in range(20):
            env.step()
    with pytest.raises(ConfigError, match=r"recipe is {'source': 'told'} in .* and {'source': 'else'} in"):
        merge_datasets([a, tmp_path / "other"], tmp_path / "m")
    info = DatasetInfo(recipe={"source": "told"}, fps=20, instruction="whatever")
    with EpisodeRecorder(tmp_path / "less", RecorderCfg(fields=("obs", "actions")), info) as recorder:
        env = ToldEnv(4, [recorder])
        env.reset(9)
        for _ in range(20):
            env.step()
    with pytest.raises(ConfigError, match="record the same fields"):
        merge_datasets([a, tmp_path / "less"], tmp_path / "m")
    b = record_told(tmp_path / "b", 20, seed=1)
    file = next((b / "episodes").iterdir())
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match=file.name):
        merge_datasets([a, b], tmp_path / "m")
    with pytest.raises(ConfigError, match="two datasets or more"):
        merge_datasets([a], tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert not list(tmp_path.glob(".m*"))


def test_minari_keeps_discrete_actions_and_recovers_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    minari = pytest.importorskip("minari")
    settings = {"overrides": {"episode_length": 7}}
    source = record("cartpole-discrete", tmp_path / "d", 20, **settings)
    export_dataset(source, tmp_path / "root" / "cartpole-v0", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    loaded = minari.load_dataset("cartpole-v0")
    assert loaded.action_space == spaces.Discrete(2)
    env = loaded.recover_environment()
    assert env.observation_space == loaded.observation_space
    assert env.action_space == loaded.action_space
    # the recovered environment plays the first recorded episode again
    episode = next(iter(loaded))
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs["policy"], episode.observations["policy"][0])
    for t, action in enumerate(episode.actions):
        obs, reward, terminated, truncated, _ = env.step(action)
        np.testing.assert_array_equal(obs["policy"], episode.observations["policy"][t + 1])
        assert (np.float32(reward), terminated) == (episode.rewards[t], episode.terminations[t])
        assert truncated == episode.truncations[t]
    env.close()


def test_minari_keeps_the_bounds_of_boxes_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    minari = pytest.importorskip("minari")
    source = record("pusher-camera", tmp_path / "d", 6, overrides={"episode_length": 3})
    export_dataset(source, tmp_path / "root" / "pusher-v0", "minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    loaded = minari.load_dataset("pusher-v0")
    env = headrace.make("pusher-camera", 1)
    assert loaded.action_space == env.single_action_space
    assert loaded.observation_space == env.single_observation_space
    env.close()


@pytest.mark.filterwarnings("ignore:.*infinity")  # speeds have no bounds
def test_one_environment_of_ours_passes_gymnasiums_own_checker():
    from gymnasium.utils.env_checker import check_env

    env = gymnasium.make("headrace/Cartpole-v0", disable_env_checker=True)
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


def test_what_an_environment_says_of_itself_survives_json(tmp_path: Path):
    env = headrace.make("cartpole-camera", 2, overrides={"episode_length": 9})
    info = DatasetInfo.of(env, instruction="balance", robot_type="cartpole")
    with EpisodeRecorder(tmp_path / "d", info=info):
        pass
    again = EpisodeDataset(tmp_path / "d").info
    assert again == info
    assert again.recipe == {"source": "cartpole-camera", "overrides": {"episode_length": 9}}
    assert again.stack("obs/policy") == env.task.images["policy"].stack
    assert again.fps == pytest.approx(1 / env.task.dt)
    env.close()
