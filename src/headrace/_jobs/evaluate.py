"""``headrace.evaluate``: play a plan of episodes with a policy by name; ``headrace.merge``: parts of one as a whole."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from headrace._jobs.request import check_new, check_video, film_env, recipe_of
from headrace.envs._recipe import EnvRecipe
from headrace.errors import ConfigError, HeadraceError
from headrace.files import check_writable

if TYPE_CHECKING:
    from headrace.chunking import Admission, Batching, Engine
    from headrace.chunking._policy import PolicyLike
    from headrace.envs._recipe import AnyEnv
    from headrace.rollout import EpisodeResult, Evaluation
    from headrace.rollout._episode_plan import EpisodePlan
    from headrace.rollout._evaluate import Evaluator, OnEpisodes
    from headrace.rollout._hold_action import HoldAction
    from headrace.serving import WireMapping
    from headrace.serving._images import ImageCoding

_NUM_ENVS = 16


def evaluate(
    env: str | EnvRecipe | AnyEnv,
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
    instruction: str | None = None,
    on_episodes: OnEpisodes | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    output: str | Path | None = None,
    video: str | Path | None = None,
    film: Literal["failures"] | Iterable[int] | None = None,
    films: str | Path = "films",
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
        policy: a checkpoint that ``headrace imitate`` or ``headrace train`` wrote, the directory of a training,
            ``latest`` or ``best`` of ``runs/``, a TorchScript or ONNX file; ``module:name`` of a policy object, class
            or function; ``lerobot:DIR``; the address of a server, such as ``openpi://HOST:8000`` or
            ``gr00t://HOST:5555``, whose API key is in the variable ``HEADRACE_API_KEY``; None for the policy that we
            ship for the task; in Python also whatever :func:`headrace.chunking.as_chunk_policy` takes.
        episodes: how many (ids from 0), or the ids.
        num_envs: environments in the batch; None for the recipe's, else 16.
        seed: of the episodes and of the policy's noise; None for that of the recipe or environment, else 0.
        threads: physics threads of a task; None for the recipe's, else all cores.
        overrides: task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``.
        execute: actions executed of each chunk; None for all that are left after offset and latency, 1 with
            ensembling.
        offset: first row of a chunk that is played.
        latency: simulated steps between an observation and the moment its chunk takes over.
        horizon: rows of a chunk, where the policy does not say.
        admission: when to infer, and for which environments: ``greedy``, ``immediate``, ``periodic:K[:hold]``,
            ``synchronized[:hold]``, ``threshold:N``, ``whole-batch-on-any``, or ``module:name`` of a rule; in Python
            also the rule itself.
        engine: where the model runs: ``inline``, ``thread`` (beside the physics), ``process`` (for policies that hold
            the GIL); in Python also the name of a registered engine, or an engine of your own, which you close. A
            server's policy has its own.
        batching: ``strict`` (the default) gives the model batches of one fixed size, 16 rows, in which an episode
            always has the same row: results are equal bit for bit whatever ``num_envs``, at the price of padding rows.
            ``fast`` gives it whoever waits; results then differ in their last bits with the batch. A
            :class:`headrace.chunking.Batching` says the size or buckets. A server, or an engine of yours, has its own.
        ensemble_decay: temporal ensembling as in ACT, with this decay, which executes one action of each chunk;
            negative favors new predictions.
        hold_action: what waiting environments play under a rule that holds: ``last``, ``zero`` or a function.
        allow_hold: take a bridged environment with fidelity ``hold``, too, whose suspended environments drift; the
            result says so.
        timeout: seconds that one call of the model may take, with an engine by name; None for no limit.
        journal: file that every finished episode is appended to at once.
        resume: go on with that journal.
        policy_id: what journal and output call the policy, needed for that of a server; None for a hash of its
            weights, settings and code.
        instruction: what the policy is told in every episode; None for the task's own text.
        on_episodes: called with the rows of episodes as they finish.
        workers: processes to play in over Ray, each with a batch of its own; None for this process.
        ray_address: of the Ray cluster whose machines the workers run on, or ``auto``; None for this machine.
        output: new file that the result is saved to, also after Ctrl-C or a failure; :meth:`Evaluation.load` reads it.
        video: film the first environments of a task of ours into this file, which must be new.
        film: episodes to play again afterwards, bit for bit, and to film: ``failures`` for those without success,
            or ids of the plan; of a task of ours.
        films: directory for the films, ``episode-ID.mp4``, each of which must be new.
        renderer: what draws videos: ``native``, ``gl`` (MuJoCo's own pictures) or ``warp``.
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
    from headrace.distributed._opening import (
        EvaluationSettings,
        check_remote,
        named_policy,
        open_evaluator,
        remote_address,
    )
    from headrace.rollout._episode_plan import EpisodePlan
    from headrace.rollout._evaluate import play_plan
    from headrace.rollout._policy_source import load_policy_source

    recipe = _recipe(env, num_envs=num_envs, seed=seed, threads=threads, overrides=overrides)
    settings = EvaluationSettings(
        execute=execute,
        offset=offset,
        latency=latency,
        horizon=horizon,
        admission=admission,
        engine=engine,
        batching=batching,
        ensemble_decay=ensemble_decay,
        hold_action=hold_action,
        allow_hold=allow_hold,
        timeout=timeout,
        policy_id=policy_id,
        instruction=instruction,
        mapping=mapping,
        connections=connections,
        images=images,
    )
    check_remote(policy, settings)
    file = None if recipe is None else named_policy(policy, recipe)
    if recipe is not None and file is not None:  # with the settings that it was trained with, as play does
        recipe = recipe.replace(overrides=file.overrides | dict(recipe.overrides))
    if workers is None and file is None and isinstance(policy, str) and remote_address(policy) is None:
        policy = load_policy_source(policy)  # what cannot be loaded is an error before environments are made
    if resume and journal is None:
        raise ConfigError("resume: expected a journal to go on with; pass journal=")
    whole = None if video is None else Path(video)
    check_video(whole, renderer)
    plan = EpisodePlan(episodes)
    wanted = film if film is None or isinstance(film, str) else tuple(film)
    replayed = recipe or cast("EnvRecipe | None", getattr(env, "recipe", None))
    if wanted is not None:
        _check_films(wanted, Path(films), plan, replayed)
    saved = None if output is None else Path(output)
    if saved is not None:
        check_new(saved, "output")
        check_writable(saved.parent)
    book = None if journal is None else Path(journal)

    def filmed(found: Evaluation) -> Evaluation:
        if wanted is None or replayed is None:
            return found
        rows = [
            row
            for row in found.episodes
            if (row.success is False if wanted == "failures" else row.episode_id in wanted)
        ]
        with (
            closing(replayed.replace(num_envs=1).make(autoreset="disabled", final_obs=False)) as single,
            open_evaluator(single, policy, rows[0].seed if rows else 0, settings) as again,
        ):
            for row in rows:
                _film_again(single, again, row, Path(films) / f"episode-{row.episode_id:06d}.mp4", renderer)
        return found

    with _saving(saved) as save, ExitStack() as stack:
        if workers is not None:
            from headrace.distributed import evaluate as evaluate_distributed

            if recipe is None or whole is not None:
                raise ConfigError("workers: expected environments by name or recipe, and no video, with workers")
            found = evaluate_distributed(
                recipe,
                policy,
                episodes=episodes,
                workers=workers,
                ray_address=ray_address,
                journal=book,
                resume=resume,
                on_episodes=on_episodes,
                progress=progress,
                **settings,
            )
            return filmed(save(found))
        if ray_address is not None:
            raise ConfigError("ray_address (--ray-address): expected a number of workers with it")
        if recipe is None:
            made = cast("AnyEnv", env)
            played_seed = cast("int", getattr(made, "seed", 0)) if seed is None else seed
        else:
            made = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
            played_seed = recipe.seed
        evaluator = stack.enter_context(open_evaluator(made, policy, played_seed, settings))
        if whole is not None:
            film_env(made, whole, renderer, stack)
        named = journal is not None or saved is not None or policy_id is not None
        found = play_plan(
            plan,
            partial(evaluator.play, progress=progress),
            header=evaluator.header if named else None,
            journal=book,
            resume=resume,
            on_episodes=on_episodes,
        )
        return filmed(save(found))


@contextmanager
def _saving(path: Path | None) -> Generator[Callable[[Evaluation], Evaluation]]:
    """Gives what saves a result to ``path`` and returns it; what an error in the block has finished is saved, too."""

    def save(found: Evaluation) -> Evaluation:
        if path is not None:
            found.save(path)
        return found

    try:
        yield save
    except HeadraceError as error:
        if error.finished is not None:
            save(cast("Evaluation", error.finished))
        raise


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


def _recipe(env: str | EnvRecipe | AnyEnv, **settings: object) -> EnvRecipe | None:
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


def _check_films(wanted: str | tuple[int, ...], films: Path, plan: EpisodePlan, recipe: EnvRecipe | None) -> None:
    """Refuse films that could not be made, before the work."""
    if isinstance(wanted, str) and wanted != "failures":
        raise ConfigError(f"film (--film): expected 'failures' or episode ids, got {wanted!r}")
    if recipe is None or recipe.bridged:
        raise ConfigError("film (--film): expected a task of ours, by name or recipe")
    planned = set(plan.ids)
    for episode in planned if isinstance(wanted, str) else wanted:
        if episode not in planned:
            raise ConfigError(f"film (--film): expected episodes of the plan, got {episode}")
        check_video(films / f"episode-{episode:06d}.mp4")
    check_writable(films)


def _film_again(env: AnyEnv, evaluator: Evaluator, row: EpisodeResult, path: Path, renderer: str) -> None:
    """Play an episode once more, filmed; its row must be the one of the table."""
    from headrace.rollout._evaluation_files import unique_rows

    with ExitStack() as stack:
        film_env(env, path, renderer, stack)
        again = evaluator.play([row.episode_id])
    if again.interrupt is not None:
        raise again.interrupt
    unique_rows([("the table", row), (str(path), again.episodes[0])])
