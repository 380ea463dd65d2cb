"""``headrace.distributed.evaluate`` and ``collect``: a plan of episodes over the workers of a Ray cluster."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from headrace.distributed._opening import EvaluationSettings, check_remote, remote_address
from headrace.distributed._worker import Worker, WorkerSpec
from headrace.envs._recipe import EnvRecipe, check_count
from headrace.errors import ConfigError, require_extra
from headrace.files import check_writable
from headrace.rollout import Evaluation
from headrace.rollout._episode_plan import EpisodePlan
from headrace.rollout._evaluate import OnEpisodes, play_plan
from headrace.rollout._policy_id import policy_hash

if TYPE_CHECKING:
    from headrace.distributed._driver import Driver
    from headrace.distributed._opening import PolicySource
    from headrace.recording import RecorderCfg

_LEAST_STORE = 80_000_000
"""Bytes: about the smallest object store that Ray starts with. Rows are small, and images never go through it."""


def evaluate(
    recipe: EnvRecipe,
    policy: PolicySource = None,
    *,
    episodes: int | Iterable[int] = 100,
    workers: int = 2,
    block: int | None = None,
    cpus_per_worker: int = 1,
    gpus_per_worker: float = 0,
    ray_address: str | None = None,
    journal: str | Path | None = None,
    resume: bool = False,
    on_episodes: OnEpisodes | None = None,
    progress: bool = True,
    **settings: Unpack[EvaluationSettings],
) -> Evaluation:
    """Play every episode of a plan once, over worker processes on any machines; the table is that of one process.

    Each worker holds environments and policy, and takes small blocks of ids; rows come back as episodes finish. What a
    worker that died left is played again by another. A block whose workers died three times is given up: its ids are in
    ``result.given_up``, and an incomplete plan has no rates. Workers that find room later join in.

    Args:
        recipe: of the environments of one worker.
        policy: as for :func:`headrace.evaluate`. By name it is found on each worker; an object is sent there once, as
            a pickle. Workers connect to a server on their own.
        episodes: how many (ids from 0), or the ids.
        workers: processes.
        block: ids that a worker takes at a time; None for four per environment, and fewer near the end.
        cpus_per_worker: cores that Ray reserves for a worker, and its threads where the recipe says none.
        gpus_per_worker: GPUs, or a share of one, likewise.
        ray_address: of a cluster, or ``auto``. None for the one that this program is connected to, or else one on this
            machine that ends with the call.
        journal: as for :func:`headrace.evaluate`, as are the arguments below; the driver writes it.
        resume: go on with that journal.
        on_episodes: called with rows as they arrive, once they are in the journal.
        progress: show a progress bar, with the env-steps per second of every worker.
        **settings: how the policy is played, by the names of :func:`headrace.evaluate`.

    Raises:
        HeadraceError: a worker raised it, or workers cannot be made; ``error.finished`` has what was done.
    """
    if resume and journal is None:
        raise ConfigError("resume: expected a journal to go on with; pass journal=")
    if journal is not None and Path(journal).exists() and not resume:
        raise ConfigError(f"journal: {journal} already exists; pass resume=True (--resume) to go on with it")
    plan = EpisodePlan(episodes)
    spec = _spec(recipe, policy, settings, cpus_per_worker)
    with _driver(spec, workers, block, cpus_per_worker, gpus_per_worker, ray_address) as driver:
        return play_plan(
            plan,
            partial(driver.play, progress=progress),
            header=driver.header(),
            journal=None if journal is None else Path(journal),
            resume=resume,
            on_episodes=on_episodes,
            news=driver.take_news,
        )


def collect(
    recipe: EnvRecipe,
    policy: PolicySource = None,
    *,
    directory: str | Path,
    record: RecorderCfg | None = None,
    episodes: int | Iterable[int] = 100,
    workers: int = 2,
    block: int | None = None,
    cpus_per_worker: int = 1,
    gpus_per_worker: float = 0,
    ray_address: str | None = None,
    progress: bool = True,
    **settings: Unpack[EvaluationSettings],
) -> Evaluation:
    """Play a plan as :func:`evaluate` does, and record the episodes: a dataset per worker, written where it runs.

    Observations and images go from the worker to its disk, never through the object store. ``headrace record merge``
    puts ``directory/worker-*`` together; an episode that two workers recorded, because one died before it could say so,
    is in the merged dataset once.

    Args:
        recipe: of the environments of one worker.
        policy: as for :func:`evaluate`.
        directory: where workers make ``worker-0000``, …: must not exist. With several machines, a shared file system,
            or merge what each has.
        record: what to record and keep; None for observations, actions, rewards and flags of all episodes.
        episodes: as for :func:`evaluate`, as are the other arguments.
        workers: processes.
        block: ids that a worker takes at a time; its episodes are on disk before their rows are reported.
        cpus_per_worker: cores of a worker.
        gpus_per_worker: GPUs of a worker.
        ray_address: of a cluster.
        progress: show a progress bar.
        **settings: how the policy is played.

    Returns:
        The rows of the episodes. Those that ``record`` does not keep are among them.
    """
    from headrace.recording import RecorderCfg

    target = Path(directory)
    if target.exists():
        raise ConfigError(f"{target}: already exists, and nothing is ever overwritten; choose another path")
    check_writable(target.parent)
    plan = EpisodePlan(episodes)
    spec = _spec(recipe, policy, settings, cpus_per_worker, record or RecorderCfg(), target.absolute())
    with _driver(spec, workers, block, cpus_per_worker, gpus_per_worker, ray_address) as driver:
        found = play_plan(plan, partial(driver.play, progress=progress), header=driver.header())
        driver.finish()
        return found


def _spec(
    recipe: EnvRecipe,
    policy: PolicySource,
    settings: EvaluationSettings,
    cores: int,
    record: RecorderCfg | None = None,
    directory: Path | None = None,
) -> WorkerSpec:
    check_count("cpus_per_worker", cores)
    check_remote(policy, settings)
    engine = settings.get("engine", "inline")
    if not isinstance(engine, str):
        raise ConfigError(f"engine: expected a name, which every worker makes one of, got {type(engine).__name__}")
    if settings.get("policy_id") is None:
        if remote_address(policy) is not None:
            raise ConfigError(
                f"policy_id (--policy-id): expected a text that names the policy of {policy}: workers must know that "
                "they play the same one"
            )
        if policy is not None and not isinstance(policy, (str, Path)):
            settings = {**settings, "policy_id": policy_hash(policy)}  # here, where its code is
    if not recipe.bridged and recipe.threads is None:
        recipe = recipe.replace(threads=cores)
    return WorkerSpec(
        recipe=recipe,
        policy=policy,
        settings=settings,
        threads=recipe.threads or cores,
        record=record,
        directory=directory or Path(),
    )


@contextmanager
def _driver(
    spec: WorkerSpec, workers: int, block: int | None, cpus: int, gpus: float, address: str | None
) -> Generator[Driver]:
    """Connect to Ray and start workers; at the end of the block they are gone, and so is a cluster that began here."""
    ray: Any = require_extra("ray", extra="ray", purpose="distributed")
    from headrace.distributed._driver import Driver

    check_count("workers", workers)
    if block is not None:
        check_count("block", block)
    packed: bytes = ray.cloudpickle.dumps(spec)
    own = not ray.is_initialized()
    if own:
        _connect(ray, address, workers * cpus, len(packed))
    try:
        sent = ray.put(packed)
        kind = ray.remote(Worker)
        options = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "max_task_retries": 0}
        driver = Driver(
            lambda number: kind.options(**options).remote(sent, sys.path, number),
            workers=workers,
            num_envs=spec.recipe.num_envs,
            block=block,
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
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent to anybody
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    if address is not None:
        ray.init(address=address, log_to_driver=False)
    else:
        store = max(_LEAST_STORE, 2 * size)
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=store, log_to_driver=False)
    if main:
        signal.signal(signal.SIGTERM, handler)  # Ray's own exits without what is finished
