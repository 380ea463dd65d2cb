"""``RunCfg``: where the result of a measured run goes, and the steps that all measured runs have in common."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast

from headrace._interrupts import delayed
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.bench._benchmark import Benchmark, RunSettings
    from headrace.bench._builders import Builder, StartupClock
    from headrace.bench.schema import Actions, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
    from headrace.envs.recipe import AnyEnv

B = TypeVar("B", "PlayBundle", "RuntimeBundle", "StartupBundle", "TrainingBundle")
MeasuredBy = TypeVar("MeasuredBy", bound="Builder")
USUAL_ENVS = 64
"""Environments in a batch where their number is not given."""


@dataclass(frozen=True, kw_only=True)
class RunCfg:
    """Where the result of a measured run goes, in which forms, and what the run is called."""

    output: str | Path | None = None
    """Where to write the result (default: ``runs/<run id>``; nothing is overwritten)."""
    formatters: Sequence[str] = ("schema",)
    """Forms of the result: schema (the bundle), isaaclab, json, omniperf, osmo, summary, tensorboard, or
    module:function of your own. Without any, no file is written."""
    label: str | None = None
    """Name of this run in comparisons and reports."""
    presets: Sequence[str | Path] = ()
    """YAML files of task settings ('path: value' lines), applied before ``overrides``."""
    ema_alpha: float = 0.1
    """Weight of the newest value in the smoothed curves of a training."""
    series: bool = True
    """Keep the curves of a training, instead of their final values only."""

    def recipe(self, task: str | EnvRecipe, **env: Unpack[EnvKeywords]) -> EnvRecipe:
        """Return the recipe of a task by name, or a recipe itself, with the presets applied; imports nothing heavy.

        Settings that a measured run decides itself are refused in a recipe: another ``autoreset`` than ``same_step``,
        no final observations, strides of episodes.

        Args:
            task: a name or a recipe.
            **env: fields of the recipe; of a recipe they must be equal.
        """
        from headrace.envs.recipe import read_preset

        for name in env:
            if name not in EnvKeywords.__annotations__:
                raise UnknownNameError("argument", name, EnvKeywords.__annotations__)
        recipe = EnvRecipe.of(task, USUAL_ENVS, **env)
        plain = EnvRecipe("usual")
        for name in ("autoreset", "final_obs", "episode_stride"):
            if getattr(recipe, name) != getattr(plain, name):
                raise ConfigError(
                    f"recipe: expected {name}={getattr(plain, name)!r} here, got {getattr(recipe, name)!r}; "
                    "use recipe.replace(…)"
                )
        settings: dict[str, object] = {}
        for preset in self.presets:
            settings |= read_preset(Path(preset))
        return recipe.replace(overrides=settings | dict(recipe.overrides))

    def settings(self, recipe: EnvRecipe, *, actions: Actions | None = None, **known: Any) -> RunSettings:
        """Return the identity of a run, as far as it is known before it begins.

        Args:
            recipe: of :meth:`recipe`, or that one with settings that a checkpoint adds.
            actions: what acts, where it is not a policy.
            **known: further fields of ``RunSettings``: ``framework``, the RL library, ….
        """
        from headrace.bench._benchmark import RunSettings
        from headrace.bench._capture import environment_variables
        from headrace.bench.schema import RunConfig

        overrides = {path: _plain(value) for path, value in sorted(recipe.overrides.items())}
        config = RunConfig(
            physics_backend="gymnasium" if recipe.bridged else recipe.sim,
            rendering_backend=None,
            presets=[Path(preset).stem for preset in self.presets],
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

    def measure(self, builder: MeasuredBy, recipe: EnvRecipe, **known: Any) -> Benchmark[MeasuredBy]:
        """Return the context that writes the result, also after a failure; raises if it could not be written.

        Args:
            builder: of the result.
            recipe: of :meth:`recipe`.
            **known: further arguments of :meth:`settings`.
        """
        from headrace.bench._benchmark import Benchmark

        if builder.kind != "training" and (self.ema_alpha, self.series) != (RunCfg.ema_alpha, RunCfg.series):
            raise ConfigError(f"ema_alpha, series: expected a training, got {builder.kind}, which has no curves")
        output = None if self.output is None else Path(self.output)
        return Benchmark(builder, self.settings(recipe, **known), output=output, formatters=self.formatters)


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
    from headrace.envs.batch_env import BatchEnv

    if not isinstance(env, BatchEnv) or not env.task.images:
        return None
    return ", ".join(sorted({spec.renderer_on(env.device) for spec in env.task.images.values()}))


def _plain(value: object) -> JsonValue:
    """Return a setting as JSON: tuples as lists, what JSON does not know as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    return repr(value)
