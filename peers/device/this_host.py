"""The machine around a peer: what is told of it, and whose turn it is to measure there.

The idea: peers of one machine share its cores. So each tells by which machine it is, under a name that only its mesh can tell from
others, and while one measures, the others wait. A lock on a file ends with the process that holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import hmac
import os
import platform
import stat
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

import structlog
import torch

import meshcee
from meshcee.figures import Versions
from meshcee.files import limits
from meshcee.sampling import KERNELS
from peers.device.kernels import settings

__all__ = [
    "alters_kernels",
    "capability",
    "cores",
    "host_id",
    "lock_file",
    "locks",
    "own_python",
    "quiet",
    "take_threads",
    "versions",
]

log = structlog.get_logger()

VENDORS = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}
TURN_S = 20.0  # waited for at most: whoever holds the lock may have been stopped
LOOK_S = 0.02
START = """
import sys
root = sys.argv.pop(1)
if root not in sys.path:
    sys.path.insert(0, root)
from {} import main
main()
"""


def versions() -> Versions:
    return Versions(meshcee.__version__, str(torch.__version__), platform.python_version())


def own_python(module: str) -> list[str]:
    """How a command begins that runs `main` of this module of ours in a Python of its own, without the working folder's modules."""
    return [sys.executable, "-P", "-c", START.format(module), str(Path(meshcee.__file__).parents[1])]


def cores() -> int:
    """That this process may use, or that its container's share of their time amounts to."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = limits.core_quota()
    return found if quota is None else min(found, max(1, round(quota)))


def take_threads(wanted: int | None) -> bool:
    """Torch computes with so many from now on; None: with no more than `cores`.

    Returns whether a user has said a number, here or by OMP_NUM_THREADS.
    """
    said = wanted is not None or bool(os.environ.get("OMP_NUM_THREADS"))
    if wanted or (not said and torch.get_num_threads() > cores()):
        torch.set_num_threads(wanted or cores())
    return said


@functools.cache
def capability() -> str:
    """Of the CPU: whose it is, for which instructions torch chooses its kernels, and what its libraries compute in this process."""
    whose = platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        told = next(line.split(":", 1)[1].strip() for line in file if line.startswith("vendor_id"))
        whose = VENDORS.get(told, told)
    with KERNELS.used():
        return f"{whose} {torch.backends.cpu.get_cpu_capability()}"[:59] + f"/{settings()}"


def alters_kernels() -> list[str]:
    """Names of this process's variables by which the CPU libraries may have taken other kernels."""
    return sorted(name for name in os.environ if name.startswith(("ATEN_CPU_", "ONEDNN_", "DNNL_", "MKL_")))


def host_id(secret: bytes) -> str:
    """The same for processes that share the same cores and memory of a machine, since it was started. Says nothing to others.

    Each container that has its own part of both is a host by itself.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        machine = f"{platform.node()} {uuid.getnode()}"
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return hmac.new(
        b"meshcee host" + secret, f"{machine} {allowed}{limits.own_group()}".encode(), hashlib.sha256
    ).hexdigest()[:16]


@contextlib.asynccontextmanager
async def quiet() -> AsyncIterator[None]:
    """While no other peer of this user on this machine is in here; after TURN_S all the same."""
    file = locks[0] if locks else lock_file()
    try:
        for _ in range(round(TURN_S / LOOK_S)):
            if file is None or _locked(file.fileno()):
                break
            await asyncio.sleep(LOOK_S)
        yield
    finally:
        if file is not None:
            fcntl.flock(file.fileno(), fcntl.LOCK_UN)
            if not locks:
                file.close()


locks: list[IO[bytes]] = []  # of a process that opens no file any more, and measures one thing at a time


def lock_file() -> IO[bytes] | None:
    try:
        return open(_folder() / "measuring.lock", "ab")
    except OSError as error:
        log.debug("measuring without waiting for others", error=str(error))
        return None


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _folder() -> Path:
    """Of this user alone; raises OSError where somebody else has made it."""
    folder = Path(tempfile.gettempdir()) / f"meshcee-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not this user's folder")
    return folder
