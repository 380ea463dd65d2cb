"""What every measured job is asked for: the recipe of its environments, and where the result goes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar, Unpack, cast

from headrace._gymnasium_ids import FOREIGN
from headrace._interrupts import delayed
from headrace.envs._recipe import EnvRecipe, is_recipe_file
from headrace.errors import ConfigError, UnknownNameError, require_extra

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.bench import RunSettings
    from headrace.bench._benchmark import Benchmark
    from headrace.bench._builders import Builder, StartupClock
    from headrace.bench._schema import Actions, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
    from headrace.envs._recipe import AnyEnv
    from headrace.recording import VideoObserver

B = TypeVar("B", "PlayBundle", "RuntimeBundle", "StartupBundle", "TrainingBundle")
MeasuredBy = TypeVar("MeasuredBy", bound="Builder")
USUAL_ENVS = 64
"""Environments in a batch where nobody says how many."""


class RunOptions(TypedDict, total=False):
    """What ``train``, ``play``, ``runtime`` and ``startup`` have in common. None is as if nothing were said.

    Where the task is given as a recipe, that says everything about the environments, and a setting here that says
    something else is refused, also one that says what is usual without a recipe.
    """

    num_envs: int | None
    """Environments in the batch (64)."""
    seed: int | None
    """Of episodes, actions, networks and library (0)."""
    overrides: Mapping[str, object] | None
    """Task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``."""
    presets: Sequence[str | Path] | None
    """YAML files of overrides, applied before :attr:`overrides`."""
    threads: int | None
    """Physics threads (all cores); of a Gymnasium environment, threads that step it (one)."""
    device: str | None
    """Of the tensors (``cpu``)."""
    sim: str | None
    """The physics: ``mujoco`` (as usual) or ``warp``."""
    output: str | Path | None
    """Directory of the result, which is never overwritten (``runs/<run id>``)."""
    formatters: Sequence[str] | None
    """Forms of the result (``schema``, the bundle); none, ``()``, writes no file."""
    label: str | None
    """A name for this run in comparisons and reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[B]):
    """What a measured run left behind."""

    directory: Path
    """Its files are in here."""
    bundle: B
    """What was measured; the content of ``runtime.json``, ``startup.json``, ``training.json`` or ``play.json``."""
    paths: tuple[Path, ...]
    """The files that the bundle was written to."""

    @classmethod
    def of(cls, run: Benchmark[Any], **more: Any) -> Self:
        """Of a run that has ended; ``more`` are the fields of a subclass."""
        return cls(directory=run.output, bundle=cast("B", run.bundle), paths=tuple(run.paths), **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run on, and the files of the result."""

    recipe: EnvRecipe
    """With the settings of the presets, and a source that is known to exist."""
    presets: tuple[str, ...]
    """Their names."""
    output: Path | None
    formatters: Sequence[str]
    label: str | None

    @classmethod
    def of(cls, task: str | EnvRecipe, **options: Unpack[RunOptions]) -> RunRequest:
        """The request for a task by name, or for a recipe. Nothing heavy is imported for it.

        What the jobs decide themselves is refused in a recipe: another ``autoreset`` than ``same_step``, no final
        observations, strides of episodes.

        Args:
            task: a name or a recipe.
            **options: of the job.
        """
        from headrace.envs._overrides import read_preset

        for name in options:
            if name not in RunOptions.__annotations__:
                raise UnknownNameError("argument", name, RunOptions.__annotations__)
        names = ("num_envs", "seed", "overrides", "threads", "device", "sim")
        recipe = recipe_of(task, USUAL_ENVS, **{name: options.get(name) for name in names})
        plain = EnvRecipe("usual")
        for name in ("autoreset", "final_obs", "episode_stride"):
            if getattr(recipe, name) != getattr(plain, name):
                raise ConfigError(
                    f"recipe: expected {name}={getattr(plain, name)!r} here, got {getattr(recipe, name)!r}; "
                    "use recipe.replace(…)"
                )
        presets = [Path(preset) for preset in options.get("presets") or ()]
        preset_settings: dict[str, object] = {}
        for preset in presets:
            preset_settings |= read_preset(preset)
        output, forms = options.get("output"), options.get("formatters")
        return cls(
            recipe=recipe.replace(overrides=preset_settings | dict(recipe.overrides)),
            presets=tuple(preset.stem for preset in presets),
            output=None if output is None else Path(output),
            formatters=("schema",) if forms is None else forms,
            label=options.get("label"),
        )

    def settings(self, recipe: EnvRecipe, *, actions: Actions | None = None, **known: Any) -> RunSettings:
        """The identity of the run, as far as it is known before.

        Args:
            recipe: ours, or ours with settings that a checkpoint adds.
            actions: what acts, where it is not a policy.
            **known: further fields of ``RunSettings``: ``framework``, the RL library, ….
        """
        from headrace.bench import RunConfig, RunSettings
        from headrace.bench._capture import environment_variables

        overrides = {path: _plain(value) for path, value in sorted(recipe.overrides.items())}
        config = RunConfig(
            physics_backend="gymnasium" if recipe.bridged else recipe.sim,
            rendering_backend=None,
            presets=list(self.presets),
            overrides=overrides,
            device=recipe.device,
            threads=recipe.workers if recipe.bridged else recipe.threads,
            executor=recipe.executor if recipe.bridged else None,
            actions=actions,
            environment=environment_variables(),
        )
        return RunSettings(
            task=recipe.source,
            num_envs=recipe.num_envs,
            seed=recipe.seed,
            config=config,
            recipe=recipe.replace(overrides=overrides).to_json(),
            label=self.label,
            **known,
        )

    def measured(self, builder: MeasuredBy, **known: Any) -> Benchmark[MeasuredBy]:
        """What writes the result, also after a failure; raises an error if it could not be written.

        Args:
            builder: of the result.
            **known: further arguments of :meth:`settings`.
        """
        from headrace.bench import Benchmark

        settings = self.settings(self.recipe, **known)
        return Benchmark(builder, settings, output=self.output, formatters=self.formatters)


def recipe_of(source: str | EnvRecipe, usual_envs: int, **settings: Any) -> EnvRecipe:
    """What to make: the recipe given, or one of a name, or of a file, and what was said; its source exists.

    A recipe says everything, so that a setting that says something else is refused; what was said changes a recipe
    file's.

    Args:
        source: a name, a recipe, or the name of a recipe file.
        usual_envs: environments in the batch, where neither says.
        **settings: fields of a recipe; None where nothing was said.
    """
    said = {name: value for name, value in settings.items() if value is not None}
    check_seed_of_run(said.get("seed", 0))
    if isinstance(source, str):
        named = EnvRecipe.load(source) if is_recipe_file(source) else EnvRecipe(source, num_envs=usual_envs)
        threads = said.pop("threads", None) if named.bridged else None
        if threads is not None and (threads != 1 or named.workers is not None):
            said["workers"] = threads
            if not named.source.startswith(FOREIGN) and named.executor == "inline":
                said["executor"] = "threads"
        if "overrides" in said:
            said["overrides"] = {**named.overrides, **said["overrides"]}
        return named.replace(**said).resolve()
    for name, value in said.items():
        if source.replace(**{name: value}) != source:
            raise ConfigError(
                f"{name}: expected that of the recipe, {getattr(source, name)!r}, got {value!r}; "
                f"use recipe.replace({name}=…)"
            )
    return source.resolve()


def time_imports(startup: StartupClock, recipe: EnvRecipe, *more: str) -> None:
    """Do the imports of ``recipe``, and ``more`` modules; timed unless this process has done them before.

    A signal takes effect when they are whole: what is half imported, torch above all, cannot be imported again.
    """
    timed = nullcontext() if recipe.maker in sys.modules else startup.phase("python_imports")
    with delayed(), timed:
        for module in (recipe.maker, *more):
            importlib.import_module(module)


def check_device(startup: StartupClock, recipe: EnvRecipe) -> None:
    """Refuse a device that is not there before anything is written; on a CPU, torch is not imported for it."""
    if recipe.device != "cpu":
        time_imports(startup, recipe)
        from headrace.types import as_device

        as_device(recipe.device)


def check_counts(**counts: int | None) -> None:
    """Refuse a count, by its argument's name, that is less than 1; None is as if nothing were said."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{name} (--{name.replace('_', '-')}): expected at least 1, got {count}")


def check_seed_of_run(seed: int) -> None:
    """Refuse what not every library and generator takes for a seed."""
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"seed (--seed): expected a number of 64 bits, got {seed}; pass 0, 1, 2, …")


