"""The sum of gradients over pipelines, bit for bit the plain loop's: each adds its micro-batches to the sum of those before.

The idea: the plain loop adds a parameter's gradients in the order of the micro-batches. Pipelines have runs of these, one behind
the other. So the first pipeline's sum goes to the second, which adds the gradient of each of its micro-batches by itself, in
ascending order, and sends the result on. The last one has the sum of the whole step, and it travels back. Where a micro-batch was
computed changes no number, if all devices of the chain are of one kernel class. Buckets go their way one after the other, each as
soon as its gradients are whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshcee.errors import ProtocolError
from meshcee.stage import tensors
from peers.device import Compute
from peers.groups.buckets import BUCKET_BYTES, Bucket, FinishedBuckets, buckets_of, flattened, presence_of, spread_aside
from peers.transport import Frame
from peers.wire import Links, Spans, messages, need

__all__ = ["ChainSum", "folded"]

Numbers = tuple[list[bool], torch.Tensor]  # which parameters of a bucket have a gradient, and all of them end to end
Terms = Mapping[str, Sequence[torch.Tensor]]


@dataclass
class _Arrivals:
    """Of one round, by bucket: sums of the micro-batches before ours, and of all."""

    before: dict[int, Numbers] = field(default_factory=dict)
    all: dict[int, Numbers] = field(default_factory=dict)


class ChainSum:
    """Adds up `parameters[...].grad` over the members of `chain`, in the order of their micro-batches; the same object on each.

    `terms` are the gradients that came before `.grad`, one for each earlier micro-batch of a member that is not the first
    (`StageRunner.terms`). `number` tells its frames from those of other sums that a member takes part in.
    """

    def __init__(
        self,
        peer: str,
        chain: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        compute: Compute,
        links: Links,
        spans: Spans,
        *,
        terms: Terms,
        number: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        at = chain.index(peer)
        self.before = chain[at - 1] if at else None
        self.behind = chain[at + 1] if at + 1 < len(chain) else None
        self.parameters = dict(parameters)
        self._number = number
        self._terms = terms
        self._compute = compute
        self._links = links
        self._spans = spans
        self.buckets = buckets_of(self.parameters, 1, bucket_bytes)
        self._rounds: dict[int, _Arrivals] = {}
        self._done = -1
        self._changed = asyncio.Event()
        self._running = _Arrivals()
        self._left = {messages.PART: 0, messages.SUM: 0}  # buckets of the running round that have not been taken

    @property
    def missing(self) -> list[str]:
        """Whose frames it waits for. While sums of those before are missing, nothing is to be expected of those behind."""
        here = self._running
        if self.before is not None and self._left[messages.PART] > len(here.before):
            return [self.before]
        return [self.behind] if self.behind is not None and self._left[messages.SUM] > len(here.all) else []

    async def run(self, round: int, whole: FinishedBuckets) -> None:
        """Replace the gradients by their sum over the chain, each bucket once it is whole; none where no member has one."""
        arrived = self._running = self._rounds.setdefault(round, _Arrivals())
        self._left = dict.fromkeys(self._left, len(self.buckets))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._add(round, arrived, whole))
            group.create_task(self._take_sums(round, arrived))
        del self._rounds[round]
        self._done = round

    async def _add(self, round: int, arrived: _Arrivals, whole: FinishedBuckets) -> None:
        """Our micro-batches, bucket by bucket, to those before; the last member has the whole sum."""
        for k, bucket in enumerate(self.buckets):
            await whole.until(k)
            before = None if self.before is None else await self._arrival(arrived.before, k)
            self._left[messages.PART] -= 1
            numbers = await self._folded(bucket, before)
            if self.behind is None:
                arrived.all[k] = numbers
                self._changed.set()
            else:
                await self._send(self.behind, messages.PART, round, k, numbers)

    async def _take_sums(self, round: int, arrived: _Arrivals) -> None:
        """The sums of the whole step, and on to those before."""
        for k, bucket in enumerate(self.buckets):
            start_s = time.perf_counter()
            present, flat = await self._arrival(arrived.all, k)
            self._left[messages.SUM] -= 1
            if self.before is not None:
                await self._send(self.before, messages.SUM, round, k, (present, flat))
            await spread_aside(self._compute, self.parameters, bucket, present, [flat])
            self._spans.add("sum", -1, start_s, time.perf_counter())

    def _folded(self, bucket: Bucket, before: Numbers | None) -> Awaitable[Numbers]:
        """In the host's memory; a GPU adds up by itself, beside its computing."""
        of, staging = (self.parameters, self._terms, bucket), self._compute.staging
        if staging is None:
            return self._compute.run_aside(folded, *of, before)

        def work() -> Numbers:
            given = None if before is None else (before[0], staging.to_device(before[1]))
            present, flat = folded(*of, given, staging.device)
            return present, staging.to_host(flat)

        held = [self.parameters[name].grad for name in bucket.names]  # a step that ends early lets them go
        held += [term for name in bucket.names for term in self._terms.get(name, ())]
        return self._compute.run_aside(staging.leave, staging.mark(), work, held)

    def take(self, peer: str, frame: Frame) -> None:
        """A PART of the member before or a SUM of the one behind; its size and type follow from the bucket that it names."""
        round, k = need(frame.header, "round", int), need(frame.header, "micro", int)
        sender = {messages.PART: self.before, messages.SUM: self.behind}.get(frame.kind)
        if peer != sender or not 0 <= k < len(self.buckets) or not self._done < round <= self._done + 2:
            raise ProtocolError(f"peer {peer} sent gradients of bucket {k}, round {round}, which nobody sums now")
        bucket = self.buckets[k]
        shape = (bucket.bounds[-1],)
        (numbers,) = tensors.unpack(need(frame.header, "tensors", list), frame.payloads, [(bucket.dtype, shape)])
        present = presence_of(frame.header, bucket)
        arrived = self._rounds.setdefault(round, _Arrivals())
        table = arrived.before if frame.kind == messages.PART else arrived.all
        if k in table:
            raise ProtocolError(f"gradients of bucket {k} arrived twice from peer {peer}")
        assert isinstance(numbers, torch.Tensor)
        table[k] = present, numbers
        self._changed.set()

    def abort(self) -> None:
        """No call of ours hangs."""

    def close(self) -> None:
        """Nothing to end: the streams are the session's."""

    async def _arrival(self, table: dict[int, Numbers], bucket: int) -> Numbers:
        while bucket not in table:
            self._changed.clear()
            await self._changed.wait()
        return table.pop(bucket)

    async def _send(self, peer: str, kind: str, round: int, bucket: int, numbers: Numbers) -> None:
        present, flat = numbers
        await self._links.send(peer, kind, [flat], round=round, micro=bucket, sum=self._number, present=present)


def folded(
    parameters: Mapping[str, torch.Tensor],
    terms: Terms,
    bucket: Bucket,
    before: Numbers | None,
    device: torch.device | str = "cpu",
) -> Numbers:
    """The gradients of a bucket: what came `before`, then our terms and `.grad` one by one, as autograd accumulates them.

    Each addition rounds in the gradient's own type. A gradient that is the first is the sum: nothing is added to zeros.
    """
    if before is None and not any(terms.get(name) for name in bucket.names):
        return flattened(parameters, bucket, device)
    present: list[bool] = []
    found: list[torch.Tensor] = []
    start = 0
    for i, name in enumerate(bucket.names):
        count, grad = parameters[name].numel(), parameters[name].grad
        total: torch.Tensor | None = None
        if before is not None and before[0][i]:
            total = before[1][start : start + count].clone()
        start += count
        for term in (*terms.get(name, ()), *(() if grad is None else (grad,))):
            own = term.reshape(-1).to(device)
            total = own.clone() if total is None else total.add_(own)
        present.append(total is not None)
        found.append(torch.zeros(count, dtype=bucket.dtype, device=device) if total is None else total)
    return present, torch.cat(found)
