"""The program that reads one dataset: it imports its owner's file, calls the function, and answers which samples a step has.

The idea: this is code of who runs the peer, so it may open what that user may. It runs neither in the process that holds the peer's
keys nor in the one that checks what others send. It hears seeds, steps and indices, and nothing else of any job.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from meshcee.errors import MeshceeError, UsageError
from meshcee.files.steady import steady_output
from meshcee.sampling import batch_of, inputs_of
from meshcee.stage import tensors
from meshcee.user_code import calling, import_job_file
from peers.device.worker.confine import die_with
from peers.node.datasets.packets import INDEX_BYTES, Answer, Ask, payloads_of, receive, send

__all__ = ["Reads", "main"]

Inputs = Sequence[tuple[str, str, tuple[int, ...]]]  # name, type and shape, as a job expects them of one sample

LOOKED_AT = 4  # samples that are read twice
MOST_TEXT = 4000


class Reads:
    """A set that is open."""

    def __init__(self, name: str, file: str, make: str) -> None:
        """Calls the user's function. UsageError in one sentence."""
        self._what = f"dataset {name!r}"
        with calling(f"{self._what}: {file}"):
            found = getattr(import_job_file(file), make, None)
        if not callable(found):
            raise UsageError(f"{self._what}: {file} defines no function {make}()")
        with calling(f"{self._what}: {make}()"):
            self._data: Any = found()
            if isinstance(self._data, torch.utils.data.IterableDataset) or not hasattr(self._data, "__getitem__"):
                raise UsageError(f"{self._what}: {make}() must return a set with len(data) and data[i] -> (x, y)")
            self.samples = len(self._data)
        if not self.samples:
            raise UsageError(f"{self._what}: {make}() returns a set without samples")
        for index in sorted({k * self.samples // LOOKED_AT for k in range(LOOKED_AT)}):
            if self._bytes(index) != self._bytes(index):
                raise UsageError(
                    f"{self._what}: sample {index} is another one when it is read again: draw from `random`, `numpy.random` or "
                    "torch's own generator only"
                )

    def inputs(self, seed: int, step: int, indices: Sequence[int], expected: Inputs = ()) -> dict[str, torch.Tensor]:
        """Of these samples. UsageError where the user's code fails, or they are not as the job expects them."""
        found = inputs_of(batch_of(self._data, indices, seed, step, name=self._what))
        kinds = {(n, str(t.dtype).removeprefix("torch."), tuple(t.shape[1:])) for n, t in found.items()}
        if expected and kinds != set(expected):
            there, here = (", ".join(" ".join(map(str, kind)) for kind in sorted(one)) for one in (kinds, expected))
            raise UsageError(
                f"samples of {self._what} are {there:.500}, and At(like=...) is {here:.500}: give a `like` as they are"
            )
        return found

    def _bytes(self, index: int) -> tuple[Any, list[bytes]]:
        meta, payloads = tensors.pack(list(self.inputs(0, 0, [index]).values()))
        return meta, [bytes(payload) for payload in payloads]


def answer(reads: Reads, asked: Ask, indices: Sequence[int]) -> tuple[Answer, Sequence[Any]]:
    try:
        inputs = reads.inputs(asked.seed, asked.step, indices, asked.inputs)
        meta, payloads = tensors.pack(list(inputs.values()))
    except MeshceeError as error:
        return failed(error), ()
    sizes = tuple(memoryview(payload).nbytes for payload in payloads)
    return Answer(names=tuple(inputs), tensors=tuple(meta), sizes=sizes), payloads


def failed(error: MeshceeError) -> Answer:
    """Also without what the user's own exception says."""
    text, cause = str(error), error.__cause__
    own = f": {cause}" if cause is not None and not isinstance(cause, MeshceeError) else ""
    return Answer(error=text[:MOST_TEXT], brief=text.removesuffix(own)[:MOST_TEXT])


def serve(channel: socket.socket, name: str, file: str, make: str) -> None:
    """Until the peer has gone."""
    try:
        reads = Reads(name, file, make)
    except MeshceeError as error:
        send(channel, failed(error))
        return
    send(channel, Answer(samples=reads.samples))
    while True:
        try:
            asked = receive(channel, Ask)
            (raw,) = payloads_of(channel, [INDEX_BYTES * asked.count])
        except EOFError:
            return
        send(channel, *answer(reads, asked, np.frombuffer(raw, "<i8").tolist()))


def main() -> None:
    """Arguments: the parent's process id, the socket's descriptor, threads of torch; the set's name, its file and its function."""
    parent, handle, threads = map(int, sys.argv[1:4])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    steady_output()
    with socket.socket(fileno=handle) as channel:
        serve(channel, *sys.argv[4:7])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no thread of the user's is waited for
