"""One library in a process of its own: opens sections, measures rounds of them and closes them into bundle files, as
``libraries.py`` asks, a line of JSON each.

A section is a generator: it makes what it needs, yields, and does a round each time it is sent True; False ends it.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

Section = Generator[None, bool, None]

TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "cartpole": (256, {}),
    "ant": (64, {}),
    "cartpole-camera": (32, {"pixels": 48, "frame_stack": 2, "color": "gray"}),
    "pusher-solid": (64, {}),
}
"""Task → environments and overrides."""
BEST, WINDOW, LEARNING_ENVS = 300.0, 50, 64
SAMPLES = 200
"""A statistic with more loses them; those that the table reads have fewer."""
ITERATIONS, PAIRS, STEPS = 2, 4, 60
"""In a round: iterations of speed, pairs of rollouts of overhead, steps of play."""


def main(library: str) -> int:
    import warnings

    warnings.simplefilter("ignore")  # the libraries' deprecations

    from headrace.libraries import library_run
    from headrace.libraries.registry import library as spec_of

    spec_of(library).require()
    sys.argv = ["python", "benchmarks/libraries.py"]  # bundles say what a user would type
    sections: dict[str, Section] = {}
    with library_run(seed=0):
        print(json.dumps({"ready": {}}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            name = asked["name"]
            match asked["question"]:
                case "open":
                    sections[name] = _section(library, name.partition("-")[0], asked)
                    next(sections[name])
                case "round":
                    sections[name].send(True)
                case _:
                    next(_ended(sections.pop(name)))
            print(json.dumps({"done": name}), flush=True)
    return 0


def _section(library: str, part: str, asked: dict[str, Any]) -> Section:
    folder = Path(asked["folder"])
    match part:
        case "speed":
            return _speed(library, asked["task"], folder)
        case "learning":
            return _learning(library, asked["iterations"], folder)
        case "overhead":
            return _overhead(library, folder)
        case _:
            return _play(asked["checkpoint"], folder, whole=asked["whole"])


def _ended(section: Section) -> Generator[None]:
    try:
        section.send(False)
    except StopIteration:
        yield


class _Clock:
    """Seconds that a section worked: it stands still while others are measured."""

    def __init__(self) -> None:
        self._worked, self._since = 0.0, 0.0
        self._running = False

    def __call__(self) -> float:
        return self._worked + (time.perf_counter() - self._since if self._running else 0.0)

    def __enter__(self) -> None:
        self._since, self._running = time.perf_counter(), True

    def __exit__(self, *_: object) -> None:
        self._worked, self._running = self(), False


@contextmanager
def _benchmark(
    builder: Any, folder: Path, task: str, num_envs: int, *, library: str, seed: int = 0, **more: Any
) -> Generator[None]:
    """A run that writes a bundle when its block ends."""
    from headrace.bench.benchmark import Benchmark, RunSettings
    from headrace.bench.capture import environment_variables
    from headrace.bench.schema import RunConfig

    config = RunConfig(
        physics_backend="none" if task == "nothing" else "mujoco",
        rendering_backend="native" if "camera" in task else None,
        device="cpu",
        actions="policy",
        environment=environment_variables(),
        **more,
    )
    settings = RunSettings(task=task, num_envs=num_envs, seed=seed, config=config, framework=library)
    with Benchmark(builder, settings, output=folder) as run:
        yield
    for path in run.paths:
        path.write_text(json.dumps(_small(json.loads(path.read_text()))) + "\n")


def _small(value: Any) -> Any:
    """A bundle fit for a repository: without long lists of samples, whose statistics stay, and the machine's name."""
    if isinstance(value, list):
        return [_small(item) for item in value]
    if not isinstance(value, dict):
        return float(f"{value:.6g}") if isinstance(value, float) else value
    if len(value.get("samples") or ()) > SAMPLES:
        value = {**value, "samples": None, "sampling": None}
    return {name: "benchmark" if name == "hostname" else _small(item) for name, item in value.items()}


def _described(library: str, settings: Any) -> Any:
    from headrace.bench.capture import describe_library
    from headrace.libraries.training import plain

    return describe_library(library, algorithm="PPO", settings=plain(asdict(settings)))


def _peak_megabytes() -> float:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) / 1024


def _iterated(builder: Any, learner: Any, num_envs: int, learning: list[float]) -> Any:
    """One iteration, told to the builder; what it learned from a second goes to ``learning``. Returns its episodes."""
    times, finished, frames = learner.iterate(), learner.finished(), learner.settings.steps * num_envs
    builder.iteration(
        frames=frames,
        collection_s=times.collect,
        learning_s=times.learn,
        rewards=finished.returns.tolist(),
        lengths=finished.lengths.tolist(),
        successes=None if finished.success is None else finished.success.tolist(),
    )
    learning.append(frames / times.learn)
    return finished


def _speed(library: str, task: str, folder: Path) -> Section:
    import headrace
    from headrace.bench.builders import TrainingBuilder
    from headrace.learning import PPOCfg
    from headrace.libraries import make_learner

    num_envs, overrides = TASKS[task]
    clock, learning, settings = _Clock(), list[float](), PPOCfg()
    builder = TrainingBuilder(clock=clock)
    builder.library = _described(library, settings)
    with _benchmark(builder, folder, task, num_envs, library=library, overrides=overrides):
        env = headrace.make(task, num_envs, seed=0, overrides=overrides)
        learner = make_learner(library, env, settings)
        learner.iterate()
        learner.finished()
        builder.begin()
        while (yield):
            with clock:
                for _ in range(ITERATIONS):
                    _iterated(builder, learner, num_envs, learning)
        # the bundle leaves its first iteration out of the times, too
        builder.extra |= {"learning_fps": list(learning)[1:], "peak_memory_mb": _peak_megabytes()}
        learner.close()
        env.close()


