"""Which system calls a process may still make once it is ready: filters for the kernel, written by hand.

The idea: a list of what is allowed, and EPERM for everything else, so a call that a newer kernel brings is refused too. A check
keeps memory of its own, clocks, the socket that it was born with, and the end. A device keeps threads, an event loop,
code that is made while it runs, and what imports read. Neither can write a file, connect, start or signal anything.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Mapping, Sequence

__all__ = ["IO_URING_SETUP", "SECCOMP", "of_a_check", "of_a_device", "without_rings"]

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
_OF_A_DEVICE: dict[str, tuple[int | None, int | None]] = {
    "epoll_wait": (232, None), "epoll_pwait": (281, 22), "epoll_pwait2": (441, 441), "epoll_ctl": (233, 21),
    "memfd_create": (319, 279), "ftruncate": (77, 46), "pwrite64": (18, 68), "flock": (73, 32), "shutdown": (48, 210),
    "getsockopt": (55, 209), "getsockname": (51, 204), "getpeername": (52, 205),
}  # fmt: skip
_OF_A_NETWORK: dict[str, tuple[int | None, int | None]] = {
    "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200), "listen": (50, 201),
    "setsockopt": (54, 208), "epoll_create": (213, None), "epoll_create1": (291, 20), "eventfd2": (290, 19),
    "pipe2": (293, 59), "select": (23, None), "pselect6": (270, 72),
}  # fmt: skip
_OF_IMPORTS: dict[str, tuple[int | None, int | None]] = {
    "getdents64": (217, 61), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17), "newfstatat": (262, 79),
}  # fmt: skip
_MMAP, _MPROTECT, _PRLIMIT, _TGKILL, _FCNTL, _NEWFSTATAT = (
    (9, 222),
    (10, 226),
    (302, 261),
    (234, 131),
    (72, 25),
    (262, 79),
)
_SOCKET = (41, 198)
_FAMILIES = (2, 10, 16)  # of sockets: IPv4, IPv6, and netlink, which lists interfaces
_IOCTL, _PRCTL, _CLONE, _CLONE3, _OPENAT = (16, 29), (157, 167), (56, 220), (435, 435), (257, 56)
IO_URING_SETUP = 425  # on both
SECCOMP = {"x86_64": 317, "aarch64": 277}  # the call that installs a filter
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, and as the kernel names it

_PROT_EXEC = 4
_AT_EMPTY_PATH = 0x1000
_CLONE_THREAD = 0x10000
_TO_WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FIONBIO = 0x5421  # of ioctl
_SET_NAME = 15  # of prctl: of a thread
# Of fcntl: read flags, duplicate a descriptor, look at seals; wait or not, seal. Others make the kernel send signals.
_FCNTLS, _FCNTLS_OF_A_DEVICE = (1, 3, 1030, 1034), (4, 1033)
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_KILL, _ALLOW, _REFUSE, _UNKNOWN = 0x80000000, 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER, _MACHINE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter sees


def of_a_check() -> bytes:
    """The filter's instructions for this machine and this process; OSError where none is written for the machine."""
    return _program(_CALLS, _FCNTLS, [], may_make_code=False)


def of_a_device(*, may_read: bool, network: bool = False) -> bytes:
    """As of a check, and threads, an event loop, sealed memory, and code: oneDNN makes its kernels while it runs.

    `may_read` files: something else, landlock, sees to it which. `network`: it may connect and listen.
    """
    column, _ = _here()
    more = [
        *_when(_CLONE[column], 0, _with_bit(_CLONE_THREAD)),
        *(
            _op(_EQUAL, _CLONE3[column], 0, 1),
            _op(_RETURN, _UNKNOWN),
        ),  # then glibc asks for clone, which can be looked at
        *_when(_IOCTL[column], 1, _among(_FIONBIO)),
        *_when(_PRCTL[column], 0, _among(_SET_NAME)),
    ]
    calls = _CALLS | _OF_A_DEVICE
    if may_read:
        calls |= _OF_IMPORTS
        more += _when(_OPENAT[column], 2, _without_bit(_TO_WRITE))
    if network:
        calls |= _OF_A_NETWORK
        more += _when(_SOCKET[column], 0, _among(*_FAMILIES))
    return _program(calls, _FCNTLS + _FCNTLS_OF_A_DEVICE, more, may_make_code=True)


def without_rings() -> bytes:
    """Everything but io_uring, as if the kernel had none: what a ring is asked for would pass by any filter."""
    return b"".join(
        [
            *(_op(_LOAD, _NUMBER), _op(_EQUAL, IO_URING_SETUP, 0, 1)),
            *(_op(_RETURN, _UNKNOWN), _op(_RETURN, _ALLOW)),
        ]
    )


def _here() -> tuple[int, int]:
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter is written for {platform.machine()}")
    return _MACHINES[platform.machine()]


def _program(
    calls: Mapping[str, tuple[int | None, int | None]], fcntls: Sequence[int], more: list[bytes], *, may_make_code: bool
) -> bytes:
    column, machine = _here()
    code = [_op(_LOAD, _MACHINE), _op(_EQUAL, machine, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    for numbers in calls.values():
        if (number := numbers[column]) is not None:
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    for numbers in (_MMAP, _MPROTECT):
        code += _when(numbers[column], 2, [_op(_RETURN, _ALLOW)] if may_make_code else _without_bit(_PROT_EXEC))
    code += _when(_PRLIMIT[column], 0, _among(0))
    code += _when(_TGKILL[column], 0, _among(os.getpid()))  # what abort() does
    code += _when(_FCNTL[column], 1, _among(*fcntls))
    code += _when(_NEWFSTATAT[column], 3, _with_bit(_AT_EMPTY_PATH))
    return b"".join([*code, *more, _op(_RETURN, _REFUSE)])


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def _when(number: int, argument: int, then: list[bytes]) -> list[bytes]:
    """For this call, look at the low half of an argument. `then` ends with a verdict."""
    return [_op(_EQUAL, number, 0, 1 + len(then)), _op(_LOAD, _FIRST_ARGUMENT + 8 * argument), *then]


def _among(*values: int) -> list[bytes]:
    allowed = [one for value in values for one in (_op(_EQUAL, value, 0, 1), _op(_RETURN, _ALLOW))]
    return [*allowed, _op(_RETURN, _REFUSE)]


def _with_bit(bit: int) -> list[bytes]:
    return [_op(_ANY_BIT, bit, 0, 1), _op(_RETURN, _ALLOW), _op(_RETURN, _REFUSE)]


def _without_bit(bit: int) -> list[bytes]:
    return [_op(_ANY_BIT, bit, 0, 1), _op(_RETURN, _REFUSE), _op(_RETURN, _ALLOW)]
