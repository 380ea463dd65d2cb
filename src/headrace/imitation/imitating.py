"""``headrace.imitation.imitate``: clone an expert, or a dataset, into a chunk policy, and evaluate the clone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

from headrace.envs.recipe import EnvKeywords, EnvRecipe, check_told
from headrace.errors import ConfigError, UnknownNameError, check_counts
from headrace.files import remove_abandoned

if TYPE_CHECKING:
    from headrace.envs.recipe import AnyEnv
    from headrace.evaluation import Evaluation
    from headrace.imitation.cloning import CloneLoss, CloneTraining
    from headrace.imitation.demonstrations import Demonstrations
    from headrace.policies.act import ActCfg, ActPolicy
    from headrace.policies.protocol import ChunkPolicy

_HELD_OUT_SEED = 1_000_003
_NUM_ENVS = 128
_STATE = ".training"
"""What is put after the name of the checkpoint for the state of a training that has not ended."""
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationResult:
    """What imitating an expert or a dataset gave."""

    path: Path
    """The checkpoint of the policy."""
    sha256: str
    policy: ActPolicy
    demonstrations: int
    """Episodes that it learned from, held-out ones included."""
    attempted: int
    """Episodes that the expert played for them, or that the dataset has."""
    held_out: int
    """Episodes of them that it did not learn from."""
    losses: tuple[CloneLoss, ...]
    """The course of the training."""
    source: str | None
    """The environment that it was evaluated in; None where there is none."""
    evaluations: Mapping[str, Evaluation]
    """``trained``, and what it must beat: ``untrained`` and ``mean action``; fewer after Ctrl-C, none without an
    environment to evaluate in."""

    @property
    def interrupt(self) -> KeyboardInterrupt | None:
        """What ended the evaluation early, such as Ctrl-C."""
        return next((found.interrupt for found in self.evaluations.values() if found.interrupt is not None), None)


def _ignore(stage: str, done: int, total: int) -> None:
    del stage, done, total


def imitate(
    task: str | EnvRecipe | None = None,
    output: str | Path | None = None,
    *,
    dataset: str | Path | None = None,
    groups: Sequence[str] | None = None,
    keep: Literal["all", "succeeded"] | None = None,
    demos: int = 2000,
    settings: Mapping[str, object] | None = None,
    resume: bool = False,
    episodes: int = 300,
    execute: int | None = None,
    on_progress: OnProgress = _ignore,
    **env: Unpack[EnvKeywords],
) -> ImitationResult:
    """Train a small action-chunking transformer on demonstrations, and save it.

    The demonstrations are successful episodes that the task's expert plays, or those of a dataset. The policy is then
    evaluated on episodes that it has not seen, compared with the same model untrained and with the mean action.

    Every 500 updates (``check_every``) the policy so far is saved, and beside it, in ``OUTPUT.training``, what
    ``resume`` needs to go on; that file is removed when all is done.

    Args:
        task: a task with an expert, such as ``pusher-solid``; with ``dataset``, the environment to evaluate in, None
            for the one that the dataset was recorded in, if it says.
        output: file of the checkpoint.
        dataset: a recorded dataset, ours or LeRobot's (version 3).
        groups: observation groups of the dataset to learn from, images included; None for all but ``critic``.
        keep: episodes of the dataset to learn from; None for the successful ones, where it says which.
        demos: successful episodes of the expert to learn from.
        settings: of the policy (``horizon``, ``width``, ``heads``, ``memory_tokens``, ``hidden``, ``image_size``) and
            of its training (``updates``, ``batch``, ``learning_rate``, ``average``, ``check_every``, and ``held_out``,
            the share of the episodes that a loss is measured on instead: a tenth of a dataset's, none of an expert's).
        resume: go on with a training that was stopped; settings and demonstrations must be the same.
        episodes: to evaluate with; 0 for no evaluation.
        execute: actions executed of each chunk; None for all.
        on_progress: called with a stage (``recording``; ``training, loss …``), what is done of it, and its total.
        **env: ``num_envs`` (128), ``seed`` (also of weights and batches), ``overrides``, ``threads``, ``device`` and
            ``sim`` of the environments.

    Returns:
        ``path`` and ``sha256`` of the policy, ``policy``, ``demonstrations``, ``attempted``, ``held_out``, ``losses``,
        and ``evaluations`` by name.
    """
    import torch

    from headrace.envs.batch_env import BatchEnv
    from headrace.envs.recipe import with_overrides
    from headrace.imitation.cloning import CloneCfg, CloneTraining, act_cfg
    from headrace.imitation.demonstrations import load_demonstrations, record_demonstrations
    from headrace.imitation.experts import disturbance_for, expert_for
    from headrace.policies.act import ActCfg

    path = _check_output(output)
    act, more = _settings(settings or {})
    check_counts(demos=demos)
    horizon = act.get("horizon", ActCfg.horizon)
    if execute is not None and isinstance(horizon, int) and not 1 <= execute <= horizon:
        raise ConfigError(f"execute (--execute): expected 1 to {horizon} actions of a chunk, got {execute}")
    if episodes < 0:
        raise ConfigError(f"episodes (--episodes): expected 0 or more, got {episodes}")
    recipe = _recipe(task, dataset, env)
    seed = (env.get("seed") or 0) if recipe is None else recipe.seed
    cfg = with_overrides(CloneCfg(held_out=0.0 if dataset is None else 0.1, seed=seed), more)
    if dataset is None:
        assert recipe is not None
        expert_for(recipe.source)
        if groups is not None or keep is not None:
            raise ConfigError("groups and keep (--groups, --keep): expected a dataset (--dataset) with them, got none")
    state = path.with_name(path.name + _STATE)
    if resume and not state.is_file():
        raise ConfigError(f"resume (--resume): expected a training that was stopped, got none: no {state}")
    if resume:
        remove_abandoned(state.parent)
    with ExitStack() as stack:
        envs = None
        if recipe is not None and (episodes or dataset is None):
            envs = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
        if dataset is not None:
            found = load_demonstrations(dataset, groups=groups, keep=keep)
        else:
            assert recipe is not None
            assert isinstance(envs, BatchEnv)
            found = record_demonstrations(
                envs,
                expert_for(recipe.source),
                demos,
                seed=seed,
                noise=disturbance_for(recipe.source),
                progress=lambda done: on_progress("recording", done, demos),
            )
        if not found.images:
            # model and rows are small: more threads would only wait for each other
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)
        training = CloneTraining(found, cfg, with_overrides(act_cfg(found), act))
        if envs is not None and episodes:
            _check_fits(envs, training.policy.cfg)
        if resume:
            training.load(state)
        digest = _train(training, path, state, recipe, on_progress)
        results: dict[str, Evaluation] = {}
        if envs is not None and episodes:
            results = _evaluate(envs, found, training.policy, seed, episodes, execute)
    if all(result.interrupt is None for result in results.values()):
        state.unlink(missing_ok=True)
    return ImitationResult(
        path=path,
        sha256=digest,
        policy=training.policy,
        demonstrations=len(found.episode_ids),
        attempted=found.attempted,
        held_out=training.held_out_episodes,
        losses=tuple(training.losses),
        source=recipe.source if envs is not None and recipe is not None else None,
        evaluations=results,
    )


def _train(training: CloneTraining, path: Path, state: Path, recipe: EnvRecipe | None, on_progress: OnProgress) -> str:
    """Make the updates, with checkpoints on the way; returns the SHA-256 of the last."""
    from headrace.policies.act import save_policy

    identity: dict[str, Any] = {"source": "dataset"} if recipe is None else recipe.identity()

    def save(so_far: CloneTraining) -> str:
        return save_policy(so_far.policy, path, task=identity["source"], overrides=identity.get("overrides"))

    def keep(so_far: CloneTraining) -> None:
        save(so_far)
        so_far.save(state)

    total = training.cfg.updates
    try:
        training.run(progress=lambda done, loss: on_progress(f"training, loss {loss:.3f}", done, total), on_check=keep)
    except KeyboardInterrupt:
        keep(training)
        raise
    return save(training)


def _recipe(task: str | EnvRecipe | None, dataset: str | Path | None, env: EnvKeywords) -> EnvRecipe | None:
    """Return what to record or evaluate in; None for a dataset that does not say, and no task given."""
    from headrace.recording.dataset import EpisodeDataset
    from headrace.recording.export.lerobot_dataset import LeRobotDataset, is_lerobot

    if task is None and dataset is None:
        raise ConfigError("imitate: expected a task with an expert, or a dataset (--dataset), got neither")
    if task is not None:
        return EnvRecipe.of(task, _NUM_ENVS, **env)
    folder = Path(str(dataset))
    if not folder.is_dir():
        raise ConfigError(f"dataset (--dataset): expected a directory, got {folder}: there is none")
    said = LeRobotDataset(folder).recipe if is_lerobot(folder) else EpisodeDataset(folder).info.recipe
    if not said:
        if env.get("overrides"):
            raise ConfigError("overrides (--set): expected a task to set, got a dataset that names none; name it")
        return None
    check_told(str(said["source"]), "imitate: the dataset", "TASK")
    recipe = EnvRecipe.from_json(said)
    changes = {"num_envs": _NUM_ENVS, "seed": 0} | {name: value for name, value in env.items() if value is not None}
    return recipe.replace(**{**changes, "overrides": {**recipe.overrides, **(env.get("overrides") or {})}}).resolve()


def _settings(settings: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return those of the policy, and those of its training."""
    from headrace.imitation.cloning import CloneCfg
    from headrace.policies.act import ActCfg

    decided = {"obs_dim", "action_dim", "vectors", "images", "instructions"}
    of_policy = [field.name for field in dataclasses.fields(ActCfg) if field.name not in decided]
    of_training = [field.name for field in dataclasses.fields(CloneCfg) if field.name != "seed"]
    for name in settings:
        if name not in (*of_policy, *of_training):
            raise UnknownNameError("setting of imitation", name, [*of_policy, *of_training])
    chosen = [{name: value for name, value in settings.items() if name in known} for known in (of_policy, of_training)]
    return chosen[0], chosen[1]


