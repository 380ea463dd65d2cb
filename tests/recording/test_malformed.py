"""Datasets that are not what they claim to be: always a DataError that names the file, never a raw error."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from counting_env import CountingEnv
from rich.console import Console

from headrace.errors import ConfigError, DataError, StorageError
from headrace.recording import DatasetInfo, EpisodeDataset, EpisodeRecorder, export_dataset, verify_dataset
from headrace.recording.show import field_table

FILE = "seed0_ep00000000.npz"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with EpisodeRecorder(tmp_path / "d") as recorder:
        env = CountingEnv(2, [recorder])
        env.reset()
        for _ in range(20):
            env.step()
    return tmp_path / "d"


def read_all(path: Path) -> None:
    for episode in EpisodeDataset(path):
        for name in episode.names:
            episode.field(name)
            episode.read(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": -3}, "length: expected a whole number from 1"),
        ({"length": 0}, "length"),
        ({"length": True}, "length"),
        ({"length": 2.0}, "length"),
        ({"length": "2"}, "length"),
        ({"episode_id": -1}, "episode_id"),
        ({"episode_id": 1 << 80}, "episode_id"),
        ({"episode_id": None}, "episode_id"),
        ({"seed": "0"}, "seed"),
        ({"attempt": [0]}, "attempt"),
        ({"success": 1}, "success"),
        ({"diverged": None}, "diverged"),
        ({"episode_return": "much"}, "episode_return"),
        ({"episode_return": 10**400}, "episode_return: a number of 1329 bits"),
        ({"episode_return": -(10**400)}, "episode_return: a number of 1329 bits"),
        ({"instruction": 7}, "instruction"),
        ({"instruction": "\ud800"}, "Invalid JSON"),
        ({"instruction": "a\0b"}, "instruction"),
        ({"episode_return": None}, "episode_return"),
        ({"size": -1}, "size"),
        ({"directory_sha256": "0" * 63}, "directory_sha256"),
        ({"directory_sha256": None}, "directory_sha256"),
        ({"file": f"../{FILE}"}, "file: expected episodes/"),
        ({"file": "/etc/passwd"}, "file: expected episodes/"),
        ({"file": "episodes/../../x"}, "file: expected episodes/"),
        ({"file": "episodes/seed0_ep00000001.npz"}, "file: expected episodes/"),
        ({"file": 5}, "file"),
        ({"extra": 1}, "extra: it is unknown"),
    ],
)
def test_a_journal_line_of_the_wrong_kind_is_named(recorded: Path, change: dict[str, object], words: str) -> None:
    journal = recorded / "journal.jsonl"
    lines = journal.read_text().splitlines()
    first = json.loads(lines[0]) | {"episode_id": 0, "file": f"episodes/{FILE}"}
    journal.write_text("\n".join([json.dumps(first | change), *lines[1:]]) + "\n")
    for call in (EpisodeDataset, verify_dataset, lambda path: EpisodeRecorder(path, resume=True)):
        with pytest.raises(DataError, match=rf"journal\.jsonl, line 1: .*{words}"):
            call(recorded)


@pytest.mark.parametrize("name", ["journal.jsonl", "episodes", "failed"])
def test_links_in_a_dataset_are_neither_read_nor_written_through(recorded: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    if name == "failed":
        elsewhere.mkdir()
    else:
        (recorded / name).rename(elsewhere)
    if elsewhere.is_dir():
        (elsewhere / "seed9_ep00000000.npz").write_text("of another")
    (recorded / name).symlink_to(elsewhere)
    before = sorted(elsewhere.iterdir()) if elsewhere.is_dir() else elsewhere.read_bytes()
    for call in (EpisodeDataset, verify_dataset, lambda path: EpisodeRecorder(path, resume=True)):
        with pytest.raises(DataError, match=rf"{name}: cannot be read: symbolic links are not followed"):
            call(recorded)
    assert before == (sorted(elsewhere.iterdir()) if elsewhere.is_dir() else elsewhere.read_bytes())


def test_a_journal_that_is_a_pipe_or_has_an_endless_line_is_refused(recorded: Path) -> None:
    journal = recorded / "journal.jsonl"
    with journal.open("ab") as file:
        file.truncate(4 << 30)  # sparse
    with pytest.raises(DataError, match=r"journal\.jsonl: expected lines of at most 16,777,216 bytes"):
        EpisodeDataset(recorded)
    journal.unlink()
    os.mkfifo(journal)
    with pytest.raises(DataError, match=r"journal\.jsonl: cannot be read: expected a plain file"):
        EpisodeDataset(recorded)


@pytest.mark.parametrize("line", ["[]", "7", "null", '"x"', "{}"])
def test_a_journal_line_that_is_no_record_is_named(recorded: Path, line: str) -> None:
    journal = recorded / "journal.jsonl"
    journal.write_text(f"{line}\n{journal.read_text()}")
    with pytest.raises(DataError, match=r"journal\.jsonl, line 1"):
        EpisodeDataset(recorded)


def test_a_dataset_without_its_journal_is_named(recorded: Path) -> None:
    (recorded / "journal.jsonl").unlink()
    with pytest.raises(DataError, match=r"journal\.jsonl: cannot be read"):
        verify_dataset(recorded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "7",
        "{",
        '{"format": "headrace-dataset"}',
        '{"format": "headrace-dataset", "version": 1}',
        '{"format": "headrace-dataset", "version": 2, "surprise": 1}',
    ],
)
def test_a_bad_description_is_named(recorded: Path, text: str) -> None:
    (recorded / "dataset.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset\.json"):
        EpisodeDataset(recorded)


@pytest.mark.parametrize(
    ("name", "value"),
    [("recipe", []), ("fps", "fast"), ("fps", -1), ("stacks", {"obs/camera": {"frames": 0}}), ("stacks", {"a": {}})],
)
def test_a_bad_entry_of_the_description_is_named(recorded: Path, name: str, value: object) -> None:
    file = recorded / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(DataError, match=rf"dataset\.json: {name}"):
        EpisodeDataset(recorded)


def npy(value: object, dtype: object = None) -> bytes:
    out = io.BytesIO()
    np.save(out, np.array(value, dtype), allow_pickle=True)
    return out.getvalue()


def huge() -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": "<f8", "fortran_order": False, "shape": (1 << 60, 8)})
    return out.getvalue() + b"x" * 64


def bare(description: bytes) -> bytes:
    """An array file that is all header."""
    padded = description + b" " * (-(len(description) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded


def shaped(dtype: str, *shape: int) -> bytes:
    return bare(repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode())


def header(recorded: Path, **changes: object) -> bytes:
    with zipfile.ZipFile(recorded / "episodes" / FILE) as archive:
        return json.dumps(json.loads(archive.read("episode.json")) | changes).encode()


MEMBERS = {
    "objects": {"actions.npy": npy([{}, {}], object)},
    "no rows": {"actions.npy": npy(1.5)},
    "huge": {"actions.npy": huge()},
    "huge behind an empty dimension": {"actions.npy": shaped("<f4", 2, 0, 1 << 70)},
    "too large behind an empty dimension": {"actions.npy": shaped("<f4", 2, 0, 1 << 62, 1 << 62)},
    "items without bytes": {"actions.npy": shaped("|S0", 2, 1 << 40)},
    "too many dimensions": {"actions.npy": shaped("<f4", 2, 0, *[1] * 100)},
    "a header that nests too deeply": {"actions.npy": bare(b"{'descr': " + b"-" * 9000 + b"1}")},
    "texts": {"actions.npy": npy(["a", "b"])},
    "records": {"actions.npy": npy([(1, 2)] * 2, "f4,i4")},
    "a name without end": {"obs/.npy": npy([1.0, 2.0, 3.0])},
    "a name that leads out": {"obs/../../x.npy": npy([1.0, 2.0, 3.0])},
    "an array inside another": {"obs/policy/x.npy": npy([1.0, 2.0, 3.0])},
    "columns first": {"actions.npy": npy(np.asfortranarray(np.zeros((2, 3))))},
    "no header": {"actions.npy": b"\x93NUMPY"},
    "not an array": {"actions.npy": b"hello"},
    "empty": {"actions.npy": b""},
    "no json": {"episode.json": b"{"},
    "a list": {"episode.json": b"[]"},
    "not text": {"episode.json": b"\xff\xff"},
    "another format": {"episode.json": b'{"format": "x"}'},
}


def rewrite(file: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()} | members
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, value in content.items():
            archive.writestr(name, value)


@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_a_bad_member_of_an_episode_is_named(recorded: Path, members: dict[str, bytes]) -> None:
    rewrite(recorded / "episodes" / FILE, members)
    with pytest.raises(DataError, match=FILE):
        read_all(recorded)
    assert any(FILE in problem for problem in verify_dataset(recorded).problems)


@pytest.mark.parametrize("changes", [{"length": -1}, {"length": "x"}, {"success": 0}, {"more": 1}, {"episode_id": 5}])
def test_an_episode_that_describes_itself_badly_is_named(recorded: Path, changes: dict[str, object]) -> None:
    rewrite(recorded / "episodes" / FILE, {"episode.json": header(recorded, **changes)})
    with pytest.raises(DataError, match=FILE):
        read_all(recorded)


def test_a_compressed_episode_and_a_bomb_are_refused(recorded: Path) -> None:
    file = recorded / "episodes" / FILE
    rewrite(file, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(DataError, match="compressed"):
        read_all(recorded)
    rewrite(file, {"episode.json": b" " * (2 << 20)})
    with pytest.raises(DataError, match=r"episode\.json has 2,097,152 bytes"):
        read_all(recorded)


def test_a_directory_that_points_past_the_end_is_refused(recorded: Path) -> None:
    file = recorded / "episodes" / FILE
    content = bytearray(file.read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 42 : entry + 46] = struct.pack("<I", len(content) + 1000)
    file.write_bytes(content)
    with pytest.raises(DataError, match=FILE):
        read_all(recorded)


@pytest.mark.parametrize(("to", "name"), [("robomimic", "x.hdf5"), ("lerobot", "x"), ("minari", "x-v0")])
def test_random_damage_to_an_export_never_gives_a_raw_error(recorded: Path, to: str, name: str) -> None:
    target = recorded.with_name(name)
    export_dataset(recorded, target, to, fps=20)
    files = [target] if target.is_file() else [file for file in target.rglob("*") if file.is_file()]
    random = np.random.default_rng(0)
    for file in files:
        whole = file.read_bytes()
        for cut in (0, len(whole) // 2, len(whole) - 1, *random.integers(0, len(whole), 5).tolist()):
            file.write_bytes(whole[:cut])
            check_only_data_errors(target)
        file.unlink()
        if file != target:
            check_only_data_errors(target)
        file.write_bytes(whole)
    assert verify_dataset(target).problems == ()


def check_only_data_errors(target: Path) -> None:
    with contextlib.suppress(DataError):
        verify_dataset(target)


def test_a_description_that_is_a_directory_is_named(recorded: Path) -> None:
    (recorded / "dataset.json").unlink()
    (recorded / "dataset.json").mkdir()
    with pytest.raises(DataError, match=r"dataset\.json"):
        EpisodeDataset(recorded)


@pytest.mark.parametrize(
    "spaces",
    [
        {"action": 5},
        {"action": {}},
        {"action": {"type": "Box"}},
        {"action": {"type": "Box", "dtype": "float32", "shape": [2], "low": "x", "high": 1}},
        {"observation": {"type": "Dict"}},
        {"observation": {"type": "Dict", "subspaces": []}},
    ],
)
def test_bad_spaces_are_named_before_anything_is_exported(recorded: Path, spaces: dict[str, object]) -> None:
    file = recorded / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"spaces": spaces}))
    with pytest.raises(DataError, match=r"dataset\.json"):
        export_dataset(recorded, recorded.with_name("x-v0"), "minari")
    assert not recorded.with_name("x-v0.partial").exists()


@pytest.mark.parametrize("info", [{"fps": float("inf")}, {"instruction": "a\0b"}, {"recipe": {"x": object()}}])
def test_a_description_that_could_not_be_read_back_is_refused(tmp_path: Path, info: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        EpisodeRecorder(tmp_path / "d", info=DatasetInfo(**info))


def test_a_target_below_a_file_is_refused(recorded: Path) -> None:
    with pytest.raises(StorageError, match=r"dataset\.json"):
        export_dataset(recorded, recorded / "dataset.json" / "x.hdf5", "robomimic")


def test_names_with_markup_are_shown_as_they_are(recorded: Path) -> None:
    rewrite(recorded / "episodes" / FILE, {"obs/[/red].npy": npy([1.0, 2.0, 3.0])})
    out = io.StringIO()
    Console(file=out, width=200).print(field_table(EpisodeDataset(recorded)[0]))
    assert "obs/[/red]" in out.getvalue()


@pytest.mark.parametrize(
    ("to", "name", "file"), [("robomimic", "x.hdf5", ""), ("minari", "x-v0", "data/main_data.hdf5")]
)
def test_a_link_inside_an_export_is_refused_with_the_name_of_the_file(
    recorded: Path, to: str, name: str, file: str
) -> None:
    target = recorded.with_name(name)
    export_dataset(recorded, target, to, fps=20)
    with h5py.File(target / file if file else target, "r+") as opened:
        group = opened["data/demo_0"] if to == "robomimic" else opened["episode_0"]
        group["more"] = h5py.ExternalLink("elsewhere.hdf5", "/")
    with pytest.raises(DataError, match=f"{name}: .*/more: .*a link"):
        verify_dataset(target)
