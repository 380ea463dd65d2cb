"""Damaged and hostile checkpoint files: an error that names the file, no code run, no memory beyond the cap."""

from __future__ import annotations

import json
import os
import resource
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import DataError
from headrace.libraries.checkpoint import read_meta, read_weights, recognize

FOLDER = Path(headrace.__file__).parent / "checkpoints"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".pt", ".pth", ".zip"))


def read(path: Path) -> None:
    """Read everything that may be read without trust."""
    kind, spec = recognize(path)
    if spec is not None:
        read_meta(path, spec)
    if path.suffix != ".zip" and kind != "torchscript":
        read_weights(path, trust=False)


def mutate(content: bytes, draw: np.random.Generator) -> bytes:
    changed = bytearray(content)
    how = draw.integers(4)
    if how == 0:
        return bytes(changed[: int(draw.integers(len(changed)))])
    if how == 1:
        at = int(draw.integers(len(changed) - 64))
        changed[at : at + 64] = draw.bytes(64)
    else:
        # structures lie at both ends: flips in the middle of weights only change checksums
        for _ in range(int(draw.integers(1, 8))):
            edge = int(draw.integers(min(2000, len(changed))))
            changed[edge if how == 2 else -edge - 1] ^= 1 << int(draw.integers(8))
    return bytes(changed)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [25, pytest.param(600, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_a_data_error_or_reads_as_written(name, count, tmp_path) -> None:
    content, draw, refused = (FOLDER / name).read_bytes(), np.random.default_rng(len(name)), list[str]()
    for _ in range(count):
        path = tmp_path / name
        path.write_bytes(mutate(content, draw))
        try:
            read(path)
        except DataError as error:
            refused.append(str(error))
    assert len(refused) > count // 2
    assert [message for message in refused if name not in message] == []


def test_an_archive_that_expands_without_bound_is_refused_before_it_is_read(tmp_path) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("policy.pth", "w") as part:
        for _ in range(512):
            part.write(bytes(1 << 20))
    assert path.stat().st_size < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="sane size"):
        recognize(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_links_pipes_and_two_parts_of_one_name_are_refused(tmp_path) -> None:
    link, pipe, twice = tmp_path / "link.pt", tmp_path / "pipe.pt", tmp_path / "twice.zip"
    link.symlink_to(FOLDER / "cartpole.pt")
    os.mkfifo(pipe)
    shutil.copy(FOLDER / "cartpole-sb3.zip", twice)
    with zipfile.ZipFile(twice, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(archive.namelist()[0], json.dumps({}))
    with pytest.raises(DataError, match="symbolic links"):
        recognize(link)
    with pytest.raises(DataError, match="expected a checkpoint file"):
        recognize(pipe)
    with pytest.raises(DataError, match="got one twice"):
        recognize(twice)
