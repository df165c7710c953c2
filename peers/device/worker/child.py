"""The workers' own program: import what a check needs, once; then, for each task, a copy of this process that gives everything up.

The idea: all that a check imports is imported before; afterwards a worker could not open the files. A worker serves one task, so
nothing that a graph has broken is there when the next one comes. The process that workers are copies of reads nothing of others:
its peer sends it one descriptor a task, over which the worker hears the task.
"""

from __future__ import annotations

import importlib
import os
import socket
import struct
import sys
from typing import Any, NoReturn

import torch

from meshcee.config import Limits
from meshcee.errors import GraphError, ProtocolError
from peers.device.worker.confine import confine, die_with, limit_cpu
from peers.device.worker.packets import LENGTH, MOST_TEXT, Task, Verdict, length_of, message, opened, understood

__all__ = ["MEMORY", "NUMBER", "exactly", "fork_source", "forked", "main"]

NUMBER = struct.Struct("=i")  # a process id, or how it has ended
MEMORY = struct.Struct("=q")  # bytes that a check may take


def main() -> None:
    """Arguments: the parent's process id, the socket's descriptor, the module that checks."""
    parent, handle = map(int, sys.argv[1:3])
    die_with(parent)
    torch.set_num_threads(1)  # no other thread: a copy of this process has only the one that copies
    work = importlib.import_module(sys.argv[3])
    work.prepare()
    _make_workers(work, socket.socket(fileno=handle))


# Of sources that are copies of this process: the number of each and the socket to ask it by.
forked: list[tuple[int, socket.socket]] = []


def fork_source(work: Any, other: socket.socket) -> None:
    """The source of this process's workers is a copy of it, which closes this socket of another use.

    For a process that has one thread and has prepared `work`, the module that checks, and that has not yet read any secret.
    """
    here = os.getpid()
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        die_with(here)
        ours.close()
        other.close()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):
            os.dup2(null, standard)
        os.close(null)
        _make_workers(work, theirs)
    theirs.close()
    forked.append((pid, ours))


def _make_workers(work: Any, control: socket.socket) -> NoReturn:
    """One for each descriptor that comes, until the peer goes. `work` is the module that checks; it is prepared."""
    here = os.getpid()
    while True:
        asked, handles, _, _ = socket.recv_fds(control, MEMORY.size, 1)
        if len(asked) != MEMORY.size or len(handles) != 1:
            os._exit(0)  # the peer has gone
        pid = os.fork()
        if not pid:
            die_with(here)
            control.close()
            _serve(work, handles[0], *MEMORY.unpack(asked))
        os.close(handles[0])
        control.sendall(NUMBER.pack(pid))
        _, status = os.waitpid(pid, 0)
        control.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _serve(work: Any, handle: int, memory_bytes: int) -> NoReturn:
    try:
        with socket.socket(fileno=handle) as channel:
            channel.sendall(message(confine(memory_bytes)))
            graphs, task = _task(channel)
            limit_cpu(task.cpu_s)
            wrong = _wrong(work, graphs, Limits(graph_bytes=task.graph_bytes))
            channel.sendall(message(Verdict(wrong[:MOST_TEXT])))
    except BaseException:
        os._exit(1)
    os._exit(0)  # what Python does at its end may need what was given up


def _task(channel: socket.socket) -> tuple[list[memoryview], Task]:
    """Ends this process when the peer has gone or sends something else."""
    prefix, handles, _, _ = socket.recv_fds(channel, LENGTH.size, 1)
    prefix += exactly(channel, LENGTH.size - len(prefix))
    task = understood(exactly(channel, length_of(prefix)), Task)
    if len(handles) != 1:
        raise ProtocolError("a task came without the graphs")
    graphs = opened(handles[0], task.sizes)
    os.close(handles[0])
    return graphs, task


def exactly(channel: socket.socket, count: int) -> bytes:
    """So many bytes. This process ends where they do not come: nobody is there who could want more of it."""
    found = b""
    while len(found) < count:
        more = channel.recv(count - len(found))
        if not more:
            os._exit(0)
        found += more
    return found


def _wrong(work: Any, graphs: list[memoryview], limits: Limits) -> str:
    try:
        for graph in graphs:
            work.check(bytes(graph), limits)
    except GraphError as error:
        return str(error) or "it is malformed"
    except MemoryError:
        return "a graph needs more memory to be checked than is allowed"
    except Exception as error:  # a bug of ours, told as the graph's: nobody runs what could not be checked
        return f"a graph could not be checked: {type(error).__name__}"
    return ""
