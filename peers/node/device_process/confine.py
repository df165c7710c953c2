"""What the process of a device gives up before it hears of any job: network, rights, files, system calls, memory without end.

The idea: rights go first, while there is one thread, so every later thread has given them up as well. System calls go last: what
is imported or opened on first use has been by then. The rest is as in a worker that checks graphs
(`peers.device.worker.confine`): what the kernel refuses is told, not fatal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from meshcee.files import limits
from peers.device.this_host import lock_file, locks
from peers.device.worker.confine import GUARDS as OF_A_CHECK
from peers.device.worker.confine import POSSIBLE as TO_A_CHECK
from peers.device.worker.confine import (
    Rules,
    filter_calls,
    has_rings,
    keep_privileges,
    leave_namespaces,
    limit_memory,
    tried,
)
from peers.device.worker.packets import Confinement
from peers.device.worker.system_calls import of_a_device, without_rings
from peers.node.device_process.messages import Begin

__all__ = ["GUARDS", "POSSIBLE", "confine", "confine_fully", "limit_to", "readable", "refuse_rings"]

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

TO_SUM = ("/sys/bus/pci/devices", "/sys/class/net", "/sys/devices")  # gloo looks for the device of an interface

# What its process keeps. Its driver names its threads by writing /proc/self/task/*/comm (measured: the first refusal of landlock).
OF_A_GPU = ("landlock, the host's memory, seccomp: nobody knows yet all that a GPU's driver needs",)

# Of what the plan counts on: heaps have holes, and Python and the kernels of torch take memory of their own.
SLACK, SLACK_BYTES = 1.25, 512 << 20


def confine(begin: Begin) -> Confinement:
    """Once: before the first thread, and before a GPU's driver is asked for anything."""
    device = begin.device
    if device != "cpu" and not device.startswith("cuda"):
        return Confinement((), (f"everything: only on a CPU or a CUDA device, and this is {device}",), ())
    if (file := lock_file()) is not None:
        locks.append(file)
    guards = dict(GUARDS)
    if begin.direct_sums:
        guards["namespaces"] = partial(leave_namespaces, network=True)
        guards["landlock"] = partial(_landlock, network=True)
    if device == "cpu":
        return tried(guards, {})
    del guards["landlock"]
    found = tried(guards, {})
    return replace(found, missing=(*found.missing, *OF_A_GPU))


def refuse_rings() -> None:
    """Before the event loop, which would ask the kernel by a ring where it gets one."""
    with contextlib.suppress(OSError):  # then system calls are not filtered later
        keep_privileges()
        filter_calls(without_rings())


def confine_fully(begin: Begin, before: Confinement, memory_bytes: int) -> Confinement:
    """Once: after a first step, and before the first job. `memory_bytes` is what this device lends."""
    possible = {what: attempt for what, attempt in POSSIBLE.items() if what not in OF_SUMS or not begin.direct_sums}
    if begin.device != "cpu":
        said = {} if begin.memory_bytes is None else {"GPU memory": partial(limit_card, begin.device)}
        after = tried(said, possible, memory_bytes)
        return replace(before, got=before.got + after.got, possible=after.possible)
    calls = partial(_filter_calls, may_read="landlock" in before.got, network=begin.direct_sums)
    after = tried({"memory": limit_to, "seccomp": calls}, possible, memory_bytes)
    return Confinement(before.got + after.got, before.missing + after.missing, after.possible)


def _filter_calls(_: int, *, may_read: bool, network: bool) -> None:
    if has_rings():
        raise OSError(errno.EBUSY, "")
    filter_calls(of_a_device(may_read=may_read, network=network))


def limit_to(memory_bytes: int) -> None:
    """What is lent, and slack; what is in use already does not count."""
    limit_memory(int(SLACK * memory_bytes) + SLACK_BYTES)


def limit_card(device: str, memory_bytes: int) -> None:
    """The same of a GPU's memory, as far as torch takes it."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (SLACK * memory_bytes + SLACK_BYTES) / total), device)


def _no_core_file(_: int) -> None:
    """It would hold what others compute on."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _landlock(_: int, *, network: bool = False) -> None:
    with contextlib.closing(Rules(network=network)) as rules:
        for path in (*readable(), *(path for path in TO_SUM if network and os.path.exists(path))):
            rules.may_read(path)
        rules.restrict()


def readable() -> list[str]:
    """Nothing that a user keeps beside a package, as an identity in a checkout of ours."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    wanted = dict.fromkeys(
        (sys.prefix, sys.base_prefix, *_imported(), *libraries, *FOLDERS, *FILES, *limits.group_files())
    )
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


def _start() -> None:
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


POSSIBLE: dict[str, Callable[[], object]] = {
    **TO_A_CHECK,
    "write files": lambda: os.close(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_WRONLY)),
    "reach the network": _connect,
    "start processes": _start,
}
OF_SUMS = ("open sockets", "reach the network")  # what direct sums need
