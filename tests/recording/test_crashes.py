"""What is committed survives: SIGKILL at random moments, a full disk, torn journals, damaged files."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from counting_env import CountingEnv, length_of
from killed_program import NUM_ENVS, progress_file

from faulty_disk import FaultyDisk
from headrace import files
from headrace.errors import DataError, LifecycleError, StorageError
from headrace.files import append
from headrace.recording import EpisodeDataset, EpisodeRecorder, RecorderCfg, export_dataset, verify_dataset
from headrace.recording._store import read_journal

WITHIN_S = RecorderCfg().commit_within_s
PROGRAM = Path(__file__).parent / "killed_program.py"
FIELDS = ("obs", "actions", "rewards", "flags", "states")


class Launcher:
    """A process that has everything imported and forks one recording program after the other."""

    def __enter__(self) -> Launcher:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, path: Path, steps: int, seed: int = 0, point: int = 0) -> int:
        """Start recording; returns the id of the process, once it records (its status, if it crashed before)."""
        assert self._process.stdin
        self._process.stdin.write(f"{path} {steps} {seed} {point}\n")
        self._process.stdin.flush()
        return int(self._answer())

    def wait(self) -> int:
        """Wait for the last one; returns its exit status as ``os.waitpid`` gives it."""
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()


def check_committed(path: Path) -> int:
    """Every episode in the journal is whole and says the right things; returns how many there are."""
    dataset = EpisodeDataset(path)
    for episode in dataset:
        episode.entry.check(path)
        k, length = episode.meta.episode_id, episode.meta.length
        assert length == length_of(k)
        counts = episode.read("obs/inner/count")
        np.testing.assert_array_equal(counts, k * 1000 + np.arange(length + 1))
        assert episode.read("obs/camera").shape == (length + 1, 32, 32, 3)
        np.testing.assert_array_equal(episode.read("states")[:, 1], np.arange(length + 1) / 3)
    return len(dataset)


def check_bound(path: Path, committed: int) -> None:
    """Of what had finished when the last step returned, few episodes are missing, and they are young."""
    progress = np.fromfile(progress_file(path))
    last_return, finished = progress[0], int(progress[1])
    lost = progress[2 + committed : 2 + finished]  # commits come in order
    assert len(lost) <= NUM_ENVS
    assert np.all(lost >= last_return - WITHIN_S)


def kill_runs(path: Path, seed: int, kills: int = 10) -> None:
    """Runs on one dataset, each killed at a random moment; then one that is not."""
    generator = random.Random(seed)
    before = 0
    with Launcher() as launcher:
        for run in range(kills):
            process = launcher.start(path, 1_000_000, run)
            # a busy machine may let nothing be written for a while: the first run gets at least one episode to the disk
            while not run and not (path / "journal.jsonl").read_bytes():
                time.sleep(0.01)
            # recording is at full speed: a kill falls into the write, the sync, the rename or the journal
            time.sleep(generator.random() * 0.15)
            os.kill(process, signal.SIGKILL)
            assert launcher.wait() == signal.SIGKILL
            committed = check_committed(path)
            assert committed >= before
            check_bound(path, committed - before)
            before = committed
        assert before > 0
        # the same program, not killed, completes the dataset; one that was never killed gives the same bytes
        for target in (path, path.with_name("whole")):
            launcher.start(target, 60)
            assert launcher.wait() == 0
    check_committed(path)
    for file in (path.with_name("whole") / "episodes").iterdir():
        assert (path / "episodes" / file.name).read_bytes() == file.read_bytes()
    journaled = {entry.file for entry in EpisodeDataset(path).entries}
    assert journaled == {f"episodes/{file.name}" for file in (path / "episodes").iterdir()}
    export_dataset(path, path.with_name("demos.hdf5"), "robomimic", min_length=12)
    verdict = verify_dataset(path.with_name("demos.hdf5"))
    assert verdict.problems == ()
    assert verdict.episodes == len(EpisodeDataset(path, min_length=12)) > 0


def test_kills_at_random_moments_tear_nothing_and_lose_no_more_than_stated(tmp_path):
    kill_runs(tmp_path / "d", seed=1, kills=3)


def test_a_slow_disk_makes_steps_wait_so_that_the_bound_holds(tmp_path, monkeypatch):
    class Slow(files.Disk):
        def sync(self, handle: int) -> None:
            time.sleep(0.02)
            super().sync(handle)

    monkeypatch.setattr(files, "disk", Slow())
    cfg = RecorderCfg(queue_episodes=3, commit_within_s=0.1)
    finished: list[float] = []
    with EpisodeRecorder(tmp_path / "d", cfg) as recorder:
        env = CountingEnv(4, [recorder])
        env.reset()
        for _ in range(40):
            env.step()
            now = time.monotonic()
            finished += [now] * (recorder.report.finished - len(finished))
            # read before the time: what is committed in between only makes the bound easier
            waiting = finished[len(EpisodeDataset(tmp_path / "d")) :]
            assert len(waiting) <= 3
            assert all(then >= now - 0.1 for then in waiting)
    assert recorder.report.waited_s > 0
    assert len(EpisodeDataset(tmp_path / "d")) == len(finished) > 10


def test_episodes_that_wait_for_room_in_the_queue_do_not_become_younger(tmp_path, monkeypatch):
    class Slow(files.Disk):
        def sync(self, handle: int) -> None:
            time.sleep(0.05)
            super().sync(handle)

    monkeypatch.setattr(files, "disk", Slow())
    monkeypatch.setattr("counting_env.length_of", lambda _: 3)  # all end in the same step
    with EpisodeRecorder(tmp_path / "d", RecorderCfg(queue_episodes=1, commit_within_s=0.2)) as recorder:
        env = CountingEnv(4, [recorder])
        env.reset()
        for _ in range(3):
            env.step()
        # three syncs for each of the first three: the fourth finished more than 0.2 s ago, though queued just now
        assert recorder.report.finished == len(EpisodeDataset(tmp_path / "d")) == 4


def test_a_forked_child_neither_writes_nor_holds_the_dataset(tmp_path):
    recorder = EpisodeRecorder(tmp_path / "d")
    env = CountingEnv(2, [recorder])
    env.reset()
    for _ in range(10):
        env.step()
    hold, release = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            env.step()
        except LifecycleError:
            recorder.close()  # returns at once, and leaves the lock to the parent
            os.close(release)
            os.read(hold, 1)
            os._exit(7)
        os._exit(1)
    with pytest.raises(LifecycleError, match="is writing here"):
        EpisodeRecorder(tmp_path / "d", resume=True)
    recorder.close()
    EpisodeRecorder(tmp_path / "d", resume=True).close()  # the child lives
    os.close(release)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    os.close(hold)
    assert recorder.committed == recorder.report.finished > 0


def test_a_thread_that_cannot_start_is_an_error_and_the_next_reset_tries_again(tmp_path, monkeypatch):
    recorder = EpisodeRecorder(tmp_path / "d")
    env = CountingEnv(2, [recorder])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
        with pytest.raises(StorageError, match=r"could not be started \(can't start\); end other threads"):
            env.reset()
    env.reset()
    for _ in range(30):
        env.step()
    recorder.close()
    assert recorder.committed == recorder.report.finished > 0


@pytest.mark.parametrize("failure", [MemoryError("no memory"), RuntimeError("torn"), SystemExit(3), DataError("bad")])
def test_whatever_ends_the_writer_reaches_the_next_step_flush_and_close(tmp_path, monkeypatch, failure):
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("headrace.recording._store.write_episode_file", fail)
    recorder = EpisodeRecorder(tmp_path / "d")
    env = CountingEnv(4, [recorder])
    env.reset()
    words = re.escape(str(failure.args[0]))
    with pytest.raises((StorageError, DataError), match=words):  # noqa: PT012  (which step is open)
        for _ in range(1000):
            env.step()
            time.sleep(0.001)
    for call in (env.step, recorder.flush, recorder.close):
        with pytest.raises((StorageError, DataError), match=words):
            call()
    recorder.close()
    with pytest.raises(LifecycleError, match="closed"):
        env.step()
    monkeypatch.undo()
    assert record_some(tmp_path / "d", resume=True, fields=RecorderCfg().fields).committed > 0


def test_the_wall_clock_may_jump(tmp_path, monkeypatch):
    whole = record_some(tmp_path / "whole")
    jumps = iter([1e9, -1e9, 0.0, 4e9] * 10_000)
    genuine = time.time
    monkeypatch.setattr(time, "time", lambda: genuine() + next(jumps))
    jumped = record_some(tmp_path / "d")
    assert jumped.committed == whole.committed
    for file in (tmp_path / "whole" / "episodes").iterdir():
        assert (tmp_path / "d" / "episodes" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("at", ["write", "sync"])
def test_a_failing_disk_is_named_and_recording_goes_on_afterwards(tmp_path, monkeypatch, code, at):
    committed = record_some(tmp_path / "d", steps=12).committed
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", FaultyDisk(code, room=5_000, at=at))
        with pytest.raises(StorageError, match=rf"the disk .*; {committed} committed episodes are safe.*resume=True"):
            record_some(tmp_path / "d", resume=True)
    assert check_committed(tmp_path / "d") == committed
    check_no_leftovers(tmp_path / "d")
    assert record_some(tmp_path / "d", resume=True).committed == record_some(tmp_path / "whole").committed


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["every third", "every one"])
def test_a_kill_right_before_or_after_any_write_sync_or_rename_tears_nothing(tmp_path, stride):
    with Launcher() as launcher:
        launcher.start(tmp_path / "whole", 4)
        assert launcher.wait() == 0
        whole = {file.name: file.read_bytes() for file in (tmp_path / "whole" / "episodes").iterdir()}
        point, status = 1 - stride, int(signal.SIGKILL)
        while status == signal.SIGKILL:
            point += stride
            path = tmp_path / str(point)
            status = launcher.start(path, 4, point=point)
            if status != signal.SIGKILL:
                status = launcher.wait()
            if (path / "dataset.json").exists() and (path / "journal.jsonl").exists():
                check_committed(path)
            launcher.start(path, 4)
            assert launcher.wait() == 0
            assert {file.name: file.read_bytes() for file in (path / "episodes").iterdir()} == whole
            assert check_committed(path) == len(whole)
        assert status == 0
        assert point > 4 * len(whole)


@pytest.mark.slow
def test_a_hundred_kills_at_random_moments_tear_nothing(tmp_path):
    for seed in range(10):
        kill_runs(tmp_path / str(seed) / "d", seed=100 + seed)


def check_no_leftovers(path: Path) -> None:
    """No file without a line in the journal."""
    listed = {entry.file for entry in EpisodeDataset(path).entries}
    assert listed == {f"episodes/{file.name}" for file in (path / "episodes").iterdir()}


def record_some(path: Path, steps: int = 30, resume: bool = False, fields=FIELDS) -> EpisodeRecorder:
    with EpisodeRecorder(path, RecorderCfg(fields=fields), resume=resume) as recorder:
        env = CountingEnv(4, [recorder], image=32)
        env.reset()
        for _ in range(steps):
            env.step()
    return recorder


def test_a_full_disk_gives_a_clear_error_and_committed_episodes_survive(tmp_path):
    # a limit of the file size stands for the full disk: 3 KB a frame, so that episodes of 7 steps and more do not fit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (22_000, hard))
    try:
        with pytest.raises(StorageError, match=r"size limit; \d+ committed episodes are safe.*resume=True"):
            record_some(tmp_path / "d")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    committed = check_committed(tmp_path / "d")
    check_no_leftovers(tmp_path / "d")
    assert all(entry.length < 7 for entry in EpisodeDataset(tmp_path / "d").entries)
    whole = record_some(tmp_path / "whole")
    again = record_some(tmp_path / "d", resume=True)
    assert again.committed == whole.committed > committed
    assert again.report.already_there == committed


def test_a_disk_that_is_really_full_is_named_and_recording_goes_on_when_there_is_room(small_disk, tmp_path):
    with pytest.raises(StorageError, match=r"the disk is full; \d+ committed episodes are safe.*resume=True"):
        record_some(small_disk / "d")
    committed = check_committed(small_disk / "d")
    check_no_leftovers(small_disk / "d")
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert record_some(small_disk / "d", resume=True).committed == record_some(tmp_path / "whole").committed > committed
    assert check_committed(small_disk / "d") > committed


def test_a_disk_that_becomes_read_only_is_named_and_what_was_committed_is_read(small_disk):
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    committed = record_some(small_disk / "d", steps=12).committed
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="the disk is read-only"):
        record_some(small_disk / "d", resume=True)
    with pytest.raises(StorageError, match="the disk is read-only"):
        record_some(small_disk / "new")
    assert check_committed(small_disk / "d") == committed
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert record_some(small_disk / "d", resume=True).committed > committed


def test_the_step_after_a_failed_write_raises(tmp_path, monkeypatch):
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headrace.recording._store.write_episode_file", no_space)
    recorder = EpisodeRecorder(tmp_path / "d")
    env = CountingEnv(4, [recorder])
    env.reset()
    with pytest.raises(StorageError, match="the disk is full; 0 committed"):  # noqa: PT012  (which step is open)
        for _ in range(1000):
            env.step()
            time.sleep(0.001)
    with pytest.raises(StorageError):
        recorder.close()


def test_a_journal_that_cannot_grow_leaves_no_episode_without_a_line(tmp_path, monkeypatch):
    record_some(tmp_path / "d", steps=12)
    before = (tmp_path / "d" / "journal.jsonl").read_bytes()

    def torn(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("headrace.recording._store.append", torn)
        with pytest.raises(StorageError):
            record_some(tmp_path / "d", resume=True)
    assert (tmp_path / "d" / "journal.jsonl").read_bytes() == before
    check_no_leftovers(tmp_path / "d")


def test_a_line_that_the_disk_takes_only_in_part_is_taken_back(tmp_path):
    record_some(tmp_path / "d", steps=12)
    journal = tmp_path / "d" / "journal.jsonl"
    before = journal.read_bytes()
    entries, _ = read_journal(journal)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            append(journal, entries[0].as_line())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert journal.read_bytes() == before


def test_a_torn_last_line_and_stray_files_are_cleared_on_resume(tmp_path):
    path = tmp_path / "d"
    whole = record_some(path).committed
    journal = (path / "journal.jsonl").read_bytes()
    lines = journal.splitlines(keepends=True)
    for cut in (1, len(lines[-1]) // 2, len(lines[-1]) - 1):
        (path / "journal.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        for stray in ("seed0_ep99999999.npz", "seed0_ep99999998.npz.part"):  # of now, and of version 0.1
            (path / "episodes" / stray).write_bytes(b"half")
        assert len(EpisodeDataset(path)) == whole - 1
        assert record_some(path, resume=True).committed == whole
        assert sorted((path / "journal.jsonl").read_bytes().splitlines()) == sorted(journal.splitlines())
        check_no_leftovers(path)


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "d"
    record_some(path)
    lines = (path / "journal.jsonl").read_text().splitlines(keepends=True)
    (path / "journal.jsonl").write_text("".join([lines[0], "{torn\n", *lines[1:]]))
    with pytest.raises(DataError, match=r"journal.jsonl, line 2"):
        EpisodeDataset(path)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_resume_refuses_a_damaged_episode_by_name(tmp_path, damage):
    path = tmp_path / "d"
    record_some(path)
    file = path / "episodes" / "seed0_ep00000002.npz"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(content[:-1])
    else:
        file.unlink()
    with pytest.raises(DataError, match="seed0_ep00000002"):
        EpisodeRecorder(path, resume=True)


def test_a_stalled_disk_raises_after_the_bound_and_loses_nothing_committed(tmp_path, monkeypatch):
    from headrace.recording import _store as store

    write = store.write_episode_file

    def slow(*arguments: object) -> tuple[int, str]:
        time.sleep(1.0)
        return write(*arguments)

    monkeypatch.setattr(store, "write_episode_file", slow)
    recorder = EpisodeRecorder(tmp_path / "d", RecorderCfg(queue_episodes=1, stall_s=0.3))
    env = CountingEnv(4, [recorder])
    env.reset()
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"no episode for 0.3 s"):  # noqa: PT012  (which step is open)
        for _ in range(100):
            env.step()
    assert time.monotonic() - began < 5
    monkeypatch.setattr(store, "write_episode_file", write)
    with pytest.raises(StorageError, match=r"no episode for 0.3 s"):
        recorder.close()
    with pytest.raises(LifecycleError, match="is writing here"):  # what still runs keeps others out
        EpisodeRecorder(tmp_path / "d", resume=True)
    time.sleep(1.0)
    recorder.close()
    # the episodes that the raising step had finished are written by close
    assert recorder.report.finished == len(EpisodeDataset(tmp_path / "d")) > 0


def test_a_copy_of_a_dataset_is_a_dataset(tmp_path):
    record_some(tmp_path / "d")
    shutil.copytree(tmp_path / "d", tmp_path / "elsewhere")
    assert json.loads((tmp_path / "elsewhere" / "dataset.json").read_text())["format"] == "headrace-dataset"
    assert len(EpisodeDataset(tmp_path / "elsewhere")) == len(EpisodeDataset(tmp_path / "d"))
