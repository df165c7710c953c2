"""Disks that fail: full, not to be written, killed with their process, or without power.

The idea: they do in a real folder what the real one does, and note what has reached the platter. What has not may be there after a
power cut or not, each write and each name for itself.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshcee.files.disk import Data, Disk

__all__ = ["Killed", "KilledDisk", "Platter", "RefusingDisk"]


class Killed(BaseException):
    """As SIGKILL: nothing that comes behind it happens."""


class RefusingDisk(Disk):
    """Refuses what it is asked below `folder` while `error` is a number: ENOSPC what needs room, others every change."""

    def __init__(self, folder: Path, error: int | None = None) -> None:
        self.folder = folder
        self.error = error
        self.refusals: list[Path] = []
        self._opened: dict[int, Path] = {}

    @property
    def refused(self) -> int:
        return len(self.refusals)

    def _refuses(self, path: Path, *, grows: bool) -> bool:
        return self.error is not None and path.is_relative_to(self.folder) and (self.error != errno.ENOSPC or grows)

    def _check(self, path: Path, *, grows: bool) -> None:
        if self.error is None or not self._refuses(path, grows=grows):
            return
        self.refusals.append(path)
        raise OSError(self.error, os.strerror(self.error), str(path))

    def mkdir(self, path: Path) -> None:
        self._check(path, grows=True)
        super().mkdir(path)

    def open(self, path: Path, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            self._check(path, grows=not path.exists())
        handle = super().open(path, flags, mode)
        self._opened[handle] = path
        return handle

    def write(self, handle: int, data: Data) -> int:
        path = self._opened[handle]
        if self.error == errno.ENOSPC and self._refuses(path, grows=True) and len(data) > 1:  # half of it finds room
            super().write(handle, memoryview(data)[: len(data) // 2])
        self._check(path, grows=True)
        return super().write(handle, data)

    def pwrite(self, handle: int, data: Data, at: int) -> int:
        self._check(self._opened[handle], grows=True)
        return super().pwrite(handle, data, at)

    def rename(self, old: Path, new: Path) -> None:
        self._check(new, grows=False)
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._check(new, grows=True)
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self._check(path, grows=False)
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._check(path, grows=False)
        super().rmdir(path)


class KilledDisk(Disk):
    """After `number` operations its process is dead. Of what it was writing then, half is there."""

    def __init__(self, number: int) -> None:
        self._left = number

    def _happens(self) -> None:
        if self._left <= 0:
            raise Killed
        self._left -= 1

    def mkdir(self, path: Path) -> None:
        self._happens()
        super().mkdir(path)

    def open(self, path: Path, flags: int, mode: int) -> int:
        if flags & os.O_CREAT:
            self._happens()
        return super().open(path, flags, mode)

    def write(self, handle: int, data: Data) -> int:
        try:
            self._happens()
        except Killed:
            super().write(handle, memoryview(data)[: len(data) // 2])
            raise
        return super().write(handle, data)

    def pwrite(self, handle: int, data: Data, at: int) -> int:
        try:
            self._happens()
        except Killed:
            super().pwrite(handle, memoryview(data)[: len(data) // 2], at)
            raise
        return super().pwrite(handle, data, at)

    def fsync(self, handle: int) -> None:
        self._happens()  # only the moment counts: what is killed here is a process, not the machine

    def rename(self, old: Path, new: Path) -> None:
        self._happens()
        super().rename(old, new)

    def link(self, old: Path, new: Path) -> None:
        self._happens()
        super().link(old, new)

    def unlink(self, path: Path) -> None:
        self._happens()
        super().unlink(path)

    def rmdir(self, path: Path) -> None:
        self._happens()
        super().rmdir(path)


@dataclass
class _File:
    """`durable` is its bytes on the platter; `pending` are (place, bytes) that are not, or a new size as (size, None)."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)


@dataclass
class _Folder:
    durable: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)  # names that appear, or go, in one


Change = tuple[int, int]  # (number of a file or folder, which of its pending changes)


