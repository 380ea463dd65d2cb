"""A file that grows at its end: what is appended is in it at once, and on disk soon, by a thread that syncs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

from headrace import files
from headrace.errors import StorageError
from headrace.files import storage_error, write_all

WITHIN_S = 1.0
"""When an append returns, everything that was appended this long before is on disk."""
STALL_S = 60.0
"""A disk that takes nothing for this long is given up."""
_LINGER_S = WITHIN_S / 2
_HINT = "make room and resume: the rows before are safe"


class SyncedFile:
    """Appends to a file at once and syncs it in a thread, one sync for all that has come since the last.

    When ``append`` returns, its content is in the file and outlives the process, however that ends. It outlives the
    machine once it is synced: an append waits while anything is older than ``WITHIN_S`` and is not, up to ``STALL_S``
    seconds, after which it, and ``close``, raise StorageError. Where the disk fails, the file is cut to what is on
    disk, and the next ``append`` or ``close`` raises StorageError.

    Args:
        path: exists, and everything in it is on disk; no one else writes to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._size = self._synced = self._taken = os.fstat(self._handle).st_size
        """Bytes in the file, on disk, and on disk after the sync under way."""
        self._waits_since: float | None = None
        """When the oldest content that no sync has begun for was appended."""
        self._syncs_since: float | None = None
        """The same of the content that is being synced."""
        self._changed = threading.Condition()
        self._closing = False
        self._error: BaseException | None = None
        self._told = False
        self._gave_up = False
        self._thread: threading.Thread | None = None

    def append(self, content: bytes) -> None:
        """Write at the end of the file; after a failure the file is as before."""
        with self._changed:
            self._check()
            try:
                write_all(self._handle, content)
            except OSError as error:
                os.ftruncate(self._handle, self._size)
                self._told = True
                raise storage_error(self._path, error, _HINT) from error
            except BaseException:  # also Ctrl-C; raised again
                os.ftruncate(self._handle, self._size)
                raise
            self._size += len(content)
            if self._waits_since is None:
                self._waits_since = time.monotonic()
            if self._thread is None:
                # not before there is something to sync: most evaluations that are resumed have nothing to add
                self._thread = threading.Thread(target=self._run, name="headrace-journal", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while self._error is None and (age := time.monotonic() - self._oldest) > WITHIN_S:
                if age > WITHIN_S + STALL_S:
                    raise self._stalled()
                self._changed.wait(WITHIN_S + STALL_S - age + 0.001)
            self._check()

    @property
    def _oldest(self) -> float:
        found = [since for since in (self._syncs_since, self._waits_since) if since is not None]
        return min(found, default=time.monotonic())

    def close(self) -> None:
        """Wait until everything is on disk; raises what no append has raised yet. Safe to call again."""
        with self._changed:
            if self._handle < 0:
                return
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(0 if self._gave_up else STALL_S)
        handle, self._handle = self._handle, -1
        if self._thread is not None and self._thread.is_alive():
            # the thread still syncs the handle, which therefore stays open
            if not self._gave_up:
                raise self._stalled()
            return
        os.close(handle)
        if not self._told:
            self._check()

    def _stalled(self) -> StorageError:
        self._gave_up = True
        return StorageError(
            f"{self._path}: the disk took nothing for {STALL_S:g} s; what was written since may not be on disk. "
            "Resume when the disk answers"
        )

    def _check(self) -> None:
        error = self._error
        if error is None:
            return
        self._told = True
        if isinstance(error, OSError):
            raise storage_error(self._path, error, _HINT) from error
        raise StorageError(f"{self._path}: syncing failed: {error!r}; {_HINT}") from error

    def _run(self) -> None:
        while self._take():
            try:
                files.disk.sync(self._handle)
            except BaseException as error:  # noqa: BLE001  (whatever it is, whoever appends must hear of it)
                self._fail(error)
                return
            with self._changed:
                self._syncs_since = None
                self._synced = self._taken
                self._changed.notify_all()

    def _take(self) -> bool:
        """Wait for content and for more to come with it; False when there is none and there will be none."""
        with self._changed:
            while self._waits_since is None and not self._closing:
                self._changed.wait()
            if self._waits_since is None:
                return False
            while not self._closing and (left := self._waits_since + _LINGER_S - time.monotonic()) > 0:
                self._changed.wait(left)
            self._syncs_since, self._waits_since = self._waits_since, None
            self._taken = self._size
            return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            # where this fails, too, rows of which nobody knows whether they are on disk stay in the file
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._synced)
            self._changed.notify_all()
