"""``headrace.evaluate``: play a plan of episodes with a policy; ``headrace.evaluation.merge``: join parts of one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, HeadraceError, require_extra
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.files import check_new, check_writable
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.envs.recipe import AnyEnv
    from headrace.evaluation._result import Evaluation
    from headrace.evaluation.player import OnEpisodes
    from headrace.policies.load_policy import FoundPolicy, PolicySource
    from headrace.policies.preflight import Preflight

NUM_ENVS = 16
"""Environments in the batch, unless set."""


def evaluate(
    env: str | EnvRecipe | AnyEnv,
    policy: PolicySource = None,
    *,
    episodes: int | Iterable[int] = 100,
    num_envs: int | None = None,
    seed: int | None = None,
    overrides: Mapping[str, object] | None = None,
    play: PlayCfg = PlayCfg(),
    film: FilmCfg | None = None,
    journal: str | Path | JournalCfg | None = None,
    workers: int | WorkersCfg | None = None,
    output: str | Path | None = None,
    progress: bool | OnEpisodes = True,
) -> Evaluation:
    """Play every episode of a plan once, to its end.

    An environment whose chunk is used up is suspended until its next chunk is there; the others go on. Images are
    drawn only for the observations that the model reads. The rows do not depend on the number of environments, the
    engine, the rule of admission or the number of workers, bit for bit, with strict batches.

    Args:
        env: a task name, ``module:NAME``, ``gym:ID``; a recipe, which is complete, so that an argument with another
            value is refused; or an environment with ``autoreset="disabled"``, which stays open.
        policy: a checkpoint that ``headrace imitate`` or ``headrace train`` wrote, the directory of a training,
            ``latest`` or ``best`` of ``runs/``, a TorchScript or ONNX file; ``module:name`` of a policy object, class
            or function; ``lerobot:DIR``; the address of a server, such as ``openpi://HOST:8000`` or
            ``gr00t://HOST:5555``, whose API key is in the variable ``HEADRACE_API_KEY``, or a
            :class:`headrace.policies.RemoteCfg`; None for the policy that we ship for the task; in Python also
            everything that :func:`headrace.policies.as_chunk_policy` takes.
        episodes: how many (ids from 0), or the ids.
        num_envs: environments in the batch; None for the recipe's, else 16.
        seed: of the episodes and of the policy's noise; None for that of the recipe or environment, else 0.
        overrides: task settings by path; of a Gymnasium environment, arguments for ``gymnasium.make``.
        play: how the policy is played.
        film: what to film.
        journal: file that every finished episode is appended to in the step in which it ends; a kill of the process
            loses none, a loss of power those of the last second.
        workers: processes to play in over Ray; None for this process. A policy by name is found on each worker; an
            object is sent there once, as a pickle. Workers connect to a server on their own. What a worker that died
            left is played again by another; a block whose workers died three times is given up (``given_up``).
        output: new file that the result is saved to, also after Ctrl-C or a failure; :meth:`Evaluation.load` reads it.
        progress: show the preflight, and a progress bar with rates and the running success rate; or a function that is
            called with the rows of episodes in each step in which some ended, once they are in the journal.

    Returns:
        A row per finished episode and what it cost. Ctrl-C gives what is finished, with status ``interrupted``.

    Raises:
        ConfigError: the request cannot be met.
        HeadraceError: something failed while episodes were played; ``error.finished`` has those that were done.
    """
    from rich.console import Console

    from headrace.evaluation.player import check_engine, open_player, play_plan
    from headrace.evaluation.scheduling import EpisodePlan
    from headrace.policies.load_policy import find_policy, find_task

    recipe = _recipe(env, num_envs=num_envs, seed=seed, overrides=overrides)
    made = None if recipe is not None else cast("AnyEnv", env)
    # workers load what module:name names on their own
    later = workers is not None and isinstance(policy, str) and ":" in policy and not Path(policy).exists()
    found = None if later else find_policy(policy, find_task(recipe or made))
    if found is not None:
        check_engine(found, play)
        if recipe is not None:  # with the settings that it was trained with
            recipe = recipe.replace(overrides=found.overrides | dict(recipe.overrides))
    source = policy if found is None or workers is not None else found
    plan = EpisodePlan(episodes)
    book = JournalCfg(path=journal) if isinstance(journal, (str, Path)) else journal
    if found is None or found.kind != "remote":  # a server has batches of its own
        play = _resume_batches(play, book)
    if film is not None:
        film.check()
        film.check_episodes(plan.ids, recipe or cast("EnvRecipe | None", getattr(made, "recipe", None)))
    saved = None if output is None else Path(output)
    if saved is not None:
        check_new(saved, "output")
        check_writable(saved.parent)

    with _saving(saved) as save, ExitStack() as stack:
        if workers is not None:
            require_extra("ray", extra="ray", purpose="distributed")
            from headrace.evaluation.workers import play_distributed

            if recipe is None or (film is not None and film.video is not None):
                raise ConfigError("workers: expected environments by name or recipe, and no video, with workers")
            team = WorkersCfg(count=workers) if isinstance(workers, int) else workers
            result = save(play_distributed(recipe, policy, plan, play, team, journal=book, progress=progress))
        else:
            if made is None:
                assert recipe is not None
                made = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
            played_seed = cast("int", getattr(made, "seed", 0)) if seed is None else seed
            player = stack.enter_context(open_player(made, source, play, played_seed))
            if progress is True:
                Console(stderr=True).print(player.preflight.table())
            if film is not None and film.video is not None:
                stack.enter_context(film.film(made))
            named = book is not None or saved is not None or play.policy_id is not None
            header = player.header if named else None
            result = save(play_plan(plan, player.play, header=header, journal=book, progress=progress))
        if film is not None and film.episodes is not None:
            if film.on_table is not None:
                film.on_table(result)
            film_again(film, recipe or cast("EnvRecipe", cast("AnyEnv", env).recipe), source, play, result)
        return result


@contextmanager
def open_recorded(
    recipe: EnvRecipe, policy: PolicySource, directory: str | Path, keep: Literal["all", "succeeded"] = "all"
) -> Generator[AnyEnv]:
    """Yield environments to evaluate in, which record every episode that ends into a new directory.

    They have the settings that the policy was trained with, as those of :func:`evaluate` do.

    Args:
        recipe: of the environments; settings in it come before those of the policy.
        policy: that is evaluated.
        directory: of the dataset.
        keep: which episodes. Recorded are observations, actions, rewards and flags, and of tasks of ours the states,
            which ``headrace record replay`` compares.
    """
    from headrace.policies.load_policy import find_policy
    from headrace.recording import DatasetInfo, EpisodeRecorder, RecorderCfg

    check_new(Path(directory), "record")
    recipe = recipe.replace(overrides=find_policy(policy, recipe.source).overrides | dict(recipe.overrides))
    fields = ("obs", "actions", "rewards", "flags", *(() if recipe.bridged else ("states",)))
    with (
        closing(recipe.make(autoreset="disabled")) as env,
        EpisodeRecorder(directory, RecorderCfg(fields=fields, keep=keep), DatasetInfo.of(env)) as recorder,
    ):
        env.attach(recorder)
        yield env


def preflight(env: str | EnvRecipe | AnyEnv, policy: PolicySource = None, *, play: PlayCfg = PlayCfg()) -> Preflight:
    """Compare what a policy states with what an environment gives it, and play nothing.

    Args:
        env: as for :func:`headrace.evaluate`.
        policy: likewise.
        play: how the policy would be played, its map of observations among it.

    Returns:
        A line per input, for the action and for the chunk; :meth:`Preflight.check` raises what an evaluation would.
    """
    from headrace.evaluation.player import open_player
    from headrace.policies.load_policy import find_policy, find_task

    recipe = EnvRecipe.of(env) if isinstance(env, (str, EnvRecipe)) else None
    found = find_policy(policy, find_task(recipe or cast("AnyEnv", env)))
    with ExitStack() as stack:
        made = cast("AnyEnv", env)
        if recipe is not None:  # with the settings that the policy was trained with
            recipe = recipe.replace(num_envs=1, overrides=found.overrides | dict(recipe.overrides))
            made = stack.enter_context(closing(recipe.make(autoreset="disabled", final_obs=False)))
        return stack.enter_context(open_player(made, found, play, 0)).preflight


def merge(*parts: str | Path | Evaluation, output: str | Path | None = None) -> Evaluation:
    """Join evaluations that were played apart into one table: journals, saved evaluations, or evaluations.

    Args:
        *parts: files or evaluations of one identity; a difference is refused, and so is an episode that is in several
            with rows that are not equal. Other circumstances (versions, processor, …) are warned about.
        output: new file that the result is saved to.

    Returns:
        The rows of all, over all that was planned in any; an incomplete plan has no rates.
    """
    from headrace.evaluation._result import Evaluation
    from headrace.evaluation._result_files import merge as merge_named

    named = [
        (f"part {number}", part) if isinstance(part, Evaluation) else (str(part), Evaluation.load(part))
        for number, part in enumerate(parts, 1)
    ]
    merged = merge_named(named)
    if output is not None:
        merged.save(output)
    return merged


def _recipe(env: str | EnvRecipe | AnyEnv, **settings: object) -> EnvRecipe | None:
    """Return what to make, or None for an existing environment, on which only the seed of the episodes can be set."""
    if isinstance(env, (str, EnvRecipe)):
        return EnvRecipe.of(env, NUM_ENVS, **settings)
    for name, value in settings.items():
        if value is not None and name != "seed":
            raise ConfigError(f"{name} cannot be changed on an existing environment, got {value!r}; make another one")
    return None


def _resume_batches(play: PlayCfg, book: JournalCfg | None) -> PlayCfg:
    """Return the settings with the strict batches of a journal that is resumed, unless others are set."""
    from headrace.policies.batching import Batching

    batching = None if isinstance(play.batching, Batching) else Batching.of(play.batching)
    if batching is None or batching.mode == "fast" or play.engine not in ("inline", "thread", "process"):
        return play
    from headrace.evaluation._journal import read_header

    if book is None or not book.resume or (header := read_header(Path(book.path))) is None:
        return play
    size: object = header.identity.get("strict_size")
    if not isinstance(size, int):
        return play
    # 0.2, which does not name places, placed rows by their ids
    return replace(play, batching=Batching(size=size, places=None if "places" in header.identity else "modulo"))


@contextmanager
def _saving(path: Path | None) -> Generator[Callable[[Evaluation], Evaluation]]:
    """Yield a function that saves a result to ``path`` and returns it; rows finished before an error are saved, too."""

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


def film_again(
    filming: FilmCfg, recipe: EnvRecipe, policy: PolicySource | FoundPolicy, play: PlayCfg, found: Evaluation
) -> None:
    """Play the selected episodes once more, filmed; their rows must be those of the table."""
    from headrace.evaluation._result_files import join_rows_once
    from headrace.evaluation.player import open_player

    rows = [row for row in found.episodes if filming.selects(row.episode_id, row.success)]
    with (
        closing(recipe.replace(num_envs=1).make(autoreset="disabled", final_obs=False)) as env,
        open_player(env, policy, play, rows[0].seed if rows else 0) as player,
    ):
        for row in rows:
            path = filming.episode_path(row.episode_id)
            with filming.film(env, path):
                again = player.play([row.episode_id])
            if again.interrupt is not None:
                raise again.interrupt
            join_rows_once([("the table", row), (str(path), again.episodes[0])])
