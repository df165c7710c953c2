"""A peer's part in a job: takes the offer, builds its stage, links to its neighbours, runs until the owner is done.

The idea: one session per epoch, one TaskGroup per session. Whatever goes wrong in it ends the session, tells the owner
why, and leaves the peer ready for the next job.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import structlog
import torch

from meshcee.capture.graph import unfolded
from meshcee.config import Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, PeerLostError, PlanError, ProtocolError
from meshcee.files import large_apart, limits
from meshcee.files.tensor_files import nbytes_of
from meshcee.stage import StageRunner, tensors
from peers.device import Compute, Graphs
from peers.member.executor import Executor, Raised
from peers.member.inbox import End, Inbox, TakeCopy
from peers.state import Arrivals, Keeper, Lender, Moments, by_parameter, restore
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.wire import (
    Bandwidth,
    Crossed,
    Doing,
    Offer,
    Outbox,
    Round,
    live,
    messages,
    micro_of,
    most_telling,
    need,
    while_alive,
    while_moving,
)

__all__ = ["Member", "Session"]

log = structlog.get_logger()

MOST_RUNS = 256  # whose newest epoch is remembered
Epoch = tuple[int, str, int]  # of a run: the count of its owners' starts, the owner, the epoch's number


class _OwnerDone(Exception):
    """The owner closed the job's stream: the session is over."""


