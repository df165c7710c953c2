"""A mesh as Python code sees it: who is there, and `train`.

The idea: `async with meshcee.join(...) as mesh` gives an agent that may own jobs. Training a job is: capture, ask the
coordinator for a plan, offer it, feed it; reports come back as an async iterator, and `mesh.result` holds the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import structlog
import torch

from meshcee.capture import Capture, capture
from meshcee.errors import MeshceeError, StaleTermError, UsageError
from meshcee.job import Job
from meshcee.plan import Plan
from peers.agent import Agent, run_record
from peers.coordinator import PlanRequest, request_plan
from peers.evaluation import EvaluationFeed, Predictions, with_state
from peers.feed import Feed
from peers.home import Home, Run
from peers.offer import check_generators
from peers.owner import Owner, Report
from peers.view import report_json

__all__ = ["Mesh", "Result"]

log = structlog.get_logger()

REPLANS = 3  # when the coordinator changes between planning and offering


@dataclass
class Result:
    """What a job leaves: one loss a step, evaluations by step, the trained weights under their original names."""

    losses: list[float] = field(default_factory=list)
    metrics: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    state_dict: dict[str, torch.Tensor] = field(default_factory=dict)
    plan: Plan | None = None
    names: dict[str, str] = field(default_factory=dict)
    stopped: bool = False  # ended early, at the user's wish, with everything up to the last step saved

    @property
    def micro_batch_size(self) -> int:
        assert self.plan is not None
        return self.plan.micro_batch


class Mesh:
    """A joined mesh. Made by `meshcee.join`, which also ends it."""

    def __init__(
        self, agent: Agent, group: asyncio.TaskGroup, home: Home | None = None, lent: tuple[str, ...] = ()
    ) -> None:
        self.agent = agent
        self.result = Result()
        self._group = group
        self._home = home
        self._lent = lent  # peers that this process has added to the mesh for its own jobs
        self._owner: Owner | None = None

    def stop(self) -> bool:
        """Finish the running step, collect the weights, end: what the first Ctrl-C does. False when nothing runs yet."""
        if self._owner is None:
            return False
        self._owner.stop()
        return True

    async def plan(self, job: Job, captured: Capture, stages: int | None = None) -> tuple[Plan, tuple[int, str]]:
        """Ask the mesh's coordinator for a plan, with the term under which it was made."""
        request = PlanRequest.of(job, captured.costs, stages, self._lent)
        plan, term = await request_plan(self.agent, request)
        await self.agent.wait_for_peers(plan.peers)
        return plan, term

    async def evaluate(
        self,
        job: Job,
        data: Any = None,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        captured: Capture | None = None,
        stages: int | None = None,
    ) -> dict[str, float]:
        """The loss and the job's metrics over `data` (default: the job's eval_data), in the model's eval mode.

        `state` holds other weights than the model's, e.g. a trained `result.state_dict`.
        """
        metrics, _ = await self._walk_once(job, data, state, captured, stages, predicts=False)
        return metrics

    async def predict(
        self,
        job: Job,
        data: Any = None,
        *,
        state: Mapping[str, torch.Tensor] | None = None,
        captured: Capture | None = None,
        stages: int | None = None,
    ) -> Any:
        """What the model returns for `data`, as one output in the order of the samples; otherwise as `evaluate`.

        Samples are pairs (x, y), as in training: the captured graph includes the loss.
        """
        _, output = await self._walk_once(replace(job, metrics={}), data, state, captured, stages, predicts=True)
        return output

    async def _walk_once(
        self,
        job: Job,
        data: Any,
        state: Mapping[str, torch.Tensor] | None,
        captured: Capture | None,
        stages: int | None,
        *,
        predicts: bool,
    ) -> tuple[dict[str, float], Any]:
        """Plan, offer, evaluate; again when the coordinator has changed in between."""
        job = replace(job, eval_data=job.eval_data if data is None else data)
        if job.eval_data is None:
            raise UsageError("there is nothing to evaluate: give data, or set eval_data in the job")
        if captured is None or captured.evaluate is None:
            captured = await asyncio.to_thread(capture, job, evaluate=True)
        captured = with_state(captured, state)
        predictions = Predictions(captured) if predicts else None
        for attempt in range(REPLANS + 1):
            plan, term = await self.plan(job, captured, stages)
            epoch = (self._home.next_incarnation() if self._home is not None else 1, 1)
            owner = self._own(job, captured, plan, term, epoch, self.agent.names())
            feed = EvaluationFeed(job, captured, plan.micro_batch)
            try:
                metrics = await owner.evaluate(feed, predictions.hear if predictions else None)
            except StaleTermError:
                if attempt == REPLANS:
                    raise
            else:
                break
        return metrics, predictions.output() if predictions else None

    def _own(
        self,
        job: Job,
        captured: Capture,
        plan: Plan,
        term: tuple[int, str],
        epoch: tuple[int, int],
        names: Mapping[str, str],
    ) -> Owner:
        return Owner(
            job,
            captured,
            plan,
            term,
            epoch,
            self.agent.transport,
            addresses=self.agent.addresses_of(plan.peers),
            names=names,
            timeouts=self.agent.timeouts,
            limits=self.agent.limits,
        )

    async def train(
        self,
        job: Job,
        *,
        captured: Capture | None = None,
        stages: int | None = None,
        on_plan: Callable[[Plan, Mapping[str, str]], None] | None = None,
    ) -> AsyncIterator[Report]:
        """Train on at most `stages` stages; yields one report a step.

        Raises the cause of a failure; leaving the loop early aborts the job.
        """
        reports: asyncio.Queue[Report | MeshceeError | None] = asyncio.Queue(maxsize=64)
        task = self._group.create_task(self._train(job, captured, stages, on_plan, reports))
        try:
            while (item := await reports.get()) is not None:
                if isinstance(item, MeshceeError):
                    raise item
                yield item
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _train(
        self,
        job: Job,
        captured: Capture | None,
        stages: int | None,
        on_plan: Callable[[Plan, Mapping[str, str]], None] | None,
        reports: asyncio.Queue[Report | MeshceeError | None],
    ) -> None:
        run: Run | None = None
        try:
            if captured is None:
                captured = await asyncio.to_thread(capture, job)
            for attempt in range(REPLANS + 1):
                plan, term = await self.plan(job, captured, stages)
                kinds = {peer: self.agent.device_of(peer).kind for peer in plan.peers}
                check_generators(captured.train, plan, kinds)
                names = self.agent.names()
                self.result = Result(plan=plan, names=names)
                if on_plan is not None:
                    on_plan(plan, names)
                if self._home is not None and run is None:
                    run = self._home.new_run(job.name, steps=job.steps, plan=plan.to_json(), names=names)
                try:
                    await self._train_planned(job, captured, plan, term, run, reports)
                except StaleTermError:  # another coordinator came between planning and offering; nothing has run yet
                    if attempt == REPLANS:
                        raise
                else:
                    break
            if run is not None:
                run.end("stopped" if self.result.stopped else "done")
            await reports.put(None)
        except MeshceeError as error:
            if run is not None:
                run.end("failed", error=str(error))
            await reports.put(error)
        except BaseException as error:
            if run is not None:
                run.end("aborted", error=repr(error))
            raise
        finally:
            self._owner = None
            await self.agent.announce_run(None)

    async def _train_planned(
        self,
        job: Job,
        captured: Capture,
        plan: Plan,
        term: tuple[int, str],
        run: Run | None,
        reports: asyncio.Queue[Report | MeshceeError | None],
    ) -> None:
        """One epoch: offer this plan, feed it to the end."""
        epoch = (self._home.next_incarnation() if self._home is not None else 1, 1)
        announced_s = 0.0

        async def hear(report: Report) -> None:
            nonlocal announced_s
            self.result.losses.append(report.loss)
            if report.metrics:
                self.result.metrics.append((report.step, dict(report.metrics)))
            if run is not None:
                run.report(report_json(report))
            now_s = time.monotonic()
            if now_s - announced_s > self.agent.timeouts.announce_every_s:
                announced_s = now_s
                record = run_record(self.agent.peer_id, job.name, epoch, report.step, report.loss, plan)
                await self.agent.announce_run(record)
            await reports.put(report)

        self._owner = self._own(job, captured, plan, term, epoch, self.result.names)
        self.result.state_dict = await self._owner.train(Feed(job, captured, plan.micro_batch), hear)
        self.result.stopped = self._owner.was_stopped
