"""``headrace.play``: roll a trained policy out, and say what it achieved and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from headrace.bench.benchmark import RunCfg, RunResult, check_device, open_env, time_imports
from headrace.bench.builders import PlayBuilder
from headrace.bench.capture import describe_library
from headrace.bench.schema import CheckpointInfo, EpisodePlan, PlayBundle, PolicyDescriptor
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.errors import ConfigError, check_counts
from headrace.evaluation.cfg import PlayCfg
from headrace.files import hash_file
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.bench.stepping import WarmupRule
    from headrace.envs.recipe import AnyEnv
    from headrace.policies.load_policy import FoundPolicy, PolicySource
    from headrace.policies.protocol import ChunkPolicy
    from headrace.types import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayResult(RunResult[PlayBundle]):
    """What playing a policy left behind; its bundle has rewards, lengths, successes and times."""

    frames_drawn: int
    """Camera frames that were rendered for observations; those of a video are not among them."""
    notes: tuple[str, ...]
    """Which checkpoint was found, and whether the plan was too short."""


def play(
    task: str | EnvRecipe,
    *,
    policy: PolicySource = None,
    library: str | None = None,
    episodes: int | None = None,
    num_steps: int | None = None,
    warmup_steps: int = 10,
    deterministic: bool = True,
    trust_checkpoint: bool = False,
    film: FilmCfg | None = None,
    run: RunCfg | None = None,
    on_progress: Callable[[int], None] | None = None,
    **env: Unpack[EnvKeywords],
) -> PlayResult:
    """Play a policy on a task and write ``play.json``, also after Ctrl-C or a crash.

    Args:
        task: a task name, ``module:NAME``, ``gym:ID``, a recipe, or a recipe file.
        policy: a file, a URI, ``latest``, ``best``, ``published``, a TorchScript or ONNX file, or ``module:name``
            of a function of the observation groups or of a chunk policy; None for the newest training in ``runs/``,
            else the published one; in Python also everything that :func:`headrace.load_policy` takes.
        library: only checkpoints of this library; None for any.
        episodes: how many, with ids from 0, each to its end and counted once; None for one per environment.
        num_steps: steps of the batch to play instead; episodes still running then are counted nowhere; None to play
            episodes.
        warmup_steps: steps that are played before, unmeasured, at least; more until the step time is steady. 0 for
            none. The episodes that are played do not depend on it.
        deterministic: the policy's mean action; False to sample.
        trust_checkpoint: load a file that holds more than weights, which can execute arbitrary code; load only files
            you trust.
        film: film the first environments into ``film.video``.
        run: directory, forms and label of the result.
        on_progress: called with the episodes, or steps, that are done.
        **env: ``num_envs``, ``seed``, ``overrides``, ``threads``, ``device`` and ``sim`` of the environments. Overrides
            are added to those that the policy was trained with.
    """
    from headrace.bench.stepping import WarmupRule
    from headrace.libraries.registry import library as library_of

    run = run or RunCfg()
    recipe = run.recipe(task, **env)
    check_counts(episodes=episodes, num_steps=num_steps)
    if episodes is not None and num_steps is not None:
        raise ConfigError("episodes and num_steps: expected one of them, got both")
    rule = WarmupRule(steps=warmup_steps)
    if library is not None:
        library_of(library)
    film = film or FilmCfg()
    notes: list[str] = []
    wanted = None if num_steps is not None else episodes or recipe.num_envs
    plan = EpisodePlan(
        kind="episodes" if num_steps is None else "steps",
        episodes_planned=wanted,
        num_steps=num_steps,
        first_episode_id=0,
    )
    builder = PlayBuilder(plan=plan)
    check_device(builder.startup, recipe)
    with run.measure(builder, recipe) as measured:
        time_imports(builder.startup, recipe)
        from headrace.policies.engines import EnginePolicy
        from headrace.policies.load_policy import build_policy, find_policy

        film.check()
        found = find_policy(policy, recipe.source, library=library, trust=trust_checkpoint, newest=True, any_task=False)
        if found.origin != "explicit":
            notes.append(f"playing the {found.origin} checkpoint of {recipe.source}: {found.path}")
        if isinstance(found.source, Path):
            recipe = recipe.replace(overrides=found.overrides | dict(recipe.overrides))
            measured.settings = run.settings(recipe, framework=found.library)
        cfg = recipe.cfg()  # None of a bridged environment, whose episodes may have any length
        builder.plan = plan.model_copy(update={"max_episode_length": None if cfg is None else cfg.episode_length})
        with open_env(measured, recipe, autoreset="disabled", final_obs=False) as envs, ExitStack() as stack:
            from headrace.libraries.training import library_run
            from headrace.policies.protocol import has_memory

            stack.enter_context(library_run(seed=recipe.seed))
            loaded = build_policy(found, envs, deterministic=deterministic, trust=trust_checkpoint)
            if isinstance(loaded, EnginePolicy):
                stack.callback(loaded.engine.close)
            if isinstance(found.source, Path):
                _describe(builder, found, deterministic=deterministic, recurrent=has_memory(loaded))
            else:
                name = policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)
                builder.policy = PolicyDescriptor(
                    kind="callable", name=name, deterministic=True, recurrent=has_memory(loaded)
                )
            warm_up_play(envs, loaded, builder, rule)
            builder.policy = _identify(builder.policy, loaded)  # a lazy layer has weights from its first call on
            stack.enter_context(film.film(envs))
            builder.video_path = None if film.video is None else str(film.video)
            roll(envs, loaded, builder, episodes=wanted, num_steps=num_steps, on_progress=on_progress)
    if num_steps is not None and builder.episodes.unfinished:
        notes.append(
            f"{builder.episodes.unfinished} episodes were still running after {num_steps} steps and are counted "
            "nowhere, so that short episodes weigh more; play whole ones with episodes= (--episodes)"
        )
    return PlayResult.of(measured, frames_drawn=envs.frames_drawn, notes=tuple(notes))


_CFG = PlayCfg(admission="immediate", batching="fast")
"""No row waits for others: every step of the batch has all of them. Last bits of a policy's answers depend on
``num_envs``: ``evaluate`` has strict batches."""


def roll(
    env: AnyEnv,
    policy: ChunkPolicy,
    builder: PlayBuilder,
    *,
    episodes: int | None = None,
    num_steps: int | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Play a plan of episodes, or a number of steps, and count and time them in ``builder``."""
    from headrace.evaluation.player import Player
    from headrace.evaluation.scheduling import EndlessPlan

    done = 0

    def watch(step: Step, seconds: float, frames: int) -> None:
        nonlocal done
        builder.steps.add(seconds, frames, env.timer.seconds())
        ended = builder.episodes.add_step(step)
        done += ended if num_steps is None else 1
        if on_progress is not None and (ended or num_steps is not None):
            on_progress(done)

    plan = range(episodes or env.num_envs) if num_steps is None else EndlessPlan(env.num_envs)
    builder.steps.begin(env.timer.seconds())
    builder.episodes.unfinished = 0
    with closing(Player(env, policy, _CFG, env.seed)) as player:
        try:
            result = player.play(plan, most_steps=num_steps, clamp=True, on_step=watch)
            if result.interrupt is not None:
                raise result.interrupt  # the bundle says so
        finally:
            begun = env.episode_steps.cpu().numpy() > 0
            builder.episodes.unfinished = int((player.running & begun).sum())


