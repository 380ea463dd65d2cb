"""The report on an installation, made by looking at a real one."""

from __future__ import annotations

from importlib import metadata

import pytest
from packaging.requirements import Requirement

from headrace.cli import main
from headrace.cli.doctor import core, extras, works


def test_a_whole_installation_is_called_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert metadata.version("mujoco") in shown
    assert "The core works." in shown


def test_every_core_library_is_looked_at() -> None:
    asked = {Requirement(line).name for line in metadata.requires("headrace") or [] if "extra" not in line}
    assert asked <= {finding.subject for finding in core()}
    assert all(finding.state == "ok" for finding in core())


def test_physics_and_pictures_are_tried_for_real() -> None:
    assert [finding.state for finding in works()] == ["ok", "ok"]


def test_what_is_missing_is_named_with_the_command_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "h5py":
            raise metadata.PackageNotFoundError(name)
        return "0.1" if name == "rich" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    record = next(finding for finding in extras() if finding.subject == "extra record")
    assert record.state == "absent"
    assert "h5py not installed" in record.what
    assert record.remedy == "pip install 'headrace[record]'"
    rich = next(finding for finding in core() if finding.subject == "rich")
    assert rich.state == "broken"
    assert rich.what.startswith("0.1, expected")


def test_a_broken_core_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "numba" else real(name))
    assert main(["doctor"]) == 1
    assert "broken: numba" in capsys.readouterr().out
