"""What the process of a device gives up before it hears of any job: the network, rights, and all files but what Python reads.

The idea: it is done while there is one thread, so every later thread has given it up as well. The rest is as in a worker that
checks graphs (`peers.device.worker.confine`): what the kernel refuses is told, not fatal.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator

from peers.device.this_host import lock_file, locks
from peers.device.worker.confine import GUARDS as OF_A_CHECK
from peers.device.worker.confine import Rules, tried
from peers.device.worker.packets import Confinement

__all__ = ["GUARDS", "POSSIBLE", "confine", "readable"]

# Of what Python, torch and their libraries read while they run; nothing is executed or written.
FOLDERS = ("/usr", "/lib", "/lib64", "/sys/devices/system", "/proc/self")
FILES = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/dev/null",
    "/dev/urandom",
)


def confine(device: str) -> Confinement:
    """Once: before the first thread. What a GPU's driver needs is not known yet, so its process keeps everything."""
    if device != "cpu":
        return Confinement((), (f"everything: only on a CPU, and this is {device}",), ())
    if (file := lock_file()) is not None:
        locks.append(file)
    return tried(GUARDS, POSSIBLE)


def _no_core_file(_: int) -> None:
    """It would hold what others compute on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _landlock(_: int) -> None:
    with contextlib.closing(Rules()) as rules:
        for path in readable():
            rules.may_read(path)
        rules.restrict()


def readable() -> list[str]:
    """Nothing that a user keeps beside a package, as an identity in a checkout of ours."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    wanted = dict.fromkeys((sys.prefix, sys.base_prefix, *_imported(), *libraries, *FOLDERS, *FILES))
    return [path for path in wanted if os.path.isabs(path) and os.path.exists(path)]


def _imported() -> Iterator[str]:
    """Of a package its folder, which later imports may read too."""
    for name, module in list(sys.modules.items()):
        if "." not in name and (file := getattr(module, "__file__", None)):
            folder, last = os.path.split(file)
            yield folder if last.startswith("__init__.") else file


GUARDS: dict[str, Callable[[int], object]] = {
    **{name: OF_A_CHECK[name] for name in ("one thread", "namespaces", "no capabilities", "no new privileges")},
    "no core file": _no_core_file,
    "landlock": _landlock,
}


def _connect() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.connect(("127.0.0.1", 9))


POSSIBLE: dict[str, Callable[[], object]] = {
    "list files": lambda: os.listdir("/"),
    "write files": lambda: os.close(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_WRONLY)),
    "reach the network": _connect,
    "signal others": lambda: os.kill(os.getppid(), 0),
}
