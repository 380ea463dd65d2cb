"""Policies over a wire on this machine: the cost of a call, and what a server that batches over clients is worth.

  (a) one call   8 rows × 2 cameras of 224 × 224 pixels, a model that costs nothing; milliseconds and bytes of
                   raw        a websocket that carries as many bytes and understands none
                   ours       RemoteEngine and headrace serve
                   openpi     openpi's own client (0.1.2, its own environment) and headrace serve; it knows no rows, so
                              the pictures are those of one observation
                   zmq        RemoteEngine and a GR00T server without a model
  (b) clients    64 environments of pusher-solid split over 1, 2 and 4 client processes, chunks of 16, a model that
                 costs 40 ms + 5 ms per row off the CPU:
                   batching   one headrace serve for all of them
                   serial     one request per row, one after the other, and a server that runs one at a time: as
                              openpi's server and clients that loop over their environments do
  (c) health     how long GET /healthz takes while another client sends large frames and pictures that must be decoded;
                 bar: 100 ms

Contestants of (a) are measured in turn, round after round; ratios are medians of ratios within a round.

  python benchmarks/serving.py               about 4 minutes
  python benchmarks/serving.py --quick       under a minute on an idle machine
  python benchmarks/serving.py --check       exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import ONE_THREAD, median_ratio, python_of, rounds, started

WORKER = str(Path(__file__).with_name("serving_worker.py"))
CALLS = {"raw": "raw", "ours": "policy", "openpi": "policy", "zmq": "zmq"}
"""Contestant → the server it talks to."""
CLIENTS = (1, 2, 4)
STEPS = 32
"""Of an episode: two chunks."""


class Process:
    """A server or client in a process of its own, which speaks lines of JSON."""

    def __init__(self, *words: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, WORKER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError("a process of the benchmark ended; its last words are above")

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure_calls(count: int, absent: list[str]) -> dict[str, tuple[list[float], int]]:
    """Contestant → milliseconds of each round, and bytes of a request."""
    servers = {kind: Process("server", kind) for kind in dict.fromkeys(CALLS.values())}
    try:
        ports = {kind: server.hear()["port"] for kind, server in servers.items()}
        commands: dict[str, list[str]] = {}
        for name, kind in CALLS.items():
            python = python_of(".venv-openpi") if name == "openpi" else sys.executable
            commands[name] = [str(python), WORKER, "call", name, str(ports[kind])]
        workers = started(commands, {}, absent)
        values = rounds(workers, count)
        found = {worker.name: (values[worker.name], int(worker.ready["bytes"])) for worker in workers}
        for worker in workers:
            worker.close()
        return found
    finally:
        for server in servers.values():
            server.close()


def measure_clients(num_envs: int, episodes: int) -> dict[tuple[str, int], float]:
    """Kind of server and number of clients → useful steps per second of all clients together."""
    servers = {"batching": Process("server", "model"), "serial": Process("server", "model-serial")}
    players = [Process("play") for _ in range(max(CLIENTS))]
    rates: dict[tuple[str, int], float] = {}
    try:
        ports = {kind: server.hear()["port"] for kind, server in servers.items()}
        for player in players:
            player.hear()
        for clients in CLIENTS:
            for kind, port in ports.items():
                each, plan = num_envs // clients, episodes // clients
                job = {"port": port, "count": plan, "num_envs": each, "steps": STEPS, "serial": kind == "serial"}
                playing = players[:clients]
                for number, player in enumerate(playing):
                    player.say(json.dumps({**job, "first": number * plan}))
                for player in playing:
                    player.hear()
                for player in playing:
                    player.say("go")
                ends = [player.hear() for player in playing]
                seconds = max(end["end"] for end in ends) - min(end["begin"] for end in ends)
                rates[kind, clients] = sum(end["steps"] for end in ends) / seconds
        return rates
    finally:
        for process in (*players, *servers.values()):
            process.close()


def measure_health(count: int) -> dict[str, list[float]]:
    """What the server decodes meanwhile → milliseconds of each answer to GET /healthz."""
    import numpy as np
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    from headrace.policies.serving._wire import pack

    frames = {
        "nothing": None,
        "arrays of 60 MB": bytes(pack({"a": np.zeros(60 << 20, np.uint8)})),
    }
    server = Process("server", "policy")
    port = server.hear()["port"]
    found: dict[str, list[float]] = {}

    def send(frame: bytes, over: threading.Event) -> None:
        while not over.is_set():
            try:
                with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as client:
                    client.recv()
                    client.send(frame)
                    client.recv()
            except ConnectionClosed:
                continue

    try:
        for name, frame in frames.items():
            over = threading.Event()
            sender = threading.Thread(target=send, args=(frame, over)) if frame is not None else None
            if sender is not None:
                sender.start()
                time.sleep(0.5)
            found[name] = []
            for _ in range(count):
                begin = time.perf_counter()
                urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30.0).read()
                found[name].append(1000 * (time.perf_counter() - begin))
                time.sleep(0.02)
            over.set()
            if sender is not None:
                sender.join()
        return found
    finally:
        server.close()


def health_table(found: dict[str, list[float]]) -> str:
    lines = ["| decoded meanwhile | median ms | longest ms |", "|---|---:|---:|"]
    lines += [f"| {name} | {statistics.median(values):.1f} | {max(values):.1f} |" for name, values in found.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: fewer rounds, fewer episodes")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--part", action="append", choices=list("abc"), help="only this part; may be repeated")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables as Markdown")
    arguments = parser.parse_args()
    parts = arguments.part or ["a", "b", "c"]
    notes: list[str] = []
    tables: list[str] = []
    failures: list[str] = []
    if "a" in parts:
        found = measure_calls(5 if arguments.quick else 15, notes)
        tables.append(call_table(found))
        failures += call_shortfalls(found)
    if "b" in parts:
        rates = measure_clients(64, 64 if arguments.quick else 192)
        tables.append(client_table(rates))
        gain = rates["batching", 4] / rates["serial", 4]
        if gain < 3.0:
            failures.append(f"4 clients, batching over serial: {gain:.2f}, bar ≥ 3")
    if "c" in parts:
        waits = measure_health(50 if arguments.quick else 200)
        tables.append(health_table(waits))
        longest = max(max(values) for values in waits.values())
        if longest > 100.0:
            failures.append(f"/healthz while frames are decoded: {longest:.0f} ms, bar ≤ 100")
    text = "\n".join([*tables, *notes])
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text + "\n")
    for failure in failures:
        print(f"short: {failure}")
    if arguments.check:
        print("--check failed" if failures else "--check passed: every bar holds")
        return 1 if failures else 0
    return 0


def call_table(found: dict[str, tuple[list[float], int]]) -> str:
    lines = ["| client | ms per call | bytes per request | × raw |", "|---|---:|---:|---:|"]
    for name, (values, sent) in found.items():
        ratio = median_ratio(values, found["raw"][0])
        lines.append(f"| {name} | {statistics.median(values):.1f} | {sent:,} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


def call_shortfalls(found: dict[str, tuple[list[float], int]]) -> list[str]:
    failures: list[str] = []
    ratio = median_ratio(found["ours"][0], found["raw"][0])
    if ratio > 2.0:
        failures.append(f"one call, ours over raw: {ratio:.2f}, bar ≤ 2")
    if "openpi" not in found:
        failures.append("one call, openpi: not measured; run scripts/setup_openpi.sh")
    elif (ratio := median_ratio(found["ours"][0], found["openpi"][0])) > 1.0:
        failures.append(f"one call, ours over openpi's client: {ratio:.2f}, bar ≤ 1")
    return failures


def client_table(rates: dict[tuple[str, int], float]) -> str:
    lines = ["| clients | batching, useful steps/s | serial, useful steps/s | × serial |", "|---:|---:|---:|---:|"]
    for clients in sorted({clients for _, clients in rates}):
        batching, serial = rates["batching", clients], rates["serial", clients]
        lines.append(f"| {clients} | {batching:,.0f} | {serial:,.0f} | {batching / serial:.1f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
