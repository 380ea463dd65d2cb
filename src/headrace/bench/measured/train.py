"""``headrace.train``: train a policy with one of the RL libraries, and write checkpoints and a bundle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from headrace.bench.measured.run_cfg import RunCfg, RunResult, check_device, open_env, time_imports
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, DataError, check_counts
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.bench._builders import SuccessRule
    from headrace.bench.schema import TrainingBundle  # noqa: F401  # the base of the result names it
    from headrace.learning.ppo import PPOCfg
    from headrace.libraries.registry import LibrarySpec
    from headrace.libraries.training import Iteration


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
    library: str | None = None,
    iterations: int = 100,
    ppo: PPOCfg | None = None,
    stop: SuccessRule | None = None,
    resume_from: str | Path | None = None,
    film: FilmCfg | None = None,
    run: RunCfg | None = None,
    on_begin: Callable[[Path], None] | None = None,
    on_iteration: Callable[[Iteration], None] | None = None,
    **env: Unpack[EnvKeywords],
) -> TrainingResult:
    """Train PPO on a task. Checkpoints and ``training.json`` are written also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME`` for one that importing your module registers, or ``gym:ID`` for a Gymnasium
            environment over a bridge; or a recipe.
        library: RL library: ``headrace`` (our own small PPO, the default), ``rsl_rl``, ``rl_games``, ``skrl``,
            ``sb3``, or a library that an installed package adds.
        iterations: rollouts to collect and learn from.
        ppo: settings of PPO; a setting that the library cannot honor is refused.
        stop: when to stop early; None for never.
        resume_from: directory of an earlier run, to continue from its last checkpoint with its library, its settings
            of PPO and its environments, but for what is given here; ``resumed_from.changed`` in the bundle has that.
        film: film the first environments into ``film.video`` while they collect for the first iteration and for each
            that ``film.interval`` divides. Filming takes time, which is in the figures: comparisons keep filmed
            trainings apart.
        run: directory, forms and label of the result, and what it keeps of the curves.
        on_begin: called with the output directory once everything is checked.
        on_iteration: called after each iteration.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments.
    """
    from headrace.bench._builders import TrainingBuilder
    from headrace.bench._capture import describe_library
    from headrace.bench.schema import CheckpointInfo, ResumedFrom
    from headrace.bench.stepping import first_step
    from headrace.libraries.registry import library as library_of
    from headrace.libraries.registry import recorded_library

    run = run or RunCfg()
    recipe = run.recipe(task, **env) if resume_from is None else _inherit(Path(resume_from), run, task, env)
    check_counts(iterations=iterations)
    film = film or FilmCfg()
    if film.video is not None and recipe.bridged:
        raise ConfigError(f"video (--video): expected a task of ours to film, got {recipe.source!r}")
    builder = TrainingBuilder(ema_alpha=run.ema_alpha, series=run.series, rule=stop)
    spec = library_of(library or (recorded_library(Path(resume_from)) if resume_from is not None else "headrace"))
    spec.require()
    check_device(builder.startup, recipe)
    with run.measure(builder, recipe, framework=spec.name, max_iterations=iterations) as measured:
        directory = measured.output
        time_imports(builder.startup, recipe, "headrace.libraries.checkpoint", "headrace.libraries.training")
        from headrace.envs.batch_env import BatchEnv
        from headrace.learning.ppo import PPOCfg
        from headrace.libraries.checkpoint import plain
        from headrace.libraries.registry import make_learner
        from headrace.libraries.torch_state import library_run
        from headrace.libraries.training import INDEX, CheckpointKeeper, load_resumption, resumable, train_iterations

        film.check()
        with builder.startup.phase("task_config"):
            recipe.cfg()
        resumption = None
        if resume_from is not None:
            resumption = resumable(Path(resume_from), spec.name, recipe.source, recipe.num_envs)
            ppo = ppo or dataclasses.replace(resumption.meta.settings, seed=recipe.seed)
        ppo = _check_ppo(spec, ppo or PPOCfg(), recipe)
        builder.library = describe_library(spec.name, algorithm="PPO", settings=plain(dataclasses.asdict(ppo)))
        if resumption is not None and resume_from is not None:
            measured.resumed_from = ResumedFrom(
                path=str(resumption.last),
                run_id=_run_id(Path(resume_from)),
                iteration=resumption.meta.iteration,
                changed=resumption.changed(ppo, recipe.overrides),
            )
        if (directory / INDEX).exists():
            raise ConfigError(f"output: {str(directory)!r} holds another training; choose another directory")
        if on_begin is not None:
            on_begin(directory)
        with open_env(measured, recipe) as envs, ExitStack() as stack:
            with builder.startup.phase("first_step"):
                first_step(envs)
            # a bridged environment says with its first ended episode whether it has a measure
            if stop is not None and isinstance(envs, BatchEnv) and envs.task.success_measure is None:
                raise ConfigError("stop (--check-success): expected a task with a success measure, got one without")
            camera = stack.enter_context(film.film(envs))
            builder.video_path = None if film.video is None else str(film.video)
            stack.enter_context(library_run(seed=ppo.seed))
            learner = stack.enter_context(closing(make_learner(spec.name, envs, ppo)))
            first = 0 if resumption is None else load_resumption(learner, resumption)
            keeper = CheckpointKeeper(directory, learner, recipe, resumable=isinstance(envs, BatchEnv))

            def after(done: Iteration) -> bool:
                if camera is not None:
                    camera.paused = bool((done.number + 1) % film.interval)
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
            measured.complete(builder.stop_reason)
    return TrainingResult.of(measured, last=keeper.last, best=keeper.best)


def _inherit(earlier: Path, run: RunCfg, task: str | EnvRecipe, env: EnvKeywords) -> EnvRecipe:
    """Return the recipe of an earlier training with what is given instead; overrides are added to its own."""
    if isinstance(task, EnvRecipe):
        return run.recipe(task, **env)
    from headrace.bench._bundle_files import read_bundle

    written = earlier / "training.json"
    recorded = read_bundle(written).run.recipe if written.is_file() else None
    if recorded is None or recorded.get("source") != task:
        return run.recipe(task, **env)  # of another task, which is refused later with its name
    changes = dict(env)
    changes["overrides"] = {**EnvRecipe.from_json(recorded).overrides, **(env.get("overrides") or {})}
    return run.recipe(EnvRecipe.from_json(recorded).replace(**{k: v for k, v in changes.items() if v is not None}))


def _check_ppo(spec: LibrarySpec, ppo: PPOCfg, recipe: EnvRecipe) -> PPOCfg:
    """Return the settings with the seed of the run; raises where the library cannot honor them."""
    if ppo.seed not in (type(ppo).seed, recipe.seed):
        raise ConfigError(
            f"ppo.seed: expected that of the run, {recipe.seed}, or none, got {ppo.seed}; pass "
            f"seed={ppo.seed} to train, or in the recipe: it seeds environments, networks and library"
        )
    ppo = dataclasses.replace(ppo, seed=recipe.seed)
    ppo.minibatch_size(recipe.num_envs)
    spec.check_settings(ppo)
    return ppo


def _run_id(directory: Path) -> str | None:
    """Return the id of an earlier training; None where its bundle does not exist or cannot be read."""
    from headrace.bench._bundle_files import read_bundle

    try:
        return read_bundle(directory / "training.json").run.run_id
    except DataError:
        return None
