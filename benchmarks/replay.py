"""Replay buffers side by side: bytes per transition, batches per second, and whether next observations are right.

84×84 uint8 frames, stacks of 4, 16 environments, batches of 256, episodes of 60 to 180 steps. Each buffer runs in a
process of its own; the limit is the memcpy of the bytes that a batch must move (5 frames for each of 256 samples) out
of memory as large as the buffer.

    benchmarks/setup.sh                                       # once: the peers' environment
    python benchmarks/replay.py --quick                       # 10k transitions, under a minute; without the peers
                                                              # that are slowest in the full table (see SLOW)
    python benchmarks/replay.py --check --markdown docs/benchmarks/replay.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("replay_worker.py")
PEERS = [
    ("TorchRL 0.14.1", "torchrl", "default"),
    ("TorchRL compact (slices of 16)", "torchrl", "compact"),
    ("TorchRL delta on pixels", "torchrl", "delta"),
    ("SB3 2.9.2", "sb3", "default"),
    ("SB3 optimize_memory_usage", "sb3", "optimize"),
    ("cpprb 11.0.0, next_of", "cpprb", "default"),
    ("cpprb stack_compress", "cpprb", "compress"),
    ("tianshou 2.0.1", "tianshou", "default"),
    ("tianshou ignore_obs_next", "tianshou", "ignore_next"),
    ("tianshou last frame, ignore next", "tianshou", "last_frame"),
]
SLOW = {"TorchRL compact (slices of 16)", "TorchRL delta on pixels", "tianshou last frame, ignore next"}
"""Left out by --quick: no bar can be about them, they have less than half of the fastest peer's batches per second."""
ROUND_TRIP = 10
"""Batches that a slow peer is given at least."""


class WorkerError(RuntimeError):
    """A process failed; the message has its last words."""


