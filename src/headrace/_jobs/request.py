"""What every measured job is asked for: an environment to run on, and where the result goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.errors import ConfigError, require_extra

if TYPE_CHECKING:
    from pydantic import JsonValue

    from headrace.bench import RunConfig, RunSettings
    from headrace.bench._schema import Actions, Kind
    from headrace.bench._step_times import StartupClock
    from headrace.bench._targets import AnyEnv, Target
    from headrace.envs import EnvRecipe, TaskCfg


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """An environment by name, with its settings, and the files of the result."""

    task: str
    """A task name, ``module:NAME``, or ``gym:ID``."""
    num_envs: int = 64
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    sim: str = "mujoco"
    overrides: Mapping[str, object] = field(default_factory=dict[str, object])
    presets: Sequence[Path] = ()
    """YAML files of overrides, applied before :attr:`overrides`."""
    output: Path | None = None
    """Directory of the result; None for ``runs/<run id>``."""
    formatters: Sequence[str] = ("schema",)
    label: str | None = None

    @classmethod
    def of(
        cls,
        task: str | EnvRecipe,
        *,
        presets: Sequence[str | Path] = (),
        output: str | Path | None = None,
        formatters: Sequence[str] = ("schema",),
        label: str | None = None,
        **settings: Any,
    ) -> RunRequest:
        """The request for a task by name, or for a recipe, as :func:`agreed_settings` has it.

        What a job cannot use of a recipe is refused: another ``autoreset`` than ``same_step``, no final observations,
        strides of episodes, and executors of a bridge other than a number of threads.

        Args:
            task: a name or a recipe.
            presets: YAML files of overrides.
            output: directory of the result.
            formatters: forms of the result.
            label: a name for the run.
            **settings: of the environments, by the names of our fields; None where nothing was said.
        """
        said = agreed_settings(task, **settings)
        if not isinstance(task, str):
            said = {name: getattr(task, name) for name in settings}
            unused = ["autoreset", "final_obs", "episode_stride"]
            if task.executor == "threads" and task.workers is not None:
                said["threads"] = task.workers
            else:
                unused += ["executor", "workers"]
            plain = type(task)(task.source)
            for name in unused:
                if getattr(task, name) != getattr(plain, name):
                    raise ConfigError(
                        f"recipe: expected {name}={getattr(plain, name)!r} here, got {getattr(task, name)!r}; "
                        "use recipe.replace(…)"
                    )
        return cls(
            task=task if isinstance(task, str) else task.source,
            presets=[Path(preset) for preset in presets],
            output=None if output is None else Path(output),
            formatters=formatters,
            label=label,
            **said,
        )

    def target(self, *, ours_for: str | None = None) -> Target:
        """What to run on; raises an error if no environment could be made of it. Nothing heavy is imported.

        Args:
            ours_for: the job, where it takes tasks of ours only.
        """
        from headrace.bench._targets import check_request, parse_target

        target = parse_target(self.task)
        check_request(target, num_envs=self.num_envs, sim=self.sim, device=self.device)
        if ours_for is not None and target.kind == "gym":
            raise ConfigError(f"{ours_for}: expected a task of headrace, got {target.text!r}; see 'headrace tasks'")
        return target

    def all_overrides(self) -> dict[str, object]:
        """Settings of the presets, then the overrides."""
        from headrace.bench._targets import read_preset

        found: dict[str, object] = {}
        for preset in self.presets:
            found |= read_preset(preset)
        return found | dict(self.overrides)

    def config(self, target: Target, overrides: Mapping[str, object], *, actions: Actions | None = None) -> RunConfig:
        """The settings that a comparison holds two runs to."""
        from headrace.bench import RunConfig, environment_variables

        return RunConfig(
            physics_backend=self.sim if target.kind == "task" else target.physics,
            rendering_backend=None,
            presets=[preset.stem for preset in self.presets],
            overrides={path: _plain(value) for path, value in sorted(overrides.items())},
            device=self.device,
            threads=self.threads,
            actions=actions,
            environment=environment_variables(),
        )

    def settings(self, config: RunConfig) -> RunSettings:
        """The identity of the run, as far as it is known before."""
        from headrace.bench import RunSettings

        return RunSettings(task=self.task, num_envs=self.num_envs, seed=self.seed, config=config, label=self.label)

    def make_env(
        self, target: Target, cfg: TaskCfg | None, overrides: Mapping[str, object], *, for_plan: bool = False
    ) -> AnyEnv:
        """The environment, with the settings of ``target_cfg``; ``for_plan``, one that plays a plan of episodes."""
        from headrace.bench._targets import make_target

        return make_target(
            target,
            cfg,
            self.num_envs,
            seed=self.seed,
            threads=self.threads,
            device=self.device,
            sim=self.sim,
            overrides=overrides,
            autoreset="disabled" if for_plan else "same_step",
            final_obs=not for_plan,
        )

    def checked_output(
        self, target: Target, kind: Kind, *, framework: str | None = None
    ) -> tuple[Path, tuple[str, ...]]:
        """Where the result goes and in which forms; raises an error if it could not be written there."""
        from headrace.bench._benchmark import check_output, run_id

        physics = self.sim if target.kind == "task" else target.physics
        name = run_id(
            framework=framework or kind, physics=physics, task=self.task, seed=self.seed, began=datetime.now(UTC)
        )
        directory = Path("runs") / name if self.output is None else self.output
        return directory, check_output(directory, kind, self.formatters)


def agreed_settings(source: str | EnvRecipe, **settings: Any) -> dict[str, Any]:
    """The settings of environments that were said; a recipe says everything, so that one that differs is refused.

    Args:
        source: a name, or a recipe.
        **settings: fields of a recipe; None where nothing was said.
    """
    said = {name: value for name, value in settings.items() if value is not None}
    if not isinstance(source, str):
        for name, value in said.items():
            if source.replace(**{name: value}) != source:
                raise ConfigError(
                    f"{name}: expected that of the recipe, {getattr(source, name)!r}, got {value!r}; "
                    f"use recipe.replace({name}=…)"
                )
    return said


def imports_phase(startup: StartupClock, target: Target) -> AbstractContextManager[None]:
    """Time the imports of ``target``; not, and null in the bundle, where this process has done them before."""
    from headrace.bench._targets import environments_module

    done = environments_module(target) in sys.modules
    return nullcontext() if done else startup.phase("python_imports")


def check_video(path: Path | None, renderer: str = "native") -> None:
    """Refuse a film that could not be drawn or written, or would be written over another; None is no film."""
    from headrace.sim._camera_names import check_camera_name

    check_camera_name(renderer)
    if path is None:
        return
    require_extra("av", extra="record", purpose="video (--video)")
    if path.exists():
        raise ConfigError(f"video (--video): {path} already exists, and nothing is ever overwritten")


def _plain(value: object) -> JsonValue:
    """A setting as JSON: tuples as lists, what JSON does not know as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast("list[object]", value)]
    return repr(value)
