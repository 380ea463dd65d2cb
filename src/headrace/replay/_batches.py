"""Sources of batches: drawn ahead on a thread, and mixed of several stores in given shares."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch
from torch import Tensor

from headrace._device import current_stream, on_stream
from headrace.errors import ConfigError, DataError, LifecycleError, ShapeError

if TYPE_CHECKING:
    from tensordict import TensorDict

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


_WEIGHT = "_weight"


class Mixture(Batches):
    """Draws each batch from several buffers or samplers: 50 % offline and 50 % online, as in RLPD, or other shares.

    A batch has the keys of its parts and ``origin``, the part of each row, int64; rows are ordered by part.
    Numbers of rows are exact over time: what a batch cannot split evenly is owed to the next. Rows of parts without
    priorities have ``_weight`` 1 where another part has priorities.

    Observations and next observations are copied next to each other, so they do not share memory as those of a single
    buffer do.
    """

    def __init__(
        self,
        parts: Sequence[Batches],
        weights: Sequence[float] | None = None,
        *,
        anneal: tuple[Sequence[float], int] | None = None,
    ) -> None:
        """Choose the parts.

        Args:
            parts: buffers, samplers of buffers, or relabeled views; their batches must have the same keys.
            weights: share of each part in a batch, in any unit; equal if None. A part of weight 0 is not drawn from,
                and may be empty.
            anneal: weights to reach, and the number of draws in which they are reached, linearly.
        """
        if not parts:
            raise ConfigError("Mixture: expected at least one part, got none")
        self.parts = tuple(parts)
        self.device = self.parts[0].device
        if any(part.device != self.device for part in self.parts):
            raise ConfigError(f"Mixture: expected parts with one device, got {[str(p.device) for p in self.parts]}")
        self._begin = self._shares(weights if weights is not None else [1.0] * len(self.parts))
        self._end, self._over = (self._begin, 1) if anneal is None else (self._shares(anneal[0]), anneal[1])
        if self._over < 1:
            raise ConfigError(f"anneal: expected at least one draw, got {self._over}")
        self._draws = 0
        self._owed = np.zeros(len(self.parts))

    def _shares(self, weights: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        shares = np.asarray(weights, np.float64)
        if shares.shape != (len(self.parts),) or not np.isfinite(shares).all() or shares.min() < 0 or not shares.any():
            raise ConfigError(
                f"weights: expected {len(self.parts)} finite numbers, none negative, not all 0, got {list(weights)}"
            )
        return shares / shares.sum()

    @property
    def weights(self) -> list[float]:
        """Share of each part in the next batch; their sum is 1."""
        done = min(self._draws / self._over, 1.0)
        return ((1 - done) * self._begin + done * self._end).tolist()

    def sample(self, batch_size: int) -> TensorDict:
        """Draw a batch of ``batch_size`` rows; see the class."""
        if batch_size < 1:
            raise ShapeError(f"batch_size: expected at least 1, got {batch_size}")
        weights = np.array(self.weights)
        owed = self._owed + weights * batch_size
        counts = np.where(weights > 0, np.floor(owed), 0).clip(0).astype(np.int64)
        # rows that are left over, or drawn too many because more was owed than there is, by what is owed
        while (short := batch_size - int(counts.sum())) != 0:
            rest = np.where(weights > 0, owed - counts, -np.inf)
            counts[rest.argmax() if short > 0 else np.where(counts > 0, rest, np.inf).argmin()] += np.sign(short)
        drawn: dict[int, TensorDict] = {}
        for number in counts.nonzero()[0].tolist():
            try:
                drawn[number] = self.parts[number].sample(int(counts[number]))
            except LifecycleError as error:
                raise LifecycleError(f"part {number} of the mixture: {error}") from error
        batch = _join(drawn)
        self._draws += 1
        self._owed = owed - counts
        return batch

    def update_priorities(self, index: Tensor, priority: Tensor, origin: Tensor | None = None) -> None:
        """Give what was drawn new priorities; ``index`` and ``origin`` are those of a batch, (B,) each, or (B, T).

        Parts without priorities are passed over.
        """
        if origin is None or origin.shape[:1] != index.shape[:1]:
            raise ShapeError('update_priorities: pass batch["origin"] as well: indices name transitions of a part')
        for number, part in enumerate(self.parts):
            rows = (origin if origin.dim() == 1 else origin[:, 0]) == number  # a run is of one part
            if rows.any() and has_priorities(part):
                part.update_priorities(index[rows], priority[rows])

    def state_dict(self) -> dict[str, Any]:
        """Return how far the schedule is; the parts are saved by their own ``save``."""
        return {"draws": self._draws, "owed": self._owed.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict` of a mixture of as many parts."""
        draws, owed = int(state["draws"]), np.asarray(state["owed"], np.float64)
        if draws < 0 or owed.shape != self._owed.shape:
            raise DataError(f"Mixture: expected the state of {len(self.parts)} parts, got {state}")
        self._draws, self._owed = draws, owed


def has_priorities(part: Batches) -> bool:
    """Return whether a part takes new priorities."""
    return bool(getattr(part, "prioritized", True))


def _join(drawn: dict[int, TensorDict]) -> TensorDict:
    """Return the rows of all parts, with the part of each."""
    numbers, batches = list(drawn), list(drawn.values())
    if any(_WEIGHT in batch for batch in batches):
        for batch in batches:
            if _WEIGHT not in batch:
                batch[_WEIGHT] = torch.ones(batch.batch_size, device=batch.device)
    first = set(batches[0].keys(include_nested=True))
    for number, batch in drawn.items():
        batch["origin"] = torch.full(batch.batch_size, number, device=batch.device)
        different = first ^ (set(batch.keys(include_nested=True)) - {"origin"})
        if different or batch.batch_size[1:] != batches[0].batch_size[1:]:
            raise ShapeError(
                f"Mixture: expected batches with the same keys and runs, but parts {numbers[0]} and {number} differ in "
                f"{sorted(map(str, different)) or [tuple(batches[0].batch_size), tuple(batch.batch_size)]}"
            )
    return batches[0] if len(batches) == 1 else torch.cat(batches)  # pyright: ignore[reportReturnType, reportArgumentType, reportCallIssue]  # tensordict overloads it
