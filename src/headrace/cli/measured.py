"""``headrace run``, ``runtime``, ``startup``, ``train`` and ``play``: step, measure, train and play a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from rich.console import Console
from rich.table import Table

from headrace._progress import draws_bars, progress_bar, say
from headrace.bench import SuccessRule
from headrace.bench.benchmark import USUAL_ENVS, RunCfg
from headrace.bench.measured.train import train
from headrace.cli.records import Command, Only, Positional, keywords, make_record, show_bundle
from headrace.envs.recipe import EnvKeywords
from headrace.errors import ConfigError
from headrace.learning.ranks import read_ranks
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.bench.measured.run import SteppingResult
    from headrace.learning import PPOCfg
    from headrace.libraries.training import Iteration

Task = Annotated[str, Positional("TASK")]
Result = Annotated[RunCfg, Only("output", "formatters", "label")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Step TASK with random, zero or your own actions and print env-steps per second, where the time went and how the
    episodes ended. With --suspend-fraction F that share of the environments is frozen, at no cost."""

    task: Task
    env: EnvKeywords
    num_steps: int = 300
    policy: str = "random"
    """random, zero, module:name of a function of the observation groups, a checkpoint of a training, its directory,
    latest or best of runs/, a TorchScript or ONNX file."""
    suspend_fraction: float = 0.0
    """Share of the environments to freeze, 0 to 1."""
    record: str | None = None


def _run(given: RunOptions) -> int:
    from headrace.bench.measured.run import run

    with progress_bar("stepping", given.num_steps) as update:
        result = run(**keywords(given), on_progress=update)
    Console().print(_table(result, given.record))
    return 0


