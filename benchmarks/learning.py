"""Value estimation and recurrent training beside TorchRL, stable-baselines3 and the loop of rsl_rl.

  gae        advantages at three shapes: microseconds, and against one pass over the same bytes
               torchrl      generalized_advantage_estimate, the quicker of its loop and its vectorized form
               sb3          RolloutBuffer.compute_returns_and_advantage
               rsl_rl       its loop over steps in torch, restated here (rsl_rl keeps it inside its storage)
  recurrent  forward and backward of a GRU and an LSTM on slices (T, B) = (64, 128), 128 → 128, with 5, 20 and 50 % of
             the steps a reset: milliseconds, and peak memory of a process that does nothing else
               pad, scan    TorchRL's GRUModule and LSTMModule with these backends
  values     V(s) and V(s') of a rollout, one forward over distinct observations beside two passes

Contestants run in one process, in turn, round after round; times are medians, those of GAE over turns of 20 calls.
Everything has one thread: at these sizes our kernels use one too. Bars: GAE ≥ 3× the fastest peer; recurrent ≥ 1.5× the
faster of TorchRL's two, and peak memory at most that of its pad; one forward ≤ 0.6× the time of two.

  python benchmarks/learning.py             the whole table, about two minutes; runs itself in .venv-bench
  python benchmarks/learning.py --quick     fewer rounds, under a minute
  python benchmarks/learning.py --check     exit 1 and name each bar that falls short
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ((24, 4096), (128, 1024), (2048, 64))
RESETS = (0.05, 0.2, 0.5)
STEPS, ENVS, SIZE = 64, 128, 128
GAMMA, LAM = 0.99, 0.95
PEER_PACKAGES = ("torchrl", "stable_baselines3")

Row = tuple[str, str, str, str, str]
"""section, case, contestant, measure, ratio to ours or to the bar's reference"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--memory", nargs=3, metavar=("WHO", "KIND", "RESETS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if any(importlib.util.find_spec(name) is None for name in PEER_PACKAGES):
        peers = ROOT / ".venv-bench" / "bin" / "python"
        if not peers.exists():
            print(f"peers {', '.join(PEER_PACKAGES)} are not installed; run: make bench-setup", file=sys.stderr)
            return 1
        os.execv(peers, [str(peers), *sys.argv])
    import warnings

    import torch

    warnings.simplefilter("ignore")  # peers' deprecations
    torch.set_num_threads(1)
    if arguments.memory:
        who, kind, share = arguments.memory
        print(_peak_megabytes(who, kind, float(share)))
        return 0
    return _report(arguments)


def _report(arguments: argparse.Namespace) -> int:
    rows: list[Row] = []
    short: list[str] = []
    for section in (_gae, _recurrent, _values):
        found, missed = section(arguments.quick)
        rows += found
        short += missed
    _print(rows)
    if arguments.markdown:
        Path(arguments.markdown).write_text(_markdown(rows, short))
    for line in short:
        print(f"SHORT  {line}", file=sys.stderr)
    return 1 if short and arguments.check else 0


