"""The sum of a group's gradients at the end of a step, over the group's own streams.

The idea: reduce-scatter and gather, as in a ring, but each member sends straight to each. Every member sums one chunk of
every bucket, in plan order, and sends the same bytes to all; so replicas stay equal bit for bit, the traffic is what a
ring needs, and it runs wherever streams run: encrypted, through relays, in one process. A member that dies ends its
stream, and with it the step on all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshcee.errors import ProtocolError
from peers import messages, tensors
from peers.compute import Compute
from peers.links import Links
from peers.messages import need
from peers.transport.base import Frame

__all__ = ["Bucket", "GroupSum", "buckets_of", "flattened", "spread"]

BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Bucket:
    """Parameters of one type, laid end to end; member i sums numbers [bounds[i], bounds[i + 1])."""

    names: tuple[str, ...]
    dtype: torch.dtype
    bounds: tuple[int, ...]


@dataclass
class _Arrivals:
    """Chunks of one walk: (bucket, peer) -> numbers, and which parameters had a gradient."""

    parts: dict[tuple[int, str], tuple[list[bool], torch.Tensor]] = field(default_factory=dict)
    sums: dict[tuple[int, str], tuple[list[bool], torch.Tensor]] = field(default_factory=dict)


class GroupSum:
    """Adds up `parameters[...].grad` over the members of `group`; the same object on each of them."""

    def __init__(
        self,
        peer: str,
        group: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        compute: Compute,
        links: Links,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._peer = peer
        self._group = tuple(group)
        self._others = tuple(p for p in group if p != peer)
        self._parameters = dict(parameters)
        self._compute = compute
        self._links = links
        self._buckets = buckets_of(self._parameters, len(self._group), bucket_bytes)
        self._walks: dict[int, _Arrivals] = {}
        self._done = -1
        self._changed = asyncio.Event()

    async def run(self, walk: int) -> None:
        """Replace the gradients by their sum over the group; none where no member has one."""
        arrived = self._walks.setdefault(walk, _Arrivals())
        me = self._group.index(self._peer)
        own: list[tuple[list[bool], torch.Tensor]] = []
        for k, bucket in enumerate(self._buckets):
            present, flat = await self._compute.run(flattened, self._parameters, bucket)
            own.append((present, flat[bucket.bounds[me] : bucket.bounds[me + 1]]))
            for i, peer in enumerate(self._group):
                if i != me:
                    chunk = flat[bucket.bounds[i] : bucket.bounds[i + 1]]
                    await self._send(peer, messages.PART, walk, k, present, chunk)
        summed: list[tuple[list[bool], torch.Tensor]] = []
        for k in range(len(self._buckets)):
            await self._until(arrived.parts, k)
            parts = [own[k] if p == self._peer else arrived.parts.pop((k, p)) for p in self._group]
            present, total = await self._compute.run(_added, parts)
            summed.append((present, total))
            for peer in self._others:
                await self._send(peer, messages.SUM, walk, k, present, total)
        for k, bucket in enumerate(self._buckets):
            await self._until(arrived.sums, k)
            chunks = [summed[k] if p == self._peer else arrived.sums.pop((k, p)) for p in self._group]
            if any(present != chunks[0][0] for present, _ in chunks):
                raise ProtocolError("the members of a group disagree about which parameters have a gradient")
            numbers = [part for _, part in chunks]
            await self._compute.run(spread, self._parameters, bucket, chunks[0][0], numbers)
        del self._walks[walk]
        self._done = walk

    def take(self, peer: str, frame: Frame) -> None:
        """A PART or SUM frame; its size and type follow from the bucket that it names."""
        walk, k = need(frame.header, "walk", int), need(frame.header, "micro", int)
        if peer not in self._others or not 0 <= k < len(self._buckets) or not self._done < walk <= self._done + 2:
            raise ProtocolError(f"peer {peer} sent gradients of bucket {k}, walk {walk}, which nobody sums now")
        bucket = self._buckets[k]
        owner = self._peer if frame.kind == messages.PART else peer
        i = self._group.index(owner)
        shape = (bucket.bounds[i + 1] - bucket.bounds[i],)
        (numbers,) = tensors.unpack(need(frame.header, "tensors", list), frame.payloads, [(bucket.dtype, shape)])
        present = need(frame.header, "present", list)
        if len(present) != len(bucket.names) or not all(type(p) is bool for p in present):
            raise ProtocolError("gradients of a group need word for each parameter whether it has one")
        arrived = self._walks.setdefault(walk, _Arrivals())
        table = arrived.parts if frame.kind == messages.PART else arrived.sums
        if (k, peer) in table:
            raise ProtocolError(f"gradients of bucket {k} arrived twice from peer {peer}")
        assert isinstance(numbers, torch.Tensor)
        table[k, peer] = (present, numbers)
        self._changed.set()

    def close(self) -> None:
        """Nothing to end: the streams are the session's."""

    async def _until(self, table: Mapping[tuple[int, str], Any], bucket: int) -> None:
        while not all((bucket, peer) in table for peer in self._others):
            self._changed.clear()
            await self._changed.wait()

    async def _send(
        self, peer: str, kind: str, walk: int, bucket: int, present: list[bool], numbers: torch.Tensor
    ) -> None:
        await self._links.send(peer, kind, [numbers], walk=walk, micro=bucket, present=present)


