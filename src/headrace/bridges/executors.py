"""Who steps the single environments: this thread, a pool of threads, or worker processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from headrace._interrupts import delay_signals
from headrace.bridges._exchange import Exchange
from headrace.bridges._group import EnvGroup

if TYPE_CHECKING:  # brings torch, which a worker process has no need of
    from headrace.bridges.bridge_env import TensorExchange

_T = TypeVar("_T")
Fidelity: TypeAlias = Literal["native", "restore"]


class Backend:
    """N environments behind an exchange, any of which can be reset and stepped.

    After ``reset`` and ``step`` the rows that were named hold the results: the true last observation where an episode
    ended, never the first of the next. Other rows are not written.
    """

    exchange: Exchange | TensorExchange
    """What crosses between the environments and the bridge."""
    fidelity: Fidelity = "native"
    """How environments that do not act are kept."""
    reseeds: bool = True
    """Whether an episode is a function of the seed that its reset gets."""
    no_identity: str = ""
    """Why it is not, as far as the simulator says."""
    late: frozenset[str] = frozenset()
    """Keys of observations that only :meth:`observe` writes."""
    overlaps_resets: bool = False
    """Whether :meth:`begin_reset` works: environments are reset in the background, while others are stepped."""

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Have environments (ascending) do something; one entry of ``more``, and of what comes back, for each, if any.

        ``reset`` (more: seeds) starts episodes and gives instructions, "" where there is none; ``step`` takes the
        actions on the exchange; ``save`` gives states, or raises UnsupportedError where they cannot be had; ``restore``
        (more: states) puts back; ``render`` gives what the environments' own gives.
        """
        raise NotImplementedError(f"{type(self).__name__} must override call(name, env_ids, more)")

    def reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> list[str]:
        """Start an episode in each environment from its seed; its instruction."""
        return self.call("reset", env_ids, seeds)

    def step(self, env_ids: Sequence[int]) -> None:
        """Step each environment with its action on the exchange."""
        self.call("step", env_ids, ())

    def observe(self, env_ids: Sequence[int]) -> None:
        """Draw the observations :attr:`late` of some environments, as of their last step or reset."""
        self.call("observe", env_ids, ())

    def save(self) -> list[object]:
        """Return the state of every environment."""
        return self.call("save", range(self.exchange.layout.num_envs), ())

    def restore(self, states: Sequence[object]) -> None:
        """Put every environment back."""
        self.call("restore", range(len(states)), states)

    def render(self, env_ids: Sequence[int]) -> list[object]:
        """Return what the ``render`` of each of some environments gives."""
        return self.call("render", env_ids, ())

    def begin_reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin to start an episode in each environment; it must not be stepped before it is taken."""
        raise NotImplementedError(f"{type(self).__name__} cannot reset in the background; call reset(env_ids, seeds)")

    def take_resets(self, timeout: float | None) -> dict[int, str]:
        """Instructions of the environments that are ready, by id; raises what a reset raised.

        Waits until one is, for so many seconds (None: as long as it takes); empty where none is under way.
        """
        del timeout
        return {}

    def resetting(self) -> list[int]:
        """Return environments that cannot be stepped without waiting for a reset: their own, or one of their worker."""
        return []

    def drop_resets(self) -> None:
        """Wait for the resets that are under way, whatever they give."""

    def close(self) -> None:
        """Release the environments and the threads or processes that stepped them."""
        raise NotImplementedError(f"{type(self).__name__} must override close()")


class InlineBackend(Backend):
    """All environments in this process, one after the other."""

    def __init__(self, group: EnvGroup, exchange: Exchange) -> None:
        self.exchange = exchange
        self._group = group
        self.call, self.close = group.call, group.close


class ThreadBackend(Backend):
    """All environments in this process, stepped by a few threads: for those that release Python's lock, as MuJoCo."""

    overlaps_resets = True

    def __init__(self, group: EnvGroup, exchange: Exchange, workers: int) -> None:
        self.exchange = exchange
        self._group = group
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="headrace-bridge")
        # of their own: a reset that takes seconds must not keep a step waiting for a thread
        self._reset_pool = ThreadPoolExecutor(workers, thread_name_prefix="headrace-reset")
        self._resets: dict[Future[list[str]], int] = {}

    def call(self, name: str, env_ids: Sequence[int], more: Sequence[Any]) -> list[Any]:
        """Reset and step on the threads, the rest here."""
        if name not in ("reset", "step"):
            return self._group.call(name, env_ids, more)
        parts = split(len(env_ids), self._workers)
        with delay_signals():  # an exception between submitting and waiting would leave a thread that still steps
            done = _finish([self._pool.submit(self._group.call, name, env_ids[part], more[part]) for part in parts])
        return [text for part in done for text in part]

    def begin_reset(self, env_ids: Sequence[int], seeds: Sequence[int]) -> None:
        """Begin to start an episode in each environment, each by itself."""
        with delay_signals():  # a reset that is not on the list would not be waited for
            for env_id, seed in zip(env_ids, seeds, strict=True):
                self._resets[self._reset_pool.submit(self._group.call, "reset", [env_id], [seed])] = env_id

    def take_resets(self, timeout: float | None) -> dict[int, str]:
        """Return the environments that are ready."""
        done, _ = wait(self._resets, timeout, return_when=FIRST_COMPLETED)
        return {self._resets.pop(future): future.result()[0] for future in done}

    def resetting(self) -> list[int]:
        """Return the environments whose reset is under way."""
        return list(self._resets.values())

    def drop_resets(self) -> None:
        """Wait for the resets that are under way."""
        wait(self._resets)
        self._resets.clear()

    def close(self) -> None:
        """Stop the threads and close the environments."""
        self._reset_pool.shutdown(cancel_futures=True)
        self._pool.shutdown()
        self._group.close()


def split(count: int, workers: int) -> list[slice]:
    """Contiguous parts of nearly equal size, none of them empty."""
    bounds = np.linspace(0, count, min(count, workers) + 1).astype(int).tolist()
    return [slice(low, high) for low, high in itertools.pairwise(bounds)]


def available_cores() -> int:
    """Return the cores this process may run on."""
    return len(os.sched_getaffinity(0))


def _finish(futures: Sequence[Future[_T]]) -> list[_T]:
    wait(futures)  # for all before raising, so that no thread still steps when the caller gets an error
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
