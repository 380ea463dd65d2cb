"""``headrace.run``: step a task, and say how fast it was and how its episodes ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from headrace._jobs.request import USUAL_ENVS, check_counts, recipe_of
from headrace._named import load
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.adapters._policies import PolicyFile
    from headrace.envs._recipe import AnyEnv, EnvRecipe
    from headrace.types import Obs

StepFunction: TypeAlias = "Callable[[Obs], Tensor]"
"""Actions (N, …) from the observation groups."""

_FIELDS = ("obs", "actions", "rewards", "flags", "states")
_BRIDGED_COST = {
    "native": "nothing: suspended environments are skipped",
    "restore": "a step: it is stepped with the others, then put back",
    "hold": "a step: it is stepped with the others, and drifts",
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
    frame_stack: int | None = None,
    record: str | Path | None = None,
    num_envs: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    overrides: Mapping[str, object] | None = None,
    on_progress: Callable[[int], None] | None = None,
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
        frame_stack: frames in an observation of a camera task, oldest first.
        record: directory to record every finished episode in; physics states, too, of a task of ours.
        num_envs: environments in the batch; None for the recipe's, else 64.
        seed: of episodes and actions; None for the recipe's, else 0.
        threads: physics threads; None for the recipe's, else all cores.
        overrides: task settings by path.
        on_progress: called with the steps that are done.

    Returns:
        ``num_steps``, ``seconds``, ``steps_per_second``, ``stages`` (seconds in each), ``episodes`` and their means,
        ``divergences``, ``suspended`` and what suspension cost.
    """
    if not 0.0 <= suspend_fraction <= 1.0:
        raise ConfigError(
            f"suspend_fraction (--suspend-fraction): expected a share from 0 to 1, got {suspend_fraction}"
        )
    check_counts(num_steps=num_steps)
    recipe = recipe_of(task, USUAL_ENVS, num_envs=num_envs, seed=seed, threads=threads, overrides=overrides)
    if record is not None and Path(record).is_dir() and any(Path(record).iterdir()):
        raise ConfigError(
            f"record (--record): {record} holds something, and nothing is overwritten; choose another directory"
        )
    if frame_stack is not None:
        if recipe.bridged:
            raise ConfigError(f"frame_stack (--frame-stack): expected a task of ours, got {recipe.source!r}")
        recipe = recipe.replace(overrides=dict(recipe.overrides) | _stack_settings(recipe.source, frame_stack))
    recipe, file = trained_recipe(recipe, policy)
    with ExitStack() as stack:
        env = stack.enter_context(closing(recipe.make()))
        act = step_function(policy, env, recipe.seed, file)
        recorder = None
        if record is not None:
            from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg

            info = DatasetInfo.of(env)
            fields = _FIELDS[:-1] if recipe.bridged else _FIELDS
            recorder = stack.enter_context(EpisodeRecorder(record, RecorderCfg(fields=fields), info))
            env.attach(recorder)
        suspended = round(suspend_fraction * env.num_envs)
        obs, _ = env.reset()
        env.suspend(range(suspended))
        env.timer.clear()  # what is measured begins here, without the first reset
        found = _step(env, act, obs, num_steps, recipe.source, suspended, on_progress)
    if recorder is None:
        return found
    return replace(found, recorded=recorder.committed, abandoned=recorder.report.abandoned)


def trained_recipe(recipe: EnvRecipe, policy: str | StepFunction) -> tuple[EnvRecipe, PolicyFile | None]:
    """The recipe with the settings that a policy was trained with, and its file; None where it is no file.

    Refuses a policy that is not there before anything is made.
    """
    if not isinstance(policy, str) or policy in ("random", "zero"):
        return recipe, None
    from headrace.adapters._policies import policy_file

    file = policy_file(policy, recipe.source)
    if file is not None and file.kind != "chunk":
        return recipe.replace(overrides=file.overrides | dict(recipe.overrides)), file
    if file is not None:
        raise ConfigError(
            f"policy (--policy): expected one action per observation, got {policy}, which plans chunks; "
            f"'headrace evaluate {recipe.source} --policy {policy} --video FILE.mp4' plays and films it"
        )
    if ":" not in policy:
        raise ConfigError(
            "policy (--policy): expected random, zero, module:function, latest, or a training's checkpoint or "
            f"directory, got {policy!r}, which is none of them"
        )
    return recipe, None


def step_function(policy: str | StepFunction, env: AnyEnv, seed: int, file: PolicyFile | None = None) -> StepFunction:
    """What acts in every step: random or zero actions of the right kind, the policy of a file, or a function."""
    from headrace.bench._stepping import action_maker

    if not isinstance(policy, str):
        return policy
    if policy == "random" or policy == "zero":
        draw = action_maker(policy, env.single_action_space, env.num_envs, env.device, seed=seed)
        return lambda _: draw()
    if file is not None:
        return _trained_function(file, env, seed)
    return cast("StepFunction", load(policy, "--policy"))


def _trained_function(file: PolicyFile, env: AnyEnv, seed: int) -> StepFunction:
    from headrace.adapters._policies import RecurrentStepPolicy, StepPolicy, load_policy
    from headrace.adapters._torch_state import library_run

    with library_run(seed=seed):
        loaded = load_policy(file, env, deterministic=True)
    assert isinstance(loaded, StepPolicy)
    if isinstance(loaded, RecurrentStepPolicy):
        raise ConfigError(
            f"policy (--policy): expected a policy without memory, got {file.path}; 'headrace play' plays and films it"
        )
    return loaded.policy


def _stack_settings(task: str, frames: int) -> dict[str, object]:
    """What sets the frame stack of a camera task, whether it is written as a class or as a table."""
    from headrace.envs._registry import task_cfg
    from headrace.envs._terms import TermTaskCfg

    cfg = task_cfg(task)
    if isinstance(cfg, TermTaskCfg):
        paths = [f"images.{name}.frames" for name in cfg.images]
    else:
        paths = ["frame_stack"] if hasattr(cfg, "frame_stack") else []
    if not paths:
        raise ConfigError(
            f"frame_stack (--frame-stack): expected a task seen by a camera, got {task!r}; try cartpole-camera"
        )
    return dict.fromkeys(paths, frames)


def _step(
    env: AnyEnv,
    act: StepFunction,
    obs: Obs,
    num_steps: int,
    task: str,
    suspended: int,
    on_progress: Callable[[int], None] | None,
) -> SteppingResult:
    from headrace.envs.bridges._bridge_env import BridgeEnv

    seconds, episodes, returns, lengths, successes, judged = 0.0, 0, 0.0, 0.0, 0.0, 0
    for done in range(1, num_steps + 1):
        actions = act(obs)
        begin = time.perf_counter()
        obs, _, _, _, info = env.step(actions)
        seconds += time.perf_counter() - begin
        if "ends" in info:
            ends = info["ends"]
            episodes += len(ends)
            returns += float(ends.returns.sum())
            lengths += float(ends.lengths.sum())
            if ends.success is not None:
                judged += len(ends)
                successes += float(ends.success.sum())
        if on_progress is not None:
            on_progress(done)
    return SteppingResult(
        task=task,
        num_envs=env.num_envs,
        suspended=suspended,
        num_steps=num_steps,
        seconds=seconds,
        stages=env.timer.seconds(),
        episodes=episodes,
        mean_return=returns / episodes if episodes else None,
        mean_length=lengths / episodes if episodes else None,
        success_rate=successes / judged if judged else None,
        divergences=env.divergences,
        suspension_cost=_BRIDGED_COST[env.fidelity] if isinstance(env, BridgeEnv) else env.sim.suspension_cost,
    )