def flattened(
    parameters: Mapping[str, torch.Tensor], bucket: Bucket, device: torch.device | str = "cpu"
) -> tuple[list[bool], torch.Tensor]:
    """Which parameters of the bucket have a gradient, and all gradients end to end, zeros where there is none."""
    grads = [parameters[name].grad for name in bucket.names]
    flat = [
        torch.zeros(parameters[name].numel(), dtype=bucket.dtype, device=device)
        if g is None
        else g.reshape(-1).to(device)
        for name, g in zip(bucket.names, grads)
    ]
    return [g is not None for g in grads], torch.cat(flat)


def spread(
    parameters: Mapping[str, torch.Tensor], bucket: Bucket, present: Sequence[bool], chunks: Sequence[torch.Tensor]
) -> None:
    """The inverse: set the gradients that are present from the bucket's numbers."""
    flat, start = torch.cat(list(chunks)), 0
    for name, is_there in zip(bucket.names, present):
        parameter = parameters[name]
        numbers = flat[start : start + parameter.numel()]
        start += parameter.numel()
        if is_there:
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(numbers.reshape(parameter.shape))


def _added(parts: Sequence[tuple[list[bool], torch.Tensor]]) -> tuple[list[bool], torch.Tensor]:
    """In plan order; 16-bit numbers are added in 32 bits and rounded once."""
    dtype = parts[0][1].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    total = parts[0][1].to(wide, copy=True)
    for _, numbers in parts[1:]:
        total += numbers
    return [any(flags) for flags in zip(*(present for present, _ in parts))], total.to(dtype)


def buckets_of(parameters: Mapping[str, torch.Tensor], members: int, limit_bytes: int) -> tuple[Bucket, ...]:
    """The same on every member: parameters in name order, by type, a new bucket where one is full."""
    groups: list[list[str]] = []
    open_of: dict[torch.dtype, int] = {}
    sizes: list[int] = []
    for name in sorted(parameters):
        tensor = parameters[name]
        at = open_of.get(tensor.dtype)
        if at is None or sizes[at] + tensor.nbytes > limit_bytes:
            at = open_of[tensor.dtype] = len(groups)
            groups.append([])
            sizes.append(0)
        groups[at].append(name)
        sizes[at] += tensor.nbytes
    found = []
    for names in groups:
        count = sum(parameters[name].numel() for name in names)
        bounds = tuple(count * i // members for i in range(members + 1))
        found.append(Bucket(tuple(names), parameters[names[0]].dtype, bounds))
    return tuple(found)
