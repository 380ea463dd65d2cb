"""Every link between files of the repository leads somewhere, as read on a code host or in an editor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "examples").glob("*.md"))
FILES += sorted((ROOT / "docs").rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def _anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_to_a_file(path: Path) -> None:
    for link in LINK.findall(path.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), f"{link}: nothing there"
        assert target.is_relative_to(ROOT), f"{link}: outside the repository"
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"
