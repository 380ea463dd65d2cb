"""Hostile checkpoint files: an error that names the file, and no memory beyond the cap."""

from __future__ import annotations

import json
import os
import resource
import shutil
import zipfile
from pathlib import Path

import pytest

import headrace
from headrace.errors import DataError
from headrace.libraries.training import recognize

FOLDER = Path(headrace.__file__).parent / "checkpoints"


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
