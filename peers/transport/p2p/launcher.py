"""The small process between a peer and its p2pd, run as a file: `python -I -S launcher.py FOLDER PARENT_PID COMMAND...`

The idea: nothing of ours may outlive us, not even after kill -9. The launcher holds one end of a pipe (its standard
input) whose other end only the peer holds. When the peer dies, however it dies, the pipe ends, and the launcher ends
p2pd and removes the private folder with p2pd's sockets. It also looks once a second whether it still has its parent,
because a forked child of the peer may hold the pipe open. If the launcher itself is killed, the kernel kills p2pd.
Standard library only: it must start in milliseconds and need nothing of the peer's environment.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

LOOK_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """What the child calls before exec so that the kernel kills it when we die; None where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    launcher = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before the call
            os._exit(1)

    return arrange


def wait(child: subprocess.Popen[bytes], parent: int) -> None:
    """Until the child has ended, the pipe has, or the parent is another."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        while child.poll() is None and os.getppid() == parent:
            ready, _, _ = select.select([0, woken.fileno()], [], [], LOOK_EVERY_S)
            if woken.fileno() in ready:
                woken.recv(64)
            if 0 in ready and not os.read(0, 64):
                return
    finally:
        signal.set_wakeup_fd(-1)  # before the sockets are closed: the child's end is a signal, too


def remove(folder: str) -> None:
    """The private folder and the sockets in it; it has no subfolders."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
        os.rmdir(folder)


def main(arguments: list[str]) -> int:
    folder, parent, *command = arguments

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    for ignored in (signal.SIGINT, signal.SIGHUP):  # a Ctrl-C is for the peer, which may want to finish its step
        signal.signal(ignored, signal.SIG_IGN)
    child: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.suppress(KeyboardInterrupt):
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent())
            wait(child, int(parent))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if child is not None and child.poll() is None:
            child.kill()  # the kernel closes its connections; a polite end would only take longer
            child.wait()
        remove(folder)
    code = 1 if child is None else child.returncode
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # nothing to flush: be gone at once