def _learning(library: str, iterations: int, folder: Path) -> Section:
    seed = 0
    while (yield):
        _learned(library, seed, iterations, folder.with_name(f"{folder.name}-seed{seed}"))
        seed += 1


def _learned(library: str, seed: int, iterations: int, folder: Path) -> None:
    """A training from its first step on; its bundle has the seconds to the threshold, null where it was not reached."""
    import headrace
    from headrace.bench.builders import TrainingBuilder
    from headrace.learning import PPOCfg
    from headrace.libraries import make_learner
    from headrace.libraries.training import library_run

    recent: deque[float] = deque(maxlen=WINDOW)
    clock, settings = _Clock(), PPOCfg(seed=seed)
    builder = TrainingBuilder(clock=clock)
    builder.library = _described(library, settings)
    reached: float | None = None
    with _benchmark(builder, folder, "cartpole", LEARNING_ENVS, library=library, seed=seed), library_run(seed=seed):
        env = headrace.make("cartpole", LEARNING_ENVS, seed=seed)
        learner = make_learner(library, env, settings)
        builder.begin()
        for _ in range(iterations):
            with clock:
                recent.extend(_iterated(builder, learner, LEARNING_ENVS, []).returns.tolist())
            if reached is None and len(recent) == WINDOW and sum(recent) / WINDOW >= 0.95 * BEST:
                reached = clock()
        builder.extra |= {
            "threshold": 0.95 * BEST,
            "window_episodes": WINDOW,
            "seconds_to_threshold": reached,
            "final_return": sum(recent) / len(recent) if recent else None,
        }
        learner.close()
        env.close()


def _overhead(library: str, folder: Path) -> Section:
    """Rollouts with the adapter and natively, in turn, in pairs whose order turns; collecting alone is timed."""
    from headrace.bench.builders import TrainingBuilder
    from headrace.learning import PPOCfg
    from libraries_nothing import ENVS, both_arms

    settings, clock = PPOCfg(epochs=1), _Clock()  # learning is not timed here
    builder = TrainingBuilder(clock=clock)
    builder.library = _described(library, settings)
    with _benchmark(builder, folder, "nothing", ENVS, library=library):
        arms: dict[str, Callable[[], tuple[float, float]]] = both_arms(library, settings)
        for arm in arms.values():
            arm()
        builder.begin()
        native: list[float] = []
        frames, turn = ENVS * settings.steps, 0
        while (yield):
            turn += 1
            for pair in range(PAIRS):
                for name in arms if (pair + turn) % 2 else reversed(arms):
                    with clock:
                        collect, learn = arms[name]()
                        if name == "adapter":
                            builder.iteration(frames=frames, collection_s=collect, learning_s=learn)
                        else:
                            native.append(frames / collect)
        builder.extra |= {"native_collection_fps": list(native), "pairs_per_round": PAIRS}


class _Taken:
    """An environment that keeps the actions it is given."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.actions: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, actions: Any, observe: Any = None) -> Any:
        self.actions.append(actions.clone())
        return self._env.step(actions, observe)


def _play(name: str, folder: Path, *, whole: bool) -> Section:
    """A published checkpoint, and after each stretch the same actions from the same state without a policy."""
    import headrace
    from headrace._published import find_published_file, read_published
    from headrace.bench.builders import PlayBuilder
    from headrace.bench.measured.play import roll
    from headrace.bench.schema import CheckpointInfo, EpisodePlan, PolicyDescriptor
    from headrace.policies.load_policy import find_policy, load_policy
    from headrace.policies.protocol import has_memory

    entry = read_published()[name]
    task = entry["task"]
    num_envs = TASKS[task][0]
    path = find_published_file(name)
    file = find_policy(path, task)
    env = headrace.make(task, num_envs, seed=1, overrides=file.overrides, autoreset="disabled", final_obs=False)
    policy = load_policy(path, env)
    limit = env.task.cfg.episode_length
    plan = EpisodePlan(
        kind="episodes" if whole else "steps",
        episodes_planned=num_envs if whole else None,
        num_steps=None if whole else STEPS,
        max_episode_length=limit,
    )
    builder = PlayBuilder(plan=plan)
    builder.checkpoint = CheckpointInfo(
        path=path.name, source="published", sha256=entry["sha256"], library=entry["library"], task=task
    )
    kind = "chunk" if file.kind == "chunk" else "checkpoint"
    builder.policy = PolicyDescriptor(kind=kind, name=name, deterministic=True, recurrent=has_memory(policy))
    with _benchmark(builder, folder, task, num_envs, library=entry["library"], overrides=file.overrides):
        # what it achieves: an episode of each environment
        roll(env, policy, builder, episodes=num_envs if whole else None, num_steps=None if whole else STEPS)
        rates: dict[str, list[float]] = {"play_fps": [], "bare_fps": []}
        while (yield):
            taken = _Taken(env)
            begin = time.perf_counter()
            roll(taken, policy, PlayBuilder(plan=plan), num_steps=STEPS)
            between = time.perf_counter()
            env.reset(seed=1)
            again = time.perf_counter()
            for actions in taken.actions:
                step = env.step(actions)
                if "ends" in step.info:
                    env.reset(options={"reset_mask": step.terminated | step.truncated})
            rates["bare_fps"].append(STEPS * num_envs / (time.perf_counter() - again))
            rates["play_fps"].append(STEPS * num_envs / (between - begin))
        builder.extra |= rates
    env.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