class Platter(Disk):
    """What would be found below `folder` if the power were cut now: `after` makes one such folder for each choice of what of
    that which was not brought to the disk is there all the same. A name that is lost takes along what is behind it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, _File] = {}
        self._folders: dict[int, _Folder] = {}
        self._opened: dict[int, tuple[int, bool]] = {}  # handle -> (inode, whether it is a folder)
        self._lock = threading.RLock()
        self._held: list[int] = []  # handles, so that no number of a file is used again
        self.on_change: Callable[[], None] = lambda: None  # called before each change
        for path in (folder, *folder.rglob("*")):  # what lies there already is on the platter
            self._hold(path)
            if path.is_dir():
                self._folders[_inode(path)] = _Folder({p.name: _inode(p) for p in path.iterdir()})
            else:
                self._files[_inode(path)] = _File(bytearray(path.read_bytes()))

    def __enter__(self) -> Platter:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._held:
            os.close(handle)

    def _hold(self, path: Path) -> int:
        self._held.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return _inode(path)

    def _named(self, *changes: tuple[Path, int | None]) -> None:
        """These names of one folder appear or go, all or none."""
        (parent,) = {path.parent for path, _ in changes}
        self._folders[_inode(parent)].pending.append({path.name: number for path, number in changes})

    def mkdir(self, path: Path) -> None:
        self.on_change()
        with self._lock:
            super().mkdir(path)
            if path.is_relative_to(self._folder):
                number = self._hold(path)
                self._folders[number] = _Folder()
                self._named((path, number))

    def open(self, path: Path, flags: int, mode: int) -> int:
        new = bool(flags & os.O_CREAT) and not path.exists()
        if flags & (os.O_CREAT | os.O_TRUNC):
            self.on_change()
        with self._lock:
            handle = super().open(path, flags, mode)
            number = _inode(path)
            if new:
                self._files[self._hold(path)] = _File()
                self._named((path, number))
            elif flags & os.O_TRUNC:
                self._files[number].pending.append((0, None))
            self._opened[handle] = number, path.is_dir()
            return handle

    def write(self, handle: int, data: Data) -> int:
        self.on_change()
        with self._lock:
            count = super().write(handle, data)
            at = os.lseek(handle, 0, os.SEEK_CUR) - count
            self._files[self._opened[handle][0]].pending.append((at, bytes(data[:count])))
            return count

    def pwrite(self, handle: int, data: Data, at: int) -> int:
        self.on_change()
        with self._lock:
            count = super().pwrite(handle, data, at)
            self._files[self._opened[handle][0]].pending.append((at, bytes(data[:count])))
            return count

    def truncate(self, handle: int, size: int) -> None:
        self.on_change()
        with self._lock:
            super().truncate(handle, size)
            self._files[self._opened[handle][0]].pending.append((size, None))

    def fsync(self, handle: int) -> None:
        self.on_change()
        with self._lock:
            number, is_folder = self._opened[handle]
            if is_folder:
                folder = self._folders.get(number)
                if folder is not None:  # else above ours
                    for names in folder.pending:
                        _rename(folder.durable, names)
                    folder.pending.clear()
            else:
                file = self._files[number]
                for change in file.pending:
                    _write(file.durable, *change)
                file.pending.clear()

    def close(self, handle: int) -> None:
        with self._lock:
            super().close(handle)

    def rename(self, old: Path, new: Path) -> None:
        self.on_change()
        with self._lock:
            number = _inode(old)
            super().rename(old, new)
            if old.parent == new.parent:
                self._named((old, None), (new, number))
            else:  # each folder for itself
                self._named((old, None))
                self._named((new, number))

    def link(self, old: Path, new: Path) -> None:
        self.on_change()
        with self._lock:
            super().link(old, new)
            self._named((new, _inode(new)))

    def unlink(self, path: Path) -> None:
        self.on_change()
        with self._lock:
            super().unlink(path)
            self._named((path, None))

    def rmdir(self, path: Path) -> None:
        self.on_change()
        with self._lock:
            super().rmdir(path)
            self._named((path, None))

    def after(self, place: Callable[[], Path], seed: int, most: int = 24) -> Iterator[Path]:
        """Folders as they may be found: with every choice where there are few, else with all, none, each one alone, each one
        missing, and some by chance."""
        changes = [(n, i) for n, f in [*self._folders.items(), *self._files.items()] for i in range(len(f.pending))]
        for chosen in _choices(changes, random.Random(seed), most):
            self._restore(_inode(self._folder), set(chosen), folder := place())
            yield folder

    def _restore(self, number: int, chosen: set[Change], folder: Path) -> None:
        folder.mkdir()
        known = self._folders[number]
        names = dict(known.durable)
        for i, change in enumerate(known.pending):
            if (number, i) in chosen:
                _rename(names, change)
        for name, inner in names.items():
            if inner in self._folders:
                self._restore(inner, chosen, folder / name)
            else:
                file = self._files[inner]
                data = bytearray(file.durable)
                for i, (at, written) in enumerate(file.pending):
                    if (inner, i) in chosen:
                        _write(data, at, written)
                (folder / name).write_bytes(data)


def _choices(changes: list[Change], chance: random.Random, most: int) -> Iterable[Iterable[Change]]:
    if 2 ** len(changes) <= most:
        return itertools.chain.from_iterable(itertools.combinations(changes, n) for n in range(len(changes) + 1))
    single = [[c] for c in changes] + [[c for c in changes if c != left] for left in changes]
    some = [[c for c in changes if chance.random() < 0.5] for _ in range(most)]
    return [[], changes, *chance.sample(single + some, most - 2)]


def _inode(path: Path) -> int:
    return path.stat().st_ino


def _rename(names: dict[str, int], change: dict[str, int | None]) -> None:
    for name, number in change.items():
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number


def _write(data: bytearray, at: int, written: bytes | None) -> None:
    """Bytes that were lost before these are zeros."""
    end = at if written is None else at + len(written)
    data.extend(bytes(max(0, end - len(data))))
    if written is None:
        del data[at:]
    else:
        data[at:end] = written
