"""A worker: holds environments and a policy, and plays the blocks of episode ids that a driver hands to it."""

from __future__ import annotations

import os
import platform
import queue
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from headrace.envs.recipe import EnvRecipe
from headrace.evaluation._result import Counters, EpisodeResult
from headrace.evaluation.cfg import PlayCfg
from headrace.evaluation.player import open_player

if TYPE_CHECKING:
    from headrace.bridges.bridge_env import BridgeEnv
    from headrace.envs.batch_env import BatchEnv
    from headrace.evaluation._journal import Header
    from headrace.evaluation.player import Player
    from headrace.recording import EpisodeRecorder, RecorderCfg


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker is made of; is sent to it once, as a pickle."""

    recipe: EnvRecipe
    policy: Any
    play: PlayCfg
    threads: int
    """Of physics, kernels and torch."""
    record: RecorderCfg | None = None
    """Keep the episodes in this worker's own directory under ``directory``."""
    directory: Path = field(default_factory=Path)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What a worker says when it is ready."""

    header: Header
    host: str
    pid: int


class Worker:
    """One process of a distributed evaluation. Made anywhere; nothing happens before :meth:`open`."""

    def __init__(self, packed: bytes, path: Sequence[str], number: int) -> None:
        self._packed, self._path, self._number = packed, path, number
        self._stack = ExitStack()
        self._player: Player
        self._recorder: EpisodeRecorder | None = None
        self._begin_recording: Callable[[], None] | None = None

    def open(self) -> Opened:
        """Make environments and policy. What fails here fails in every worker, and is raised in the driver."""
        import torch
        from ray import cloudpickle

        from headrace._kernels.threads import set_kernel_threads

        # modules of the program that started this worker are found here, too, if the directories are there
        sys.path.extend(place for place in self._path if place not in sys.path)
        # a pickle of that program, through its own cluster
        spec = cast("WorkerSpec", cloudpickle.loads(self._packed))
        torch.set_num_threads(spec.threads)
        set_kernel_threads(spec.threads)
        env = self._stack.enter_context(closing(spec.recipe.make(autoreset="disabled", final_obs=False)))
        if spec.record is not None:
            self._begin_recording = partial(self._record, env, spec.record, spec.directory)
        self._player = self._stack.enter_context(open_player(env, spec.policy, spec.play, spec.recipe.seed))
        return Opened(header=self._player.header, host=platform.node(), pid=os.getpid())

    def _record(self, env: BatchEnv | BridgeEnv, cfg: RecorderCfg, directory: Path) -> None:
        """Begin this worker's dataset: with its first block, so that one that plays nothing leaves nothing."""
        from headrace.recording import DatasetInfo, EpisodeRecorder

        recorder = EpisodeRecorder(directory / f"worker-{self._number:04d}", cfg, DatasetInfo.of(env))
        self._recorder = self._stack.enter_context(recorder)
        env.attach(recorder)

    def play(self, ids: Sequence[int]) -> Generator[list[EpisodeResult] | Counters]:
        """Play a block: rows as they finish, then what it cost. Recorded episodes are on disk before their rows go."""
        if self._begin_recording is not None:
            self._begin_recording()
            self._begin_recording = None
        news: queue.SimpleQueue[list[EpisodeResult] | Counters | BaseException] = queue.SimpleQueue()

        def run() -> None:
            kept: list[EpisodeResult] = []
            try:
                if self._recorder is None:
                    news.put(self._player.play(ids, news.put).counters)
                    return
                counters = self._player.play(ids, kept.extend).counters
                self._recorder.flush()
                news.put(kept)
                news.put(counters)
            except BaseException as error:  # noqa: BLE001  (also Ctrl-C: the generator raises it)
                news.put(error)

        threading.Thread(target=run, name="episodes", daemon=True).start()
        while True:
            found = news.get()
            if isinstance(found, BaseException):
                raise found
            yield found
            if isinstance(found, Counters):
                return

    def close(self) -> None:
        """End everything in order."""
        self._stack.close()
