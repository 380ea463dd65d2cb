"""``headrace evaluate`` and ``headrace merge``: play a plan of episodes with a policy, and join parts of one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from rich.console import Console

from headrace._interrupts import exit_code
from headrace.cli.printing import say
from headrace.cli.records import Command, Only, Positional, Repeated
from headrace.envs.recipe import EnvKeywords, EnvRecipe
from headrace.envs.tasks.libero.names import SUITES
from headrace.errors import ConfigError, HeadraceError
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.evaluating import NUM_ENVS, evaluate, merge
from headrace.evaluation.suites import SuiteTask, evaluate_suite
from headrace.policies.serving.remote_cfg import RemoteCfg
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


def _films(text: str) -> Literal["failures"] | tuple[int, ...]:
    if text == "failures":
        return text
    words = text.split(",")
    if not all(word.isdigit() for word in words):
        raise ConfigError(f"--film: expected 'failures' or ids such as 3,17, got {text!r}")
    return tuple(map(int, words))


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
    does not depend on --num-envs, --engine or --admission (but for the hold forms) by one bit, unless --fast is
    given."""

    task: Annotated[str, Positional("TASK")]
    """A name from 'headrace tasks', module:NAME, gym:ID, or a recipe file (.yaml, .json), or a suite: FILE.toml,
    libero_spatial, libero_object, libero_goal, libero_10 or libero_90."""
    env: Annotated[EnvKeywords, Only("num_envs", "seed", "overrides", "threads")]
    policy: str | None = None
    """A checkpoint that 'headrace imitate' wrote, module:name of a policy object, class or function, lerobot:DIR, or
    the address of a policy server: openpi://, gr00t://, roboarena://, vllm-omni:// (default: the one that ships for the
    task)."""
    episodes: int | None = None
    episode_ids: Annotated[range | None, _ids] = None
    """Play the ids FIRST:END instead of --episodes, for example 100:200."""
    protocol: str | None = None
    """Evaluation loop of LIBERO to reproduce: openpi, oft, lerobot, groot or vla-eval (default: openpi)."""
    trials: int | None = None
    """With a suite of LIBERO: episodes per task (default: 50)."""
    play: Annotated[
        PlayCfg,
        Only("execute", "offset", "latency", "horizon", "ensemble_decay", "timeout", "instruction", "policy_id"),
    ]
    admission: str = "greedy"
    """When to infer, and for which environments: greedy, immediate, periodic:K[:hold], synchronized[:hold],
    threshold:N, whole-batch-on-any, or module:name of a rule."""
    engine: Literal["inline", "thread", "process"] = "inline"
    """Where the model runs: thread is beside the physics, process is for policies that hold the GIL. A server's policy
    has its own."""
    fast: bool = False
    batch_size: int | None = None
    video: str | None = None
    film: Annotated[Literal["failures"] | tuple[int, ...] | None, _films] = None
    """Episodes to play again afterwards, bit for bit, and to film: failures for those without success, or ids of the
    plan (ID,ID,…); of a task of ours."""
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
    map: Annotated[Sequence[str], Repeated(list)] = ()
    """With a policy server: fill its KEY from a group, or a part of it such as policy[0:7]: KEY=GROUP."""
    prompt_key: str | None = None
    """With a policy server: name of the instruction in a request (default: prompt)."""
    resize: Annotated[tuple[int, int] | None, _size] = None
    """With a policy server: fit images into this size, HEIGHTxWIDTH, padded with black."""
    connections: int = 1
    """With a policy server: connections to it, each with a batch of its own."""
    images: Literal["raw", "png", "jpeg"] = "raw"
    """With a policy server: form of images in a request."""