def _interleave(contestants: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, float]:
    """Median seconds a call; contestants take turns of ``calls`` calls, in reversed order every other round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for name in contestants:
        contestants[name]()
        contestants[name]()
    for i in range(rounds):
        for name in contestants if i % 2 == 0 else reversed(contestants):
            start = time.perf_counter()
            for _ in range(calls):
                contestants[name]()
            times[name].append((time.perf_counter() - start) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


# --- GAE ----------------------------------------------------------------------------------------------------------


def _gae(quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    short: list[str] = []
    for steps, envs in SHAPES:
        times = _interleave(_gae_contestants(steps, envs), 5 if quick else 15, calls=20)
        ours = times["headrace"]
        case = f"({steps}, {envs})"
        for name, seconds in times.items():
            rows.append(("gae", case, name, f"{seconds * 1e6:,.0f} µs", f"{seconds / ours:.2f}×"))
        peers = {name: seconds for name, seconds in times.items() if name in ("torchrl", "sb3", "rsl_rl")}
        fastest = min(peers, key=lambda name: peers[name])
        if peers[fastest] < 3 * ours:
            short.append(f"GAE at {case}: expected ≥ 3× the fastest peer, got {peers[fastest] / ours:.2f}× {fastest}")
    return rows, short


def _gae_contestants(steps: int, envs: int) -> dict[str, Callable[[], object]]:
    import numpy as np
    import torch
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer
    from torchrl.objectives.value.functional import (
        generalized_advantage_estimate,
        vec_generalized_advantage_estimate,
    )

    from headrace.learning import gae

    torch.manual_seed(0)
    reward, value = torch.randn(steps, envs), torch.randn(steps, envs)
    last_value = torch.randn(envs)
    terminated = torch.rand(steps, envs) < 0.02
    truncated = torch.zeros(steps, envs, dtype=torch.bool)
    next_value = torch.cat((value[1:], last_value[None]))

    def ours() -> Any:
        return gae(reward, value, next_value, terminated, truncated, gamma=GAMMA, lam=LAM)

    batch = [t.t().contiguous()[..., None] for t in (value, next_value, reward, terminated, terminated)]
    loop_form: dict[str, Callable[[], Any]] = {
        "loop": lambda: generalized_advantage_estimate(GAMMA, LAM, *batch[:3], done=batch[3], terminated=batch[4]),
        "vectorized": lambda: vec_generalized_advantage_estimate(
            GAMMA, LAM, *batch[:3], done=batch[3], terminated=batch[4]
        ),
    }
    quicker = min(loop_form, key=lambda name: _interleave({name: loop_form[name]}, 3)[name])

    space = spaces.Box(-1, 1, (1,))
    store = RolloutBuffer(steps, space, space, device="cpu", gae_lambda=LAM, gamma=GAMMA, n_envs=envs)
    store.rewards, store.values = reward.numpy().copy(), value.numpy().copy()
    store.episode_starts[1:] = terminated[:-1].numpy()
    last_done = terminated[-1].numpy()

    columns = [t[..., None].contiguous() for t in (reward, value, terminated.byte())]
    last_column = last_value[:, None]

    def rsl_rl() -> Any:
        rewards, values, dones = columns
        returns = torch.empty_like(values)
        advantage: Any = 0
        for step in reversed(range(steps)):
            following = last_column if step == steps - 1 else values[step + 1]
            goes_on = 1.0 - dones[step].float()
            delta = rewards[step] + goes_on * GAMMA * following - values[step]
            advantage = delta + goes_on * GAMMA * LAM * advantage
            returns[step] = advantage + values[step]
        return returns - values, returns

    # as many bytes as the estimator reads and writes: half are read, half are written
    source = np.zeros(steps * envs * (3 * 4 + 2 + 2 * 4) // 2 // 8, dtype=np.int64)
    target = np.empty_like(source)

    expected, _ = ours()
    torch.testing.assert_close(loop_form[quicker]()[0].squeeze(-1).t(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rsl_rl()[0].squeeze(-1), expected, rtol=1e-4, atol=1e-4)
    store.compute_returns_and_advantage(last_value, last_done)
    torch.testing.assert_close(torch.from_numpy(store.advantages), expected, rtol=1e-4, atol=1e-4)
    return {
        "headrace": ours,
        "one pass over the bytes": lambda: np.copyto(target, source),
        "torchrl": loop_form[quicker],
        "sb3": lambda: store.compute_returns_and_advantage(last_value, last_done),
        "rsl_rl": rsl_rl,
    }


# --- recurrent ----------------------------------------------------------------------------------------------------


def _recurrent(quick: bool) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    short: list[str] = []
    for kind in ("gru", "lstm"):
        for share in RESETS[::2] if quick else RESETS:
            works = {who: _recurrent_work(who, kind, share) for who in ("headrace", "torchrl pad", "torchrl scan")}
            _agree(works)
            times = _interleave(works, 3 if quick else 9)
            memory = {who: _measured_memory(who, kind, share) for who in works}
            case = f"{kind}, {share:.0%} resets"
            for who, seconds in times.items():
                text = f"{seconds * 1e3:.1f} ms, {memory[who]:.0f} MB"
                rows.append(("recurrent", case, who, text, f"{seconds / times['headrace']:.2f}×"))
            peer = min(times["torchrl pad"], times["torchrl scan"])
            if peer < 1.5 * times["headrace"]:
                short.append(f"{case}: expected ≥ 1.5× the faster of TorchRL's, got {peer / times['headrace']:.2f}×")
            if memory["headrace"] > memory["torchrl pad"]:
                short.append(
                    f"{case}: expected at most pad's {memory['torchrl pad']:.0f} MB, got {memory['headrace']:.0f} MB"
                )
    return rows, short


def _agree(works: dict[str, Callable[[], Any]]) -> None:
    """The contestants have the same weights and inputs, so their outputs have to be the same."""
    import torch

    expected = works["headrace"]()
    for who in works:
        torch.testing.assert_close(works[who](), expected, rtol=1e-4, atol=1e-4)


def _recurrent_work(who: str, kind: str, share: float, envs: int = ENVS) -> Callable[[], Any]:
    """Forward and backward on one slice, with the gradient of the input; gives the outputs as (T, B, H)."""
    import torch

    from headrace.learning import GRU, LSTM

    torch.manual_seed(0)
    x = torch.randn(STEPS, envs, SIZE)
    resets = torch.rand(STEPS, envs) < share
    resets[0] = True
    torch.manual_seed(1)
    ours = {"gru": GRU, "lstm": LSTM}[kind](SIZE, SIZE)
    if who == "headrace":

        def work() -> Any:
            inputs = x.clone().requires_grad_()
            out, _ = ours(inputs, None, resets)
            out.sum().backward()
            return out.detach()

        return work

    from tensordict import TensorDict
    from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

    hidden = ["h", "c"][: 1 + (kind == "lstm")]
    peer = {"gru": GRUModule, "lstm": LSTMModule}[kind](
        input_size=SIZE,
        hidden_size=SIZE,
        recurrent_backend=who.split()[1],
        in_keys=["x", *hidden, "is_init"],
        out_keys=["y", *(("next", name) for name in hidden)],
    )
    getattr(peer, kind).load_state_dict(ours.state_dict())
    batch, first = x.transpose(0, 1).contiguous(), resets.t()[..., None].contiguous()
    states = {name: torch.zeros(envs, STEPS, 1, SIZE) for name in hidden}

    def peer_work() -> Any:
        inputs = batch.clone().requires_grad_()
        with set_recurrent_mode(True):
            out = peer(TensorDict({"x": inputs, "is_init": first, **states}, [envs, STEPS]))["y"]
        out.sum().backward()
        return out.detach().transpose(0, 1)

    return peer_work


def _measured_memory(who: str, kind: str, share: float) -> float:
    command = [sys.executable, __file__, "--memory", who, kind, str(share)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def _peak_megabytes(who: str, kind: str, share: float) -> float:
    """How far resident memory rises above where it was when everything was loaded and warm."""
    _recurrent_work(who, kind, share, envs=4)()  # loads code, small
    work = _recurrent_work(who, kind, share)
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


# --- values -------------------------------------------------------------------------------------------------------


def _values(quick: bool) -> tuple[list[Row], list[str]]:
    import torch
    from torch import nn

    from headrace.learning import rollout_values

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(48, 256), nn.ELU(), nn.Linear(256, 256), nn.ELU(), nn.Linear(256, 1))
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 8, 4), nn.ELU(), nn.Conv2d(16, 32, 4, 2), nn.ELU(), nn.Flatten(), nn.LazyLinear(1)
    )
    rows: list[Row] = []
    short: list[str] = []
    for case, net, steps, envs, shape in (("MLP", mlp, 64, 512, (48,)), ("CNN", cnn, 32, 16, (3, 48, 48))):
        world = torch.randn(steps + 1, envs, *shape)
        ended = torch.rand(steps, envs) < 0.02
        next_obs = world[1:].clone()
        next_obs[ended] = torch.randn(int(ended.sum()), *shape)
        step, env = ended.nonzero(as_tuple=True)
        finals = {"final_obs": next_obs[step, env], "final_step": step, "final_env": env}

        def once(net: Any = net, world: Any = world, finals: Any = finals) -> Any:
            with torch.no_grad():
                return rollout_values(net, world[:-1], world[-1], **finals, chunk_size=4096)

        def twice(net: Any = net, world: Any = world, next_obs: Any = next_obs) -> Any:
            with torch.no_grad():
                both = [torch.cat([net(part) for part in o.flatten(0, 1).split(4096)]) for o in (world[:-1], next_obs)]
            return [values.view(world.shape[0] - 1, world.shape[1]) for values in both]

        for one, two in zip(once(), twice(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        times = _interleave({"one forward": once, "two passes": twice}, 5 if quick else 21)
        ratio = times["one forward"] / times["two passes"]
        for name, seconds in times.items():
            share = f"{seconds / times['two passes']:.2f}× of two"
            rows.append(("values", f"{case} ({steps}, {envs})", name, f"{seconds * 1e3:.1f} ms", share))
        if ratio > 0.6:
            short.append(f"one forward, {case}: expected ≤ 0.6× the time of two passes, got {ratio:.2f}×")
    return rows, short


# --- output -------------------------------------------------------------------------------------------------------


def _print(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="learning")
    for column in ("section", "case", "contestant"):
        table.add_column(column)
    table.add_column("median", justify="right")
    table.add_column("against headrace", justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _markdown(rows: list[Row], short: list[str]) -> str:
    head = "| section | case | contestant | median | against headrace |\n|---|---|---|---:|---:|\n"
    table = head + "".join("| " + " | ".join(row) + " |\n" for row in rows)
    bars = "\n".join(f"- **falls short**: {line}" for line in short) or "All of them hold."
    return f"""# Value estimation and recurrent training side by side

Made by `python benchmarks/learning.py --check --markdown docs/benchmarks/learning.md` (peers: `make bench-setup`).
One thread of two cores. Contestants take turns in one process, with the same weights and inputs, and have to agree
before they are timed. Memory is the peak of a process that does one forward and backward and nothing else.

{table}
GAE is compared with the copy of as many bytes as it reads and writes; TorchRL is the quicker of its loop and its
vectorized form. "Two passes" is V(s) and V(s') evaluated apart.

## Bars

GAE at least 3 times as fast as the fastest peer; recurrent forward and backward at least 1.5 times as fast as the
faster of TorchRL's `pad` and `scan`, with no more memory than `pad`; one forward at most 0.6 of the time of two.

{bars}
"""


if __name__ == "__main__":
    sys.exit(main())
