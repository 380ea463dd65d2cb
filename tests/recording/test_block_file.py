from __future__ import annotations

import errno
import fcntl
import os
import resource

import numpy as np
import pytest

from headrace.recording import _npz_writer as block_file
from headrace.recording._npz_writer import BUFFER_BYTES, BlockBuffer, BlockFile


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)


def some_bytes(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()


@pytest.mark.parametrize(
    "sizes",
    [
        (),
        (0, 1),
        (4096,),
        (131_071, 1),
        (131_072, 4095, 7),
        (BUFFER_BYTES,),
        (BUFFER_BYTES - 1, 2),
        (100, 3 * BUFFER_BYTES + 5_000, 61_440),
    ],
)
def test_the_file_is_the_pieces_one_after_the_other(tmp_path, sizes):
    pieces = [some_bytes(size) for size in sizes]
    buffer = BlockBuffer()
    buffer.bytes[:] = 255  # what an earlier file left behind
    with BlockFile(tmp_path / "x", buffer) as file:
        for piece in pieces:
            file.write(memoryview(piece))
    whole = b"".join(pieces)
    assert (tmp_path / "x").read_bytes() == whole
    assert file.size == len(whole)


def test_large_blocks_go_past_the_page_cache_and_nothing_else_does(tmp_path, monkeypatch):
    directly: list[tuple[bool, int]] = []
    write = os.write

    def watched(handle, data):
        directly.append((is_direct(handle), len(data)))
        return write(handle, data)

    monkeypatch.setattr(block_file.os, "write", watched)
    with BlockFile(tmp_path / "x", BlockBuffer()) as file:
        if not file._set_direct(True):
            pytest.skip("the file system of the temporary folder has no direct writes")
        file._set_direct(False)
        file.write(some_bytes(BUFFER_BYTES + 200_000))
    assert directly == [(True, BUFFER_BYTES), (True, 196_608), (False, 3_392)]


@pytest.mark.parametrize("refused", ["the mode", "the write"])
def test_a_file_system_without_direct_writes_gets_the_same_bytes(tmp_path, monkeypatch, refused):
    content = some_bytes(BUFFER_BYTES + 300_000)

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    if refused == "the mode":
        monkeypatch.setattr(block_file.BlockFile, "_set_direct", lambda *_: False)
    else:
        write = os.write
        monkeypatch.setattr(
            block_file.os, "write", lambda handle, data: refuse() if is_direct(handle) else write(handle, data)
        )
    with BlockFile(tmp_path / "x", BlockBuffer()) as file:
        file.write(content[:70_001])
        file.write(content[70_001:])
    assert (tmp_path / "x").read_bytes() == content


def test_a_block_that_is_taken_in_part_is_gone_on_with_or_says_why_not(tmp_path):
    content = some_bytes(BUFFER_BYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # in the middle of a block of the disk: a direct write cannot end there
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES // 2 + 100, hard))
    try:
        with pytest.raises(OSError, match="too large"), BlockFile(tmp_path / "x", BlockBuffer()) as file:
            file.write(content)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = (tmp_path / "x").read_bytes()
    assert kept == content[: len(kept)]


def test_a_file_that_is_there_is_not_touched(tmp_path):
    (tmp_path / "x").write_bytes(b"here")
    with pytest.raises(FileExistsError):
        BlockFile(tmp_path / "x", BlockBuffer())
    assert (tmp_path / "x").read_bytes() == b"here"
