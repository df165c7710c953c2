"""What a worker is told to do in tests: check as a real one does, or what a graph says that found a fault in torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import socket
import threading
import time
from collections.abc import Callable

from meshcee.config import Limits
from meshcee.errors import GraphError
from peers.device.worker import checking


def prepare() -> None:
    checking.prepare()


def check(graph: bytes, limits: Limits) -> None:
    if graph in DEEDS:
        DEEDS[graph]()
        return
    checking.check(graph, limits)


def _crash() -> None:
    ctypes.string_at(0)


def _for_ever() -> None:
    while True:
        pass


def _asleep() -> None:
    time.sleep(3600)


def _without_end() -> None:
    kept = []
    while True:
        kept.append(bytearray(64 << 20))


def _tell() -> None:
    """As a refusal: everything that was tried and came about."""
    raise GraphError("possible: " + ", ".join(name for name, attempt in ATTEMPTS.items() if succeeds(attempt)))


DEEDS: dict[bytes, Callable[[], None]] = {
    b"crash": _crash,
    b"for ever": _for_ever,
    b"asleep": _asleep,
    b"without end": _without_end,
    b"abort": os.abort,
    b"end": lambda: os._exit(3),
    b"tell": _tell,
}


def succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, RuntimeError, ValueError):  # no thread could be started; no limit be raised
        return False
    return True


def _connect() -> None:
    """Over a socket that is there: nobody listens, so a refusal of the network's, not of the kernel's, is a success."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        try:
            one.connect(("127.0.0.1", 9))
        except ConnectionRefusedError:
            return


def _bind() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        one.bind(("127.0.0.1", 0))


def _call(name: str, *args: int) -> Callable[[], None]:
    def run() -> None:
        if getattr(ctypes.CDLL(None, use_errno=True), name)(*args) < 0:
            raise OSError(ctypes.get_errno(), name)

    return run


def _spawn() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)


def _runnable() -> None:
    mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def _thread() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def _written() -> None:
    path = f"/tmp/meshcee-attempt-{os.getpid()}"
    with open(path, "w") as file:
        file.write("x")
    os.unlink(path)


ATTEMPTS: dict[str, Callable[[], object]] = {
    "read a file": lambda: open("/etc/hostname").close(),
    "read its own program": lambda: open(os.__file__).close(),
    "read its own memory as a file": lambda: open("/proc/self/mem", "rb").close(),
    "list a folder": lambda: os.listdir("/"),
    "read the parent's environment": lambda: open(f"/proc/{os.getppid()}/environ").close(),
    "write a file": _written,
    "make a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "make a pair of sockets": lambda: [one.close() for one in socket.socketpair()],
    "connect": _connect,
    "bind": _bind,
    "run a program": _spawn,
    "start a thread": _thread,
    "signal another": lambda: os.kill(os.getppid(), 0),
    "make a shared memory": lambda: os.close(os.memfd_create("x")),
    "make memory that runs": _runnable,
    "wait for events": lambda: os.close(os.eventfd(0)),
    "look into another process": lambda: os.close(os.pidfd_open(os.getppid())),
    "raise its limits": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096)),
    "change its group": _call("setpgid", 0, 0),
}
