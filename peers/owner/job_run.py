"""One job from its first plan to its last step, over as many epochs as it takes.

The idea: what a user is told of a step happens once, whatever the mesh has to do for it twice. Losses that were
reported are remembered; a step that is computed again must give the same loss, or the run ends and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from meshcee.capture import Capture, capture
from meshcee.equality import cuts_of, examine, sizes_of
from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError, StaleTermError, UsageError
from meshcee.figures import BlockTimes, DeviceProfile, class_of
from meshcee.files import Home, Run, Trouble, disk, settled
from meshcee.job import Job
from meshcee.plan import Plan
from meshcee.sampling import FED, Fed, HyperSchedule, repeats
from meshcee.stage import check_generators
from peers.measure import Trace
from peers.mesh_view import MeshView
from peers.owner.adaptation import Adaptation, Newcomers
from peers.owner.diary import Diary, Told
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed, Stalls
from peers.owner.recovery import Recovery
from peers.owner.result import Result
from peers.owner.turn import Turn
from peers.planning import Planned, PlanRequest, ask_plan, given_plan, profile, question
from peers.state import (
    Buddies,
    Cadence,
    Checkpoint,
    CheckpointStore,
    Copied,
    Copies,
    Journal,
    Kept,
    Ledger,
    buddies_with_room,
    check_same,
    description,
    noted,
)
from peers.wire import Failures

__all__ = ["REPLANS", "Result", "Training", "next_incarnation", "own"]

log = structlog.get_logger()

REPLANS = 3  # when the coordinator changes between planning and offering
UNLIKE = 1e-3  # how much a repeated loss may differ, relatively, where devices or codecs round differently

Reports = asyncio.Queue[Report | MeshceeError | None]


def own(
    agent: MeshView,
    job: Job,
    captured: Capture,
    plan: Plan,
    term: tuple[int, str],
    epoch: tuple[int, int],
    sources: Iterable[str] = (),
    **more: Any,
) -> Owner:
    """The owner of one epoch, over the agent's transport; `sources` are peers that hold copies for its members."""
    return Owner(
        job,
        captured,
        plan,
        term,
        epoch,
        agent.transport,
        addresses=agent.addresses_of([*plan.peers, *sources]),
        names=agent.names(),
        timeouts=agent.timeouts,
        limits=agent.limits,
        **more,
    )


_incarnations = itertools.count(1)


def next_incarnation(home: Home | None, after: int = 0) -> int:
    """Higher than any before: on disk where there is a home, else in this process, which then is all there is."""
    return home.next_incarnation(after) if home is not None else next(_incarnations)


