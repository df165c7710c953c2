"""A week's run on virtual time: a million steps in 500 epochs, on the owner's side of a job, where a run is long.

`python -m benchmarks.soak [--steps 1000000] [--epochs 500] [--samples 10000000]` prints a JSON line now and then, one at the end:
resident memory, the longest that the event loop was kept by one callback, and what the run's folder holds. Planning, recovery, the
feed with its schedule and permutations, reports, checkpoints on the disk and what is told of a step are the product; members
are none: a fake owner feeds each step, waits 10 ms of virtual time and reports a loss that follows from what was fed.
An epoch ends with the loss of a peer, so some steps are computed again, and must give the same loss.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import sys
import tempfile
import time
from asyncio.events import Handle
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
from torch import nn

from benchmarks.virtual_chaos import now, quick_planning
from meshcee.capture import Capture
from meshcee.errors import PeerLostError
from meshcee.figures.observed import Observed
from meshcee.files.home import Home
from meshcee.job import Job
from meshcee.optim import Optimizer
from meshcee.optim.rates import Schedule
from meshcee.plan import Plan
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from peers.owner.answers import Report
from peers.owner.feed import Feed
from peers.state.checkpoint import CheckpointStore
from peers.state.keeping import Supplies
from peers.transport.memory import MemoryNetwork
from peers.wire.failures import Failures
from peers.wire.messages import Round
from tests.rig.resident import allocated
from tests.rig.virtual_time import quiet, run

__all__ = ["Soak", "soak"]

STEP_S = 0.01
FINE_S = 0.01  # pauses are told to within so much
LOOKS = 20  # at memory
AT_ONCE = 10  # steps that are read while the one before them is awaited
BEHIND = 20  # steps between an epoch's last checkpoint and its end


class Samples:
    """Many, and none of them kept."""

    def __init__(self, count: int, width: int) -> None:
        self._count, self._width = count, width

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((self._width,), i % 97 / 97), i % 3


def job_of(steps: int, samples: int, width: int) -> Job:
    torch.manual_seed(0)
    return Job(
        model=nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8), nn.Linear(8, 3)),
        loss=nn.functional.cross_entropy,
        data=Samples(samples, width),
        optimizer=Optimizer("AdamW", lr=1e-3, groups={"*.bias": {"weight_decay": 0.0}}),
        schedule=Schedule("CosineAnnealingLR", T_max=steps),
        batch_size=8,
        micro_batch_size=8,
        steps=steps,
        codec="none",
    )


class FakeOwner:
    """An epoch without members: what it feeds is what it hears. It is lost after so many new steps."""

    def __init__(self, job: Job, captured: Capture, plan: Plan, kept: Supplies, epoch_steps: int) -> None:
        self.plan = plan
        self.failures = Failures()
        self.audit = None
        self.leaving: set[str] = set()
        self.stopped, self.has_weights = False, True
        self.saved = ()  # of its checkpoints nobody is told
        self.can_be_followed = True
        self.ready_s = now()
        self._job = job
        self._captured = captured
        self._kept = kept
        self._end = min(job.steps, (kept.least // epoch_steps + 1) * epoch_steps)

    def averages(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {}

    def stop(self, *, hand_over: bool = False) -> None:
        self.stopped = True

    async def train(self, feed: Feed, report: Callable[[Report], Awaitable[None]]) -> Mapping[str, torch.Tensor]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as users:
            rounds = feed.rounds()

            def next_few() -> list[tuple[Round, float]]:
                return [(s, float(feed.inputs(s, 0)["x"].sum())) for s in itertools.islice(rounds, AT_ONCE)]

            while few := await loop.run_in_executor(users, next_few):
                for spec, fed in few:
                    if spec.step == self._end - BEHIND:
                        await asyncio.to_thread(self._checkpoint, spec.step)
                    if spec.step == self._end:
                        lost = PeerLostError("the soak ends this epoch")
                        self.failures.add(1, lost)
                        raise lost
                    await asyncio.sleep(STEP_S)
                    await report(self._report(spec.step, fed * spec.hyper[0]["lr"]))
        return {}

    def _report(self, step: int, loss: float) -> Report:
        took = dict.fromkeys(self.plan.peers, STEP_S / 2)
        left_s = STEP_S * (self._job.steps - step)
        return Report(step, self._job.steps, loss, STEP_S, 8 / STEP_S, left_s, "p0 computes", observed=Observed(took))

    def _checkpoint(self, next_step: int) -> None:
        assert self._kept.store is not None
        draft = self._kept.store.draft(next_step)
        draft.finish(self._captured.state, self._captured.layout)


class Look(NamedTuple):
    steps: int  # done
    resident: float  # bytes
    allocated: float  # bytes: what is in use, where resident ones are pages, some of which nobody uses
    objects: float  # of Python's


@dataclass
class Soak:
    """What was seen of a run. Bytes are of this process; a pause is one callback of the event loop, in its own seconds of CPU."""

    steps: int = 0
    epochs: int = 0
    pause_s: float = 0.0
    wall_pause_s: float = 0.0
    paused_by: str = ""
    looks: list[Look] = field(default_factory=list)
    _looked: bool = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Every callback of every loop is timed."""
        run_one, read_s = Handle._run, [0.0, 0.0]  # by the wall's clock, by the thread's

        def timed(handle: Handle) -> None:
            began_s = time.perf_counter()
            if began_s - read_s[0] > FINE_S:  # a system call, so not before every callback
                read_s[:] = began_s, time.thread_time()
            run_one(handle)
            took_s = time.perf_counter() - began_s
            if self._looked:
                self._looked = False
            elif self.steps and took_s > FINE_S:
                self.wall_pause_s = max(self.wall_pause_s, took_s)
                cpu_s = min(took_s, time.thread_time() - read_s[1])
                if cpu_s > self.pause_s:
                    self.pause_s, self.paused_by = cpu_s, _name_of(handle)

        with mock.patch.object(Handle, "_run", timed):
            yield

    def look(self) -> None:
        gc.collect()
        resident = psutil.Process().memory_info().rss
        self.looks.append(Look(self.steps, resident, allocated(), sys.getallocatedblocks()))
        self._looked = True  # this callback's time is ours

    @property
    def growth(self) -> Look:
        """What grew a step, from a tenth of the run on, when all that is made once is there; of so many steps."""
        first = next(found for found in self.looks if found.steps >= self.steps // 10)
        steps, *grew = (after - before for before, after in zip(first, self.looks[-1]))
        return Look(steps, *(of / max(1, steps) for of in grew))


def _name_of(handle: Handle) -> str:
    """Of what ran: a task by its coroutine."""
    callback = getattr(handle, "_callback", None)
    task = getattr(callback, "__self__", None)
    return task.get_coro().__qualname__ if isinstance(task, asyncio.Task) else repr(callback)


async def soak(
    folder: Path, steps: int, epochs: int, samples: int, tell: Callable[[Soak], None] = lambda _: None, width: int = 4
) -> Soak:
    """A job of so many steps, which loses a peer so often; a sample has so many figures."""
    seen, job = Soak(), job_of(steps, samples, width)

    def own(
        agent: Any, job: Job, captured: Capture, plan: Plan, term: Any, epoch: Any, *args: Any, **more: Any
    ) -> FakeOwner:
        seen.epochs += 1
        return FakeOwner(job, captured, plan, more["kept"], steps // epochs)

    looks = max(1, steps // LOOKS)
    with mock.patch("peers.owner.job_run.own", own), seen.watched():
        async with InProcess(JoinOptions(), MemoryNetwork(), clock=now, monotonic=now) as here:
            for i in range(2):
                await here.start(f"p{i}")
            mesh = await here.own("owner", Home(folder))
            async for report in mesh.train(job, stages=2):
                seen.steps = report.step + 1
                if seen.steps % looks == 0:
                    seen.look()
                    tell(seen)
            told = mesh.result.losses
    # A million lines: no part of the run, so no pause of its loop.
    await asyncio.to_thread(_check, folder, told, steps, epochs)
    return seen


def _check(folder: Path, told: list[float], steps: int, epochs: int) -> None:
    """What the run's folder holds is what was told."""
    assert len(told) == steps
    run_folder = Home(folder).run("last")
    assert CheckpointStore(run_folder.checkpoints).complete()[0].next_step > steps - steps // epochs
    assert [line["loss"] for line in run_folder.reports()] == told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--samples", type=int, default=10_000_000)
    options = parser.parse_args()
    began_s = time.perf_counter()

    def tell(seen: Soak) -> None:
        data = {
            "steps": seen.steps,
            "epochs": seen.epochs,
            "resident_mib": round(seen.looks[-1].resident / 2**20, 1),
            "pause_s": round(seen.pause_s, 3),
            "wall_pause_s": round(seen.wall_pause_s, 3),
            "seconds": round(time.perf_counter() - began_s, 1),
        }
        print(json.dumps(data), flush=True)

    with tempfile.TemporaryDirectory(prefix="meshcee-soak-") as folder, quick_planning(), quiet():
        seen = run(soak(Path(folder), options.steps, options.epochs, options.samples, tell))
    tell(seen)
    a_step = {f"{what}_a_step": round(of, 2) for what, of in seen.growth._asdict().items() if what != "steps"}
    print(json.dumps(a_step | {"paused_by": seen.paused_by}))


if __name__ == "__main__":
    main()
