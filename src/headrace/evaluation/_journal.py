"""The journal of an evaluation: a header, then one JSON line per finished episode, in the file before the next step.

Between them stand lines for what was planned later, and for other circumstances that rows were played under.

An episode is a function of (task, seed, id, policy), so an evaluation that was cut off goes on where it ended, and
parts of a plan that were played elsewhere belong to the same table, if what decides the rows, the *identity*, is the
same.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.nn import functional as F

from headrace import files
from headrace.errors import ConfigError, DataError, StorageError, installed_version
from headrace.evaluation._result import EpisodeResult
from headrace.files import (
    LINE_LIMIT,
    append,
    lock_file,
    open_untrusted,
    read_lines,
    read_record,
    storage_error,
    sync,
    truncate,
    write_all,
)
from headrace.policies.step_policy import current_id

FORMAT = "headrace-evaluation-1"
_MOST = 10**8
"""Episodes of one range; a file with more is damaged."""
WITHIN_S = 1.0
"""When an append returns, everything that was appended this long before is on disk."""
STALL_S = 60.0
"""A disk that takes nothing for this long is given up."""
_LINGER_S = 0.85 * WITHIN_S
"""A sync that comes later holds more rows; a row that is written during one waits for it."""
_HINT = "make room and resume: the rows before are safe"
_COLUMNS = tuple(entry.name for entry in fields(EpisodeResult))


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a journal is of."""

    identity: dict[str, Any]
    """What decides the rows; must be equal to resume or merge."""
    circumstances: dict[str, Any]
    """What should not change a row: number of environments, versions, processor. A difference is warned about."""


_SAME: dict[str, Callable[[object], object]] = {
    "policy": current_id,
    # 0.2 names no places; where rows may stand at any, those of 0.2 do, too
    "places": lambda places: None if places == "free" else places,
}
"""Entries of an identity that may be written in several ways → what is compared."""


