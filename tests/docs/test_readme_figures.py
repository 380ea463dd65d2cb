"""The figures of the README are those of the tables that the command of their row wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")


def _rows() -> list[list[str]]:
    section = (ROOT / "README.md").read_text().partition("## Compared with its peers")[2].partition("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in section.splitlines() if "|" in line]
    return cells[2:]


def test_there_is_a_table_with_a_command_in_every_row() -> None:
    assert len(_rows()) >= 6
    assert all(re.fullmatch(r"`[^`]+`", row[-1]) for row in _rows())


@pytest.mark.parametrize("row", [row for row in _rows() if "benchmarks/" in row[-1]], ids=lambda row: row[0])
def test_every_figure_of_a_row_is_in_the_table_of_its_command(row: list[str]) -> None:
    _, ours, beside, command = row
    name = re.search(r"benchmarks/(\w+)\.py", command)[1]
    table = (ROOT / "docs" / "benchmarks" / f"{name}.md").read_text()
    known = [float(figure.replace(",", "")) for figure in FIGURE.findall(table)]
    for figure in FIGURE.findall(f"{ours} {beside}".replace("SB3", "").replace("rsl_rl", "")):
        value = float(figure.replace(",", ""))
        digits = len(figure.partition(".")[2])
        # the README may round what the table has with more digits
        assert any(round(there, digits) == value for there in known), f"{figure} is not in docs/benchmarks/{name}.md"
