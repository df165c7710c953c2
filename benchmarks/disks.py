"""A folder with a disk of its own, which is full or read-only for a while (needs root).

The idea: the kernel refuses, so every writer of every process meets what a real disk would say. The folder is a small file system
in memory. A ballast takes what is free of it. For reading only, the folder is mounted over itself: files that are open stay so, as
no file system becomes read-only under them.
"""

from __future__ import annotations

import errno
import subprocess
import tempfile
from pathlib import Path

from meshcee.errors import NotPermittedError

__all__ = ["KINDS", "SmallDisk", "why_not"]

KINDS = ("disk full", "read-only disk")
BYTES = 256 << 20
CHUNK = bytes(1 << 20)


def why_not() -> str | None:
    """Why there are no such disks here; None where there are."""
    with tempfile.TemporaryDirectory(prefix="meshcee-disk-") as folder:
        try:
            with SmallDisk(Path(folder) / "disk") as disk:
                for kind in KINDS:
                    disk.refuse(kind)
                    disk.accept()
        except NotPermittedError as error:
            return str(error)
    return None


class SmallDisk:
    """Lifetime is `with`; then nothing is left of what lay on it. NotPermittedError where nothing may be mounted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ballast = folder / "ballast"
        self.refuses = ""  # what it is now, of KINDS

    def __enter__(self) -> SmallDisk:
        self._folder.mkdir(parents=True)
        _call("mount", "-t", "tmpfs", "-o", f"size={BYTES}", "meshcee", str(self._folder))
        return self

    def __exit__(self, *error: object) -> None:
        self.accept()
        _call("umount", "--lazy", str(self._folder))

    def refuse(self, kind: str) -> None:
        """From now until `accept`."""
        if kind == "disk full":
            _fill(self._ballast)
        else:
            _call("mount", "--bind", str(self._folder), str(self._folder))
            _call("mount", "-o", "remount,ro,bind", str(self._folder))
        self.refuses = kind

    def accept(self) -> None:
        if self.refuses == "disk full":
            self._ballast.unlink()
        elif self.refuses:
            _call("umount", "--lazy", str(self._folder))
        self.refuses = ""


def _fill(ballast: Path) -> None:
    with open(ballast, "wb", buffering=0) as file:
        while True:
            try:
                file.write(CHUNK)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotPermittedError(f"{command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise NotPermittedError(done.stderr.strip() or f"{command[0]} failed with {done.returncode}")
