"""What a worker gives up before it reads anything of others: rights, files, network, system calls, memory without end.

The idea: each guard is tried by itself. What the kernel refuses is told, not fatal. In the end the worker tries what it must not
be able to do. So the report says what holds, and not what was asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Callable, Mapping

from peers.device.worker.packets import Confinement
from peers.device.worker.system_calls import IO_URING_SETUP, SECCOMP, of_a_check

__all__ = [
    "GUARDS",
    "POSSIBLE",
    "Rules",
    "confine",
    "die_with",
    "filter_calls",
    "has_rings",
    "keep_privileges",
    "leave_namespaces",
    "limit_cpu",
    "limit_memory",
    "tried",
]

_libc = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _NO_NEW_PRIVS = 1, 38  # of prctl
_NAMESPACES = {"user": 0x10000000, "network": 0x40000000, "ipc": 0x08000000}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _LANDLOCK_VERSION, _LANDLOCK_BELOW = 444, 445, 446, 1, 1
_READ_FILE, _READ_FOLDER = 1 << 2, 1 << 3
_CAPABILITY_VERSION = 0x20080522
_MOST_FILES = 32


def die_with(parent: int) -> None:
    """SIGKILL when the parent dies; at once when it is dead already."""
    _called(_libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
    if os.getppid() != parent:
        os._exit(1)


def confine(memory_bytes: int) -> Confinement:
    """Give up what a check needs not. `memory_bytes` may be had beside what is in use now."""
    return tried(GUARDS, POSSIBLE, memory_bytes)


def tried(
    guards: Mapping[str, Callable[[int], object]], possible: Mapping[str, Callable[[], object]], memory_bytes: int = 0
) -> Confinement:
    """Each guard, in this order; then each of what must not be possible."""
    got, missing = [], []
    for name, guard in guards.items():
        try:
            guard(memory_bytes)
            got.append(name)
        except OSError as error:
            missing.append(f"{name}: {os.strerror(error.errno or 0)}")
    still = []
    for what, attempt in possible.items():
        with contextlib.suppress(OSError):
            attempt()
            still.append(what)
    return Confinement(tuple(got), tuple(missing), tuple(still))


def limit_cpu(seconds: int) -> None:
    """SIGXCPU ends this process after so many seconds more of CPU time, SIGKILL one later."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (until, until + 1))


def _called(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def _count_threads(memory_bytes: int) -> None:
    if len(os.listdir("/proc/self/task")) > 1:
        raise OSError(errno.EBUSY, "")


def leave_namespaces(memory_bytes: int = 0, *, network: bool = False) -> None:
    """No user of the machine, no network device but where it may use the `network`, no queue that others know."""
    _called(_libc.unshare(sum(bit for name, bit in _NAMESPACES.items() if name != "network" or not network)))


def _drop_capabilities(memory_bytes: int) -> None:
    header, nothing = struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24)
    _called(_libc.capset(header, nothing))


def keep_privileges(memory_bytes: int = 0) -> None:
    """No later program gets more rights than this one has."""
    _called(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))


def _limit(memory_bytes: int) -> None:
    size, _, _, _, _, _, _ = _memory()
    limit_memory(memory_bytes)
    for what, most in {
        resource.RLIMIT_AS: size + memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,  # neither processes nor threads
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_MEMLOCK: 0,
    }.items():
        resource.setrlimit(what, (most, most))


def limit_memory(more_bytes: int) -> None:
    """Of its own, which nobody shares: `more_bytes` beside what is in use now."""
    _, _, _, _, _, data, _ = _memory()
    resource.setrlimit(resource.RLIMIT_DATA, (data + more_bytes, data + more_bytes))


def _memory() -> list[int]:
    """In bytes: in all, resident, shared, text, nothing, of its own, nothing (proc(5))."""
    with open("/proc/self/statm") as file:
        return [int(pages) * resource.getpagesize() for pages in file.read().split()]


class Rules:
    """All that landlock knows of is forbidden, but for what `may_read` names, and ports for the `network`."""

    def __init__(self, *, network: bool = False) -> None:
        version = _called(_libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION))
        rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)
        rules = struct.pack("=QQQ", (1 << rights) - 1, 3 * (version >= 4 and not network), 3 * (version >= 6))
        size = 24 if version >= 6 else 16 if version >= 4 else 8
        self._handle = _called(_libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0))

    def may_read(self, path: str) -> None:
        """The file, or all below a folder."""
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rights = _READ_FILE | _READ_FOLDER * os.path.isdir(path)
            rule = struct.pack("=Qi", rights, place)
            _called(_libc.syscall(_LANDLOCK_ADD, self._handle, _LANDLOCK_BELOW, rule, 0))
        finally:
            os.close(place)

    def restrict(self) -> None:
        _called(_libc.syscall(_LANDLOCK_RESTRICT, self._handle, 0))

    def close(self) -> None:
        os.close(self._handle)


def _landlock(memory_bytes: int) -> None:
    """Without an exception."""
    with contextlib.closing(Rules()) as rules:
        rules.restrict()


def _seccomp(memory_bytes: int) -> None:
    filter_calls(of_a_check())


def filter_calls(code: bytes) -> None:
    """For all threads of this process, from now on."""
    buffer = ctypes.create_string_buffer(code, len(code))
    given = struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer))
    _called(_libc.syscall(SECCOMP[platform.machine()], 1, 1, given))


def has_rings() -> bool:
    """Whether the kernel makes one for this process."""
    return _libc.syscall(IO_URING_SETUP, 0, None) < 0 and ctypes.get_errno() != errno.ENOSYS


# By name, in this order: the first needs rights that the others take.
GUARDS: dict[str, Callable[[int], object]] = {
    "one thread": _count_threads,  # another would keep what this one gives up
    "namespaces": leave_namespaces,
    "no capabilities": _drop_capabilities,
    "no new privileges": keep_privileges,
    "limits": _limit,
    "landlock": _landlock,
    "seccomp": _seccomp,
}


# What this process must not be able to do.
POSSIBLE: dict[str, Callable[[], object]] = {
    "open files": lambda: os.close(os.open("/", os.O_RDONLY)),
    "open sockets": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
    "open local sockets": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close(),
    "signal others": lambda: os.kill(os.getppid(), 0),
}
