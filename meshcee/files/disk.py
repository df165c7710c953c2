"""Every file that meshcee keeps is written here: whole or not at all, and on the disk before anybody relies on it.

The idea: a dozen system calls in one class, and on top of them the few things that writers do with them. A test puts a disk that
is full, that cannot be written, or that loses its power in the place of the real one (`using`), and so reaches every writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from meshcee.errors import NotNowError, UsageError

__all__ = [
    "Disk",
    "File",
    "append",
    "check_place",
    "is_full",
    "is_refusal",
    "is_torn",
    "kind_of",
    "link",
    "locked",
    "make_folder",
    "move",
    "new_folder",
    "probe",
    "publish",
    "refusal",
    "remedy",
    "remove",
    "remove_tree",
    "sync_file",
    "sync_folder",
    "using",
    "write_once",
    "write_whole",
]

Data = bytes | bytearray | memoryview
PROBE_BYTES = 16384  # a full disk takes files that hold nothing


class Disk:
    """The calls that change what is on the disk."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def open(self, path: Path, flags: int, mode: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def write(self, handle: int, data: Data) -> int:
        return os.write(handle, data)

    def pwrite(self, handle: int, data: Data, at: int) -> int:
        return os.pwrite(handle, data, at)

    def truncate(self, handle: int, size: int) -> None:
        os.truncate(handle, size)

    def fsync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def rmdir(self, path: Path) -> None:
        os.rmdir(path)


_disk = Disk()
_partial = itertools.count()


@contextlib.contextmanager
def using(disk: Disk) -> Iterator[None]:
    """Inside, every writer of this process has this disk. For tests."""
    global _disk
    before, _disk = _disk, disk
    try:
        yield
    finally:
        _disk = before


class File:
    """A new file, written from its beginning or anywhere. `close` returns once its bytes would survive a power cut.

    Its name would not, before `sync_folder`.
    """

    def __init__(self, path: Path, mode: int = 0o644, flags: int = os.O_CREAT | os.O_TRUNC) -> None:
        self.path = path
        self._handle = _disk.open(path, os.O_WRONLY | flags, mode)

    def resize(self, size: int) -> None:
        with _told(self.path):
            _disk.truncate(self._handle, size)

    def write(self, data: Data, at: int | None = None) -> None:
        """Behind what was written last, or at this place."""
        left = memoryview(data)
        with _told(self.path):
            while len(left):
                if at is None:
                    left = left[_disk.write(self._handle, left) :]
                else:
                    count = _disk.pwrite(self._handle, left, at)
                    left, at = left[count:], at + count

    def close(self) -> None:
        try:
            with _told(self.path):
                _disk.fsync(self._handle)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close it, wherever it stands. Twice is once."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            _disk.close(handle)


def write_whole(path: Path, data: Data) -> None:
    """The file holds these bytes, or what it held before, whenever the power is cut; once this has returned, these."""
    make_folder(path.parent)
    with _beside(path, data, 0o600) as partial:
        _disk.rename(partial, path)
    sync_folder(path.parent)


def publish(path: Path, data: Data) -> None:
    """A file that the user has named, for everybody to read. Raises UsageError where it cannot be written."""
    try:
        with _beside(path, data, 0o644) as partial:
            _disk.rename(partial, path)
    except OSError as error:
        raise kind_of(error)(f"cannot write {refusal(error)}; {remedy(error)}") from error


def probe(path: Path) -> None:
    """OSError where a small file of this name could not be written now. Nothing stays of it."""
    with _beside(path, bytes(PROBE_BYTES), 0o600) as partial:
        _disk.unlink(partial)


def check_place(path: Path, option: str) -> None:
    """Before hours of work for a file that the user has named: UsageError where it could not be written now."""
    try:
        if not path.parent.is_dir():
            raise UsageError(f"{option}: there is no folder {path.parent}")
        probe(path)
    except OSError as error:
        raise kind_of(error)(f"{option}: cannot write {refusal(error)}; {remedy(error)}") from error


def write_once(path: Path, data: Data) -> None:
    """As `write_whole`, for a file of which there is none yet: FileExistsError if somebody else was faster."""
    make_folder(path.parent)
    with _beside(path, data, 0o600) as partial:
        _disk.link(partial, path)  # unlike rename, fails when the name is taken
        _disk.unlink(partial)
    sync_folder(path.parent)


