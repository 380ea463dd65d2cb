"""The image path compared with its peers: cameras, frame stacks, normalization, a whole pixel task.

Contestants run in a process each, all on the same two threads, measured in turn:
  (a) cameras     frames per second (benchmarks/vision_camera.py)
  (b) stacking    append a frame, stack K of them, x/255 minus each frame's mean: milliseconds per step of all envs
        headrace     FrameStack: uint8 frames, one fused pass when they are read
        sb3          VecFrameStack's StackedObservations + SB3's own scaling, which subtracts no mean
        torchrl      CatFrames on uint8 + the best torch form of (c)
        gymnasium    FrameStackObservation in a SyncVectorEnv of environments that do nothing + the same
        float ring   normalize to float32, torch.roll a float32 ring, permute and clone: the slow way, restated
  (c) normalize   uint8 (1024, 64, 64, 3) → x/255 minus its mean, fresh float32
        headrace, torch naive, torch preallocated (two forms), and a one-thread memcpy of the output
  (d) whole task  env-steps per second of cartpole-camera with a stack of 1, 2 and 4 frames
        whole        uint8 observations, as they come
        normalized   the environment normalizes (normalize=True)
        by hand      uint8 observations, then normalize_image of each
  (e) robots      frames per second on scenes of meshes (benchmarks/vision_robots.py)
  (f) sensors     env-steps per second of cartpole-camera-terms: plain, with delay and stalls, with noise, with both;
                  and two cameras with highlights on a textured table (benchmarks/vision_robots.py --scene table)

"held" is what a stack keeps between steps without the observation handed out; "peak" is the highest resident memory of
the first steps above that of the process before, with the last observation still held.

  python benchmarks/vision.py            the whole table
  python benchmarks/vision.py --quick    under a minute
  python benchmarks/vision.py --check    exit 1 and name each bar that falls short
  python benchmarks/vision.py --part b --part c
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from interleaved import median_ratio, python_of, rounds, serve, started, verdict

TWO_THREADS = {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "HEADRACE_NUM_THREADS": "2"}
SIZE = 64
STACKING = [(1024, 4), (1024, 2), (256, 4)]
"""(environments, frames)."""
WHOLE_ENVS = 256
STACK_PEERS = ("sb3", "torchrl", "gymnasium", "float ring")
SENSORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "late": {"delay": (2, 3), "hold": 0.1},
    "noisy": {"noise.additive": 4.0, "noise.salt_and_pepper": 0.001},
    "late and noisy": {"delay": (2, 3), "hold": 0.1, "noise.additive": 4.0, "noise.salt_and_pepper": 0.001},
}
"""Settings of the camera in (f)."""
TORCH_FORMS = ("torch naive", "torch preallocated", "torch preallocated, integer mean")


@dataclass(frozen=True)
class Result:
    """All rounds of one contestant in one case; ``values`` are milliseconds in (b) and (c), else env-steps/s."""

    part: str
    case: str
    name: str
    values: list[float]
    held: float | None
    peak: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute: one case a part, short rounds")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar falls short, naming it")
    parser.add_argument("--part", action="append", choices=list("abcdef"), help="only this part; may be repeated")
    parser.add_argument("--markdown", metavar="FILE", help="also write the table as Markdown")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--frames", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _WORKERS[arguments.worker](arguments.envs, arguments.frames, arguments.seconds)
        return 0
    return _compare(arguments)


def _compare(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120)
    parts = arguments.part or list("abcdf" if arguments.quick else "abcdef")
    count, seconds = (3, 0.1) if arguments.quick else (7, 0.5)
    results: list[Result] = []
    failures: list[str] = []
    if "b" in parts:
        for envs, frames in STACKING[-1:] if arguments.quick else STACKING:
            case = f"{envs} × {SIZE}² × 3, K = {frames}"
            names = ["headrace", *STACK_PEERS]
            results += _measured("b", case, names, envs, frames, count, seconds, failures)
    if "c" in parts:
        names = ["normalize", *TORCH_FORMS, "memcpy"]
        results += _measured("c", f"1024 × {SIZE}² × 3", names, 1024, 1, count, seconds, failures)
    if "d" in parts:
        names = ["whole 1", "whole 2", "whole 4"]
        names += [f"{name} {frames}" for frames in (1, 4) for name in ("normalized", "by hand")]
        results += _measured("d", f"cartpole-camera × {WHOLE_ENVS}", names, WHOLE_ENVS, 0, count, seconds, failures)
    if "f" in parts:
        results += _measured(
            "f", f"cartpole-camera-terms × {WHOLE_ENVS}", list(SENSORS), WHOLE_ENVS, 0, count, seconds, failures
        )
        import vision_robots

        failures += [f"(f) {failure}" for failure in vision_robots.table_shortfalls(arguments.quick)]
    camera_lines: list[str] = []
    if "a" in parts:
        camera_lines = _cameras(arguments.quick, console, failures)
    if "e" in parts:
        import vision_robots

        failures += [f"(e) {failure}" for failure in vision_robots.robot_shortfalls(arguments.quick)]
    table, lines = _table(results)
    console.print(table)
    failures += _shortfalls(results)
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write("\n".join([*camera_lines, *lines]) + "\n")
    return verdict(console, failures, check=arguments.check)


def _cameras(quick: bool, console: Any, failures: list[str]) -> list[str]:
    """Part (a) lives in a file of its own."""
    import vision_camera

    rows = vision_camera.camera_rows(quick)
    failures += [f"(a) {failure}" for failure in vision_camera.camera_checks(rows)]
    table, lines = vision_camera.camera_table(rows)
    console.print(table)
    return [*lines, ""]


def _measured(
    part: str, case: str, names: list[str], envs: int, frames: int, count: int, seconds: float, failures: list[str]
) -> list[Result]:
    python = str(python_of(".venv-bench"))
    fixed = ["--envs", str(envs), "--frames", str(frames), "--seconds", str(seconds)]
    commands = {name: [python, os.path.abspath(__file__), "--worker", name, *fixed] for name in names}
    absent: list[str] = []
    workers = started(commands, TWO_THREADS, absent)
    failures += [f"({part}) {case}: {line}" for line in absent]
    try:
        values = rounds(workers, count)
        return [
            Result(part, case, worker.name, values[worker.name], worker.ready["held"], worker.ready["peak"])
            for worker in workers
        ]
    finally:
        for worker in workers:
            worker.close()


def _shortfalls(results: list[Result]) -> list[str]:
    """Every bar that does not hold, with the figure reached."""
    failures: list[str] = []

    def bar(what: str, reached: float, wanted: float, *, at_most: bool = False) -> None:
        if (reached > wanted) if at_most else (reached < wanted):
            failures.append(f"{what}: {reached:.3g}, bar {'≤' if at_most else '≥'} {wanted}")

    cases = {(result.part, result.case): {} for result in results}
    for result in results:
        cases[result.part, result.case][result.name] = result
    for (part, case), found in cases.items():
        where = f"({part}) {case}"
        if part == "b" and "headrace" in found:
            ours = found["headrace"]
            peers = [found[name].values for name in STACK_PEERS if name in found]
            if peers:
                bar(f"{where} × the best peer", min(median_ratio(peer, ours.values) for peer in peers), 3.0)
            if "float ring" in found:
                bar(f"{where}, bytes held", ours.held / found["float ring"].held, 0.25, at_most=True)
        if part == "c" and "normalize" in found:
            ours = found["normalize"]
            forms = [found[name].values for name in TORCH_FORMS if name in found]
            if forms:
                bar(f"{where} × the best torch form", min(median_ratio(form, ours.values) for form in forms), 3.0)
            if "memcpy" in found:
                bar(f"{where} × one-thread memcpy", median_ratio(found["memcpy"].values, ours.values), 1.0)
        if part == "d" and {"whole 1", "whole 4"} <= set(found):
            cost = median_ratio(found["whole 1"].values, found["whole 4"].values) - 1
            bar(f"{where}, cost of K = 4 over K = 1", cost, 0.10, at_most=True)
        for name in SENSORS:
            if part == "f" and {"plain", name} <= set(found):
                cost = median_ratio(found["plain"].values, found[name].values) - 1
                bar(f"{where}, cost of {name}", cost, 0.10, at_most=True)
        for frames in (1, 4):
            inside, outside = found.get(f"normalized {frames}"), found.get(f"by hand {frames}")
            if inside and outside:
                ratio = median_ratio(inside.values, outside.values)
                bar(f"{where}, K = {frames}, normalized × uint8 and normalize_image", ratio, 1.0)
    return failures


def _table(results: list[Result]) -> tuple[Any, list[str]]:
    from rich.table import Table

    heads = ["part", "case", "contestant", "median", "× first", "held MB", "peak MB"]
    table = Table(title="milliseconds per step; (d) and (f): env-steps/s. Medians of interleaved rounds")
    for head in heads:
        table.add_column(head, justify="left" if head in ("part", "case", "contestant") else "right")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    base: dict[tuple[str, str], list[float]] = {}
    for result in results:
        reference = base.setdefault((result.part, result.case), result.values)
        unit = "{:,.0f}" if result.part in "df" else "{:.2f}"
        row = [
            f"({result.part})",
            result.case,
            result.name,
            unit.format(statistics.median(result.values)),
            f"{median_ratio(result.values, reference):.2f}",
            "–" if result.held is None else f"{result.held / 1e6:.1f}",
            "–" if result.peak is None else f"{result.peak / 1e6:.0f}",
        ]
        table.add_row(*row)
        lines.append("| " + " | ".join(row) + " |")
    return table, lines


def _resident(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field + ":"))


def _run(step: Callable[[int], Any], held: Callable[[], int | None], seconds: float) -> None:
    """The worker's side: warm up, note the peak of a step, then answer with the median milliseconds of a step."""
    before = _resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the high-water mark of resident memory
    kept = step(0)
    for turn in range(1, 5):
        kept = step(turn)  # the observation before is held while the next is made, as a learner does
    peak = _resident("VmHWM") - before
    turn = 5

    def measure() -> float:
        nonlocal turn, kept
        times: list[float] = []
        until = time.perf_counter() + seconds
        while time.perf_counter() < until or len(times) < 3:
            start = time.perf_counter()
            kept = step(turn)
            times.append(time.perf_counter() - start)
            turn += 1
        return statistics.median(times) * 1e3

    serve({"held": held(), "peak": peak}, measure)
    del kept


