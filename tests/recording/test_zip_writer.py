from __future__ import annotations

import io
import shutil
import subprocess
import tempfile
import zipfile
import zlib
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import DataError
from headrace.recording import _episode_file as zip_writer
from headrace.recording._episode_file import BlockBuffer, BlockFile, Member, check_archive, write_archive

members = st.lists(
    st.tuples(st.text("abcé/", min_size=1, max_size=8), st.lists(st.binary(max_size=50), max_size=3)),
    max_size=6,
    unique_by=lambda member: member[0],
)


def member(name: str, *pieces: bytes) -> Member:
    """The first piece as header, the others as arrays."""
    return Member(name, b"".join(pieces[:1]), [np.frombuffer(piece, np.uint8) for piece in pieces[1:]])


def archive_bytes(content: Iterable[Member], buffer: int = 4096) -> tuple[bytes, str]:
    """An archive and the hash of its directory."""
    with tempfile.TemporaryFile() as raw:
        with BlockFile(raw.fileno(), BlockBuffer(buffer)) as file:
            digest = write_archive(file, content)
        raw.seek(0)
        whole = raw.read()
    assert file.size == len(whole)
    return whole, digest


@given(members, st.sampled_from([0, 5_000, 20_000]))
@settings(deadline=None, max_examples=60)
def test_zipfile_reads_what_was_written_and_the_buffer_leaves_no_trace(content, more):
    # with more than the smaller buffer holds, checksums are taken before the content is copied
    content = [(name, [*pieces, bytes(range(250)) * (more // 250)]) for name, pieces in content]
    whole, digest = archive_bytes(member(name, *pieces) for name, pieces in content)
    assert archive_bytes([member(name, *pieces) for name, pieces in content], 1 << 20) == (whole, digest)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == {
            name: b"".join(pieces) for name, pieces in content
        }


@pytest.mark.parametrize("limit", [1, 150, 400, 100_000])
def test_records_for_large_files_are_read_by_zipfile_and_by_another_program(tmp_path, monkeypatch, limit):
    # the limit is lowered: four gigabytes are a long test
    monkeypatch.setattr(zip_writer, "ZIP64_FROM", limit)
    content = {f"member{number}": bytes([number]) * (50 * number) for number in range(6)}
    path = tmp_path / "x.zip"
    path.write_bytes(archive_bytes(member(name, data) for name, data in content.items())[0])
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == content
    # stricter than Python's, where it is installed
    if unzip := shutil.which("unzip"):
        subprocess.run([unzip, "-tqq", path], check=True)


@pytest.mark.parametrize("limit", [1, 100_000])
def test_every_changed_missing_or_added_byte_of_an_archive_is_found(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(zip_writer, "ZIP64_FROM", limit)
    content = [member("é/a.npy", b"some", b"bytes"), member("empty"), member("b", bytes(20))]
    path = tmp_path / "x.zip"
    whole, digest = archive_bytes(content)
    path.write_bytes(whole)
    assert check_archive(path) == digest

    def differs(content: bytes) -> bool:
        path.write_bytes(content)
        try:
            return check_archive(path) != digest
        except DataError as error:
            return str(path) in str(error)

    for place in range(len(whole)):
        for mask in (1, 128, 255):
            assert differs(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :]), (place, mask)
        assert differs(whole[:place]), place
        assert differs(whole[:place] + b"x" + whole[place:]), place
    assert differs(whole + b"x")


def test_without_the_quick_checksums_the_bytes_are_the_same(monkeypatch):
    content = [member("a", b"x" * 70_000, b"y"), member("b")]
    quick = archive_bytes(content)
    monkeypatch.setattr(zip_writer, "crc32", zlib.crc32)
    assert archive_bytes(content) == quick