def _table(result: SteppingResult, recorded_in: str | None) -> Table:
    acting = result.num_envs - result.suspended
    table = Table(title=f"{result.task}: {acting} of {result.num_envs} environments acting", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("env-steps per second", f"{result.steps_per_second:,.0f}")
    table.add_row("milliseconds per step of the batch", f"{result.seconds / result.num_steps * 1e3:.2f}")
    for stage, spent in result.stages.items():
        table.add_row(f"  in {stage}", f"{spent / result.seconds:.0%}")
    table.add_row("episodes finished", f"{result.episodes:,}")
    for name, value, form in (
        ("mean return", result.mean_return, ",.2f"),
        ("mean length", result.mean_length, ",.1f"),
        ("success rate", result.success_rate, ".1%"),
    ):
        if value is not None:
            table.add_row(name, format(value, form))
    table.add_row("simulations that diverged", f"{result.divergences:,}")
    table.add_row("a suspended environment costs", result.suspension_cost)
    if result.recorded is not None:
        table.add_row("episodes recorded", f"{result.recorded:,} in {recorded_in}")
        table.add_row("unfinished ones, discarded", f"{result.abandoned:,}")
    return table


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Step TASK with random or zero actions, warm up until the step time is steady, then measure each step: where its
    time goes (physics, rendering, task), CPU and memory. Writes runtime.json, also after Ctrl-C or a crash. Compare
    such files with 'headrace compare'."""

    task: Task
    env: EnvKeywords
    run: Result
    num_steps: int = 1000
    warmup_steps: int = 50
    actions: Literal["random", "zero"] = "random"
    """How actions are chosen."""
    timing: Literal["host_return", "synchronized"] = "host_return"
    """host_return: until env.step returned; synchronized: until the device has done the work; no difference on a
    CPU."""


def _runtime(given: RuntimeOptions) -> int:
    from headrace.bench.measured.run import runtime

    result = runtime(**keywords(given), progress=progress_bar)
    show_bundle(result.bundle, result.paths)
    return 0


@dataclass(frozen=True, kw_only=True)
class StartupOptions:
    """Start TASK in fresh processes and profile each phase: python_imports, task_config, env_creation and first_step
    (reset included). Writes startup.json with the functions that cost most, and the same times without the
    profiler."""

    task: Task
    env: EnvKeywords
    run: Result
    top_n: int = 20
    """Functions to keep of each phase."""


def _startup(given: StartupOptions) -> int:
    from headrace.bench.measured.run import startup

    result = startup(**keywords(given), progress=progress_bar)
    show_bundle(result.bundle, result.paths)
    return 0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Train PPO on TASK with the same network, batch, epochs and learning rate whatever the library, or, with --agent,
    what the library's own configuration says. Writes checkpoints
    (last, best) and training.json with the learning curves, also after Ctrl-C or a crash. 'headrace play TASK' then
    finds the newest of them."""

    task: Task
    env: EnvKeywords
    run: RunCfg
    library: str | None = None
    iterations: int = 100
    """Rollouts to collect and learn from."""
    check_success: bool = False
    """Stop early once the task is solved."""
    rule: SuccessRule | None = None
    ppo: Mapping[str, object] | None = None
    """A setting of PPO, for example steps=24 or learning_rate=3e-4."""
    agent: str | None = None
    """YAML or JSON file with the library's own configuration, instead of --ppo."""
    film: Annotated[FilmCfg, Only("video", "interval", "renderer")]
    resume_from: str | None = None
    """Directory of an earlier run, to continue from its last checkpoint with everything that it was given; options
    given here are applied on top, and shown."""


def _train(given: TrainOptions) -> int:
    if given.rule is not None and not given.check_success:
        raise ConfigError("--success-threshold, --success-window, --success-rule: expected --check-success with them")
    count = 0  # iterations that are complete
    output: Path | None = None
    rank, _ = read_ranks()

    def begin(directory: Path) -> None:
        nonlocal output
        output = directory
        if not rank:  # of several processes, the first speaks
            say(f"checkpoints go to {directory / 'checkpoints'}", stderr=True)

    with progress_bar(f"training with {given.library or 'headrace'}", given.iterations) as update:
        shown = Console(stderr=True)

        def after(done: Iteration) -> None:
            nonlocal count
            count += 1
            if draws_bars(shown):
                update(count)
            elif not rank:
                returns = (
                    f"mean return {done.finished.returns.mean():,.2f}" if len(done.finished) else "no episode ended"
                )
                say(f"iteration {count} of {given.iterations}: {returns}, {sum(done.times):.2f} s", stderr=True)

        try:
            settings = keywords(given)
            rule = settings.pop("rule") or SuccessRule()
            stop = rule if settings.pop("check_success") else None
            settings["ppo"] = _ppo(given.ppo, given.resume_from)
            result = train(**settings, stop=stop, on_begin=begin, on_iteration=after)
        except KeyboardInterrupt:
            if count:  # else there is no checkpoint
                more = f"{given.task} --resume-from {output} --iterations {given.iterations - count or 1}"
                say(f"continue with: headrace train {more}", stderr=True)
            raise
    if rank:
        return 0
    show_bundle(result.bundle, result.paths)
    if (came_from := result.bundle.run.resumed_from) is not None:
        for name, change in came_from.changed.items():
            before, now = cast("list[object]", change)
            say(f"changed from the resumed run: {name} {before!r} → {now!r}", stderr=True)
    return 0


def _ppo(settings: Mapping[str, object] | None, resume_from: str | None) -> PPOCfg | None:
    """Return the settings of PPO, of a resumed run with those given instead; None where none are, so that torch is not
    imported for them."""
    if settings is None:
        return None
    from headrace.learning import PPOCfg

    made = make_record(PPOCfg, settings, "PPO setting", "--ppo", without="seed")
    if resume_from is None:
        return made
    from headrace.libraries.training import read_settings

    earlier = replace(read_settings(Path(resume_from)), seed=made.seed)
    return replace(earlier, **{name: getattr(made, name) for name in settings})


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """Play TASK with a checkpoint and write play.json: reward, length and success of completed episodes, per
    environment, and what they cost. Without --policy the newest training in runs/ is played, or else the checkpoint
    that we publish for the task."""

    task: Task
    env: EnvKeywords
    run: Result
    policy: str | None = None
    """A file, a URI, latest, best, published, a TorchScript or ONNX file, or module:name of a function of the
    observation groups or of a chunk policy (default: the newest training in runs/, else the published one)."""
    library: str | None = None
    episodes: int | None = None
    num_steps: int | None = None
    warmup_steps: int = 10
    stochastic: bool = False
    """Sample actions instead of the policy's mean."""
    film: Annotated[FilmCfg, Only("video", "renderer")]
    trust_checkpoint: bool = False
    """Load a file that holds more than weights, which can execute arbitrary code; load only files you trust."""


def _play(given: PlayOptions) -> int:
    from headrace.bench.measured.play import play

    settings = keywords(given)
    settings["deterministic"] = not settings.pop("stochastic")
    steps = given.num_steps
    total = steps or given.episodes or given.env.get("num_envs") or USUAL_ENVS
    with progress_bar("episodes" if steps is None else "playing", total) as update:
        result = play(**settings, on_progress=update)
    for note in result.notes:
        say(note, "yellow", stderr=True)
    show_bundle(result.bundle, result.paths)
    return 0


COMMANDS = {
    "play": Command(PlayOptions, _play),
    "run": Command(RunOptions, _run),
    "runtime": Command(RuntimeOptions, _runtime),
    "startup": Command(StartupOptions, _startup),
    "train": Command(TrainOptions, _train),
}