def check_new(path: Path | None, name: str) -> None:
    """Refuse a file or directory, given by the argument ``name``, that is there already; None is none."""
    if path is not None and path.exists():
        raise ConfigError(f"{name} (--{name}): {path} already exists, and nothing is ever overwritten")


@contextmanager
def open_env(run: Benchmark[Any], recipe: EnvRecipe, **changes: Any) -> Generator[AnyEnv]:
    """Make the environments of a run, timed, and close them when the block ends; ``changes`` are of the recipe."""
    with run.builder.startup.phase("env_creation"):
        env = recipe.make(**changes)
    run.name_renderer(rendering_backend(env))
    with closing(env):
        yield env


def rendering_backend(env: AnyEnv) -> str | None:
    """Which renderers draw the images of an environment; None where it has none, or does not tell."""
    from headrace.envs._batch_env import BatchEnv

    if not isinstance(env, BatchEnv) or not env.task.images:
        return None
    return ", ".join(sorted({spec.renderer_on(env.device) for spec in env.task.images.values()}))


def check_video(path: Path | None, renderer: str = "native") -> None:
    """Refuse a film that could not be drawn or written, or would be written over another; None is no film."""
    if renderer != "native":
        from headrace.sim._camera_names import check_camera_name

        check_camera_name(renderer)
    if path is not None:
        require_extra("av", extra="record", purpose="video (--video)")
        check_new(path, "video")


def film_env(env: AnyEnv, path: Path, renderer: str, stack: ExitStack) -> VideoObserver:
    """Film the first environments until ``stack`` is closed; returns what films them."""
    from headrace.envs._batch_env import BatchEnv
    from headrace.recording import VideoObserver

    if not isinstance(env, BatchEnv):
        raise ConfigError(f"video (--video): expected a task of ours to film, got {type(env).__name__}")
    render = env.open_renderer(renderer)
    observer = stack.enter_context(VideoObserver(path, render=render, fps=1.0 / env.task.dt))
    env.attach(observer)
    stack.callback(env.detach, observer)
    return observer


def _plain(value: object) -> JsonValue:
    """A setting as JSON: tuples as lists, what JSON does not know as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    return repr(value)
