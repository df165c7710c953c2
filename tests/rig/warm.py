"""Processes that start at once: copies of one that has imported all of meshcee, and torch with it.

The idea: of the seconds that a command of a test takes, or a process that a peer starts, the imports are most. A copy has its own
memory, environment, descriptors and signals, is a child of whoever started it, and ends as any process does. What a copy cannot
show (its command line, its environment in /proc, how long a start takes) is tested with processes that are started as users start
them: `started(..., warm=False)`, tests without `warm_programs`, and all of the wheel's test.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

__all__ = ["CHECKS", "DATASETS", "DEVICE", "started", "warm_programs"]

ROOT = Path(__file__).parents[2]
NUMBER = struct.Struct("=i")  # a process id
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
MOST_BYTES, MOST_HANDLES = 1 << 18, 16  # of a request
ALONE = "MESHCEE_TEST_ALONE"  # a variable for a copy: no process waits below it to be copied
CHECKS, DEVICE, DATASETS = "peers.device.worker", "peers.node.device_process", "peers.node.datasets"
SUBREAPER = 36  # of prctl(2): whoever loses its parent below this process becomes its child
# Of torch, what a first capture and a first plan import.
MORE = ("torch._dynamo", "torch.export._trace", "torch._inductor.utils", "hivemind", "uvloop", "safetensors.torch")


def started(arguments: list[str], *, warm: bool = True, programs: bool = True, **options: Any) -> subprocess.Popen[str]:
    """`meshcee ARGUMENTS` in a process of its own; `options` are those of Popen, of which a copy understands
    cwd, env, stdin, stdout, stderr and start_new_session. `programs`: what a copy starts to check graphs is a copy too."""
    command = [sys.executable, "-m", "meshcee", *arguments]
    if warm and "MESHCEE_WHEEL_TEST" not in os.environ and options["env"].get("OMP_NUM_THREADS") == "1":
        options["env"] = {**options["env"], **({} if programs else {ALONE: "1"})}
        return _Copy(command, text=True, **options)
    return subprocess.Popen(command, text=True, **options)


@contextlib.contextmanager
def warm_programs(*rooms: str) -> Iterator[None]:
    """Programs of these rooms that peers of this process start in a Python of their own are copies too."""
    from peers.device.worker import workers

    def popen(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        return (_Copy if any(room in command[3] for room in rooms) else subprocess.Popen)(command, **options)

    _source()
    copies = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE)
    with mock.patch.object(workers, "subprocess", copies):
        yield


# -- on the side of who starts ---------------------------------------------------------------------------------------


class _Source:
    """The process that copies are made of; it ends when the other end of its socket is closed."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lock = threading.Lock()

    def copy(self, request: dict[str, Any], handles: list[int]) -> int:
        """A new child of this process."""
        told = json.dumps({**request, "parent": os.getpid()}).encode()
        with self._lock, _adopting():
            socket.send_fds(self._control, [told], handles)
            data = self._control.recv(NUMBER.size)
        if not data:
            raise RuntimeError("the process that others are copies of has ended")
        return int(NUMBER.unpack(data)[0])


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """The copy's own parent, which has started it and ends, leaves it to this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _source() -> _Source:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.rig.warm", str(theirs.fileno())]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()], start_new_session=True)
    ours.recv(NUMBER.size)  # it has imported all

    def end() -> None:
        ours.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)

    atexit.register(end)
    return _Source(ours)


class _Copy(subprocess.Popen[Any]):
    """Popen, but for who starts the process."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, args, *others).arguments
        null = os.open(os.devnull, os.O_RDWR)
        standard = (given["p2cread"], null), (given["c2pwrite"], 1), (given["errwrite"], 2)
        theirs = [usual if handle == -1 else handle for handle, usual in standard]
        request: dict[str, Any] = {"command": args[1:], "cwd": str(given["cwd"] or os.getcwd())}
        request |= {"env": given["env"], "new_session": bool(given["start_new_session"])}
        request["places"] = [0, 1, 2, *given["pass_fds"]]
        try:
            self.pid = _source().copy(request, [*theirs, *given["pass_fds"]])
        finally:
            os.close(null)
            self._close_pipe_fds(*(given[name] for name in PIPES))
        self._child_created = True


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
    chances = [each for each in gc.get_objects() if issubclass(type(each), random.Random)]
    gc.collect()
    gc.freeze()  # a copy's collector need not look through all that was imported
    control = socket.socket(fileno=int(sys.argv[1]))
    control.sendall(NUMBER.pack(os.getpid()))
    _serve(control, chances)


def _serve(control: socket.socket, chances: list[random.Random]) -> None:
    """Returns in a copy, when that has ended as a command or a program."""
    while True:
        request, handles, _, _ = socket.recv_fds(control, MOST_BYTES, MOST_HANDLES)
        if not request:
            os._exit(0)  # who starts has ended
        between = os.fork()
        if not between:
            here = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == here:
                time.sleep(0.0005)
            _become(json.loads(request), handles, control, chances)
            return
        os.waitpid(between, 0)
        for handle in handles:
            os.close(handle)


def _become(request: dict[str, Any], handles: list[int], control: socket.socket, chances: list[random.Random]) -> None:
    """A command, or a program of ours, in this copy. It ends with who started it: so nothing is left of tests that were killed."""
    from peers.device.worker.confine import die_with

    die_with(request["parent"])
    control.sendall(NUMBER.pack(os.getpid()))
    control.close()
    above = max(request["places"]) + 1
    for place, handle in zip(request["places"], [fcntl.fcntl(h, fcntl.F_DUPFD_CLOEXEC, above) for h in handles]):
        os.dup2(handle, place)
        os.close(handle)
    for handle in set(handles) - set(request["places"]):
        os.close(handle)
    if request["new_session"]:
        os.setsid()
    for chance in chances:
        chance.seed()  # no two processes draw the same node id
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8")  # noqa: SIM115
    sys.stderr = io.TextIOWrapper(open(2, "wb", closefd=False), encoding="utf-8", line_buffering=True)  # noqa: SIM115
    if request["command"][0] == "-P":  # -P -c PROGRAM ARGUMENTS
        sys.argv = request["command"][1:2] + request["command"][3:]
        exec(compile(request["command"][2], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = ["meshcee", *request["command"][2:]]
    sys.path[0] = request["cwd"]  # as of `python -m`
    from peers.cli.main import main as command

    with contextlib.ExitStack() as stack:
        if os.environ.pop(ALONE, None) is None:
            stack.enter_context(_a_source_below(chances))
            stack.enter_context(warm_programs(CHECKS))
        _ends(command)


def _ends(command: Callable[[], object]) -> None:
    """As Python ends, but for giving back what was imported: a copy would first have to copy it all, which takes a second."""
    try:
        command()
        code: Any = 0
    except SystemExit as ended:
        code = ended.code
    if code is not None and not isinstance(code, int):
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


@contextlib.contextmanager
def _a_source_below(chances: list[random.Random]) -> Iterator[None]:
    """For what this peer starts: a copy that waits, made while there is one thread."""
    from peers.device.worker.confine import die_with

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if not os.fork():
        die_with(parent)
        ours.close()
        os.setsid()
        for place in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), place)
        _serve(theirs, chances)
        sys.stdout.flush()
        os._exit(0)  # not back into the peer's frames
    theirs.close()
    with ours, mock.patch(f"{__name__}._source", return_value=_Source(ours)):
        yield


if __name__ == "__main__":
    main()
