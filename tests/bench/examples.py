"""One bundle of each kind with every part filled, the same every time."""

from __future__ import annotations

import itertools

from headrace.bench import SuccessRule
from headrace.bench.builders import PlayBuilder, Provenance, RuntimeBuilder, StartupBuilder, StepTimes, TrainingBuilder
from headrace.bench.comparison import Comparison
from headrace.bench.schema import (
    Bundle,
    CheckpointInfo,
    EpisodePlan,
    GpuDeviceInfo,
    Hardware,
    LibraryDescriptor,
    PolicyDescriptor,
    ProfiledFunction,
    Resources,
    RunConfig,
    RunIdentity,
    StartupConfig,
    StartupPhase,
    StartupTime,
    Statistic,
    Versions,
    Warmup,
)


def origin(kind: str = "runtime", *, run_id: str | None = None, **changes: object) -> Provenance:
    """A provenance; ``changes`` are of the run's identity."""
    config = RunConfig(physics_backend="mujoco", rendering_backend=None, overrides={"decimation": 2}, device="cpu")
    run = RunIdentity(
        run_id=run_id or f"{kind}_mujoco_cartpole_20260101-120000-000_seed0",
        framework="skrl" if kind in ("training", "play") else None,
        config=config,
        task="cartpole",
        seed=0,
        start_time_utc="2026-01-01T12:00:00.000Z",
        end_time_utc="2026-01-01T12:00:10.000Z",
        duration_s=10.0,
        status="completed",
        num_envs=4,
        max_iterations=3 if kind == "training" else None,
        command=["headrace", kind, "cartpole"],
    ).model_copy(update=changes)
    versions = Versions(
        headrace="0.1.0",
        python="3.11.9",
        torch="2.13.0",
        numpy="2.4.6",
        mujoco="4.0.0",
        gymnasium="1.4.0",
        packages={"numba": "0.68.1"},
        git_commit="0123456789abcdef",
        git_branch="main",
        git_dirty=False,
    )
    hardware = Hardware(
        hostname="bench",
        cpu_name="A CPU",
        cpu_count=2,
        ram_gb=8.0,
        cpu_physical=1,
        cpu_usable=2,
        gpu_devices=[GpuDeviceInfo(name="A GPU", mem_gb=16.0, compute_cap="8.9")],
        cpu_governor="performance",
        load_average=(0.1, 0.2, 0.3),
        platform="Linux",
    )
    resources = Resources(
        gpu_util_pct=None,
        gpu_mem_gb=None,
        cpu_util_pct=Statistic.of([90.0, 110.0], unit="%"),
        ram_gb=Statistic.of([0.5, 0.75], unit="GB"),
        sample_interval_s=1.0,
        problems=["gpu_util_pct: ModuleNotFoundError: no pynvml"],
    )
    return Provenance(run=run, versions=versions, hardware=hardware, resources=resources)


def filled(steps: StepTimes, seconds: list[float]) -> None:
    """Steps of the given seconds: half physics, a quarter rendering and task each; four frames a step."""
    totals = itertools.accumulate(seconds, initial=0.0)
    stages = [{"physics": t / 2, "render": t / 4, "task": t / 8, "reset": t / 8} for t in totals]
    steps.begin(stages[0])
    for spent, stage in zip(seconds, stages[1:], strict=True):
        steps.add(spent, 4, stage)
    # the loop took exactly the steps and a quarter more
    steps._loops = [0.0, *itertools.accumulate(1.25 * s for s in seconds)]
    steps.sim_calls = len(seconds)


def runtime_bundle(seconds: list[float] | None = None, **changes: object) -> Bundle:
    builder = RuntimeBuilder()
    builder.startup.seconds = {"python_imports": 2.0, "task_config": 0.25, "env_creation": 0.5, "first_step": 0.125}
    builder.steps.warmup = Warmup(steps=50, seconds=0.5, steady=True, rule="as said", block_medians_s=[0.01, 0.01])
    filled(builder.steps, seconds or [0.5, 0.25, 0.5, 0.25])
    builder.episodes.add(2, 12.0, 12, True, "terminated")
    builder.episodes.unfinished = 4
    return builder.build(origin("runtime", **changes))


def training_bundle(**changes: object) -> Bundle:
    builder = TrainingBuilder(rule=SuccessRule(threshold=0.5, window=2), clock=itertools.count(0.0, 2.0).__next__)
    builder.library = LibraryDescriptor(name="skrl", version="2.1.0", algorithm="PPO", settings={"gamma": 0.99})
    builder.checkpoint = CheckpointInfo(path="runs/a/best.pt", source="saved", library="skrl", task="cartpole")
    builder.begin()
    builder.iteration(frames=64, collection_s=1.0, learning_s=0.5)
    builder.iteration(
        frames=64, collection_s=1.0, learning_s=0.5, rewards=[4.0, 8.0], lengths=[4, 8], successes=[False, True]
    )
    builder.iteration(frames=64, collection_s=1.0, learning_s=0.5, rewards=[10.0], lengths=[10], successes=[True])
    builder.end()
    return builder.build(origin("training", **changes))


def play_bundle(**changes: object) -> Bundle:
    plan = EpisodePlan(kind="episodes", episodes_planned=3, num_steps=None)
    builder = PlayBuilder(plan=plan)
    builder.policy = PolicyDescriptor(kind="checkpoint", name="skrl", deterministic=True)
    builder.checkpoint = CheckpointInfo(path="runs/a/best.pt", source="best", sha256="00ff", library="skrl")
    filled(builder.steps, [0.5, 0.25])
    builder.episodes.add(0, 10.0, 10, True, "truncated")
    builder.episodes.add(0, 20.0, 20, False, "terminated")
    builder.episodes.add(3, 3.0, 3, False, "diverged")
    builder.episodes.unfinished = 2
    return builder.build(origin("play", **changes))


def startup_bundle(**changes: object) -> Bundle:
    builder = StartupBuilder(StartupConfig(top_n=2, whitelist={"python_imports": ["torch*"]}))
    builder.phases["python_imports"] = StartupPhase(
        total_time_s=2.0,
        top_functions=[ProfiledFunction(name="torch:<module>", own_time_s=0.5, cum_time_s=1.5, calls=1)],
    )
    builder.unprofiled = StartupTime(python_imports=1.0)
    return builder.build(origin("startup", **changes))


EXAMPLES = {
    "runtime": runtime_bundle,
    "training": training_bundle,
    "play": play_bundle,
    "startup": startup_bundle,
}


STEP = "frametime.environment_step_time_s"


def verdict(found: Comparison, path: str = STEP) -> str | None:
    """What a comparison says of a metric."""
    return next(row.verdict for row in found.rows if row.path == path)
