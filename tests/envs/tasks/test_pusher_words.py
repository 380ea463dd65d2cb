"""``pusher-words``: the instruction, and nothing that a policy sees, says where the goal is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headrace
from flat import evaluate as evaluate_env
from headrace.envs.tasks.pusher import INSTRUCTIONS, PusherWordsCfg
from headrace.errors import PolicyError
from headrace.evaluation import Evaluation
from headrace.policies.load_policy import PusherWordsPolicy
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset, replay_episode

# where the goal is from the middle, as the words say it: x to the right, y away from the camera
WHERE = {"middle": (0, 0), "left": (-1, 0), "right": (1, 0), "near side": (0, -1), "far side": (0, 1)}


def test_the_words_name_the_goal_and_the_policy_sees_no_goal() -> None:
    env = headrace.make("pusher-words", 64, seed=2, threads=1)
    obs, _ = env.reset()
    texts = env.instructions()
    assert set(texts) == set(INSTRUCTIONS)
    middle = torch.tensor(env.task.model.body("goal").pos, dtype=torch.float32)
    reach = PusherWordsCfg().goal_range
    for row, text in enumerate(texts):
        word = text.removeprefix("push the object to the ").removesuffix(" of the table")
        x, y = WHERE[word]
        torch.testing.assert_close(obs["critic"][row, 20:], middle + torch.tensor([x * reach, y * reach, 0.0]))
    assert obs["policy"].shape == (64, 20)
    assert torch.equal(obs["policy"], obs["critic"][:, :20])
    env.close()


def test_an_episode_has_its_instruction_in_any_slot() -> None:
    wide, alone = headrace.make("pusher-words", 8, seed=5), headrace.make("pusher-words", 1, seed=5)
    wide.reset()
    for episode, text in enumerate(wide.instructions()):
        alone.reset(options={"episode_ids": torch.tensor([episode])})
        assert alone.instructions() == (text,)
    wide.close()
    alone.close()


def test_the_shipped_policy_does_what_the_words_say_and_fails_when_told_something_else(tmp_path: Path) -> None:
    right = headrace.evaluate(
        "pusher-words", episodes=20, num_envs=10, seed=1, output=tmp_path / "e.json", progress=False
    )
    assert right.success_rate is not None
    assert right.success_rate.value > 0.6

    class Deaf(PusherWordsPolicy):
        """Goes to the next place in the list instead."""

        def forward(self, obs, context):
            moved = [INSTRUCTIONS[(INSTRUCTIONS.index(text) + 1) % 5] if text else "" for text in context.instructions]
            return super().forward(obs, type(context)(**{**_fields(context), "instructions": tuple(moved)}))

    wrong = headrace.evaluate("pusher-words", Deaf(), episodes=20, num_envs=10, seed=1, progress=False)
    assert wrong.success_rate is not None
    assert wrong.success_rate.value < right.success_rate.value / 2

    rows = right.by_instruction()
    assert list(rows) == sorted({episode.instruction for episode in right.episodes})
    assert sum(len(row.episodes) for row in rows.values()) == 20
    for text, row in rows.items():
        mine = [episode for episode in right.episodes if episode.instruction == text]
        assert row.success_rate is not None
        assert row.success_rate.value == pytest.approx(sum(bool(episode.success) for episode in mine) / len(mine))
    saved = json.loads((tmp_path / "e.json").read_text())["summary"]["instructions"]
    assert [entry["instruction"] for entry in saved] == list(rows)
    again = Evaluation.load(tmp_path / "e.json").by_instruction()
    assert [row.episodes for row in again.values()] == [row.episodes for row in rows.values()]


def _fields(context) -> dict:
    return {name: getattr(context, name) for name in context.__dataclass_fields__}


def test_words_that_the_policy_does_not_know_are_refused() -> None:
    class Mumbling(PusherWordsPolicy):
        def forward(self, obs, context):
            return super().forward(
                obs, type(context)(**{**_fields(context), "instructions": ("mumble",) * len(obs["policy"])})
            )

    with pytest.raises(
        PolicyError, match=r"expected one of .*'push the object to the middle of the table'.*got 'mumble'"
    ):
        headrace.evaluate("pusher-words", Mumbling(), episodes=2, num_envs=2, progress=False)


def test_recordings_exports_and_replays_have_the_instructions(tmp_path: Path) -> None:
    short = {"episode_length": 5}
    env = headrace.make("pusher-words", 4, seed=3, threads=1, autoreset="disabled", overrides=short)
    cfg = RecorderCfg(fields=("obs", "actions", "rewards", "flags", "states"))
    with EpisodeRecorder(tmp_path / "d", cfg, DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        found = evaluate_env(env, PusherWordsPolicy(), episodes=8, execute=5, seed=3, progress=False)
        env.detach(recorder)
    dataset = EpisodeDataset(tmp_path / "d")
    told = {episode.meta.episode_id: episode.meta.instruction for episode in dataset}
    assert told == {episode.episode_id: episode.instruction for episode in found.episodes}
    assert len(set(told.values())) > 1
    alone = headrace.make("pusher-words", 1, seed=3, threads=1, overrides=short)
    assert replay_episode(dataset[0], alone).exact
    pytest.importorskip("pyarrow")
    export_dataset(tmp_path / "d", tmp_path / "lerobot", "lerobot", fps=20)
    import pyarrow.parquet as parquet

    tasks = parquet.read_table(tmp_path / "lerobot" / "meta" / "tasks.parquet").to_pydict()
    assert set(told.values()) in [set(column) for column in tasks.values()]
    env.close()
    alone.close()
