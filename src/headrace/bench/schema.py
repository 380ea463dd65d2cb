"""The bundles: one typed record per benchmark run, in the shape that Isaac Lab's users know, with more in it.

Conventions: seconds, GB = 2**30 bytes, percent of one core for CPU use (200 is two busy cores), times in ISO 8601 UTC.
Missing is null, never 0.0. Every change of a field bumps :data:`SCHEMA_VERSION`; ``docs/schema`` has the JSON Schema.

One statistic of a bundle: what was measured, how often, how it was spread, and the samples themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self, get_args

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from headrace.statistics import bootstrap_interval, wilson_interval

RESERVOIR = 2000
"""Samples that a statistic keeps at most; ``n`` and the moments are of all of them."""
_BLOCKS = 30
_QUANTILES = {"p5": 0.05, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95, "p99": 0.99}

Better = Literal["higher", "lower"]


class Record(BaseModel):
    """Base of every record in a bundle: unknown fields, NaN and infinity are refused; a record never changes."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,
        use_attribute_docstrings=True,
    )


class Spread(Record):
    """An interval around an estimate."""

    low: float
    high: float
    level: float = 0.95
    method: Literal["block_bootstrap", "wilson"]
    """block_bootstrap: of the mean, over up to 30 blocks of neighboring samples, since neighbors are alike; it tells
    the noise within this run, not between runs. wilson: of a rate."""


class Percentiles(Record):
    """Of all samples, by linear interpolation."""

    p5: float
    p25: float
    p50: float
    p75: float
    p95: float
    p99: float


class Sampling(Record):
    """Which samples were kept."""

    rule: Literal["all", "reservoir"]
    """reservoir: a uniform draw without replacement of `capacity` samples, in order of time."""
    capacity: int | None = None
    seed: int | None = None


class Statistic(Record):
    """A measured quantity. Missing is null: a statistic of nothing does not exist."""

    n: int | None = None
    """Number of samples."""
    mean: float
    std: float | None = None
    """Sample standard deviation (n - 1); null for one sample."""
    peak: float | None = None
    """The largest sample."""
    minimum: float | None = None
    percentiles: Percentiles | None = None
    interval: Spread | None = None
    """Of the mean; null for fewer than two samples."""
    samples: list[float] | None = None
    sampling: Sampling | None = None
    unit: str | None = None
    better: Better | None = None
    """Which direction is an improvement, for comparisons."""

    @classmethod
    def of(
        cls, values: Iterable[float], *, unit: str | None = None, better: Better | None = None, seed: int = 0
    ) -> Self | None:
        """Return the statistic of samples in order of time; None for no samples at all. NaN and infinity are
        refused."""
        data = np.fromiter(values, dtype=np.float64)
        count = len(data)
        if not count:
            return None
        if not np.isfinite(data).all():
            bad = int((~np.isfinite(data)).sum())
            raise ValueError(f"Statistic: expected finite samples, got {bad} of {count} that are not; leave them out")
        kept, sampling = data, Sampling(rule="all")
        if count > RESERVOIR:
            chosen = np.random.default_rng(seed).choice(count, RESERVOIR, replace=False)
            kept, sampling = data[np.sort(chosen)], Sampling(rule="reservoir", capacity=RESERVOIR, seed=seed)
        quantiles = np.quantile(data, list(_QUANTILES.values()))
        return cls(
            n=count,
            mean=float(data.mean()),
            std=float(data.std(ddof=1)) if count > 1 else None,
            peak=float(data.max()),
            minimum=float(data.min()),
            percentiles=Percentiles(**dict(zip(_QUANTILES, map(float, quantiles), strict=True))),
            interval=_mean_interval(data) if count > 1 else None,
            samples=[float(value) for value in kept],
            sampling=sampling,
            unit=unit,
            better=better,
        )


class Proportion(Record):
    """A rate of whole things, such as episodes that succeeded."""

    rate: float
    successes: int | None = None
    """Null only in bundles of schema 1.x, which did not keep it."""
    n: int | None = None
    """Null only in bundles of schema 1.x, which did not keep it."""
    interval: Spread | None = None

    @classmethod
    def of(cls, successes: int, n: int) -> Self | None:
        """Return the rate with Wilson's interval; None where there was nothing to count."""
        if not n:
            return None
        rate = wilson_interval(successes, n)
        interval = Spread(low=rate.low, high=rate.high, method="wilson")
        return cls(rate=rate.value, successes=successes, n=n, interval=interval)


