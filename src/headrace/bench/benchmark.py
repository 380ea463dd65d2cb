"""The context of a run, which writes a bundle with its true status whatever happens; ``RunCfg``, where it goes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, Unpack, cast

from pydantic import JsonValue

from headrace._interrupts import delay_signals, hold_signals, interruptible, signal_name
from headrace.bench import schema
from headrace.bench.builders import Builder, Provenance
from headrace.bench.capture import ResourceMonitor, environment_variables, gpu_devices, hardware, versions
from headrace.bench.figures import check_formatters, output_path, write_formats
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, DataError, LifecycleError, UnknownNameError
from headrace.files import LOCK, Lock, Owner, check_writable, hide_secrets, write_whole

if TYPE_CHECKING:
    from headrace.bench.builders import StartupClock
    from headrace.bench.schema import Actions, PlayBundle, RuntimeBundle, StartupBundle, TrainingBundle
    from headrace.envs.recipe import AnyEnv


LABEL, SWEEP_ID, REPETITION = "HEADRACE_LABEL", "HEADRACE_SWEEP_ID", "HEADRACE_REPETITION"
ORDER_SEED = "HEADRACE_ORDER_SEED"
"""Environment variables by which a sweep tells its runs what they are."""

B = TypeVar("B", bound=Builder)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What is known of a run before it begins."""

    task: str
    num_envs: int
    seed: int
    config: schema.RunConfig
    recipe: dict[str, JsonValue] | None = None
    """The JSON form of what the environments are made of, where they are made of a recipe."""
    framework: str | None = None
    max_iterations: int | None = None
    label: str | None = None
    """A name for the side of a comparison; a sweep gives its runs one by the environment."""


