from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from faulty_disk import FaultyDisk
from headrace import files
from headrace.errors import StorageError
from headrace.evaluation import _journal
from headrace.evaluation._journal import WITHIN_S, SyncedFile


class WatchedDisk(files.Disk):
    """Knows how many bytes of a file are on disk; takes its time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.synced = 0
        self.syncs = 0

    def sync(self, handle: int) -> None:
        size = os.fstat(handle).st_size
        time.sleep(self.seconds)
        super().sync(handle)
        self.synced, self.syncs = size, self.syncs + 1


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x").write_bytes(b"before\n")
    return tmp_path / "x"


def test_content_is_in_the_file_at_once_and_on_disk_after_close_with_few_syncs(path, monkeypatch):
    disk = WatchedDisk()
    monkeypatch.setattr(files, "disk", disk)
    file = SyncedFile(path)
    content = b"before\n"
    for number in range(500):
        file.append(b"%d\n" % number)
        content += b"%d\n" % number
        assert path.read_bytes() == content
    file.close()
    file.close()
    assert disk.synced == len(content)
    assert disk.syncs < 50


@pytest.mark.parametrize("seconds", [0.0, 0.03, 0.15])
def test_what_is_older_than_the_bound_is_on_disk_when_an_append_returns(path, monkeypatch, seconds):
    monkeypatch.setattr(_journal, "WITHIN_S", 0.1)
    monkeypatch.setattr(_journal, "_LINGER_S", 0.05)
    disk = WatchedDisk(seconds)
    monkeypatch.setattr(files, "disk", disk)
    file, ends = SyncedFile(path), []
    begin = time.monotonic()
    while time.monotonic() - begin < 1.0:
        came = time.monotonic()
        file.append(b"x" * 10)
        ends.append((came, path.stat().st_size))
        # older at the beginning of this call than the bound: the call must have seen to it
        assert all(size <= disk.synced for when, size in ends if came - when > 0.1)
        time.sleep(0.002)
    file.close()
    assert disk.syncs >= 4
    assert WITHIN_S == 1.0  # as the pages say


def test_a_slow_sync_is_remembered_by_those_that_follow(path, monkeypatch):
    monkeypatch.setattr(_journal, "_LINGER_S", 0.0)
    disk = WatchedDisk()
    monkeypatch.setattr(files, "disk", disk)
    file = SyncedFile(path)
    for number, seconds in enumerate((0.5, 0.0, 0.0), 1):
        disk.seconds = seconds
        file.append(b"x")
        while disk.syncs < number:
            time.sleep(0.001)
    file.close()
    assert file._took >= 0.3  # a sync that may take this long begins so much earlier


def test_a_failed_sync_cuts_the_file_to_what_is_on_disk_and_the_next_call_says_so(path, monkeypatch):
    monkeypatch.setattr(_journal, "_LINGER_S", 0.0)
    file = SyncedFile(path)
    monkeypatch.setattr(files, "disk", FaultyDisk(errno.EIO, at="sync"))
    with pytest.raises(StorageError, match="the disk failed; make room and resume"):  # noqa: PT012  (which call is open)
        for _ in range(1000):
            file.append(b"lost\n")
            time.sleep(0.001)
    assert path.read_bytes() == b"before\n"
    file.close()  # it was told


def test_a_failed_sync_that_no_append_has_raised_is_raised_by_close(path, monkeypatch):
    file = SyncedFile(path)
    monkeypatch.setattr(files, "disk", FaultyDisk(errno.ENOSPC, at="sync"))
    file.append(b"lost\n")
    with pytest.raises(StorageError, match="the disk is full; make room and resume"):
        file.close()
    assert path.read_bytes() == b"before\n"


def test_a_full_disk_takes_nothing_of_a_line_and_the_lines_before_stay(path, monkeypatch):
    file = SyncedFile(path)
    file.append(b"kept\n")
    monkeypatch.setattr(files, "disk", FaultyDisk(errno.ENOSPC, room=3))
    with pytest.raises(StorageError, match="the disk is full"):
        file.append(b"too long\n")
    assert path.read_bytes() == b"before\nkept\n"
    file.close()
    assert path.read_bytes() == b"before\nkept\n"


def test_whatever_ends_the_thread_is_raised_and_nothing_hangs(path, monkeypatch):
    class Broken(files.Disk):
        def sync(self, handle: int) -> None:
            raise MemoryError("no memory")

    monkeypatch.setattr(files, "disk", Broken())
    before = set(threading.enumerate())  # tests that let go of a journal in mid-air leave its thread
    file = SyncedFile(path)
    file.append(b"lost\n")
    with pytest.raises(StorageError, match="no memory"):
        file.close()
    assert set(threading.enumerate()) <= before


def test_a_kill_loses_nothing_that_an_append_has_returned_for(path):
    program = (
        "import sys; from pathlib import Path; from headrace.evaluation._journal import SyncedFile\n"
        "file = SyncedFile(Path(sys.argv[1]))\n"
        "for number in range(10**9): file.append(b'%09d\\n' % number); print(number, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(200):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        told = [200 - 1, *map(int, child.stdout.read().split())]
    lines = path.read_bytes().splitlines()[1:]
    assert lines[: told[-1] + 1] == [b"%09d" % number for number in range(told[-1] + 1)]


def test_a_disk_that_hangs_is_given_up(path, monkeypatch):
    answers = threading.Event()

    class HungDisk(files.Disk):
        def sync(self, handle: int) -> None:
            answers.wait(30)
            super().sync(handle)

    monkeypatch.setattr(files, "disk", HungDisk())
    for name, seconds in (("WITHIN_S", 0.05), ("_LINGER_S", 0.02), ("STALL_S", 0.2)):
        monkeypatch.setattr(_journal, name, seconds)
    file, began = SyncedFile(path), time.monotonic()

    def append_many() -> None:
        for number in range(1000):
            file.append(b"%d\n" % number)
            time.sleep(0.01)

    with pytest.raises(StorageError, match=r"took nothing for 0\.2 s"):
        append_many()
    file.close()  # was said
    other = SyncedFile(path)
    other.append(b"more\n")
    with pytest.raises(StorageError, match="took nothing"):
        other.close()
    other.close()
    assert time.monotonic() - began < 10
    answers.set()
