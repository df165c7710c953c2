"""Commands that start at once: copies of one process that has imported all of meshcee, and torch with it.

The idea: of the seconds that a command of a test takes, the imports are most. The copies are those of `meshcee local`
(peers/cli/children). What a copy cannot show (its command line, its environment in /proc, how long a start takes) is tested with
processes that are started as users start them: `started(..., warm=False)`, and all of the wheel's test.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from peers.cli.children.source import PEER, PLAIN
from peers.device.worker import launch
from peers.device.worker.child import NUMBER
from peers.device.worker.packets import LENGTH

__all__ = ["started"]

ROOT = Path(__file__).parents[2]
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
# Of torch, what a first capture and a first plan import.
MORE = ("torch._dynamo", "torch.export._trace", "torch._inductor.utils", "hivemind", "uvloop", "safetensors.torch")


def started(arguments: list[str], *, warm: bool = True, **options: Any) -> subprocess.Popen[str]:
    """`meshcee ARGUMENTS` in a process of its own; `options` are those of Popen, of which a copy understands
    cwd, env, stdin, stdout and stderr. A copy is in a session of its own."""
    if warm and "MESHCEE_WHEEL_TEST" not in os.environ and options["env"].get("OMP_NUM_THREADS") == "1":
        return _Copy(arguments, text=True, **options)
    return subprocess.Popen([sys.executable, "-m", "meshcee", *arguments], text=True, **options)


@functools.cache
def _control() -> socket.socket:
    """To the process that copies are made of, which ends with this one."""
    ours, theirs = socket.socketpair()
    found = (
        m.name for part in ("meshcee", "dht", "peers") for m in pkgutil.walk_packages([str(ROOT / part)], f"{part}.")
    )
    modules = [name for name in found if not name.endswith("__main__")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = launch("peers.cli.children.source", theirs, *modules, *MORE, env=env, stderr=None)

    def end() -> None:
        ours.close()
        process.wait(10)

    atexit.register(end)
    return ours


class _Copy(subprocess.Popen[str]):
    """Popen, but for who starts the process and who hears of its end."""

    _turn = threading.Lock()

    def _execute_child(self, args: Any, *others: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, args, *others).arguments
        null = os.open(os.devnull, os.O_RDWR)
        standard = (given["p2cread"], null), (given["c2pwrite"], 1), (given["errwrite"], 2)
        handles = [usual if handle == -1 else handle for handle, usual in standard]
        self._channel, theirs = socket.socketpair()
        told = {
            "name": args[0],
            "arguments": args,
            "folder": str(given["cwd"] or os.getcwd()),
            "environment": given["env"],
        }
        body = json.dumps(told).encode()
        try:
            with theirs, self._turn:
                socket.send_fds(_control(), [PEER if args[0] == "peer" else PLAIN], [theirs.fileno()])
            (self.pid,) = NUMBER.unpack(self._channel.recv(NUMBER.size))
            socket.send_fds(self._channel, [LENGTH.pack(len(body))], handles)
            self._channel.sendall(body)
        finally:
            os.close(null)
            self._close_pipe_fds(*(given[name] for name in PIPES))
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and select.select([self._channel], [], [], 0)[0]:
            said = self._channel.recv(NUMBER.size)
            self.returncode = NUMBER.unpack(said)[0] if said else -signal.SIGKILL
            self._channel.close()
        return self.returncode

    def _try_wait(self, flags: int) -> tuple[int, int]:
        while (code := self._internal_poll()) is None:
            if flags & os.WNOHANG:
                return 0, 0
            select.select([self._channel], [], [], 1.0)
        return self.pid, _status(code)


def _status(code: int) -> int:
    """As waitpid tells it: what Popen reads."""
    return -code if code < 0 else code << 8
