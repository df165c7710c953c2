"""The end of a step on one member: its sums with others, totals of shared parameters, the norm, the commit.

The idea: nothing is applied before every gradient of the step is safe. With one pipeline, one member a stage and no
clipping, the last B of the first stage is the commit point. Otherwise votes travel up through the leaders of the stages,
behind the sums and with the norms, and the head of the first pipeline sends the commit down.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial, reduce
from typing import TYPE_CHECKING

import torch

from meshcee.errors import NonFiniteLossError, ProtocolError
from meshcee.role import Place, Sum
from meshcee.stage import StageRunner
from peers.device import Compute
from peers.member.coding import Coding
from peers.member.inbox import Inbox
from peers.transport import Frame
from peers.wire import Links, Round, Spans, messages, need

if TYPE_CHECKING:
    from peers.groups import ChainStatistics, ChainSum, DirectSum, FinishedBuckets, GroupSum

__all__ = ["Settlement"]


class Settlement:
    """`wait` returns when something has arrived in the inbox; it is told who has yet to send. `norm` is the last global norm,
    known to the head."""

    def __init__(
        self,
        runner: StageRunner,
        place: Place,
        inbox: Inbox,
        compute: Compute,
        links: Links,
        coding: Coding,
        wait: Callable[[Callable[[], Iterable[str]]], Awaitable[None]],
        spans: Spans,
    ) -> None:
        self._runner = runner
        self.place = place
        self._inbox = inbox
        self._compute = compute
        self._links = links
        self._coding = coding
        self._wait = wait
        self._spans = spans
        self.norm: float | None = None
        self._sums = {one.number: self._sum(one) for one in place.sums if not one.statistics}
        self._statistics = {one.number: self._folds(one) for one in place.sums if one.statistics}

    def _folds(self, one: Sum) -> ChainStatistics:
        from peers.groups import ChainStatistics

        of = self.place.peer, one.peers, one.names, self._runner
        return ChainStatistics(*of, self._compute, self._links, self._spans, number=one.number)

    def _sum(self, one: Sum) -> ChainSum | GroupSum | DirectSum:
        from peers.groups import ChainSum, DirectSum, GroupSum

        place, links, spans = self.place, self._links, self._spans
        of = place.peer, one.peers, {name: self._runner.trainable[name] for name in one.names}
        if not place.plan.shares_samples:
            if place.peer != one.peers[0]:
                self._runner.keep_terms(one.names)
            return ChainSum(*of, self._compute, links, spans, terms=self._runner.terms, number=one.number)
        if place.meeting_host is None:
            return GroupSum(*of, self._compute, links, spans, number=one.number)
        return DirectSum(*of, self._compute, links, spans, host=place.meeting_host, number=one.number)

    @asynccontextmanager
    async def summing(self, round: Round) -> AsyncIterator[Sequence[FinishedBuckets]]:
        """Around the F's, B's and W's of a step: meanwhile members sum what is whole, and all of it before this ends."""
        if not self._sums and not self._statistics:
            yield ()
            return
        from peers.groups import FinishedBuckets

        finished = [FinishedBuckets(one.buckets, one.parameters) for one in self._sums.values()]
        async with asyncio.TaskGroup() as group:
            for one, whole in zip(self._sums.values(), finished):
                group.create_task(one.run(round.number, whole))
            yield finished
            for whole in finished:
                whole.all()
            for statistics in self._statistics.values():
                group.create_task(statistics.run(round.number))

    @property
    def summed_with(self) -> list[str]:
        """The members whose part of a sum is missing."""
        return [peer for one in (*self._sums.values(), *self._statistics.values()) for peer in one.missing]

    def take(self, peer: str, frame: Frame) -> None:
        """A frame of a sum."""
        number = need(frame.header, "sum", int)
        one = self._sums.get(number) or self._statistics.get(number)
        if one is None:
            raise ProtocolError(f"peer {peer} sent a frame of kind {frame.kind!r} for a sum that is not ours")
        one.take(peer, frame)

    async def abort(self) -> None:
        """Nothing is summed any more: end calls that hang. All have begun to end when this waits first."""
        ending = [one.abort() for one in self._sums.values()]
        await asyncio.gather(*(future for future in ending if future is not None), return_exceptions=True)

    def close(self) -> None:
        """The epoch is over."""
        for one in self._sums.values():
            one.close()
        self._sums.clear()

    async def run(self, round: Round) -> float | None:
        """Until the step is committed; returns what gradients are multiplied by when the job clips."""
        await self.exchange_totals(round.number)
        if self.place.votes:
            await self._vote(round.number, round.step)
        while round.number not in self._inbox.commits:
            await self._wait(lambda: [] if self.place.above is None else [self.place.above])
        return self._inbox.commits[round.number]

    async def exchange_totals(self, round: int) -> None:
        place = self.place
        if place.totals_to:
            totals = self._runner.shared_totals()
            for peer, names in place.totals_to.items():
                # Copies: clipping writes to the gradients while these may still be on their way.
                copies = [totals[n].clone() if n in totals else None for n in names]
                header = {"epoch": list(place.epoch), "round": round, "micro": 0, "names": list(names)}
                await self._links.put(peer, self._coding.frame(messages.TOTAL, header, copies, (), self._runner.step))
        while lacking := place.totals_from.keys() - self._inbox.totals.get(round, {}).keys():
            await self._wait(lambda: map(place.totals_from.__getitem__, lacking))
        if place.totals_from:
            arrived = self._inbox.totals[round]
            self._runner.set_shared_totals({n: t for n, t in arrived.items() if t is not None})

    async def _vote(self, round: int, step: int) -> None:
        """Our norms and those below go up; at the head they make the global norm, and the commit."""
        place, inbox = self.place, self._inbox
        pairs: list[tuple[int, float]] = []
        if place.clip_norm is not None and place.leads:  # all who hold the same blocks have the same sums
            own = await self._compute.run(self._runner.norm_values)
            pairs = [(place.norm_order[name], norm) for name, norm in own if name not in place.totals_from]
        while silent := set(place.below) - inbox.norms.get(round, {}).keys():
            await self._wait(partial(list, silent))
        pairs += [pair for peer in place.below for pair in inbox.norms[round][peer]]
        if place.above is not None:
            # In a payload: a header would be too small for a few thousand parameters. float64 holds every norm as it is.
            indices = torch.tensor([i for i, _ in pairs], dtype=torch.int64)
            found = torch.tensor([norm for _, norm in pairs], dtype=torch.float64)
            await self._links.send(place.above, messages.NORMS, [indices, found], round=round, micro=0)
        elif place.clip_norm is None:
            await self.commit(round, None)
        else:
            # In named_parameters order, as clip_grad_norm_ combines them: another order rounds differently.
            norms = [norm for _, norm in sorted(pairs)]
            # A weight that no gradient reaches has no norm, and no say in the type.
            dtypes = {place.norm_dtypes[i] for i, _ in pairs} or {torch.float32}
            dtype = reduce(torch.promote_types, dtypes)
            norm, clip = await self._compute.run(self._runner.clip, norms, dtype, place.clip_norm)
            self.norm = norm
            if not math.isfinite(norm):
                what = f"the norm of the gradients of step {step + 1} is {norm}, though its loss is finite"
                raise NonFiniteLossError(
                    f"{what}; the step was not applied. Lower the learning rate, or look at this batch"
                )
            await self.commit(round, clip)

    async def commit(self, round: int, clip: float | None) -> None:
        """The step is committed: tell those below at once, before any F of the next step, then note it."""
        for peer in self.place.below:
            await self._links.put(peer, Frame(messages.COMMIT, {"round": round, "clip": clip}))
        self._inbox.put_commit(round, clip)
