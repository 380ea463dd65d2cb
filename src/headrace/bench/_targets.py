"""What a benchmark runs on: a task of ours by name, or any Gymnasium environment over a bridge."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from headrace._gymnasium_ids import GYMNASIUM, IDS
from headrace.errors import ConfigError, DataError, UnknownNameError

if TYPE_CHECKING:
    from headrace.envs import BatchEnv, TaskCfg
    from headrace.envs.bridges import BridgeEnv

AnyEnv: TypeAlias = "BatchEnv | BridgeEnv"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An environment by name; known to exist."""

    text: str
    """As the user wrote it."""
    kind: Literal["task", "gym"]
    name: str
    """Registered name of the task, or Gymnasium id."""
    module: str | None = None
    """What to import first: it registers the name."""

    @property
    def physics(self) -> str:
        """For the run id, where no ``--sim`` says it."""
        return "gymnasium" if self.kind == "gym" else "mujoco"


def parse_target(text: str) -> Target:
    """``ant``, ``gym:CartPole-v1``; ``module:task`` and ``gym:module:Id-v0`` for what importing a module registers.

    An unknown name raises an error that suggests the nearest; for names of ours and of Gymnasium nothing heavy is
    imported.
    """
    module, colon, name = text.removeprefix(GYMNASIUM).rpartition(":")
    if colon:
        import_users_module(module, text)
    if text.startswith(GYMNASIUM):
        _check_gym_id(name)
        return Target(text=text, kind="gym", name=name, module=module or None)
    known = list(IDS.values())
    if not colon and name not in known:
        known += [point.name for point in entry_points(group="headrace.tasks")]
    if colon or "headrace.envs._registry" in sys.modules:  # this process may have registered tasks
        from headrace.envs import task_names

        known = task_names()
    found = next((bare for bare in _bare_names(name) if bare in known), None)
    if found is None:
        raise UnknownNameError("task", name, known)
    return Target(text=text, kind="task", name=found, module=module or None)


def _bare_names(name: str) -> list[str]:
    """What a task may be called: its name, its Gymnasium id, either with a namespace before or ``-Play`` after it."""
    played = re.sub(r"-Play(?=-v\d+$|$)", "", name)
    plain = [name, played, played.rpartition("/")[2]]
    return [*plain, *(IDS[spelled] for spelled in (played, f"headrace/{plain[-1]}") if spelled in IDS)]


def import_users_module(module: str, text: str, option: str = "task") -> ModuleType:
    """Import a module of the user's, which may be in the directory that the command was started in."""
    # a script's own directory is on Python's path, that of an installed command is not: people mean where they are
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{option} {text!r}: module {module!r} cannot be imported: {error}") from error


def load_attribute(module: str, name: str, option: str) -> object:
    """What ``module:name`` means, for an option that takes it."""
    found = import_users_module(module, f"{module}:{name}", option)
    try:
        return getattr(found, name)
    except AttributeError:
        raise UnknownNameError(f"name in {module} for {option}:", name, dir(found)) from None


def read_preset(path: Path) -> dict[str, object]:
    """Settings of a task from a YAML file: ``path: value`` lines, nested or with dots."""
    import yaml

    try:
        found: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise DataError(f"--preset {path}: expected a YAML file, got: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"--preset {path}: expected YAML, got: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"--preset {path}: expected settings as 'path: value' lines, got {type(found).__name__}")
    return _flat(cast("Mapping[object, object]", found), "")


def check_request(target: Target, *, num_envs: int, sim: str, device: str) -> None:
    """Raise an error if no environment could be made of this; nothing heavy is imported."""
    if num_envs < 1:
        raise ConfigError(f"--num-envs: expected at least 1, got {num_envs}")
    from headrace.envs._recipe import SIMS

    if sim not in SIMS:
        raise UnknownNameError("sim", sim, SIMS)
    if target.kind == "gym" and sim != "mujoco":
        raise ConfigError(f"--sim: expected none with {target.text!r}, which brings its own physics; got {sim!r}")
    if target.kind == "gym" and device != "cpu":
        raise ConfigError(f"--device: expected cpu with {target.text!r}, which is stepped there; got {device!r}")


def import_environments(target: Target) -> None:
    """Import what makes the environments; the time of it is a phase of its own."""
    importlib.import_module(environments_module(target))


def environments_module(target: Target) -> str:
    """The module that makes the environments. Packages above it import lazily: naming those would import nothing."""
    return "headrace.envs.bridges._make" if target.kind == "gym" else "headrace.envs._registry"


def target_cfg(target: Target, overrides: Mapping[str, object]) -> TaskCfg | None:
    """The settings of a task, overrides applied and checked; None for a Gymnasium environment, which takes them."""
    if target.kind == "gym":
        return None
    from headrace.envs import task_cfg

    return task_cfg(target.name, overrides)


def make_target(
    target: Target,
    cfg: TaskCfg | None,
    num_envs: int,
    *,
    seed: int,
    threads: int | None = None,
    device: str = "cpu",
    sim: str = "mujoco",
    overrides: Mapping[str, object] | None = None,
    autoreset: Literal["same_step", "disabled"] = "same_step",
    final_obs: bool = True,
) -> AnyEnv:
    """The environment, with the settings of :func:`target_cfg`; overrides of a Gymnasium environment are its kwargs."""
    if target.kind == "gym":
        from headrace.envs.bridges import bridge

        executor: Literal["inline", "threads"] = "inline" if threads in (None, 1) else "threads"
        workers = None if executor == "inline" else threads
        kwargs = dict(overrides or {}) or None
        return bridge(
            target.name,
            num_envs,
            seed=seed,
            executor=executor,
            workers=workers,
            env_kwargs=kwargs,
            autoreset=autoreset,
            final_obs=final_obs,
        )
    from headrace.envs import SimName, make, make_task

    task = make_task(target.name, cfg)
    return make(
        task,
        num_envs,
        seed=seed,
        threads=threads,
        device=device,
        sim=cast("SimName", sim),
        autoreset=autoreset,
        final_obs=final_obs,
    )


def rendering_backend(env: AnyEnv) -> str | None:
    """Which renderers draw the images of an environment; None where it has none, or does not tell."""
    from headrace.envs import BatchEnv

    if not isinstance(env, BatchEnv) or not env.task.pictures:
        return None
    return ", ".join(sorted({spec.renderer for spec in env.task.pictures.values()}))


def _check_gym_id(name: str) -> None:
    import gymnasium

    try:
        gymnasium.spec(name)
    except gymnasium.error.UnregisteredEnv as error:
        raise UnknownNameError("Gymnasium environment", name, gymnasium.registry) from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"{name!r}: Gymnasium does not accept this id: {error}") from error


def _flat(settings: Mapping[object, object], prefix: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= _flat(cast("Mapping[object, object]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
