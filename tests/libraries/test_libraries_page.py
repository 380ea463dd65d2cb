"""The page of the libraries benchmark says what its bundles say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_row_of_the_page_is_made_from_the_bundles_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    table = importlib.import_module("libraries_table")
    found = table.read_rows(ROOT / "docs" / "benchmarks" / "libraries", quick=False)
    page = (ROOT / "docs" / "benchmarks" / "libraries.md").read_text()
    assert len(found.rows) == 3 * 4 + 4 + 4 + 9
    for row in found.rows:
        assert "| " + " | ".join(row) + " |" in page, row
    for line in found.short:
        assert line in page
