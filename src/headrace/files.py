"""Files that are whole or absent, directories that have one writer, and manifests that know what they list.

Everything that headrace keeps goes through here: results, recordings, checkpoints, stores, exports. A write is made
beside its target, synced, renamed, and the directory is synced: a reader, also one after a crash or a loss of power,
sees the old content or the new content and nothing between.

Content that headrace writes itself goes through :data:`disk`, and so does every sync and every rename, also of
content that a library wrote; tests replace it to see what a full, failing or torn disk does.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import hashlib
import json
import logging
import lzma
import os
import pickle
import re
import secrets
import shutil
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from headrace.errors import ConfigError, DataError, HeadraceError, LifecycleError, StorageError

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_T = TypeVar("_T")
Buffer: TypeAlias = "bytes | memoryview"
Content: TypeAlias = "str | bytes | Callable[[Path], None]"
"""Text (UTF-8), bytes, or a function that writes the file at the path it is given."""

LOCK = ".lock"
_LOG = logging.getLogger("headrace.files")
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would exceed the size limit",
    errno.EROFS: "the disk is read-only",
    errno.EACCES: "no permission to write",
    errno.EPERM: "no permission to write",
    errno.EIO: "the disk failed",
}
_PARSER_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, EOFError, RuntimeError, ArithmeticError, MemoryError),
    *(OSError, struct.error, zlib.error, lzma.LZMAError),
    *(zipfile.BadZipFile, zipfile.LargeZipFile, pickle.UnpicklingError),
)
"""What the standard library, numpy and torch raise for content that is not what it claims to be."""
ARCHIVE_RATIO = 20
_SMALL_ARCHIVE = 1 << 26
_TEXT_LIMIT = 1 << 28
LINE_LIMIT = 1 << 24
"""Bytes of the longest line of a journal."""
_FULL = 1 << 16
"""A disk with less room than this counts as full."""


class Disk:
    """The calls that reach a disk."""

    def write(self, handle: int, content: Buffer) -> int:
        """Write a part of ``content`` or all of it; returns how many bytes were taken."""
        return os.write(handle, content)

    def sync(self, handle: int) -> None:
        """Wait until a file or directory is on disk."""
        os.fsync(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Move a file over another, or a directory to a free name, in one step."""
        os.replace(source, target)

    def reserve(self, handle: int, nbytes: int) -> None:
        """Make a file this large, with room on the disk for all of it."""
        os.posix_fallocate(handle, 0, nbytes)


disk = Disk()
"""What every write goes through; tests put another in its place."""


def storage_error(path: Path, error: OSError, hint: str = "") -> StorageError:
    """Return an error of the disk in words: which path, why, and what to do."""
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    return StorageError(error.errno, f"{path}: could not be written: {reason}{hint and '; '}{hint}")


