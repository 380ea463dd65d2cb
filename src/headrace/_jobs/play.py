"""``headrace.play``: roll a trained policy out, and say what it achieved and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from headrace._jobs.request import (
    RunOptions,
    RunRequest,
    RunResult,
    check_counts,
    check_device,
    check_video,
    film_env,
    open_env,
    time_imports,
)
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.adapters._finding import FoundCheckpoint
    from headrace.adapters._policies import PolicyFile
    from headrace.bench import PlayBuilder
    from headrace.bench._schema import PlayBundle  # noqa: F401  # the base of the result names it
    from headrace.bench._stepping import WarmupRule
    from headrace.chunking import ChunkPolicy
    from headrace.envs._recipe import AnyEnv, EnvRecipe
    from headrace.rollout._chunk_loop import ChunkLoop
    from headrace.rollout._episode_plan import EndlessPlan
    from headrace.rollout._episode_plan import EpisodePlan as PlannedEpisodes
    from headrace.types import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayResult(RunResult["PlayBundle"]):
    """What playing a policy left behind; its bundle has rewards, lengths, successes and times."""

    frames_drawn: int
    """Camera frames that were rendered for observations; those of a video are not among them."""


def play(
    task: str | EnvRecipe,
    *,
    policy: str | Path | None = None,
    library: str | None = None,
    episodes: int | None = None,
    num_steps: int | None = None,
    warmup_steps: int = 10,
    deterministic: bool = True,
    trust_checkpoint: bool = False,
    video: str | Path | None = None,
    renderer: str = "native",
    on_note: Callable[[str], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
    **options: Unpack[RunOptions],
) -> PlayResult:
    """Play a policy on a task and write ``play.json``, also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, a recipe, or a recipe file.
        policy: a file, a URI, ``latest``, ``best``, ``published``, a TorchScript or ONNX file, or ``module:name``
            of a function of the observation groups or of a chunk policy; None for the newest training in ``runs/``,
            else the published one.
        library: only checkpoints of this library; None for any.
        episodes: how many, with ids from 0, each to its end and counted once; None for one per environment.
        num_steps: steps of the batch to play instead; episodes still running then are counted nowhere; None to play
            episodes.
        warmup_steps: steps that are played before, unmeasured, at least; more until the step time is steady. 0 for
            none. The episodes that are played do not depend on it.
        deterministic: the policy's mean action; False to sample.
        trust_checkpoint: load a file that holds more than weights, which can execute arbitrary code; load only files
            you trust.
        video: film the first environments into this file.
        renderer: what draws the video: ``native``, ``gl`` (MuJoCo's own images) or ``warp``.
        on_note: called with what a user may want to know: which checkpoint was found, a plan that is too short.
        on_progress: called with the episodes, or steps, that are done.
        **options: of the environments and the result: see :class:`headrace.RunOptions`. Overrides come on top of those
            that the policy was trained with.
    """
    from headrace.adapters import library as library_of
    from headrace.bench import PlayBuilder
    from headrace.bench._schema import EpisodePlan, PolicyDescriptor
    from headrace.bench._stepping import WarmupRule

    request = RunRequest.of(task, **options)
    check_counts(episodes=episodes, num_steps=num_steps)
    if episodes is not None and num_steps is not None:
        raise ConfigError("episodes and num_steps: expected one of them, got both")
    rule = WarmupRule(steps=warmup_steps)
    if library is not None:
        library_of(library)
    film = None if video is None else Path(video)
    notes: Callable[[str], None] = on_note or (lambda _: None)
    recipe = request.recipe
    name = None if policy is None else str(policy)
    wanted = None if num_steps is not None else episodes or recipe.num_envs
    plan = EpisodePlan(
        kind="episodes" if num_steps is None else "steps",
        episodes_planned=wanted,
        num_steps=num_steps,
        first_episode_id=0,
        shorter_than_episode=False,
    )
    builder = PlayBuilder(recipe.num_envs, plan=plan)
    check_device(builder.startup, recipe)
    with request.measured(builder) as run:
        time_imports(builder.startup, recipe)
        check_video(film, renderer)
        found, file = _find(recipe.source, name, library, trust_checkpoint, notes)
        if file is not None:
            recipe = recipe.replace(overrides=file.overrides | dict(recipe.overrides))
            run.settings = request.settings(recipe, framework=file.library)
        cfg = recipe.cfg()  # None of a bridged environment, whose episodes may have any length
        longest = None if cfg is None else cfg.episode_length
        short = num_steps is not None and longest is not None and num_steps < longest
        if short:
            notes(
                f"num_steps (--num-steps) {num_steps} is shorter than an episode may be ({longest} steps): "
                "only short episodes can complete, and only completed ones are counted"
            )
        changes = {"max_episode_length": longest, "shorter_than_episode": short}
        builder.plan = plan.model_copy(update=changes)
        with open_env(run, recipe, autoreset="disabled", final_obs=False) as env, ExitStack() as stack:
            from headrace.adapters._policies import callable_policy, load_policy
            from headrace.adapters._torch_state import library_run
            from headrace.chunking._policy import has_memory

            stack.enter_context(library_run(seed=recipe.seed))
            if found is None or file is None:
                loaded = callable_policy(str(name), env)
                builder.policy = PolicyDescriptor(
                    kind="callable", name=str(name), deterministic=True, recurrent=has_memory(loaded)
                )
            else:
                loaded = load_policy(file, env, deterministic=deterministic, trust=trust_checkpoint)
                _describe(builder, found, file, deterministic=deterministic, recurrent=has_memory(loaded))
            warm_up_play(env, loaded, builder, rule)
            if film is not None:
                film_env(env, film, renderer, stack)
                builder.video_path = str(film)
            roll(env, loaded, builder, episodes=wanted, num_steps=num_steps, on_progress=on_progress)
    if num_steps is not None and builder.episodes.unfinished:
        notes(
            f"{builder.episodes.unfinished} episodes were still running after {num_steps} steps and are counted "
            "nowhere, so that short episodes weigh more; play whole ones with episodes= (--episodes)"
        )
    return PlayResult.of(run, frames_drawn=env.frames_drawn)


def roll(
    env: AnyEnv,
    policy: ChunkPolicy,
    builder: PlayBuilder,
    *,
    episodes: int | None = None,
    num_steps: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Play a plan of episodes, or a number of steps, and count and time them in ``builder``.

    Chunks are played to their end; the model sees whoever waits, in batches of any size, so that last bits of a
    policy's answers depend on ``num_envs``: ``evaluate`` has strict batches.
    """
    from headrace.rollout._episode_plan import EndlessPlan, EpisodePlan

    done = 0

    def watch(step: Step, seconds: float, frames: int) -> None:
        nonlocal done
        builder.steps.add(seconds, frames, env.timer.seconds())
        ended = builder.episodes.add_step(step)
        done += ended if num_steps is None else 1
        if on_progress is not None and (ended or num_steps is not None):
            on_progress(done)

    plan = EpisodePlan(episodes or env.num_envs) if num_steps is None else EndlessPlan(env.num_envs)
    loop = _loop(env, policy, plan, watch)
    builder.steps.begin(env.timer.seconds())
    builder.episodes.unfinished = 0
    try:
        result = loop.play(most_steps=num_steps)
        if result.interrupt is not None:
            raise result.interrupt  # the bundle says so
    finally:
        begun = env.episode_steps.cpu().numpy() > 0
        builder.episodes.unfinished = int((loop.running & begun).sum())
        loop.release()


def warm_up_play(env: AnyEnv, policy: ChunkPolicy, builder: PlayBuilder, rule: WarmupRule) -> None:
    """Play until steps take as long as they will, outside of what ``builder`` measures: what it writes down is the time
    of the first step and how warming up went. Random streams are afterwards as before."""
    from headrace.adapters._torch_state import load_random_state, random_state
    from headrace.bench._stepping import warm_up
    from headrace.rollout._episode_plan import EndlessPlan

    def steps(count: int) -> list[float]:
        moments = [time.perf_counter()]

        def watch(step: Step, seconds: float, frames: int) -> None:
            del step, seconds, frames  # what counts is the whole loop: a policy's first answer takes longest
            moments.append(time.perf_counter())

        loop = _loop(env, policy, EndlessPlan(env.num_envs), watch)
        try:
            result = loop.play(most_steps=count)
        finally:
            loop.release()
        if result.interrupt is not None:
            raise result.interrupt
        return [after - before for before, after in pairwise(moments)]

    if not rule.steps:
        return
    streams = random_state()
    with builder.startup.phase("first_step"):
        steps(1)
    builder.steps.warmup = warm_up(steps, rule)
    load_random_state(streams)


def _loop(
    env: AnyEnv,
    policy: ChunkPolicy,
    plan: PlannedEpisodes | EndlessPlan,
    on_step: Callable[[Step, float, int], None],
) -> ChunkLoop:
    from headrace.chunking import Batching, InlineEngine
    from headrace.chunking._admission import Immediate
    from headrace.chunking._cursors import ChunkLengths
    from headrace.rollout._chunk_loop import ChunkLoop

    return ChunkLoop(
        env,
        policy,
        plan,
        lengths=ChunkLengths(horizon=policy.horizon, execute=policy.horizon),
        rule=Immediate(),  # nobody waits for others: every step of the batch has everyone
        engine=InlineEngine(policy, Batching(mode="fast")),
        seed=env.seed,
        ensemble_decay=None,
        clamp=True,
        on_step=on_step,
    )


def _find(
    task: str, wanted: str | None, library: str | None, trust: bool, notes: Callable[[str], None]
) -> tuple[FoundCheckpoint | None, PolicyFile | None]:
    """The file to play, checked; nothing for ``module:name``."""
    from headrace.adapters._finding import find_checkpoint
    from headrace.adapters._policies import inspect_file

    if wanted is not None and ":" in wanted and "://" not in wanted and not Path(wanted).exists():
        return None, None
    found = find_checkpoint(wanted, task, library=library)
    if found.source != "explicit":
        notes(f"playing the {found.source} checkpoint of {task}: {found.path}")
    return found, inspect_file(found.path, task, library=library, trust=trust)


def _describe(
    builder: PlayBuilder, found: FoundCheckpoint, file: PolicyFile, *, deterministic: bool, recurrent: bool
) -> None:
    from headrace.bench import describe_library
    from headrace.bench._schema import CheckpointInfo, PolicyDescriptor
    from headrace.files import hash_file

    kind = "checkpoint" if file.kind == "library" else file.kind
    builder.policy = PolicyDescriptor(
        kind=kind,
        name=file.path.name,
        deterministic=deterministic or kind != "checkpoint",
        recurrent=recurrent,
    )
    builder.checkpoint = CheckpointInfo(
        path=str(file.path),
        source=found.source,
        uri=found.uri,
        sha256=hash_file(file.path),
        library=file.library,
        task=None if file.meta is None else file.meta.task,
        iteration=None if file.meta is None else file.meta.iteration,
        score=found.score if file.meta is None else file.meta.score,
    )
    if file.library is not None:
        builder.library = describe_library(file.library, algorithm="PPO")