@contextlib.contextmanager
def _beside(path: Path, data: Data, mode: int) -> Iterator[Path]:
    """A file of these bytes beside the place; it is gone when the block fails."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(_partial)}.part")
    try:
        file = File(partial, mode)
        try:
            file.write(data)
            file.close()
        finally:
            file.abort()
        yield partial
    except BaseException as error:
        with contextlib.suppress(OSError):
            _disk.unlink(partial)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # the name that people know
        raise


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """For who reads the file and writes it again: whoever else does, in another process or thread, waits."""
    make_folder(path.parent)
    with open(f"{path}.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def append(path: Path, data: Data) -> None:
    """At the end of the file, whole as far as readers go; a power cut may take it away until `sync_file`."""
    file = File(path, flags=os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(file._handle).st_size
        try:
            file.write(data)
        except OSError:
            with contextlib.suppress(OSError):
                file.resize(size)  # a disk that is full took half of it
            raise
    finally:
        file.abort()


def is_torn(path: Path) -> bool:
    """Whether its last line has no end: a kill or a power cut came between. What is appended needs one first."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    return False


def sync_file(path: Path) -> None:
    """What was appended to it survives a power cut from now on, and its name."""
    File(path, flags=0).close()
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """The folder and those above it, where there are none; their names survive a power cut."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), [path, *path.parents]))
    for folder in reversed(missing):
        with contextlib.suppress(FileExistsError):  # somebody else was faster
            new_folder(folder)


def new_folder(path: Path) -> None:
    """As `make_folder`, for one of which there is none yet: FileExistsError if somebody else was faster."""
    _disk.mkdir(path)
    sync_folder(path.parent)


def move(old: Path, new: Path) -> None:
    """To another name beside it. Survives a power cut once `sync_folder` has returned."""
    _disk.rename(old, new)


def link(old: Path, new: Path) -> None:
    """A second name for the same file."""
    _disk.link(old, new)


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        _disk.unlink(path)


def remove_tree(folder: Path) -> None:
    """The folder with all that is in it, if there is one."""
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return
    for entry in entries:
        if stat.S_ISDIR(entry.lstat().st_mode):
            remove_tree(entry)
        else:
            _disk.unlink(entry)
    _disk.rmdir(folder)


def sync_folder(folder: Path) -> None:
    """The names in it survive a power cut from now on."""
    handle = _disk.open(folder, os.O_RDONLY, 0)
    try:
        with _told(folder):
            _disk.fsync(handle)
    finally:
        _disk.close(handle)


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """A system call that knows only a handle does not say of which file it failed."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def is_refusal(error: OSError) -> bool:
    """Whether a disk has refused something, and says what: no bug of ours. That a file is there, or is not, may be one."""
    return isinstance(error.filename, str) and not isinstance(error, FileNotFoundError | FileExistsError)


def is_full(error: OSError) -> bool:
    """Whether there is no room, of the disk or of this user: that passes, and what was typed is right."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def kind_of(error: OSError) -> type[UsageError]:
    """What a refusal is for whoever typed a command, and its exit code."""
    return NotNowError if is_full(error) else UsageError


def refusal(error: OSError, needed_bytes: int = 0) -> str:
    """Which path the disk has refused, why, and how much room is needed where there is none."""
    told = f"{_named(Path(str(error.filename)))}: {error.strerror}" if error.filename else str(error)
    if not is_full(error):
        return told
    needed = f"{needed_bytes:,} bytes are needed" if needed_bytes else ""
    return "; ".join(part for part in (told, ", ".join(filter(None, (needed, _free(error))))) if part)


def remedy(error: OSError, elsewhere: str = "") -> str:
    """What a user does about a file that could not be written; `elsewhere` is how its place is said, where nobody named it."""
    if is_full(error):
        return f"make room, or {elsewhere or 'name a file on another disk'}"
    if error.errno == errno.ENAMETOOLONG:
        return elsewhere or "give it a shorter name"
    return (
        f"check its owner and permissions, or {elsewhere}"
        if elsewhere
        else "name a file in a folder where this user may write"
    )


def _named(path: Path) -> Path:
    """What people know of it: not the hidden file or folder in which it is written first."""
    return next((p.parent for p in (path, path.parent) if p.name.startswith(".")), path)


def _free(error: OSError) -> str:
    try:
        there = next(p for p in [Path(str(error.filename)), *Path(str(error.filename)).parents] if p.exists())
        found = os.statvfs(there)
    except (OSError, StopIteration):
        return ""
    return f"{found.f_bavail * found.f_frsize:,} are free"
