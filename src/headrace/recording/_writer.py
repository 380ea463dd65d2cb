"""A thread that brings finished episodes to the disk, so that a step does not wait for it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from headrace.errors import HeadraceError, LifecycleError, StorageError
from headrace.recording._store import EpisodeStore
from headrace.recording.running import FinishedEpisode

_BATCH = 16
"""Episodes that share one sync of the directory and of the journal."""
_LINGER_S = 0.25
"""How long a first episode waits for others to share the syncs with, while no caller waits for it."""
_NICENESS = 5
"""By how much the thread that writes gives way to those that step, on Linux: a third of their share of a busy core."""
_LOOK_S = 0.2
"""How often a caller that waits looks whether the thread still makes progress."""


class BackgroundWriter:
    """Commits episodes in the order given. Owns the store's writing from now on.

    When ``put_all`` returns, at most ``capacity`` episodes are not on disk yet, and none of them has waited for longer
    than ``within_s``. Until then it blocks; nothing is dropped. If the disk takes nothing for ``stall_s`` seconds,
    a waiting call raises an error; the episodes stay queued. Whatever ends the thread is raised by
    every later call.
    """

    def __init__(self, store: EpisodeStore, *, capacity: int, within_s: float, stall_s: float) -> None:
        self._store = store
        self.capacity = capacity
        self._within_s = within_s
        self._stall_s = stall_s
        self._queue: deque[tuple[float, FinishedEpisode]] = deque()
        self._busy: list[tuple[float, FinishedEpisode]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._waiting = 0
        self._error: BaseException | None = None
        self._done = 0
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="headrace-recorder", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StorageError(
                f"{store.path}: the thread that writes episodes could not be started ({error}); end other threads, or "
                "allow more (ulimit -u)"
            ) from error

    def put_all(self, episodes: deque[FinishedEpisode]) -> None:
        """Take the episodes out of ``episodes`` one by one as there is room, then wait for those that are overdue."""
        if not episodes and not self._waits and not self._closing:
            self.check()
            return
        with self._changed:
            if self._closing:
                raise LifecycleError("the recorder is closed; make a new one with resume=True to record on")
            # all of them finished by now; those that wait for room here count their time from here, too
            finished = time.monotonic()
            while episodes:
                self._wait(lambda: self._waits < self.capacity)
                # an interrupt between the two lines queues an episode twice; the store writes it once
                self._queue.append((finished, episodes[0]))
                episodes.popleft()
                self._changed.notify_all()
            self._wait(lambda: time.monotonic() - self._oldest <= self._within_s)

    @property
    def _waits(self) -> int:
        return len(self._queue) + len(self._busy)

    @property
    def _oldest(self) -> float:
        first = self._busy or self._queue
        return first[0][0] if first else time.monotonic()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        error = self._error
        if isinstance(error, HeadraceError):
            raise error
        if error is not None:
            raise StorageError(
                f"{self._store.path}: writing episodes failed: {error!r}; {len(self._store.entries)} committed "
                "episodes are safe. Remove the cause, then go on with resume=True"
            ) from error

    def held_bytes(self) -> int:
        """Memory of the episodes that wait or are being written."""
        with self._changed:
            return sum(episode.held_bytes for _, episode in [*self._queue, *self._busy])

    def drain(self) -> None:
        """Return when everything queued so far is committed."""
        with self._changed:
            self._wait(lambda: not self._waits)

    def close(self, remaining: Iterable[FinishedEpisode] = ()) -> None:
        """Commit what is queued, then ``remaining``, and end the thread. Safe to call again, also after an interrupt.

        The capacity does not count here: no more steps come, and the episodes are in memory anyway.
        """
        try:
            with self._changed:
                if not self._closing and self._error is None:
                    self._queue.extend((time.monotonic(), episode) for episode in remaining)
                self._closing = True
                self._changed.notify_all()
                self._wait(lambda: not self._waits)
        finally:
            if self._error is not None or not self._waits:
                self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, with the lock held, for the thread to get somewhere; raises what ended it, or that it stands still."""
        self.check()
        if ready():
            return
        began = since = time.monotonic()
        seen = self._done
        self._waiting += 1
        self._changed.notify_all()
        try:
            while self._error is None and not ready():
                self._changed.wait(_LOOK_S)
                now = time.monotonic()
                if self._done != seen:
                    seen, since = self._done, now
                elif now - since > self._stall_s:
                    raise StorageError(
                        f"{self._store.path}: the disk took no episode for {self._stall_s:g} s; {self._waits} wait. "
                        "Check the disk; committed episodes are safe"
                    )
        finally:
            self._waiting -= 1
            self.waited_s += time.monotonic() - began
        self.check()

    def _run(self) -> None:
        if sys.platform == "linux":
            # of the calling thread alone, there: what steps goes first where cores are scarce, and what must wait
            # for the disk leaves a core to this thread
            os.nice(_NICENESS)
        try:
            while self._take_batch():
                written = [episode for _, episode in self._busy]
                self._store.commit(written)
                with self._changed:
                    self._done += len(self._busy)
                    self._busy = []
                    for episode in written:
                        episode.release()
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (whatever it is, the thread that steps must hear of it)
            with self._changed:
                self._error = error
                self._queue.clear()
                self._busy = []
                self._changed.notify_all()

    def _take_batch(self) -> bool:
        """Wait for episodes and take some; False when there are none and there will be none."""
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            # a batch is a part of the capacity, so that a blocked step waits for a few episodes, not for all
            most = min(_BATCH, max(1, self.capacity // 2))
            until = time.monotonic() + min(_LINGER_S, self._within_s / 2)
            while 0 < len(self._queue) < most and not (self._closing or self._waiting):
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            # in both for a moment: a reader without the lock finds no episode missing
            self._busy = list(islice(self._queue, most))
            for _ in self._busy:
                self._queue.popleft()
            return bool(self._busy)
