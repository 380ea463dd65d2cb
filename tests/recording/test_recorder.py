from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from counting_env import CountingEnv, length_of, succeeded

from headrace.errors import ConfigError, DataError, DtypeError, LifecycleError, UnknownNameError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, RecorderCfg, verify_dataset
from headrace.recording._episode_file import EpisodeMeta
from headrace.recording.fields import as_array
from headrace.recording.running import RunningRows
from headrace.types import ResetRecord

EVERYTHING = ("obs", "actions", "processed_actions", "rewards", "flags", "states")


def record(path: Path, *, num_envs: int = 4, steps: int = 40, suspend: int | None = None, **cfg) -> EpisodeRecorder:
    recorder = EpisodeRecorder(path, RecorderCfg(**{"fields": EVERYTHING, **cfg}))
    env = CountingEnv(num_envs, [recorder])
    generator = random.Random(suspend)
    with recorder:
        env.reset()
        acted = torch.zeros(num_envs, dtype=torch.int64)
        while bool((acted < steps).any()):
            env.active = acted < steps
            if suspend is not None:
                env.active &= torch.tensor([generator.random() < 0.5 for _ in range(num_envs)])
            acted += env.active
            env.step()
    return recorder


def test_episodes_come_back_with_every_row_dtype_and_shape(tmp_path):
    record(tmp_path / "d")
    episodes = list(EpisodeDataset(tmp_path / "d"))
    assert len(episodes) >= 12
    for episode in episodes:
        k, length = episode.meta.episode_id, episode.meta.length
        assert length == length_of(k)
        assert episode.meta.success == succeeded(k)
        data = episode.arrays()
        steps = np.arange(length + 1)
        assert data["obs"]["policy"].dtype == np.float32
        np.testing.assert_array_equal(data["obs"]["policy"][:, 1], steps)
        np.testing.assert_array_equal(data["obs"]["policy"][:, 2], k * 1000 + steps)
        assert data["obs"]["inner"]["count"].dtype == np.int64
        assert data["obs"]["inner"]["count"].shape == (length + 1,)
        np.testing.assert_array_equal(data["obs"]["inner"]["count"], k * 1000 + steps)
        assert data["obs"]["inner"]["flags"].dtype == np.bool_
        np.testing.assert_array_equal(data["obs"]["inner"]["flags"][:, 0], steps % 2 == 0)
        assert data["obs"]["inner"]["deep"]["half"].dtype == np.float16
        np.testing.assert_array_equal(data["obs"]["inner"]["deep"]["half"][:, 0], steps / 4)
        assert data["obs"]["nothing"].shape == (length + 1, 3, 0)
        assert data["obs"]["nothing"].dtype == np.int32
        assert data["obs"]["camera"].dtype == np.uint8
        pixels = np.arange(8 * 8 * 3).reshape(8, 8, 3)
        np.testing.assert_array_equal(data["obs"]["camera"], (pixels + (k * 16 + steps)[:, None, None, None]) % 256)
        np.testing.assert_array_equal(data["actions"][:, 1], np.float32(0.1) * steps[:-1].astype(np.float32))
        np.testing.assert_array_equal(data["processed_actions"], data["actions"].astype(np.float64) * 2)
        np.testing.assert_array_equal(data["rewards"], steps[1:] / 2)
        assert data["terminated"].dtype == data["truncated"].dtype == np.bool_
        np.testing.assert_array_equal(data["terminated"] | data["truncated"], steps[1:] == length)
        np.testing.assert_array_equal(data["states"][:, 1], steps / 3)
        assert data["states"].dtype == np.float64
        assert episode.meta.episode_return == (steps / 2).sum()


def test_memory_of_written_episodes_is_used_again_and_holds_what_the_next_ones_wrote(tmp_path):
    recorder = EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=EVERYTHING))
    env = CountingEnv(4, [recorder], image=48)  # large enough for pages of their own
    with recorder:
        env.reset()
        held = []
        for step in range(120):
            env.active = torch.rand(4, generator=torch.Generator().manual_seed(step)) < 0.8
            env.step()
            recorder.flush()  # how far the writer has come would decide which memory is free
            if step % 10 == 9:
                held.append(recorder.held_bytes())
    assert max(held[6:]) <= max(held[:6]), "no new memory once every environment has had a long episode"
    pixels = np.arange(48 * 48 * 3).reshape(48, 48, 3)
    for episode in EpisodeDataset(tmp_path / "d"):
        k, steps = episode.meta.episode_id, np.arange(episode.meta.length + 1)
        expected = (pixels + (k * 16 + steps)[:, None, None, None]) % 256
        np.testing.assert_array_equal(episode.read("obs/camera"), expected)


