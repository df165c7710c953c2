"""Commands that start at once: copies of one process that has imported all of meshcee, and torch with it.

The idea: of the seconds that a command of a test takes, the imports are most. A copy has its own memory, environment, descriptors
and signals, and ends as any process does. What a copy cannot show (its command line, its environment in /proc, how long a start
takes) is tested with processes that are started as users start them: `started(..., warm=False)`, and all of the wheel's test.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["started"]

ROOT = Path(__file__).parents[2]
ENDED = struct.Struct("=ii")  # a process id, and its status as waitpid tells it
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
MOST_BYTES = 1 << 18  # of a request
# Of torch, what a first capture and a first plan import.
MORE = ("torch._dynamo", "torch.export._trace", "torch._inductor.utils", "hivemind", "uvloop", "safetensors.torch")


def started(arguments: list[str], *, warm: bool = True, **options: Any) -> subprocess.Popen[str]:
    """`meshcee ARGUMENTS` in a process of its own; `options` are those of Popen, of which a copy understands
    cwd, env, stdin, stdout, stderr and start_new_session."""
    if warm and "MESHCEE_WHEEL_TEST" not in os.environ and options["env"].get("OMP_NUM_THREADS") == "1":
        return _Copy(arguments, text=True, **options)
    return subprocess.Popen([sys.executable, "-m", "meshcee", *arguments], text=True, **options)


# -- on the side of the tests ------------------------------------------------------------------------------------------


class _Source:
    """The process that copies are made of. It ends with this one."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.mesh.warm", str(theirs.fileno())]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            handles = [theirs.fileno()]
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=handles, start_new_session=True)
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        atexit.register(self.end)

    def copy(self, request: dict[str, Any], handles: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], handles)
            while True:
                pid, status = ENDED.unpack(self._message())
                if status == -1:
                    return int(pid)
                self._ended[pid] = status

    def ended(self, pid: int) -> int | None:
        """Its status, once it has ended."""
        with self._lock:
            while pid not in self._ended and select.select([self._socket], [], [], 0)[0]:
                other, status = ENDED.unpack(self._message())
                self._ended[other] = status
            return self._ended.get(pid)

    def _message(self) -> bytes:
        data = self._socket.recv(ENDED.size)
        if not data:
            raise RuntimeError("the process that commands are copies of has ended")
        return data

    def end(self) -> None:
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)


@functools.cache
def _source() -> _Source:
    return _Source()


class _Copy(subprocess.Popen[str]):
    """Popen, but for who starts the process and who hears of its end."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, args, *others).arguments
        null = os.open(os.devnull, os.O_RDWR)
        standard = (given["p2cread"], null), (given["c2pwrite"], 1), (given["errwrite"], 2)
        theirs = [usual if handle == -1 else handle for handle, usual in standard]
        request: dict[str, Any] = {"arguments": args, "cwd": str(given["cwd"] or os.getcwd()), "env": given["env"]}
        request["new_session"] = bool(given["start_new_session"])
        try:
            self.pid = _source().copy(request, theirs)
        finally:
            os.close(null)
            self._close_pipe_fds(*(given[name] for name in PIPES))
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and (status := _source().ended(self.pid)) is not None:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        while (status := _source().ended(self.pid)) is None:
            if flags & os.WNOHANG:
                return 0, 0
            select.select([], [], [], 0.01)
        return self.pid, status


# -- the process that copies are made of -------------------------------------------------------------------------------


def main() -> None:
    import torch

    torch.set_num_threads(1)  # no other thread: a copy has only the one that copies
    for package in ("meshcee", "dht", "peers"):
        for module in pkgutil.walk_packages([str(ROOT / package)], f"{package}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in MORE:
        importlib.import_module(name)
    control, here = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    control.sendall(ENDED.pack(*ended))
        if control in ready:
            request, handles, _, _ = socket.recv_fds(control, MOST_BYTES, 3)
            if not request:
                os._exit(0)  # the tests have ended
            pid = os.fork()
            if not pid:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.close(woken)
                os.close(wake)
                _become(json.loads(request), handles, here)
                return
            for handle in handles:
                os.close(handle)
            control.sendall(ENDED.pack(pid, -1))


def _become(request: dict[str, Any], handles: list[int], source: int) -> None:
    """A command, in this copy, which ends with the process that it is a copy of: so nothing is left of tests that were killed."""
    from peers.device.worker.confine import die_with

    die_with(source)
    for place, handle in enumerate(handles):
        os.dup2(handle, place)
        os.close(handle)
    if request["new_session"]:
        os.setsid()
    for chance in (each for each in gc.get_objects() if isinstance(each, random.Random)):
        chance.seed()  # no two processes draw the same node id
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = ["meshcee", *request["arguments"]]
    sys.path[0] = request["cwd"]  # as of `python -m`
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)  # noqa: SIM115
    from peers.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
