"""Journals: an evaluation that was cut off goes on, and its table is the one of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_env import Planner, ScriptEnv

import headrace
from headrace.errors import ConfigError, DataError
from headrace.rollout import Evaluation, evaluate, load_chunk_policy
from headrace.rollout._journal import read_journals


def _played(path: Path | None, *, stop: int | None = None, episodes: object = 23, **more: object) -> Evaluation:
    env = ScriptEnv(4)
    env.interrupt_after = stop
    settings = {"execute": 4, "journal": path, "policy_id": "planner", "progress": False, **more}
    return evaluate(env, Planner(4, 4), episodes=episodes, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [0, 1, 5, 17, 40])
@pytest.mark.parametrize("torn", [0, 7])
def test_an_interrupted_evaluation_resumes_to_the_table_of_an_undisturbed_one(
    stop: int, torn: int, tmp_path: Path
) -> None:
    whole = _played(None, policy_id=None)
    path = tmp_path / "table.jsonl"
    first = _played(path, stop=stop)
    assert first.status == "interrupted"
    if torn:  # a power cut in the middle of a line
        path.write_bytes(path.read_bytes() + b'{"episode_id": 99, "seed": 0'[:torn])
    again = _played(path, resume=True)
    assert again.status == "completed"
    assert again.episodes == whole.episodes
    assert again.unfinished == 0
    rows = [json.loads(line)["episode_id"] for line in path.read_text().splitlines()[1:]]
    assert sorted(rows) == list(range(23)), "every id once, none twice"
    assert _played(path, resume=True).episodes == whole.episodes, "nothing is left to play"


def test_parts_that_were_played_apart_merge_to_the_whole_table(tmp_path: Path) -> None:
    for name, ids in (("a", range(12)), ("b", range(10, 23))):
        _played(tmp_path / name, episodes=ids)
    header, rows = read_journals([tmp_path / "a", tmp_path / "b"])
    assert rows == _played(None, policy_id=None).episodes
    assert header.identity["policy"] == "planner"
    text = (tmp_path / "b").read_text().replace('"length": ', '"length": 1')
    (tmp_path / "b").write_text(text)
    with pytest.raises(DataError, match="episode 10 was played twice with different results"):
        read_journals([tmp_path / "a", tmp_path / "b"])


def test_a_journal_of_another_evaluation_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    _played(path)
    with pytest.raises(ConfigError, match="already exists; pass resume=True"):
        _played(path)
    for change, message in (
        ({"seed": 3}, "expected a journal of seed 3, got one of 0"),
        ({"policy_id": "other"}, "expected a journal of policy 'other', got one of 'planner'"),
        ({"execute": 2}, "expected a journal of execute 2, got one of 4"),
        ({"batching": "fast"}, "expected a journal of strict_size None, got one of 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            _played(path, resume=True, **change)
    with pytest.raises(ConfigError, match="policy_id: expected a text"):
        _played(tmp_path / "new", policy_id=None)
    with pytest.raises(ConfigError, match="resume: expected a journal"):
        _played(None, policy_id=None, resume=True)
    (tmp_path / "noise").write_text("hello\n")
    with pytest.raises(DataError, match="not the journal of an evaluation"):
        read_journals([tmp_path / "noise"])


def test_a_module_is_told_apart_by_its_weights_and_other_circumstances_are_warned_about(tmp_path: Path) -> None:
    policy = load_chunk_policy("pusher-solid")
    path = tmp_path / "table.jsonl"
    tables = []
    for num_envs, ids in ((2, [0, 1]), (3, [0, 1, 2])):
        env = headrace.make("pusher-solid", num_envs, threads=1, autoreset="disabled", final_obs=False)
        settings = {"execute": 16, "journal": path, "resume": True, "progress": False}
        if num_envs == 2:
            tables.append(evaluate(env, policy, episodes=ids, **settings).episodes)  # type: ignore[arg-type]
        else:
            with pytest.warns(UserWarning, match="played under other circumstances: num_envs 2 → 3"):
                tables.append(evaluate(env, policy, episodes=ids, **settings).episodes)  # type: ignore[arg-type]
            policy.queries.data[0, 0] += 1.0
            with pytest.raises(ConfigError, match="expected a journal of policy"):
                evaluate(env, policy, episodes=ids, **settings)  # type: ignore[arg-type]
        env.close()
    assert tables[1][:2] == tables[0]