def _evaluate(given: EvaluateOptions) -> int:
    if given.resume and given.journal is None:
        raise ConfigError("resume (--resume): expected a journal to go on with (--journal)")
    if given.ray_address is not None and given.workers is None:
        raise ConfigError("ray_address (--ray-address): expected a number of workers with it (--workers)")
    if given.episodes is not None and given.episode_ids is not None:
        raise ConfigError("--episodes, --episode-ids: expected one of them, got both")
    more = {"admission": given.admission, "engine": given.engine}
    settings: dict[str, Any] = {
        "policy": _policy(given),
        "play": replace(given.play, **more, batching=_batching(given), mapping=_mapping(given)),
        "journal": given.journal and JournalCfg(path=given.journal, resume=given.resume),
        "workers": given.workers and WorkersCfg(count=given.workers, ray_address=given.ray_address),
        "output": given.output,
    }
    if given.task in SUITES:
        return _libero(given, settings)
    if given.protocol is not None or given.trials is not None:
        raise ConfigError("--protocol, --trials: expected a suite of LIBERO with them")
    if given.task.endswith(".toml"):
        return _suite(given, given.task, settings)
    if given.episodes is not None or given.episode_ids is not None:
        settings["episodes"] = given.episode_ids if given.episodes is None else given.episodes
    film = FilmCfg(video=given.video, episodes=given.film, directory=given.films, renderer=given.renderer)
    try:
        found = evaluate(EnvRecipe.of(given.task, NUM_ENVS, **given.env), **settings, film=film)
    except HeadraceError as error:
        if error.finished is not None:
            _show(cast("Evaluation", error.finished), given.csv)
        raise
    _show(found, given.csv)
    return _exit_code(found.interrupt, found.unfinished)


def _libero(given: EvaluateOptions, settings: dict[str, Any]) -> int:
    from headrace.evaluation.libero import libero_protocol, libero_suite

    name, play = given.protocol or "openpi", settings["play"]
    rules, suite = libero_protocol(name), libero_suite(given.task, name, 50 if given.trials is None else given.trials)
    if play.execute is None:
        play = replace(play, execute=rules.execute)
    if play.mapping is None and isinstance(settings["policy"], RemoteCfg):
        play = replace(play, mapping=rules.mapping)
    say(f"protocol {name}: {rules.deviates or 'as that loop does it'}", "dim")
    return _suite(given, suite, settings | {"play": play})


def _suite(given: EvaluateOptions, suite: str | tuple[SuiteTask, ...], settings: dict[str, Any]) -> int:
    own = ("episodes", "episode_ids", "csv", "video", "film")
    named = {f"--{name.replace('_', '-')}": getattr(given, name) for name in own}
    named |= {"--seed": given.env.get("seed"), "--set": given.env.get("overrides")}
    for option, value in (named | {"--instruction": given.play.instruction}).items():
        if value is not None:
            raise ConfigError(f"{option}: expected none with a suite, which has its own, or takes none")
    found = evaluate_suite(suite, num_envs=given.env.get("num_envs"), threads=given.env.get("threads"), **settings)
    Console().print(found.summary())
    return _exit_code(found.interrupt, found.unfinished)


def _policy(given: EvaluateOptions) -> str | RemoteCfg | None:
    """Return the policy: a server's with the settings of its connection."""
    if given.policy is not None and "://" in given.policy:
        key = os.environ.get("HEADRACE_API_KEY") or None
        return RemoteCfg(given.policy, connections=given.connections, images=given.images, api_key=key)
    if (given.connections, given.images) != (1, "raw"):
        raise ConfigError(
            "connections, images: expected the address of a server as policy with them, such as openpi://HOST:8000"
        )
    return given.policy


def _batching(given: EvaluateOptions) -> Batching | Literal["fast"] | None:
    from headrace.policies.batching import Batching

    if given.fast and given.batch_size is not None:
        raise ConfigError("--batch-size: expected no --fast with it, whose batches have any size")
    return "fast" if given.fast else None if given.batch_size is None else Batching(size=given.batch_size)


def _mapping(given: EvaluateOptions) -> ObservationMap | None:
    """Return the map from our groups to a server's keys; None where none is given."""
    if given.map:
        from headrace.policies.observation_map import parse_mapping

        return parse_mapping(given.map, image_size=given.resize, prompt=given.prompt_key or "prompt")
    if given.resize is not None or given.prompt_key is not None:
        raise ConfigError(
            "--resize, --prompt-key: expected --map KEY=GROUP with them; without, groups go by name as they are"
        )
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
