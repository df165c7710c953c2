"""One job from its first plan to its last step, over as many epochs as it takes.

The idea: what a user is told of a step happens once, whatever the mesh has to do for it twice. Losses that were
reported are remembered; a step that is computed again must give the same loss, or the run ends and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import torch

from meshcee.callbacks import Callback
from meshcee.capture import Capture, capture
from meshcee.epochs import course, moves
from meshcee.errors import MeshceeError, PeerLostError, PlanError, UsageError
from meshcee.events import Event
from meshcee.figures import BlockTimes, DeviceProfile, JobCosts
from meshcee.files import Trouble, number, settled
from meshcee.job import Job
from meshcee.plan import Epoch, Plan, Term
from meshcee.sampling.again import repeats, sample_digests
from meshcee.stage import check_kinds, remarks
from peers.mesh_view import MeshView
from peers.owner.epoch import Owner, Report, in_doubt
from peers.owner.feed import Feed, Stalls, Steering
from peers.owner.numbers import Entry, Numbers, Unwritten
from peers.owner.offering import check_members
from peers.owner.recovery import Recovery, Stopwatch, found_or_not, how_to_go_on, losses, proposed
from peers.owner.result import Result, Telling, Wanted, once, weights_of
from peers.owner.turn import Turn
from peers.planning import Planned, PlanRequest, ask_plan, given_plan, profile, question
from peers.state import Cadence, CopySet, Keepers, Manifest, Supplies, keepers_with_room
from peers.wire import Failures, Suspects, unless_late

if TYPE_CHECKING:
    from meshcee.files.home import Home
    from peers.measure import Trace
    from peers.owner.adaptation import Adaptation, Newcomers
    from peers.state.checkpoint import Checkpoint

__all__ = ["Training", "own"]

log = structlog.get_logger()

Reports = asyncio.Queue[Report | MeshceeError | None]


def own(
    agent: MeshView,
    job: Job,
    captured: Capture,
    plan: Plan,
    term: Term,
    epoch: Epoch,
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


class Training:
    """`run` in a task; reports, and then None or the error that ended it, go to `reports`."""

    def __init__(
        self,
        agent: MeshView,
        home: Home | None,
        lent: tuple[str, ...],
        job: Job,
        captured: Capture | None,
        wanted: Wanted,
        *,
        on_plan: Callable[[Plan, Mapping[str, str]], None] | None,
        reports: Reports,
        on_wait: Callable[[str], None] | None,
        trace: Trace | None = None,
        on_stall: Callable[[str], None] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.result = Result()
        self._stalls = Stalls(on_stall or log.warning)
        self._agent = agent
        self._home = home
        self._lent = lent
        given = wanted.plan
        given_threads = given.threads if given is not None and given.threads else None
        groups = job.groups or (given is not None and given.shares_samples)
        self._job = replace(job, groups=groups, threads=given_threads or job.threads)
        self._captured = captured
        self._wanted = wanted
        self._trace = trace
        self._on_plan = on_plan
        self._telling = Telling(reports)
        self.owner: Owner | None = None
        self._trouble = Trouble(asyncio.get_running_loop().time)  # which threads may ask, too
        self.base: Checkpoint | CopySet | None = None  # what the next epoch begins with; None: the model as captured
        # Digests of a few, at the start; None: data[i] is another one whenever it is read, so what was fed is kept.
        self._samples: Mapping[str, str] | None = {}
        self._steering = Steering(job, callbacks, saves=home is not None)
        self._numbers = Numbers()
        self._incarnation = 0
        self._turn = Turn(agent, job.name, on_wait, wanted.after, goes_on=wanted.resume is not None)
        self._folder = Unwritten()
        if home is not None:
            from peers.owner.folder import Folder

            self._folder = Folder(agent, home, self._trouble, self._steering)
        self._course: course.Course | None = None  # once the run is known
        self._recovery = Recovery(agent)
        self._stopwatch = Stopwatch()
        self._cadence = Cadence(job.checkpoint_every)
        self._key = secrets.token_hex(16)  # the name by which members know the run, over all its epochs and owners
        self.copies = Manifest(self._folder.note, self._folder.has_told)
        self._noted: list[CopySet] = []  # what an owner that has died knew of them
        self._before: tuple[Sequence[str] | None, Sequence[str]] = (
            None,
            (),
        )  # members of another owner, and whom it left out
        self._is_examined = False
        self._devices: Mapping[str, DeviceProfile] = {}  # of the newest plan's members
        self._request: PlanRequest
        self._reported_s: float | None = None  # when the last step was
        self._adaptation: Adaptation | None = None
        self._newcomers: Newcomers | None = None

    def stop(self) -> bool:
        """Finish the running step, collect the weights, end. False when nothing runs yet."""
        if self.owner is None or self._course is None:
            return False
        for command in self._course.handle(moves.Stopped()):
            if isinstance(command, moves.Stop):
                self.owner.stop(hand_over=command.hand_over)
        return True

    @property
    def request(self) -> PlanRequest:
        """What plans are asked for with, once the job was profiled."""
        return self._request

    async def state(self, is_over: Callable[[], bool]) -> Mapping[str, torch.Tensor]:
        """After all reported steps or more, from a checkpoint or the end. UsageError where the run has no folder, or failed."""
        done = len(self.result.losses)
        if not self.result.state:
            self._steering.control.checkpoint()
        while not self.result.state:
            found = await asyncio.to_thread(self._folder.find_saved)
            if found and found[0].next_step >= done and self._captured is not None:
                return weights_of(self._captured, found[0])[0]
            if is_over():
                raise UsageError("the run has ended without weights: its error comes to whoever reads its reports")
            await asyncio.sleep(0.05)
        return self.result.state

    async def run(self) -> None:
        failure: MeshceeError | None = None
        try:
            await self._listen(self._steering.check)
            if self._captured is None:
                self._captured = await asyncio.to_thread(capture, self._job)
            self._steering.begin(self._captured)
            if (run := self._wanted.resume) is not None:
                reports = await asyncio.to_thread(self._go_on, run, self._captured)
            await self._listen(self._look_at_data)
            if run is not None:
                await self._listen(self._steering.listeners.event("on_resume", reports))
            with settled():
                await self._epochs()
            await self._listen(self._steering.listeners.end(self.result, None))
            self._folder.end("stopped" if self.result.stopped else "done")
        except MeshceeError as error:
            if isinstance(error, UsageError) and self._folder.id is not None and self.result.losses:
                how = f"once it is mended: `meshcee train JOB.py --resume {self._folder.id}`"
                error.args = (f"{error}; {how}", *error.args[1:])
            self._folder.end("failed", error=str(error))
            failure = error
            with contextlib.suppress(MeshceeError):  # what ended the run first is what counts
                await self._listen(self._steering.listeners.end(self.result, str(error)))
        except BaseException as error:
            self._folder.end("aborted", error=repr(error))
            raise
        finally:
            self.owner = None
            if self._newcomers is not None:
                self._newcomers.close()
            await self._folder.close()
            await self._turn.end()
            await asyncio.to_thread(self._steering.close)
        await self._telling.reports.put(failure)  # the last thing: whoever hears it may cancel this

    def _go_on(self, wanted: str, captured: Capture) -> list[dict[str, Any]]:
        """Find the run and its checkpoint, see that they fit this job, take up what was reported. Returns that."""
        found = self._folder.find(wanted, self._job, captured)
        self._job, self._captured, self.base, begins = found.job, found.captured, found.base, found.begins
        if found.base is not None:
            self._steering.source.go_on(begins, found.base.manifest.get("data", {}))
        numbers, result = self._numbers, self.result
        numbers.begins = begins
        for line in found.reports:
            numbers.losses[line["step"]] = number(line["loss"])
        self._key, self._noted = found.about.key or self._key, found.copies
        if self._wanted.after:
            self._before = Plan.from_json(found.about.plan).peers, found.about.failed
        done = max([begins, *(copied.next_step for copied in found.copies)])
        measured = (line for line in found.reports if line.get("metrics") and line["step"] < done)
        result.metrics += [(line["step"], {n: number(v) for n, v in line["metrics"].items()}) for line in measured]
        result.losses = [numbers.losses[s] for s in range(done)]
        terms = {line["step"]: line.get("terms", {}) for line in found.reports}
        result.terms = {n: [number(terms.get(s, {}).get(n)) for s in range(done)] for n in captured.terms}
        numbers.go_on(found.kinds, found.about.rounds)
        self._steering.control.id = self._folder.id
        self._steering.control.restore(found.reports, len(numbers.losses), is_over=found.is_over)
        return found.reports

    def _look_at_data(self) -> None:
        """Whether it is the same when it is read again, and what it was when the run began."""
        keeps, begins = self._home is not None, self._numbers.begins
        is_same, found = repeats(self._job, keeps=keeps, begins=begins), sample_digests(self._job)
        self._folder.check_samples(found)
        self._samples = found if is_same else None

    # -- epochs --------------------------------------------------------------------------------------------------------

    async def _epochs(self) -> None:
        """One epoch after the other until the job is done; raises what no further epoch would mend."""
        members, failed = self._before
        going = self._course = course.Course(
            self._job.steps,
            told=self._numbers.losses,
            done=len(self.result.losses),
            keeps=self._home is not None,
            blame=Suspects().hear,
            members=members,
            failed=failed,
        )
        if self._steering.control.is_stopping:  # as was asked before
            going.handle(moves.Stopped())
        commands = going.begin()
        while going.state is not course.State.OVER:
            if going.state is course.State.SEARCHING:
                commands = await self._search(going, commands)
            elif (event := await self._do(going, commands)) is not None:
                commands = going.handle(event)
        await self._do(going, commands)

    async def _search(self, going: course.Course, commands: list[moves.Command]) -> list[moves.Command]:
        """Until there is a plan; what to do then, or after regroup_s."""

        async def found() -> None:
            nonlocal commands
            while going.state is course.State.SEARCHING:
                if (event := await self._do(going, commands)) is not None:
                    commands = going.handle(event)

        try:
            await unless_late(found, self._agent.timeouts.regroup_s, self._agent.timeouts)
        except TimeoutError:
            if going.state is course.State.SEARCHING:
                return going.handle(moves.TimeUp())
        return commands

    async def _do(self, going: course.Course, commands: Iterable[moves.Command]) -> moves.Event | None:
        """Carry these out, one after the other; what came of the last."""
        event: moves.Event | None = None
        for command in commands:
            event = await self._carry_out(going, command)
        return event

    async def _carry_out(self, going: course.Course, command: moves.Command) -> moves.Event | None:
        agent, recovery = self._agent, self._recovery
        match command:
            case moves.TakeTurn():
                return moves.Turned(await self._turn.wait(self._key))
            case moves.Profile():
                assert self._captured is not None
                job, given = self._job, self._wanted.plan
                if given is not None and job.batch_size % given.micro_batch == 0:  # else it is refused later, in words
                    job = replace(job, micro_batch_size=given.micro_batch)
                ask = job, self._captured, self._wanted.stages, self._lent, self._numbers.bound_to
                self._request = await question(agent, *ask, taken_over=bool(self._wanted.after))
                return moves.Profiled()
            case moves.AskPlan():
                return await found_or_not(self._plan())
            case moves.AskPlanOf(free, without):
                request = replace(self._asking(going), free=free, without=without)
                return await found_or_not(recovery.plan(request))
            case moves.Meet(proposal):
                return await self._meet(proposal.what)
            case moves.Offer(proposal, number):
                return await self._offer(going, proposal.what, number)
            case moves.CallRoll(members, silent):
                return await recovery.call(members, silent)
            case moves.FindStates(done, without):
                return await self._states(done, without)
            case moves.LookAround(missed):
                return recovery.around(missed, going.plan.members if going.plan is not None else ())
            case moves.See(members):
                return await recovery.see(members)
            case moves.Forgive():
                return moves.Forgiven(agent.forgive())
            case moves.AwaitChange():
                await agent.directory.wait_for_change()
                return moves.Changed()
            case moves.AwaitTerm(term):
                await agent.later_than(term)
                return moves.Changed()
            case moves.Notice(at_s):
                self._stopwatch.notice(at_s)
            case moves.TakeBack(step):
                await self._take_back(step)
            case moves.Mark(moment):
                self._stopwatch.mark(moment)
            case moves.Pause(for_s):
                await asyncio.sleep(for_s)
            case moves.CutOff(pairs):
                agent.cut_off(pairs)
            case moves.Shun(peers):
                agent.shun(peers)
            case moves.TellLost():
                recovery.tell_lost(command, self.result.names)
                if self._newcomers is not None:
                    self._newcomers.lost((*command.gone, *command.failed))
                names = tuple(self.result.names.get(p) or p for p in dict.fromkeys(command.gone + command.failed))
                await self._listen(self._steering.listeners.event("on_loss", str(command.error), names))
            case moves.TellLeaving():
                recovery.tell_leaving(command)
            case moves.GoOnFrom(step, with_peers, copies):
                self.base = copies if with_peers else self._folder.durable
                self.result.state, self.result.averages = {}, {}  # an epoch that has ended in peace leaves its own
                on_disk = durable.next_step if (durable := self._folder.durable) is not None else 0
                log.info(Event.STATE_FOUND, next_step=step, done=going.done, with_peers=with_peers, on_disk=on_disk)
            case moves.Stop(hand_over):
                assert self.owner is not None
                self.owner.stop(hand_over=hand_over)
            case moves.Finish():
                is_saved = self._folder.store is None or self.owner is None or self.owner.can_save
                self.result.stopped = going.stopping and not (is_saved and len(self.result.losses) == self._job.steps)
                durable = self._folder.durable
                if not self.result.state and durable and self._captured:  # its last epoch was lost behind the end
                    found = await asyncio.to_thread(weights_of, self._captured, durable)
                    self.result.state, self.result.averages = found
            case moves.Fail(error):
                raise error
            case moves.GiveUp(lost, error):
                raise PeerLostError(f"{lost or 'the run cannot go on'}; {self._how_to_go_on(error)}") from error
            case _:
                assert self._telling.newest is not None
                return await self._after_step(command, self._telling.newest)
        return None

    async def _after_step(self, command: moves.Command, report: Report) -> moves.Event | None:
        """Carry out what is to be done with the step that was reported last."""
        match command:
            case moves.Compare():
                self._numbers.compare(report.step, report.loss)
            case moves.Count():
                self.result.losses.append(report.loss)
                for name, value in report.terms.items():
                    self.result.terms.setdefault(name, []).append(value)
                if report.metrics:
                    self.result.metrics.append((report.step, dict(report.metrics)))
            case moves.Consider():
                adaptation, can_move = self._adaptation, self.owner is None or self.owner.can_be_followed
                faster = await adaptation.hear(report, can_move) if adaptation is not None else None
                if faster is None:
                    return moves.Better(None)
                return moves.Better(proposed(Planned(faster, self._agent.newest_term, self.result.notes)))
            case moves.Tell():
                calls = self._saved(), self._steering.step(report)
                hear = [partial(self._listen, once(call), self.owner) for call in calls if call is not None]
                await self._telling.tell(report, *hear, partial(self._write, report))
        return None

    async def _write(self, report: Report) -> None:
        """A step into the run's folder; what callbacks want of the run counts at once."""
        if self._steering.control.is_stopping and self._course is not None and not self._course.stopping:
            self.stop()
        self._folder.report({**report.to_json(), **self._steering.control.news(report.step)})

    async def _listen(self, call: Callable[[], None] | None, owner: Owner | None = None) -> None:
        """Callbacks are the user's code. While steps are fed they share the thread of the data: both may draw random numbers."""
        if call is not None and owner is not None:
            await owner.in_users_thread(call)
        elif call is not None:
            await self._stalls.watch(asyncio.get_running_loop().run_in_executor(None, call))

    def _saved(self) -> Callable[[], None] | None:
        """What has come to the disk since it was asked last, in whatever epoch that began."""
        return self._steering.listeners.saved((saved.next_step, saved.folder) for saved in self._folder.saved())

    async def _meet(self, planned: Planned) -> moves.Met | moves.Failed:
        """See that all members of the plan are here and can run it; before the first epoch, that the plan computes the module."""
        captured, plan = self._captured, planned.plan
        assert captured is not None
        self.result.notes = (*planned.notes, *remarks(captured.train, plan, self._job.micro_batch_size))
        await self._steering.meet(self._agent, plan.peers, self._how_to_go_on)
        if self._noted:
            self.copies.restore(self._noted, self._agent.directory.peers.keys())
            self.base = self.copies.newest(len(self.result.losses)) or self.base
            self._noted = []
        self._folder.check_weights(again=self.base is None)
        if self._job.verify and not self._is_examined:  # once: the finest cut covers what later plans cut
            self._is_examined = True
            await self._look_at_module(captured, plan)
        try:
            self._devices = {peer: self._agent.device_of(peer) for peer in plan.peers}
            check_members(self._job, captured, plan, self._devices, self._agent.names())
        except (PeerLostError, UsageError, PlanError) as error:
            if self.owner is None and not isinstance(error, PeerLostError):
                raise
            return moves.Failed(PeerLostError(str(error)))  # another plan may do: the run has trained with one before
        return moves.Met()

    async def _offer(self, going: course.Course, planned: Planned, number: int) -> moves.Ended | moves.Failed:
        """One epoch, to its end."""
        try:
            await self._epoch(going, planned, number)
        except MeshceeError as error:
            failures = self.owner.failures if self.owner is not None else Failures()
            await self._telling.go_on()
            await self._listen(self._saved())
            return moves.Failed(error, losses(failures, self._numbers.first_of(in_doubt(self.owner))))
        finally:
            if self._adaptation is not None:
                self._request = self._adaptation.learnt(self._request)
        assert self.owner is not None
        here = frozenset(p for p, record in self._agent.directory.peers.items() if not record.leaving)
        return moves.Ended(self.owner.has_weights, frozenset(self.owner.leaving), here, self._agent.clock())

    async def _take_back(self, step: int) -> None:
        """Nothing that was told or kept since this step counts any more."""
        liars = self.owner.failures.liars if self.owner is not None else ()
        self._agent.distrust(liars)
        log.warning(Event.TAKEN_BACK, step=step, done=len(self.result.losses))
        self.result.take_back(step, liars)
        await asyncio.to_thread(self._folder.take_back, step, self._numbers.losses.take_back(step))
        self._steering.control.take_back(step)
        self._steering.listeners.take_back(step)
        self.copies.forget_after(step)

    async def _states(self, done: int, without: Collection[str]) -> moves.States:
        """What is on the disk, and the copies that peers hold."""
        await asyncio.to_thread(self._folder.look)
        await self._listen(self._saved())
        copied = self.copies.newest(done, without)
        on_disk = durable.next_step if (durable := self._folder.durable) is not None else 0
        return moves.States(on_disk, copied.next_step if copied is not None else None, copied)

    async def _look_at_module(self, captured: Capture, plan: Plan) -> None:
        """Raise UnequalError where the captured model is not the user's module."""
        from meshcee.equality import cuts_of, examine, sizes_of

        notes = [*self.result.notes]
        await asyncio.to_thread(examine, self._job, captured, sizes_of(plan), cuts_of(plan), say=notes.append)
        self.result.notes = tuple(notes)

    async def _profile(self, without: Collection[str]) -> Mapping[str, BlockTimes]:
        """Of the job's blocks on the devices that are idle now, but for these; whoever was asked before remembers."""
        assert self._captured is not None
        request = self._request
        found = await profile(self._agent, self._job, self._captured, request.job, request.largest, without)
        self._request = replace(self._request, times={**self._request.times, **found})
        return found

    async def _plan(self) -> Planned:
        # Of the first plan, if there was one; else what the question has found.
        job = self._costs(self._job.micro_batch_size or self._request.job.micro_batch)
        if (given := self._wanted.plan) is not None:
            assert self._captured is not None
            return await given_plan(self._agent, given, self._job, self._captured, job)
        try:
            return await ask_plan(self._agent, replace(self._request, job=job))
        except PlanError as error:
            if not (off := self._agent.directory.off):
                raise
            raise PlanError(f"{error}; {off}") from error  # who is left out for its clock

    def _costs(self, micro_batch: int | None) -> JobCosts:
        """Of the job, in such micro-batches, on devices with the bits of the steps that were told of."""
        return replace(self._request.job.begun_on(self._numbers.bound_to), micro_batch=micro_batch)

    def _asking(self, going: course.Course) -> PlanRequest:
        """For another plan than the one there is, with the same micro-batches."""
        if (supplier := self._steering.supplier) is not None:
            self._request = supplier.priced(self._agent, self._request)
        if going.plan is None:
            return self._request
        return replace(self._request, job=self._costs(going.plan.what.plan.micro_batch), wanted=())

    def _how_to_go_on(self, error: MeshceeError, first: str = "start more peers") -> str:
        return how_to_go_on(error, first, self._agent.timeouts.regroup_s, self._folder.id, self._folder.durable)

    async def _epoch(self, going: course.Course, planned: Planned, number: int) -> None:
        """Offer this plan, feed it to the end; its members may be gone by now."""
        captured, devices, (plan, term, _) = self._captured, self._devices, planned
        assert captured is not None
        names = self._agent.names()
        self.result.plan, self.result.names = plan, names
        self.result.steps_s.clear()
        if self._on_plan is not None:
            self._on_plan(plan, names)
        if self._adaptation is not None and not self._adaptation.moved(plan, self._reported_s):
            self._adaptation = None
        await self._listen(self._steering.listeners.plan(plan))  # who hears of it asks `changes` why
        self._job = replace(self._job, micro_batch_size=plan.micro_batch, threads=plan.threads or None)  # from now on
        self._numbers.begin(plan, devices)
        self._request = replace(self._request, job=self._request.job.begun_on(self._numbers.classes))
        self._incarnation = self._incarnation or self._folder.incarnation()
        epoch = Epoch(self._incarnation, number)
        start = self.base.next_step if self.base is not None else 0
        failed = [*going.missing.failed]
        resumed = self._wanted.resume is not None
        entry = Entry(
            self._job, captured, plan, names, self._key, epoch[0], start, self._numbers, self._samples, failed, resumed
        )
        await asyncio.to_thread(self._folder.write, entry)
        self.result.run = self._steering.control.id = self._folder.id
        self._folder.follow(entry)
        if self._folder.store is None or not self._job.adapt:
            self._adaptation = None  # without a checkpoint there is nothing to begin another epoch with
        elif self._adaptation is None:
            from peers.owner.adaptation import Adaptation, Newcomers

            given, times = self._wanted.plan is not None, self._request.times
            new = self._newcomers = self._newcomers or Newcomers(self._agent, self._profile, times, is_given=given)
            check = partial(check_kinds, captured)
            self._adaptation = Adaptation(self._agent, self._request, plan, self.result.changes, new, check)

        hear = partial(self._hear, going, plan=plan, epoch=epoch)
        if self._trace is not None:
            self._trace.begin(plan, names, start, self._job.steps)
            measured = replace(self._agent.measured(), times=self._request.times)  # the peers are still idle
            await asyncio.to_thread(self._trace.predict, plan, measured, self._request.job)
        holders = frozenset(self.owner.plan.peers if self.owner is not None else ())
        mesh = self._agent.measured(plan.peers)
        choose = partial(keepers_with_room, plan, mesh, devices, self._request.job)
        chosen = await asyncio.to_thread(choose) if self._agent.measures else None
        most: tuple[int, ...] = ()
        if self._agent.measures and len(plan.pipelines) > 1:
            from meshcee.planner import most_micros

            most = await asyncio.to_thread(most_micros, plan, devices, self._request.job)
        self.owner = own(
            self._agent,
            self._job,
            captured,
            plan,
            term,
            epoch,
            self.base.holders if isinstance(self.base, CopySet) else (),
            trace=self._trace,
            run=self._key,
            stalls=self._stalls,
            most=most,
            kept=Supplies(
                self.base,
                self._folder.store,
                self._cadence,
                max(len(self.result.losses), len(self._numbers.losses) if self._steering.control.is_stopping else 0),
                holders,
                self.copies if chosen is not None else None,
                chosen or Keepers(),
                self._trouble,
            ),
        )
        self._numbers.join(plan.peers, start)
        if self._job.audit:
            from peers.owner.audit import Auditing

            self.owner.audit = Auditing(self._job.audit, secrets.token_bytes(32), self._agent.judge)
        if going.stopping:
            self.owner.stop()
        self.result.state = await self.owner.train(
            Feed(self._job, captured, plan.micro_batch, start, self._folder.fed, self._steering, self._samples is None),
            hear,
        )
        self.result.averages = await asyncio.to_thread(self.owner.averages, self.result.state)
        await self._listen(self._saved())

    async def _hear(self, going: course.Course, report: Report, plan: Plan, epoch: Epoch) -> None:
        """Tell of a step once; hold a step that was computed again against what was told of it."""
        assert self.owner is not None
        self._telling.newest = report
        self.result.steps_s.append(report.step_s)
        self._reported_s = self._agent.monotonic()
        self._stopwatch.hear(report.step, new=not going.is_known(report.step), ready_s=self.owner.ready_s)
        self._turn.report(self._key, epoch, report.step, report.loss, plan)
        supplier, leaving = self._steering.supplier, frozenset(self.owner.leaving)
        leaving = supplier.leaving(self._agent, leaving) if supplier is not None else leaving
        event: moves.Event | None = moves.Stepped(report.step, report.loss, leaving)
        while event is not None:
            event = await self._do(going, going.handle(event))