class Benchmark(Generic[B]):
    """A run as a context manager::

        with Benchmark(RuntimeBuilder(), settings, output=Path("runs/one")) as run:
            with run.builder.startup.phase("env_creation"):
                env = headrace.make(...)
            ...
        print(run.paths)  # runs/one/runtime.json

    On entry the output directory is claimed and gets a bundle whose status is ``running``: of two runs with one output,
    the second is refused. On exit the bundle is replaced, also after an exception (``crashed``) and after Ctrl-C,
    SIGTERM or SIGHUP (``interrupted``), which then go on to the caller. :meth:`complete` gives the reason of an early
    stop. Resources are sampled from the moment at which the builder begins to measure.
    """

    def __init__(
        self,
        builder: B,
        settings: RunSettings,
        *,
        output: Path | None = None,
        formatters: Sequence[str] = ("schema",),
    ) -> None:
        """Check everything that could keep the result from being written; nothing runs yet.

        Args:
            builder: collects the measurements.
            settings: what the run is.
            output: directory for the files, made if needed; None for ``runs/<run id>``. A file of the same name in it
                is not overwritten.
            formatters: names as in ``--formatter``; ``schema`` is the bundle itself.
        """
        if settings.num_envs < 1:
            raise ConfigError(f"num_envs: expected at least 1, got {settings.num_envs}")
        self.builder = builder
        self.settings = settings
        self._made_utc = datetime.now(UTC)
        self.output = Path("runs") / self.run_id if output is None else output
        self.formatters = check_output(self.output, builder.kind, formatters)
        self.monitor = ResourceMonitor()
        self.paths: list[Path] = []
        """The files that were written."""
        self.resumed_from: schema.ResumedFrom | None = None
        """Set it before the run ends, if it continues another."""
        self._bundle: schema.Bundle | None = None
        self._reason: str | None = None
        self._measuring = False

    @property
    def bundle(self) -> schema.Bundle:
        """The bundle that was written."""
        if self._bundle is None:
            raise LifecycleError("Benchmark.bundle: expected a run that has ended; read it after the with block")
        return self._bundle

    @property
    def failed(self) -> bool:
        """Whether the run ended, and did not complete."""
        return self._bundle is not None and self._bundle.run.status != "completed"

    @property
    def run_id(self) -> str:
        """``{framework or kind}_{physics}_{task}_{stamp}_seed{n}``, fit for a file name."""
        known, stamp = self.settings, self._made_utc.strftime("%Y%m%d-%H%M%S-%f")[:-3]
        what = (known.framework or self.builder.kind, known.config.physics_backend, known.task)
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part) for part in (*what, stamp, f"seed{known.seed}"))

    def name_renderer(self, renderer: str | None) -> None:
        """Which renderers draw the images of the environments, known once those are made."""
        config = self.settings.config.model_copy(update={"rendering_backend": renderer})
        self.settings = replace(self.settings, config=config)

    def complete(self, reason: str) -> None:
        """End the run early because it is done, for ``reason``; its status will be ``completed``."""
        self._reason = reason

    def __enter__(self) -> Self:
        self._owner = Owner()
        self._versions, self._hardware = versions(Path.cwd()), hardware()
        self._began_utc, self._began = datetime.now(UTC), time.perf_counter()
        with contextlib.ExitStack() as held:
            held.enter_context(interruptible())
            held.enter_context(self._claim())
            self._held = held.pop_all()
        self.builder.on_begin = self._begin_to_measure
        self.monitor.start()
        return self

    @contextlib.contextmanager
    def _claim(self) -> Generator[None]:
        """Hold the output directory, marked as in use."""
        self.output.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(Lock(self.output)):
            check_output(self.output, self.builder.kind, self.formatters)
            marker = output_path("schema", self.builder.kind, self.output)
            origin = self._origin("running", gpus="torch" in sys.modules)  # not imported here: that is measured
            write_whole(marker, hide_secrets(schema.bundle_text(self.builder.build(origin))))
            try:
                yield
            finally:
                if "schema" not in self.formatters:
                    marker.unlink(missing_ok=True)
                (self.output / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # it has files, unless the run was withdrawn
                    self.output.rmdir()

    def _begin_to_measure(self) -> None:
        self._measuring = True
        self.monitor.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._owner.is_here:
            return  # a fork: the bundle and the directory are its parent's
        # signals that come now are held back: a second Ctrl-C must not cost the result
        with self._held, hold_signals():
            self.monitor.stop()
            if isinstance(error, (ConfigError, DataError)) and not self._measuring:
                # a request that turned out to be impossible before anything was measured leaves nothing behind
                output_path("schema", self.builder.kind, self.output).unlink(missing_ok=True)
                return
            # the error may have come while torch was being imported: a second try can end the process
            gpus = error is None or "torch" in sys.modules
            self._bundle = self.builder.build(self._origin(*_outcome(error, self._reason), gpus=gpus))
            self.paths = write_formats(self._bundle, self.formatters, self.output)

    def _origin(
        self, status: schema.Status, reason: str | None = None, error: schema.RunError | None = None, *, gpus: bool
    ) -> Provenance:
        settings = replace(self.settings, label=self.settings.label or os.environ.get(LABEL))
        run = schema.RunIdentity(
            **vars(settings),
            run_id=self.run_id,
            start_time_utc=_iso(self._began_utc),
            end_time_utc=_iso(datetime.now(UTC)),
            duration_s=time.perf_counter() - self._began,
            status=status,
            status_reason=reason,
            error=error,
            command=[hide_secrets(word) for word in sys.argv],
            sweep_id=os.environ.get(SWEEP_ID),
            repetition=_sweep_number(REPETITION),
            order_seed=_sweep_number(ORDER_SEED),
            resumed_from=self.resumed_from,
        )
        machine = self._hardware.model_copy(update={"gpu_devices": gpu_devices() if gpus else []})
        return Provenance(run=run, versions=self._versions, hardware=machine, resources=self.monitor.resources())


def check_output(output: Path, kind: schema.Kind, formatters: Sequence[str]) -> tuple[str, ...]:
    """Raise an error now if the files of a run could not be written to ``output`` afterwards.

    Returns:
        The formatters, each once.
    """
    names = check_formatters(formatters)
    for name in names:
        path = output_path(name, kind, output)
        if path.exists():
            raise ConfigError(
                f"output: expected a directory without {path.name}, got {str(output)!r}, which has one; "
                "remove it or choose another directory with --output"
            )
    check_writable(output)
    return names


def _outcome(
    error: BaseException | None, reason: str | None
) -> tuple[schema.Status, str | None, schema.RunError | None]:
    if error is None:
        return "completed", reason, None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", signal_name(error), None
    details = schema.RunError(
        type=type(error).__name__,
        message=str(error),
        traceback=[line.rstrip("\n") for line in traceback.format_exception(error)],
    )
    return "crashed", f"{details.type}: {details.message}", details


def _sweep_number(variable: str) -> int | None:
    return int(os.environ[variable]) if variable in os.environ else None


def _iso(moment: datetime) -> str:
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


R = TypeVar("R", "PlayBundle", "RuntimeBundle", "StartupBundle", "TrainingBundle")
USUAL_ENVS = 64
"""Environments in a batch where their number is not given."""


@dataclass(frozen=True, kw_only=True)
class RunCfg:
    """Where the result of a measured run goes, in which forms, and what the run is called."""

    output: str | Path | None = None
    """Where to write the result: a new file, or a new directory of several files (default: ``runs/<run id>``; nothing
    is overwritten)."""
    formatters: Sequence[str] = ("schema",)
    """Forms of the result: schema (the bundle), isaaclab, summary, or module:function, which makes a text of a bundle.
    Without any, no file is written."""
    label: str | None = None
    """Name of this run in comparisons and reports."""
    log: Sequence[str] = ()
    """Write the curves of a training while it runs: tensorboard, below the result, or wandb."""

    def recipe(self, task: str | EnvRecipe, **env: Unpack[EnvKeywords]) -> EnvRecipe:
        """Return the recipe of a task by name, or a recipe itself, checked; imports nothing heavy.

        Settings that a measured run decides itself are refused in a recipe: another ``autoreset`` than ``same_step``,
        no final observations, strides of episodes.

        Args:
            task: a name or a recipe.
            **env: fields of the recipe; of a recipe they must be equal.
        """
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
        return recipe

    def settings(self, recipe: EnvRecipe, *, actions: Actions | None = None, **known: Any) -> RunSettings:
        """Return the identity of a run, as far as it is known before it begins.

        Args:
            recipe: of :meth:`recipe`, or that one with settings that a checkpoint adds.
            actions: what acts, where it is not a policy.
            **known: further fields of ``RunSettings``: ``framework``, the RL library, ….
        """
        overrides = json.loads(json.dumps(dict(recipe.overrides), sort_keys=True, default=repr))
        config = schema.RunConfig(
            physics_backend="gymnasium" if recipe.bridged else recipe.sim,
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

    def measure(self, builder: B, recipe: EnvRecipe, **known: Any) -> Benchmark[B]:
        """Return the context that writes the result, also after a failure; raises if it could not be written.

        Args:
            builder: of the result.
            recipe: of :meth:`recipe`.
            **known: further arguments of :meth:`settings`.
        """
        if self.log and builder.kind != "training":
            raise ConfigError(f"log: expected a training, got {builder.kind}, which has no curves")
        output = None if self.output is None else Path(self.output)
        return Benchmark(builder, self.settings(recipe, **known), output=output, formatters=self.formatters)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult(Generic[R]):
    """What a measured run left behind."""

    directory: Path
    """Its files are in here."""
    bundle: R
    """What was measured; the content of ``runtime.json``, ``startup.json``, ``training.json`` or ``play.json``."""
    paths: tuple[Path, ...]
    """The files that the bundle was written to."""

    @classmethod
    def of(cls, run: Benchmark[Any], **more: Any) -> Self:
        """Of a run that has ended; ``more`` are the fields of a subclass."""
        return cls(directory=run.output, bundle=cast("R", run.bundle), paths=tuple(run.paths), **more)


def time_imports(startup: StartupClock, recipe: EnvRecipe, *more: str) -> None:
    """Do the imports of ``recipe``, and ``more`` modules; timed unless this process has done them before.

    A signal takes effect when they are whole: what is half imported, torch above all, cannot be imported again.
    """
    timed = nullcontext() if recipe.maker in sys.modules else startup.phase("python_imports")
    with delay_signals(), timed:
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
