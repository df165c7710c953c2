"""The running statistics of batches over pipelines, bit for bit the plain loop's: each adds those of its micro-batches.

The idea: as sums of gradients do (chain_sum.py), buffers go from the first pipeline to the last, and what the last one has
travels back. Each member folds the statistics of its own micro-batches in, in ascending order (meshcee/stage/statistics.py).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence

import torch

from meshcee.errors import ProtocolError
from meshcee.stage import StageRunner, tensors
from peers.device import Compute
from peers.transport import Frame
from peers.wire import Links, Spans, messages, need

__all__ = ["ChainStatistics"]

Buffers = Mapping[str, torch.Tensor]


class ChainStatistics:
    """Of the buffers `names`, over the members of `chain` in the order of their micro-batches; the same object on each."""

    def __init__(
        self,
        peer: str,
        chain: Sequence[str],
        names: Sequence[str],
        runner: StageRunner,
        compute: Compute,
        links: Links,
        spans: Spans,
        *,
        number: int = 0,
    ) -> None:
        at = chain.index(peer)
        self.before = chain[at - 1] if at else None
        self.behind = chain[at + 1] if at + 1 < len(chain) else None
        runner.statistics.keeps = self.before is not None
        self._names = tuple(names)
        self._runner = runner
        self._compute = compute
        self._links = links
        self._spans = spans
        self._number = number
        self._arrived: dict[tuple[str, int], Buffers] = {}
        self._done = -1
        self._changed = asyncio.Event()
        self.missing: list[str] = []  # whose frame it waits for

    @functools.cached_property
    def _of_types(self) -> dict[torch.dtype, list[str]]:
        """All buffers of a type travel as one tensor: a frame has a limited number of them."""
        found: dict[torch.dtype, list[str]] = {}
        for name in self._names:
            found.setdefault(self._runner.written[name].dtype, []).append(name)
        return found

    async def run(self, round: int) -> None:
        """After the last F of a step: the stage's written buffers become those of all micro-batches."""
        start_s = time.perf_counter()
        before = None if self.before is None else await self._arrival(messages.PART, round, self.before)
        found = await self._compute.run(self._own, before)
        if self.behind is not None:
            await self._send(self.behind, messages.PART, round, found)
            found = await self._arrival(messages.SUM, round, self.behind)
        if self.before is not None:
            await self._send(self.before, messages.SUM, round, found)
        await self._compute.run(self._runner.take_written, found)
        self._done = round
        self._spans.add("sum", -1, start_s, time.perf_counter())

    def _own(self, before: Buffers | None) -> Buffers:
        if before is None:
            return {name: self._runner.written[name] for name in self._names}
        return self._runner.statistics.folded(before)

    def take(self, peer: str, frame: Frame) -> None:
        """A PART of the member before or a SUM of the one behind: all buffers."""
        round = need(frame.header, "round", int)
        sender = {messages.PART: self.before, messages.SUM: self.behind}.get(frame.kind)
        if peer != sender or not self._done < round <= self._done + 2 or (frame.kind, round) in self._arrived:
            raise ProtocolError(f"peer {peer} sent statistics of round {round}, which nobody waits for now")
        like = {dtype: [self._runner.written[name] for name in names] for dtype, names in self._of_types.items()}
        expected = [(dtype, (sum(one.numel() for one in ones),)) for dtype, ones in like.items()]
        values = tensors.unpack(need(frame.header, "tensors", list), frame.payloads, expected)
        found: dict[str, torch.Tensor] = {}
        for (dtype, names), value in zip(self._of_types.items(), values):
            parts = torch.split(torch.as_tensor(value), [one.numel() for one in like[dtype]])
            for name, one, part in zip(names, like[dtype], parts):
                found[name] = torch.empty_like(one).copy_(part.view(one.shape))
        self._arrived[frame.kind, round] = found
        self._changed.set()

    async def _arrival(self, kind: str, round: int, sender: str) -> Buffers:
        self.missing = [sender]
        while (kind, round) not in self._arrived:
            self._changed.clear()
            await self._changed.wait()
        self.missing = []
        return self._arrived.pop((kind, round))

    async def _send(self, peer: str, kind: str, round: int, buffers: Buffers) -> None:
        values = [torch.cat([buffers[name].reshape(-1) for name in names]) for names in self._of_types.values()]
        await self._links.send(peer, kind, values, round=round, micro=0, sum=self._number)