def run(python: Path, library: str, variant: str, frames: int, batches: int) -> dict[str, float | str]:
    """One buffer in its own process."""
    if not python.exists():
        raise WorkerError(f"{python} does not exist; run benchmarks/setup.sh")
    with tempfile.TemporaryDirectory(prefix="replay-bench-") as directory:
        command = [str(python), "-W", "ignore", str(WORKER), library, variant, "--frames", str(frames)]
        command += ["--batches", str(batches), "--directory", directory]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT ") :])
    raise WorkerError(f"{library} {variant}: {' | '.join(done.stderr.strip().splitlines()[-3:])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10k transitions, fewer batches and peers")
    parser.add_argument("--check", action="store_true", help="exit 1 and name every bar that falls short")
    parser.add_argument(
        "--large", type=int, default=1_000_000, help="transitions of our large buffers; 0 leaves them out"
    )
    parser.add_argument(
        "--python", type=Path, default=ROOT / ".venv-bench/bin/python", help="interpreter with the peers"
    )
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    frames, batches, large = (10_000, 100, 0) if arguments.quick else (100_000, 400, arguments.large)

    rows: list[tuple[str, int, dict[str, float | str]]] = []
    missing: list[str] = []
    ours = [("headrace, memory", "headrace", "ram", frames), ("headrace, disk", "headrace", "disk", frames)]
    if large:
        ours += [("headrace, memory", "headrace", "ram", large), ("headrace, disk", "headrace", "disk", large)]
    peers = [peer for peer in PEERS if not (arguments.quick and peer[0] in SLOW)]
    plan = [*((name, library, variant, frames) for name, library, variant in peers), *ours]
    for name, library, variant, size in plan:
        count = batches if library == "headrace" else max(batches // 8, ROUND_TRIP)
        try:
            rows.append((name, size, run(arguments.python, library, variant, size, count)))
        except WorkerError as error:
            missing.append(f"{name}: {error}")
    samplers = run(arguments.python, "samplers", "all", frames, batches)
    writes = run(arguments.python, "writes", "all", min(frames, 20_000), batches)

    console = Console(width=130)
    table = Table(title=f"Replay of 84×84×4 uint8, 16 environments, batches of 256 ({platform.processor() or 'CPU'})")
    heads = [
        "buffer",
        "transitions",
        "bytes each",
        "resident each",
        "batches/s",
        "extend/s (16 rows)",
        "next exact inside",
        "at ends",
    ]
    for head in heads:
        table.add_column(head, justify="left" if head == "buffer" else "right")
    lines = [heads, ["---"] * len(heads)]
    for name, size, result in rows:
        cells = [
            name,
            f"{size:,}",
            f"{result['bytes']:,.0f}",
            f"{result['resident']:,.0f}",
            f"{1e3 / float(result['sample_ms']):,.0f}",
            f"{1e6 / float(result['extend_us']):,.0f}",
            str(result["inside"]),
            str(result["ends"]),
        ]
        table.add_row(*cells)
        lines.append(cells)
    console.print(table)
    facts = [*describe(samplers), *describe_writes(writes)]
    most = max((float(result["neighbors"]) for _, _, result in rows), default=0.0)
    facts.append(f"other processes kept at most {most:.2f} cores busy during a measurement")
    for fact in facts:
        console.print(fact)
    bars = check(rows, samplers, writes, frames)
    for text, held in bars:
        console.print(f"[{'green' if held else 'red'}]{'holds' if held else 'FALLS SHORT'}[/]  {text}")
    for text in missing:
        console.print(f"[red]missing[/]  {text}")
    if arguments.markdown:
        write_markdown(arguments.markdown, lines, facts, bars, missing)
    failed = missing or any(not held for _, held in bars)
    return 1 if arguments.check and failed else 0


def describe(samplers: dict[str, float | str]) -> list[str]:
    """One line per sampler, all measured in turn in one process."""
    limit = float(samplers["memcpy"])
    names = {
        "uniform": "uniform",
        "n_step": "3-step (8 frames a sample instead of 5)",
        "prioritized": "prioritized",
        "prioritized_update": "update of 256 priorities",
        "slices": "16 slices of 16 (20 frames a slice, 256 transitions)",
        "slices_64": "64 slices of 16 (1,280 frames, as uniform; 1,024 transitions)",
        "single": "uniform, single frames (2 frames a sample)",
        "single_n_step": "3-step, single frames (2 frames a sample)",
        "prioritized_slices": "64 prioritized slices of 16",
        "memcpy": "memcpy of 9.0 MB out of memory as large as the buffer",
        "memcpy_hot": "the same out of cache",
    }
    return [
        f"{names[name]}: {float(value):.3f} ms, {limit / float(value):.2f} of the limit"
        for name, value in samplers.items()
    ]


def describe_writes(writes: dict[str, float | str]) -> list[str]:
    """One line per way to write."""
    names = {
        "extend_steps": "extend, 64 steps one by one",
        "extend_batch": "extend(batch), the same 64 steps at once",
        "extend_compact": "extend(batch), without next observations",
        "compare": "of a step, comparing the observation with what is stored, byte by byte",
    }
    return [f"{names[name]}: {float(value):,.0f} µs per step of 16" for name, value in writes.items()]


def check(
    rows: list[tuple[str, int, dict[str, float | str]]],
    samplers: dict[str, float | str],
    writes: dict[str, float | str],
    frames: int,
) -> list[tuple[str, bool]]:
    """The bars, each with its figure."""

    def speed(result: dict[str, float | str]) -> float:
        return 1e3 / float(result["sample_ms"])

    peers = {name: result for name, _, result in rows if not name.startswith("headrace")}
    ours = {(name, size): result for name, size, result in rows if name.startswith("headrace")}
    memory = ours["headrace, memory", frames]
    bars: list[tuple[str, bool]] = []

    def bar(text: str, value: float, least: float) -> None:
        bars.append((f"{text}: {value:.2f}, at least {least}", value >= least))

    exact = memory["inside"] == memory["ends"] == "yes"
    bars.append(
        (
            f"bytes per transition, exact ends: {memory['bytes']:,.0f}, at most 7,300",
            exact and float(memory["bytes"]) <= 7300,
        )
    )
    for name in [name for name in peers if name.startswith("cpprb")]:
        result = peers.pop(name)  # one buffer per environment in C++, numpy alone: by itself
        bar(f"batches/s over {name}", speed(memory) / speed(result), 1.0)
    if peers:
        fastest = max(peers, key=lambda name: speed(peers[name]))
        bar(f"batches/s over the fastest peer ({fastest})", speed(memory) / speed(peers[fastest]), 2.5)
        right = [name for name in peers if peers[name]["inside"] == peers[name]["ends"] == "yes"]
        if right:
            fastest = max(right, key=lambda name: speed(peers[name]))
            ratio = speed(memory) / speed(peers[fastest])
            bar(f"batches/s over the fastest peer that is exact at ends ({fastest})", ratio, 3.0)
        writer = min(peers, key=lambda name: float(peers[name]["extend_us"]))
        bar(
            f"extend over the fastest peer ({writer})",
            float(peers[writer]["extend_us"]) / float(memory["extend_us"]),
            1.0,
        )
    times = {name: float(value) for name, value in samplers.items()}
    if "TorchRL 0.14.1" in peers:
        ratio, most = (value / speed(peers["TorchRL 0.14.1"]) for value in (speed(memory), 1e3 / times["memcpy"]))
        bar(f"batches/s over TorchRL (the memcpy alone would be at {most:.1f})", ratio, 8)
    bar("uniform, of the memcpy limit", times["memcpy"] / times["uniform"], 0.75)
    bar("slices over uniform, 256 transitions", times["uniform"] / times["slices"], 1.0)
    bar("slices over uniform, 1,280 frames moved", times["uniform"] / times["slices_64"], 0.9)
    bar("prioritized slices over slices", times["slices_64"] / times["prioritized_slices"], 0.7)
    bar("extend(batch) over extend step by step", float(writes["extend_steps"]) / float(writes["extend_batch"]), 2.0)
    bar("prioritized over uniform", times["uniform"] / times["prioritized"], 0.7)
    bar("3-step over one-step, single frames", times["single"] / times["single_n_step"], 0.9)
    bar(
        f"3-step over one-step, stacks of 4, per frame moved (per batch {times['uniform'] / times['n_step']:.2f})",
        times["uniform"] / 5 / (times["n_step"] / 8),
        0.9,
    )
    for (name, size), result in ours.items():
        if size != frames:
            base = ours[name, frames]
            bar(f"{name}: batches/s with {size:,} over {frames:,} transitions", speed(result) / speed(base), 0.75)
    return bars


def write_markdown(
    path: Path, lines: list[list[str]], facts: list[str], bars: list[tuple[str, bool]], missing: list[str]
) -> None:
    """The table as a page, with the command that makes it."""
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    text = [
        "# Replay buffers side by side",
        "84×84 uint8 frames, stacks of 4, 16 environments, batches of 256, episodes of 60 to 180 steps, two cores. "
        "Each buffer in its own process. Made by "
        "`python benchmarks/replay.py --check --markdown docs/benchmarks/replay.md`.",
        table,
        "TorchRL's compact form is read in slices, the only way it gives next observations; its missing ones are "
        "filled with 0 here. Its delta form is float16 on pixels. “At ends” is whether the next observation of an "
        "episode's last transition is the true one. `extend` is timed on a full buffer, in groups of 64. Figures are "
        "medians of the best of four rounds.",
        "## Our samplers",
        "All in one process, in turn, with 100k transitions each:",
        "\n".join(f"- {fact}" for fact in facts),
        "A 3-step sample of stacks has two that share no memory, 8 frames where a one-step sample has 5: compare them "
        "per frame, or without stacks, where both have 2.",
        "## Bars",
        "\n".join(f"- {'holds' if held else '**falls short**'}: {text}" for text, held in bars),
        "\n".join(f"- **missing**: {text}" for text in missing),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(part for part in text if part) + "\n")


if __name__ == "__main__":
    sys.exit(main())
