"""Collecting a batch of steps as a ``TensorDict``, with or without next observations, in one process or several."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.multiprocessing as processes
from torch import Tensor

from headrace._interrupts import begin_child
from headrace.envs.batch_env import BatchEnv
from headrace.envs.recipe import EnvRecipe
from headrace.errors import ConfigError, EnvError
from headrace.replay import ReplayBuffer, SharedReplay
from headrace.replay.forms import difference
from headrace.types import Obs, Step

if TYPE_CHECKING:
    from tensordict import TensorDict


Entry: TypeAlias = dict[tuple[str, ...], Tensor]
"""Tensors by path, environments first. Not a TensorDict: workers would spend half of their start importing it."""


class NextForm(NamedTuple):
    """What a batch has of next observations: all, or differences, or nothing."""

    compact: bool = False
    delta: torch.dtype | None = None


def collect(
    env: BatchEnv | EnvRecipe,
    policy: Callable[[Obs], Tensor],
    steps: int,
    *,
    reset: bool = True,
    seed: int | None = None,
    compact: bool = False,
    delta: torch.dtype | None = None,
    workers: int | None = None,
) -> TensorDict:
    """Run a policy for some steps and return what happened, environments first: batch (N, steps).

    Keys: ``("observation", group)``, ``action``, ``active``, ``step_count``, ``("collector", "traj_ids")`` (the
    environments' episode ids), and under ``next``: ``("observation", group)``, ``reward``, ``done``, ``terminated``,
    ``truncated``. Next observations are the true last ones where an episode ended. Rewards, flags and ``step_count``
    are (N, steps, 1). :meth:`headrace.replay.ReplayBuffer.extend` takes the batch as it is, in every form.

    Args:
        env: stepped in its present state; environments that are suspended stay so, and ``active`` is False for them.
            With ``workers``, a recipe.
        policy: observation groups (N, …) → actions (N, …).
        steps: how many.
        reset: begin with ``env.reset(seed=seed)``; False goes on from where the environments are.
        seed: for the reset.
        compact: drop every ``("next", "observation")`` here, at the producer: half the memory. They can be put back
            where the following entry has them with :func:`headrace.replay.forms.reconstruct_next`, and are lost at
            ends. A :class:`headrace.replay.ReplayBuffer` is smaller still and loses nothing.
        delta: keep ``("next", "delta")`` of this dtype instead, as :func:`headrace.replay.forms.to_delta` makes it.
        workers: collect in so many processes; see :class:`Collector`, which keeps them for the next batch.
    """
    form = check_form(steps, compact, delta)
    if isinstance(env, EnvRecipe):
        with Collector(env, policy, workers=workers or 1) as collector:
            return collector.collect(steps, seed=seed, compact=compact, delta=delta)
    if workers is not None:
        raise ConfigError("collect: workers make environments of their own; pass a recipe, such as env.recipe")
    obs = env.reset(seed=seed)[0] if reset else env.observe()
    return as_tensordict(collect_steps(env, policy, steps, obs, form)[0], env.num_envs, steps)


def check_form(steps: int, compact: bool, delta: torch.dtype | None) -> NextForm:
    """Return the form of a batch, refused where it cannot be collected."""
    if steps < 1:
        raise ConfigError(f"collect: expected at least 1 step, got {steps}")
    if compact and delta is not None:
        raise ConfigError("collect: expected compact or delta, got both; choose one")
    return NextForm(compact, delta)


def as_tensordict(batch: Entry, num_envs: int, steps: int) -> TensorDict:
    """Return the batch with its keys nested, over the same memory."""
    from tensordict import TensorDict

    nested = TensorDict({}, [num_envs, steps])
    for path, value in batch.items():
        nested[path] = value
    return nested


def collect_steps(
    env: BatchEnv, policy: Callable[[Obs], Tensor], steps: int, obs: Obs, form: NextForm
) -> tuple[Entry, Obs]:
    """Return the batch (N, steps, …) of some steps, and the observation to go on with."""
    batch: Entry = {}
    for t in range(steps):
        active, ids, counts = env.active, env.episode_ids, env.episode_steps
        action = policy(obs)
        step = env.step(action)
        entry: Entry = {
            **{("observation", name): value for name, value in obs.items()},
            ("action",): action,
            ("active",): active,
            ("step_count",): counts[:, None],
            ("collector", "traj_ids"): ids,
            ("next", "reward"): step.reward[:, None],
            ("next", "done"): (step.terminated | step.truncated)[:, None],
            ("next", "terminated"): step.terminated[:, None],
            ("next", "truncated"): step.truncated[:, None],
        }
        if not form.compact:
            for name, value in _true_next(step.obs, step.info.get("final_obs"), step.info.get("_final_obs")).items():
                if form.delta is None:
                    entry["next", "observation", name] = value
                else:
                    entry["next", "delta", name] = difference(obs[name], value, form.delta, name)
        if not batch:
            batch = {key: value.new_zeros((value.shape[0], steps, *value.shape[1:])) for key, value in entry.items()}
        for key, value in entry.items():
            batch[key][:, t] = value
        obs = step.obs
    return batch, obs


def _true_next(obs: Obs, final: Obs | None, ended: Tensor | None) -> Obs:
    """Return the observation that follows each action: the last of its episode where that ended."""
    if final is None or ended is None:
        return obs
    return {
        name: torch.where(ended.reshape(-1, *([1] * (value.dim() - 1))), final[name], value)
        for name, value in obs.items()
    }


_PATIENCE = 10.0
"""Seconds for a worker to end by itself."""


class _Order(NamedTuple):
    """What a worker shall do next."""

    steps: int
    policy: Callable[[Obs], Tensor] | None
    """None: the one before."""
    form: NextForm
    reset: bool
    seed: int | None
    store: Path | None = None
    """Where to put the steps; None: they are sent."""


class Collector:
    """Worker processes with environments of their own, each of which collects its rows of a batch.

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
        _check_pickles(policy)
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
        """Collect the next steps of all environments, (N, steps); see :func:`collect`.

        The first call begins with a reset in any case. ``policy``: a new one, for example with new weights; it stays.
        """
        order = _Order(steps, policy, check_form(steps, compact, delta), reset, seed)
        parts: list[Entry] = self._ask([order] * len(self._pipes))
        batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return as_tensordict(batch, self.num_envs, steps)

    def fill(
        self,
        shared: SharedReplay,
        steps: int,
        *,
        policy: Callable[[Obs], Tensor] | None = None,
        reset: bool = False,
        seed: int | None = None,
    ) -> None:
        """Step all environments, and let each worker write to its own store of ``shared``, which can be read meanwhile.

        Made for as many writers as there are workers, and as many environments; other arguments as in
        :meth:`collect`. The stores belong to the workers until :meth:`close`.
        """
        if len(shared.paths) != len(self._pipes) or shared.num_envs != self.num_envs:
            raise ConfigError(
                f"fill: expected stores for {len(self._pipes)} writers and {self.num_envs} environments, got "
                f"{len(shared.paths)} and {shared.num_envs}; make them with SharedReplay.create"
            )
        order = _Order(steps, policy, check_form(steps, False, None), reset, seed)
        self._ask([order._replace(store=path) for path in shared.paths])

    def _ask(self, orders: list[_Order]) -> list[Any]:
        """Send each worker its order, and return what they answer."""
        if not self._workers:
            raise ConfigError("Collector: it was closed; make a new one")
        sent = orders[0].policy or self._policy
        if orders[0].policy is not None:
            _check_pickles(orders[0].policy)
        try:
            for pipe, order in zip(self._pipes, orders, strict=True):
                with contextlib.suppress(BrokenPipeError):  # it died; what it said before that is read below
                    pipe.send(order._replace(policy=sent))
            self._policy = None
            return [self._receive(pipe) for pipe in self._pipes]
        except BaseException:  # also Ctrl-C; the workers are in the middle of something
            self.close()
            raise

    def _receive(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionResetError):
            raise EnvError("Collector: a worker process died; see its own message above") from None
        if isinstance(answer, str):
            raise EnvError(f"Collector: a worker failed:\n{answer}")
        return answer

    def close(self) -> None:
        """End the workers. Safe to call again."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # one that died needs no order
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


def _check_pickles(policy: Callable[[Obs], Tensor]) -> None:
    try:
        ForkingPickler.dumps(policy)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"Collector: the policy goes to other processes, and {policy!r} cannot be pickled ({error}); expected a "
            "function of a module or an object of a class of one, not a lambda or a local function"
        ) from error


def _work(pipe: Connection, recipe: EnvRecipe, first: int, count: int) -> None:
    """Make the environments and follow orders until there are none."""
    begin_child()
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed * 1_000_003 + first)
    env: Any = None
    try:
        # the worker is what steps its share: no threads and no processes besides
        settings = {"executor": "inline", "workers": None} if recipe.bridged else {"threads": 1}
        env = recipe.make(num_envs=count, episode_stride=recipe.episode_stride or recipe.num_envs, **settings)
        _follow(pipe, env, first, count)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the collector is gone
    except Exception:  # noqa: BLE001  # whatever it was, the parent raises it with this text
        with contextlib.suppress(BrokenPipeError):
            pipe.send(traceback.format_exc())
    if env is not None:
        env.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # taking down an interpreter that has torch in it costs about a second, and close() waits for it
    os._exit(0)


def _follow(pipe: Connection, env: Any, first: int, count: int) -> None:
    policy: Callable[[Obs], Tensor] | None = None
    obs: Obs | None = None
    store: ReplayBuffer | None = None
    place: Path | None = None
    while True:
        order: _Order | None = pipe.recv()
        if store is not None and (order is None or order.store != place):
            store.close()
            store = None
        if order is None:
            return
        if order.store is not None and store is None:
            store, place = ReplayBuffer.open(order.store), order.store
        policy = order.policy or policy
        assert policy is not None
        if obs is None or order.seed is not None:
            ids = torch.arange(first, first + count)
            obs, _ = env.reset(seed=order.seed, options={"episode_ids": ids})
        elif order.reset:
            obs, _ = env.reset()
        assert obs is not None
        if store is not None:
            obs = _store_steps(store, env, policy, order.steps, obs)
            pipe.send(None)
        else:
            batch, obs = collect_steps(env, policy, order.steps, obs, order.form)
            pipe.send(batch)  # in shared memory: torch sends tensors so


def _store_steps(store: ReplayBuffer, env: Any, policy: Callable[[Obs], Tensor], steps: int, obs: Obs) -> Obs:
    """Write steps to a store; returns the observation to go on with."""
    for _ in range(steps):
        active, action = env.active, policy(obs)
        step: Step = env.step(action)
        store.extend(obs, action, step, active)
        obs = step.obs
    return obs