def _pictures(envs: int) -> list[Any]:
    """Four different batches of frames, as a camera would give them."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (envs, SIZE, SIZE, 3), dtype=np.uint8) for _ in range(4)]


def _best_torch(shape: tuple[int, ...], spatial: tuple[int, int]) -> Callable[[Any], Any]:
    """The fastest plain torch form of part (c): two outputs in turn, so that the one before stays readable."""
    import torch

    outputs = [torch.empty(shape), torch.empty(shape)]

    def normalize(stacked: Any) -> Any:
        outputs.reverse()
        out = outputs[0].copy_(stacked).mul_(1 / 255)
        return out.sub_(out.mean(dim=spatial, keepdim=True))

    return normalize


def _stack_headrace(envs: int, frames: int, seconds: float) -> None:
    import torch

    from headrace.history import FrameStack
    from headrace.types import StackSpec

    pictures = [torch.from_numpy(picture) for picture in _pictures(envs)]
    stack = FrameStack(StackSpec(frames=frames, dim=-1), num_envs=envs, frame_shape=(SIZE, SIZE, 3), normalize=True)

    def step(turn: int) -> Any:
        stack.append(pictures[turn % 4])
        return stack.observe()

    _run(step, lambda: stack.nbytes, seconds)


def _stack_sb3(envs: int, frames: int, seconds: float) -> None:
    import gymnasium
    import numpy as np
    from stable_baselines3.common.preprocessing import preprocess_obs
    from stable_baselines3.common.utils import obs_as_tensor
    from stable_baselines3.common.vec_env.stacked_observations import StackedObservations

    pictures = _pictures(envs)
    space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
    stack: Any = StackedObservations(envs, frames, space, "last")
    stack.reset(pictures[0])
    dones, infos = np.zeros(envs, bool), [{} for _ in range(envs)]

    def step(turn: int) -> Any:
        stacked, _ = stack.update(pictures[turn % 4], dones, infos)
        return preprocess_obs(obs_as_tensor(stacked, "cpu"), stack.stacked_observation_space)  # type: ignore[arg-type]  # sb3 says less than it takes

    _run(step, lambda: stack.stacked_obs.nbytes, seconds)


def _stack_torchrl(envs: int, frames: int, seconds: float) -> None:
    import torch
    from tensordict import TensorDict
    from torchrl.envs.transforms import CatFrames

    pictures = [torch.from_numpy(picture) for picture in _pictures(envs)]
    cat = CatFrames(N=frames, dim=-1, in_keys=["pixels"], reset_key="_reset")
    normalize = _best_torch((envs, SIZE, SIZE, 3 * frames), (1, 2))
    first = TensorDict({"pixels": pictures[0]}, [envs])
    cat._call(first, _reset=torch.ones(envs, dtype=torch.bool))

    def step(turn: int) -> Any:
        data = TensorDict({"pixels": pictures[turn % 4]}, [envs])
        return normalize(cat._call(data)["pixels"])

    _run(step, lambda: cat._cat_buffers_pixels.nbytes, seconds)


def _stack_gymnasium(envs: int, frames: int, seconds: float) -> None:
    import gymnasium
    import numpy as np
    import torch
    from gymnasium.wrappers import FrameStackObservation

    pictures = _pictures(envs)

    class Still(gymnasium.Env):
        """Costs nothing itself: shows prepared frames."""

        observation_space = gymnasium.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, index: int) -> None:
            self.frames = [picture[index] for picture in pictures]
            self.turn = 0

        def reset(self, **_options: Any) -> Any:
            return self.frames[0], {}

        def step(self, _action: Any) -> Any:
            self.turn += 1
            return self.frames[self.turn % 4], 0.0, False, False, {}

    made = [lambda i=i: FrameStackObservation(Still(i), frames) for i in range(envs)]
    vector = gymnasium.vector.SyncVectorEnv(made, copy=False)
    vector.reset()
    actions = np.zeros(envs, np.int64)
    normalize = _best_torch((envs, frames, SIZE, SIZE, 3), (2, 3))
    queues = envs * frames * SIZE * SIZE * 3
    _run(lambda _: normalize(torch.from_numpy(vector.step(actions)[0])), lambda: queues, seconds)


def _stack_float_ring(envs: int, frames: int, seconds: float) -> None:
    import torch

    pictures = [torch.from_numpy(picture) for picture in _pictures(envs)]
    ring = torch.zeros(frames, envs, SIZE, SIZE, 3)

    def step(turn: int) -> Any:
        nonlocal ring
        picture = pictures[turn % 4].float() / 255.0
        picture -= picture.mean(dim=(1, 2), keepdim=True)
        ring = torch.roll(ring, shifts=-1, dims=0)
        ring[-1] = picture
        return ring.permute(1, 2, 3, 0, 4).reshape(envs, SIZE, SIZE, frames * 3).clone()

    _run(step, lambda: ring.nbytes, seconds)


def _normalize_headrace(envs: int, _frames: int, seconds: float) -> None:
    import torch

    from headrace.history import normalize_image

    pictures = [torch.from_numpy(picture) for picture in _pictures(envs)]
    _run(lambda turn: normalize_image(pictures[turn % 4]), lambda: None, seconds)


def _normalize_torch(form: str) -> Callable[[int, int, float], None]:
    def worker(envs: int, _frames: int, seconds: float) -> None:
        import torch

        pictures = [torch.from_numpy(picture) for picture in _pictures(envs)]
        outputs = [torch.empty(pictures[0].shape) for _ in range(2)]

        def naive(turn: int) -> Any:
            scaled = pictures[turn % 4].float() / 255.0
            return scaled - scaled.mean(dim=(1, 2), keepdim=True)

        def preallocated(turn: int) -> Any:
            out = outputs[turn % 2].copy_(pictures[turn % 4]).mul_(1 / 255)
            return out.sub_(out.mean(dim=(1, 2), keepdim=True))

        def integer_mean(turn: int) -> Any:
            picture = pictures[turn % 4]
            mean = picture.sum(dim=(1, 2), keepdim=True).float() / (SIZE * SIZE)
            return outputs[turn % 2].copy_(picture).sub_(mean).mul_(1 / 255)

        forms = dict(zip(TORCH_FORMS, (naive, preallocated, integer_mean), strict=True))
        _run(forms[form], lambda: None, seconds)

    return worker


def _memcpy(envs: int, _frames: int, seconds: float) -> None:
    import numpy as np

    source = np.ones((envs, SIZE, SIZE, 3), np.float32)
    targets = [np.zeros_like(source) for _ in range(2)]
    _run(lambda turn: np.copyto(targets[turn % 2], source), lambda: None, seconds)


def _whole(frames: int, kind: str = "whole") -> Callable[[int, int, float], None]:
    def worker(envs: int, _frames: int, seconds: float) -> None:
        import torch

        import headrace
        from headrace.history import normalize_image

        before = _resident("VmRSS")
        overrides = {"frame_stack": frames, "normalize": kind == "normalized"}
        env = headrace.make("cartpole-camera", envs, threads=2, overrides=overrides)
        env.reset(seed=0)
        actions = torch.rand(env.action_space.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        kept: Any = None

        def step() -> None:
            nonlocal kept
            image = env.step(actions).obs["policy"]
            kept = normalize_image(image) if kind == "by hand" else image

        for _ in range(3):
            step()

        def measure() -> float:
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                step()
                steps += 1
            return steps * envs / (time.perf_counter() - start)

        serve({"held": None, "peak": _resident("VmRSS") - before}, measure)

    return worker


def _sensor(name: str) -> Callable[[int, int, float], None]:
    def worker(envs: int, _frames: int, seconds: float) -> None:
        import torch

        import headrace
        from headrace.envs import ImageNoise

        given = SENSORS[name]
        noise = {key.removeprefix("noise."): value for key, value in given.items() if key.startswith("noise.")}
        settings = {key: value for key, value in given.items() if not key.startswith("noise.")}
        settings |= {"noise": ImageNoise(**noise)} if noise else {}
        settings |= {"camera.width": SIZE, "camera.height": SIZE}
        overrides = {f"images.policy.{key}": value for key, value in settings.items()}
        env = headrace.make("cartpole-camera-terms", envs, threads=2, overrides=overrides)
        env.reset(seed=0)
        actions = torch.rand(env.action_space.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
        kept: Any = None
        for _ in range(5):
            kept = env.step(actions)

        def measure() -> float:
            nonlocal kept
            steps, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                kept = env.step(actions)
                steps += 1
            return steps * envs / (time.perf_counter() - start)

        serve({"held": None, "peak": None}, measure)

    return worker


_WORKERS: dict[str, Callable[[int, int, float], None]] = {
    "headrace": _stack_headrace,
    "sb3": _stack_sb3,
    "torchrl": _stack_torchrl,
    "gymnasium": _stack_gymnasium,
    "float ring": _stack_float_ring,
    "normalize": _normalize_headrace,
    **{form: _normalize_torch(form) for form in TORCH_FORMS},
    "memcpy": _memcpy,
    **{f"{kind} {frames}": _whole(frames, kind) for frames in (1, 2, 4) for kind in ("whole", "normalized", "by hand")},
    **{name: _sensor(name) for name in SENSORS},
}


if __name__ == "__main__":
    sys.exit(main())
