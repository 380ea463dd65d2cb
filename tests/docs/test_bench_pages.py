"""``make bench-pages``: the README's table is made of the figures that benchmarks printed."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = runpy.run_path(str(ROOT / "scripts" / "bench_pages.py"))
STEPPING = """
| task | N | headrace | raw | EnvPool | 50 % susp. |
|---|---|---|---|---|---|
| ant | 16 | 1 | 2 | 3 | 4 |
| ant | 256 | 11,112 | 11,283 | 9,126 | 0.52 |
"""


def _results(text: str) -> dict[str, object]:
    tables = PAGES["markdown_tables"](text.splitlines())
    return {"stepping": {"command": "python benchmarks/stepping.py --quick", "tables": tables}}


def test_rows_of_the_readme_are_cells_of_the_benchmarks() -> None:
    lines = PAGES["readme_table"](_results(STEPPING)).splitlines()
    command = "`python benchmarks/stepping.py --quick`"
    assert lines[2:] == [
        f"| 256 ants, env-steps per second | 11,112 | EnvPool 9,126; raw physics 11,283 | {command} |",
        f"| 256 ants, half of them suspended: of the time | 0.52 | no counterpart | {command} |",
    ]


def test_a_figure_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SystemExit, match=r"'headrace' and a row with .*'N': '256'"):
        PAGES["readme_table"](_results(STEPPING.replace("256", "64")))


def test_the_readme_has_the_figures_of_the_pages() -> None:
    results = ROOT / "docs" / "benchmarks" / "results.json"
    assert PAGES["readme_table"](json.loads(results.read_text())) in (ROOT / "README.md").read_text()


def test_every_page_is_made_from_the_results() -> None:
    pages = ROOT / "docs" / "benchmarks"
    for name, found in json.loads((pages / "results.json").read_text()).items():
        page = (pages / f"{name}.md").read_text()
        assert f"headrace {found['version']} ({found['commit']}), {found['date']}" in page
        for table in found["tables"]:
            assert PAGES["_markdown"](table) in page, name
