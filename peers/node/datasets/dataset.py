"""A peer's side of the process that reads a dataset: it starts it, asks it for samples, checks what comes, and starts the next one.

The idea: the process runs code of the peer's owner, which may fail, hang or die like any. What it says is checked against what the
job expects before memory is spent on it. Whatever goes wrong is one sentence for the owner of the job; all of it stands in this
peer's own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import structlog
import torch

from dht import MAX_DATASETS
from meshcee.errors import PeerLostError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.stage import tensors
from peers.device.worker.workers import launch
from peers.node.datasets.packets import Answer, Ask, payloads_of, receive, send

__all__ = ["Dataset", "Datasets", "Layout", "Patience"]

log = structlog.get_logger()

ANSWER_S = 300.0  # for a micro-batch, or until the set is open
LONG_S = 5.0  # after which somebody is told that it takes long
AGAIN_S = 60.0  # between two times that somebody is told so, at least
ENDS_S = 0.5  # a process that has heard so has ended, or is about to
LOOK_S = 0.01
STANDARD_ERROR = 2

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # of one sample: type and shape of each input
T = TypeVar("T")


class Patience:
    """Of who waits for a set. `tell` hears for how many seconds, after LONG_S and then every AGAIN_S, whatever is waited for."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._quiet_until_s = 0.0  # by the loop's clock

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What it gives or raises; it is cancelled with whoever waits."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()

        async def tell() -> None:
            while True:
                await asyncio.sleep(max(LONG_S, self._quiet_until_s - loop.time()))
                self._quiet_until_s = loop.time() + AGAIN_S
                self._tell(loop.time() - began_s)

        try:
            async with asyncio.TaskGroup() as group:
                telling = group.create_task(tell())
                try:
                    return await work
                finally:
                    telling.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None