def meta_of(length: int) -> EpisodeMeta:
    return EpisodeMeta(episode_id=0, seed=0, attempt=0, length=length, success=None, diverged=False, episode_return=0.0)


def test_pages_that_are_given_back_twice_are_used_once():
    values = {"obs/camera": torch.zeros(2, 8192, dtype=torch.uint8)}
    rows, everyone = RunningRows(2, values), np.arange(2)
    rows.write_first(values, everyone, everyone)
    rows.write(values, everyone, everyone, np.zeros(2, np.int64))
    episode = rows.finish(0, meta_of(1))
    before = rows.lanes[0].held_bytes()
    episode.release()
    episode.release()
    assert rows.lanes[0].held_bytes() == 2 * before
    assert episode.held_bytes == 0


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_ragged_episodes_are_those_of_lists(seed):
    rng, num_envs = np.random.default_rng(seed), 5
    kinds = {
        "obs/image": ((70, 70), np.uint8),
        "obs/none": ((0,), np.float32),
        "states": ((3, 2), np.float32),
        "flag": ((), np.bool_),
    }

    def draw(rows: int) -> dict[str, torch.Tensor]:
        made = {name: rng.integers(0, 250, (rows, *shape)).astype(dtype) for name, (shape, dtype) in kinds.items()}
        made["obs/image"] = np.asfortranarray(made["obs/image"])  # not every environment gives contiguous rows
        return {name: torch.from_numpy(values) for name, values in made.items()}

    def moments(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in values.items() if name != "flag"}

    def keep(found: dict[str, torch.Tensor], slot: int, row: int) -> None:
        for name, values in found.items():
            lists[slot].setdefault(name, []).append(np.asarray(values[row if name == "states" else slot]).copy())

    rows = RunningRows(num_envs, moments(draw(num_envs)))
    rows.add_acts(draw(num_envs))
    lists: list[dict[str, list[np.ndarray]]] = [{} for _ in range(num_envs)]
    compared = 0
    for _ in range(600):
        slots = np.flatnonzero(rng.random(num_envs) < 0.6)
        fresh = np.array([slot for slot in slots if not lists[slot]], np.int64)
        first = moments(draw(num_envs))
        rows.write_first(first, fresh, np.arange(len(fresh)))
        for row, slot in enumerate(fresh):
            keep(first, slot, row)
        found = draw(num_envs)
        found["states"] = draw(len(slots) + 1)["states"]  # a row per row of the record, of which the last is not seen
        steps = np.array([len(lists[slot].get("flag", [])) for slot in slots], np.int64)
        rows.write(found, slots, np.arange(len(slots)), steps)
        for row, slot in enumerate(slots):
            keep(found, slot, row)
        for slot in np.flatnonzero(rng.random(num_envs) < 0.01).tolist():
            if lists[slot] and rng.random() < 0.8:
                episode = rows.finish(slot, meta_of(len(lists[slot]["flag"])))
                assert [field.name for field, _ in episode.columns()] == sorted(kinds)
                for field, pieces in episode.columns():
                    body = b"".join(piece.tobytes() for piece in pieces)
                    assert body == b"".join(row.tobytes() for row in lists[slot][field.name]), field.name
                    compared += 1
                episode.release()
            else:
                rows.drop(slot)
            lists[slot] = {}
    assert compared > 30


