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
from typing import Any

import torch

from meshcee.config import Limits
from meshcee.errors import GraphError, ProtocolError
from peers.device.worker.confine import confine, die_with, limit_cpu
from peers.device.worker.packets import LENGTH, MOST_TEXT, Task, Verdict, length_of, message, opened, understood

__all__ = ["NUMBER", "main"]

NUMBER = struct.Struct("=i")  # a process id, or how it has ended


def main() -> None:
    """Arguments: the parent's process id, the socket's descriptor, bytes that a check may take, the module that checks."""
    parent, handle, memory_bytes = map(int, sys.argv[1:4])
    die_with(parent)
    torch.set_num_threads(1)  # no other thread: a copy of this process has only the one that copies
    work = importlib.import_module(sys.argv[4])
    work.prepare()
    here = os.getpid()
    with socket.socket(fileno=handle) as control:
        while True:
            asked, handles, _, _ = socket.recv_fds(control, 1, 1)
            if not asked or len(handles) != 1:
                os._exit(0)  # the peer has gone
            pid = os.fork()
            if not pid:
                die_with(here)
                control.close()
                _serve(work, handles[0], memory_bytes)
            os.close(handles[0])
            control.sendall(NUMBER.pack(pid))
            _, status = os.waitpid(pid, 0)
            control.sendall(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _serve(work: Any, handle: int, memory_bytes: int) -> None:
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
    prefix += _exactly(channel, LENGTH.size - len(prefix))
    task = understood(_exactly(channel, length_of(prefix)), Task)
    if len(handles) != 1:
        raise ProtocolError("a task came without the graphs")
    graphs = opened(handles[0], task.sizes)
    os.close(handles[0])
    return graphs, task


def _exactly(channel: socket.socket, count: int) -> bytes:
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