class Dataset:
    """One set. `start` says how many samples it has; `end` ends its process."""

    def __init__(self, name: str, file: str, make: str) -> None:
        self.name, self._file, self._make = name, file, make
        self.source = f"{Path(file).name}:{make}"[:64]  # as others may know it
        self.samples = 0
        self._process: _Process | None = None
        self._starting = asyncio.Lock()

    @classmethod
    def parse(cls, text: str) -> Dataset:
        """From NAME=FILE.py:FUNCTION. UsageError for anything else."""
        found = re.fullmatch(r"([\w.-]{1,64})=(.+\.py):([A-Za-z_]\w*)", text)
        if found is None:
            raise UsageError(f"--dataset {text!r:.200}: write NAME=FILE.py:FUNCTION, for example scans=scans.py:make")
        if not Path(found[2]).is_file():
            raise UsageError(f"--dataset {found[1]}: there is no file {Path(found[2]).absolute()}")
        return cls(found[1], str(Path(found[2]).resolve()), found[3])

    async def start(self) -> None:
        """UsageError where the user's code fails, or is another set than before."""
        async with self._starting:
            if self._process is None or not self._process.lives:
                await self.end()
                self._process = _Process(self.name, self._file, self._make)
            if not (samples := self._process.samples):  # who has started it may have been cancelled meanwhile
                samples = await self._asked(self._process.open)
            if self.samples not in (0, samples):
                await self.end()  # or the next one to ask would be given another set
                raise UsageError(f"dataset {self.name!r} has {samples} samples now, and had {self.samples}")
            self.samples = samples

    async def batch(self, seed: int, step: int, indices: Sequence[int], layout: Layout) -> dict[str, torch.Tensor]:
        """The samples of these indices, stacked. UsageError for what the user's code does, PeerLostError where it has ended."""
        await self.start()
        assert self._process is not None
        inputs = ((name, str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in layout.items())
        asked = Ask(seed, step, len(indices), tuple(inputs))
        found: dict[str, torch.Tensor] = await self._asked(self._process.ask, asked, indices, layout)
        return found

    async def _asked(self, call: Any, *args: Any) -> Any:
        process = self._process
        assert process is not None
        try:
            return await asyncio.to_thread(call, *args)
        except _Failed as failed:
            log.error("a dataset could not be read", dataset=self.name, error=str(failed))
            more = "; the log of the peer that has it says more" if failed.brief != str(failed) else ""
            raise UsageError(f"{failed.brief}{more}") from failed
        except (OSError, EOFError, ProtocolError) as error:
            how = await process.end()
            if isinstance(error, TimeoutError):
                how = f"has not answered for {ANSWER_S:.0f} s"
            elif isinstance(error, ProtocolError):
                how = f"is ended: {error}"
            told = f"the process that reads dataset {self.name!r} {how}"
            log.error("the process that reads a dataset has ended", dataset=self.name, error=told)
            raise PeerLostError(told) from error

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


class Datasets(dict[str, Dataset]):
    """By name. Lifetime is `async with`: inside, all are open."""

    def __init__(self, texts: Sequence[str]) -> None:
        if texts and sys.platform != "linux":
            raise UsageError("--dataset needs Linux: leave it out here")
        found = [Dataset.parse(text) for text in texts]
        super().__init__({one.name: one for one in found})
        if len(self) < len(found) or len(found) > MAX_DATASETS:
            raise UsageError(f"--dataset: give each name once, and at most {MAX_DATASETS}")

    async def __aenter__(self) -> Datasets:
        try:
            for one in self.values():
                await Patience(partial(self._opens, one)).wait(one.start())
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    @staticmethod
    def _opens(one: Dataset, seconds: float) -> None:
        log.warning(Event.DATA_AWAITED, dataset=one.name, source=one.source, seconds=round(seconds))

    async def _end(self) -> None:
        async with asyncio.TaskGroup() as group:
            for one in self.values():
                group.create_task(one.end())


class _Failed(Exception):
    """The user's code has."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.error)
        self.brief = answer.brief


class _Process:
    """Runs at once, started by exec; ends with `end`, or with this process. `open` and `ask` are called by threads."""

    def __init__(self, name: str, file: str, make: str) -> None:
        self._name = name
        self.samples = 0  # until the set is open
        self._lock = threading.Lock()
        self._channel, far = socket.socketpair()
        env = {k: v for k, v in os.environ.items() if not k.startswith("MESHCEE_")}  # a token may stand there
        told = (str(torch.get_num_threads()), name, file, make)
        try:  # what the user's code prints is not for standard output, where our JSON may be
            self._process = launch(
                "peers.node.datasets.reader", far, *told, env=env, stdout=STANDARD_ERROR, stderr=None
            )
        except BaseException:
            self._channel.close()
            raise

    @property
    def lives(self) -> bool:
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return self._process.returncode is None and os.waitid(os.P_PID, self._process.pid, ended) is None
        except ChildProcessError:  # a thread has waited for it in this moment
            return False

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One question at a time. A caller that was cancelled leaves a thread which still waits for its answer; where this fails,
        nobody may take a late answer for that to another question."""
        with self._lock:
            self._channel.settimeout(ANSWER_S)
            try:
                yield
            except _Failed:
                raise
            except Exception:
                self._hang_up()
                raise

    def _hang_up(self) -> None:
        """Both it and a thread that waits for it hear so."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def open(self) -> int:
        """How many samples it has."""
        with self._turn():
            self.samples = self.samples or _unless_failed(receive(self._channel, Answer)).samples
            return self.samples

    def ask(self, asked: Ask, indices: Sequence[int], layout: Layout) -> dict[str, torch.Tensor]:
        with self._turn():
            send(self._channel, asked, [np.asarray(indices, "<i8").tobytes()])
            answer = _unless_failed(receive(self._channel, Answer))
            most = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in layout.values()) * len(indices)
            if sum(answer.sizes) > most:
                raise ProtocolError(f"it has {sum(answer.sizes)} bytes for samples of {most}")
            payloads = payloads_of(self._channel, answer.sizes)
        if set(answer.names) != layout.keys():
            raise ProtocolError("it has other inputs than it was asked for")
        expected = [(dtype, (len(indices), *shape)) for dtype, shape in (layout[name] for name in answer.names)]
        values = tensors.unpack(list(answer.tensors), payloads, expected)
        return {name: value for name, value in zip(answer.names, values) if isinstance(value, torch.Tensor)}

    async def end(self) -> str:
        """How it has ended, or ends now."""
        self._hang_up()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ENDS_S):
                while self.lives:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_S)
        if self._process.returncode is None:  # nobody has waited for it, so the number is still its group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with what the user's code has started
        try:
            code = await asyncio.to_thread(self._process.wait)
        finally:
            self._channel.close()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _unless_failed(answer: Answer) -> Answer:
    if answer.error:
        raise _Failed(answer)
    return answer
