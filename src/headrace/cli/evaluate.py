"""``headrace evaluate`` and ``headrace merge``: play a plan of episodes with a policy, and join parts of one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from rich.console import Console

from headrace._interrupts import exit_code
from headrace._progress import say
from headrace.cli.records import Command, Only, Positional
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.envs.tasks.libero.names import SUITES
from headrace.errors import ConfigError, HeadraceError
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.evaluating import NUM_ENVS, evaluate, merge, open_recorded
from headrace.evaluation.suites import BENCHMARKS, SuiteTask, benchmark_suite, evaluate_suite
from headrace.recording.film import FilmCfg

if TYPE_CHECKING:
    from headrace.evaluation import Evaluation
    from headrace.policies.batching import Batching
    from headrace.policies.observation_map import ObservationMap


def _ids(text: str) -> range:
    first, _, end = text.partition(":")
    if not first.isdigit() or not end.isdigit() or int(first) >= int(end):
        raise ConfigError(f"--episode-ids: expected FIRST:END with FIRST < END, for example 0:500, got {text!r}")
    return range(int(first), int(end))


def _films(text: str) -> Literal["failures", "flips"] | tuple[int, ...]:
    if text in ("failures", "flips"):
        return text
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise ConfigError(f"--film: expected 'failures' or ids such as 3,17, got {text!r}")
    return tuple(map(int, words))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not height.isdigit() or not width.isdigit():
        raise ConfigError(f"--resize: expected HEIGHTxWIDTH such as 224x224, got {text!r}")
    return int(height), int(width)


def _table(text: str) -> Path:
    """Return a file for the rows; one that could not be written is refused before the work."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--csv: expected a file in a directory that exists, got {path}")
    return path


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Play episodes of TASK, each exactly once, with a policy that plans chunks of actions, and print success rate and
    reward with intervals, and what the model cost. An environment that waits for its next chunk is suspended. The table
    does not depend on --num-envs, --engine or --admission by one bit, unless --fast is given."""

    task: Annotated[str, Positional("TASK")]
    """A name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json), or a suite: FILE.toml,
    libero_spatial, libero_object, libero_goal, libero_10, libero_90, metaworld_mt50 or pusht."""
    env: Annotated[EnvKeywords, Only("num_envs", "seed", "overrides", "threads")]
    policy: str | None = None
    """A checkpoint that 'headrace imitate' wrote, module:name of a policy object, class or function, lerobot:DIR,
    python:PATH/bin/python:module:name in another interpreter, or the address of a policy server, openpi:// or gr00t://
    (default: the one that ships for the task)."""
    against: str | None = None
    """Another policy to play the same episodes with, in turns; prints the differences, pair by pair."""
    against_instruction: str | None = None
    """Instruction of the other policy; without --against, of the same one."""
    episodes: int | None = None
    episode_ids: Annotated[range | None, _ids] = None
    """Play the ids FIRST:END instead of --episodes, for example 100:200."""
    protocol: str | None = None
    """Evaluation loop of LIBERO to reproduce: openpi, oft, lerobot, groot or vla-eval (default: openpi)."""
    trials: int | None = None
    """With a suite of LIBERO, metaworld_mt50 or pusht: episodes per task (default: 50)."""
    perturb: Annotated[tuple[str, ...], _words] = ()
    """With a suite of LIBERO: what differs from the benchmark, drawn from each episode's id, separated by commas:
    camera, light, texture, init, instruction."""
    play: Annotated[
        PlayCfg,
        Only("execute", "offset", "latency", "horizon", "ensemble_decay", "timeout", "instruction", "policy_id"),
    ]
    admission: str = "greedy"
    """When to infer, and for which environments: greedy, immediate, synchronized, whole-batch-on-any,
    or module:name of a rule."""
    engine: Literal["inline", "thread", "process"] = "inline"
    """Where the model runs: thread is beside the physics, process is for policies that hold the GIL. A server's policy
    has its own."""
    preflight: bool = False
    """Print what the policy states and what the environment gives, as a table, and play nothing."""
    fast: bool = False
    batch_size: int | None = None
    record: str | None = None
    video: str | None = None
    film: Annotated[Literal["failures", "flips"] | tuple[int, ...] | None, _films] = None
    """Episodes to play again afterwards, bit for bit, and to film: failures for those without success, ids of the plan
    (ID,ID,…), or, with --against, flips for those with which one policy succeeded; of a task of ours."""
    films: str = "films"
    """Directory for the films, episode-ID.mp4, each of which must be new."""
    renderer: str = "native"
    csv: Annotated[Path | None, _table] = None
    """Write the per-episode table here."""
    output: str | None = None
    journal: str | None = None
    """File that every finished episode is appended to; a directory of them for a suite."""
    resume: bool = False
    workers: int | None = None
    """Processes to play in over Ray (default: this process)."""
    ray_address: str | None = None
    """Address of a cluster, or auto (default: one on this machine that ends with the command)."""
    map: Sequence[str] = ()
    """With a policy server: fill its KEY from a group, or a part of it such as policy[0:7]: KEY=GROUP."""
    resize: Annotated[tuple[int, int] | None, _size] = None
    """With a policy server: fit images into this size, HEIGHTxWIDTH, padded with black."""


def _evaluate(given: EvaluateOptions) -> int:
    if given.resume and given.journal is None:
        raise ConfigError("resume (--resume): expected a journal to go on with (--journal)")
    if given.ray_address is not None and given.workers is None:
        raise ConfigError("ray_address (--ray-address): expected a number of workers with it (--workers)")
    if given.episodes is not None and given.episode_ids is not None:
        raise ConfigError("--episodes, --episode-ids: expected one of them, got both")
    more = {"admission": given.admission, "engine": given.engine}
    settings: dict[str, Any] = {
        "policy": given.policy,
        "play": replace(given.play, **more, batching=_batching(given), mapping=_mapping(given)),
        "journal": given.journal and JournalCfg(path=given.journal, resume=given.resume),
        "workers": given.workers and WorkersCfg(count=given.workers, ray_address=given.ray_address),
        "output": given.output,
    }
    if given.task in SUITES:
        return _libero(given, settings)
    if given.protocol is not None or given.perturb:
        raise ConfigError("--protocol, --perturb: expected a suite of LIBERO with them")
    if given.task in BENCHMARKS:
        return _suite(given, benchmark_suite(given.task, given.trials or 50), settings)
    if given.trials is not None:
        raise ConfigError("--trials: expected a suite of LIBERO, metaworld_mt50 or pusht with it")
    if given.task.endswith(".toml"):
        return _suite(given, given.task, settings)
    if given.episodes is not None or given.episode_ids is not None:
        settings["episodes"] = given.episode_ids if given.episodes is None else given.episodes
    recipe = EnvRecipe.of(given.task, NUM_ENVS, **given.env)
    if given.preflight:
        from headrace.evaluation import preflight

        found = preflight(recipe, settings["policy"], play=settings["play"])
        Console().print(found.table())
        return 1 if found.refused else 0
    if given.against is not None or given.against_instruction is not None:
        return _evaluate_paired(given, recipe, settings)
    if given.film == "flips":
        raise ConfigError("--film flips: expected another policy to compare with (--against)")
    shown: list[Evaluation] = []

    def show(found: Evaluation) -> None:
        shown.append(found)
        _show(found, given.csv)

    film = FilmCfg(
        video=given.video, episodes=given.film, directory=given.films, renderer=given.renderer, on_table=show
    )
    if given.record is not None and (given.workers is not None or given.film is not None):
        raise ConfigError("--record: expected no --workers and no --film with it; merge what parts have recorded")
    try:
        with (
            nullcontext(recipe)
            if given.record is None
            else open_recorded(recipe, settings["policy"], given.record) as env
        ):
            found = evaluate(env, **settings, film=film)
    except HeadraceError as error:
        if error.finished is not None and not shown:
            show(cast("Evaluation", error.finished))
        raise
    if not shown:
        show(found)
    films = [film.episode_path(row.episode_id) for row in found.episodes if film.selects(row.episode_id, row.success)]
    for path in (given.csv, given.output, given.journal, given.video, given.record, *films):
        if path is not None:
            say(f"wrote {path}")
    return _exit_code(found.interrupt, found.unfinished)


def _evaluate_paired(given: EvaluateOptions, recipe: EnvRecipe, settings: dict[str, Any]) -> int:
    from headrace.evaluation.paired import evaluate_paired

    for option in ("journal", "workers", "output", "video", "record"):
        if getattr(given, option) is not None:
            raise ConfigError(f"--{option}: expected none with --against, whose table is that of two policies")
    if given.film not in (None, "flips"):
        raise ConfigError("--film: expected flips with --against")
    other = given.policy if given.against is None else given.against
    play = settings["play"]
    text = play.instruction if given.against_instruction is None else given.against_instruction
    found = evaluate_paired(
        recipe,
        settings["policy"],
        other,
        episodes=settings.get("episodes", 100),
        play=play,
        against_play=replace(play, instruction=text),
        films=given.film and given.films,
    )
    Console().print(found.summary())
    if given.csv is not None:
        found.to_csv(given.csv)
    return _exit_code(found.policy.interrupt, found.policy.unfinished + found.against.unfinished)


def _libero(given: EvaluateOptions, settings: dict[str, Any]) -> int:
    from headrace.evaluation.libero import libero_protocol, libero_suite

    name, play = given.protocol or "openpi", settings["play"]
    trials = 50 if given.trials is None else given.trials
    rules, suite = libero_protocol(name), libero_suite(given.task, name, trials, given.perturb)
    if play.execute is None:
        play = replace(play, execute=rules.execute)
    if play.mapping is None and "://" in (given.policy or ""):
        play = replace(play, mapping=rules.mapping)
    say(f"protocol {name}: {rules.deviates or 'as that loop does it'}", "dim")
    return _suite(given, suite, settings | {"play": play})


def _suite(given: EvaluateOptions, suite: str | tuple[SuiteTask, ...], settings: dict[str, Any]) -> int:
    own = ("episodes", "episode_ids", "csv", "video", "film", "record")
    named = {f"--{name.replace('_', '-')}": getattr(given, name) for name in own}
    named |= {"--seed": given.env.get("seed"), "--set": given.env.get("overrides")}
    for option, value in (named | {"--instruction": given.play.instruction}).items():
        if value is not None:
            raise ConfigError(f"{option}: expected none with a suite; a file has its own, --trials N is for the others")
    found = evaluate_suite(suite, num_envs=given.env.get("num_envs"), threads=given.env.get("threads"), **settings)
    Console().print(found.summary())
    return _exit_code(found.interrupt, found.unfinished)


def _batching(given: EvaluateOptions) -> Batching | Literal["fast"] | None:
    from headrace.policies.batching import Batching

    if given.fast and given.batch_size is not None:
        raise ConfigError("--batch-size: expected no --fast with it, whose batches have any size")
    return "fast" if given.fast else None if given.batch_size is None else Batching(size=given.batch_size)


def _mapping(given: EvaluateOptions) -> ObservationMap | None:
    """Return the map from our groups to a server's keys; None where none is given."""
    if given.map:
        from headrace.policies.observation_map import parse_mapping

        return parse_mapping(given.map, image_size=given.resize)
    if given.resize is not None:
        raise ConfigError("--resize: expected --map KEY=GROUP with it; without, groups go by name as they are")
    return None


def _show(found: Evaluation, table: Path | None) -> None:
    """Print the figures, and write the rows to a file, if there is one."""
    Console().print(found.summary())
    if table is not None:
        found.to_csv(table)


def _exit_code(interrupt: KeyboardInterrupt | None, unfinished: int) -> int:
    if interrupt is not None:
        return exit_code(interrupt)
    return 1 if unfinished else 0


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """Merge journals and saved evaluations of 'headrace evaluate' (--journal, --output) into one table, and print what
    it reached. Task, seed, policy and whatever else decides the rows must be equal, and an episode that is in several
    must have equal rows. While episodes of the plan are missing there are no rates, and the exit code is 1."""

    parts: Annotated[Sequence[str], Positional("FILE")]
    """A journal or a saved evaluation."""
    output: str | None = None
    csv: Annotated[Path | None, _table] = None
    """Write the per-episode table here."""


def _merge(given: MergeOptions) -> int:
    found = merge(*given.parts, output=given.output)
    _show(found, given.csv)
    return 1 if found.unfinished else 0


COMMANDS = {"evaluate": Command(EvaluateOptions, _evaluate), "merge": Command(MergeOptions, _merge)}
