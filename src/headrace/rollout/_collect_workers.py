"""Collecting with several processes, which write their rows of one batch into shared memory."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.multiprocessing as processes
from torch import Tensor

from headrace._interrupts import ignore_interrupts
from headrace.envs import EnvRecipe
from headrace.errors import ConfigError, EnvError
from headrace.rollout._collect import Form, collect_steps, new_batch
from headrace.types import Obs

if TYPE_CHECKING:
    from tensordict import TensorDict

_PATIENCE = 10.0
"""Seconds for a worker to end by itself."""


class _Order(NamedTuple):
    """What a worker shall do next."""

    steps: int
    policy: Callable[[Obs], Tensor] | None
    """None: the one before."""
    form: Form
    reset: bool
    seed: int | None


class Collector:
    """Worker processes with environments of their own, which fill one batch together.

    Worker k has a share of the recipe's environments, in order, and runs the episodes that they would have in one
    process. So for a policy that treats rows alike and draws no random numbers of its own, the batch is the same bits
    for any number of workers; one that uses torch's global generator gets the same batch for the same recipe, seed and
    number of workers. Each worker steps with one thread.
    """

    def __init__(self, recipe: EnvRecipe, policy: Callable[[Obs], Tensor], *, workers: int) -> None:
        """Start the workers.

        Args:
            recipe: what to step; ``num_envs`` is that of all workers together.
            policy: observation groups (n, …) → actions (n, …); it is pickled, so a function of a module or an object.
            workers: how many processes.
        """
        if not 1 <= workers <= recipe.num_envs:
            raise ConfigError(f"workers: expected 1 to {recipe.num_envs}, one environment each at least, got {workers}")
        self.num_envs = recipe.num_envs
        shares = [len(part) for part in torch.arange(recipe.num_envs).tensor_split(workers)]
        context = processes.get_context("spawn")
        self._pipes: list[Connection] = []
        self._workers: list[Any] = []
        self._policy: Callable[[Obs], Tensor] | None = policy
        first = 0
        for share in shares:
            ours, theirs = context.Pipe()
            arguments = (theirs, recipe, first, share)
            worker = context.Process(target=_work, args=arguments, daemon=True, name=f"headrace-collect-{first}")
            worker.start()
            theirs.close()
            self._pipes.append(ours)
            self._workers.append(worker)
            first += share

    def collect(
        self,
        steps: int,
        *,
        policy: Callable[[Obs], Tensor] | None = None,
        reset: bool = False,
        seed: int | None = None,
        compact: bool = False,
        delta: torch.dtype | None = None,
    ) -> TensorDict:
        """The next steps of all environments, (N, steps), in shared memory; see :func:`headrace.rollout.collect`.

        The first call begins with a reset in any case. ``policy``: a new one, for example with new weights; it stays.
        """
        if not self._workers:
            raise ConfigError("Collector: it was closed; make a new one")
        sent, self._policy = policy or self._policy, None
        order = _Order(steps, sent, Form(compact, delta), reset, seed)
        try:
            for pipe in self._pipes:
                pipe.send(order)
            described = [self._receive(pipe) for pipe in self._pipes]
            batch = new_batch(described[0], self.num_envs, steps)
            batch.share_memory_()
            for pipe in self._pipes:
                pipe.send(batch)
            for pipe in self._pipes:
                self._receive(pipe)
        except BaseException:  # also Ctrl-C; the workers are in the middle of something
            self.close()
            raise
        return batch

    def _receive(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            raise EnvError("Collector: a worker process died; see its own message above") from None
        if isinstance(answer, str):
            raise EnvError(f"Collector: a worker failed:\n{answer}")
        return answer

    def close(self) -> None:
        """End the workers. Safe to call again."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that died has nothing to be told
                pipe.send(None)
            pipe.close()
        for worker in self._workers:
            worker.join(_PATIENCE)
            if worker.is_alive():
                worker.kill()
                worker.join()
        self._pipes, self._workers = [], []

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _work(pipe: Connection, recipe: EnvRecipe, first: int, count: int) -> None:
    """Make the environments and follow orders until there are none."""
    ignore_interrupts()
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed * 1_000_003 + first)
    try:
        settings = {"threads": 1} if recipe.executor == "inline" and not recipe.source.startswith("gym:") else {}
        env = recipe.make(num_envs=count, episode_stride=recipe.episode_stride or recipe.num_envs, **settings)
        policy: Callable[[Obs], Tensor] | None = None
        obs: Obs | None = None
        while True:
            order: _Order | None = pipe.recv()
            if order is None:
                return
            policy = order.policy or policy
            assert policy is not None
            if obs is None or order.seed is not None:
                ids = torch.arange(first, first + count)
                obs, _ = env.reset(seed=order.seed, options={"episode_ids": ids})
            elif order.reset:
                obs, _ = env.reset()
            obs = _steps(pipe, env, policy, order, obs, slice(first, first + count))
    except (EOFError, BrokenPipeError):
        return
    except Exception:  # noqa: BLE001  # whatever it was, the parent raises it with this text
        pipe.send(traceback.format_exc())


def _steps(pipe: Connection, env: Any, policy: Any, order: _Order, obs: Obs, rows: slice) -> Obs:
    """Write the rows of this worker into the batch that the parent makes when it knows the first step."""
    batch: TensorDict | None = None
    for t, (entry, after) in enumerate(collect_steps(env, policy, order.steps, obs, order.form)):
        if batch is None:
            pipe.send(entry[:1])
            received: TensorDict = pipe.recv()
            batch = received
        batch[rows, t] = entry
        obs = after
    pipe.send(None)
    return obs
