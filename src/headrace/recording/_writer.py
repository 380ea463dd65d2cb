"""A thread that brings finished episodes to the disk, so that a step does not wait for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable

from headrace.errors import HeadraceError, LifecycleError, StorageError
from headrace.recording._pages import FinishedEpisode
from headrace.recording._store import EpisodeStore

_BATCH = 8
"""Episodes that share one sync of the folder and of the journal."""
_LINGER_S = 0.1
"""How long a first episode waits for others to share the syncs with, while nobody waits for it."""


class BackgroundWriter:
    """Commits episodes in the order given. Owns the store's writing from now on.

    ``put`` returns at once while fewer than ``capacity`` episodes wait or are being written; then it blocks until one
    is done. Nothing is dropped. If the disk takes nothing for ``stall_s`` seconds, ``put`` raises instead of waiting
    on; the episodes stay queued.
    """

    def __init__(self, store: EpisodeStore, *, capacity: int, stall_s: float) -> None:
        self._store = store
        self.capacity = capacity
        self._stall_s = stall_s
        self._queue: deque[FinishedEpisode] = deque()
        self._busy: list[FinishedEpisode] = []
        self._changed = threading.Condition()
        self._closing = False
        self._waiting = 0
        self._error: Exception | None = None
        self._done = 0
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="headrace-recorder", daemon=True)
        self._thread.start()

    @property
    def _awaited(self) -> bool:
        return self._closing or self._waiting > 0

    def put(self, episode: FinishedEpisode) -> None:
        """Queue an episode; blocks while the queue is full."""
        with self._changed:
            if self._closing:
                raise LifecycleError("recorder: closed; make a new one with resume=True to record on")
            if len(self._queue) + len(self._busy) >= self.capacity:
                self._wait_for_room()
            self._raise_error()
            self._queue.append(episode)
            self._changed.notify_all()

    def _wait_for_room(self) -> None:
        began = since = time.monotonic()
        seen = self._done
        self._waiting += 1
        self._changed.notify_all()
        try:
            while len(self._queue) + len(self._busy) >= self.capacity and self._error is None:
                self._changed.wait(0.2)
                now = time.monotonic()
                if self._done != seen:
                    seen, since = self._done, now
                elif now - since > self._stall_s:
                    raise StorageError(
                        f"{self._store.path}: the disk took no episode for {self._stall_s:g} s; "
                        f"{len(self._queue)} wait. Check the disk; committed episodes are safe"
                    )
        finally:
            self._waiting -= 1
            self.waited_s += time.monotonic() - began

    def check(self) -> None:
        """Raise what the thread ran into, if anything."""
        self._raise_error()

    def held_bytes(self) -> int:
        """Memory of the episodes that wait or are being written."""
        with self._changed:
            return sum(episode.held_bytes for episode in [*self._queue, *self._busy])

    def drain(self) -> None:
        """Return when everything queued so far is committed."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                while (self._queue or self._busy) and self._error is None:
                    self._changed.wait()
            finally:
                self._waiting -= 1
            self._raise_error()

    def close(self, remaining: Iterable[FinishedEpisode] = ()) -> None:
        """Commit what is queued, then ``remaining``, and end the thread. Safe to call again, also after an interrupt.

        The capacity does not count here: nobody steps any more, and the episodes are in memory anyway.
        """
        with self._changed:
            if not self._closing and self._error is None:
                self._queue.extend(remaining)
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                # a batch is a part of the capacity, so that a blocked step waits for a few episodes, not for all
                most = min(_BATCH, max(1, self.capacity // 2))
                until = time.monotonic() + _LINGER_S
                while len(self._queue) < most and not self._awaited and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
                count = min(len(self._queue), most)
                self._busy = [self._queue.popleft() for _ in range(count)]
            try:
                self._store.commit(self._busy)
            except (HeadraceError, OSError) as error:
                self._fail(error)
                return
            with self._changed:
                self._done += len(self._busy)
                self._busy = []
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._error = error
            self._queue.clear()
            self._busy = []
            self._changed.notify_all()
