"""The sum of gradients over the members' own streams, in a group or over pipelines, begun while the last W still computes.

The idea: reduce-scatter and gather, as in a ring, but each member sends straight to each. Every member sums one chunk of
every bucket, in plan order, and sends the same bytes to all. So replicas stay equal bit for bit, the traffic is what a
ring needs, and it runs wherever streams run: encrypted, through relays, in one process. Buckets go their way one after
the other, each as soon as its gradients are whole; when that is changes no number. A member that dies ends its stream,
and with it the step on all others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.errors import ProtocolError
from meshcee.stage import tensors
from peers.device import Compute
from peers.groups.buckets import BUCKET_BYTES, Bucket, FinishedBuckets, buckets_of, flattened, presence_of, spread_aside
from peers.transport import Frame
from peers.wire import Links, Spans, messages, need

__all__ = ["GroupSum"]

Chunk = tuple[list[bool], torch.Tensor]  # which parameters of its bucket have a gradient, and some of the numbers


@dataclass
class _Arrivals:
    """Chunks of one round by (bucket, peer), our own among them: of one member each, and their sums."""

    chunks: dict[tuple[int, str], Chunk] = field(default_factory=dict)
    sums: dict[tuple[int, str], Chunk] = field(default_factory=dict)


class GroupSum:
    """Adds up `parameters[...].grad` over the members of `group`; the same object on each of them.

    `number` tells its frames from those of other sums that a member takes part in.
    """

    def __init__(
        self,
        peer: str,
        group: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        compute: Compute,
        links: Links,
        spans: Spans,
        *,
        number: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._peer = peer
        self._number = number
        self._group = tuple(group)
        self.missing = tuple(p for p in group if p != peer)  # whom it may wait for: each adds up a part
        self.parameters = dict(parameters)
        self._compute = compute
        self._links = links
        self._spans = spans
        self.buckets = buckets_of(self.parameters, len(self._group), bucket_bytes)
        self._rounds: dict[int, _Arrivals] = {}
        self._done = -1
        self._changed = asyncio.Event()

    async def run(self, round: int, whole: FinishedBuckets) -> None:
        """Replace the gradients by their sum over the group, each bucket once it is whole; none where no member has one."""
        arrived = self._rounds.setdefault(round, _Arrivals())
        async with asyncio.TaskGroup() as group:
            group.create_task(self._send_parts(round, arrived, whole))
            group.create_task(self._add_parts(round, arrived))
            group.create_task(self._take_sums(arrived, whole))
        del self._rounds[round]
        self._done = round

    async def _send_parts(self, round: int, arrived: _Arrivals, whole: FinishedBuckets) -> None:
        """Every member's chunk of each bucket of ours."""
        for k, bucket in enumerate(self.buckets):
            await whole.until(k)
            present, flat = await self._taken(bucket)
            for i, peer in enumerate(self._group):
                chunk = flat[bucket.bounds[i] : bucket.bounds[i + 1]]
                if peer == self._peer:
                    arrived.chunks[k, peer] = present, chunk
                    self._changed.set()
                else:
                    await self._send(peer, messages.PART, round, k, present, chunk)

    async def _add_parts(self, round: int, arrived: _Arrivals) -> None:
        """Our chunk of each bucket, from everybody."""
        for k in range(len(self.buckets)):
            await self._until(arrived.chunks, k)
            parts = [arrived.chunks.pop((k, peer)) for peer in self._group]
            present, total = await self._compute.run_aside(add_up, parts)
            arrived.sums[k, self._peer] = present, total
            self._changed.set()
            for peer in self.missing:
                await self._send(peer, messages.SUM, round, k, present, total)

    async def _take_sums(self, arrived: _Arrivals, whole: FinishedBuckets) -> None:
        """Every member's sums of each bucket."""
        for k, bucket in enumerate(self.buckets):
            await whole.until(k)
            start_s = time.perf_counter()
            await self._until(arrived.sums, k)
            chunks = [arrived.sums.pop((k, peer)) for peer in self._group]
            if any(present != chunks[0][0] for present, _ in chunks):
                raise ProtocolError("those who add up gradients disagree about which parameters have one")
            numbers = [part for _, part in chunks]
            await spread_aside(self._compute, self.parameters, bucket, chunks[0][0], numbers)
            self._spans.add("sum", -1, start_s, time.perf_counter())

    def _taken(self, bucket: Bucket) -> asyncio.Future[Chunk]:
        """Our gradients of a bucket, in the host's memory; those of a GPU are copied while W computes on."""
        parameters, staging = self.parameters, self._compute.staging
        if staging is None:
            return self._compute.run_aside(flattened, parameters, bucket)

        def work() -> Chunk:
            present, flat = flattened(parameters, bucket, staging.device)
            return present, staging.to_host(flat)

        held = [parameters[name].grad for name in bucket.names]  # a step that ends early lets them go
        return self._compute.run_aside(staging.leave, staging.mark(), work, held)

    def take(self, peer: str, frame: Frame) -> None:
        """A PART or SUM frame; its size and type follow from the bucket that it names."""
        round, k = need(frame.header, "round", int), need(frame.header, "micro", int)
        if peer not in self.missing or not 0 <= k < len(self.buckets) or not self._done < round <= self._done + 2:
            raise ProtocolError(f"peer {peer} sent gradients of bucket {k}, round {round}, which nobody sums now")
        bucket = self.buckets[k]
        owner = self._peer if frame.kind == messages.PART else peer
        i = self._group.index(owner)
        shape = (bucket.bounds[i + 1] - bucket.bounds[i],)
        (numbers,) = tensors.unpack(need(frame.header, "tensors", list), frame.payloads, [(bucket.dtype, shape)])
        present = presence_of(frame.header, bucket)
        arrived = self._rounds.setdefault(round, _Arrivals())
        table = arrived.chunks if frame.kind == messages.PART else arrived.sums
        if (k, peer) in table:
            raise ProtocolError(f"gradients of bucket {k} arrived twice from peer {peer}")
        assert isinstance(numbers, torch.Tensor)
        table[k, peer] = present, numbers
        self._changed.set()

    def abort(self) -> None:
        """No call of ours hangs."""

    def close(self) -> None:
        """Nothing to end: the streams are the session's."""

    async def _until(self, table: Mapping[tuple[int, str], Any], bucket: int) -> None:
        while not all((bucket, peer) in table for peer in self._group):
            self._changed.clear()
            await self._changed.wait()

    async def _send(
        self, peer: str, kind: str, round: int, bucket: int, present: list[bool], numbers: torch.Tensor
    ) -> None:
        await self._links.send(peer, kind, [numbers], round=round, micro=bucket, sum=self._number, present=present)


def add_up(parts: Sequence[Chunk]) -> Chunk:
    """In plan order; 16-bit numbers are added in 32 bits and rounded once."""
    dtype = parts[0][1].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    total = parts[0][1].to(wide, copy=True)
    for _, numbers in parts[1:]:
        total += numbers
    return [any(flags) for flags in zip(*(present for present, _ in parts))], total.to(dtype)
