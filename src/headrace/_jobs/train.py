"""``headrace.train``: train a policy with one of the RL libraries, and write checkpoints and a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from headrace._jobs.request import (
    RunOptions,
    RunRequest,
    RunResult,
    check_counts,
    check_device,
    check_video,
    film_env,
    open_env,
    time_imports,
)
from headrace.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from headrace.adapters import LibrarySpec
    from headrace.adapters._training import Iteration
    from headrace.bench import SuccessRule
    from headrace.bench._schema import TrainingBundle  # noqa: F401  # the base of the result names it
    from headrace.envs._recipe import EnvRecipe
    from headrace.rollout import PPOCfg


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult(RunResult["TrainingBundle"]):
    """What a training left behind; its bundle has learning curves, times and versions."""

    last: Path
    """The checkpoint of the last whole iteration."""
    best: Path
    """The checkpoint with the highest mean return of recent episodes."""


def train(
    task: str | EnvRecipe,
    *,
    library: str = "headrace",
    iterations: int = 100,
    settings: PPOCfg | Mapping[str, object] | None = None,
    stop: SuccessRule | None = None,
    resume_from: str | Path | None = None,
    ema_alpha: float = 0.1,
    series: bool = True,
    video: str | Path | None = None,
    video_interval: int = 50,
    renderer: str = "native",
    on_begin: Callable[[Path], None] | None = None,
    on_iteration: Callable[[Iteration], None] | None = None,
    **options: Unpack[RunOptions],
) -> TrainingResult:
    """Train PPO on a task. Checkpoints and ``training.json`` are written also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME`` for one that importing your module registers, or ``gym:ID`` for a Gymnasium
            environment over a bridge; or a recipe.
        library: who learns: ``headrace`` (our own small PPO), ``rsl_rl``, ``rl_games``, ``skrl``, ``sb3``, or a
            library that an installed package adds.
        iterations: rollouts to collect and learn from.
        settings: of PPO, all or by name; a setting that the library cannot honor is refused.
        stop: when to stop early; None for never.
        resume_from: directory of an earlier run, to continue from its last checkpoint.
        ema_alpha: weight of the newest value in the smoothed curves.
        series: False to keep only the final values of the curves.
        video: film the first environments into this file, which must be new, while they collect for the first iteration
            and for each that ``video_interval`` divides. Filming takes time, which is in the figures: comparisons keep
            filmed trainings apart.
        video_interval: iterations from one filmed to the next; filming takes time, which is in the figures.
        renderer: what draws the video: ``native``, ``gl`` (MuJoCo's own images) or ``warp``.
        on_begin: called with the output directory once everything is checked.
        on_iteration: called after each iteration.
        **options: of the environments and the result: see :class:`headrace.RunOptions`.
    """
    from headrace.adapters import library as library_of
    from headrace.bench import TrainingBuilder, describe_library
    from headrace.bench._schema import CheckpointInfo, ResumedFrom
    from headrace.bench._stepping import first_step

    request = RunRequest.of(task, **options)
    recipe = request.recipe
    check_counts(iterations=iterations, video_interval=video_interval)
    film = None if video is None else Path(video)
    if film is not None and recipe.bridged:
        raise ConfigError(f"video (--video): expected a task of ours to film, got {recipe.source!r}")
    builder = TrainingBuilder(ema_alpha=ema_alpha, series=series, rule=stop)
    spec = library_of(library)
    spec.require()
    check_device(builder.startup, recipe)
    with request.measured(builder, framework=spec.name, max_iterations=iterations) as run:
        directory = run.output
        time_imports(builder.startup, recipe, "headrace.adapters._checkpoint", "headrace.adapters._training")
        from headrace.adapters import library_run, make_learner
        from headrace.adapters._checkpoint import plain
        from headrace.adapters._training import INDEX, CheckpointKeeper, load_resumption, resumable, train_iterations
        from headrace.envs._batch_env import BatchEnv

        check_video(film, renderer)
        with builder.startup.phase("task_config"):
            recipe.cfg()
        ppo = _checked_settings(spec, settings, recipe)
        builder.library = describe_library(spec.name, algorithm="PPO", settings=plain(dataclasses.asdict(ppo)))
        resumption = None
        if resume_from is not None:
            resumption = resumable(Path(resume_from), spec.name, recipe.source, recipe.num_envs)
            run.resumed_from = ResumedFrom(
                path=str(resumption.last),
                run_id=_run_id(Path(resume_from)),
                iteration=resumption.meta.iteration,
                changed=resumption.changed(ppo, recipe.overrides),
            )
        if (directory / INDEX).exists():
            raise ConfigError(f"output: {str(directory)!r} holds another training; choose another directory")
        if on_begin is not None:
            on_begin(directory)
        with open_env(run, recipe) as env, ExitStack() as stack:
            with builder.startup.phase("first_step"):
                first_step(env)
            # a bridged environment says with its first ended episode whether it has a measure
            if stop is not None and isinstance(env, BatchEnv) and env.task.success_measure is None:
                raise ConfigError("stop (--check-success): expected a task with a success measure, got one without")
            camera = None
            if film is not None:
                camera, builder.video_path = film_env(env, film, renderer, stack), str(film)
            stack.enter_context(library_run(seed=ppo.seed))
            learner = stack.enter_context(closing(make_learner(spec.name, env, ppo)))
            first = 0 if resumption is None else load_resumption(learner, resumption)
            keeper = CheckpointKeeper(directory, learner, recipe, resumable=isinstance(env, BatchEnv))

            def after(done: Iteration) -> bool:
                if camera is not None:
                    camera.paused = bool((done.number + 1) % video_interval)
                if on_iteration is not None:
                    on_iteration(done)
                ends = done.finished
                return builder.iteration(
                    frames=ppo.steps * recipe.num_envs,
                    collection_s=done.times.collect,
                    learning_s=done.times.learn,
                    rewards=ends.returns.tolist(),
                    lengths=ends.lengths.tolist(),
                    successes=None if ends.success is None else ends.success.tolist(),
                )

            builder.begin()
            try:
                train_iterations(learner, keeper, iterations, after, first=first)
            finally:  # the bundle of a training that failed names its newest checkpoint, too
                kept = keeper.kept
                if kept is not None:
                    builder.checkpoint = CheckpointInfo(
                        path=str(kept.last),
                        source="saved",
                        library=kept.library,
                        task=kept.task,
                        iteration=kept.iteration,
                        score=kept.score,
                    )
            builder.end()
        if builder.stop_reason is not None:
            run.complete(builder.stop_reason)
    return TrainingResult.of(run, last=keeper.last, best=keeper.best)


def _checked_settings(spec: LibrarySpec, settings: PPOCfg | Mapping[str, object] | None, recipe: EnvRecipe) -> PPOCfg:
    from headrace.rollout import PPOCfg

    if not isinstance(settings, PPOCfg):
        known = {field.name for field in dataclasses.fields(PPOCfg)} - {"seed"}
        for name in settings or ():
            if name not in known:
                raise UnknownNameError("PPO setting", name, known)
        try:
            settings = PPOCfg(**settings or {})  # pyright: ignore[reportArgumentType]  # checked when it is made
        except TypeError as error:
            raise ConfigError(f"settings (--ppo): {error}") from error
    if settings.seed not in (PPOCfg.seed, recipe.seed):
        raise ConfigError(
            f"settings.seed: expected that of the run, {recipe.seed}, or none, got {settings.seed}; pass "
            f"seed={settings.seed} to train, or in the recipe: it seeds environments, networks and library"
        )
    ppo = dataclasses.replace(settings, seed=recipe.seed)
    ppo.minibatch_size(recipe.num_envs)
    spec.check_settings(ppo)
    return ppo


def _run_id(directory: Path) -> str | None:
    """Of an earlier training; None where its bundle is not there, or cannot be read."""
    from headrace.bench import read_bundle

    try:
        return read_bundle(directory / "training.json").run.run_id
    except DataError:
        return None
