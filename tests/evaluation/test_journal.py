"""Journals: an evaluation that was cut off goes on, and its table is the one of an undisturbed run."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from script_env import LateEngine, Planner, ScriptEnv, length_of

import headrace
from faulty_disk import FaultyDisk
from flat import evaluate
from headrace import files, load_policy
from headrace.errors import ConfigError, DataError, LifecycleError, StorageError
from headrace.evaluation import Evaluation, merge
from headrace.evaluation._journal import Header, Journal, numeric_fingerprint, read_header, read_journal
from headrace.policies import as_chunk_policy

HEADER = Header(identity={"policy": "one"}, circumstances={})


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


@pytest.mark.parametrize("room", [0, 300, 1000, 1111])
def test_a_full_disk_is_a_clear_error_and_the_journal_resumes_when_there_is_room(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.jsonl"
    if not room:
        _played(path, episodes=2)  # the header fits: it is the first row that does not
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", FaultyDisk(errno.ENOSPC, room=room))
        with pytest.raises(StorageError, match="the disk is full; make room and resume: the rows before are safe"):
            _played(path, resume=True)
    kept = read_journal(path).rows if path.exists() and path.stat().st_size else []
    assert len(kept) < 23
    again = _played(path, resume=True)
    assert again.episodes == _played(None, policy_id=None).episodes
    assert again.counters.env_steps == sum(row.length for row in again.episodes) - sum(row.length for row in kept)


@pytest.mark.parametrize("size", [0, 5, 60, -1])
def test_a_header_that_was_cut_off_is_written_again(size: int, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    _played(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"\n") + size + 1 if size < 0 else size])
    _played(path, resume=True)
    assert path.read_bytes() == whole
    path.write_bytes(b"mine")
    with pytest.raises(DataError, match="not the journal of an evaluation"):
        _played(path, resume=True)
    assert path.read_bytes() == b"mine"


def test_parts_that_were_played_apart_merge_to_the_whole_table(tmp_path: Path) -> None:
    for name, ids in (("a", range(12)), ("b", range(10, 23))):
        _played(tmp_path / name, episodes=ids)
    merged = merge(tmp_path / "a", tmp_path / "b")
    assert merged.episodes == _played(None, policy_id=None).episodes
    assert (merged.status, merged.plan) == ("completed", tuple(range(23)))
    assert merged.mean_reward is not None
    assert merged.identity is not None
    assert merged.identity["policy"] == "planner"
    text = (tmp_path / "b").read_text().replace('"length": ', '"length": 1')
    (tmp_path / "b").write_text(text)
    with pytest.raises(DataError, match="b: episode 10 was played twice with different results"):
        merge(tmp_path / "a", tmp_path / "b")


def test_a_journal_knows_its_plan_so_that_a_part_that_was_cut_off_has_no_rates(tmp_path: Path) -> None:
    _played(tmp_path / "a", episodes=range(12))
    _played(tmp_path / "b", episodes=range(12, 23), stop=5)
    cut = merge(tmp_path / "a", tmp_path / "b")
    assert (cut.status, cut.planned) == ("interrupted", 23)
    assert cut.unfinished > 0
    assert (cut.success_rate, cut.mean_reward, cut.iqm_reward, cut.mean_length) == (None, None, None, None)
    _played(tmp_path / "b", episodes=range(12, 23), resume=True)
    assert merge(tmp_path / "a", tmp_path / "b").unfinished == 0
    # a journal that is resumed with a larger plan and cut off again has planned both
    _played(tmp_path / "a", episodes=[*range(12), 30, 32], resume=True, stop=0)
    grown = Evaluation.load(tmp_path / "a")
    assert grown.plan == (*range(12), 30, 32)
    assert grown.unfinished == 2
    assert "–" in _printed(grown)


def _printed(found: Evaluation) -> str:
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as capture:
        console.print(found.summary())
    return capture.get()


def test_a_saved_evaluation_is_read_back_whole(tmp_path: Path) -> None:
    for stop in (None, 5):
        found = _played(None, episodes=[3, 5, 6, 7], stop=stop)
        file = tmp_path / f"{stop}.json"
        found.save(file)
        assert Evaluation.load(file) == found
        assert _printed(Evaluation.load(file)) == _printed(found)
        with pytest.raises(ConfigError, match="already exists"):
            found.save(file)
    stored = json.loads((tmp_path / "None.json").read_text())
    whole = Evaluation.load(tmp_path / "None.json")
    assert whole.mean_reward is not None
    assert stored["summary"]["mean_reward"] == whole.mean_reward._asdict()
    assert stored["plan"] == [[3, 4], [5, 8]]
    assert json.loads((tmp_path / "5.json").read_text())["summary"]["mean_reward"] is None


def test_saved_evaluations_and_journals_merge_in_any_order_and_again(tmp_path: Path) -> None:
    parts = [_played(None, episodes=ids) for ids in (range(8), range(8, 16), range(14, 23))]
    whole = _played(None)
    merged = merge(*parts)
    assert merged.episodes == whole.episodes
    assert merged.counters.env_steps == sum(part.counters.env_steps for part in parts)
    assert merged.counters.stages.keys() == whole.counters.stages.keys()
    assert merge(parts[2], merge(*parts[:2])).episodes == whole.episodes
    _played(tmp_path / "journal", episodes=range(8))
    parts[1].save(tmp_path / "saved.json")
    both = merge(tmp_path / "journal", tmp_path / "saved.json", parts[2], output=tmp_path / "all.json")
    assert both.episodes == whole.episodes
    assert both.counters.env_steps == 0, "the journal's cost is not known, so no part of it passes for all"
    assert "env-steps" not in _printed(both)
    assert Evaluation.load(tmp_path / "all.json") == both


def test_what_does_not_belong_together_is_not_merged(tmp_path: Path) -> None:
    one = _played(None, episodes=range(4))
    with pytest.raises(ConfigError, match="part 2: expected an evaluation of policy 'planner', got one of 'other'"):
        merge(one, _played(None, episodes=range(4, 8), policy_id="other"))
    with pytest.raises(ConfigError, match="part 2: expected an evaluation with an identity"):
        merge(one, _played(None, episodes=range(4, 8), policy_id=None))
    with pytest.raises(ConfigError, match="expected at least one evaluation"):
        merge()
    assert one.circumstances is not None
    elsewhere = replace(_played(None, episodes=range(4, 8)), circumstances=one.circumstances | {"processor": "another"})
    with pytest.warns(UserWarning, match="part 2: played under other circumstances: processor"):
        merged = merge(one, elsewhere)
    assert merged.circumstances is not None
    assert merged.circumstances["processor"] == [one.circumstances["processor"], "another"]


def test_rewards_that_are_not_numbers_equal_themselves(tmp_path: Path) -> None:
    one = _played(None, episodes=range(4))
    broken = replace(one, episodes=[replace(row, reward=float("nan")) for row in one.episodes])
    broken.save(tmp_path / "nan.json")
    again = merge(broken, Evaluation.load(tmp_path / "nan.json"))
    assert all(math.isnan(row.reward) for row in again.episodes)
    with pytest.raises(DataError, match="episode 0 was played twice"):
        merge(broken, one)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "expected a saved evaluation"),
        ({"plan": [[0, 2]]}, "expected rows of the plan only, got episodes"),
        ({"plan": [[0, 10**15]]}, "expected a plan of"),
        ({"plan": None}, "expected a plan of"),
        ({"status": "done"}, "expected a status of"),
        ({"episodes": [{"episode_id": 0}]}, "episode: seed: it is missing"),
        ({"identity": 3}, "identity: expected an object"),
        ({"counters": {"wrong": 1}}, "not a saved evaluation, or damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_name(change: dict[str, object], message: str, tmp_path: Path) -> None:
    data = _played(None, episodes=range(4)).to_json()
    (tmp_path / "table.json").write_text(json.dumps(data | change))
    with pytest.raises(DataError, match=f"table.json: {message}"):
        Evaluation.load(tmp_path / "table.json")


def test_rows_say_what_the_policy_was_told(tmp_path: Path) -> None:
    found = _played(tmp_path / "a", episodes=9)
    assert [row.instruction for row in found.episodes] == [f"count to {length_of(i)}" for i in range(9)]
    assert Evaluation.load(tmp_path / "a").episodes == found.episodes


def test_a_journal_that_is_a_pipe_or_has_an_endless_line_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r"pipe\.jsonl: cannot be read: expected a plain file"):
        read_header(tmp_path / "pipe.jsonl")
    journal = tmp_path / "long.jsonl"
    _played(journal, episodes=4)
    with journal.open("ab") as file:
        file.truncate(4 << 30)  # sparse
    for read in (Evaluation.load, read_header):
        with pytest.raises(DataError, match=r"long\.jsonl: expected lines of at most 16,777,216 bytes"):
            read(journal)
    with (tmp_path / "zeros.jsonl").open("wb") as file:
        file.truncate(4 << 30)
    with pytest.raises(DataError, match=r"zeros\.jsonl: expected at most"):
        Evaluation.load(tmp_path / "zeros.jsonl")


def test_a_journal_of_another_evaluation_is_refused_by_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    _played(path)
    with pytest.raises(ConfigError, match="already exists; pass resume=True"):
        _played(path)
    for change, message in (
        ({"seed": 3}, "expected an evaluation of seed 3, got one of 0"),
        ({"policy_id": "other"}, "expected an evaluation of policy 'other', got one of 'planner'"),
        ({"execute": 2}, "expected an evaluation of execute 2, got one of 4"),
        ({"batching": "fast"}, "expected an evaluation of strict_size None, got one of 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            _played(path, resume=True, **change)
    engine = LateEngine(Planner(4, 4), [0])
    with pytest.raises(
        ConfigError, match=r"policy_id \(--policy-id\): expected a text that names the policy, since LateEngine runs it"
    ):
        _played(tmp_path / "new", policy_id=None, engine=engine)
    with pytest.raises(ConfigError, match="resume: expected a journal"):
        _played(None, policy_id=None, resume=True)
    (tmp_path / "noise").write_text("hello\n")
    with pytest.raises(DataError, match="not the journal of an evaluation"):
        read_journal(tmp_path / "noise")
    with pytest.raises(DataError, match="noise: expected JSON"):
        Evaluation.load(tmp_path / "noise")


def test_a_module_is_told_apart_by_its_weights_and_other_circumstances_are_warned_about(tmp_path: Path) -> None:
    policy = load_policy("pusher-solid")
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
            with pytest.raises(ConfigError, match="expected an evaluation of policy"):
                evaluate(env, policy, episodes=ids, **settings)  # type: ignore[arg-type]
        env.close()
    assert tables[1][:2] == tables[0]


def test_other_instructions_change_the_numeric_fingerprint_and_resume_and_merge_warn(tmp_path: Path) -> None:
    show = "from headrace.evaluation._journal import numeric_fingerprint; print(numeric_fingerprint())"
    limited = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    elsewhere, alone = (
        subprocess.run(
            [sys.executable, "-c", show], env={**os.environ, **more}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for more in (limited, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    )
    path, here = tmp_path / "table.jsonl", numeric_fingerprint()
    assert alone == here != elsewhere
    _played(path, episodes=range(4))
    one = Evaluation.load(path)
    assert one.circumstances is not None
    assert (one.circumstances["numerics"], one.circumstances["torch_threads"]) == (here, torch.get_num_threads())
    path.write_text(path.read_text().replace(here, elsewhere))
    with pytest.warns(UserWarning, match=f"other circumstances: numerics '{elsewhere}' → '{here}'"):
        _played(path, episodes=range(4), resume=True)
    two = replace(_played(None, episodes=range(4, 8)), circumstances=one.circumstances | {"numerics": elsewhere})
    with pytest.warns(UserWarning, match="part 2: played under other circumstances: numerics"):
        merge(one, two)


def test_a_forked_child_neither_writes_nor_holds_the_journal(tmp_path: Path) -> None:
    row = _played(None, episodes=range(1)).episodes
    path = tmp_path / "table.jsonl"
    reading, writing = os.pipe()
    hold, release = os.pipe()
    with Journal(path, HEADER, range(2), resume=False) as journal:
        journal.add(row)  # from now on there is a thread that syncs
        child = os.fork()
        if child == 0:
            os.close(release)
            try:
                with journal:
                    journal.add(row)
            except LifecycleError as error:
                os.write(writing, str(error).encode())
            os.close(writing)
            os.read(hold, 1)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            assert "belongs to process" in pipe.read()
        with pytest.raises(LifecycleError, match="another process is writing"):
            Journal(path, HEADER, range(2), resume=True)
        journal.add([replace(row[0], episode_id=1)])
    with Journal(path, HEADER, range(2), resume=True) as again:  # the child lives
        assert [row.episode_id for row in again.rows] == [0, 1]
    os.close(release)
    os.close(hold)
    os.waitpid(child, 0)


def test_two_processes_cannot_write_one_journal_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    program = (
        "import sys, pathlib, headrace.files; headrace.files.lock_file(pathlib.Path(sys.argv[1])); "
        "print('locked', flush=True); sys.stdin.read()"
    )
    _played(path, episodes=2)
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        before = path.read_bytes()
        with pytest.raises(LifecycleError, match="another process is writing to it; wait for it"):
            _played(path, resume=True)
        assert path.read_bytes() == before
        other.kill()
    assert _played(path, resume=True).unfinished == 0  # the right ends with the process


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(files.fcntl, "flock", refuse)
    assert _played(tmp_path / "table.jsonl").unfinished == 0
    assert "could not be locked" in caplog.text


@pytest.mark.parametrize("episodes", [[1.5], "12", 3.0, [2**63], [-1, 2], [4, 4], ["a"]])
def test_ids_that_cannot_be_are_refused(episodes: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="episodes: expected"):
        _played(tmp_path / "table.jsonl", episodes=episodes)
    assert not (tmp_path / "table.jsonl").exists()


def test_large_ids_are_episodes_like_others(tmp_path: Path) -> None:
    ids = [2**62, 2**63 - 1, 7]
    path = tmp_path / "table.jsonl"
    policy = as_chunk_policy(lambda obs: torch.zeros(len(obs["policy"]), 4, 1), horizon=4, action_dim=1)
    settings: dict[str, Any] = {"overrides": {"episode_length": 6}, "num_envs": 2, "journal": path, "progress": False}
    found = evaluate("cartpole", policy, episodes=ids, policy_id="still", **settings)
    assert [row.episode_id for row in found.episodes] == sorted(ids)
    again = evaluate("cartpole", policy, episodes=ids, policy_id="still", resume=True, **settings)
    assert again.episodes == found.episodes == Evaluation.load(path).episodes
