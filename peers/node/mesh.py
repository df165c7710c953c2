"""A mesh as Python code sees it: who is there, and `train`.

The idea: `async with meshcee.join(...) as mesh` gives an agent that may own jobs. Training a job is: capture, ask the
coordinator for a plan, offer it, feed it; reports come back as an async iterator, and `mesh.result` holds the rest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from meshcee.callbacks import Callback, Control, called
from meshcee.capture import Capture, capture
from meshcee.epochs import course
from meshcee.errors import MeshceeError, StaleTermError, UsageError
from meshcee.job import Job, check_is_job
from meshcee.plan import Epoch, Plan
from meshcee.sampling.again import unrepeatable
from peers.node.agent import Agent
from peers.node.early import check_told
from peers.owner import Report, Result, Training, Wanted, next_incarnation, own
from peers.planning import Planned, ask_plan, given_plan, question

if TYPE_CHECKING:
    from meshcee.files.home import Home
    from peers.measure import Trace

__all__ = ["Mesh", "Result"]

TURNS = 3  # of the event loop, in which a generator that nobody reads any more is closed: a call, then a task


class Mesh:
    """A joined mesh. Made by `meshcee.join`, which also ends it."""

    def __init__(
        self, agent: Agent, group: asyncio.TaskGroup, home: Home | None = None, lent: Collection[str] = ()
    ) -> None:
        self.agent = agent
        self.result = Result()
        self._group = group
        self._home = home
        self._lent = lent  # peers that this process has added to the mesh for its own jobs, and that have not left
        self.training: Training | None = None
        self._running: asyncio.Task[None] | None = None  # of that
        self._beside: list[asyncio.Task[None]] = []  # it, and what writes of it

    def stop(self) -> bool:
        """Finish the running step, collect the weights, end: what the first Ctrl-C does. False when nothing runs yet."""
        return self.training is not None and self.training.stop()

    async def state(self) -> dict[str, torch.Tensor]:
        """The weights while `train` runs, as `load_state_dict` takes them: after all steps that it has yielded, or a few more.

        They come from a checkpoint that is made for it, so the run needs a folder: with `join(local=N)` that is `keeps=True`.

        >>> async for report in mesh.train(job):
        ...     if report.loss < 1.0:
        ...         weights = await mesh.state()
        ...         break
        """
        if self.training is None or self._running is None:
            raise UsageError(
                "nothing trains on this mesh yet: ask for the weights inside of `async for report in mesh.train(job)`"
            )
        draining = self._group.create_task(self._drain())  # a run waits for who reads its reports, and nobody does now
        try:
            found = await self.training.state(self._running.done)
        finally:
            draining.cancel()
        return await asyncio.to_thread(dict, found)

    async def _drain(self) -> None:
        while True:
            self._early.append(await self._reports.get())

    async def plan(self, job: Job, captured: Capture, stages: int | None = None, given: Plan | None = None) -> Planned:
        """Have the job's blocks profiled, then ask the coordinator for a plan, of exactly `stages` stages if given.

        A plan that is `given` is only checked; its peers may be named by their names.
        """
        self.agent.members.check_own("own", "offers no jobs")
        if given is not None:
            return await given_plan(self.agent, given, job, captured)
        return await ask_plan(self.agent, await question(self.agent, job, captured, stages, tuple(self._lent)))

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
        metrics, _ = await self._run_round(job, data, state, captured, stages, predicts=False)
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
        _, output = await self._run_round(replace(job, metrics={}), data, state, captured, stages, predicts=True)
        return output

    async def _run_round(
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
        from peers.owner.evaluation import EvaluationFeed, Predictions, with_state

        job = replace(job, eval_data=job.eval_data if data is None else data)
        if job.eval_data is None:
            raise UsageError("there is nothing to evaluate: give data, or set eval_data in the job")
        if captured is None or captured.evaluate is None:
            captured = await asyncio.to_thread(capture, job, evaluate=True, predicts=predicts)
        captured = with_state(captured, state)
        predictions = Predictions(captured) if predicts else None
        for attempt in range(course.REPLANS + 1):
            plan, term, _ = await self.plan(job, captured, stages)
            epoch = Epoch(next_incarnation(self._home), 1)
            owner = own(self.agent, job, captured, plan, term, epoch)
            feed = EvaluationFeed(job, captured, plan.micro_batch)
            try:
                metrics = await owner.evaluate(feed, predictions.hear if predictions else None)
            except StaleTermError:
                if attempt == course.REPLANS:
                    raise
                await self.agent.later_than(term)
            else:
                break
        return metrics, predictions.output() if predictions else None

    async def stand_by(
        self, job: Job, captured: Capture, *, tell: Callable[[str], None] = lambda text: None
    ) -> tuple[str, str] | None:
        """Follow this job's run on another machine until its owner is gone: (run, owner), for `train(resume=run, after=owner)`.

        None when the run has ended by itself. `tell` hears in sentences what the standby does. Raises UsageError when the run
        is of another job of that name or began with other weights, or when this machine could not feed its steps again.
        """
        from peers.owner.standby import same_run, stand_by

        if self._home is None:
            raise UsageError("a standby keeps the run's journal on its disk: use `meshcee train --standby`")
        if (why := await asyncio.to_thread(unrepeatable, job)) is not None:
            raise UsageError(
                f"{why}. What the run was fed lies on its owner's disk only, so a standby could not compute a step again: write "
                "this, or leave --standby out"
            )
        check = await asyncio.to_thread(same_run, job, captured)
        assert self.agent.shelf is not None
        return await stand_by(self.agent, self.agent.shelf, self._home, job.name, check, tell)

    async def end(self) -> None:
        """A job whose reports nobody reads any more is over with the mesh."""
        await _ended(self._beside)

    async def _is_free(self) -> None:
        """UsageError while a job trains, and once a loop over its reports was left, wait for the end of that."""
        if (running := self._running) is None:
            return
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if not running.done() and not running.cancelling():
            raise UsageError(
                "this mesh trains a job already, and its `result` is of one job: wait for the end, or join once more for another; "
                "of a loop that you have left, say `await reports.aclose()`"
            )
        await asyncio.wait([running])

    async def train(
        self,
        job: Job,
        *,
        captured: Capture | None = None,
        stages: int | None = None,
        plan: Plan | None = None,
        codec: str | None = None,
        resume: str | None = None,
        on_plan: Callable[[Plan, Mapping[str, str]], None] | None = None,
        trace: Trace | None = None,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
        after: str = "",
        callbacks: Sequence[Callback | Callable[[Control, Report], object] | str] = (),
        keep_best: str | None = None,
        early_stop: int | None = None,
    ) -> AsyncIterator[Report]:
        """Train, on exactly `stages` stages if given; yields one report a step. `resume` goes on with a run of this machine.

        `plan` takes the place of the coordinator's: its members may be peer ids or names. `codec` takes the place of the job's.
        `trace` hears what peers did in a few
        steps. Jobs of one mesh run one at a time: while another is before this one, `on_wait` is told in a sentence
        which. With `wait` False it begins at once, on the peers that are idle, if they can hold it.
        It also hears, once a minute, where the job's data is when a read of it does not return.
        `after` is the owner, gone, whose run `resume` names: both are what `stand_by` returns.
        `callbacks` hear of plans, steps, evaluations, checkpoints, losses and the end, and may steer the run.
        `keep_best="loss"` is the callback KeepBest("loss"). `early_stop=3` is EarlyStop of that metric, or of the loss, with this
        patience in evaluations.
        Raises the cause of a failure; leaving the loop early aborts the job.
        """
        check_is_job(job)
        check_told(stages, plan)
        self.agent.members.check_own("own", "offers no jobs")
        await self._is_free()
        if codec is not None:
            job = replace(job, codec=codec)
        self._reports = reports = asyncio.Queue[Report | MeshceeError | None](maxsize=64)
        self._early = early = deque[Report | MeshceeError | None]()
        listening, story = called(callbacks), None
        if keep_best is not None or early_stop is not None:
            from meshcee.callbacks.rules import rules

            listening = (*listening, *rules(keep_best, early_stop, job.metrics))
        if self._home is not None:
            from peers.owner.story import Story

            story = Story(self.agent, self._home)
            listening = (*listening, story)
        training = Training(
            self.agent,
            self._home,
            tuple(self._lent),
            job,
            captured,
            Wanted(stages, plan, resume, after),
            on_plan=on_plan,
            reports=reports,
            on_wait=(on_wait or (lambda text: None)) if wait else None,
            on_stall=on_wait,
            trace=trace,
            callbacks=listening,
        )
        self.training, self.result = training, training.result
        self._running = task = self._group.create_task(training.run())
        beside = self._beside = [task] if story is None else [task, self._group.create_task(story.run(training))]
        try:
            while (item := early.popleft() if early else await reports.get()) is not None:
                if isinstance(item, MeshceeError):
                    raise item
                if story is not None:
                    story.hear(item)
                yield item
        finally:
            await _ended(beside)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
