"""``headrace.evaluate``: play a plan of episodes with a policy by name; ``headrace.merge``: parts of one as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from headrace._jobs.request import check_video, film_env, recipe_of
from headrace._named import load_made
from headrace.envs import EnvRecipe
from headrace.errors import ConfigError, HeadraceError
from headrace.files import check_writable

if TYPE_CHECKING:
    from headrace.chunking import Admission, Batching, ChunkPolicy, Engine, PolicyLike
    from headrace.rollout import Evaluation
    from headrace.rollout._chunk_loop import HoldAction
    from headrace.rollout._evaluated_env import EvaluatedEnv
    from headrace.serving import ImageCoding, RemoteEngine, WireMapping

_NUM_ENVS = 16


def evaluate(
    env: str | EnvRecipe | EvaluatedEnv,
    policy: PolicyLike | str | Path | None = None,
    *,
    episodes: int | Iterable[int] = 100,
    num_envs: int | None = None,
    seed: int | None = None,
    threads: int | None = None,
    overrides: Mapping[str, object] | None = None,
    execute: int | None = None,
    offset: int = 0,
    latency: int = 0,
    horizon: int | None = None,
    admission: Admission | str = "greedy",
    engine: str | Engine = "inline",
    batching: Batching | Literal["strict", "fast"] | None = None,
    ensemble_decay: float | None = None,
    hold_action: HoldAction = "last",
    allow_hold: bool = False,
    timeout: float | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    policy_id: str | None = None,
    output: str | Path | None = None,
    video: str | Path | None = None,
    renderer: str = "native",
    mapping: WireMapping | None = None,
    connections: int = 1,
    images: ImageCoding = "raw",
    progress: bool = True,
) -> Evaluation:
    """Play every episode of a plan once, to its end, with a policy that plans chunks of actions.

    :func:`headrace.rollout.evaluate` is the loop over an environment that is there; this makes the environment as the
    loop wants it, and finds the policy.

    Args:
        env: a task name, ``module:NAME``, ``gym:ID``; a recipe, which then says everything about the environments, so
            that an argument that says something else is refused; or an environment with ``autoreset="disabled"``,
            which stays open.
        policy: whatever :func:`headrace.chunking.as_chunk_policy` takes; a checkpoint that ``headrace imitate`` wrote;
            ``module:name`` of a policy object, class or function; ``lerobot:DIR``; the address of a server, such as
            ``openpi://HOST:8000``, whose API key is in the variable ``HEADRACE_API_KEY``. None for the policy that we
            ship for the task.
        episodes: how many (ids from 0), or the ids.
        num_envs: environments in the batch; None for the recipe's, else 16.
        seed: of the episodes and of the policy's noise; None for that of the recipe or environment, else 0.
        threads: physics threads of a task; None for the recipe's, else all cores.
        overrides: task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``.
        execute: actions that are played of each chunk; None for all that are left after offset and latency, and 1
            with ``ensemble_decay``.
        offset: first row of a chunk that is played.
        latency: simulated steps between an observation and the moment its chunk takes over.
        horizon: rows of a chunk, where the policy does not say.
        admission: as for :func:`headrace.rollout.evaluate`, or ``module:name`` of a rule of your own.
        engine: as there, as are the arguments below; a server's policy has its own engine.
        batching: ``strict``, ``fast``, or a :class:`headrace.chunking.Batching`; a server has its own.
        ensemble_decay: of ACT's temporal ensembling.
        hold_action: what waiting environments play under a rule that holds.
        allow_hold: take a bridged environment whose suspended environments drift.
        timeout: seconds that one call of the model may take.
        journal: file that every finished episode is appended to at once.
        resume: go on with that journal.
        policy_id: what journal and output call the policy; None for a hash of a module's weights.
        output: new file that the result is saved to, also after Ctrl-C or a failure; :meth:`Evaluation.load` reads it.
        video: film the first environments of a task of ours into this file, which must be new.
        renderer: what draws the video: ``native``, ``gl`` (MuJoCo's own pictures) or ``warp``.
        mapping: from our groups to a server's keys.
        connections: requests to a server that are under way at once.
        images: encoding of images on the wire to a server.
        progress: show a progress bar.

    Returns:
        A row per finished episode and what it cost. Ctrl-C gives what is finished, with status ``interrupted``.

    Raises:
        ConfigError: the request cannot be met.
        HeadraceError: something failed while episodes were played; ``error.finished`` has those that were done.
    """
    from headrace.rollout import evaluate as play_plan
    from headrace.rollout._evaluate import restore_modes, training_modes
    from headrace.rollout._evaluated_env import action_size
    from headrace.rollout._journal import policy_hash

    recipe = _recipe(env, num_envs=num_envs, seed=seed, threads=threads, overrides=overrides)
    address = policy if isinstance(policy, str) and "://" in policy else None
    _check_remote(address, mapping, connections, images, engine, batching)
    film = None if video is None else Path(video)
    check_video(film, renderer)
    saved = None if output is None else Path(output)
    if saved is not None:
        if saved.exists():
            raise ConfigError(f"output (--output): {saved} already exists, and nothing is ever overwritten")
        check_writable(saved.parent)
    rule = _rule(admission)
    with ExitStack() as stack:
        stack.callback(restore_modes, training_modes(policy))
        if recipe is None:
            made = cast("EvaluatedEnv", env)
            played_seed = cast("int", getattr(made, "seed", 0)) if seed is None else seed
        else:
            made = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
            played_seed = recipe.seed
        if address is not None:
            remote = _connect(address, made, played_seed, horizon, mapping, connections, images, timeout)
            engine, timeout = stack.enter_context(closing(remote)), None
            fitted = remote.policy
        else:
            fitted = _fitted(policy, made, horizon, action_size(made.single_action_space))
        if film is not None:
            film_env(made, film, renderer, stack)
        usual = 1 if ensemble_decay is not None else fitted.horizon - offset - latency
        if saved is not None and policy_id is None:
            policy_id = policy_hash(fitted)
        try:
            found = play_plan(
                made,
                fitted,
                episodes=episodes,
                execute=usual if execute is None else execute,
                seed=played_seed,
                offset=offset,
                latency=latency,
                admission=rule,
                engine=engine,
                batching=batching,
                ensemble_decay=ensemble_decay,
                hold_action=hold_action,
                allow_hold=allow_hold,
                timeout=timeout,
                journal=journal,
                resume=resume,
                policy_id=policy_id,
                progress=progress,
            )
        except HeadraceError as error:
            if saved is not None and error.finished is not None:
                cast("Evaluation", error.finished).save(saved)
            raise
        if saved is not None:
            found.save(saved)
        return found


def merge(*parts: str | Path | Evaluation, output: str | Path | None = None) -> Evaluation:
    """One table of evaluations that were played apart: journals, saved evaluations, or evaluations.

    Args:
        *parts: files or evaluations of one identity; a difference is refused, and so is an episode that is in several
            with rows that are not equal. Other circumstances (versions, processor, …) are warned about.
        output: new file that the result is saved to.

    Returns:
        The rows of all, over all that was planned in any; an incomplete plan has no rates.
    """
    from headrace.rollout import Evaluation
    from headrace.rollout._evaluation_files import merge as merge_named

    named = [
        (f"part {number}", part) if isinstance(part, Evaluation) else (str(part), Evaluation.load(part))
        for number, part in enumerate(parts, 1)
    ]
    merged = merge_named(named)
    if output is not None:
        merged.save(output)
    return merged


def _recipe(env: str | EnvRecipe | EvaluatedEnv, **settings: object) -> EnvRecipe | None:
    """What to make, or None where somebody made it; a setting that says something else than what is there is refused.

    Args:
        env: as for :func:`evaluate`.
        **settings: fields of the recipe; None where nothing was said.
    """
    if isinstance(env, (str, EnvRecipe)):
        return recipe_of(env, _NUM_ENVS, **settings)
    for name, value in settings.items():
        if value is not None and name != "seed":  # of the episodes, which are begun here
            raise ConfigError(f"{name}: expected none with an environment that is made already, got {value!r}")
    return None


def _check_remote(
    address: str | None,
    mapping: WireMapping | None,
    connections: int,
    images: str,
    engine: str | Engine,
    batching: object,
) -> None:
    """Refuse what only a server's policy has, without one, and what it has of its own, with one."""
    if address is None:
        if mapping is not None or connections != 1 or images != "raw":
            raise ConfigError(
                "mapping, connections, images: expected the address of a server as policy with them, such as "
                "openpi://HOST:8000, got another policy"
            )
    elif engine != "inline" or batching is not None:
        raise ConfigError(f"engine, batching: expected none with {address}: a server has its own")


def _rule(admission: Admission | str) -> Admission:
    """A rule, by its registered name, or from ``module:name``: an object, or a class made without arguments."""
    from headrace.chunking import admission_names, make_admission

    if not isinstance(admission, str):
        return admission
    module, _, attribute = admission.partition(":")
    if module in admission_names() or not attribute.isidentifier():
        return make_admission(admission)
    return cast("Admission", load_made(admission, "--admission"))


def _fitted(
    policy: PolicyLike | str | Path | None, env: EvaluatedEnv, horizon: int | None, action_dim: int
) -> ChunkPolicy:
    from headrace.chunking import as_chunk_policy
    from headrace.rollout._policy_source import load_policy_source

    if policy is None or isinstance(policy, (str, Path)):
        recipe = cast("EnvRecipe | None", getattr(env, "recipe", None))
        task = None if recipe is None else recipe.source
        policy = load_policy_source(None if policy is None else str(policy), task=task)
    return as_chunk_policy(policy, horizon=horizon, action_dim=action_dim)


def _connect(
    address: str,
    env: EvaluatedEnv,
    seed: int,
    horizon: int | None,
    mapping: WireMapping | None,
    connections: int,
    images: ImageCoding,
    timeout: float | None,
) -> RemoteEngine:
    """The engine of a server; sizes that it does not say come from one answer."""
    from headrace.rollout._evaluated_env import action_size
    from headrace.serving import RemoteCfg, RemoteEngine

    action_dim = action_size(env.single_action_space)
    engine = RemoteEngine(
        address,
        mapping=mapping,
        horizon=horizon,
        action_dim=action_dim,
        connections=connections,
        images=images,
        cfg=RemoteCfg(timeout=timeout or RemoteCfg().timeout, api_key=os.environ.get("HEADRACE_API_KEY") or None),
    )
    if engine.sizes.horizon is None and horizon is None:
        try:
            env.reset(seed=seed)
            learned = engine.probe(env.observe([0]), env.instructions([0]))
            if learned.action_dim != action_dim:
                raise ConfigError(f"policy {address}: plans actions of {learned.action_dim}, the task has {action_dim}")
        except BaseException:  # also Ctrl-C; raised again
            engine.close()
            raise
    return engine
