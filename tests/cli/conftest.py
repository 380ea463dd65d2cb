"""Fixtures of the commands' tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs and caches of one test stay with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
