"""Batches drawn ahead on a thread, so that a learner finds the next one ready, on its device."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from headrace._device import current_stream, on_stream
from headrace.errors import ConfigError, LifecycleError

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch import Tensor

_POLL_S = 0.1


class Batches(ABC):
    """A source of batches: a buffer, one of its samplers, a mixture, or a view that relabels."""

    device: torch.device
    """Where batches go."""

    @abstractmethod
    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch."""

    @abstractmethod
    def update_priorities(self, index: Tensor, priority: Tensor) -> None:
        """Give what was drawn new priorities; both (B,)."""

    def prefetch(self, batch_size: int, ahead: int = 2) -> Prefetched:
        """Return an iterator over batches that a thread draws, ``ahead`` of them before they are asked for.

        On a CUDA device they are copied from pinned memory on a stream of their own; the host waits for no copy, and
        the stream that is current in ``next`` waits for that of its batch. A batch is of what was stored when it was
        drawn: transitions and priorities that were written since are not in it. Use it in a ``with`` block, or call
        ``close()``.
        """
        return Prefetched(self, batch_size, ahead)


class Prefetched:
    """Owns the thread that draws; see :meth:`Batches.prefetch`."""

    def __init__(self, source: Batches, batch_size: int, ahead: int) -> None:
        if ahead < 1:
            raise ConfigError(f"prefetch: expected ahead >= 1, got {ahead}")
        self._source, self._batch_size = source, batch_size
        self._ready: queue.Queue[tuple[TensorDict, Any] | BaseException] = queue.Queue(ahead)
        self._closed = threading.Event()
        self._stream = torch.cuda.Stream(source.device) if source.device.type == "cuda" else None
        self._thread = threading.Thread(target=self._draw, name="headrace-prefetch", daemon=True)
        self._thread.start()

    def _draw(self) -> None:
        while not self._closed.is_set():
            drawn: tuple[TensorDict, Any] | BaseException
            try:
                with on_stream(self._stream):
                    drawn = self._source.sample(self._batch_size), self._stream and self._stream.record_event()
            except BaseException as error:  # noqa: BLE001  # raised again by next
                drawn = error
            while not self._closed.is_set():
                try:
                    self._ready.put(drawn, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            if isinstance(drawn, BaseException):
                return

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TensorDict:
        """Return the next batch. Raises what drawing it raised, after which the iterator is closed."""
        if self._closed.is_set():
            raise LifecycleError("prefetch: the iterator is closed; call prefetch() again")
        drawn = self._ready.get()
        if isinstance(drawn, BaseException):
            self.close()
            raise drawn
        batch, event = drawn
        if event is not None:
            stream = current_stream(self._source.device)
            stream.wait_event(event)
            leaves = cast("Iterable[Any]", batch.values(include_nested=True, leaves_only=True))
            for leaf in leaves:
                leaf.record_stream(stream)
        return batch

    def close(self) -> None:
        """End the thread; batches that were drawn ahead are dropped. Safe to call again."""
        self._closed.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