def _mean_interval(data: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Spread:
    """Percentile bootstrap over means of blocks."""
    blocks = np.array_split(data, min(len(data), _BLOCKS))
    found = bootstrap_interval(np.array([block.mean() for block in blocks]))
    return Spread(low=found.low, high=found.high, method="block_bootstrap")


SCHEMA_VERSION = "3.2"
"""Major.minor of what is written. Schema 3.0, of 0.2, is read, too."""

Kind = Literal["runtime", "startup", "training", "play"]
Status = Literal["running", "completed", "interrupted", "crashed"]
TimingMode = Literal["host_return", "synchronized"]
Actions = Literal["random", "zero", "policy"]


class GpuDeviceInfo(Record):
    """One GPU."""

    name: str
    mem_gb: float
    compute_cap: str | None = None


class Hardware(Record):
    """The machine."""

    hostname: str | None = None
    """This and other fields of it are null for evaluations, which keep less."""
    gpu_devices: list[GpuDeviceInfo]
    cpu_name: str
    cpu_count: int | None = None
    """Logical cores of the machine."""
    ram_gb: float | None = None
    cpu_physical: int | None = None
    """Physical cores of the machine."""
    cpu_usable: int | None = None
    """Logical cores that this process may run on."""
    cpu_governor: str | None = None
    """Frequency governor; null where it cannot be read."""
    load_average: tuple[float, float, float] | None = None
    """1, 5 and 15 minutes, when the run began."""
    platform: str | None = None


class Versions(Record):
    """What ran. The git state is that of the user's project: the folder the command was started in."""

    headrace: str | None = None
    python: str | None = None
    torch: str | None = None
    numpy: str | None = None
    mujoco: str | None = None
    gymnasium: str | None = None
    packages: dict[str, str]
    """Other packages that a result can depend on, by distribution name."""
    git_commit: str | None = None
    git_branch: str | None = None
    git_dirty: bool | None = None
    """Whether files were changed or not tracked."""
    git_dirty_files: list[str] | None = None
    """Those files, at most 50; null if not known."""
    headrace_commit: str | None = None
    """Of the checkout that headrace was imported from, + if changed; null elsewhere."""


class RunConfig(Record):
    """Settings that change what is measured; a comparison refuses runs that differ here."""

    physics_backend: str
    rendering_backend: str | None = None
    presets: list[str] = Field(default_factory=list)
    overrides: dict[str, JsonValue] = Field(default_factory=dict)
    """Task settings changed with --set."""
    device: str | None = None
    threads: int | None = None
    """Physics threads, or workers of a bridge, asked for; null for all cores."""
    executor: str | None = None
    """What steps a bridged environment."""
    actions: Actions | None = None
    playing: dict[str, JsonValue] = Field(default_factory=dict)
    """How an evaluation played the policy's chunks: execute, latency, strict_size, …; empty otherwise."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables that matter and were set, such as OMP_NUM_THREADS."""


class RunError(Record):
    """What ended a crashed run."""

    type: str
    message: str
    traceback: list[str]


class ResumedFrom(Record):
    """The run that this one continues."""

    path: str
    """The checkpoint."""
    run_id: str | None = None
    iteration: int | None = None
    """Iterations that it had completed."""
    changed: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings that differ: name → [before, now]."""


class RunIdentity(Record):
    """Which run this is and how it went."""

    run_id: str
    framework: str | None = None
    """RL library; null for runs without one."""
    config: RunConfig
    task: str
    seed: int
    start_time_utc: str
    end_time_utc: str
    duration_s: float
    status: Status
    """An early stop is completed, with a status_reason; running: not ended yet, or ended without a word."""
    num_envs: int | None = None
    """Null only in bundles of Isaac Lab."""
    recipe: dict[str, JsonValue] | None = None
    """What makes the environments again, as `EnvRecipe.from_json` reads it."""
    max_iterations: int | None = None
    status_reason: str | None = None
    error: RunError | None = None
    command: list[str] = Field(default_factory=list)
    """The command line, as given."""
    label: str | None = None
    """A name for the side of a comparison, such as `before`."""
    sweep_id: str | None = None
    repetition: int | None = None
    """Which repetition of a sweep, from 0."""
    order_seed: int | None = None
    """Of the random order of the sides of a sweep; null where the order was not drawn."""
    resumed_from: ResumedFrom | None = None


class LibraryDescriptor(Record):
    """The RL library of a run and the settings it was given."""

    name: str
    """As in --library: rsl_rl, rl_games, skrl, sb3, headrace."""
    version: str | None = None
    algorithm: str | None = None
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Hyper-parameters as the library got them."""
    differences: list[str] = Field(default_factory=list)
    """Where the library cannot do what the shared settings say."""


class LearningCurve(Record):
    """One quantity over the iterations."""

    final_raw: float | None = None
    """The last iteration in which an episode finished."""
    final_ema: float | None = None
    series_per_iter: list[float | None] | None = None
    """Raw mean over the episodes that finished in each iteration; null where none did."""
    series_ema: list[float | None] | None = None
    """Exponential moving average; holds its value over iterations without episodes."""


class Learning(Record):
    """Curves, all with one entry per iteration. Series may be null in bundles of 0.2."""

    ema_alpha: float
    reward: LearningCurve | None = None
    """Undiscounted return of finished episodes."""
    ep_length: LearningCurve | None = None
    success_rate: LearningCurve | None = None
    """Null where the task has no success measure."""
    frames: list[int] | None = None
    """Frames collected up to the end of each iteration."""
    wall_time_s: list[float] | None = None
    """Seconds since training began, likewise."""
    episodes: list[int] | None = None
    """Episodes finished in each iteration."""


class TrainingTime(Record):
    """Seconds of a training, which add up to its wall time."""

    collection: float
    learning: float
    other: float
    """Checkpoints, logging, everything between."""


class EarlyStop(Record):
    """The success rule of a training."""

    enabled: bool
    success_threshold: float | None = None
    success_window: int | None = None
    """Iterations that the rule looks at."""
    rule: Literal["mean", "each"] | None = None
    """mean: over all episodes of the window. each: in every iteration of it, as Isaac Lab has it."""
    reached: bool
    iteration: int | None = None
    """Iterations completed when the rule was met."""


class CheckpointInfo(Record):
    """The file a policy is from, or went to."""

    path: str
    """The local file; for a callable its module:name."""
    source: Literal["explicit", "latest", "best", "published", "saved"]
    uri: str | None = None
    """Where it was fetched from."""
    sha256: str | None = None
    library: str | None = None
    task: str | None = None
    iteration: int | None = None
    score: float | None = None
    """Mean return that the training reported for it."""


class PolicyDescriptor(Record):
    """How actions were chosen."""

    kind: str
    """Checkpoint, torchscript, onnx, callable or chunk."""
    name: str
    deterministic: bool | None = None
    """The mean action, not a sample; null where it is not known."""
    recurrent: bool = False
    policy_id: str | None = None
    """Identity of what acted, as journals of evaluations have it."""


class EpisodeCounts(Record):
    """How episodes ended. Those still running at the end are unfinished, and nothing else counts them."""

    completed: int
    terminated: int | None = None
    truncated: int | None = None
    diverged: int | None = None
    unfinished: int | None = None


class EpisodePlan(Record):
    """What was to be played."""

    kind: Literal["episodes", "steps"]
    """episodes: each of a list counted once. steps: by the clock."""
    episodes_planned: int | None = None
    num_steps: int | None = None
    first_episode_id: int | None = None
    max_episode_length: int | None = None
    shorter_than_episode: bool = False
    """num_steps is less than an episode may take; in bundles of 0.2."""


class PerEpisode(Record):
    """Completed episodes in the order of their ids: what two plays of the same episodes are compared by."""

    episode_ids: list[int]
    rewards: list[float]
    lengths: list[int]
    successes: list[bool | None] | None = None


class StartupTime(Record):
    """Seconds of each phase before the first measured step."""

    app_launch: float | None = None
    env_creation: float | None = None
    first_step: float | None = None
    python_imports: float | None = None
    task_config: float | None = None


class Warmup(Record):
    """The steps before measuring, kept up until the step time was steady; of a training, its first iteration."""

    steps: int
    """Steps of the batch; of a training, iterations."""
    seconds: float
    steady: bool | None = None
    """false: the limit was reached first, and the figures may include warming up. null: not judged."""
    rule: str
    block_medians_s: list[float]
    """Median step time of each block, in order."""


class EnvironmentStepTiming(Record):
    """Where the time of ``env.step`` goes."""

    environment_step_time_s: Statistic
    environment_step_fps: float
    """Effective rate: frames / seconds in env.step."""
    simulation_step_time_s: Statistic | None = None
    """Physics; null where an env does not tell."""
    outside_simulation_step_time_s: Statistic | None = None
    outside_simulation_step_fraction: float | None = None
    """Of the total time."""
    environment_step_calls: int
    simulation_step_calls: int | None = None
    measurement_mode: TimingMode
    """host_return: until the call returned. synchronized: until the device had done the work."""
    render_step_time_s: Statistic | None = None
    task_step_time_s: Statistic | None = None
    """Observations, rewards, resets."""


class Runtime(Record):
    """How long things took. A frame is one step of one environment. Rates are totals over totals, never means of rates:
    samples are kept of times only."""

    startup_time_s: StartupTime
    iterations_completed: int
    """Training iterations, that of the warm-up included; measured batch steps where there is no training."""
    total_wall_time_s: float
    """Of the measured part, without startup and warm-up."""
    steps_per_iteration: int | None = None
    """Frames of one iteration, all environments together."""
    iteration_time_s: Statistic | None = None
    collection_fps: float | None = None
    """Effective rate: frames / seconds of stepping and acting."""
    total_fps: float | None = None
    """Effective rate: frames / total_wall_time_s."""
    iterations_per_s: float | None = None
    environment_step_timing: EnvironmentStepTiming | None = None
    frames: int | None = None
    """Measured frames, all environments together."""
    collection_time_s: Statistic | None = None
    """Stepping and acting in each iteration of a training."""
    warmup: Warmup | None = None
    episodes: EpisodeCounts | None = None


class Resources(Record):
    """What the run used, sampled beside it: the process and its children."""

    gpu_util_pct: Statistic | None = None
    gpu_mem_gb: Statistic | None = None
    cpu_util_pct: Statistic | None = None
    ram_gb: Statistic | None = None
    sample_interval_s: float | None = None
    problems: list[str] = Field(default_factory=list)
    """What could not be sampled, and why."""
    cpu_s: float | None = None
    """Processor seconds of the measured part, all threads."""
    instructions: int | None = None
    """Retired in user space, likewise; null where the machine does not count them."""


SAMPLED = {"gpu_util_pct": "%", "gpu_mem_gb": "GB", "cpu_util_pct": "%", "ram_gb": "GB"}
"""The fields of :class:`Resources` that are sampled → their units."""


class BundleBase(Record):
    """What every bundle has."""

    run: RunIdentity
    versions: Versions
    hardware: Hardware
    extra: dict[str, JsonValue] = Field(default_factory=dict)
    """Anything else; never read by headrace."""
    schema_version: str = SCHEMA_VERSION


class RuntimeBundle(BundleBase):
    """A run of ``headrace runtime``: the environment alone."""

    kind: Literal["runtime"] = "runtime"
    runtime: Runtime
    resources: Resources


class TrainingBundle(BundleBase):
    """A training run."""

    kind: Literal["training"] = "training"
    runtime: Runtime
    resources: Resources
    learning: Learning
    success_rate: Proportion | None = None
    """Over the episodes of the last `success_window` iterations."""
    checkpoint_path: str | None = None
    video_path: str | None = None
    library: LibraryDescriptor | None = None
    time_split_s: TrainingTime | None = None
    early_stop: EarlyStop | None = None
    checkpoint: CheckpointInfo | None = None


class PlayBundle(BundleBase):
    """A run of a trained policy. Rewards, lengths and successes are those of completed episodes only."""

    kind: Literal["play"] = "play"
    runtime: Runtime
    resources: Resources
    success_rate: Proportion | None = None
    reward: Statistic | None = None
    ep_length: Statistic | None = None
    checkpoint_path: str | None = None
    video_path: str | None = None
    library: LibraryDescriptor | None = None
    policy: PolicyDescriptor | None = None
    checkpoint: CheckpointInfo | None = None
    plan: EpisodePlan | None = None
    per_episode: PerEpisode | None = None
    """Every completed episode, for paired comparisons."""


class ProfiledFunction(Record):
    """One function of a profile."""

    name: str
    own_time_s: float
    cum_time_s: float
    calls: int


class StartupPhase(Record):
    """One phase of a start-up, profiled."""

    total_time_s: float
    top_functions: list[ProfiledFunction]


class StartupConfig(Record):
    """What the profile was asked for."""

    top_n: int
    whitelist: dict[str, list[str]] | None = None
    """Phase → fnmatch patterns of functions to report, in bundles of 0.2."""


class StartupBundle(BundleBase):
    """A run of ``headrace startup``: where the time before the first step goes. Times include cProfile's own cost."""

    kind: Literal["startup"] = "startup"
    phases: dict[str, StartupPhase]
    config: StartupConfig
    unprofiled_s: StartupTime | None = None
    """The same phases in a process of their own, without the profiler."""


Bundle = RuntimeBundle | StartupBundle | TrainingBundle | PlayBundle
"""The result of one run, of any kind."""
BUNDLES: dict[Kind, type[Bundle]] = {bundle.model_fields["kind"].default: bundle for bundle in get_args(Bundle)}
"""Kind of run → the class of its bundle."""


def with_label(bundle: Bundle, label: str | None) -> Bundle:
    """Return the bundle with a name for its side of a comparison."""
    return bundle.model_copy(update={"run": bundle.run.model_copy(update={"label": label})})


def bundle_text(bundle: Bundle) -> str:
    """Return the JSON of a bundle."""
    return bundle.model_dump_json(indent=1) + "\n"
