"""``headrace.bench.runtime`` and ``startup``: how fast environments step, and what happens before they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from headrace.bench.measured.run_cfg import RunCfg, RunResult, open_env, time_imports
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import check_counts

if TYPE_CHECKING:
    from headrace.bench.schema import RuntimeBundle, StartupBundle, TimingMode

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Makes a bar of a description and a total; within the block it is called with what is done."""


def runtime(
    task: str | EnvRecipe,
    *,
    num_steps: int = 1000,
    warmup_steps: int = 50,
    actions: Literal["random", "zero"] = "random",
    timing: TimingMode = "host_return",
    run: RunCfg | None = None,
    progress: ProgressBar | None = None,
    **env: Unpack[EnvKeywords],
) -> RunResult[RuntimeBundle]:
    """Measure how fast an environment steps. ``runtime.json`` is written also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, or a recipe.
        num_steps: measured steps of the batch.
        warmup_steps: steps before measuring, at least; more until the step time is steady.
        actions: how actions are chosen.
        timing: ``host_return``: until ``env.step`` returned; ``synchronized``: until the device has done the work; no
            difference on a CPU.
        run: directory, forms and label of the result.
        progress: draws progress; None for nothing.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.bench._builders import RuntimeBuilder
    from headrace.bench.stepping import Stepper, WarmupRule, action_maker

    # everything that can be refused without importing torch comes first
    run = run or RunCfg()
    recipe = run.recipe(task, **env)
    check_counts(num_steps=num_steps)
    rule = WarmupRule(steps=warmup_steps)
    builder = RuntimeBuilder(recipe.num_envs, mode=timing)
    with run.measure(builder, recipe, actions=actions) as measured:
        time_imports(builder.startup, recipe)
        with builder.startup.phase("task_config"):
            recipe.cfg()
        with open_env(measured, recipe) as envs:
            maker = action_maker(actions, envs.single_action_space, envs.num_envs, envs.device, seed=recipe.seed)
            stepper = Stepper(envs, maker, builder)
            with builder.startup.phase("first_step"):
                envs.reset()
                stepper.step()
            bar = progress or _no_bar
            with bar("warming up", rule.limit * rule.steps) as update:
                stepper.warm_up(rule, update)
            with bar("measuring", num_steps) as update:
                stepper.run(num_steps, update)
    return RunResult["RuntimeBundle"].of(measured)


def startup(
    task: str | EnvRecipe,
    *,
    top_n: int = 20,
    whitelist: str | Path | Mapping[str, Sequence[str]] | None = None,
    run: RunCfg | None = None,
    progress: ProgressBar | None = None,
    **env: Unpack[EnvKeywords],
) -> RunResult[StartupBundle]:
    """Profile what happens before the first step, in fresh processes; writes ``startup.json``.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, or a recipe.
        top_n: functions to keep of each phase.
        whitelist: YAML file of ``phase: [patterns]`` lines: keep the functions that match (fnmatch,
            ``module:function``) instead of the top; a pattern that matches nothing is an error; in Python
            also the mapping itself.
        run: directory, forms and label of the result.
        progress: draws progress; None for nothing.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.bench._builders import StartupBuilder
    from headrace.bench._profiling import checked_whitelist, profile_startup, read_whitelist
    from headrace.bench.schema import StartupConfig

    run = run or RunCfg()
    recipe = run.recipe(task, **env)
    check_counts(top_n=top_n)
    patterns = None
    if whitelist is not None:
        patterns = (
            checked_whitelist(whitelist, "whitelist")
            if isinstance(whitelist, Mapping)
            else read_whitelist(Path(whitelist))
        )
    builder = StartupBuilder(StartupConfig(top_n=top_n, whitelist=patterns))
    if recipe.overrides:
        recipe.cfg()  # a wrong path is an error before three processes find it
    with run.measure(builder, recipe) as measured, (progress or _no_bar)("starting processes", 3) as update:
        profile_startup(recipe, builder, top_n=top_n, whitelist=patterns, progress=update)
    return RunResult["StartupBundle"].of(measured)


def _no_bar(description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del description, total
    return nullcontext(lambda _: None)