@pytest.mark.parametrize("rows", [1, 3])
def test_a_source_with_too_few_or_too_many_rows_is_refused_before_anything_is_copied(rows):
    values = {"obs/policy": torch.zeros(2), "states": torch.zeros(2, 1)}
    running, everyone = RunningRows(2, values), np.arange(2)
    running.write_first(values, everyone, everyone)
    running.write(values, everyone, everyone, np.zeros(2, np.int64))
    with pytest.raises(DataError, match=f"obs/policy: expected a row for each of 2 environments, got {rows}"):
        running.write({**values, "obs/policy": torch.zeros(rows)}, everyone, everyone, np.ones(2, np.int64))
    with pytest.raises(DataError, match="states: expected a row per environment, got 1"):
        running.write({**values, "states": torch.zeros(1, 1)}, everyone, everyone, np.ones(2, np.int64))
    running.write({**values, "states": torch.zeros(1, 1)}, everyone[:1], everyone[:1], np.ones(1, np.int64))
    with pytest.raises(DataError, match="states: expected a row per environment, got 1"):
        running.write({**values, "states": torch.zeros(1, 1)}, everyone[1:], everyone[1:], np.ones(1, np.int64))


def test_numpy_reads_an_episode_file_without_headrace(tmp_path):
    record(tmp_path / "d")
    file = tmp_path / "d" / "episodes" / "seed0_ep00000001.npz"
    with np.load(file) as content:
        assert json.loads(content["episode.json"])["episode_id"] == 1
        np.testing.assert_array_equal(content["obs/policy"][:, 0], 1)


def test_rows_of_an_episode_can_be_read_alone(tmp_path):
    record(tmp_path / "d")
    episode = EpisodeDataset(tmp_path / "d").find(1)
    np.testing.assert_array_equal(episode.read("obs/camera", 2, 4), episode.read("obs/camera")[2:4])
    np.testing.assert_array_equal(episode.read("rewards", -1), episode.read("rewards")[-1:])
    assert episode.read("rewards", 3, 3).shape == (0,)


@pytest.mark.parametrize("suspend", [1, 2])
def test_files_are_byte_equal_with_half_of_the_environments_suspended_at_random(tmp_path, suspend):
    record(tmp_path / "plain")
    record(tmp_path / "suspended", suspend=suspend)
    plain = {file.name: file.read_bytes() for file in (tmp_path / "plain" / "episodes").iterdir()}
    other = {file.name: file.read_bytes() for file in (tmp_path / "suspended" / "episodes").iterdir()}
    assert plain == other
    journals = [set((tmp_path / name / "journal.jsonl").read_text().splitlines()) for name in ("plain", "suspended")]
    assert journals[0] == journals[1]


def test_a_suspended_environment_and_an_episode_that_never_acted_leave_nothing_behind(tmp_path):
    recorder = EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=EVERYTHING))
    env = CountingEnv(3, [recorder])
    with recorder:
        env.reset()
        env.active = torch.tensor([True, False, True])
        for _ in range(60):
            env.step()
        env.reset()
    ids = {episode.meta.episode_id % 3 for episode in EpisodeDataset(tmp_path / "d")}
    assert ids == {0, 2}
    # the two that ran were cut short by the reset (or had just begun); the suspended one never counted
    assert recorder.report.abandoned <= 2


def test_succeeded_only_keeps_no_failed_episode_and_no_short_one(tmp_path):
    recorder = record(tmp_path / "d", keep="succeeded", min_length=5)
    kept = [episode.meta for episode in EpisodeDataset(tmp_path / "d")]
    assert kept
    assert all(meta.success and meta.length >= 5 for meta in kept)
    report = recorder.report
    assert report.not_kept > 0
    assert report.too_short > 0
    assert report.finished == len(kept)


def test_episodes_that_0_2_kept_apart_are_read_verified_and_gone_on_with(tmp_path):
    record(tmp_path / "d")
    journal, lines = tmp_path / "d" / "journal.jsonl", list[str]()
    (tmp_path / "d" / "failed").mkdir()
    for line in map(json.loads, journal.read_text().splitlines()):
        if not line["success"]:
            apart = line["file"].replace("episodes/", "failed/")
            (tmp_path / "d" / line["file"]).rename(tmp_path / "d" / apart)
            line["file"] = apart
        lines.append(json.dumps(line) + "\n")
    journal.write_text("".join(lines))
    failed = {file.name for file in (tmp_path / "d" / "failed").iterdir()}
    assert failed == {
        f"seed0_ep{episode.meta.episode_id:08d}.npz" for episode in EpisodeDataset(tmp_path / "d", only="failed")
    }
    assert failed
    assert verify_dataset(tmp_path / "d").problems == ()
    with EpisodeRecorder(tmp_path / "d", resume=True) as recorder:
        assert recorder.committed == len(lines)


