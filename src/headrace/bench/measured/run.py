"""``headrace.bench.run``: step a task, and say how fast it was and how its episodes ended.

``headrace.bench.runtime`` and ``startup``: how fast environments step, and what happens before they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack, cast

from headrace.bench.benchmark import USUAL_ENVS, RunCfg, RunResult, open_env, time_imports
from headrace.bench.builders import EpisodeTally, RuntimeBuilder, StartupBuilder
from headrace.bench.schema import RuntimeBundle, StartupBundle, StartupConfig, TimingMode
from headrace.bench.stepping import Stepper, WarmupRule, action_maker, first_step
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, UnknownNameError, check_counts

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.envs.recipe import AnyEnv
    from headrace.policies.load_policy import FoundPolicy
    from headrace.types import Obs

StepFunction: TypeAlias = "Callable[[Obs], Tensor]"
"""Actions (N, …) from the observation groups."""

_FIELDS = ("obs", "actions", "rewards", "flags", "states")
_BRIDGED_COST = {
    "native": "nothing: suspended environments are skipped",
    "restore": "a step: it is stepped with the others, then put back",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SteppingResult:
    """What stepping a task showed."""

    task: str
    num_envs: int
    suspended: int
    """Environments that were frozen all the time."""
    num_steps: int
    seconds: float
    """In ``env.step`` alone."""
    stages: dict[str, float]
    """Seconds of them by stage."""
    episodes: int
    """That finished."""
    mean_return: float | None
    mean_length: float | None
    success_rate: float | None
    """None where the task has no measure of it, or no episode finished; the same for the two above."""
    divergences: int
    suspension_cost: str
    """What a suspended environment costs, in words."""
    recorded: int | None = None
    """Episodes in the dataset; None where nothing was recorded."""
    abandoned: int = 0
    """Unfinished episodes that were not recorded."""

    @property
    def steps_per_second(self) -> float:
        """Environment steps, of those that were not suspended."""
        return (self.num_envs - self.suspended) * self.num_steps / self.seconds


def run(
    task: str | EnvRecipe,
    *,
    policy: Literal["random", "zero"] | str | StepFunction = "random",
    num_steps: int = 300,
    suspend_fraction: float = 0.0,
    record: str | Path | None = None,
    on_progress: Callable[[int], None] | None = None,
    **env: Unpack[EnvKeywords],
) -> SteppingResult:
    """Step a task, or a bridged environment, with random, zero or your own actions.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, a recipe file; or a recipe, which then says everything about
            the environments.
        policy: ``random``, ``zero``, ``module:name`` of a function of the observation groups, a checkpoint of a
            training, its directory, ``latest`` or ``best`` of ``runs/``, a TorchScript or ONNX file; in Python also
            the function itself.
        num_steps: steps of the batch.
        suspend_fraction: share of the environments to freeze, 0 to 1.
        record: directory to record every finished episode in; physics states, too, of a task of ours.
        on_progress: called with the steps that are done.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.

    Returns:
        ``num_steps``, ``seconds``, ``steps_per_second``, ``stages`` (seconds in each), ``episodes`` and their means,
        ``divergences``, ``suspended`` and what suspension cost.
    """
    if not 0.0 <= suspend_fraction <= 1.0:
        raise ConfigError(
            f"suspend_fraction (--suspend-fraction): expected a share from 0 to 1, got {suspend_fraction}"
        )
    check_counts(num_steps=num_steps)
    recipe = EnvRecipe.of(task, USUAL_ENVS, **env)
    if record is not None and Path(record).is_dir() and any(Path(record).iterdir()):
        raise ConfigError(
            f"record (--record): {record} holds something, and nothing is overwritten; choose another directory"
        )
    from headrace.bridges.bridge_env import BridgeEnv

    recipe, file = load_trained_recipe(recipe, policy)
    with ExitStack() as stack:
        envs = stack.enter_context(closing(recipe.make()))
        act = step_function(policy, envs, recipe.seed, file)
        first_step(envs)  # compiles kernels, which is not measured
        recorder = None
        if record is not None:
            from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg

            info = DatasetInfo.of(envs)
            fields = _FIELDS[:-1] if recipe.bridged else _FIELDS
            recorder = stack.enter_context(EpisodeRecorder(record, RecorderCfg(fields=fields), info))
            envs.attach(recorder)
        suspended = round(suspend_fraction * envs.num_envs)
        obs, _ = envs.reset(seed=recipe.seed)
        envs.suspend(range(suspended))
        envs.timer.clear()  # what is measured begins here, without the first reset
        seconds, tally = 0.0, EpisodeTally()
        for done in range(1, num_steps + 1):
            actions = act(obs)
            begin = time.perf_counter()
            step = envs.step(actions)
            seconds += time.perf_counter() - begin
            obs = step.obs
            tally.add_step(step)
            if on_progress is not None:
                on_progress(done)
    ended = tally.outcomes()
    reward, length, rate = ended["reward"], ended["ep_length"], ended["success_rate"]
    return SteppingResult(
        task=recipe.source,
        num_envs=envs.num_envs,
        suspended=suspended,
        num_steps=num_steps,
        seconds=seconds,
        stages=envs.timer.seconds(),
        episodes=len(tally.ended),
        mean_return=reward and reward.mean,
        mean_length=length and length.mean,
        success_rate=rate and rate.rate,
        divergences=envs.divergences,
        suspension_cost=_BRIDGED_COST[envs.fidelity] if isinstance(envs, BridgeEnv) else envs.sim.suspension_cost,
        recorded=None if recorder is None else recorder.committed,
        abandoned=0 if recorder is None else recorder.report.abandoned,
    )


def load_trained_recipe(recipe: EnvRecipe, policy: str | StepFunction) -> tuple[EnvRecipe, FoundPolicy | None]:
    """Return the recipe with the settings that a policy was trained with, and the policy; None for random and zero.

    A policy that does not exist, or plans chunks, is refused before anything is made.
    """
    if policy in ("random", "zero"):
        return recipe, None
    from headrace.policies.load_policy import find_policy

    try:
        found = find_policy(policy, recipe.source)
    except UnknownNameError as error:
        raise ConfigError(
            "policy (--policy): expected random, zero, module:function, latest, or a training's checkpoint or "
            f"directory, got {policy!r}, which is none of them"
        ) from error
    if found.kind == "chunk":
        raise ConfigError(
            f"policy (--policy): expected one action per observation, got {policy}, which plans chunks; "
            f"'headrace evaluate {recipe.source} --policy {policy} --video FILE.mp4' plays and films it"
        )
    return recipe.replace(overrides=found.overrides | dict(recipe.overrides)), found


def step_function(policy: str | StepFunction, env: AnyEnv, seed: int, found: FoundPolicy | None) -> StepFunction:
    """Return what acts in every step: random or zero actions of the right kind, the policy of a file, or a function."""
    if found is None:
        draw = action_maker(
            cast("Literal['random', 'zero']", policy), env.single_action_space, env.num_envs, env.device, seed=seed
        )
        return lambda _: draw()
    if found.kind == "object":
        return cast("StepFunction", found.source)
    from headrace.policies.load_policy import load_policy
    from headrace.policies.protocol import has_memory
    from headrace.policies.step_policy import StepPolicy

    loaded = load_policy(policy, env)
    if has_memory(loaded) or not isinstance(loaded, StepPolicy):
        raise ConfigError(
            f"policy (--policy): expected a policy without memory, got {policy}; 'headrace play' plays and films it"
        )
    return loaded.policy


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
    # everything that can be refused without importing torch comes first
    run = run or RunCfg()
    recipe = run.recipe(task, **env)
    check_counts(num_steps=num_steps)
    rule = WarmupRule(steps=warmup_steps)
    builder = RuntimeBuilder(mode=timing)
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
    return RunResult[RuntimeBundle].of(measured)


def startup(
    task: str | EnvRecipe,
    *,
    top_n: int = 20,
    run: RunCfg | None = None,
    progress: ProgressBar | None = None,
    **env: Unpack[EnvKeywords],
) -> RunResult[StartupBundle]:
    """Profile what happens before the first step, in fresh processes; writes ``startup.json``.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, or a recipe.
        top_n: functions to keep of each phase.
        run: directory, forms and label of the result.
        progress: draws progress; None for nothing.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.bench._profiling import profile_startup

    run = run or RunCfg()
    recipe = run.recipe(task, **env)
    check_counts(top_n=top_n)
    builder = StartupBuilder(StartupConfig(top_n=top_n))
    if recipe.overrides:
        recipe.cfg()  # a wrong path is an error before three processes find it
    with run.measure(builder, recipe) as measured, (progress or _no_bar)("starting processes", 2) as update:
        profile_startup(recipe, builder, top_n=top_n, progress=update)
    return RunResult[StartupBundle].of(measured)


def _no_bar(description: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    del description, total
    return nullcontext(lambda _: None)
