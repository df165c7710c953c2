"""What an owner knows of its run, as metrics of Prometheus: it hears of the run as any callback does.

The idea: steps, losses and recoveries are counted as they are told, which is once each. The age of the copies, and what memory the
plan accounts with, are worked out when somebody asks.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshcee.callbacks import Callback, Control
from meshcee.errors import MeshceeError
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.planner import needs, situation
from peers.cli.meters.health import FIRST_S, SLOW, Health, of_run
from peers.cli.view import GONE, called

if TYPE_CHECKING:
    from peers.node import Mesh

__all__ = ["RunMeter"]

BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)  # seconds of a step
REMEMBERED = 4096  # steps whose end is known; copies are newer


class _Counts:
    """What is counted as it is told."""

    def __init__(self, registry: CollectorRegistry) -> None:
        of: Any = {"registry": registry}
        self.seconds = Histogram("meshcee_run_step_seconds", "Seconds that steps took.", buckets=BUCKETS, **of)
        self.loss = Gauge("meshcee_run_loss", "Loss of the last step.", **of)
        self.samples = Counter("meshcee_run_samples", "Samples that steps have trained on.", **of)
        self.epochs = Counter("meshcee_run_epochs", "Plans that the run has had, one after the other.", **of)
        self.recoveries = Counter("meshcee_run_recoveries", "Changes of plan, by what caused them.", ["kind"], **of)
        for kind in ("lost", "replanned", "drained"):
            self.recoveries.labels(kind)


class RunMeter(Callback, Collector):
    """Give it to `mesh.train` as a callback, and the mesh itself before that."""

    waits: ClassVar[str] = "never"

    def __init__(self, mesh: Mesh, job: Job, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._mesh, self._job, self._monotonic = mesh, job, monotonic
        self._plan: Plan | None = None
        self._accounted: tuple[Plan, Mapping[str, float]] | None = None
        self._ends: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # (steps that are done, when)
        self._on_disk: int | None = None
        self._since_s = monotonic()
        self._is_asked = False  # how it is, since it neither waits for its turn nor stands by
        self._step_s: float | None = None
        self._lost: tuple[str, ...] = ()  # since the last plan
        self._changed = 0  # plans that the run has gone over to for speed
        self.registry = CollectorRegistry()
        self._counts = _Counts(self.registry)
        self.registry.register(self)

    # -- as a callback, in other threads

    def on_plan(self, run: Control, plan: Any) -> None:
        self._since_s, self._plan = self._monotonic(), plan
        self._counts.epochs.inc()

    def on_change(self, run: Control, plan: Any) -> None:
        gone = self._plan is not None and not {*self._plan.peers} <= {*plan.peers}
        changed = len(self._mesh.result.changes)
        kind = "lost" if self._lost else "replanned" if changed > self._changed else "drained" if gone else "replanned"
        self._changed, self._lost = changed, ()
        self._counts.recoveries.labels(kind).inc()
        self.on_plan(run, plan)

    def on_step(self, run: Control, report: Any) -> None:
        self._since_s, self._step_s = self._monotonic(), report.step_s
        self._ends.append((report.step + 1, self._since_s))
        self._counts.seconds.observe(report.step_s)
        self._counts.loss.set(report.loss)
        self._counts.samples.inc(self._job.batch_size)

    def on_checkpoint(self, run: Control, steps: int, folder: Path) -> None:
        self._on_disk = steps

    def on_loss(self, run: Control, error: str, peers: Sequence[str]) -> None:
        self._lost = (*self._lost, *(peers or ("a member",)))

    # -- for who asks, on the event loop

    @property
    def members(self) -> tuple[str, ...]:
        """Of the running plan."""
        return tuple(self._plan.peers) if self._plan is not None else ()

    def health(self) -> Health:
        step, steps, every = self._ends[-1][0] if self._ends else 0, self._job.steps, self._job.eval_every
        now_s, is_planned = self._monotonic(), self._plan is not None
        if not is_planned and (self._waits or not self._is_asked):
            self._since_s = now_s  # its time begins when it is asked for the first time after that
        self._is_asked = is_planned or not self._waits
        since_s = now_s - self._since_s
        step_s = self._step_s
        if step_s is not None and every and ((step + 1) % every == 0 or step + 1 >= steps):  # it evaluates
            step_s = max(step_s, FIRST_S / SLOW)
        return of_run(since_s, step_s, step, steps, ", ".join(self._lost), is_planned=is_planned)

    @property
    def _waits(self) -> bool:
        """For its turn, or for the death of an owner that it stands by."""
        if self._mesh.training is None:
            return True
        record = self._mesh.agent.directory.runs.get(self._mesh.agent.peer_id)
        return record is not None and record.state == "waiting"

    def collect(self) -> Iterator[Metric]:
        step = GaugeMetricFamily("meshcee_run_step", "Steps that are done.", self._ends[-1][0] if self._ends else 0)
        yield step
        yield GaugeMetricFamily("meshcee_run_steps", "Steps that the job has.", self._job.steps)
        expected = self._plan.predicted if self._plan is not None else None
        yield GaugeMetricFamily(
            "meshcee_run_step_expected_seconds",
            "Of a step, as the plan says.",
            expected.step_s if expected else math.nan,
        )
        age = GaugeMetricFamily(
            "meshcee_run_copies_age_seconds", "Since the newest state was there that a copy holds.", labels=["place"]
        )
        for place, steps in self._copies().items():
            age.add_metric([place], self._monotonic() - self._end_of(steps))
        yield age
        memory = GaugeMetricFamily(
            "meshcee_memory_accounted_bytes", "Memory that the plan counts with on a member.", labels=["peer"]
        )
        names = called(self._mesh.agent.names())
        for peer, needed in self._needs().items():
            memory.add_metric([names.get(peer, GONE)], needed)
        yield memory

    def _copies(self) -> dict[str, int]:
        """By place, before which step: with members, in another region, on this disk."""
        training, found = self._mesh.training, dict[str, int]()
        if training is not None:
            if (near := training.copies.newest(len(training.result.losses))) is not None:
                found["members"] = near.next_step
            if far := training.copies.far_steps:
                found["far"] = max(far)
        if self._on_disk is not None:
            found["disk"] = self._on_disk
        return found

    def _end_of(self, steps: int) -> float:
        """When so many steps were done; of what was done before this process, when it began."""
        return next((at for done, at in list(self._ends) if done >= steps), self._since_s)

    def _needs(self) -> Mapping[str, float]:
        """Worked out once a plan."""
        plan, training = self._plan, self._mesh.training
        if plan is None or training is None:
            return {}
        if self._accounted is None or self._accounted[0] is not plan:
            needed: Mapping[str, float] = {}
            try:
                request, measured = training.request, self._mesh.agent.measured(plan.peers)
                job = replace(request.job, micro_batch=plan.micro_batch, threads=plan.threads)
                needed = needs(plan, *situation(replace(measured, times=request.times, feeds=request.feeds), job))
            except (MeshceeError, AttributeError):  # a plan that was given may use what nobody measures
                needed = {}
            self._accounted = plan, needed
        return self._accounted[1]