def test_chosen_fields_are_recorded_and_no_others(tmp_path):
    record(tmp_path / "d", fields=("obs/policy", "obs/inner/count", "actions"))
    names = EpisodeDataset(tmp_path / "d")[0].names
    assert set(names) == {"obs/policy", "obs/inner/count", "actions"}
    record(tmp_path / "c", fields=("cameras", "rewards"))
    assert set(EpisodeDataset(tmp_path / "c")[0].names) == {"obs/camera", "obs/nothing", "rewards"} - {"obs/nothing"}


def test_only_what_a_camera_must_render_asks_for_frames(tmp_path):
    def needs(*fields: str) -> frozenset[str]:
        with EpisodeRecorder(tmp_path / "-".join(fields).replace("/", "_"), RecorderCfg(fields=fields)) as recorder:
            return recorder.needs

    assert needs("obs/policy", "actions") == frozenset()
    assert needs("obs/policy", "states") == {"states"}
    assert needs("cameras/front") == {"frames"}
    assert needs("obs") == {"frames"}


def test_wrong_names_are_refused_with_the_nearest_right_one(tmp_path):
    with pytest.raises(UnknownNameError, match="'rewards'"):
        RecorderCfg(fields=("reward",))
    with pytest.raises(UnknownNameError, match="obs/policy"):
        record(tmp_path / "d", fields=("obs/polcy",))
    with pytest.raises(ConfigError, match="cameras/camera"):
        record(tmp_path / "e", fields=("obs/camera",))


def test_an_existing_dataset_is_never_overwritten(tmp_path):
    record(tmp_path / "d")
    before = {file: file.read_bytes() for file in (tmp_path / "d").rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match="resume=True"):
        EpisodeRecorder(tmp_path / "d")
    assert before == {file: file.read_bytes() for file in (tmp_path / "d").rglob("*") if file.is_file()}


def test_a_second_recorder_on_one_dataset_is_refused(tmp_path):
    with EpisodeRecorder(tmp_path / "d"), pytest.raises(LifecycleError, match=rf"process {os.getpid()} is writing"):
        EpisodeRecorder(tmp_path / "d", resume=True)


def test_resuming_with_other_fields_or_settings_is_refused(tmp_path):
    record(tmp_path / "d")
    with pytest.raises(ConfigError, match="DatasetInfo"):
        EpisodeRecorder(tmp_path / "d", info=DatasetInfo(recipe={"source": "ant"}), resume=True)
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=("actions",)), resume=True) as recorder:
        env = CountingEnv(4, [recorder])
        env.reset()
        with pytest.raises(ConfigError, match="obs/camera is uint8"):
            env.step()


def test_an_episode_already_running_at_attachment_is_left_out_and_counted(tmp_path):
    with EpisodeRecorder(tmp_path / "d") as recorder:
        env = CountingEnv(2, [])
        env.reset()
        env.step()
        env.observers = [recorder]
        for _ in range(30):
            env.step()
    assert recorder.report.begun_before == 2
    assert all(entry.episode_id >= 2 for entry in EpisodeDataset(tmp_path / "d").entries)


def test_an_identity_finished_twice_in_one_run_is_kept_twice(tmp_path):
    with EpisodeRecorder(tmp_path / "d") as recorder:
        env = CountingEnv(1, [recorder])
        for _ in range(2):
            env.reset()
            for _ in range(length_of(0)):
                env.step()
    assert [entry.key for entry in EpisodeDataset(tmp_path / "d").entries] == [(0, 0, 0), (0, 0, 1)]
    # the same program again adds nothing
    with EpisodeRecorder(tmp_path / "d", resume=True) as recorder:
        env = CountingEnv(1, [recorder])
        for _ in range(2):
            env.reset()
            for _ in range(length_of(0)):
                env.step()
    assert recorder.report.already_there == 2
    assert recorder.committed == 2


def test_a_full_queue_blocks_and_drops_nothing(tmp_path):
    slow, fast = record(tmp_path / "slow", queue_episodes=1), record(tmp_path / "fast")
    assert slow.report.waited_s > 0
    assert slow.committed == fast.committed == fast.report.finished


