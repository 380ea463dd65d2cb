"""Run every benchmark in full form, one after the other, and write its page: ``make bench-pages``, about two hours.

A page of ``docs/benchmarks`` is written as its benchmark ends: how to read it (the beginning of the benchmark's
docstring), the tables that it printed, and its bars. ``docs/benchmarks/results.json`` keeps the tables with version,
commit, date, machine and mode. A second call goes on with what this commit has not measured yet. At the end the table
of the README is written from the figures that are there.

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
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "benchmarks"
RESULTS = PAGES / "results.json"
IN_PEERS = ("vision", "replay", "learning")
"""Benchmarks that run in the environment of the peers, which has headrace, too."""
BENCHMARKS = (
    *("stepping", "vision", "replay", "learning", "chunking", "serving", "distributed", "bridges", "recording"),
    *("overhead", "bridges_batched", "libraries", "aloha", "libero", "startup", "scale"),
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
        "tables": tables or markdown_tables(lines),
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
    if found["printed"] and not found["tables"]:
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


class Figure(NamedTuple):
    """A cell of a benchmark's tables: of ``column``, in the first row with cells that match ``cells`` as a whole."""

    column: str
    cells: Mapping[str, str]
    """Patterns by column."""


class Line(NamedTuple):
    """A row of the README's table."""

    what: str
    """May have columns of the row of ``here`` in braces."""
    benchmark: str
    here: Figure
    peers: Mapping[str, Figure]
    """By text, with ``{}`` where the figure goes."""


def _buffers(column: str) -> tuple[Figure, Mapping[str, Figure]]:
    peers = {"SB3 {}": r"SB3 [\d.]+", "TorchRL {}": r"TorchRL [\d.]+", "tianshou {}": r"tianshou [\d.]+"}
    rows = {text: Figure(column, {"buffer": pattern}) for text, pattern in peers.items()}
    return Figure(column, {"buffer": "headrace, memory"}), rows


def _learning(case: str, **peers: str) -> tuple[Figure, Mapping[str, Figure]]:
    def of(contestant: str) -> Figure:
        return Figure("median", {"case": re.escape(case), "contestant": contestant})

    return of("headrace"), {f"{name} {{}}": of(contestant) for name, contestant in peers.items()}


def _ants(column: str) -> Figure:
    return Figure(column, {"task": "ant", "N": "256"})


def _chunks(scheduler: str) -> Figure:
    return Figure("useful steps/s", {"setting": r"\(b\).*GR1-like", "scheduler": scheduler})


def _aloha(loop: str) -> Figure:
    return Figure("seconds", {"loop": loop, "chunk": "100"})


def _stack(name: str, column: str) -> Figure:
    return Figure(column, {"part": r"\(b\)", "case": ".*K = 4", "contestant": name})


def _camera(renderer: str, processes: str) -> Figure:
    cells = {"scene": "cartpole", "px": "64", "renderer": renderer, "processes": processes, "envs": "all"}
    return Figure("frames/s", cells)


README = (
    Line("replay of 84×84×4, bytes per transition, exact at ends", "replay", *_buffers("bytes each")),
    Line("replay, batches of 256 per second", "replay", *_buffers("batches/s")),
    Line("GAE over (128, 1024)", "learning", *_learning("(128, 1024)", SB3="sb3", TorchRL="torchrl", rsl_rl="rsl_rl")),
    Line(
        "GRU over slices, 50 % resets, forward and backward",
        "learning",
        *_learning("gru, 50% resets", **{"TorchRL scan": "torchrl scan", "pad": "torchrl pad"}),
    ),
    Line(
        "append, stack and normalize images, {case}; ms",
        "vision",
        _stack("headrace", "median"),
        {f"{name} {{}}×": _stack(name.lower(), "× first") for name in ("Gymnasium", "TorchRL", "SB3")},
    ),
    Line(
        "camera, 64×64 frames per second",
        "vision",
        _camera("headrace", "1"),
        {
            "mujoco-warp {}": _camera("mujoco-warp", "2"),
            "Newton {}": _camera("newton", "2"),
            "MuJoCo's EGL {}, in two processes each": _camera("egl tiled", "2"),
        },
    ),
    Line(
        "LeRobot's ACT on ALOHA, {environments} environments, chunks of 100, seconds with the policy",
        "aloha",
        _aloha("headrace, native"),
        {"LeRobot's loop on gym-aloha {}": _aloha("LeRobot, gym-aloha")},
    ),
    Line(
        "LIBERO, seconds of a processor per episode besides the policy",
        "libero",
        Figure("episode, s", {"loop": "native"}),
        {
            "openpi's loop {}": Figure("episode, s", {"loop": "openpi's loop"}),
            "the genuine one, drawn on demand {}": Figure("episode, s", {"loop": "on demand"}),
        },
    ),
    Line(
        "256 ants, env-steps per second",
        "stepping",
        _ants("headrace"),
        {"EnvPool {}": _ants("EnvPool"), "raw physics {}": _ants("raw")},
    ),
    Line(
        "256 ants, half of them suspended: of the time", "stepping", _ants("50 % susp."), {"no counterpart": _ants("N")}
    ),
    Line(
        "{N} ants, chunks of 16, model on another device (GR1-like), useful steps per second",
        "chunking",
        _chunks("Greedy, thread"),
        {
            "synced with hold actions {}": _chunks("synced, hold .*"),
            "whole batch when any needs it {}": _chunks("any, full batch .*"),
        },
    ),
)


def readme_table(results: Mapping[str, Any]) -> str:
    """Return the README's table, of the benchmarks that ``results`` has; a figure that is not there is an error."""
    lines = ["| what | here | compared with | command |", "|---|---|---|---|"]
    for line in README:
        if line.benchmark not in results:
            continue
        tables = results[line.benchmark]["tables"]
        row = find(tables, line.here)
        peers = [text.format(find(tables, figure)[figure.column]) for text, figure in line.peers.items()]
        what, command = line.what.format(**row), results[line.benchmark]["command"]
        lines.append(f"| {what} | {row[line.here.column]} | {'; '.join(peers) or '–'} | `{command}` |")
    return "\n".join(lines) + "\n"


def find(tables: Sequence[Mapping[str, Any]], figure: Figure) -> dict[str, str]:
    """Return the row of a figure, cells by column."""
    for table in tables:
        for cells in table["rows"]:
            row = dict(zip(table["columns"], cells, strict=True))
            if figure.column in row and all(re.fullmatch(p, row.get(name, "")) for name, p in figure.cells.items()):
                return row
    raise SystemExit(f"no table has a column {figure.column!r} and a row with {dict(figure.cells)}")


def write_readme(results: Mapping[str, Any]) -> None:
    """Replace the README's table."""
    file = ROOT / "README.md"
    before, head, after = file.read_text().partition("| what | here | compared with | command |\n")
    if not head:
        raise SystemExit("README.md: expected a table with the heads what, here, compared with, command")
    rest = re.sub(r"\A(\|.*\n)+", "", after)
    file.write_text(before + readme_table(results) + rest)


def markdown_tables(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tables of printed Markdown."""
    found: list[dict[str, Any]] = []
    for rows in re.findall(r"(?:^\|.*\|\n)+", "".join(f"{line}\n" for line in lines), re.MULTILINE):
        cells = [[cell.strip() for cell in row[1:-1].split("|")] for row in rows.splitlines()]
        found.append({"title": "", "columns": cells[0], "rows": cells[2:]})
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
    if given.pages == PAGES:
        write_readme(kept)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