class Training:
    """`run` in a task; reports, and then None or the error that ended it, go to `reports`."""

    def __init__(
        self,
        agent: MeshView,
        home: Home | None,
        lent: tuple[str, ...],
        job: Job,
        captured: Capture | None,
        *,
        stages: int | None,
        plan: Plan | None,
        resume: str | None,
        on_plan: Callable[[Plan, Mapping[str, str]], None] | None,
        reports: Reports,
        on_wait: Callable[[str], None] | None,
        trace: Trace | None = None,
        after: str = "",
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        self.result = Result()
        self._stalls = Stalls(on_stall or log.warning)
        self._agent = agent
        self._home = home
        self._lent = lent
        given_threads = plan.threads if plan is not None and plan.threads else None
        groups = job.groups or (plan is not None and plan.sums_gradients)
        self._job = replace(job, groups=groups, threads=given_threads or job.threads)
        self._captured = captured
        self._stages = stages
        self._given = plan
        self._resume = resume
        self._trace = trace
        self._on_plan = on_plan
        self._reports = reports
        self._owner: Owner | None = None
        self._diary: Diary | None = None  # of the run, once it has a folder
        self._trouble = Trouble(asyncio.get_running_loop().time)  # which threads may ask, too
        self._store: CheckpointStore | None = None  # of the newest epoch
        self._base: Checkpoint | Copied | None = None  # what the next epoch begins with; None: the model as captured
        self._durable: Checkpoint | None = None  # the newest on the disk
        self._repeats = True  # data[i] is the same whenever it is read; else what was fed is kept
        self._fed: Fed | None = None
        self._hyper = HyperSchedule(job.optimizer, job.schedule)
        self._known = Told()  # the loss of every step that has been reported
        self._kinds: set[tuple[str, str, int]] = set()  # of devices that have computed it
        self._shares = self._coded = False  # whether a plan of it had groups, or codecs: sums and roundings are its own
        self._epoch_number = (0, 0)
        self._turn = Turn(agent, job.name, on_wait, after)
        self._after = after  # the owner whose run it goes on with, if that is another peer
        self._journal = Journal(agent)
        self._last = 0  # the incarnation of the run's owner before this one
        self._recovery = Recovery(agent)
        self._cadence = Cadence(job.checkpoint_every)
        self._ledger = Ledger(agent, self._trouble)
        self._key = secrets.token_hex(16)  # the name by which members know the run, over all its epochs and owners
        self._copies = Copies(self._ledger.note)
        self._noted: list[Copied] = []  # what an owner that has died knew of them
        self._request: PlanRequest
        self._stopping = False
        self._reported_s: float | None = None  # when the last step was
        self._adaptation: Adaptation | None = None
        self._newcomers: Newcomers | None = None
        self._next: Planned | None = None  # to go over to at the next step's end

    def stop(self) -> bool:
        """Finish the running step, collect the weights, end. False when nothing runs yet."""
        if self._owner is None:
            return False
        self._stopping = True
        self._owner.stop()
        return True

    async def run(self) -> None:
        failure: MeshceeError | None = None
        try:
            if self._captured is None:
                self._captured = await asyncio.to_thread(capture, self._job)
            if self._resume is not None:
                await asyncio.to_thread(self._go_on, self._resume, self._captured)
            look = partial(repeats, self._job, keeps=self._home is not None)
            reading = asyncio.get_running_loop().run_in_executor(None, look)
            self._repeats = await self._stalls.watch(reading)
            with settled():
                await self._epochs()
            self._ended("stopped" if self.result.stopped else "done")
        except MeshceeError as error:
            self._ended("failed", error=str(error))
            failure = error
        except BaseException as error:
            self._ended("aborted", error=repr(error))
            raise
        finally:
            if self._diary is not None:
                self._diary.close()
            self._owner = None
            if self._newcomers is not None:
                self._newcomers.close()
            await self._journal.end()
            await self._turn.end()
        await self._reports.put(failure)  # the last thing: whoever hears it may cancel this

    def _ended(self, state: str, **more: Any) -> None:
        if self._diary is not None and self._diary.is_begun:
            self._diary.end(state, **more)

    # -- resuming ------------------------------------------------------------------------------------------------------

    def _go_on(self, wanted: str, captured: Capture) -> None:
        """Find the run and its checkpoint, see that they fit this job, take up what was reported."""
        if self._home is None:
            raise UsageError("only a run that this machine keeps can be resumed; join a mesh, or use the command line")
        run_id, _, step = wanted.partition("@")
        run = self._home.run(run_id)
        self._diary = Diary(run, self._trouble)
        store, info = CheckpointStore(run.checkpoints), run.info
        if step or store.complete() or "job" not in info:
            begins, kinds = self._from_disk(store.find(step, run.id), run, captured)
        else:  # its owner died before the first checkpoint, or elsewhere: the copies are all that there is, or its first step
            check_same(self._job, captured, info["job"], info["micro_batch"])
            threads = self._same_threads(info["devices"], run.id)
            self._job = replace(self._job, micro_batch_size=info["micro_batch"], threads=threads)
            begins, kinds = 0, info["devices"]
        reports = run.reports()
        for line in reports:
            self._known[line["step"]] = line["loss"]
        self._key, self._last = str(info.get("key", self._key)), int(info.get("incarnation", 0))
        told = next(s for s in itertools.count(begins) if s not in self._known)
        self._noted = [] if step else noted(run.folder, self._key, begins, told)
        done = max([begins, *(copied.next_step for copied in self._noted)])
        for line in reports:
            if line.get("metrics") and line["step"] < done:
                self.result.metrics.append((line["step"], line["metrics"]))
        self.result.losses = [self._known[s] for s in range(done)]
        self._kinds = {(k, n, t) for k, n, t in kinds}
        self._shares, self._coded = info.get("rounds", (False, False))

    def _from_disk(self, base: Checkpoint, run: Run, captured: Capture) -> tuple[int, Sequence[Any]]:
        """Begin with this checkpoint; its step, and the kinds of devices that have computed the run."""
        base.check(self._job, captured)
        threads = self._same_threads(base.manifest["devices"], run.id)
        if base.next_step >= self._job.steps:
            raise UsageError(
                f"run {run.id} has done its {base.next_step} steps; raise `steps` of the job to train on, or use "
                f"`meshcee checkpoint export {run.id}`"
            )
        base.verify()
        self._base = self._durable = base
        self._job = replace(self._job, micro_batch_size=base.micro_batch, threads=threads)
        self._captured = replace(captured, state=base.weights(captured.state))
        return base.next_step, base.manifest["devices"]

    def _same_threads(self, kinds: Sequence[Any], run: str) -> int | None:
        """The number of threads that these kinds of devices have had; another one would go on with other bits."""
        had = {threads for kind, _, threads in kinds if kind == "cpu"}
        if len(had) != 1:
            return self._job.threads
        if self._job.threads not in (None, *had):
            raise UsageError(
                f"run {run} computes with {min(had)} threads, and {self._job.threads} were asked for: they give other bits; leave "
                "--threads, or `threads` of the job, out"
            )
        return int(min(had))

    # -- epochs --------------------------------------------------------------------------------------------------------

    async def _epochs(self) -> None:
        """One epoch after the other until the job is done; raises what no further epoch would mend."""
        captured = self._captured
        assert captured is not None
        stale = done = 0
        plan, term, self.result.notes = await self._first_plan(captured)
        if self._noted:
            self._copies.restore(self._noted, self._agent.directory.peers.keys())
            self._base = self._copies.newest(len(self.result.losses)) or self._base
        if self._job.verify:  # once: it tries the finest cut too, which covers what later plans cut
            await self._look_at_module(captured, plan)
        while True:
            try:
                devices = {peer: self._agent.device_of(peer) for peer in plan.peers}
            except PeerLostError as error:
                plan, term, self.result.notes = await self._go_on_without(error, plan, Failures())
                continue
            check_generators(captured.train, plan, {peer: device.kind for peer, device in devices.items()})
            try:
                await self._epoch(captured, plan, term, devices)
                assert self._owner is not None
                over = self._stopping and not self._owner.handed_over
                if self._next is None or over or len(self.result.losses) == self._job.steps:
                    return
                lost = None
                if not self._leave_out(plan, self._next.plan):
                    plan, term, self.result.notes = self._next
                    self._next = None
                    self._base = await self._newest()
                    continue
            except (
                StaleTermError
            ):  # another coordinator came between planning and offering; nothing of this epoch has run yet
                stale, done = stale + 1 if len(self.result.losses) == done else 1, len(self.result.losses)
                if stale > REPLANS:
                    raise
                await self._agent.later_than(term)
                lost = None
            except PeerLostError as error:
                lost = error
            except PlanError as error:  # somebody else was quicker
                if not self._recovery.count and not await self._turn.wait():
                    raise
                self._recovery.free = ()
                lost = PeerLostError(str(error)) if self._recovery.count else None
            except MeshceeError as error:
                lost = self._one_peers(error)
            if lost is None and not self._recovery.count:
                plan, term, self.result.notes = await self._plan(captured)
            else:
                assert self._owner is not None
                plan, term, self.result.notes = await self._go_on_without(lost, plan, self._owner.failures)

    async def _look_at_module(self, captured: Capture, plan: Plan) -> None:
        """Raise UnequalError where the captured model is not the user's module."""
        left_out: list[str] = []
        await asyncio.to_thread(examine, self._job, captured, sizes_of(plan), cuts_of(plan), say=left_out.append)
        self.result.notes = (*self.result.notes, *left_out)

    async def _profile(self) -> Mapping[str, BlockTimes]:
        """Of the job's blocks on the devices that are idle now; whoever was asked before remembers."""
        assert self._captured is not None
        found = await profile(self._agent, self._job, self._captured, self._request.job)
        self._request = replace(self._request, times={**self._request.times, **found})
        return found

    async def _first_plan(self, captured: Capture) -> Planned:
        """Once it is this job's turn. Where the owner before this one was another peer, once its members have noticed."""
        if self._after and self._diary is not None:
            await self._turn.wait()
            members = Plan.from_json(self._diary.run.info["plan"]).peers
            await self._recovery.take_over(members)
            self._request = await question(self._agent, self._job, captured, self._stages, self._lent)
            return await self._recovery.plan(self._request)
        while True:
            await self._turn.wait()
            self._request = await question(self._agent, self._job, captured, self._stages, self._lent)
            try:
                return await self._plan(captured)
            except PlanError:
                if not await self._turn.wait():  # somebody else was quicker
                    raise

    async def _plan(self, captured: Capture) -> Planned:
        if self._given is not None:
            return await given_plan(self._agent, self._given, self._job, captured)
        job = replace(
            self._request.job, micro_batch=self._job.micro_batch_size
        )  # that of the first plan, if there was one
        return await ask_plan(self._agent, replace(self._request, job=job))

    def _one_peers(self, error: MeshceeError) -> PeerLostError:
        """An error that a member has met by itself is the loss of that member. Raises any other."""
        faults = self._owner.failures.faults if self._owner is not None else ()
        if not any(fault.error is error for fault in faults):
            raise error
        return PeerLostError(str(error))

    def _leave_out(self, plan: Plan, following: Plan) -> bool:
        """Whether the plan to go over to has members that have left, or are about to, since it was made."""
        assert self._owner is not None
        known = self._agent.directory.peers
        late = [p for p in following.peers if p in self._owner.leaving or p not in known or known[p].leaving]
        if late:
            self._recovery.leave_out(late, plan.peers)
        return bool(late)

    async def _go_on_without(self, lost: PeerLostError | None, plan: Plan, failures: Failures) -> Planned:
        """A plan for those who are left, and the newest state that can be had; PeerLostError when there is no plan."""
        try:
            if lost is not None:
                self._recovery.notice(failures.noticed_s)
                await self._recovery.after(lost, plan.peers, failures, len(self.result.losses))
            self._base = await self._newest()
            self._next = None
            return await self._recovery.plan(self._asking(plan))
        except (PeerLostError, PlanError, JoinError) as error:
            raise PeerLostError(f"{lost or error}; {self._how_to_go_on(error)}") from error

    def _asking(self, plan: Plan) -> PlanRequest:
        """For another plan than this, with the same micro-batches."""
        return replace(self._request, job=replace(self._request.job, micro_batch=plan.micro_batch), wanted=())

    async def _newest(self) -> Checkpoint | Copied | None:
        """The state to go on from: copies that peers hold, where they are newer than what is on the disk."""
        if self._store is not None:
            found = await asyncio.to_thread(self._store.complete)
            self._durable = found[0] if found else None
        copied = self._copies.newest(len(self.result.losses), self._recovery.mute)
        durable_step = self._durable.next_step if self._durable is not None else 0
        with_peers = copied is not None and copied.next_step > durable_step
        next_step = copied.next_step if copied is not None and with_peers else durable_step
        done = len(self.result.losses)
        log.info("the state to go on from", next_step=next_step, done=done, with_peers=with_peers, on_disk=durable_step)
        return copied if with_peers else self._durable

    def _how_to_go_on(self, error: MeshceeError) -> str:
        waited_s = self._agent.timeouts.regroup_s
        why = "it happened again and again" if isinstance(error, PeerLostError) else f"after {waited_s:.0f} s: {error}"
        if self._diary is None or self._durable is None:
            return f"{why}; start more peers and run the command again"
        return (
            f"{why}; the state after {self._durable.next_step} steps is in {self._durable.folder}: start more peers, then go on "
            f"with `meshcee train JOB.py --resume {self._diary.run.id}`"
        )

    async def _epoch(
        self, captured: Capture, plan: Plan, term: tuple[int, str], devices: Mapping[str, DeviceProfile]
    ) -> None:
        """Offer this plan, feed it to the end; `devices` are its members', who may be gone by now."""
        names = self._agent.names()
        self.result.plan, self.result.names = plan, names
        self.result.steps_s.clear()
        if self._on_plan is not None:
            self._on_plan(plan, names)
        self._job = replace(
            self._job, micro_batch_size=plan.micro_batch, threads=plan.threads or None
        )  # from the first plan on
        self._rounds_as(plan)
        classes = {class_of(device, plan.threads) for device in devices.values()}
        self._kinds |= {(of.kind, f"{of.model}, torch {of.torch}", of.threads) for of in classes}
        if self._epoch_number == (0, 0):
            self._epoch_number = (next_incarnation(self._home, self._last), 0)
        epoch = self._epoch_number = (self._epoch_number[0], self._epoch_number[1] + 1)
        store = await asyncio.to_thread(self._keep, captured, plan, names)
        if self._diary is not None:
            resumed = self._resume is not None
            self._journal.begin(self._job.name, self._diary.run, epoch[0], plan, resumed=resumed)
        start = self._base.next_step if self._base is not None else 0
        if store is None or not self._job.adapt:
            self._adaptation = None  # without a checkpoint there is nothing to begin another epoch with
        elif self._adaptation is None or not self._adaptation.moved(plan, self._reported_s):
            new = self._newcomers = self._newcomers or Newcomers(self._agent, self._profile, self._request.times)
            check = partial(check_generators, captured.train)
            self._adaptation = Adaptation(self._agent, self._request, plan, self.result.changes, new, check)

        async def hear(report: Report) -> None:
            await self._hear(report, Planned(plan, term, self.result.notes), epoch)

        if self._trace is not None:
            self._trace.begin(plan, names, start, self._job.steps)
            measured = replace(self._agent.measured(), times=self._request.times)  # the peers are still idle
            await asyncio.to_thread(self._trace.predict, plan, measured, self._request.job)
        holders = frozenset(self._owner.plan.peers if self._owner is not None else ())
        mesh = self._agent.measured(plan.peers)
        chosen = await asyncio.to_thread(buddies_with_room, plan, mesh, devices, self._request.job)
        self._owner = own(
            self._agent,
            self._job,
            captured,
            plan,
            term,
            epoch,
            self._base.holders if isinstance(self._base, Copied) else (),
            trace=self._trace,
            run=self._key,
            stalls=self._stalls,
            kept=Kept(
                self._base,
                store,
                self._cadence,
                len(self.result.losses),
                holders,
                self._copies if chosen is not None else None,
                chosen or Buddies(),
                self._trouble,
            ),
        )
        if self._stopping:
            self._owner.stop()
        self.result.state = await self._owner.train(
            Feed(self._job, captured, plan.micro_batch, start, self._fed, self._hyper), hear
        )
        self.result.stopped = self._stopping and self._owner.stopped

    def _keep(self, captured: Capture, plan: Plan, names: Mapping[str, str]) -> CheckpointStore | None:
        """The run's folder, made or taken over by this process, and its checkpoints."""
        if self._home is None:
            return None
        info = {"steps": self._job.steps, "plan": plan.to_json(), "names": dict(names)}
        info |= {"rounds": (self._shares, self._coded), "key": self._key, "incarnation": self._epoch_number[0]}
        info |= {
            "job": description(self._job, captured),
            "micro_batch": plan.micro_batch,
            "devices": sorted(self._kinds),
        }
        try:
            if self._diary is None:
                self._diary = Diary(self._home.new_run(self._job.name), self._trouble)
            run, begins = self._diary.run, not self._diary.is_begun
            if begins:
                self._diary.begin(name=self._job.name, **info)
            else:
                self._diary.note(**info)
            self.result.run, self._ledger.run, self._ledger.folder = run.id, self._key, run.folder
            folder, devices, rely = run.checkpoints, sorted(self._kinds), self._diary.sync
            self._store = CheckpointStore.of(folder, self._job, captured, plan.micro_batch, devices, self._store, rely)
            if begins and self._base is not None:
                self._store.forget_after(self._base.next_step)
        except OSError as error:
            raise UsageError(
                f"the run's folder cannot be written ({disk.refusal(error)}): make room, or set MESHCEE_HOME to another folder"
            ) from error
        if self._fed is None and (not self._repeats or (run.folder / FED).exists()):
            self._fed = Fed(run.folder / FED, self._known.__contains__, self._floor)
        return self._store

    def _floor(self) -> int:
        """The first step that training could still go back to."""
        found = self._store.complete() if self._store is not None else []
        return found[-1].next_step if found else 0

    async def _hear(self, report: Report, planned: Planned, epoch: tuple[int, int]) -> None:
        """Tell of a step once; hold a step that was computed again against what was told of it."""
        plan = planned.plan
        self.result.steps_s.append(report.step_s)
        self._reported_s = self._agent.monotonic()
        again = report.step in self._known
        if self._owner is not None:
            self._recovery.hear(report.step, new=not again, ready_s=self._owner.ready_s)
        if again:
            self._compare(report)
        if report.step == len(self.result.losses):
            self.result.losses.append(report.loss)
            if report.metrics:
                self.result.metrics.append((report.step, dict(report.metrics)))
        self._turn.report(epoch, report.step, report.loss, plan)
        if self._next is None and self._owner is not None:
            self._next = await self._other_plan(report, planned, self._owner.leaving)
            if self._next is not None:
                self._owner.stop(hand_over=True)
        if again:
            return
        self._known[report.step] = report.loss
        if self._diary is not None:
            self._diary.report(report.to_json())
        await self._reports.put(report)

    async def _other_plan(self, report: Report, planned: Planned, leaving: set[str]) -> Planned | None:
        """What to go over to at the next step's end: it does without members that want to leave, or is faster."""
        if leaving and self._diary is not None:  # else nothing is kept that another epoch could begin with
            return await self._recovery.part(leaving, planned.plan.peers, self._asking(planned.plan))
        faster = await self._adaptation.hear(report) if self._adaptation is not None else None
        return planned._replace(plan=faster, term=self._agent.newest_term) if faster is not None else None

    def _rounds_as(self, plan: Plan) -> None:
        self._shares |= plan.sums_gradients
        self._coded |= bool(plan.codecs)

    def _compare(self, report: Report) -> None:
        before = self._known[report.step]
        if report.loss == before:
            return
        alike = len(self._kinds) == 1 and not self._shares
        told = f"step {report.step + 1} had loss {before!r} and has {report.loss!r} now that it is computed again"
        if not self._coded and (alike or not math.isclose(report.loss, before, rel_tol=UNLIKE)):
            raise MeshceeError(
                f"{told}: data[i] was not the same when it was read again (docs/models.md), or the state that training went on "
                "from was not that of the run; if the data is not at fault, please report it"
            )
        log.warning(told + ": the peers' devices or codecs round differently")
