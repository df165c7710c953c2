"""What is asked of a training, and what a job leaves to whoever ran it.

The idea: plain values; weights are in memory only if somebody asks for all of them.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections import ChainMap, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshcee.plan import Plan

if TYPE_CHECKING:
    from meshcee.capture import Capture
    from peers.owner.adaptation import Change
    from peers.owner.epoch import Report
    from peers.state.checkpoint import Checkpoint

__all__ = ["Result", "Telling", "Wanted", "once", "weights_of"]


@dataclass(frozen=True)
class Wanted:
    """What a user asks of one training beyond the job."""

    stages: int | None = None  # exactly so many
    plan: Plan | None = None  # this one, instead of the coordinator's
    resume: str | None = None  # the run to go on with
    after: str = ""  # the owner, gone, whose run that is, if it is another peer


@dataclass(repr=False)
class Result:
    """What a job leaves: one loss a step, evaluations by step, counted from 0, the trained weights under their original names."""

    losses: list[float] = field(default_factory=list)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    terms: dict[str, list[float]] = field(default_factory=dict)  # one a step, of each term that the job's loss tells of
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)  # `state_dict`, where possible read when asked for
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)  # `ema`, likewise
    plan: Plan | None = None
    names: dict[str, str] = field(default_factory=dict)
    stopped: bool = False  # ended at the user's wish, before all steps were done and saved
    run: str | None = None  # its folder under MESHCEE_HOME, where there is one
    notes: tuple[str, ...] = ()  # what people should know of the figures behind the plan
    steps_s: deque[float] = field(default_factory=partial(deque, maxlen=1000))  # of the running plan's last steps
    liars: list[str] = field(default_factory=list)  # peers that an audit has found, by name
    changes: list[Change] = field(default_factory=list)  # of the plan, while it ran

    def __repr__(self) -> str:
        """In one line: a notebook shows this."""
        told = f", loss {self.losses[0]:.4f} -> {self.losses[-1]:.4f}" if self.losses else ""
        told += "".join(
            f", eval {name} {value:.4f}" for name, value in (self.metrics[-1][1] if self.metrics else {}).items()
        )
        told += (", stopped" if self.stopped else "") + (f", run {self.run}" if self.run else "")
        return f"Result({len(self.losses)} steps{told})"

    def take_back(self, step: int, liars: Iterable[str]) -> None:
        """What was told of this step and of later ones is not to be believed, because of these."""
        self.liars += [self.names.get(peer) or peer for peer in sorted(liars)]
        for told in (self.losses, *self.terms.values()):
            del told[step:]
        self.metrics = [found for found in self.metrics if found[0] < step]

    @property
    def step_s(self) -> float | None:
        """The median step, without the first, in which the pipeline fills and kernels warm up."""
        return statistics.median([*self.steps_s][1:]) if len(self.steps_s) > 1 else None

    @property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The trained weights and buffers, all in memory from now on."""
        if not isinstance(self.state, dict):
            self.state = dict(self.state)
        return self.state

    @property
    def ema(self) -> dict[str, torch.Tensor]:
        """The same with the average of what was trained, where the job has one."""
        if not isinstance(self.averages, dict):
            self.averages = dict(self.averages)
        return self.averages

    @property
    def micro_batch_size(self) -> int:
        assert self.plan is not None
        return self.plan.micro_batch


def weights_of(captured: Capture, saved: Checkpoint) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """A checkpoint as `state` and `averages` of a result, read when asked for."""
    state: Mapping[str, torch.Tensor] = ChainMap({}, saved.weights(saved.names), captured.state)  # type: ignore[arg-type]
    averaged = saved.averages
    averages = captured.state_dict(ChainMap({}, averaged, state)) if averaged else {}  # type: ignore[arg-type]
    return captured.state_dict(state), averages


class Telling:
    """A step on its way to callbacks, the run's folder and the user. The end of an epoch may interrupt it; then `go_on` ends it."""

    def __init__(self, reports: asyncio.Queue[Any]) -> None:
        self.reports = reports  # to the user
        self.newest: Report | None = None
        self._left: deque[Callable[[], Awaitable[None]]] = deque()

    async def tell(self, report: Report, *ways: Callable[[], Awaitable[None]]) -> None:
        """These, then the user. A way that was interrupted is gone once more, and has to know how far it came."""
        self._left.extend((*ways, partial(self.reports.put, report)))
        await self.go_on()

    async def go_on(self) -> None:
        while self._left:
            await self._left[0]()
            self._left.popleft()


def once(call: Callable[[], None]) -> Callable[[], None]:
    """It runs at the first call alone: who waits for its thread may be interrupted, and the thread is not.

    A second call waits for the first, so that no two calls of the user's run beside each other. An error comes at each call. A step
    that a callback has failed in is so never told of, and a resumed run tells it again.
    """
    waiting, errors, running = [call], list[Exception](), threading.Lock()

    def run() -> None:
        with running:
            while waiting:
                try:
                    waiting.pop()()
                except Exception as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    return run
