"""Run every benchmark in full form, one after the other, and write its page: ``make bench-pages``, about two hours.

A page of ``docs/benchmarks`` is written as its benchmark ends: how to read it (the beginning of the benchmark's
docstring), the tables that it printed, and its bars. ``docs/benchmarks/results.json`` keeps the tables with version,
commit, date, machine and mode. A second call goes on with what this commit has not measured yet. Figures of the README
that are not in the new tables are named at the end.

  python scripts/bench_pages.py                       every benchmark
  python scripts/bench_pages.py overhead --quick      one of them, in its quick form; the page says so
  python scripts/bench_pages.py --again               also those that this commit has measured
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "benchmarks"
RESULTS = PAGES / "results.json"
IN_PEERS = ("vision", "replay", "learning")
"""Benchmarks that run in the environment of the peers, which has headrace, too."""
BENCHMARKS = (
    *("stepping", "vision", "replay", "learning", "chunking", "serving", "distributed", "bridges", "recording"),
    *("overhead", "bridges_batched", "libraries", "aloha", "libero", "startup"),
)
_BAR = re.compile(r"short|holds|passed|failed|absent", re.IGNORECASE)
_CLOSED = re.compile(r"^\W*(holds|--check passed)")


def record(file: str, words: list[str]) -> None:
    """Run a benchmark in this process and write the tables that it prints on rich consoles to ``file``."""
    import runpy

    from rich.console import Console
    from rich.table import Table

    tables: list[dict[str, Any]] = []
    usual = Console.print

    def spy(console: Console, *things: Any, **settings: Any) -> None:
        for thing in things:
            if isinstance(thing, Table):
                cells = [[_plain(console, cell) for cell in column.cells] for column in thing.columns]
                tables.append(
                    {
                        "title": _plain(console, thing.title),
                        "columns": [_plain(console, column.header) for column in thing.columns],
                        "rows": [list(row) for row in zip(*cells, strict=True)],
                    }
                )
        usual(console, *things, **settings)

    Console.print = spy
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        Path(file).write_text(json.dumps(tables))


def _plain(console: Any, text: Any) -> str:
    if text is None:
        return ""
    return console.render_str(text).plain if isinstance(text, str) else str(getattr(text, "plain", text))


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """Run a benchmark in a process of its own; returns what ``results.json`` keeps of it."""
    python = ROOT / (".venv-bench" if name in IN_PEERS else ".venv") / "bin" / "python"
    words = [str(ROOT / "benchmarks" / f"{name}.py"), "--check", *(["--quick"] if quick else [])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.json"
        process = subprocess.Popen(
            [str(python), __file__, "--record", str(file), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "200"},
        )
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        code = process.wait()
        tables = json.loads(file.read_text()) if file.is_file() else []
    if code not in (0, 1) or "Traceback (most recent call last):" in lines:
        raise SystemExit(f"{name}: ended with exit code {code}; its page was not written")
    return {
        **about(quick=quick),
        "command": f"python benchmarks/{name}.py" + (" --quick" if quick else ""),
        "tables": tables,
        "printed": [] if tables else lines,
        "bars": [line.strip() for line in lines if _BAR.search(line) and "│" not in line]
        or ["holds: every bar" if code == 0 else "short: a bar of --check"],
    }


def about(*, quick: bool) -> dict[str, str]:
    """Return version, commit, date, machine and mode of what is measured now."""
    text = (ROOT / "src" / "headrace" / "__init__.py").read_text()
    names = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"model name\s*: (.*)", names)
    return {
        "version": re.findall(r'^__version__ = "(.*)"', text, re.MULTILINE)[0],
        "commit": _git("rev-parse", "--short", "HEAD"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{model[1] if model else platform.machine()}, {os.cpu_count()} cores",
        "mode": "quick" if quick else "full",
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def page(name: str, found: dict[str, Any]) -> str:
    """Return the page of a benchmark: how to read it, one table per part, its bars."""
    doc = ast.get_docstring(ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())) or name
    reading = doc.partition("\n  python ")[0].partition("\npython ")[0].strip()
    words = (
        f"`{found['command']}`: headrace {found['version']} ({found['commit']}), {found['date']}, {found['machine']}"
    )
    parts = [
        f"# {name.replace('_', ' ').capitalize()}",
        f"{words}, {found['mode']} form.",
        "## How to read it",
        reading,
    ]
    for table in found["tables"]:
        parts += [f"## {table['title']}" if table["title"] else "", _markdown(table)]
    if found["printed"]:
        parts += ["```text\n" + "\n".join(found["printed"]).strip() + "\n```"]
    if found["bars"]:
        bars = [f"| {'holds' if _CLOSED.search(bar) else 'short'} | {_cell(bar)} |" for bar in found["bars"]]
        parts += ["## Bars", "| | bar |\n|---|---|\n" + "\n".join(bars)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _markdown(table: dict[str, Any]) -> str:
    rule = "|" + "---|" * len(table["columns"])
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (table["columns"], *table["rows"])]
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def missing_figures() -> list[str]:
    """Return the rows of the README's table with a figure that the page of their benchmark does not have."""
    section = (ROOT / "README.md").read_text().partition("## Compared with its peers")[2].partition("\n## ")[0]
    found: list[str] = []
    for line in section.splitlines():
        named = re.search(r"benchmarks/(\w+)\.py", line)
        if named is None or not (PAGES / f"{named[1]}.md").is_file():
            continue
        known = (PAGES / f"{named[1]}.md").read_text().replace(",", "")
        cells = "".join(line.split("|")[2:4]).replace(",", "")
        if any(figure not in known for figure in re.findall(r"\d+(?:\.\d+)?", cells)):
            found.append(line.split("|")[1].strip())
    return found


def main() -> int:
    """Run the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="the quick form; pages say so")
    parser.add_argument("--again", action="store_true", help="also what this commit has measured")
    parser.add_argument("--pages", type=Path, default=PAGES, help="directory to write into (default: docs/benchmarks)")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark {unknown[0]!r}; expected one of {', '.join(BENCHMARKS)}")
    given.pages.mkdir(parents=True, exist_ok=True)
    results = given.pages / RESULTS.name
    kept: dict[str, Any] = json.loads(results.read_text()) if results.is_file() else {}
    now = about(quick=given.quick)
    for name in given.names or BENCHMARKS:
        if not given.again and all(kept.get(name, {}).get(key) == now[key] for key in ("commit", "mode", "machine")):
            print(f"{name}: measured at {now['commit']} already")
            continue
        print(f"== {name}", flush=True)
        kept[name] = run(name, quick=given.quick)
        (given.pages / f"{name}.md").write_text(page(name, kept[name]))
        results.write_text(json.dumps(kept, indent=1) + "\n")
    for row in missing_figures():
        print(f"README: figures of another run in the row: {row}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