def write_whole(path: Path, content: Content) -> None:
    """Create or replace a file, whole or not at all. Missing parent directories are made.

    A function as ``content`` gets a path in the same directory with the same suffix and must leave a file there; what
    it raises passes through, except errors of the disk, which become :class:`StorageError`.
    """
    with _report_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = _beside(path)
        try:
            if callable(content):
                _call(content, part)
            else:
                with _open_descriptor(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
                    write_all(handle, content.encode() if isinstance(content, str) else content)
            put_in_place(part, path)
        finally:
            part.unlink(missing_ok=True)


def write_directory(path: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory that appears under its name when ``fill`` has written everything into it.

    A target that exists is refused. What ``fill`` raises passes through, except errors of the disk.
    """
    if path.exists():
        raise ConfigError(f"{path}: already exists, and nothing is ever overwritten; choose another path")
    with _report_disk_errors(path):
        part = _beside(path)
        part.mkdir(parents=True)
        try:
            fill(part)
            put_in_place(part, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def remove_abandoned(directory: Path) -> None:
    """Remove files that killed writers left half written in a directory."""
    for file in directory.glob(".*.part*"):
        found = _PART.fullmatch(file.name)
        if found is not None and not Path("/proc", found[1]).exists():
            file.unlink(missing_ok=True)


def put_in_place(source: Path, target: Path) -> None:
    """Give a finished file or directory its name: everything in it is on disk before, and the name after."""
    sync_tree(source)
    disk.rename(source, target)
    sync(target.parent)


def write_all(handle: int, content: Buffer) -> None:
    """Write all of ``content`` to an open file."""
    rest = memoryview(content).cast("B")
    while rest:
        rest = rest[disk.write(handle, rest) :]


def append(path: Path, content: bytes) -> None:
    """Append to a file and wait until the disk has it; on failure the file is as before."""
    with _open_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW) as handle:
        before = os.fstat(handle).st_size
        try:
            write_all(handle, content)
            disk.sync(handle)
        except BaseException:  # also Ctrl-C; raised again
            os.ftruncate(handle, before)
            raise


def truncate(path: Path, size: int) -> None:
    """Cut a file to ``size`` bytes and wait until the disk has it."""
    with _open_descriptor(path, os.O_WRONLY | os.O_NOFOLLOW) as handle:
        os.ftruncate(handle, size)
        disk.sync(handle)


def sync(path: Path) -> None:
    """Wait until a file is on disk, or what was renamed, made or removed in a directory."""
    with _open_descriptor(path, os.O_RDONLY) as handle:
        disk.sync(handle)


def sync_tree(path: Path) -> None:
    """Wait until a file, or everything under a directory and the directory itself, is on disk."""
    for entry in sorted(path.rglob("*")) if path.is_dir() else ():
        sync(entry)
    sync(path)


def check_writable(directory: Path) -> None:
    """Raise an error now, before the work, if files could not be made in ``directory`` afterwards."""
    probe = directory / f".{secrets.token_hex(4)}.part"
    with _report_disk_errors(directory, "choose another directory with --output"):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch(exist_ok=False)
        finally:
            probe.unlink(missing_ok=True)


def check_new(path: Path | None, name: str) -> None:
    """Raise a ConfigError if a file or directory, given by the argument ``name``, already exists; None is none."""
    if path is not None and path.exists():
        raise ConfigError(f"{name} (--{name}): {path} already exists, and nothing is ever overwritten")


class Owner:
    """The process that opened something to write. A fork of it has a copy, which must neither write nor clean up."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, not a fork of it."""
        return os.getpid() == self._process

    def check(self, what: Path | str, hint: str) -> None:
        """Raise LifecycleError in a fork; ``what`` was opened, and ``hint`` is what to do instead."""
        if not self.is_here:
            raise LifecycleError(
                f"{what}: belongs to process {self._process}, which opened it, and this is a fork of it; {hint}"
            )


class FileLock:
    """A locked file. The lock ends with ``close``, or with the process that took it."""

    def __init__(self, handle: int) -> None:
        self.owner = Owner()
        self._handle = handle

    def close(self) -> None:
        """Let others write. Safe to call again."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            # a fork has the same lock: it must not end it, and must not hold it when its parent lets go
            if self.owner.is_here:
                with suppress(OSError):  # some file systems of clusters have none
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


class Lock(FileLock):
    """The right to write in an existing directory, held by one process at a time: who comes second gets an error that
    names the first. It ends with ``close`` or with the process.

    Readers need none. The directory keeps a file ``.lock`` with the process id of its last holder.
    """

    def __init__(self, directory: Path) -> None:
        with _report_disk_errors(directory):
            super().__init__(os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666))
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(self._handle, 0)
                os.pwrite(self._handle, f"{os.getpid()}\n".encode(), 0)
            except BlockingIOError:
                holder = os.pread(self._handle, 32, 0).decode(errors="replace").strip() or "unknown"
                self.close()
                raise LifecycleError(
                    f"{directory}: process {holder} is writing here; wait for it, end it, or choose another path"
                ) from None
            except OSError:
                self.close()
                raise


def lock_file(path: Path) -> FileLock:
    """Become the only writer of a file, which is made where it is absent, or raise LifecycleError.

    Where the file system has no locks, a warning is logged, and nothing is held.
    """
    with _report_disk_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise LifecycleError(
            f"{path}: another process is writing to it; wait for it, end it, or choose another path"
        ) from None
    except OSError as error:  # some file systems of clusters
        _LOG.warning("%s: could not be locked (%s); make sure that one process alone writes to it", path, error)
    return FileLock(handle)


def claim(directory: Path, hint: str = "choose another path") -> Lock:
    """Make a directory, or take an empty one, as its only writer; of two that try at once, one gets it.

    Args:
        directory: a new or empty one; anything in it is refused, so that nothing is overwritten by accident.
        hint: what else the caller may do, for the error.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: expected a directory, got a file; choose another path")
    with _report_disk_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    _refuse_content(directory, hint)  # before the lock, so that a refused directory stays as it is
    held = Lock(directory)
    try:
        _refuse_content(directory, hint)
    except BaseException:  # also Ctrl-C; raised again
        held.close()
        raise
    return held


def _refuse_content(directory: Path, hint: str) -> None:
    if any(entry.name != LOCK for entry in directory.iterdir()):
        raise ConfigError(
            f"{directory}: expected an empty or new directory, got one with files, and nothing is ever overwritten; "
            f"{hint}"
        )


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class FileHash:
    """Size and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileHash:
        """Of a file on disk."""
        return cls(path.stat().st_size, hash_file(path))

    def check(self, path: Path, *, content: bool = True) -> None:
        """Compare a file with this; only its size if not ``content``."""
        if path.is_symlink() or not path.is_file():
            raise DataError(f"{path}: listed, but missing or a link; restore it from a copy")
        size = path.stat().st_size
        if size != self.size:
            raise DataError(f"{path}: expected {self.size} bytes, got {size}; the file was cut or changed")
        if content and (found := hash_file(path)) != self.sha256:
            raise DataError(
                f"{path}: the checksum does not match: expected SHA-256 {self.sha256[:12]}…, got {found[:12]}…; the "
                "file is damaged, restore it from a copy"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a directory holds. The file has a checksum of its own, so that a changed manifest is noticed, too."""

    format: str
    """Names the kind of directory, such as ``headrace-replay``."""
    version: int
    about: Mapping[str, Any]
    """What the directory is; anything that JSON can say."""
    files: Mapping[str, FileHash]
    """By path relative to the manifest."""

    def write(self, path: Path) -> None:
        """Write the manifest, whole or not at all."""
        content: dict[str, Any] = {
            "format": self.format,
            "version": self.version,
            "about": dict(self.about),
            "files": {name: {"size": file.size, "sha256": file.sha256} for name, file in sorted(self.files.items())},
        }
        content["sha256"] = _digest(content)
        write_whole(path, json.dumps(content, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path, *, format: str, versions: tuple[int, ...]) -> Manifest:
        """Read a manifest and check that it is the expected kind, in an expected version, as it was written."""
        content = read_json(path)
        if content.get("format") != format:
            raise DataError(f"{path}: expected format {format!r}, got {content.get('format')!r}")
        version = content.get("version")
        if version not in versions:
            raise DataError(f"{path}: expected version {versions[0]}, got {version!r}; update headrace")
        expected = content.pop("sha256", None)
        if expected != _digest(content):
            raise DataError(f"{path}: the checksum does not match; the file was changed or is damaged")
        listed = cast("dict[str, dict[str, Any]]", content["files"])
        files = {name: FileHash(int(entry["size"]), str(entry["sha256"])) for name, entry in listed.items()}
        return cls(format=format, version=cast("int", version), about=content["about"], files=files)

    def check(self, directory: Path, *, content: Callable[[str], bool] | bool = True) -> None:
        """Check that every listed file is there and whole.

        Args:
            directory: where the files are.
            content: whether to read and hash them, for all or by name; sizes are always checked.
        """
        for name, file in self.files.items():
            file.check(directory / name, content=content(name) if callable(content) else content)


def open_untrusted(path: Path, limit: int | None = None) -> BufferedReader:
    """Open a file that may come from others for reading: no symbolic link, pipe or device, at most ``limit`` bytes.

    Raises:
        DataError: with the file's name.
    """
    try:
        # a pipe without a writer would block
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise DataError(f"{path}: cannot be read: no such file") from None
    except OSError as error:
        reason = "symbolic links are not followed" if error.errno == errno.ELOOP else error.strerror or error
        raise DataError(f"{path}: cannot be read: {reason}") from error
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode):
        os.close(handle)
        raise DataError(f"{path}: cannot be read: expected a plain file, got something else")
    if limit is not None and about.st_size > limit:
        os.close(handle)
        raise DataError(f"{path}: expected at most {limit:,} bytes, got {about.st_size:,}")
    return os.fdopen(handle, "rb")


@contextmanager
def parsing(path: Path | str) -> Generator[None]:
    """Turn what parsers raise for damaged or hostile content into a :class:`DataError` that names the file."""
    try:
        yield
    except HeadraceError:
        raise
    except _PARSER_ERRORS as error:
        words = str(error).splitlines() or [type(error).__name__]
        raise DataError(f"{path}: damaged, or not the expected kind of file: {words[0]}") from error


def check_expansion(path: Path, unpacked: int, packed: int) -> None:
    """Refuse a file of ``packed`` bytes that says it becomes too many when it is read."""
    if unpacked > _SMALL_ARCHIVE + ARCHIVE_RATIO * packed:
        raise DataError(f"{path}: expected a sane size, got {unpacked:,} bytes from {packed:,} packed ones")


@contextmanager
def open_archive(path: Path) -> Generator[zipfile.ZipFile]:
    """Open a zip archive that may come from others, every part of which is whole and of a sane size.

    A part may expand to :data:`ARCHIVE_RATIO` times its compressed size beyond 64 MiB; all bytes are compared with
    their checksums. What parsers raise inside the block becomes a :class:`DataError`.
    """
    with parsing(path), open_untrusted(path) as file, zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        packed = sum(part.compress_size for part in parts)
        unpacked = sum(part.file_size for part in parts)
        check_expansion(path, unpacked, min(packed, os.fstat(file.fileno()).st_size))
        if len({part.filename for part in parts}) < len(parts):
            raise DataError(f"{path}: expected parts with different names, got one twice")
        damaged = archive.testzip()
        if damaged is not None:
            raise DataError(f"{path}: damaged: its part {damaged!r} does not match its checksum")
        yield archive


_URI = re.compile(r"""([A-Za-z][A-Za-z0-9+.-]*://)([^/\s"'\\?#]*@)?([^\s"'\\?#]*)([?#][^\s"'\\]*)?""")


def hide_secrets(text: str) -> str:
    """Return a text whose URIs have no user info, query and fragment: signatures and tokens are in those."""
    return _URI.sub(r"\1\3", text)


def read_text(path: Path, *, limit: int = _TEXT_LIMIT) -> str:
    """Return the text of a file that may come from others."""
    with parsing(path), open_untrusted(path, limit) as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text, got a file that is not text ({error})") from error


def read_lines(path: Path) -> Generator[bytes]:
    """Yield the whole lines of a file that may come from others; a last one without its newline is left out."""
    with parsing(path), open_untrusted(path) as file:
        while (line := file.readline(LINE_LIMIT)).endswith(b"\n"):
            yield line
        if file.read(1):
            raise DataError(f"{path}: expected lines of at most {LINE_LIMIT:,} bytes, got a longer one; it is damaged")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file; anything else is a :class:`DataError` that names the file."""
    text = read_text(path)
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: expected JSON, got something else ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return cast("dict[str, Any]", content)


_WORDS = {
    "greater_than_equal": "Input should be a whole number from {ge}",
    "missing": "it is missing",
    "predicate_failed": "Input should be one of its kind",
    "unexpected_keyword_argument": "it is unknown",
}


@functools.cache
def _reader(kind: type[_T]) -> TypeAdapter[_T]:
    from pydantic import TypeAdapter  # takes a tenth of a second: on use

    return TypeAdapter(kind)


def read_record(kind: type[_T], content: object, where: str, *, strict: bool = False) -> _T:
    """Make a dataclass of what JSON says; an entry that is missing, unknown or of another kind is a DataError.

    Texts that say numbers are taken for them, and lists for tuples, unless ``strict``.
    """
    from pydantic import ValidationError

    known = {entry.name for entry in dataclasses.fields(cast("Any", kind))}
    for name, value in cast("dict[str, Any]", content).items() if isinstance(content, dict) else ():
        if name not in known:
            raise DataError(f"{where}: {name}: it is unknown; expected {', '.join(sorted(known))}")
        if isinstance(value, int) and abs(value) >> 1024:  # would be read as infinity where a float is expected
            raise DataError(f"{where}: {name}: a number of {value.bit_length()} bits is larger than any; it is damaged")
    try:
        reader = _reader(kind)
        return reader.validate_json(json.dumps(content), strict=True) if strict else reader.validate_python(content)
    except ValidationError as error:
        wrong: list[str] = []
        for each in error.errors(include_url=False):
            words = _WORDS.get(each["type"], each["msg"]).format(**each.get("ctx", {}))
            place = "".join(f"{part}: " for part in each["loc"])
            wrong.append(f"{place}{words.replace('Input should be', 'expected')}, got {each['input']!r:.80}")
        raise DataError(f"{where}: {'; '.join(wrong)}; it is damaged") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@contextmanager
def _report_disk_errors(path: Path, hint: str = "") -> Generator[None]:
    """Errors of the disk in the block become :class:`StorageError`."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(path, error, hint) from error


@contextmanager
def _open_descriptor(path: Path, flags: int) -> Generator[int]:
    """Open a file descriptor for the block."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    """Return a free name in the same directory: hidden, and with the suffix, which some writers would add otherwise."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part{path.suffix}")


_PART = re.compile(r"\..+\.(\d+)-[0-9a-f]{8}\.part(\.[^.]*)?")


def _call(write: Callable[[Path], None], part: Path) -> None:
    try:
        write(part)
    except RuntimeError as error:
        # torch reports a full disk as a failed check of its own
        if shutil.disk_usage(part.parent).free > _FULL:
            raise
        raise OSError(errno.ENOSPC, str(error)) from error


def link_or_copy(source: Path, target: Path) -> None:
    """Put the same file in another place; a copy where the disk has no links between the two."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES):
            raise
        shutil.copyfile(source, target)