class Journal:
    """Appends rows to a file, whose only writer it is until it is closed.

    Rows are in the file when ``add`` returns, and outlive the process; they are on disk within a second, or the
    next ``add`` waits, and later only where no row follows and a sync is suddenly slow.
    """

    def __init__(self, path: Path, header: Header, plan: Iterable[int], *, resume: bool) -> None:
        """Begin a journal, or with ``resume`` go on with one of the same identity; an absent one begins.

        What is planned beyond the plans before is written, too, so that a reader of the file knows what is missing.

        A last line that was cut off is removed.
        """
        self.path = path
        self.rows: list[EpisodeResult] = []
        """Of the file, when it was opened."""
        if path.exists() and not resume:
            raise ConfigError(f"journal: {path} already exists; pass resume=True (--resume) to go on with it")
        self._lock = lock_file(path)
        try:
            self._begin(header, plan)
            self._file = SyncedFile(path)
        except BaseException:  # also Ctrl-C; raised again
            self._lock.close()
            raise

    def _begin(self, header: Header, plan: Iterable[int]) -> None:
        path = self.path
        if not _torn_header(path):
            before = read_journal(path)
            self.rows = before.rows
            check_same(header, before.header, str(path))
            if before.size != path.stat().st_size:
                truncate(path, before.size)
            lines: list[dict[str, Any]] = []
            if more := set(plan) - before.plan:
                lines.append({"plan": join_ranges(more)})
            if _changes(header, before.header):
                lines.append({"circumstances": header.circumstances})
            if lines:
                self._append(*lines)
        else:
            truncate(path, 0)
            self._append({"format": FORMAT, **asdict(header), "plan": join_ranges(plan)})
            sync(path.absolute().parent)

    def add(self, rows: Sequence[EpisodeResult], others: Iterable[dict[str, Any]] = ()) -> None:
        """Write the episodes that ended in one step, after other circumstances that rows are played under from now."""
        self._lock.owner.check(self.path, "play with a journal of its own and merge the two")
        lines: list[dict[str, Any]] = [{"circumstances": found} for found in others]
        lines += map(row_to_json, rows)
        self._file.append(_as_lines(lines))

    def close(self) -> None:
        """Wait until everything is on disk and let others write to the file; raises what kept it from the disk.

        In a forked child nothing is written: the rows, and the thread that syncs them, are its parent's.
        """
        try:
            if self._lock.owner.is_here:
                self._file.close()
        finally:
            self._lock.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Close; where the block failed, that is what is raised, with a note of what kept rows from the disk."""
        try:
            self.close()
        except StorageError as late:
            if error is None:
                raise
            error.add_note(f"besides, the journal: {late}")

    def _append(self, *lines: dict[str, Any]) -> None:
        try:
            append(self.path, _as_lines(lines))
        except OSError as error:
            raise storage_error(self.path, error, _HINT) from error


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
        self._took = WITHIN_S / 4
        """Seconds of the slowest sync of late: where they are many, the next begins earlier."""
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
                self._changed.notify_all()  # later content is synced with this: no need to wake the thread for it
            if self._thread is None:
                # not before there is something to sync: most evaluations that are resumed have nothing to add
                self._thread = threading.Thread(target=self._run, name="headrace-journal", daemon=True)
                self._thread.start()
            while self._error is None and (age := time.monotonic() - self._oldest) > WITHIN_S:
                if age > WITHIN_S + STALL_S:
                    raise self._make_stall_error()
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
                raise self._make_stall_error()
            return
        os.close(handle)
        if not self._told:
            self._check()

    def _make_stall_error(self) -> StorageError:
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
            begin = time.monotonic()
            try:
                files.disk.sync(self._handle)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the next append raises it)
                self._fail(error)
                return
            with self._changed:
                self._syncs_since = None
                self._synced, self._took = self._taken, max(time.monotonic() - begin, 0.8 * self._took)
                self._changed.notify_all()

    def _take(self) -> bool:
        """Wait for content and for more to come with it; False when there is none and there will be none."""
        with self._changed:
            while self._waits_since is None and not self._closing:
                self._changed.wait()
            if self._waits_since is None:
                return False
            until = self._waits_since + min(_LINGER_S, WITHIN_S - 2 * self._took)
            while not self._closing and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            self._syncs_since, self._waits_since = self._waits_since, None
            self._taken = self._size
            return True

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            # where this fails, too, rows that may not be on disk stay in the file
            with contextlib.suppress(OSError):
                os.ftruncate(self._handle, self._synced)
            self._changed.notify_all()


def _as_lines(lines: Iterable[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def _torn_header(path: Path) -> bool:
    """Whether a file is the beginning of a header: a full disk or a crash came before anything was played."""
    with open_untrusted(path) as file:
        raw, begin = file.readline(LINE_LIMIT), f'{{"format": "{FORMAT}"'.encode()
    return b"\n" not in raw and raw[: len(begin)] == begin[: len(raw)]


def check_same(expected: Header, got: Header, name: str) -> None:
    """Refuse another identity, naming what differs; warn of other circumstances."""
    # the task before the hash of the policy: another task has another policy, too; the size before places in it
    order = {"source": -1, "places": 1}
    keys = sorted(expected.identity.keys() | got.identity.keys(), key=lambda key: (order.get(key, 0), key))
    for key in keys:
        mine, theirs = expected.identity.get(key), got.identity.get(key)
        same = _SAME.get(key)
        if key == "mapping" and not (key in expected.identity and key in got.identity):
            continue  # 0.2 does not write it
        if mine != theirs and (same is None or same(mine) != same(theirs)):
            hint = "; set the rows of its strict batches with Batching(size=…) (--batch-size)"
            raise ConfigError(
                f"{name}: expected an evaluation of {key} {mine!r}, got one of {theirs!r}"
                f"{hint if key == 'strict_size' else ''}"
            )
    if changed := _changes(expected, got):
        diff = ", ".join(f"{key} {got.circumstances.get(key)!r} → {expected.circumstances[key]!r}" for key in changed)
        warnings.warn(f"{name}: played under other circumstances: {diff}", stacklevel=3)


def _changes(expected: Header, got: Header) -> list[str]:
    """Names of circumstances that ``got`` has not; what several machines played has a list of values."""

    def has(value: object, found: object) -> bool:
        return value == found or (isinstance(found, list) and value in cast("list[object]", found))

    return [key for key, value in expected.circumstances.items() if not has(value, got.circumstances.get(key))]


def common_values(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of every key the value that all have, or a list of the different ones."""
    found: dict[str, Any] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part.get(key) for part in parts]
        different = [value for place, value in enumerate(values) if value not in values[:place]]
        found[key] = different[0] if len(different) == 1 else different
    return found


def circumstances(env: object, engine: str) -> dict[str, Any]:
    """Where an evaluation runs."""
    recipe: Any = getattr(env, "recipe", None)
    return {
        "num_envs": getattr(env, "num_envs", None),
        "threads": getattr(recipe, "threads", None),
        "engine": engine,
        **{name: installed_version(name) for name in ("headrace", "torch", "numpy", "mujoco", "gymnasium")},
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "torch_threads": torch.get_num_threads(),
        "numerics": numeric_fingerprint(),
    }


