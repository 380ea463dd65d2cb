"""``headrace.train``: train a policy with an RL library; writes checkpoints, a bundle, and curves while it runs."""

from __future__ import annotations

import atexit
import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, get_args

from headrace.bench._bundle_files import read_bundle
from headrace.bench.benchmark import RunCfg, RunResult, check_device, open_env, time_imports
from headrace.bench.builders import SuccessRule, TrainingBuilder
from headrace.bench.capture import describe_library
from headrace.bench.schema import CheckpointInfo, ResumedFrom, TrainingBundle
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, DataError, UnknownNameError, check_counts, require_extra
from headrace.files import remove_abandoned
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.learning.ppo import PPOCfg
    from headrace.libraries.registry import LibrarySpec
    from headrace.libraries.training import Iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult(RunResult[TrainingBundle]):
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
    agent: Mapping[str, Any] | str | Path | None = None,
    stop: SuccessRule | None = None,
    resume_from: str | Path | None = None,
    film: FilmCfg | None = None,
    run: RunCfg | None = None,
    on_begin: Callable[[Path], None] | None = None,
    on_iteration: Callable[[Iteration], None] | None = None,
    **env: Unpack[EnvKeywords],
) -> TrainingResult:
    """Train a policy on a task: with PPO, or as ``agent`` says.

    Checkpoints and ``training.json`` are written also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME`` for one that importing your module registers, or ``gym:ID`` for a Gymnasium
            environment over a bridge; or a recipe.
        library: RL library: ``headrace`` (our own small PPO, the default), ``rsl_rl``, ``rl_games``, ``skrl``,
            ``sb3``, or a library that an installed package adds.
        iterations: rollouts to collect and learn from.
        ppo: settings of PPO; a setting that the library cannot honor is refused.
        agent: instead of ``ppo``, the library's own configuration, as a dictionary or as a YAML or JSON file, handed to
            it whole: only what must come from the environment is filled in.
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
    from headrace.bench.stepping import first_step
    from headrace.learning.ranks import read_ranks
    from headrace.libraries.registry import library as library_of
    from headrace.libraries.registry import read_library

    run = run or RunCfg()
    rank, ranks = read_ranks()
    if rank:  # its weights are those that the first process saves
        scratch = mkdtemp()
        atexit.register(shutil.rmtree, scratch, ignore_errors=True)
        run, film = dataclasses.replace(run, output=Path(scratch) / "run", formatters=("schema",), log=()), None
    recipe = run.recipe(task, **env) if resume_from is None else _inherit(Path(resume_from), run, task, env)
    check_counts(iterations=iterations)
    if ppo is not None and agent is not None:
        raise ConfigError("ppo (--ppo), agent (--agent): expected one of them, got both; write all into the agent's")
    check_logs(run.log)
    film = film or FilmCfg()
    if film.video is not None and recipe.bridged:
        raise ConfigError(f"video (--video): expected a task of ours to film, got {recipe.source!r}")
    builder = TrainingBuilder(rule=stop)
    spec = library_of(library or (read_library(Path(resume_from)) if resume_from is not None else "headrace"))
    spec.require()
    share = _share(spec, recipe, ranks, resumed=resume_from is not None)
    check_device(builder.startup, recipe)
    with ExitStack() as logs, run.measure(builder, recipe, framework=spec.name, max_iterations=iterations) as measured:
        directory = measured.output
        time_imports(builder.startup, recipe, "headrace.libraries.training", "headrace.libraries.training")
        from headrace.envs.batch_env import BatchEnv
        from headrace.learning.ppo import PPOCfg
        from headrace.learning.ranks import gather_ranks, learn_together
        from headrace.libraries.registry import make_learner, read_agent
        from headrace.libraries.training import (
            CHECKPOINTS,
            INDEX,
            CheckpointKeeper,
            library_run,
            load_resumption,
            plain,
            resumable,
            train_iterations,
        )
        from headrace.types import EpisodeEnds

        film.check()
        with builder.startup.phase("task_config"):
            recipe.cfg()
        config = None if agent is None else read_agent(agent)
        resumption = None
        if resume_from is not None:
            for folder in (Path(resume_from), Path(resume_from, CHECKPOINTS)):
                remove_abandoned(folder)
            resumption = resumable(Path(resume_from), spec.name, recipe.source, recipe.num_envs)
            config = resumption.meta.agent if config is None else config
            if ppo is not None and config is not None:
                raise ConfigError(f"ppo (--ppo): {resume_from} was trained with an agent configuration; pass agent")
            ppo = ppo or dataclasses.replace(resumption.meta.settings, seed=recipe.seed)
        ppo = _check_ppo(spec, ppo or PPOCfg(), recipe)
        settings = plain(dataclasses.asdict(ppo)) if config is None else dict(config)
        builder.library = describe_library(spec.name, algorithm="PPO", settings=settings)
        if resumption is not None and resume_from is not None:
            measured.resumed_from = ResumedFrom(
                path=str(resumption.last),
                run_id=_run_id(Path(resume_from)),
                iteration=resumption.meta.iteration,
                changed=resumption.changed(ppo, config, recipe.overrides),
            )
        if (directory / INDEX).exists():
            raise ConfigError(f"output: {str(directory)!r} holds another training; choose another directory")
        if on_begin is not None:
            on_begin(directory)
        with open_env(measured, recipe, **share) as envs, ExitStack() as stack:
            with builder.startup.phase("first_step"):
                first_step(envs)
            # a bridged environment says with its first ended episode whether it has a measure
            if stop is not None and isinstance(envs, BatchEnv) and envs.task.success_measure is None:
                raise ConfigError("stop (--check-success): expected a task with a success measure, got one without")
            camera = stack.enter_context(film.film(envs))
            builder.video_path = None if film.video is None else str(film.video)
            stack.enter_context(library_run(seed=ppo.seed))
            stack.enter_context(learn_together())
            learner = stack.enter_context(closing(make_learner(spec.name, envs, ppo, config)))
            if config is not None:  # what is said of the shared settings does not apply
                more = {"algorithm": learner.algorithm, "differences": []}
                builder.library = builder.library.model_copy(update=more)
            first = 0 if resumption is None else load_resumption(learner, resumption)
            keeper = CheckpointKeeper(directory, learner, recipe, resumable=isinstance(envs, BatchEnv) and ranks == 1)
            frames = learner.settings.steps * recipe.num_envs
            about = {"task": recipe.source, "num_envs": recipe.num_envs, "seed": recipe.seed, "library": spec.name}
            curves = LiveCurves(run.log, directory, measured.run_id, about | settings)
            # when the bundle is written
            logs.callback(lambda: curves.close([*measured.paths, keeper.last], failed=measured.failed))
            each = [dict[str, float](collection_s=0.0, learning_s=0.0, episodes=0) for _ in range(ranks)]

            def after(done: Iteration) -> bool:
                parts = gather_ranks(done)
                for figures, part in zip(each, parts, strict=True):
                    figures["collection_s"] += part.times.collect
                    figures["learning_s"] += part.times.learn
                    figures["episodes"] += len(part.finished)
                if ranks > 1:
                    done = done._replace(finished=EpisodeEnds.join([part.finished for part in parts]))
                    builder.extra["ranks"] = [{"frames": done.number * frames // ranks, **figures} for figures in each]
                curves.add(done, frames)
                if camera is not None:
                    camera.paused = bool((done.number + 1) % film.interval)
                if on_iteration is not None:
                    on_iteration(done)
                ends = done.finished
                return builder.iteration(
                    frames=frames,
                    collection_s=done.times.collect,
                    learning_s=done.times.learn,
                    rewards=ends.returns.tolist(),
                    lengths=ends.lengths.tolist(),
                    successes=None if ends.success is None else ends.success.tolist(),
                )

            builder.begin()
            try:
                train_iterations(
                    learner, keeper, iterations, after, first=first, agree=lambda stop: any(gather_ranks(stop))
                )
            finally:  # the bundle of a training that failed names its newest checkpoint, too
                kept = keeper.kept
                if kept is not None:
                    about = {name: getattr(kept, name) for name in ("library", "task", "iteration", "score")}
                    builder.checkpoint = CheckpointInfo(path=str(kept.last), source="saved", **about)
            builder.end()
        if builder.stop_reason is not None:
            measured.complete(builder.stop_reason)
    return TrainingResult.of(measured, last=keeper.last, best=keeper.best)


def _share(spec: LibrarySpec, recipe: EnvRecipe, ranks: int, *, resumed: bool) -> dict[str, int]:
    """Return what the recipe of each of several processes changes; raises where they cannot train together."""
    if ranks == 1:
        return {}
    if spec.name != "headrace" or recipe.bridged or resumed or recipe.num_envs % ranks:
        raise ConfigError(
            f"torchrun: expected the library headrace, a task of ours, a new training and environments that {ranks} "
            f"processes can share, got {spec.name}, {recipe.source}, {recipe.num_envs} environments"
            f"{' and --resume-from' if resumed else ''}"
        )
    return {"num_envs": recipe.num_envs // ranks, "episode_stride": recipe.num_envs}


def _inherit(earlier: Path, run: RunCfg, task: str | EnvRecipe, env: EnvKeywords) -> EnvRecipe:
    """Return the recipe of an earlier training with what is given instead; overrides are added to its own."""
    if isinstance(task, EnvRecipe):
        return run.recipe(task, **env)
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
    try:
        return read_bundle(directory / "training.json").run.run_id
    except DataError:
        return None


LogName: TypeAlias = Literal["tensorboard", "wandb"]
_FOLDER = "tensorboard"


def check_logs(names: Sequence[str]) -> None:
    """Raise an error for a log that is unknown or whose library is not installed."""
    for name in names:
        if name not in get_args(LogName):
            raise UnknownNameError("log", name, get_args(LogName))
        require_extra(name, extra=name, purpose=f"--log {name}")


class LiveCurves:
    """Writes each iteration at once: what was written can be read while the training runs, and after a kill."""

    def __init__(self, names: Sequence[str], directory: Path, run_id: str, settings: Mapping[str, Any]) -> None:
        """Open the logs.

        Args:
            names: which, checked by :func:`check_logs`.
            directory: of the run; their files go below it.
            run_id: name of the run.
            settings: task, number of environments, settings of the learner; shown beside the curves.
        """
        self._writer: Any = None
        self._run: Any = None
        self._run_id = run_id
        if "tensorboard" in names:
            from torch.utils.tensorboard.writer import SummaryWriter

            self._writer = SummaryWriter(str(directory / _FOLDER))
            self._writer.add_text("run", f"{run_id}: {dict(settings)}")
        if "wandb" in names:
            wandb: Any = require_extra("wandb", extra="wandb", purpose="--log wandb")
            self._run = wandb.init(
                project="headrace", name=run_id, dir=str(directory), config=dict(settings), reinit="create_new"
            )

    def add(self, done: Iteration, frames: int) -> None:
        """Write an iteration.

        Args:
            done: what it gave.
            frames: that were collected in it, all environments together.
        """
        if self._writer is None and self._run is None:
            return
        ends, times = done.finished, done.times
        values: dict[str, float] = {"Time/collection_s": times.collect, "Time/learning_s": times.learn}
        values["Perf/total_fps"] = frames / max(times.collect + times.learn, 1e-9)
        if len(ends):
            values["Train/mean_reward"] = float(ends.returns.double().mean())
            values["Train/mean_episode_length"] = float(ends.lengths.double().mean())
            if ends.success is not None:
                values["Train/success_rate"] = float(ends.success.double().mean())
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, done.number)
            self._writer.flush()
        if self._run is not None:
            self._run.log(values, step=done.number)

    def close(self, files: Sequence[Path], *, failed: bool) -> None:
        """Finish the logs; Weights & Biases gets ``files``, the bundle and the checkpoint, as an artifact."""
        if self._writer is not None:
            self._writer.close()
        if self._run is not None:
            wandb: Any = require_extra("wandb", extra="wandb", purpose="--log wandb")
            artifact = wandb.Artifact(self._run_id, type="training")
            for file in files:
                artifact.add_file(str(file))
            self._run.log_artifact(artifact)
            self._run.finish(exit_code=int(failed))
