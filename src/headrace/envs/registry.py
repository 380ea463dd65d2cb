"""Tasks by name: what there is, and how to make environments of it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import cast

import torch

from headrace._gymnasium_ids import GYMNASIUM
from headrace._named import import_module
from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import (
    ENTRY_POINTS,
    FOREIGN_SIMS,
    Autoreset,
    EnvRecipe,
    EpisodeRules,
    SimName,
    match_name,
    with_overrides,
)
from headrace.envs.task import Task, TaskCfg
from headrace.envs.tasks.libero.names import LIBERO, split_name
from headrace.errors import ConfigError, DeviceError
from headrace.sim import Simulation
from headrace.sim.mujoco_sim import MujocoSim
from headrace.types import as_device


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry:
    """How to find a task without importing it."""

    name: str
    """As in ``headrace.make``: lower case with dashes."""
    task: str | Callable[[TaskCfg], Task]
    """``module:Class``, or the class itself."""
    cfg: str | Callable[[], TaskCfg]
    """``module:Class``, or the class itself; made without arguments it gives the defaults."""
    summary: str
    """One line for ``headrace tasks``."""


_TASKS: dict[str, TaskEntry] = {}


def register_task(entry: TaskEntry) -> None:
    """Make a task known by name. A name that is taken is refused."""
    if entry.name in _TASKS:
        raise ConfigError(f"register_task: {entry.name!r} is taken; choose another name")
    _TASKS[entry.name] = entry


def task_names() -> list[str]:
    """Return the names of all registered tasks, those of installed packages included, sorted.

    LIBERO's 130 are left out.
    """
    return sorted({*_TASKS, *_entry_points()})


def task_entry(name: str) -> TaskEntry:
    """Return the entry of a task; an unknown name raises an error that suggests the nearest.

    ``module:NAME`` imports the module first: NAME is a ``TaskEntry`` in it, or a task that it registers. A name may be
    a Gymnasium id, or have a namespace before it or ``-Play`` after it, as Isaac Lab's have.
    """
    module, colon, own = name.rpartition(":")
    if colon:
        found = getattr(import_module(module, f"task {name!r}"), own, None)
        if isinstance(found, TaskEntry):
            return found
    if own.startswith(LIBERO):
        split_name(own)
        return TaskEntry(
            name=own,
            task="headrace.envs.tasks.libero.task:Libero",
            cfg=functools.partial(_libero_cfg, own),
            summary="a task of LIBERO; 'headrace tasks libero' lists them",
        )
    known = match_name(own, task_names())
    if known not in _TASKS:
        _TASKS[known] = _load_entry(_entry_points()[known])
    return _TASKS[known]


def task_cfg(name: str, overrides: Mapping[str, object] | None = None) -> TaskCfg:
    """Return the settings of a task, with ``overrides`` (path → value) applied."""
    cfg = cast("Callable[[], TaskCfg]", _resolve(task_entry(name).cfg))()
    return with_overrides(cfg, overrides or {})


def make_task(name: str, cfg: TaskCfg | None = None) -> Task:
    """Return a task by name, with its default settings unless ``cfg`` is given."""
    build = cast("Callable[[TaskCfg], Task]", _resolve(task_entry(name).task))
    return build(cfg if cfg is not None else task_cfg(name))


def make(
    task: str | Task,
    num_envs: int = 1,
    *,
    seed: int = 0,
    threads: int | None = None,
    device: torch.device | str = "cpu",
    sim: SimName = "mujoco",
    autoreset: Autoreset = "same_step",
    final_obs: bool = True,
    overrides: Mapping[str, object] | None = None,
    episode_stride: int | None = None,
) -> BatchEnv:
    """Make a batch of environments whose arrays are torch tensors.

    Args:
        task: a registered name (``headrace tasks`` lists them), ``module:NAME``, or a task of your own.
        num_envs: how many environments, N.
        seed: with an episode's id, all that its randomness depends on.
        threads: native physics threads; None for all cores. Results do not depend on it.
        device: where the tensors are: ``cpu`` for ``sim="mujoco"``, a CUDA device or ``cpu`` for ``sim="warp"``.
        sim: the physics: ``mujoco`` (native, the default) or ``warp`` (MuJoCo Warp; needs ``headrace[warp]``).
        autoreset: ``same_step`` starts the next episode in the step that ended one; with ``disabled`` an ended
            environment is inactive until its reset.
        final_obs: False for callers that never bootstrap.
        overrides: task settings by path, for example ``{"ctrl_cost_weight": 0.1}``; with a registered name only.
        episode_stride: from an environment's episode id to its next one; None for ``num_envs``. Workers that share a
            seed pass the number of environments of all of them, so that their ids never collide.
    """
    episodes = EpisodeRules(seed=seed, autoreset=autoreset, final_obs=final_obs, episode_stride=episode_stride)
    recipe = EnvRecipe(
        task if isinstance(task, str) else type(task).__name__,
        num_envs=num_envs,
        overrides=overrides or {},
        threads=threads,
        device=str(device),
        sim=sim,
        **episodes,
    )
    if isinstance(task, Task):
        if overrides:
            raise ConfigError("overrides: expected a registered task name with them, got a task; change its settings")
        chosen = task
    else:
        if task.startswith(GYMNASIUM):
            raise ConfigError(f"make: {task!r} is a Gymnasium environment; use EnvRecipe({task!r}, …).make()")
        chosen = make_task(task, task_cfg(task, overrides))
    if sim in FOREIGN_SIMS:
        raise ConfigError(f"make: sim={sim!r} runs in another interpreter; use EnvRecipe(…, sim={sim!r}).make()")
    physics = _make_sim(chosen, num_envs, threads, as_device(device), sim)
    env = BatchEnv(chosen, physics, threads=threads, **episodes)
    env.recipe = recipe if isinstance(task, str) else None
    return env


def _make_sim(task: Task, num_envs: int, threads: int | None, device: torch.device, sim: SimName) -> Simulation:
    if sim == "mujoco":
        if device.type != "cpu":
            raise DeviceError(f'device: expected "cpu" for sim="mujoco", got {str(device)!r}; use sim="warp" on a GPU')
        return MujocoSim(
            *(task.model, num_envs),
            threads=threads,
            current_positions=task.current_positions,
            controlled=task.controlled,
        )
    from headrace.sim.warp_sim import MujocoWarpSim  # takes seconds to import: only for those who use it

    return MujocoWarpSim(task.model, num_envs, device=device, njmax=task.cfg.njmax, nconmax=task.cfg.nconmax)


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load_entry(point: EntryPoint) -> TaskEntry:
    whose = f"entry point {point.name!r} of {ENTRY_POINTS} ({point.value})"
    try:
        entry: object = point.load()
    except Exception as error:  # whatever a foreign package raises when it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{whose} cannot be loaded: {reason}; mend, reinstall or remove its package") from error
    if not isinstance(entry, TaskEntry):
        raise ConfigError(f"{whose}: expected a TaskEntry, got {type(entry).__name__}")
    return entry


def _resolve(target: object) -> object:
    if not isinstance(target, str):
        return target
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def _libero_cfg(name: str) -> TaskCfg:
    from headrace.envs.tasks.libero.task import LiberoCfg

    return LiberoCfg(task=name)


def _builtin(name: str, module: str, task: str, cfg: str, summary: str) -> None:
    where = f"headrace.envs.tasks.{module}"
    register_task(TaskEntry(name=name, task=f"{where}:{task}", cfg=f"{where}:{cfg}", summary=summary))


_builtin("aloha-insertion", "aloha", "AlohaInsertion", "AlohaCfg", "put a peg into a socket with two arms (gym-aloha)")
_builtin(
    *("aloha-insertion-state", "aloha", "AlohaInsertion", "AlohaStateCfg"),
    "aloha-insertion from the poses of peg and socket, without a camera",
)
_builtin(
    *("aloha-transfer-cube", "aloha", "AlohaTransferCube", "AlohaCfg"),
    "pass a cube from one arm to the other (gym-aloha)",
)
_builtin(
    *("aloha-transfer-cube-state", "aloha", "AlohaTransferCube", "AlohaStateCfg"),
    "aloha-transfer-cube from the pose of the cube, without a camera",
)
_builtin("ant", "walking", "Ant", "AntCfg", "run forward on four legs (Gymnasium Ant-v5)")
_builtin("cartpole", "cartpole", "Cartpole", "CartpoleCfg", "balance a frictionless pole from random starts")
_builtin("cartpole-camera", "cartpole", "CartpoleCamera", "CartpoleCameraCfg", "cartpole seen by a camera")
_builtin(
    *("cartpole-camera-terms", "cartpole", "TermTask", "cartpole_camera_terms"),
    "cartpole-camera written as terms",
)
_builtin("cartpole-discrete", "cartpole", "CartpoleDiscrete", "CartpoleCfg", "cartpole with two actions")
_builtin("cartpole-terms", "cartpole", "TermTask", "cartpole_terms", "cartpole written as terms")
_builtin("humanoid", "walking", "Humanoid", "HumanoidCfg", "walk forward on two legs (Gymnasium Humanoid-v5)")
_builtin(
    *("inverted-pendulum", "cartpole", "InvertedPendulum", "InvertedPendulumCfg"),
    "balance a pole on a cart (Gymnasium InvertedPendulum-v5)",
)
_builtin("pusher", "pusher", "Pusher", "PusherCfg", "push a cylinder to a fixed goal (Gymnasium Pusher-v5)")
_builtin("pusher-camera", "pusher", "PusherCamera", "PusherCameraCfg", "pusher-goal seen by a camera")
_builtin("pusher-goal", "pusher", "PusherGoal", "PusherGoalCfg", "push a cylinder to a random goal; ends on success")
_builtin("pusher-solid", "pusher", "PusherSolid", "PusherSolidCfg", "pusher-goal with an object that has weight")
_builtin("pusher-words", "pusher", "PusherWords", "PusherWordsCfg", "pusher-solid with a goal named in words")