def test_finished_episodes_survive_an_error_and_an_interrupt(tmp_path):
    for index, error in enumerate((RuntimeError, KeyboardInterrupt)):
        path = tmp_path / str(index)
        with pytest.raises(error), EpisodeRecorder(path) as recorder:  # noqa: PT012  (the loop is what is interrupted)
            env = CountingEnv(4, [recorder])
            env.reset()
            for _ in range(20):
                env.step()
            raise error
        assert recorder.report.finished == len(EpisodeDataset(path)) > 0


def test_an_interrupt_inside_a_step_leaves_no_episode_with_a_gap(tmp_path, monkeypatch):
    with EpisodeRecorder(tmp_path / "d") as recorder:
        env = CountingEnv(4, [recorder])
        env.reset()
        for _ in range(10):
            env.step()
        with monkeypatch.context() as patch:
            patch.setattr(recorder._rows, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                env.step()
        for _ in range(40):
            env.step()
    for episode in EpisodeDataset(tmp_path / "d"):
        np.testing.assert_array_equal(episode.read("obs/policy")[:, 1], np.arange(episode.meta.length + 1))


@pytest.mark.parametrize("moment", range(3))
def test_an_interrupt_inside_the_first_step_leaves_no_episode_without_some_fields(tmp_path, monkeypatch, moment):
    moments = iter(range(100))
    join = np.concatenate

    def interrupted(arrays):
        if next(moments) == moment:
            raise KeyboardInterrupt
        return join(arrays)

    with EpisodeRecorder(tmp_path / "d") as recorder:
        env = CountingEnv(4, [recorder])
        env.reset()
        with monkeypatch.context() as patch:
            patch.setattr("headrace.recording.running.np.concatenate", interrupted)
            with pytest.raises(KeyboardInterrupt):
                env.step()
        for _ in range(40):
            env.step()
    episodes = list(EpisodeDataset(tmp_path / "d"))
    assert episodes
    for episode in episodes:
        assert {"actions", "rewards", "terminated", "truncated"} < set(episode.names)
        np.testing.assert_array_equal(episode.read("obs/policy")[:, 1], np.arange(episode.meta.length + 1))
        np.testing.assert_allclose(episode.read("actions")[:, 1], np.arange(episode.meta.length) * 0.1, rtol=1e-6)


def test_a_recorder_that_nobody_closed_is_finished_at_exit(tmp_path):
    import subprocess
    import sys

    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from counting_env import CountingEnv\n"
        "from headrace.recording import EpisodeRecorder\n"
        "recorder = EpisodeRecorder(sys.argv[1])\n"
        "env = CountingEnv(4, [recorder]); env.reset()\n"
        "for _ in range(20): env.step()\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "d", Path(__file__).parent], check=True)
    assert len(EpisodeDataset(tmp_path / "d")) >= 8


def test_a_dtype_that_changes_is_refused(tmp_path):
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(fields=("actions",))) as recorder:
        env = CountingEnv(2, [recorder])
        env.reset()
        env.step()
        actions = env.actions
        env.actions = lambda: actions().to(torch.float64)
        with pytest.raises(DataError, match=r"expected rows of float32\(2,\)"):
            env.step()


def test_values_that_no_reader_could_take_are_refused(tmp_path):
    for dtype in (object, "U4", "M8[ns]"):
        with pytest.raises(DtypeError, match=r"obs/x: expected numbers"):
            as_array(np.zeros(3, dtype), "obs/x")
    with EpisodeRecorder(tmp_path / "d") as recorder:
        ids = torch.arange(2)
        record = ResetRecord(
            env_ids=ids, episode_ids=ids, seed=0, obs={"x": torch.zeros(2, 1)}, states=None, instructions=("a", "\0")
        )
        with pytest.raises(DataError, match="for episode 1"):
            recorder.after_reset(record)


def test_a_closed_recorder_refuses_steps(tmp_path):
    recorder = EpisodeRecorder(tmp_path / "d")
    env = CountingEnv(2, [recorder])
    env.reset()
    recorder.close()
    recorder.close()
    with pytest.raises(LifecycleError, match="resume=True"):
        env.step()
