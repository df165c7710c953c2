"""A worker on a kernel that has neither landlock nor filters: it says what it can still do."""

from __future__ import annotations

import errno

from peers.device.worker import checking, confine

check = checking.check


def prepare() -> None:
    checking.prepare()
    confine.GUARDS |= dict.fromkeys(("landlock", "seccomp"), refused)


def refused(memory_bytes: int) -> None:
    raise OSError(errno.ENOSYS, "")
