"""A plan of episodes over the workers of a Ray cluster: evaluated, or recorded."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, require_extra
from headrace.evaluation.cfg import JournalCfg, PlayCfg, WorkersCfg
from headrace.evaluation.cursors import EpisodePlan
from headrace.evaluation.player import OnEpisodes, play_plan
from headrace.evaluation.ray._worker import Worker, WorkerSpec
from headrace.files import check_writable
from headrace.policies.identity import policy_hash
from headrace.policies.serving.remote_cfg import RemoteCfg

if TYPE_CHECKING:
    from headrace.evaluation._result import Evaluation
    from headrace.evaluation.ray._driver import Driver
    from headrace.policies.load_policy import PolicySource
    from headrace.recording import RecorderCfg

_LEAST_STORE = 80_000_000
"""Bytes: about the smallest object store that Ray starts with. Rows are small, and images never go through it."""


def play_distributed(
    recipe: EnvRecipe,
    policy: PolicySource,
    plan: EpisodePlan,
    play: PlayCfg,
    workers: WorkersCfg,
    *,
    journal: JournalCfg | None = None,
    progress: bool | OnEpisodes = True,
) -> Evaluation:
    """Play a plan over worker processes; the arguments are those of :func:`headrace.evaluate`.

    Each worker holds environments and policy, and takes small blocks of ids; rows come back as episodes finish, and
    the driver writes the journal. Workers that find room later join in.
    """
    if journal is not None and Path(journal.path).exists() and not journal.resume:
        raise ConfigError(f"journal: {journal.path} already exists; pass resume=True (--resume) to go on with it")
    with _driver(_spec(recipe, policy, play, workers), workers) as driver:
        return play_plan(
            plan, driver.play, header=driver.header(), journal=journal, progress=progress, news=driver.take_news
        )


def record_episodes(
    recipe: EnvRecipe,
    policy: PolicySource = None,
    *,
    directory: str | Path,
    record: RecorderCfg | None = None,
    episodes: int | Iterable[int] = 100,
    play: PlayCfg = PlayCfg(),
    workers: int | WorkersCfg = 2,
    progress: bool = True,
) -> Evaluation:
    """Play a plan as :func:`headrace.evaluate` does with workers, and record it: a dataset per worker, written there.

    Observations and images go from the worker to its disk, never through the object store. ``headrace record merge``
    puts ``directory/worker-*`` together; an episode that two workers recorded, because one died before it could report
    it, is in the merged dataset once.

    Args:
        recipe: of the environments of one worker.
        policy: as for :func:`headrace.evaluate`.
        directory: where workers make ``worker-0000``, …: must not exist. With several machines, a shared file system,
            or merge what each has.
        record: what to record and keep; None for observations, actions, rewards and flags of all episodes.
        episodes: how many (ids from 0), or the ids; the episodes of a block are on disk before their rows are reported.
        play: how the policy is played.
        workers: processes.
        progress: show a progress bar.

    Returns:
        The rows of the episodes. Those that ``record`` does not keep are among them.
    """
    from headrace.recording import RecorderCfg

    target = Path(directory)
    if target.exists():
        raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
    check_writable(target.parent)
    plan, team = EpisodePlan(episodes), WorkersCfg(count=workers) if isinstance(workers, int) else workers
    spec = replace(_spec(recipe, policy, play, team), record=record or RecorderCfg(), directory=target.absolute())
    with _driver(spec, team) as driver:
        found = play_plan(plan, driver.play, header=driver.header(), progress=progress)
        driver.finish()
        return found


def _spec(recipe: EnvRecipe, policy: PolicySource, play: PlayCfg, workers: WorkersCfg) -> WorkerSpec:
    if not isinstance(play.engine, str):
        raise ConfigError(f"engine: expected a name, which every worker makes one of, got {type(play.engine).__name__}")
    if play.policy_id is None:
        if isinstance(policy, RemoteCfg) or (isinstance(policy, str) and "://" in policy):
            raise ConfigError(
                f"policy_id (--policy-id): expected a text that names the policy of {policy}: workers must play the "
                "same one"
            )
        if policy is not None and not isinstance(policy, (str, Path)):
            play = replace(play, policy_id=policy_hash(policy))  # here, where its code is
    if not recipe.bridged and recipe.threads is None:
        recipe = recipe.replace(threads=workers.cpus)
    return WorkerSpec(recipe=recipe, policy=policy, play=play, threads=recipe.threads or workers.cpus)


@contextmanager
def _driver(spec: WorkerSpec, workers: WorkersCfg) -> Generator[Driver]:
    """Connect to Ray and start workers; at the end of the block they are gone, and so is a cluster that began here."""
    ray: Any = require_extra("ray", extra="ray", purpose="distributed")
    from headrace.evaluation.ray._driver import Driver

    packed: bytes = ray.cloudpickle.dumps(spec)
    own = not ray.is_initialized()
    if own:
        _connect(ray, workers.ray_address, workers.count * workers.cpus, len(packed))
    try:
        sent = ray.put(packed)
        kind = ray.remote(Worker)
        options = {"num_cpus": workers.cpus, "num_gpus": workers.gpus, "max_restarts": 0, "max_task_retries": 0}
        driver = Driver(
            lambda number: kind.options(**options).remote(sent, sys.path, number),
            workers=workers.count,
            num_envs=spec.recipe.num_envs,
            block=workers.block,
        )
        try:
            yield driver
        finally:
            driver.close()
    finally:
        if own:
            ray.shutdown()


def _connect(ray: Any, address: str | None, cpus: int, size: int) -> None:
    """Join a cluster, or start one that is no larger than needed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no reports about use
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    if address is not None:
        ray.init(address=address, log_to_driver=False)
    else:
        store = max(_LEAST_STORE, 2 * size)
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=store, log_to_driver=False)
    if main:
        signal.signal(signal.SIGTERM, handler)  # Ray's own exits without what is finished