@functools.cache
def numeric_fingerprint() -> str:
    """Hash the bits of fixed small products, convolutions, sums and transcendental functions, on the CPU.

    It differs where MKL, oneDNN, ATen or numpy's BLAS take other instructions. The shapes are so small that the number
    of threads has no part in it.
    """
    with torch.inference_mode():
        x = ((torch.arange(16 * 67, dtype=torch.float32) * 7919) % 1009 / 256 - 2).reshape(16, 67)
        y = x.T.contiguous()
        found = [
            *(F.linear(x, x, x[:, 0].contiguous()), x @ y, x[:1] @ y, x.double() @ y.double()),
            F.conv2d(x[:, :64].reshape(2, 2, 16, 16), x[:, :18].reshape(16, 2, 3, 3)),
            *(x.exp(), x.tanh(), x.sin(), x.sigmoid(), x.abs().log(), F.gelu(x)),
            *(x.softmax(1), F.layer_norm(x, (67,)), x.sum(1)),
            torch.from_numpy(x.reshape(4, 268).numpy() @ y.reshape(268, 4).numpy()),
        ]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in found)).hexdigest()[:16]


def describe_source(env: object) -> dict[str, Any]:
    """Return what is evaluated on: what the recipe says of an episode, or the name of what was made by hand."""
    recipe: Any = getattr(env, "recipe", None)
    if recipe is not None:
        return recipe.identity()
    task: Any = getattr(env, "task", None)
    return {"source": getattr(task, "identity", None) or getattr(env, "name", type(env).__name__)}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


class JournalContent(NamedTuple):
    """What a journal says."""

    header: Header
    plan: set[int]
    """Everything that was ever planned in it."""
    rows: list[EpisodeResult]
    size: int
    """Bytes up to the end of the last whole line."""


def read_journal(path: Path) -> JournalContent:
    """Read a journal; a last line that was cut off is left out."""
    lines = list(read_lines(path))
    try:
        first, *others = map(json.loads, lines)
        if first.get("format") != FORMAT:
            raise DataError(f"{path}: expected a journal of format {FORMAT!r}, got {first.get('format')!r}")
        header = parse_header(first, str(path))
        plans = [first.get("plan"), *[line["plan"] for line in others if "plan" in line]]
        noted = [parse_header({**first, **line}, str(path)) for line in others if "circumstances" in line]
        rows = [parse_row(line, str(path)) for line in others if not line.keys() & {"plan", "circumstances"}]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not the journal of an evaluation, or damaged: {error}") from error
    if noted:
        every = [header.circumstances, *[found.circumstances for found in noted]]
        header = Header(identity=header.identity, circumstances=common_values(every))
    return JournalContent(
        header, set[int]().union(*[read_ranges(plan, str(path)) for plan in plans]), rows, sum(map(len, lines))
    )


def read_header(path: Path) -> Header | None:
    """Read the header of a journal; None where there is none yet."""
    return None if not path.exists() or _torn_header(path) else read_journal(path).header


def parse_header(data: dict[str, Any], name: str) -> Header:
    """Return the header in a JSON object."""
    return read_record(Header, {key: data.get(key) for key in ("identity", "circumstances")}, name, strict=True)


def parse_row(data: object, name: str) -> EpisodeResult:
    """Return a row from its JSON form; DataError, with ``name``, for anything else."""
    return read_record(EpisodeResult, data, f"{name}: episode", strict=True)


def row_to_json(row: EpisodeResult) -> dict[str, Any]:
    """Return what :func:`parse_row` reads."""
    return {name: getattr(row, name) for name in _COLUMNS}


def join_ranges(ids: Iterable[int]) -> list[list[int]]:
    """Ids as ``[first, end)`` pairs in order: how files hold a plan."""
    found: list[list[int]] = []
    for episode in sorted(set(ids)):
        if found and found[-1][1] == episode:
            found[-1][1] += 1
        else:
            found.append([episode, episode + 1])
    return found


def read_ranges(ranges: object, name: str) -> set[int]:
    """Return the ids of what :func:`join_ranges` gave; DataError, with ``name``, for anything else."""
    found: set[int] = set()
    for pair in cast("list[object]", ranges) if isinstance(ranges, list) else [ranges]:
        ends = cast("list[object]", pair) if isinstance(pair, list) else []
        if [type(end) for end in ends] != [int, int]:
            raise DataError(f"{name}: expected a plan of [first, end] pairs, got {ranges!r}")
        first, end = cast("list[int]", ends)
        if not 0 <= first < end or end - first > _MOST:
            raise DataError(f"{name}: expected a plan of [first, end] pairs, got {ranges!r}")
        found.update(range(first, end))
    return found
