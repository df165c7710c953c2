"""The owner's side of a job: offers the plan, feeds samples, hears losses, collects the weights.

The idea: the owner computes nothing. It holds the data and the only log that activates a plan; members hold the
model. Feeding runs ahead of the losses by a bounded number of micro-batches, so steps follow one another without a
barrier.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import ChainMap, Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import torch

from meshcee.capture import Capture
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, PeerLostError, PlanError, ProtocolError, UnequalError, leaves
from meshcee.events import Event
from meshcee.files import large_apart
from meshcee.job import Job
from meshcee.plan import Epoch, Plan, Term
from meshcee.stage import tensors
from peers.owner.answers import Answers, CodecNews, Report
from peers.owner.feed import Feed, Portion, Stalls
from peers.owner.offering import Offering
from peers.state import Keeping, Reader, Supplies
from peers.transport import Frame, StreamClosed, Transport
from peers.wire import (
    LOST_HERE,
    MOST_RUN_CHARACTERS,
    SILENT,
    Failures,
    Fault,
    Link,
    Offer,
    Terms,
    Watch,
    beat,
    check_replicas,
    is_own,
    messages,
    need,
    reported,
    unless_silent,
    while_moving,
)

if TYPE_CHECKING:
    from meshcee.adapt import Shares
    from peers.measure import Trace
    from peers.owner.audit import Auditing
    from peers.owner.evaluation import Outputs

__all__ = ["Owner", "Report", "in_doubt"]

log = structlog.get_logger()

MOST_UNREAD = 3  # copies of a stage in a row, at the end, that nobody has all of

T = TypeVar("T")


def _timed(call: Callable[..., T], *args: Any) -> tuple[T, float]:
    """What it returns, and the seconds that it took."""
    began_s = time.perf_counter()
    return call(*args), time.perf_counter() - began_s


def in_doubt(owner: Owner | None) -> set[str]:
    """Members whose steps are not to be believed: who has lied, and who was lost while an audit of it was open."""
    if owner is None or owner.audit is None:
        return set()
    return owner.failures.liars | owner.failures.doubted | (owner.failures.lost & owner.audit.open)


class _EpochFailed(Exception):
    """Some member failed; the group of the epoch ends."""


class Owner:
    """One epoch of one job."""

    def __init__(
        self,
        job: Job,
        capture: Capture,
        plan: Plan,
        term: Term,
        epoch: Epoch,
        transport: Transport,
        *,
        addresses: Mapping[str, tuple[str, ...]],
        names: Mapping[str, str],
        timeouts: Timeouts,
        limits: Limits,
        kept: Supplies | None = None,
        trace: Trace | None = None,
        run: str = "",
        stalls: Stalls | None = None,
        most: Sequence[int] = (),
    ) -> None:
        self._job = job
        self._capture = capture
        self.plan = plan
        self._term = term
        self._epoch = epoch
        self._transport = transport
        self._addresses = addresses
        self._names = names
        self._timeouts = timeouts
        self._limits = limits
        self._kept = kept or Supplies()
        self._trace = trace
        self._run_name = run or f"{transport.peer_id}/{job.name}"[:MOST_RUN_CHARACTERS]
        self._offering = Offering(capture, self._kept, limits, timeouts)
        self._keeping: Keeping | None = None
        self._links: list[Link] = []
        self._start: int | None = None  # of an epoch that trains
        # The user's data and metrics run in one thread of their own: in order, and never on the event loop.
        self._users = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._stalls = stalls or Stalls(log.warning)
        self._outputs: Outputs | None = None
        self._answers: dict[int, Answers] = {}
        # What the stages may have begun, and a window on its way; any more would delay a change of plan.
        ahead = [max(stage.live_cap + stage.window for stage in pipeline.stages) + 4 for pipeline in plan.pipelines]
        self._ahead = [asyncio.Semaphore(most) for most in ahead]  # micro-batches of each pipeline, of all rounds
        self._order: asyncio.Queue[Answers | None] = asyncio.Queue(maxsize=256)
        self._shares: Shares | None = None  # how micro-batches are divided among pipelines, where that may change
        if plan.may_move_shares and job.adapt:
            from meshcee.adapt import Shares

            self._shares = Shares(plan, most)
        self.audit: Auditing | None = None  # of a job that is audited
        self.failures = Failures()
        self.ready_s: float | None = None  # when all members had answered READY, by the loop's clock
        self.leaving: set[str] = set()  # members that have asked to be left out
        self.stopped = self._hands_over = False
        self.handed_over = False  # members hold what another plan goes on from: this epoch has no weights for anybody
        self._watch: Watch
        self._step = 0  # the first step that is not yet complete, for errors

    @property
    def has_weights(self) -> bool:
        """Behind `train`: whether it has ended with them. It has not where they were handed over, or nobody had room for them."""
        return self._keeping is not None and not self.handed_over and self._keeping.is_saved

    @property
    def can_save(self) -> bool:
        """Whether its weights go to the disk; one that refuses them when the user stops the run is given up."""
        return self._keeping is None or self._keeping.saving.can_save

    @property
    def can_be_followed(self) -> bool:
        """Whether another plan could go on from here: members would hold the state, or the disk takes it, as far as is known."""
        return self._keeping is None or self._keeping.copying.can_hand_over or not self._kept.trouble.refused

    def stop(self, *, hand_over: bool = False) -> None:
        """Finish the steps that are fed, then collect and end: the first Ctrl-C. `hand_over`: another plan goes on from here."""
        self.stopped, self._hands_over = True, hand_over

    async def train(self, feed: Feed, report: Callable[[Report], Awaitable[None]]) -> Mapping[str, torch.Tensor]:
        """Run the job to its end; returns the weights and buffers by name, those on disk read when they are asked for.

        Raises the cause of a failure.
        """
        state: Mapping[str, torch.Tensor] = {}

        async def body() -> None:
            nonlocal state
            await self._report_all(feed, report)
            if self.audit is not None:
                await self.audit.over()
            state = await self._collect()

        await self._run(feed, body, trains=True)
        return state

    async def evaluate(
        self, feed: Feed, hear_outputs: Callable[[int, list[Any]], None] | None = None
    ) -> dict[str, float]:
        """Run the one evaluation of this feed; returns its metrics. `hear_outputs` gets (micro, [loss, *outputs])."""
        metrics: dict[str, float] = {}

        from peers.owner.evaluation import averaged

        async def body() -> None:
            answers = await self._order.get()
            assert answers is not None
            await self._until(answers.complete)
            metrics.update(averaged(self._job, feed, answers))
            await self._collect()

        await self._run(feed, body, hear_outputs)
        return metrics

    async def _run(
        self, feed: Feed, body: Callable[[], Awaitable[None]], hear_outputs: Any = None, *, trains: bool = False
    ) -> None:
        """Offer, feed, hear until `body` is done, part in peace; raises the cause of a failure."""
        self._start = feed.start if trains else None
        if self._job.eval_data is not None:
            from peers.owner.evaluation import Outputs

            self._outputs = Outputs(self._job, self._capture, feed, self.in_users_thread, hear_outputs)
        beside: list[asyncio.Task[None]] = []  # ended when all is done
        try:
            async with asyncio.TaskGroup() as group:
                beside.append(group.create_task(self._watch_failures()))
                if self.plan.shares_samples:
                    from meshcee.equality import check_sharing

                    await self.in_users_thread(check_sharing, self._job, self._capture, self.plan)
                supplier = feed.steering.supplier if trains else None
                with large_apart():
                    beside += await self._offer_all(group, supplier.peer if supplier is not None else "")
                if supplier is not None:
                    from peers.owner.supplier import Supply

                    told = self._data_was_read, self._stalls.tell
                    feed.supply = Supply(supplier, self._job, self.failures, *told, self._timeouts)
                    await feed.supply.begin(self._links, self._transport, self.plan.micro_batch)
                    beside.append(group.create_task(feed.supply.run()))
                self.ready_s = asyncio.get_running_loop().time()
                if self._keeping is not None:
                    beside.append(group.create_task(self._keeping.saving.run()))
                if self.audit is not None:
                    beside.append(group.create_task(self.audit.run()))
                group.create_task(self._feed(feed))
                await body()
                if feed.supply is not None:
                    await feed.supply.close()
                for link in self._links:
                    link.closing = True
                    await link.outbox.finish()
                    await link.stream.aclose()
                for task in beside:
                    task.cancel()
        except* _EpochFailed:
            pass
        except* MeshceeError as group:  # of our own: the user's data or metrics
            self.failures.add(0, leaves(group)[0])  # type: ignore[arg-type]
        finally:
            self._users.shutdown(wait=False, cancel_futures=True)
            for link in self._links:
                link.stream.abort()
            if feed.supply is not None:
                feed.supply.abort()
        if (cause := self.failures.cause) is not None:
            if cause in self.failures.raised:
                cause = await self.in_users_thread(feed.blamed, cause, *self.failures.raised[cause])
            raise cause

    # -- failures ------------------------------------------------------------------------------------------------------

    async def _watch_failures(self) -> None:
        await self.failures.enough()
        raise _EpochFailed

    def _describe(self, peer_id: str) -> str:
        stage = f" (stage {self.plan.label(*self.plan.where(peer_id))})" if peer_id in self.plan.peers else ""
        return f"{self._names.get(peer_id) or peer_id}{stage}"

    def _own_fault(
        self, peer_id: str, text: str, error: MeshceeError, steps: range | None = None, of: object = None
    ) -> None:
        """An error that ends the epoch, and is this member's own; `of` is the member whose frame it could not take, if any."""
        pipeline, index = self.plan.where(peer_id)
        stage = self.plan.pipelines[pipeline].stages[index]
        suspects = frozenset(peer for peer in self.plan.peers if peer in (peer_id, of))
        self.failures.faults.append(Fault(peer_id, error, text, (stage.first, stage.end), steps, suspects))
        self.failures.add(0, error)

    @property
    def _under_way(self) -> range:
        """The steps in which a member may be: from the one that is waited for to the last that is fed."""
        return range(self._step, max([self._step, *(a.round.step for a in self._answers.values())]) + 1)

    def convict(self, peer: str, step: int, why: str) -> None:
        """An audit has found that this member lied."""
        text = f"{self._describe(peer)} has lied about step {step + 1}: {why}"
        self.failures.liars.add(peer)
        self._own_fault(
            peer, text, UnequalError(f"peer {text}. It has no further part in this run"), range(step, step + 1)
        )

    def doubt(self, peer: str, step: int) -> None:
        """A member does not show what an audit asks for: it is lost, and its steps are in doubt."""
        self.failures.doubted.add(peer)
        self._give_up(peer, f"does not show what it had for step {step + 1}, as an audit asks")

    def _give_up(self, peer: str, why: str) -> None:
        """A member answers, and does not do what is its to do."""
        self.failures.stuck.add(peer)
        self.failures.add(LOST_HERE, PeerLostError(f"peer {self._describe(peer)} {why}"))

    # -- offering ------------------------------------------------------------------------------------------------------

    async def _offer_all(self, group: asyncio.TaskGroup, supplier: str) -> list[asyncio.Task[None]]:
        """Until all are READY; returns the tasks that ask for signs of life, from each as soon as it is."""
        beats: list[asyncio.Task[None]] = []

        async def offer_to(offer: Offer) -> None:
            link = await self.offer(offer)
            if self.failures.cause is not None:  # of one that was ready before: the group of the epoch is ending
                raise _EpochFailed
            for task in (self._send(link), self._read(link)):
                group.create_task(task)
            beats.append(group.create_task(beat(link.outbox, self._timeouts, partial(self._gone, link, SILENT))))

        terms = Terms.of(self._job, self._capture, self._timeouts.regroup_s)
        same = (self._capture.train, self._capture.evaluate, self._addresses, self._kept.base is not None)
        ours = (), self._run_name, self._transport.peer_id, supplier
        offered = [Offer(terms, self.plan, self._epoch, self._term, peer, *same, *ours) for peer in self.plan.peers]
        state_bytes = max(offer.state_bytes for offer in offered)
        self._watch = Watch(self.plan, self._timeouts, state_bytes, self._received_bytes)
        async with asyncio.TaskGroup() as offers:
            for offer in offered:
                offers.create_task(offer_to(offer))
        self._links.sort(key=lambda link: self.plan.peers.index(link.peer_id))
        if self._start is not None:
            reader = Reader(self._transport, self._run_name, self._addresses, self._timeouts)
            self._keeping = Keeping(self._kept, self._links, self._capture, self._start, reader, self._until)
            if self.audit is not None:
                self.audit.begin(self._links, self, reader, self._capture, self._kept.base)
        return beats

    def _received_bytes(self) -> int:
        found = self._keeping.saving.moved_bytes if self._keeping is not None else 0
        return found + sum(link.stream.received_payload_bytes for link in self._links)

    async def offer(self, offer: Offer) -> Link:
        """The link to a member that is READY."""
        peer_id = offer.peer_id
        limit_s = self._timeouts.offer_s
        try:
            async with asyncio.timeout(limit_s):
                stream = await self._transport.open(peer_id, "job", self._addresses.get(peer_id, ()))
            stream.max_payload_bytes = 0  # READY has none
            link = Link(offer, stream)
            self._links.append(link)
            sending = partial(unless_silent, partial(self._offering.send, stream, offer), stream, self._timeouts)
            moved = partial(self._offering.moved, stream)
            reply = await while_moving(sending, moved, limit_s, self._timeouts)
        except (JoinError, StreamClosed, TimeoutError) as error:
            why = str(error) or f"it has not got on with its offer for {limit_s:.0f} s"
            if isinstance(error, TimeoutError):
                self.failures.stuck.add(peer_id)
            self.failures.blamed[peer_id] += 1  # whether or not it answers when the roll is called
            lost = PeerLostError(f"peer {self._describe(peer_id)} was lost before the first step: {why}")
            self.failures.add(LOST_HERE, lost)
            raise _EpochFailed from error
        except ProtocolError as error:
            self._own_fault(peer_id, str(error), ProtocolError(f"peer {self._describe(peer_id)}: {error}"))
            raise _EpochFailed from error
        except MeshceeError as error:
            self.failures.add(LOST_HERE, error)
            raise _EpochFailed from error
        if reply.kind != messages.READY:
            refused = messages.error_from(reply.header)
            if is_own(refused):
                told = type(refused)(f"peer {self._describe(peer_id)} failed before the first step: {refused}")
                self._own_fault(peer_id, str(refused), told)
            else:
                if isinstance(refused, PlanError):  # it has no room, or is taken
                    self.failures.stuck.add(peer_id)
                    self.failures.busy |= reply.header.get("busy") is True
                self.failures.add(0, refused)
            raise _EpochFailed
        outputs = offer.evaluation_specs[offer.index].outputs if offer.evaluate else ()
        output_bytes = sum(value.nbytes(self.plan.micro_batch) for value in outputs)
        stream.max_payload_bytes = output_bytes + self._limits.chunk_bytes
        return link

    # -- feeding -------------------------------------------------------------------------------------------------------

    async def in_users_thread(self, call: Callable[..., T], *args: Any) -> T:
        loop = asyncio.get_running_loop()
        try:
            working = loop.run_in_executor(self._users, call, *args)
        except RuntimeError:  # the epoch is over, and so is its thread
            working = loop.run_in_executor(None, call, *args)
        return await self._stalls.watch(working)

    async def _feed(self, feed: Feed) -> None:
        next_step, rounds = feed.start, feed.rounds()
        fed: deque[Answers] = deque(maxlen=2)
        while True:
            round, took_s = await self.in_users_thread(_timed, next, rounds, None)
            if round is None:
                break
            if self._shares is not None and len(fed) == 2:
                await fed[0].complete.wait()  # a sum parts the steps anyway, and shares follow what a step has shown
                self._move_shares(self._shares, fed[0])
            if not round.forward_only:
                if self.stopped and round.step >= self._kept.least:
                    break
                asked = feed.steering.control.saves_before(round.step)
                if (
                    self._keeping is not None
                    and (asked or round.step > feed.start)
                    and not await self._keeping.at(round.step, asked=asked)
                    and feed.steering.control.put_off(round.step)
                ):
                    log.warning(Event.NOT_KEPT, next_step=round.step)
                next_step = round.step + 1
            if self._trace is not None and not round.forward_only:
                round = await self._trace.ask(round, [link.outbox for link in self._links])
            counts = self._shares.counts if self._shares is not None else ()
            portions, shared_s = await self.in_users_thread(_timed, feed.portions, round, self.plan, counts)
            answers = Answers(round, len(self._links), portions, data_s=took_s + shared_s)  # targets may have been read
            self._answers[round.number] = answers
            if self.audit is not None and not round.forward_only:
                await self.audit.fed(answers)
            fed.append(answers)
            await self._order.put(answers)
            async with asyncio.TaskGroup() as group:
                for k, portion in enumerate(answers.portions):
                    if portion.round.num_micro:  # an evaluation may be too small for all
                        links = [link for link in self._links if link.place.pipeline == k]
                        group.create_task(self._feed_pipeline(feed, answers, portion, links, self._ahead[k]))
            await feed.wait(round)
        if self._keeping is not None:
            goes_on = self._hands_over and not self.leaving and next_step < self._job.steps
            asked = feed.steering.control.saves_before(next_step)  # then the other plan begins with that checkpoint
            self.handed_over = await self._keeping.end(next_step, hand_over=goes_on and not asked)
        await self._order.put(None)

    def _data_was_read(self, round: int, seconds: float) -> None:
        if (answers := self._answers.get(round)) is not None:
            answers.data_s += seconds

    async def _feed_pipeline(
        self, feed: Feed, answers: Answers, portion: Portion, links: Sequence[Link], ahead: asyncio.Semaphore
    ) -> None:
        """One pipeline's micro-batches of a round, in its own time."""
        round = answers.round
        kind = messages.EVALUATE if round.forward_only else messages.STEP
        for link in links:
            member = link.place.member if link.place.is_last else 0
            told = replace(portion.round, weights=portion.shares[member])
            if self.audit is not None:
                self.audit.inform(link, told)
            await link.outbox.put(Frame(kind, told.header()))
        for own in range(portion.round.num_micro):
            await ahead.acquire()
            micro = portion.round.first + own
            if feed.supply is not None and not round.forward_only:
                indices = await self.in_users_thread(feed.indices, round, micro)
                await feed.supply.ask(answers, own, indices, feed.size(round, micro), links)
                continue
            inputs, took_s = await self.in_users_thread(_timed, feed.inputs, round, micro)
            answers.data_s += took_s
            for link in links:
                names = link.offer.raw_inputs(forward_only=round.forward_only)
                first, end = link.place.rows(feed.size(round, micro))
                if names and first < end:
                    own_inputs = {name: inputs[name][first:end] for name in names}
                    if self.audit is not None:
                        self.audit.gave(link, round.number, own, own_inputs)
                    meta, payloads = tensors.pack(list(own_inputs.values()))
                    header = {"round": round.number, "micro": own, "names": list(names), "tensors": meta}
                    frame = Frame(messages.INPUT, header, payloads)
                    answers.fed_bytes[link.peer_id] = answers.fed_bytes.get(link.peer_id, 0) + frame.payload_bytes
                    await link.outbox.put(frame)

    # -- hearing -------------------------------------------------------------------------------------------------------

    async def _send(self, link: Link) -> None:
        with contextlib.suppress(StreamClosed):  # the reader tells of it, after what the member itself has said
            await link.outbox.run()

    async def _read(self, link: Link) -> None:
        try:
            while True:
                frame = await link.stream.recv()
                if frame.kind != messages.PONG:
                    self._watch.progress()
                if self._keeping is not None and self._keeping.hear(link, frame):
                    if self.audit is not None:
                        self.audit.copied(link, frame)
                    continue
                if self.audit is not None and self.audit.hear(link, frame):
                    continue
                if frame.kind == messages.PONG:
                    self._watch.hear(link.peer_id, frame.header)
                elif frame.kind == messages.END:
                    link.ended.set()
                else:
                    await self._take(link, frame)
        except StreamClosed as closed:
            if not link.closing:
                self._gone(link, closed)
        except ProtocolError as error:
            told = ProtocolError(f"peer {self._describe(link.peer_id)}: {error}")
            self._own_fault(link.peer_id, str(error), told, self._under_way, getattr(error, "of", None))

    def _gone(self, link: Link, closed: StreamClosed | str) -> None:
        self.failures.missed.add(link.peer_id)
        if closed == SILENT:
            self.failures.silent.add(link.peer_id)
        told = f"peer {self._describe(link.peer_id)} was lost in step {self._step + 1}, before it was applied: {closed}"
        self.failures.add(LOST_HERE, PeerLostError(told))

    async def _take(self, link: Link, frame: Frame) -> None:
        header = frame.header
        if frame.kind == messages.FAILED:
            link.closing = True  # its end of file is a consequence
            at = header.get("step")
            steps = range(at, at + 1) if type(at) is int else self._under_way
            rank, failure, lost = reported(header, link.peer_id, steps.start, self._describe)
            self.failures.blame(link.peer_id, lost)
            if "round" in header and (answers := self._answers.get(need(header, "round", int))) is not None:
                part, micro = answers.portions[link.place.pipeline].round, need(header, "micro", int)
                if 0 <= micro < part.num_micro:
                    self.failures.raised[failure] = answers.round, part.first + micro
            if is_own(failure):
                self._own_fault(link.peer_id, need(header, "message", str), failure, steps, header.get("of"))
            else:
                self.failures.add(rank, failure)
            return
        if frame.kind == messages.CLOCK and self._trace is not None:
            self._trace.hear_clock(link.peer_id, header)
            return
        if frame.kind == messages.LEAVING:
            self.leaving.add(link.peer_id)
            return
        if frame.kind == messages.AGAIN:
            self.failures.add(LOST_HERE, self._offering.missed(link.peer_id))
            return
        if frame.kind not in messages.ANSWERS:
            raise ProtocolError(f"it sent a frame of kind {frame.kind!r}, which has no meaning here")
        answers = self._answers.get(need(header, "round", int))
        if answers is None:
            raise ProtocolError(f"it answered for round {header['round']}, which is not running")
        is_last = link.place.is_last
        if frame.kind == messages.APPLIED:
            answers.apply(link.place, header)
            if answers.round.trace and self._trace is not None:
                self._trace.hear(link.peer_id, answers.round.step, frame.payloads)
        elif frame.kind == messages.LOSS and is_last and not answers.round.forward_only:
            micro = answers.new(link.place, header)
            told = answers.losses[micro, link.place.member] = need(header, "told", list[float])
            if len(told) != 1 + len(self._capture.terms):
                raise ProtocolError("it told of other terms of the loss than the graph has")
            if answers.heard_of(micro):
                self._ahead[link.place.pipeline].release()
        elif frame.kind == messages.OUTPUT and is_last and answers.round.forward_only:
            assert self._outputs is not None
            with self._watch.ours():
                if await self._outputs.take(answers, link.place, frame):
                    self._ahead[link.place.pipeline].release()
        else:
            raise ProtocolError(f"it sent a frame of kind {frame.kind!r}, which has no meaning here")
        answers.check()

    async def _report_all(self, feed: Feed, report: Callable[[Report], Awaitable[None]]) -> None:
        """One report a step, in order; the metrics of an evaluation go with the step before it.

        A step lasts from the one before to its own last answer, whoever of the owner's side is late to look at that.
        """
        started_s = last_s = time.perf_counter()
        held: Report | None = None
        codecs = CodecNews(self.plan)
        while (answers := await self._order.get()) is not None:
            self._step = answers.round.step
            await self._until(answers.complete)
            del self._answers[answers.round.number]
            if answers.round.forward_only:
                from peers.owner.evaluation import averaged

                assert held is not None
                await self._tell(feed, report, replace(held, metrics=averaged(self._job, feed, answers)))
                waited = feed.steering.listeners.waits != "never"  # then the next step has not begun before
                last_s = time.perf_counter() if waited else max(last_s, answers.completed_s)
                continue
            step_s, last_s = answers.completed_s - last_s, answers.completed_s
            self._watch.stepped(step_s)
            weight, predicted = feed.weighed.pop(answers.round.step, None), self.plan.predicted
            loss, *terms = answers.sums()
            mean_s = (answers.completed_s - started_s) / (answers.round.step + 1 - feed.start)
            held = Report(
                step=answers.round.step,
                steps=self._job.steps,
                loss=loss,
                terms=dict(zip(self._capture.terms, terms, strict=True)),
                step_s=step_s,
                samples_per_s=self._job.batch_size / step_s,
                eta_s=mean_s * (self._job.steps - answers.round.step - 1),
                limit=answers.limit(self.plan, self._names, step_s),
                norm=next((a["norm"] for a in answers.applied.values() if a.get("norm") is not None), None),
                lr=next((group.get("lr") for group in reversed(answers.round.hyper)), None),
                tokens_per_s=None if weight is None else weight / step_s,
                bound_share=None if predicted is None else predicted.lower_bound_s / step_s,
                crossed_bytes=sum(found.wire_bytes for found in answers.codecs.values()),
                shares=tuple(portion.round.num_micro for portion in answers.portions),
                codecs={f"{stage}->{target}": found for (stage, target), found in answers.codecs.items()},
                observed=answers.as_planned(self.plan, reads_ahead=self._job.workers > 0),
            )
            codecs.hear(answers)
            if not feed.evaluates_after(answers.round.step):
                await self._tell(feed, report, held)

    def _move_shares(self, shares: Shares, answers: Answers) -> None:
        """The next steps' micro-batches go to the pipelines by what this step showed of them."""
        if answers.round.forward_only:
            return
        seconds = [0.0] * len(self.plan.pipelines)
        for link in self._links:
            run_s = float(answers.applied[link.peer_id]["seconds"].get("run", 0.0))
            seconds[link.place.pipeline] = max(seconds[link.place.pipeline], run_s)
        if shares.hear([portion.round.num_micro for portion in answers.portions], seconds):
            log.info(Event.SHARES, step=answers.round.step, shares=shares.counts, took_s=seconds)

    async def _tell(self, feed: Feed, report: Callable[[Report], Awaitable[None]], what: Report) -> None:
        await report(what)
        feed.reported(what.step)
        if self._keeping is not None:
            self._keeping.reported(what.step)
            for peer in self._keeping.copying.late(self._watch.limit_s):
                self._give_up(peer, "computes, and does not get on with a copy of its stage")

    async def _until(self, event: asyncio.Event) -> None:
        """Wait for members, but not forever: one whose device hangs still says that it lives."""
        while not await self._watch.until(event):
            for_s, stuck, parted = self._watch.idle_s, self._watch.stuck(), self._watch.parted()
            self.failures.stuck.update(stuck)
            for a, b in () if stuck else parted:  # who waits for a stuck one may seem to wait for another
                self.failures.blame(a, [b])
            who = " and ".join(map(self._describe, stuck or [a for a, _ in parted]))
            why = "it has all that it needs" if stuck else "they wait for each other" if parted else "nobody says why"
            told = f"{who or 'no peer'} has not got on with step {self._step + 1} for {for_s:.0f} s: {why}"
            self.failures.add(LOST_HERE, PeerLostError(told))

    # -- the end -------------------------------------------------------------------------------------------------------

    async def _save(self, keeping: Keeping) -> None:
        """Have the weights on the disk. One that refuses them is waited for, unless another plan goes on at once, or until the
        user stops the run. A member is not, whose copies cannot be read.
        """
        await self._until(keeping.saving.settled)
        goes_on = self._hands_over and self._step + 1 < self._job.steps
        if goes_on:
            self.handed_over = await keeping.hand_over_instead()
        unread = Counter[str]()
        while not goes_on and await keeping.again(lambda: self.stopped):
            await self._until(keeping.saving.settled)
            unread = Counter({peer: unread[peer] + 1 for peer in keeping.saving.unread})
            for peer, times in unread.items():
                if times == MOST_UNREAD:
                    self._give_up(peer, "answers, and nobody has all of the copy of its stage")

    async def _collect(self) -> Mapping[str, torch.Tensor]:
        """The weights, unless they were handed over; then word from every member that its neighbours may leave."""
        keeping = self._keeping
        if keeping is not None and not self.handed_over:
            await self._save(keeping)
        for link in self._links:
            await link.outbox.put(Frame(messages.END, {"handed": self.handed_over}))
        for link in self._links:
            await self._until(link.ended)
        if keeping is not None and self.handed_over:
            await self._until(keeping.copying.handed_over)
        if keeping is None or not self.has_weights:
            return {}
        check_replicas(self._links, self._describe)
        found = await asyncio.to_thread(keeping.weights)
        return self._capture.state_dict(ChainMap({}, found, self._capture.state))  # type: ignore[arg-type]

    def averages(self, state: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """This state, which `train` has returned, with the average of what was trained; nothing where the job has none."""
        found = self._keeping.averages() if self._keeping is not None else {}
        return self._capture.state_dict(ChainMap({}, found, state)) if found else {}  # type: ignore[arg-type]
