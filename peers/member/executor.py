"""Runs the steps of one stage: decides by the local rule, computes on the device's thread, sends what is ready.

The idea: a step is a transaction. F, B and W run as arrivals allow and windows permit. When the first stage has run
its last B every gradient exists, so it sends the commit down the chain. A stage applies once its own W's are done and
it knows of the commit. Until then `rollback` forgets the step. There is no barrier between steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from meshcee.capture import StageSpec, Value
from meshcee.errors import NonFiniteLossError, ProtocolError
from meshcee.job import WEIGHS_NOTHING, seed_of
from meshcee.role import Piece, Place, StageFlops
from meshcee.sampling import NO_STEP
from meshcee.schedule import Kind, StageView, choose
from meshcee.stage import Boundaries, StageRunner
from peers.device import Compute
from peers.member.coding import Coding
from peers.member.inbox import End, Inbox, TakeCopy, named_tensors, norms_of, tensors_of
from peers.member.settlement import Settlement
from peers.state import CopyStore
from peers.transport import Frame
from peers.wire import OWNER, Bandwidth, Crossed, Links, Outbox, Round, Spans, messages, need

if TYPE_CHECKING:
    from peers.groups import FinishedBuckets

__all__ = ["Executor", "Raised"]

T = TypeVar("T")


class Raised(Exception):
    """On the device, by a micro-batch of a round; the cause is what was."""


class Executor:
    """Runs the rounds that the inbox receives, in order, until the owner's stream ends or something fails."""

    def __init__(
        self,
        runner: StageRunner,
        place: Place,
        inbox: Inbox,
        compute: Compute,
        owner: Outbox,
        flops: StageFlops,
        held: CopyStore,
        boundaries: Boundaries | None = None,
        eval_boundaries: Boundaries | None = None,
        *,
        copied: Callable[[int], None] = lambda next_step: None,
        crossed: Crossed = lambda rates, depths: None,
        bandwidth: Bandwidth = lambda peer: math.inf,
    ) -> None:
        self._runner = runner
        self.place = place
        self._inbox = inbox
        self._compute = compute
        self._owner, self.feeder = owner, owner.stream  # inputs may come from a supplier
        self._flops = flops
        self.spans = Spans()
        self.coding = Coding(
            {messages.F: place.stage.codec_out, messages.B: place.stage.codec_back},
            place.arriving,
            compute,
            seed=place.seed,
            stage=place.number,
            limit_bytes=place.limit_bytes,
            spans=self.spans,
        )
        self.copies = held  # copies, for whoever reads them
        self._copied = copied  # told of each copy
        self._boundaries = boundaries or Boundaries.uncut(runner.spec)
        self._eval_boundaries = eval_boundaries or Boundaries.uncut(runner.eval_spec or runner.spec)
        self.links = Links(place.epoch, crossed, bandwidth)
        self.settlement = Settlement(runner, place, inbox, compute, self.links, self.coding, self._wait, self.spans)
        self.seconds: dict[str, float] = {}
        self._finished: Sequence[FinishedBuckets] = ()  # of the running step, one for each sum with other members
        self.complete = asyncio.Event()  # not set while moments are coming: nothing is applied or copied then
        self.complete.set()
        self.wants: Callable[[], tuple[str, ...]] = tuple  # whom it waits for now; nobody while it has something to do
        self._is_untouched = True
        self.max_live = 0  # most micro-batches between F and W, ever
        self.max_in_flight = 0  # most micro-batches between F and B, ever

    @property
    def step(self) -> int:
        """The step that was begun last."""
        return self._runner.step

    def untouched(self) -> Mapping[str, torch.Tensor]:
        """The weights as they were offered, if no step was applied: another try need not send them again."""
        return self._runner.state_dict() if self._is_untouched and self._compute.device.type == "cpu" else {}

    async def close(self) -> None:
        """Free the stage's memory behind calls that may still run, sums beside too, also where these outlast whoever waits."""
        await self._compute.behind(self._runner.close)

    async def run(self) -> None:
        """Take rounds until cancelled."""
        while True:
            with self._waiting(lambda: (OWNER,)):
                round = await self._inbox.rounds.get()
            if isinstance(round, End):
                await self._owner.put(Frame(messages.END))
            elif isinstance(round, TakeCopy):
                await self._copy(round)
            elif round.forward_only:
                await self._evaluate(round)
            else:
                await self._train(round)

    async def take(self, peer: str, frame: Frame) -> None:
        """One frame from another member: its origin decides what it may be."""
        place, inbox, header = self.place, self._inbox, frame.header
        if frame.kind in messages.SUMS:
            self.settlement.take(peer, frame)
            return
        round, apart = need(header, "round", int), place.apart(peer)
        if self.links.witness is not None:
            self.links.witness.received(peer, frame)
        if frame.kind == messages.COMMIT and peer == place.above:
            clip = header.get("clip")
            await self.settlement.commit(round, None if clip is None else need(header, "clip", float))
            return
        values = await self.coding.values(frame)
        if frame.kind == messages.F and apart == -1:
            if not values or isinstance(values[-1], float):
                raise ProtocolError("an activation frame ends with the generator's state")
            inbox.put_forward(round, need(header, "micro", int), peer, values)
        elif frame.kind == messages.B and apart == 1:
            inbox.put_back(round, need(header, "micro", int), peer, tensors_of(values))
        elif frame.kind == messages.NORMS and peer in place.below:
            inbox.put_norms(round, peer, norms_of(values, len(place.norm_order)))
        elif frame.kind == messages.SHARED and apart > 0:
            shared = self._shared(name for name, sender in place.partial_from if sender == peer)
            inbox.put_shared(round, need(header, "micro", int), peer, named_tensors(header, values, shared))
        elif frame.kind == messages.TOTAL and apart < 0:
            shared = self._shared(name for name, sender in place.totals_from.items() if sender == peer)
            inbox.put_totals(round, named_tensors(header, values, shared))
        else:
            raise ProtocolError(f"peer {peer} sent a frame of kind {frame.kind!r}, which has no meaning here")

    def _shared(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._runner.trainable[name] for name in names}

    async def _until_whole(self) -> None:
        """What the optimizer has kept has a time-out of its own."""
        with self._waiting(lambda: (OWNER,)):
            await self.complete.wait()

    async def _copy(self, wanted: TakeCopy) -> None:
        await self._until_whole()
        await self._compute.run(self.copies.take, wanted.next_step, self._runner, wanted.since, wanted.in_use)
        self._copied(wanted.next_step)

    # -- one training step ---------------------------------------------------------------------------------------

    async def _train(self, round: Round) -> None:
        runner = self._runner
        self.seconds = dict.fromkeys(("f", "b", "w", "wait", "apply"), 0.0)
        start_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.spans.start(round.trace)
        runner.begin(round.step)
        if self.links.witness is not None:
            self.links.witness.begin(round)
        with contextlib.ExitStack() as summing:
            async with self.settlement.summing(round) as self._finished:
                await self.take_actions(round)
                summed_s = time.perf_counter()
                self.seconds["run"] = loop.time() - began_s
                summing.enter_context(self._waiting(lambda: self.settlement.summed_with))
        self._waited(summed_s)
        clip = await self.settlement.run(round)
        settled_s = time.perf_counter()
        await self._until_whole()
        self._waited(settled_s)
        applied_s = time.perf_counter()
        self._is_untouched = False
        await self._compute.run(self._apply, round, None if clip is None else torch.tensor(clip, dtype=torch.float64))
        self.seconds["apply"] = time.perf_counter() - applied_s
        self.spans.add("apply", -1, applied_s, time.perf_counter())
        self._inbox.finish(round.number)
        coding_s, codecs = self.coding.take()
        seconds = {**self.seconds, **coding_s, "total": time.perf_counter() - start_s}
        header = {
            "round": round.number,
            "step": round.step,
            "norm": self.settlement.norm,
            "seconds": seconds,
            "codecs": codecs,
            "links": self.links.seen(),
            "memory": self._compute.memory.most_bytes(),
            "fed": self.feeder.rates()[1],  # bytes per second, of inputs
        }
        await self._owner.put(Frame(messages.APPLIED, header, self.spans.take()))

    def _apply(self, round: Round, clip: torch.Tensor | None) -> None:
        """A norm that clips has been looked at. Without one each stage looks for itself. Others may have applied the
        step, but then it is never whole, so nobody is told of it, and no copy and no checkpoint has it."""
        if clip is None and (name := self._runner.not_finite()) is not None:
            raise NonFiniteLossError(
                f"the gradient of {name!r} in step {round.step + 1} is not finite, though its loss is; the step does not count. "
                "Lower the learning rate, set clip_norm, or look at this batch"
            )
        if (witness := self.links.witness) is not None:
            witness.before(self._runner)
        self._runner.apply(clip, round.hyper)
        if witness is not None:
            witness.after(round, self._runner)

    async def take_actions(self, round: Round) -> None:
        """Every F, B and W of a step."""
        place = self.place
        f = b = w = 0
        while w < round.num_micro:
            action = choose(self._view(round, f, b, w))
            if action is None:
                await self._wait(partial(self._missing, round, f, b, w))
            elif action is Kind.F and place.is_last:
                # Its gradient needs nobody: F and B in one visit to the compute thread.
                await self._forward_and_back(round, f)
                f, b, w = f + 1, b + 1, w + place.fused
                self.max_live, self.max_in_flight = max(self.max_live, f - w + place.fused), max(self.max_in_flight, 1)
                await self._after_backward(round, b)
            elif action is Kind.F:
                await self._forward(round, f)
                f += 1
                self.max_live, self.max_in_flight = max(self.max_live, f - w), max(self.max_in_flight, f - b)
            elif action is Kind.B:
                await self._backward(round, b)
                b, w = b + 1, w + place.fused
                await self._after_backward(round, b)
            else:
                await self._weight_gradient(round, w)
                w += 1

    def _view(self, round: Round, f: int, b: int, w: int) -> StageView:
        """What the local rule sees; each kind in micro order, so only the next of each matters."""
        place, inbox, key = self.place, self._inbox, round.number
        input_here = f < round.num_micro and self._input_ready(key, f)
        wanted = {piece.peer for piece in place.targets(place.micro_batch)}
        gradient_here = b < f and wanted <= inbox.back.get((key, b), {}).keys()
        if place.fused:
            gradient_here = gradient_here and self._partials_ready(key, b)
        return StageView(
            num_micro=round.num_micro,
            forwards=f,
            backwards=b,
            weights=w,
            input_here=input_here,
            gradient_here=gradient_here,
            weight_here=w < b and self._partials_ready(key, w),
            window=place.stage.window,
            live_cap=place.stage.live_cap,
        )

    def _missing(self, round: Round, f: int, b: int, w: int) -> list[str]:
        """Who has not sent what comes next of each kind."""
        place, inbox, key = self.place, self._inbox, round.number
        found: list[str] = []
        if f < round.num_micro:
            found += self._absent(key, f, self._runner.spec, place.micro_batch)
        if b < f and not place.is_last:
            arrived = inbox.back.get((key, b), {})
            found += [piece.peer for piece in place.targets(place.micro_batch) if piece.peer not in arrived]
        return found + [peer for name, peer in place.partial_from if (name, peer) not in inbox.shared.get((key, w), {})]

    def _absent(self, round: int, micro: int, spec: StageSpec, samples: int) -> list[str]:
        """Who has not sent what F of this micro-batch needs."""
        arrived = self._inbox.forward.get((round, micro), {})
        found = [piece.peer for piece in self.place.sources(samples) if piece.peer not in arrived]
        return found if not spec.raw_inputs or (round, micro) in self._inbox.raw else [OWNER, *found]

    def _input_ready(self, round: int, micro: int) -> bool:
        return not self._absent(round, micro, self._runner.spec, self.place.micro_batch)

    def _partials_ready(self, round: int, micro: int) -> bool:
        return self.place.partial_from <= self._inbox.shared.get((round, micro), {}).keys()

    async def _wait(self, wants: Callable[[], Iterable[str]]) -> None:
        """For the next arrival; `wants` are those who have not sent what is missing."""
        start_s = time.perf_counter()
        self._inbox.changed.clear()
        with self._waiting(wants):
            await self._inbox.changed.wait()
        self._waited(start_s)

    @contextlib.contextmanager
    def _waiting(self, wants: Callable[[], Iterable[str]]) -> Iterator[None]:
        self.wants = lambda: tuple(dict.fromkeys(wants()))
        try:
            yield
        finally:
            self.wants = tuple

    def _waited(self, start_s: float) -> None:
        if "wait" in self.seconds:
            self.seconds["wait"] += time.perf_counter() - start_s
        self.spans.add("wait", -1, start_s, time.perf_counter())

    async def _timed(self, kind: str, round: Round, micro: int, call: Any) -> Any:
        start_s = time.perf_counter()
        work = sum(getattr(self._flops, letter) for letter in kind)
        result = await self._computed(round, micro, self._compute.run(call, flops=work))
        self.seconds[kind[0]] += time.perf_counter() - start_s
        self.spans.add(kind.upper(), micro, start_s, time.perf_counter())
        return result

    async def _computed(self, round: Round, micro: int, working: Awaitable[T]) -> T:
        try:
            return await working
        except Exception as error:
            raise Raised(round.number, micro) from error

    def _arrived(self, round: int, micro: int) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Sequence[Any]]]:
        """Raw inputs, and by source what it sent."""
        return self._inbox.raw.pop((round, micro), {}), self._inbox.forward.pop((round, micro), {})

    def _joined(self, round: Round, micro: int, parts: Mapping[str, Sequence[Any]]) -> tuple[Sequence[Any], Any]:
        """What F receives, and the generator's state or, in the first stage, its seed."""
        place = self.place
        if place.is_first:
            return (), seed_of(place.seed, round.step, round.first + micro)
        size = place.micro_batch
        return self._boundaries.before.join(parts, place.rows(size), place.sources(size))

    async def _forward(self, round: Round, micro: int) -> None:
        raw, parts = self._arrived(round.number, micro)
        place = self.place
        targets = place.targets(place.micro_batch)

        def work() -> list[list[Any]]:
            sent, rng, _ = self._runner.forward(micro, raw, *self._joined(round, micro, parts))
            return self._boundaries.after.split(sent, rng, place.rows(place.micro_batch), targets)

        await self._send_forward(
            targets, round.number, micro, self._runner.spec.sent, await self._timed("f", round, micro, work)
        )

    async def _forward_and_back(self, round: Round, micro: int) -> None:
        """On the last stage: F, the loss, then B (and W where they are fused)."""
        raw, parts = self._arrived(round.number, micro)
        weight, partials = round.weights[micro], self._partials(round.number, micro)

        def work() -> tuple[list[float], list[list[Any]], dict[str, torch.Tensor]]:
            _, _, outputs = self._runner.forward(micro, raw, *self._joined(round, micro, parts))
            told = [float(output) for output in outputs]
            if weight == 0 and len(self.place.group) > 1:
                told = [0.0] * len(told)  # our rows hold no target that counts, so their mean is 0 / 0
            value = told[0]
            if not math.isfinite(value):
                advice = "Lower the learning rate, set clip_norm, or look at this batch"
                raise NonFiniteLossError(
                    f"the loss of step {round.step + 1}, micro-batch {round.first + micro + 1} is {value}; "
                    f"the step was not applied. {WEIGHS_NOTHING if weight == 0 else advice}"
                )
            if self.place.fused:
                with self._finishing(round, micro):
                    received, onward = self._runner.backward(micro, (), weight, partials)
            else:
                received, onward = self._runner.backward_input(micro, (), weight), {}
            return told, self._split_back(received), onward

        told, received, onward = await self._timed("fbw" if self.place.fused else "fb", round, micro, work)
        header = {"round": round.number, "step": round.step, "micro": micro, "told": told}
        await self._owner.put(Frame(messages.LOSS, header))
        await self._send_back(round.number, micro, received, onward)

    async def _backward(self, round: Round, micro: int) -> None:
        arrived = self._inbox.back.pop((round.number, micro), {})
        place, weight = self.place, round.weights[micro]
        partials = self._partials(round.number, micro) if place.fused else {}

        def work() -> tuple[list[list[Any]], Mapping[str, torch.Tensor]]:
            targets, sent = place.targets(place.micro_batch), self._runner.sent(micro)
            gradients = self._boundaries.after.join_back(arrived, targets, sent)
            if place.fused:
                with self._finishing(round, micro):
                    received, onward = self._runner.backward(micro, gradients, weight, partials)
            else:
                received, onward = self._runner.backward_input(micro, gradients, weight), {}
            return self._split_back(received), onward

        await self._send_back(round.number, micro, *await self._timed("bw" if place.fused else "b", round, micro, work))

    def _split_back(self, received: Sequence[torch.Tensor | None]) -> list[list[Any]]:
        size = self.place.micro_batch
        return self._boundaries.before.split_back(received, self.place.rows(size), self.place.sources(size))

    async def _send_back(
        self, round: int, micro: int, received: Sequence[Sequence[Any]], onward: Mapping[str, torch.Tensor]
    ) -> None:
        await self._send(
            self.place.sources(self.place.micro_batch),
            messages.B,
            round,
            micro,
            received,
            [True] * len(self._runner.spec.received),
        )
        if self.place.fused:
            await self._send_partials(round, micro, onward)

    async def _after_backward(self, round: Round, done: int) -> None:
        """The first stage's last B is the commit point: every gradient of the step exists somewhere."""
        if done == round.num_micro and self.place.is_first and not self.place.votes:
            await self.settlement.commit(round.number, None)

    async def _weight_gradient(self, round: Round, micro: int) -> None:
        partials = self._partials(round.number, micro)

        def work() -> dict[str, torch.Tensor]:
            with self._finishing(round, micro):
                return self._runner.backward_weight(micro, partials)

        await self._send_partials(round.number, micro, await self._timed("w", round, micro, work))

    def _finishing(self, round: Round, micro: int) -> contextlib.ExitStack[bool | None]:
        """Around a W: the last one makes gradients whole, which sums wait for. An emulated device has all at its end."""
        hearing = contextlib.ExitStack()
        if micro + 1 == round.num_micro and self._compute.pace is None:
            for whole in self._finished:
                hearing.enter_context(whole.hear())
        return hearing

    async def _send_partials(self, round: int, micro: int, partials: Mapping[str, torch.Tensor]) -> None:
        """To the next earlier holder of each shared parameter; None where no gradient flowed, so that it need not wait."""
        for peer in sorted(set(self.place.partial_to.values())):
            names = [name for name, to in self.place.partial_to.items() if to == peer]
            values = [partials.get(n) for n in names]
            header = {"epoch": list(self.place.epoch), "round": round, "micro": micro, "names": names}
            await self._put(peer, self.coding.frame(messages.SHARED, header, values, (), self._runner.step))

    def _partials(self, round: int, micro: int) -> dict[str, torch.Tensor]:
        """By parameter; where several members of a group send one, their sum in plan order."""
        arrived = self._inbox.shared.pop((round, micro), {})
        found: dict[str, torch.Tensor] = {}
        for peer in self.place.neighbours:
            for (name, sender), tensor in arrived.items():
                if sender == peer and tensor is not None:
                    found[name] = found[name] + tensor if name in found else tensor
        return found

    # -- evaluation ----------------------------------------------------------------------------------------

    async def _evaluate(self, round: Round) -> None:
        place, spec = self.place, self._runner.eval_spec or self._runner.spec
        if self._runner.weights.eval_ema:
            await self.complete.wait()  # averages come with the moments
        for micro in range(round.num_micro):
            size = round.samples(micro, place.micro_batch)
            rows, targets = place.rows(size), place.targets(size)
            if rows[0] == rows[1]:
                continue  # a last micro-batch that is too small for everyone
            while absent := self._absent(round.number, micro, spec, size):
                await self._wait(partial(list, absent))
            raw, parts = self._arrived(round.number, micro)
            seed = seed_of(place.seed, NO_STEP, round.first + micro)
            working = self._compute.run(self._evaluated, raw, parts, rows, size, seed)
            sent, outputs = await self._computed(round, micro, working)
            await self._send_forward(targets, round.number, micro, spec.sent, sent)
            if place.is_last:
                header = {"round": round.number, "micro": micro}
                await self._owner.put(self.coding.frame(messages.OUTPUT, header, outputs, (), round.step))
        self._inbox.finish(round.number)

    def _evaluated(
        self, raw: Mapping[str, Any], parts: Mapping[str, Sequence[Any]], rows: tuple[int, int], size: int, seed: int
    ) -> tuple[list[list[Any]], list[torch.Tensor]]:
        """`seed` is of the micro-batch: any plan evaluates what draws with the same numbers, each time."""
        place, cut = self.place, self._eval_boundaries
        given = ((), seed) if place.is_first else cut.before.join(parts, rows, place.sources(size))
        sent, rng, outputs = self._runner.evaluate(raw, *given)
        return cut.after.split(sent, rng, rows, place.targets(size)), outputs

    async def _send_forward(
        self, targets: Sequence[Piece], round: int, micro: int, sent: Sequence[Value], frames: Sequence[Sequence[Any]]
    ) -> None:
        # What carries no gradient is a mask, an angle, a count: few bytes, and not to be touched.
        await self._send(targets, messages.F, round, micro, frames, [value.requires_grad for value in sent])

    async def _send(
        self,
        pieces: Sequence[Piece],
        kind: str,
        round: int,
        micro: int,
        frames: Sequence[Sequence[Any]],
        coded: Sequence[bool],
    ) -> None:
        """A frame for each neighbour that has rows in common with us."""
        header = {"epoch": list(self.place.epoch), "round": round, "micro": micro}
        for piece, values in zip(pieces, frames, strict=True):
            await self._put(piece.peer, self.coding.frame(kind, header, values, coded, self._runner.step))

    async def _put(self, peer: str, frame: Frame | Awaitable[Frame]) -> None:
        """Behind what waits for this link. Where that is too much, the link holds the stage up, which is no work of it."""
        loop = asyncio.get_running_loop()
        start_s = loop.time()  # on virtual time, what need not wait takes nothing at all
        await self.links.put(peer, frame)
        if "wait" in self.seconds:
            self.seconds["wait"] += loop.time() - start_s