class Session:
    """One epoch of one job on this peer."""

    def __init__(
        self,
        offer: Offer,
        runner: StageRunner,
        stream: Stream,
        transport: Transport,
        compute: Compute,
        timeouts: Timeouts,
        keeper: Keeper,
        crossed: Crossed,
        bandwidth: Bandwidth,
        moments: Moments,
        ready: Frame,
        sign: Callable[[bytes], bytes],
    ) -> None:
        """`ready` is told first once it runs: the owner lets neighbours attach then, who may be quick."""
        self.offer = offer
        self._timeouts = timeouts
        self.done = asyncio.Event()
        self._stream = stream
        self._transport = transport
        self._compute = compute
        self._place = offer.place
        # A neighbour may be a window ahead, the owner a step; whoever sends more than that ignores the plan.
        self._inbox = Inbox(limit=4 * offer.max_in_flight + 16)
        self._owner = Outbox(stream)
        self._owner.post(ready)
        self._keeper = keeper
        self.executor = Executor(
            runner,
            offer.place,
            self._inbox,
            compute,
            self._owner,
            offer.flops,
            keeper.copies,
            *offer.boundaries,
            copied=keeper.copied,
            crossed=crossed,
            bandwidth=bandwidth,
        )
        if offer.terms.audited:
            from peers.member.audit import StepWitness
            from peers.wire.audit import signed_by

            self.executor.links.witness = StepWitness(offer, keeper.copies, sign, signed_by)
        self.executor.complete.clear()
        self._complete = partial(self._take_moments, moments, runner, compute)
        self._group: asyncio.TaskGroup | None = None
        self._linked = False
        self.ending = False  # nothing more is asked for: from here on neighbours may close

    async def run(self) -> None:
        """Until the owner closes its stream; raises what went wrong otherwise."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._owner.run())
                group.create_task(self.executor.run())
                group.create_task(self._read_owner())
                group.create_task(self._watch_owner())
                group.create_task(self._keeper.run(self._owner))
                group.create_task(self._complete())
                if (witness := self.executor.links.witness) is not None:
                    group.create_task(witness.run(self._owner))
        except* _OwnerDone:
            pass
        except* StreamClosed as closed:
            # Only the owner's outbox raises it bare: links name the stage that was lost.
            log.info("the owner is gone", reason=str(closed.exceptions[0]))
        finally:
            self._group = None

    async def _take_moments(self, moments: Moments, runner: StageRunner, compute: Compute) -> None:
        """Load what the optimizer has kept, which may come behind the first step's micro-batches; or tell that it is nowhere."""
        state = await moments.all()
        if state is None:
            self._owner.post(Frame(messages.AGAIN))
            return
        await compute.run(runner.load_optimizer_state, by_parameter(state))
        self.executor.complete.set()

    def leave(self) -> None:
        """Ask the owner to go on without this peer."""
        self._owner.post(Frame(messages.LEAVING))

    def close(self) -> None:
        """Drop the links to the other stages, after the owner has heard the cause."""
        self.done.set()
        self.executor.settlement.close()
        for outbox in self.executor.links.outboxes.values():
            outbox.stream.abort()

    async def _watch_owner(self) -> None:
        try:
            await live(self._owner, self._timeouts, self._doing)
        except StreamClosed as closed:
            raise _OwnerDone from closed

    def _doing(self) -> Frame:
        streams = (self._stream, *(outbox.stream for outbox in self.executor.links.outboxes.values()))
        moved_bytes = sum(stream.received_payload_bytes for stream in streams)
        busy = self._compute.running > 0 or self._keeper.hashes
        return Doing(self._compute.done, busy, moved_bytes, self.executor.wants()).frame()

    async def _read_owner(self) -> None:
        while True:
            try:
                frame = await self._stream.recv()
            except StreamClosed as closed:
                raise _OwnerDone from closed
            if frame.kind == messages.INPUT:
                self._take_inputs(frame)
            elif frame.kind in (messages.STEP, messages.EVALUATE):
                await self._link()
                evaluation = frame.kind == messages.EVALUATE
                round = Round.from_header(frame.header, forward_only=evaluation, max_micro=self.offer.max_micro)
                await self._inbox.rounds.put(round)
            elif frame.kind == messages.COPY:
                await self._inbox.rounds.put(TakeCopy.from_header(frame.header))
            elif frame.kind == messages.PONG:
                continue  # the last of its offer
            elif frame.kind == messages.PING:
                self._owner.sign(self._doing())
            elif frame.kind == messages.CLOCK:
                asked_s = need(frame.header, "asked_s", float)
                self._owner.post(Frame(messages.CLOCK, {"asked_s": asked_s, "there_s": time.perf_counter()}))
            elif frame.kind == messages.KEEP:
                self._keeper.ask(frame)
            elif frame.kind == messages.AUDIT and (witness := self.executor.links.witness) is not None:
                self._owner.post(await asyncio.to_thread(witness.show, need(frame.header, "round", int)))
            elif frame.kind == messages.END:
                self.ending, self._keeper.copies.goes_on = True, frame.header.get("handed") is True
                await self._inbox.rounds.put(End())
            else:
                raise ProtocolError(f"the owner sent a frame of kind {frame.kind!r}, which has no meaning here")

    def _take_inputs(self, frame: Frame, expected: Sequence[tensors.Expected] | None = None) -> None:
        names = need(frame.header, "names", list[str])
        values = tensors.unpack(need(frame.header, "tensors", list), frame.payloads, expected)
        inputs = {name: value for name, value in zip(names, values) if isinstance(value, torch.Tensor)}
        if not len(names) == len(values) == len(inputs):
            raise ProtocolError("an input frame needs one tensor for each name")
        self._inbox.put_raw(need(frame.header, "round", int), need(frame.header, "micro", int), inputs)

    def supply(self, peer: str, frame: Frame) -> None:
        """Inputs of a micro-batch of training, from the peer that has the data."""
        place, (spec, *_) = self._place, self.offer.specs[self.offer.index :]
        first, end = place.rows(place.micro_batch)
        if peer != self.offer.supplier or need(frame.header, "names", list[str]) != [v.name for v in spec.raw_inputs]:
            raise ProtocolError(f"peer {peer} sent inputs that stage {place.label_of(place.peer)} takes from another")
        self._take_inputs(frame, [(v.dtype, v.sizes(end - first)) for v in spec.raw_inputs if v.dtype is not None])

    async def serve_inputs(self, stream: Stream) -> None:
        """The peer with the data has opened a stream to us: take what comes until the session ends, or say what is wrong."""
        if self._group is None or stream.peer_id != self.offer.supplier:
            raise ProtocolError(f"peer {stream.peer_id} has no data for this epoch")
        stream.max_payload_bytes = self.offer.max_fed_bytes
        self.executor.feeder, outbox = stream, Outbox(stream)
        outbox.post(Frame(messages.ATTACH))

        async def take() -> None:
            while True:
                if (frame := await stream.recv()).kind == messages.INPUT:
                    self.supply(stream.peer_id, frame)
                elif frame.kind != messages.PONG:
                    raise ProtocolError(f"peer {stream.peer_id} sent a frame of kind {frame.kind!r} instead of inputs")

        async def until_done() -> None:
            await self.done.wait()
            raise StreamClosed("the session is over")

        try:
            async with asyncio.TaskGroup() as group:
                for work in (outbox.run(), live(outbox, self._timeouts), take(), until_done()):
                    group.create_task(work)
        except* StreamClosed:
            pass
        except* ProtocolError as errors:
            await stream.send(Frame(messages.FAILED, messages.error_header(errors.exceptions[0])))

    # -- links to other members --------------------------------------------------------------------------------------

    async def _link(self) -> None:
        """On the first round: open a stream to each neighbour behind us in plan order; those before attach to us."""
        if self._linked:
            return
        self._linked = True
        for peer in self._place.links_to:
            try:
                self._use(peer, await self._attached(peer))
            except (JoinError, StreamClosed, TimeoutError) as error:
                raise self._lost(peer, error) from error

    async def _attached(self, peer: str) -> Stream:
        stream = await self._transport.open(peer, "stage", self.offer.addresses.get(peer, ()))
        try:
            stream.max_payload_bytes = self.offer.max_payload_bytes
            async with asyncio.timeout(self._timeouts.join_s):
                await stream.send(Frame(messages.ATTACH, self.offer.attach_header()))
                reply = await stream.recv()
            if reply.kind != messages.ATTACH:
                raise ProtocolError(f"peer {peer} answered the attachment with {reply.kind!r}")
        except BaseException:
            stream.abort()
            raise
        return stream

    def _use(self, peer: str, stream: Stream) -> Outbox:
        assert self._group is not None
        stream.max_payload_bytes = self.offer.max_payload_bytes
        outbox = Outbox(stream, spans=self.executor.spans)
        self.executor.links.add(peer, outbox)
        for work in (outbox.run, partial(live, outbox, self._timeouts), partial(self._read_member, peer, stream)):
            task = self._unless_lost(peer, work)
            try:
                self._group.create_task(task)
            except RuntimeError as over:  # of a group that is being ended
                task.close()
                raise ProtocolError(f"the epoch ends in which peer {peer} is a neighbour") from over
        return outbox

    async def attach(self, stream: Stream) -> None:
        """A neighbour before us in plan order has opened a stream to us: serve it until the session ends."""
        peer, place = stream.peer_id, self._place
        if self._group is None or peer not in place.neighbours or peer in place.links_to:
            raise ProtocolError(f"peer {peer} has nothing to say to stage {place.label_of(place.peer)} of this epoch")
        if peer in self.executor.links.outboxes:
            raise ProtocolError(f"peer {peer} is attached already")
        await self._use(peer, stream).put(Frame(messages.ATTACH))
        await self.done.wait()

    async def _unless_lost(self, peer: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except StreamClosed as closed:
            if not self.ending:
                raise self._lost(peer, closed) from closed

    async def _read_member(self, peer: str, stream: Stream) -> None:
        while True:
            try:
                frame = await stream.recv()
                if frame.kind == messages.PONG:
                    continue  # that it has come is all
                if frame.kind == messages.RATE:
                    self.executor.links.hear(peer, frame.header)
                    continue
                now_s = time.perf_counter()
                self.executor.spans.add(f"receive {frame.kind}", micro_of(frame.header), now_s, now_s)
                await self.executor.take(peer, frame)
            except StreamClosed:
                raise
            except Exception as error:  # ours, or of who has sent it
                error.add_note(peer)
                raise

    def _lost(self, peer: str, error: BaseException) -> PeerLostError:
        lost = PeerLostError(f"stage {self._place.label_of(peer)} on peer {peer} is gone: {error}")
        lost.add_note(peer)
        return lost


class Member:
    """Serves the streams `job` and `stage`; at most one session at a time."""

    def __init__(
        self,
        transport: Transport,
        compute: Compute,
        *,
        memory_bytes: int,
        timeouts: Timeouts,
        graphs: Graphs,
        accept: Callable[[str, Offer], Awaitable[None]],
        begun: Callable[[], Crossed] = lambda: lambda rates, depths: None,
        bandwidth: Bandwidth = lambda peer: math.inf,
        sign: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._transport = transport
        self._compute = compute
        self._sign = sign  # as this peer: what it sends in an audited run
        self._memory_bytes = memory_bytes
        self._timeouts = timeouts
        self._graphs = graphs  # which reads those of others
        self.accept = accept  # (owner, offer) -> raises what is wrong with it for this peer
        self._begun = begun  # for each session: what is told of its steps
        self._bandwidth = bandwidth  # of the link to a peer, in bytes per second, as far as is known
        self.session: Session | None = None
        self.max_live = 0  # of the last session: most micro-batches between F and W, ever
        self.max_in_flight = 0  # between F and B
        self.is_leaving = False
        self._job: Stream | None = None  # of the owner that has reserved this peer
        self._run_name = ""  # for which it has
        self._epochs: dict[str, Epoch] = {}  # run -> the newest that was offered
        self.lender = Lender(transport, timeouts)
        self._idle = asyncio.Event()
        self._idle.set()
        self.busy_changed = asyncio.Event()
        transport.serve("job", self.serve_job)
        transport.serve("stage", self.serve_stage)
        transport.serve("inputs", self.serve_inputs)

    @property
    def peer_id(self) -> str:
        return self._transport.peer_id

    @property
    def is_busy(self) -> bool:
        """A device that computes no more is busy for ever, or until its process is another one."""
        return self._job is not None or self._compute.calls.broken != ""

    def leave(self) -> None:
        """Take no further offer, and ask the owner of the running job, if any, to go on without this peer."""
        self.is_leaving = True
        if self.session is not None:
            self.session.leave()
        self.busy_changed.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def wait_until_unneeded(self) -> None:
        """Idle, and whatever went on without this peer has read what it needs of it."""
        await self._idle.wait()
        await self.lender.until_read()

    async def drop(self) -> None:
        """End the running job here, if any: to its owner, this peer is lost."""
        if self._job is not None:
            self._job.abort()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await self._idle.wait()

    async def serve_job(self, stream: Stream) -> None:
        stream.max_payload_bytes = 3 * self._graphs.limits.graph_bytes  # two graphs and the plan: each is checked
        # Nobody keeps this peer busy by opening a stream and saying nothing.
        received = lambda: stream.received_bytes  # noqa: E731
        frame = await while_moving(stream.recv, received, self._timeouts.offer_s, self._timeouts)
        try:
            await self._make_room(stream, frame)
        except MeshceeError as error:
            busy = self._job is not None
            await stream.send(Frame(messages.REFUSED, messages.error_header(error, busy=busy)))
            await stream.aclose()
            return
        self._job, self._run_name = stream, messages.run_of(frame.header)
        self._idle.clear()
        self.busy_changed.set()
        try:
            with contextlib.ExitStack() as memory:
                await self._serve(stream, frame, memory)
        finally:
            self._job = None
            self._compute.calls.let_go()
            self.lender.over()
            self.session = None
            self._idle.set()
            self.busy_changed.set()

    async def _make_room(self, stream: Stream, frame: Frame) -> None:
        """A run's new epoch ends its old one here; an old epoch, or another run, is refused while we are busy.

        Two owners may believe that a run is theirs. Incarnations are ordered by their count, then by their owner, so one of
        the two is newer for every member, and the other one hears so.
        """
        owner = stream.peer_id
        if frame.kind != messages.OFFER:
            raise ProtocolError(f"expected an offer, got a frame of kind {frame.kind!r}")
        run, (incarnation, number) = messages.run_of(frame.header), messages.epoch_of(frame.header)
        epoch, newest = (incarnation, owner, number), self._epochs.get(run)
        if newest is not None and epoch <= newest:
            since = (
                ""
                if newest[1] == owner
                else f" by {newest[1]}, who owns the run now: it goes on there, or has ended there"
            )
            raise NotPermittedError(
                f"epoch {incarnation}.{number} is over: {newest[0]}.{newest[2]} was offered since{since}"
            )
        if self.is_leaving:
            raise PeerLostError("this peer is leaving the mesh; plan again without it")
        self._epochs.pop(run, None)
        self._epochs[run] = epoch
        while len(self._epochs) > MOST_RUNS:
            del self._epochs[next(iter(self._epochs))]
        if self._job is not None and (self._job.peer_id == owner or self._run_name == run):
            await self.drop()
            if self._epochs.get(run, epoch) > epoch:  # a newer one has come meanwhile
                return await self._make_room(stream, frame)
        if self._job is not None:
            raise PlanError("this peer already runs a job; wait for it, or stop it with `meshcee run stop`")

    async def _serve(self, stream: Stream, frame: Frame, memory: contextlib.ExitStack) -> None:
        taken = Arrivals(stream)

        def moved() -> tuple[int, ...]:
            return taken.moved, stream.received_bytes, self._compute.done

        def sign() -> Frame:
            return Frame(messages.PONG, {"moved": taken.moved + self._compute.done})

        try:
            ours = partial(self.prepare, stream, frame, taken, memory)
            prepare = partial(while_alive, ours, stream, self._timeouts, sign)
            self.session = await while_moving(prepare, moved, self._timeouts.offer_s, self._timeouts)
        except TimeoutError:
            log.warning("an offer was not completed in time", owner=stream.peer_id)
            return
        except StreamClosed as closed:
            log.info("the owner left during its offer", reason=str(closed))
            return
        except Exception as error:
            if not isinstance(error, MeshceeError):
                log.exception("an offer met a bug of ours")
            log.warning("offer refused", owner=stream.peer_id, error=str(error))
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))
            await stream.aclose()
            return
        finally:
            if self.session is None:
                self.lender.keep(taken.tensors)
        if self.is_leaving:  # since the offer came
            self.session.leave()
        offer = self.session.offer
        log.info("job accepted", job=offer.job, owner=stream.peer_id, stage=offer.place.index, blocks=offer.blocks)
        try:
            await self.session.run()
            log.info("job over", job=offer.job)
        except* Exception as failures:
            cause, at = most_telling(failures), {}
            if isinstance(cause, Raised) and (raised := cause.__cause__) is not None:
                at, cause = dict(zip(("round", "micro"), cause.args)), raised
            # What others have lost, or the job's own numbers did, is the owner's to tell.
            say = log.info if at or isinstance(cause, PeerLostError) else log.error
            say("job failed", job=offer.job, error=f"{type(cause).__name__}: {cause}")
            async with asyncio.TaskGroup() as group:
                ending = self.session.executor.settlement.abort()
                group.create_task(self._within(ending))  # first: what hangs in a sum holds the device
                group.create_task(self.report(stream, cause, at))
        finally:
            try:
                await self._within(self.session.executor.settlement.abort())
            finally:
                self.max_live, self.max_in_flight = self.session.executor.max_live, self.session.executor.max_in_flight
                if not self.session.ending:
                    self.lender.keep(self.session.executor.untouched())
                self.session.close()
                # An error's traceback refers to all this for a while, and the next epoch's stage needs the memory.
                await self._within(self.session.executor.close())

    async def _within(self, ending: Awaitable[None]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await ending

    async def report(self, stream: Stream, error: BaseException, at: Mapping[str, int]) -> None:
        """Tell the owner before the links close, so that it hears the cause before its consequences. `at`: of which micro-batch."""
        peer = getattr(error, "__notes__", [None])[0]
        about = {"lost": peer} if isinstance(error, PeerLostError) else {"of": peer, "step": self._step, **at}
        try:
            async with asyncio.timeout(self._timeouts.shutdown_s):
                await stream.send(Frame(messages.FAILED, messages.error_header(error, **about)))
                await stream.aclose()
        except (StreamClosed, TimeoutError):
            log.info("the owner did not hear of the failure", owner=stream.peer_id)

    @property
    def _step(self) -> int | None:
        return self.session.executor.step if self.session is not None else None

    async def prepare(self, stream: Stream, frame: Frame, taken: Arrivals, memory: contextlib.ExitStack) -> Session:
        """The session that an offer asks for; `memory` is left when it is over."""
        await self._compute.calls.free(self._timeouts.hung_s)
        programs = await self._graphs.read(Offer.graphs(frame))
        # Cutting and hashing take seconds for a large model: not on the event loop.
        offer = await asyncio.to_thread(Offer.from_frame, frame, programs, self.peer_id, stream.peer_id)
        await self.accept(stream.peer_id, offer)
        if offer.terms.audited and self._sign is None:
            raise PlanError("this peer has no key to sign its steps with for an audit")
        if offer.state_bytes > self._memory_bytes:
            missing = offer.state_bytes - self._memory_bytes
            raise PlanError(f"stage {offer.place.index} needs {missing / 2**30:.3g} GiB more than this peer offers")
        spec = offer.specs[offer.index]
        if self._compute.device.type == "cpu" and unfolded(spec.inputs, spec.nodes):
            memory.enter_context(large_apart())  # or what is unfolded for a moment would stay: a plan counts it once
        await self._compute.use_threads(offer.plan.threads)
        self._compute.memory.begin()
        held = self.lender.for_epoch(offer)
        weights, moments = await restore(stream, offer, held, self._transport, self._timeouts, taken)
        on_cpu = self._compute.device.type == "cpu"  # then the stage's own memory keeps what is frozen
        if not on_cpu and limits.free_bytes() > nbytes_of(offer.frozen_state):  # which is in it already
            self.lender.freeze(offer, weights.state, weights.digests)
        runner = await self._compute.run(offer.build, weights.spend(), self._compute.device)
        if on_cpu:
            self.lender.freeze(offer, runner.state_dict(), weights.digests)
        stream.max_payload_bytes = offer.max_fed_bytes
        keeper = Keeper(offer, held, self._transport, self._timeouts, self._memory_bytes)
        ours = self._transport, self._compute, self._timeouts
        hashes = {"state": weights.hash, "optimizer": moments.hash}
        header = {"epoch": list(offer.epoch), "term": list(offer.term), "plan": offer.plan.hash(), **hashes}
        ready = Frame(messages.READY, header)
        return Session(
            offer, runner, stream, *ours, keeper, self._begun(), self._bandwidth, moments, ready, self._sign or bytes
        )

    async def serve_stage(self, stream: Stream) -> None:
        await (await self._session_of(stream)).attach(stream)

    async def serve_inputs(self, stream: Stream) -> None:
        await (await self._session_of(stream)).serve_inputs(stream)

    async def _session_of(self, stream: Stream) -> Session:
        stream.max_payload_bytes = 0  # until it has said which stage it is
        async with asyncio.timeout(self._timeouts.join_s):
            frame = await stream.recv()
        if frame.kind != messages.ATTACH:
            raise NotPermittedError(f"peer {stream.peer_id} does not say to which epoch it attaches")
        return self.session_in(frame.header, stream.peer_id)

    def session_in(self, header: Mapping[str, Any], peer: str) -> Session:
        """The session of this epoch. NotPermittedError where there is none."""
        session = self.session
        if session is None or not session.offer.is_epoch(header):
            raise NotPermittedError(f"peer {peer} attached to an epoch that is not running here")
        return session
