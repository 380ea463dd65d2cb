"""``headrace.runtime`` and ``headrace.startup``: how fast environments step, and what happens before they do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from headrace._jobs.request import RunRequest, imports_phase
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.bench import RuntimeBuilder, RuntimeBundle, StartupBundle
    from headrace.bench._schema import TimingMode
    from headrace.bench._stepping import WarmupRule
    from headrace.bench._targets import AnyEnv
    from headrace.envs import EnvRecipe

B = TypeVar("B", "RuntimeBundle", "StartupBundle")
ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Makes a bar of a description and a total; within the block it is called with what is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[B]):
    """What a measured run left behind."""

    directory: Path
    bundle: B
    """The content of ``runtime.json`` or ``startup.json``."""
    paths: tuple[Path, ...]
    """The files that were written."""


def runtime(
    task: str | EnvRecipe,
    *,
    num_envs: int | None = None,
    num_steps: int = 1000,
    warmup_steps: int = 50,
    actions: Literal["random", "zero"] = "random",
    timing: TimingMode = "host_return",
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
    presets: Sequence[str | Path] = (),
    threads: int | None = None,
    device: str | None = None,
    sim: str | None = None,
    output: str | Path | None = None,
    formatters: Sequence[str] = ("schema",),
    label: str | None = None,
    progress: ProgressBar | None = None,
) -> RunResult[RuntimeBundle]:
    """Measure how fast an environment steps. ``runtime.json`` is written also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, or a recipe, which then says everything about the environments:
            an argument that says something else is refused.
        num_envs: environments in the batch (64).
        num_steps: measured steps of the batch.
        warmup_steps: steps before measuring, at least; more until the step time is steady.
        actions: what acts.
        timing: ``host_return`` until ``env.step`` returns; ``synchronized`` until the device has done the work.
        seed: of episodes and actions (0).
        overrides: task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``.
        presets: YAML files of overrides, applied before ``overrides``.
        threads: physics threads; None for all cores.
        device: of the tensors (``cpu``).
        sim: the physics: ``mujoco`` or ``warp``.
        output: directory of the result, which is never overwritten; None for ``runs/<run id>``.
        formatters: forms of the result; ``schema`` is the bundle.
        label: a name for this run in comparisons and reports.
        progress: draws progress; None for nothing.
    """
    from headrace.bench import Benchmark, RuntimeBuilder, RuntimeBundle
    from headrace.bench._stepping import WarmupRule
    from headrace.bench._targets import import_environments, rendering_backend, target_cfg

    # everything that can be refused without importing torch comes first
    request = RunRequest.of(
        task,
        num_envs=num_envs,
        seed=seed,
        threads=threads,
        device=device,
        sim=sim,
        overrides=overrides,
        presets=presets,
        output=output,
        formatters=formatters,
        label=label,
    )
    target = request.target()
    if num_steps < 1:
        raise ConfigError(f"--num-steps: expected at least 1, got {num_steps}")
    rule = WarmupRule(steps=warmup_steps)
    directory, forms = request.checked_output(target, "runtime")
    changed = request.all_overrides()
    config = request.config(target, changed, actions=actions)
    builder = RuntimeBuilder(request.num_envs, mode=timing)
    settings = request.settings(config)
    with Benchmark(builder, settings, output=directory, formatters=forms) as run:
        with imports_phase(builder.startup, target):
            import_environments(target)
        with builder.startup.phase("task_config"):
            cfg = target_cfg(target, changed)
        with builder.startup.phase("env_creation"):
            env = request.make_env(target, cfg, changed)
        drawn_by = config.model_copy(update={"rendering_backend": rendering_backend(env)})
        run.settings = dataclasses.replace(settings, config=drawn_by)
        with closing(env):
            _measure(env, builder, actions, request.seed, rule, num_steps, progress or _no_bar)
    assert isinstance(run.bundle, RuntimeBundle)
    return RunResult(directory=directory, bundle=run.bundle, paths=tuple(run.paths))


def startup(
    task: str | EnvRecipe,
    *,
    num_envs: int | None = None,
    top_n: int = 20,
    whitelist: str | Path | Mapping[str, Sequence[str]] | None = None,
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
    presets: Sequence[str | Path] = (),
    threads: int | None = None,
    device: str | None = None,
    sim: str | None = None,
    output: str | Path | None = None,
    formatters: Sequence[str] = ("schema",),
    label: str | None = None,
    progress: ProgressBar | None = None,
) -> RunResult[StartupBundle]:
    """Profile what happens before the first step, in fresh processes; writes ``startup.json``.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, or a recipe, which then says everything about the environments:
            an argument that says something else is refused.
        num_envs: environments in the batch (64).
        top_n: functions to keep of each phase.
        whitelist: phase → fnmatch patterns of the functions to keep instead, or a YAML file of that.
        seed: of episodes and actions (0).
        overrides: as for :func:`runtime`, as are the arguments below.
        presets: YAML files of overrides.
        threads: physics threads.
        device: of the tensors.
        sim: the physics.
        output: directory of the result.
        formatters: forms of the result.
        label: a name for this run.
        progress: draws progress.
    """
    from headrace.bench import Benchmark, StartupBuilder, StartupBundle
    from headrace.bench._profiling import checked_whitelist, read_whitelist
    from headrace.bench._schema import StartupConfig
    from headrace.bench._startup import StartupRequest, profile_startup
    from headrace.bench._targets import target_cfg

    request = RunRequest.of(
        task,
        num_envs=num_envs,
        seed=seed,
        threads=threads,
        device=device,
        sim=sim,
        overrides=overrides,
        presets=presets,
        output=output,
        formatters=formatters,
        label=label,
    )
    target = request.target()
    if top_n < 1:
        raise ConfigError(f"--top-n: expected at least 1, got {top_n}")
    patterns = None
    if whitelist is not None:
        patterns = (
            checked_whitelist(whitelist, "whitelist")
            if isinstance(whitelist, Mapping)
            else read_whitelist(Path(whitelist))
        )
    directory, forms = request.checked_output(target, "startup")
    changed = request.all_overrides()
    if changed:
        target_cfg(target, changed)  # a wrong path is an error before three processes find it
    builder = StartupBuilder(StartupConfig(top_n=top_n, whitelist=patterns))
    settings = request.settings(request.config(target, changed))
    with (
        Benchmark(builder, settings, output=directory, formatters=forms) as run,
        (progress or _no_bar)("starting processes", 3) as update,
    ):
        profile_startup(
            StartupRequest(
                target=target,
                num_envs=request.num_envs,
                seed=request.seed,
                threads=request.threads,
                device=request.device,
                sim=request.sim,
                overrides=changed,
            ),
            builder,
            top_n=top_n,
            whitelist=patterns,
            progress=update,
        )
    assert isinstance(run.bundle, StartupBundle)
    return RunResult(directory=directory, bundle=run.bundle, paths=tuple(run.paths))


def _no_bar(description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del description, total
    return nullcontext(lambda _: None)


def _measure(
    env: AnyEnv,
    builder: RuntimeBuilder,
    actions: Literal["random", "zero"],
    seed: int,
    rule: WarmupRule,
    num_steps: int,
    progress: ProgressBar,
) -> None:
    from headrace.bench._stepping import Stepper, action_maker

    maker = action_maker(actions, env.single_action_space, env.num_envs, env.device, seed=seed)
    stepper = Stepper(env, maker, builder)
    with builder.startup.phase("first_step"):
        env.reset()
        stepper.step()
    with progress("warming up", rule.limit * rule.steps) as update:
        stepper.warm_up(rule, update)
    with progress("measuring", num_steps) as update:
        stepper.run(num_steps, update)
