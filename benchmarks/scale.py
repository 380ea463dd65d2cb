"""How work grows with its size: journals, datasets, reports, clients of a server, workers.

  (a) merge     journals of an evaluation in four files, merged and saved; bar: 60 µs per row
  (b) dataset   recorded episodes of five steps of cartpole, opened, verified and exported to HDF5
  (c) report    bundles of runs, put on one page
  (d) clients   clients of one policy server, each with a connection of its own and ten requests of one row; an answer
                that belongs to another client ends the benchmark
  (e) workers   an evaluation over processes of Ray; a table that differs from that of one process ends the benchmark
  (f) soak      ten minutes of steps with pictures, a full replay store, recorded episodes, evaluations with journals;
                bar: in the second half memory grows by at most 2 %

Each measurement runs in a process of its own and is stated with the memory that it adds to that process.

  python benchmarks/scale.py             up to 1,000,000 rows, 100,000 episodes, 2,000 bundles, 200 clients, 16 workers
  python benchmarks/scale.py --quick     up to 100,000 rows, 2,000 episodes, 100 bundles, 20 clients, 2 workers
  python benchmarks/scale.py --check     exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MERGE_BAR_US = 60.0
FILES = 4


def write_journals(folder: Path, rows: int) -> None:
    """Write journals of as many rows, with the header of a real evaluation."""
    import headrace
    from headrace.evaluation import JournalCfg

    journal = JournalCfg(path=folder / "real.jsonl")
    headrace.evaluate("cartpole", lambda obs: 0 * obs["policy"][:, :1], episodes=4, progress=False, journal=journal)
    header, row, *_ = (json.loads(line) for line in (folder / "real.jsonl").read_text().splitlines())
    for number in range(FILES):
        ids = range(number * rows // FILES, (number + 1) * rows // FILES)
        lines = [{**header, "plan": [[ids.start, ids.stop]]}, *({**row, "episode_id": each} for each in ids)]
        (folder / f"part{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def record_episodes(folder: Path, episodes: int) -> None:
    """Record a dataset of as many episodes."""
    import torch

    import headrace
    from headrace.recording import DatasetInfo, EpisodeRecorder

    env = headrace.make("cartpole", min(500, episodes), overrides={"episode_length": 5})
    with EpisodeRecorder(folder / "dataset", info=DatasetInfo.of(env)) as recorder:
        env.attach(recorder)
        env.reset(seed=0)
        while recorder.report.finished < episodes:
            env.step(torch.zeros(env.num_envs, 1))
    env.close()


def write_bundles(folder: Path, count: int) -> None:
    """Write bundles of as many runs: those of one real run, with other ids."""
    import headrace
    from headrace.bench import runtime

    runtime("cartpole", num_envs=4, num_steps=20, run=headrace.RunCfg(output=folder / "real"))
    text = json.loads((folder / "real" / "runtime.json").read_text())
    for number in range(count):
        text["run"]["run_id"] = f"{number:032x}"
        (folder / "runs" / f"{number}").mkdir(parents=True)
        (folder / "runs" / f"{number}" / "runtime.json").write_text(json.dumps(text))


def ask_server(clients: int) -> None:
    """Let clients of one server ask at the same time, and compare each answer with what its client sent."""
    import threading

    import torch

    from headrace.policies import Batching, PolicyServer, RemoteEngine, ServeCfg, as_chunk_policy
    from headrace.policies.engines import Request
    from headrace.policies.protocol import ChunkContext

    policy = as_chunk_policy(lambda obs, _: obs["policy"][:, None, :1], horizon=1, action_dim=1)
    cfg = ServeCfg(port=0, batching=Batching(mode="fast"))
    correct = [0] * clients
    zero, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, 1)

    def ask(number: int) -> None:
        with RemoteEngine(f"ws://127.0.0.1:{server.port}") as engine:
            started.wait()
            for step in range(10):
                context = ChunkContext(
                    seeds=zero,
                    env_ids=zero,
                    episode_ids=zero + number,
                    chunk_index=zero + step,
                    instructions=("",),
                    left_over=one,
                    left_over_length=zero,
                    delay=zero,
                )
                engine.submit(Request(obs={"policy": one[0] + 1000 * number + step}, context=context))
                reply = engine.poll(wait=True)
                correct[number] += reply is not None and float(reply.answer.actions) == 1000 * number + step

    started = threading.Barrier(clients)
    with PolicyServer(policy, cfg) as server:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert correct == [10] * clients, f"answers of its own per client, of 10: {correct}"


def play_over(workers: int) -> None:
    """Play 320 episodes over workers, and compare the table with that of one process."""
    import headrace
    from headrace.evaluation import WorkersCfg

    found = headrace.evaluate("pusher-solid", episodes=320, workers=WorkersCfg(count=workers), progress=False)
    alone = headrace.evaluate("pusher-solid", episodes=320, progress=False)
    assert found.episodes == alone.episodes, "the table differs from that of one process"


def soak(folder: Path, seconds: float) -> list[float]:
    """Return the resident MB of this process at ten moments of steps, samples, recordings and evaluations."""
    import shutil

    import torch

    import headrace
    from headrace.recording import DatasetInfo, EpisodeRecorder
    from headrace.replay import ReplayBuffer
    from headrace.types import StackSpec

    env = headrace.make("cartpole-camera", 16, overrides={"frame_stack": 2, "pixels": 48})
    spaces = (env.single_observation_space, env.single_action_space)
    buffer = ReplayBuffer(4_000, 16, *spaces, stack={"policy": StackSpec(frames=2, dim=-1)})
    obs, _ = env.reset(seed=0)
    begin, found = time.monotonic(), list[float]()
    while len(found) < 10:
        shutil.rmtree(folder / "dataset", ignore_errors=True)
        with EpisodeRecorder(folder / "dataset", info=DatasetInfo.of(env)) as recorder:
            env.attach(recorder)
            for _ in range(300):
                active, action = env.active, torch.rand(16, 1) * 2 - 1
                step = env.step(action)
                buffer.extend(obs, action, step, active)
                obs = step.obs
            env.detach(recorder)
        buffer.sample(256)
        (folder / "journal").unlink(missing_ok=True)
        headrace.evaluate("pusher-solid", episodes=16, num_envs=8, progress=False, journal=folder / "journal")
        if time.monotonic() - begin > seconds * (len(found) + 1) / 10:
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
            found.append(int(line.split()[1]) / 1024)
    return found


def run(task: str, folder: Path) -> None:
    """Do one thing in this process; print its seconds and the memory that it took."""
    from headrace.bench import report
    from headrace.evaluation import merge
    from headrace.recording import EpisodeDataset, export_dataset, verify_dataset

    if task == "merge":
        merge(folder / "real.jsonl")  # imports what merging needs
    before, begin = peak_mb(), time.perf_counter()
    if task == "merge":
        merge(*sorted(folder.glob("part*.jsonl")), output=folder / "merged.json")
    elif task == "open":
        len(EpisodeDataset(folder / "dataset"))
    elif task == "verify":
        problems = verify_dataset(folder / "dataset").problems
        assert not problems, problems[0]
    elif task == "report":
        assert report(folder / "runs", output=folder / "report.html").runs == len(list((folder / "runs").iterdir()))
    elif task.startswith("clients"):
        ask_server(int(task.removeprefix("clients")))
    elif task.startswith("soak"):
        print(json.dumps({"resident": soak(folder, float(task.removeprefix("soak")))}))
        return
    elif task.startswith("workers"):
        play_over(int(task.removeprefix("workers")))
    else:
        export_dataset(folder / "dataset", folder / "demos.hdf5", "robomimic")
    print(json.dumps({"seconds": time.perf_counter() - begin, "mb": peak_mb() - before}))


def peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def measure(task: str, folder: Path) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--run", task, folder], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--part", action="append", choices=list("abcdef"), help="only this part; may be repeated")
    parser.add_argument("--markdown", metavar="FILE", help="also write the tables as Markdown")
    parser.add_argument("--run", nargs=2, metavar=("TASK", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.run[0], Path(arguments.run[1]))
        return 0
    parts, failures, lines = arguments.part or list("abcdef"), list[str](), list[str]()
    if "a" in parts:
        lines += ["| rows merged and saved | s | µs per row | MB added |", "|---:|---:|---:|---:|"]
        for rows in (10_000, 100_000) if arguments.quick else (10_000, 100_000, 1_000_000):
            with tempfile.TemporaryDirectory() as place:
                write_journals(Path(place), rows)
                found = measure("merge", Path(place))
            each = 1e6 * found["seconds"] / rows
            lines.append(f"| {rows:,} | {found['seconds']:.1f} | {each:.0f} | {found['mb']:.0f} |")
            if each > MERGE_BAR_US:
                failures.append(f"merge of {rows:,} rows: {each:.0f} µs per row, bar ≤ {MERGE_BAR_US:.0f}")
    if "b" in parts:
        lines += ["", "| episodes | what | s | ms per episode | MB added |", "|---:|---|---:|---:|---:|"]
        for episodes in (500, 2_000) if arguments.quick else (1_000, 10_000, 100_000):
            with tempfile.TemporaryDirectory() as place:
                record_episodes(Path(place), episodes)
                for task in ("open", "verify", "export"):
                    found = measure(task, Path(place))
                    each = 1000 * found["seconds"] / episodes
                    lines.append(f"| {episodes:,} | {task} | {found['seconds']:.1f} | {each:.2f} | {found['mb']:.0f} |")
    for part, task, sizes, few in (
        ("c", "report", (20, 200, 2_000), (20, 100)),
        ("d", "clients", (2, 20, 200), (2, 20)),
        ("e", "workers", (2, 4, 16), (2,)),
    ):
        if part not in parts:
            continue
        lines += ["", f"| {'bundles of a report' if task == 'report' else task} | s | MB added |", "|---:|---:|---:|"]
        for size in few if arguments.quick else sizes:
            with tempfile.TemporaryDirectory() as place:
                if task == "report":
                    write_bundles(Path(place), size)
                found = measure(task if task == "report" else f"{task}{size}", Path(place))
            lines.append(f"| {size:,} | {found['seconds']:.1f} | {found['mb']:.0f} |")
    if "f" in parts:
        seconds = 20 if arguments.quick else 600
        with tempfile.TemporaryDirectory() as place:
            resident: list[float] = measure(f"soak{seconds}", Path(place))["resident"]
        lines += ["", "| soak | MB resident at each tenth |", "|---:|---|"]
        lines.append(f"| {seconds} s | {', '.join(f'{value:.0f}' for value in resident)} |")
        if resident[-1] > 1.02 * resident[4]:
            failures.append(f"soak: from {resident[4]:.0f} to {resident[-1]:.0f} MB in its second half, bar 2 %")
    text = "\n".join(lines)
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text + "\n")
    for failure in failures:
        print(f"short: {failure}")
    if arguments.check:
        print("--check failed" if failures else "--check passed: every bar holds")
        return 1 if failures else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
