"""Whole files, claimed directories, locks and manifests, on disks that fail and in processes that are killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from faulty_disk import FaultyDisk
from headrace import files
from headrace.errors import ConfigError, DataError, LifecycleError, StorageError
from headrace.files import FileHash, Lock, Manifest, append, claim, write_directory, write_whole

FAULTS = [
    FaultyDisk(errno.ENOSPC, room=3),
    FaultyDisk(errno.EIO, room=1),
    FaultyDisk(errno.EIO, at="sync"),
    FaultyDisk(errno.EROFS, at="rename"),
]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.mark.parametrize("content", ["text", b"bytes", lambda part: part.write_text("by a function")])
def test_a_file_is_made_with_its_parents_and_nothing_else(content: files.Content, tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.json"
    write_whole(path, content)
    assert path.read_text() in ("text", "bytes", "by a function")
    assert names(path.parent) == ["file.json"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{errno.errorcode[fault.code]}-{fault.at}")
@pytest.mark.parametrize("before", [None, "old"])
def test_a_failing_disk_leaves_the_old_file_and_no_other(
    fault: FaultyDisk, before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    if before is not None:
        write_whole(path, before)
    monkeypatch.setattr(files, "disk", fault)
    with pytest.raises(StorageError, match=r"result\.json: could not be written: the disk") as error:
        write_whole(path, "a new content")
    assert fault.calls
    assert error.value.errno == fault.code
    assert names(tmp_path) == ([] if before is None else ["result.json"])
    assert before is None or path.read_text() == before


def test_what_the_writer_raises_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def write(part: Path) -> None:
        part.write_text("half")
        raise DataError("not reachable")

    with pytest.raises(DataError, match="not reachable"):
        write_whole(tmp_path / "file", write)
    with pytest.raises(RuntimeError, match="own"):
        write_whole(tmp_path / "file", lambda _: (_ for _ in ()).throw(RuntimeError("own")))
    assert names(tmp_path) == []


def test_a_full_disk_is_named_whoever_writes(small_disk: Path) -> None:
    path = small_disk / "file"
    write_whole(path, b"x" * 10_000)
    large = torch.zeros(1 << 18)
    writers: list[files.Content] = [
        b"y" * (1 << 20),
        lambda part: torch.save(large, part),
        lambda part: part.write_bytes(b"z" * (1 << 20)) and None,
    ]
    for content in writers:
        with pytest.raises(StorageError, match="the disk is full"):
            write_whole(path, content)
        assert path.read_bytes() == b"x" * 10_000
        assert names(small_disk) == ["file"]


def test_a_read_only_disk_is_refused_by_name(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match="the disk is read-only"):
        write_whole(small_disk / "file", "x")
    with pytest.raises(StorageError, match="read-only"):
        files.check_writable(small_disk)
    with pytest.raises(StorageError, match="read-only"):
        claim(small_disk)
    with pytest.raises(StorageError, match="read-only"):
        claim(small_disk / "new")


def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, b"0" * 300_000)
    program = (
        "import sys, itertools, pathlib\nfrom headrace.files import write_whole\n"
        "for k in itertools.count(1):\n"
        "    write_whole(pathlib.Path(sys.argv[1]), str(k % 10).encode() * 300_000)\n"
        "    if k == 3: print('going', flush=True)\n"
    )
    for delay in (0.0, 0.003, 0.007, 0.02):
        with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        content = path.read_bytes()
        assert len(content) == 300_000
        assert len(set(content)) == 1


def test_a_directory_appears_when_it_is_full_and_never_over_another(tmp_path: Path) -> None:
    path = tmp_path / "made"

    def fill(folder: Path) -> None:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")
        assert not path.exists()

    write_directory(path, fill)
    assert (path / "inner" / "a").read_text() == "1"
    with pytest.raises(ConfigError, match="already exists"):
        write_directory(path, fill)
    with pytest.raises(StorageError, match="the disk failed"):
        write_directory(tmp_path / "other", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "no more")))
    assert names(tmp_path) == ["made"]


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    append(path, b"one\n")
    for fault in (FaultyDisk(errno.ENOSPC, room=2), FaultyDisk(errno.EIO, at="sync")):
        monkeypatch.setattr(files, "disk", fault)
        with pytest.raises(OSError, match=os.strerror(fault.code)):
            append(path, b"two\n")
        assert path.read_bytes() == b"one\n"
    monkeypatch.undo()
    append(path, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_a_directory_has_one_writer_and_the_error_names_it(tmp_path: Path) -> None:
    with (
        closing(claim(tmp_path / "data")),
        pytest.raises(LifecycleError, match=rf"process {os.getpid()} is writing here"),
    ):
        Lock(tmp_path / "data")
    with closing(Lock(tmp_path / "data")):
        pass


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\nfrom headrace.files import claim\n"
        "held = claim(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(LifecycleError, match=rf"process {process.pid} is writing"):
            claim(tmp_path)
        process.kill()
    claim(tmp_path).close()


def test_of_many_claimers_one_gets_the_directory(tmp_path: Path) -> None:
    path, barrier = tmp_path / "data", threading.Barrier(8)
    won: list[files.Lock] = []
    lost: list[Exception] = []

    def run() -> None:
        barrier.wait()
        try:
            held = claim(path)
            (path / "content").touch()
            won.append(held)
        except (ConfigError, LifecycleError) as error:
            lost.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    won[0].close()
    with pytest.raises(ConfigError, match="empty or new"):
        claim(path)


def test_a_file_in_the_place_of_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="expected a directory"):
        claim(tmp_path / "file")


def test_a_manifest_tells_of_missing_cut_and_changed_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    manifest = Manifest(format="test", version=1, about={"x": [1, 2.5]}, files={"a": FileHash.of(tmp_path / "a")})
    manifest.write(tmp_path / "manifest.json")
    again = Manifest.read(tmp_path / "manifest.json", format="test", versions=(1,))
    assert again == manifest
    again.check(tmp_path)
    (tmp_path / "a").write_bytes(b"12354")
    again.check(tmp_path, content=False)
    with pytest.raises(DataError, match="checksum"):
        again.check(tmp_path)
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(DataError, match="expected 5 bytes, got 3"):
        again.check(tmp_path, content=False)
    (tmp_path / "a").unlink()
    with pytest.raises(DataError, match="missing"):
        again.check(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "expected JSON"),
        (b"\xff\xfe", "expected text"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "JSON object"),
        (b'{"format": "other"}', "expected format 'test'"),
        (b'{"format": "test", "version": 2}', "expected version 1"),
        (b'{"format": "test", "version": 1, "about": {}, "files": {}, "sha256": "0"}', "checksum"),
    ],
)
def test_a_bad_manifest_is_an_error_that_names_it(text: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(DataError, match=rf"manifest\.json: .*{words}"):
        Manifest.read(tmp_path / "manifest.json", format="test", versions=(1,))
