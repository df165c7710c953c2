"""The process that peers of this machine are copies of: all that they import is imported here, once.

The idea: of the seconds and the memory that a peer's start takes, the imports are most. Whoever wants a copy sends one descriptor,
and the copy hears over it which command it is. So this process never holds a token. Neither does the copy when it makes the source
of its graph checkers, which is a copy of the copy.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import random
import runpy
import select
import socket
import sys
from contextlib import suppress

import torch

from meshcee.files import loads
from peers.device.worker import checking
from peers.device.worker.child import NUMBER, exactly, fork_source
from peers.device.worker.confine import die_with
from peers.device.worker.packets import LENGTH

__all__ = ["PEER", "PLAIN", "main"]

PEER, PLAIN = b"p", b"c"  # a copy that checks graphs, and one that does not
STANDARD = 3  # input, output, errors
PR_SET_NAME = 15


def main() -> None:
    """Arguments: the parent's process id, the socket's descriptor, and the modules to import. A copy of this process returns."""
    parent, handle = map(int, sys.argv[1:3])
    die_with(parent)
    torch.set_num_threads(1)  # no other thread: a copy of this process has only the one that copies
    for name in sys.argv[3:]:
        importlib.import_module(name)
    checking.prepare()
    generators = [each for each in gc.get_objects() if issubclass(type(each), random.Random)]
    gc.freeze()  # the collector writes into what it looks at, and what is written is shared no more
    with socket.socket(fileno=handle) as control:
        channel, kind = _copies(control)
    if kind == PEER:
        fork_source(checking, channel)
    for generator in generators:
        generator.seed()  # no two copies draw the same
    with channel:
        _become(channel)


def _copies(control: socket.socket) -> tuple[socket.socket, bytes]:
    """In each copy: its channel and its kind. The source tells over the channel the copy's number and, once it ends, how."""
    here = os.getpid()
    looked_at = select.poll()
    looked_at.register(control, select.POLLIN)
    living: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor that tells of its end
    while True:
        for handle, _ in looked_at.poll():
            if handle != control.fileno():
                looked_at.unregister(handle)
                os.close(handle)
                pid, channel = living.pop(handle)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with channel, suppress(OSError):
                    channel.sendall(NUMBER.pack(code))
                continue
            kind, handles, _, _ = socket.recv_fds(control, 1, 1)
            if not kind or len(handles) != 1:
                os._exit(0)  # the command has ended
            channel = socket.socket(fileno=handles[0])
            pid = os.fork()
            if not pid:
                die_with(here)
                for other, (_, theirs) in living.items():
                    os.close(other)
                    theirs.close()
                return channel, kind
            living[ended := os.pidfd_open(pid)] = (pid, channel)
            looked_at.register(ended, select.POLLIN)
            with suppress(OSError):
                channel.sendall(NUMBER.pack(pid))


def _become(channel: socket.socket) -> None:
    """What `python -m meshcee` is with these arguments, in this folder, with this environment."""
    prefix, handles, _, _ = socket.recv_fds(channel, LENGTH.size, STANDARD)
    if len(prefix) != LENGTH.size or len(handles) != STANDARD:
        os._exit(0)  # the command has ended
    told = loads(exactly(channel, *LENGTH.unpack(prefix)))
    channel.close()
    for place, handle in enumerate(handles):
        os.dup2(handle, place)
        os.close(handle)
    os.setsid()
    os.chdir(told["folder"])
    os.environ.clear()
    os.environ.update(told["environment"])
    sys.argv = ["meshcee", *told["arguments"]]
    sys.path.insert(0, told["folder"])
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"meshcee {told['name']}".encode(), 0, 0, 0)  # for `top` and `ps`
    runpy.run_module("meshcee", run_name="__main__")
