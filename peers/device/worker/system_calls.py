"""Which system calls a worker may still make once it is ready: a filter for the kernel, written by hand.

The idea: a list of what is allowed, and EPERM for everything else, so a call that a newer kernel brings is refused too. What is
left is memory of its own, clocks, the socket that it was born with, and the end. It cannot open, connect, start or signal
anything.
"""

from __future__ import annotations

import errno
import os
import platform
import struct

__all__ = ["SECCOMP", "program"]

# (x86_64, aarch64); None: has none.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "lseek": (8, 62),
    "close": (3, 57), "fstat": (5, 80), "brk": (12, 214), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233),
    "mincore": (27, 232), "membarrier": (324, 283), "futex": (202, 98), "rseq": (334, 293), "set_robust_list": (273, 99),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getuid": (102, 174),
    "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "uname": (63, 160), "sysinfo": (99, 179),
    "getrandom": (318, 278), "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "getcpu": (309, 168), "getrusage": (98, 165), "times": (100, 153), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "sendto": (44, 206), "recvfrom": (45, 207), "poll": (7, None),
    "ppoll": (271, 73), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
_MMAP, _MPROTECT, _PRLIMIT, _TGKILL, _FCNTL, _NEWFSTATAT = (
    (9, 222),
    (10, 226),
    (302, 261),
    (234, 131),
    (72, 25),
    (262, 79),
)
SECCOMP = {"x86_64": 317, "aarch64": 277}  # the call that installs a filter
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and as the kernel names it

_PROT_EXEC = 4
_AT_EMPTY_PATH = 0x1000
# Of fcntl: read flags, duplicate a descriptor, look at seals. Others make the kernel send signals.
_FCNTLS = (1, 3, 1030, 1034)
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_KILL, _ALLOW, _REFUSE = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees


def program() -> bytes:
    """The filter's instructions for this machine and this process; OSError where none is written for the machine."""
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter is written for {platform.machine()}")
    column, machine = _MACHINES[platform.machine()]
    code = [_op(_LOAD, _MACHINE), _op(_EQUAL, machine, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    for numbers in _CALLS.values():
        if numbers[column] is not None:
            code += [_op(_EQUAL, numbers[column] or 0, 0, 1), _op(_RETURN, _ALLOW)]
    for numbers in (_MMAP, _MPROTECT):  # memory that can be run is made before
        code += _when(
            numbers[column], 2, [_op(_ANY_BIT, _PROT_EXEC, 0, 1), _op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
        )
    code += _when(_PRLIMIT[column], 0, _among(0))
    code += _when(_TGKILL[column], 0, _among(os.getpid()))  # what abort() does
    code += _when(_FCNTL[column], 1, _among(*_FCNTLS))
    nameless = [_op(_ANY_BIT, _AT_EMPTY_PATH, 0, 1), _op(_RETURN, _ALLOW), _op(_RETURN, _REFUSE)]
    code += _when(_NEWFSTATAT[column], 3, nameless)
    code.append(_op(_RETURN, _REFUSE))
    return b"".join(code)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _when(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """For this call, look at the low half of an argument. `then` ends with a verdict."""
    return [_op(_EQUAL, number, 0, 1 + len(then)), _op(_LOAD, _FIRST_ARGUMENT + 8 * argument), *then]


def _among(*values: int) -> list[bytes]:
    allowed = [one for value in values for one in (_op(_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW))]
    return [*allowed, _op(_RETURN, _REFUSE)]