def _check_output(output: str | Path | None) -> Path:
    """Return what would fail only after minutes of work."""
    if output is None:
        raise ConfigError("output (--output): expected a file for the checkpoint, got none")
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"output (--output): expected a file to write, got the directory {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output (--output): expected a place for a file, got {path}: {error.strerror}") from error
    return path


def _check_fits(env: AnyEnv, cfg: ActCfg) -> None:
    """Refuse an environment whose observations or actions are not those that were recorded."""
    from gymnasium import spaces

    from headrace.envs.task import count_actions
    from headrace.learning.actor_critic import channels_first

    groups = cast("spaces.Dict", env.single_observation_space)
    there = {name: tuple(part.shape or ()) for name, part in groups.spaces.items()}
    wanted = [*cfg.vectors, *(name for name, _ in cfg.images)]
    hint = "name the environment that was recorded, with its settings (TASK, --set), or choose others (--groups)"
    for name in wanted:
        if name not in there:
            raise ConfigError(
                f"dataset: expected observation groups of the environment, {list(there)}, got {name!r}; {hint}"
            )
    numbers = sum(math.prod(there[name]) for name in cfg.vectors)
    if numbers != cfg.obs_dim:
        raise ConfigError(
            f"dataset: its vectors have {cfg.obs_dim} numbers, those of the environment {numbers}; {hint}"
        )
    for name, shape in cfg.images:
        if len(there[name]) != 3 or channels_first(there[name]) != channels_first(shape):
            raise ConfigError(f"dataset: images {name!r} are {shape}, those of the environment {there[name]}; {hint}")
    space = env.single_action_space
    if not isinstance(space, spaces.Box) or count_actions(space) != cfg.action_dim:
        raise ConfigError(f"dataset: its actions have {cfg.action_dim} numbers, the environment takes {space}; {hint}")


def _evaluate(
    env: AnyEnv, demos: Demonstrations, policy: ActPolicy, seed: int, episodes: int, execute: int | None
) -> dict[str, Evaluation]:
    """Return the policy and what it must beat, on episodes of another seed than the demonstrations."""
    from headrace.evaluation.cfg import PlayCfg
    from headrace.evaluation.evaluating import evaluate
    from headrace.imitation.cloning import MeanAction, make_untrained

    contestants: dict[str, ChunkPolicy] = {
        "trained": policy,
        "untrained": make_untrained(demos, seed=seed, act=policy.cfg),
        "mean action": MeanAction(demos.actions.mean(dim=0), policy.horizon),
    }
    results: dict[str, Evaluation] = {}
    for name, contestant in contestants.items():
        play = PlayCfg(execute=execute)
        results[name] = evaluate(env, contestant, episodes=episodes, seed=seed + _HELD_OUT_SEED, play=play)
        if results[name].status == "interrupted":  # Ctrl-C is meant for the whole, not for one contestant
            break
    return results