def warm_up_play(env: AnyEnv, policy: ChunkPolicy, builder: PlayBuilder, rule: WarmupRule) -> None:
    """Play until step times are steady, outside of what ``builder`` measures; random streams are restored.

    The builder keeps the time of the first step, and how many steps warming up took.
    """
    from headrace.bench.stepping import warm_up
    from headrace.evaluation.player import Player
    from headrace.evaluation.scheduling import EndlessPlan
    from headrace.libraries.training import load_random_state, random_state

    def steps(count: int) -> list[float]:
        moments = [time.perf_counter()]

        def watch(step: Step, seconds: float, frames: int) -> None:
            del step, seconds, frames  # what counts is the whole loop: a policy's first answer takes longest
            moments.append(time.perf_counter())

        with closing(Player(env, policy, _CFG, env.seed)) as player:
            result = player.play(EndlessPlan(env.num_envs), most_steps=count, clamp=True, on_step=watch)
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


def _identify(described: PolicyDescriptor | None, policy: ChunkPolicy) -> PolicyDescriptor | None:
    """Return the description with the policy's id, or without one where its code cannot be seen through."""
    from headrace.policies.step_policy import policy_hash

    try:
        return described and described.model_copy(update={"policy_id": policy_hash(policy)})
    except ConfigError:
        return described


def _describe(builder: PlayBuilder, found: FoundPolicy, *, deterministic: bool, recurrent: bool) -> None:
    kind, meta = "checkpoint" if found.kind == "library" else found.kind, found.meta
    builder.policy = PolicyDescriptor(
        kind=kind,
        name=found.path.name,
        deterministic=deterministic or kind != "checkpoint",
        recurrent=recurrent,
    )
    about: dict[str, Any] = {"score": found.score}
    if meta is not None:
        about = {name: getattr(meta, name) for name in ("task", "iteration", "score")}
    builder.checkpoint = CheckpointInfo(
        path=str(found.path),
        source=found.origin,
        uri=found.uri,
        sha256=hash_file(found.path),
        library=found.library,
        **about,
    )
    if found.library is not None:
        builder.library = describe_library(found.library, algorithm="PPO")
