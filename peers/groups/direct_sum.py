"""The sum of a group's gradients through a torch process group: gloo between CPUs, NCCL between CUDA devices.

The idea: inside a region the fastest path is TCP between the members themselves, or NCCL. The group is built for one
epoch, without torch's default group, and ends with it: where its members are they tell each other over their encrypted streams
(peers/groups/meeting.py). What travels through it is not encrypted, so a job asks for it (`Job(direct_sums=True)`).

Torch's calls block a thread and gloo's cannot be ended from outside. So members tell each other over their streams when a
bucket is whole, and call torch only when all have. Whoever is lost before that leaves nobody in a call, and what a call still
waits for is bytes on their way. The calls have a thread of their own, and on a GPU a stream of their own, so that W computes
on beside them. One which hangs for its time-out does not keep the device from the next epoch. NCCL would end the process
when one of its calls fails. It is told not to, and is aborted by us, in a thread, before anything else when an epoch fails.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed

from meshcee.errors import PeerLostError, ProtocolError
from peers.device import Compute, one_thread
from peers.groups.buckets import BUCKET_BYTES, Bucket, FinishedBuckets, buckets_of, flattened, presence_of, spread
from peers.groups.meeting import Meeting
from peers.transport import Frame
from peers.wire import Links, Spans, messages, need

__all__ = ["DirectSum", "interface_of"]

distributed: Any = torch.distributed  # of what is used here torch declares no types

T = TypeVar("T")

# What the documentation of torch's NCCL variables says of them: a call that does not end raises in the thread that waits for it,
# nothing tears the process down, and no monitor ends the process while a call hangs.
NCCL = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
TIMEOUT_S = 20.0  # of meeting, and of one sum that does not progress; a member that dies is noticed at once


class DirectSum:
    """As `GroupSum`. `host` is an address of another member: the group uses the interface by which it is reached."""

    def __init__(
        self,
        peer: str,
        group: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        compute: Compute,
        links: Links,
        spans: Spans,
        *,
        host: str,
        number: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.peer = peer
        self._number = number
        self._group = tuple(group)
        self.missing = tuple(p for p in group if p != peer)  # whom it may wait for: each adds up a part
        self.parameters = dict(parameters)
        self._compute = compute
        self._links = links
        self._spans = spans
        self._host = host
        self.buckets = buckets_of(self.parameters, len(self._group), bucket_bytes)
        self._thread = one_thread(f"sum-{peer[-8:]}")
        self._said: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()  # entries of the meeting that are to be told
        self._loop: asyncio.AbstractEventLoop | None = None
        self._meeting = Meeting(self._say, TIMEOUT_S)
        self._told: dict[
            int, dict[tuple[int, str], list[bool]]
        ] = {}  # round -> (bucket, peer) -> which have a gradient
        self._done = -1
        self._changed = asyncio.Event()
        self.process_group: Any = None

    async def run(self, round: int, whole: FinishedBuckets) -> None:
        """Replace the gradients by their sum over the group, each bucket once it is whole; none where no member has one."""
        told = self._told.setdefault(round, {})
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell(round, told, whole))
            speaking = group.create_task(self._speak())  # NCCL meets anew when it is called first
            for k, bucket in enumerate(self.buckets):
                await whole.until(k)
                start_s = time.perf_counter()
                await self._until(partial(told.keys().__ge__, {(k, peer) for peer in self._group}))
                if self.process_group is None:
                    await self._meet()
                present = [any(flags) for flags in zip(*(told[k, peer] for peer in self._group))]
                await self._call(self.reduce_apart, bucket, present)
                self._spans.add("sum", -1, start_s, time.perf_counter())
            speaking.cancel()
        del self._told[round]
        self._done = round

    async def _tell(self, round: int, told: dict[tuple[int, str], list[bool]], whole: FinishedBuckets) -> None:
        for k, bucket in enumerate(self.buckets):
            await whole.until(k)
            present = [self.parameters[name].grad is not None for name in bucket.names]
            for peer in self.missing:
                header = {"round": round, "micro": k, "sum": self._number, "present": present}
                await self._links.put(peer, Frame(messages.WHOLE, header))
            told[k, self.peer] = present
            self._changed.set()

    def take(self, peer: str, frame: Frame) -> None:
        """A WHOLE frame, or MEET: an entry of the meeting."""
        header = frame.header
        if frame.kind == messages.WHOLE and peer in self.missing:
            round, k = need(header, "round", int), need(header, "micro", int)
            told = self._told.setdefault(round, {}) if self._done < round <= self._done + 2 else None
            if told is None or not 0 <= k < len(self.buckets) or (k, peer) in told:
                raise ProtocolError(f"peer {peer} has bucket {k} of round {round}, which nobody sums now")
            told[k, peer] = presence_of(header, self.buckets[k])
        elif frame.kind == messages.MEET and peer in self.missing:
            self._meeting.hear(need(header, "key", str), header.get("value"))
        else:
            raise ProtocolError(f"peer {peer} sent a frame of kind {frame.kind!r}, which has no meaning here")
        self._changed.set()

    def abort(self) -> asyncio.Future[None] | None:
        """End what hangs, from now on: it may block while kernels end, so not on the event loop. gloo's calls end with their
        time-out."""
        self._meeting.close()
        group, self.process_group = self.process_group, None
        return asyncio.get_running_loop().run_in_executor(None, group.abort) if group is not None else None

    def close(self) -> None:
        """End of the epoch, after `abort`."""
        self._meeting.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            self._changed.clear()
            await self._changed.wait()

    # -- meeting -----------------------------------------------------------------------------------------------------

    def _say(self, key: str, value: bytes) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._said.put_nowait, (key, value))

    async def _speak(self) -> None:
        while True:
            key, value = await self._said.get()
            for peer in self.missing:
                await self._links.put(peer, Frame(messages.MEET, {"sum": self._number, "key": key, "value": value}))

    async def _meet(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._call(self.connect)

    async def _call(self, call: Callable[..., T], *args: Any) -> T:
        """In our thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        except RuntimeError as error:  # what torch raises for a broken connection, and for a time-out
            raise PeerLostError(f"the sum over the group broke off: {str(error).splitlines()[0][:200]}") from error

    def connect(self) -> None:
        """Meet the others. Whoever waits for it may be gone by then: a group that comes too late ends here, and not when, by
        chance, nobody holds it any more. Until then gloo listens."""
        group = self._met()
        if not self._meeting.unless_closed(partial(setattr, self, "process_group", group)):
            group.abort()
            del group  # the error's frames would hold it
            raise RuntimeError("the epoch ended while its group met")

    def _met(self) -> Any:
        rank, size, limit = self._group.index(self.peer), len(self._group), datetime.timedelta(seconds=TIMEOUT_S)
        own = _own_address(self._host)
        if self._compute.device.type == "cuda" and self._apart(rank, size):
            # NCCL would take the first interface that it finds.
            os.environ |= {**NCCL, "NCCL_SOCKET_IFNAME": f"={interface_of(own)}"}
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            return distributed.ProcessGroupNCCL(self._meeting, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
        try:
            return distributed.ProcessGroupGloo(self._meeting, rank, size, options)
        except BaseException:
            options._devices = []  # they listen, as long as anybody looks at this error
            raise

    def _apart(self, rank: int, size: int) -> bool:
        """Whether each member has a GPU of its own: NCCL takes none twice. Gloo does, and copies through the host."""
        own = str(torch.cuda.get_device_properties(self._compute.device).uuid)
        self._meeting.set(f"gpu/{rank}", own)
        return len({bytes(self._meeting.get(f"gpu/{other}")) for other in range(size)}) == size

    def reduce_apart(self, bucket: Bucket, present: Sequence[bool]) -> None:
        """On a GPU in the stream of sums: what waits for other members there holds up no call to the device."""
        staging = self._compute.staging
        if staging is None:
            self.reduce(bucket, present)
            return
        held = [self.parameters[name].grad for name in bucket.names]  # a step that ends early lets them go
        staging.sum(staging.mark(), partial(self.reduce, bucket, present), held)

    def reduce(self, bucket: Bucket, present: Sequence[bool]) -> None:
        _, flat = flattened(self.parameters, bucket, self._compute.device)
        wide = flat.float() if flat.dtype.itemsize < 4 else flat  # 16-bit numbers are added in 32 bits, rounded once
        self.process_group.allreduce([wide]).wait()  # sums, unless told otherwise
        spread(self.parameters, bucket, present, [wide.to(flat.dtype)])


def interface_of(address: str) -> str:
    """The name of the interface that has this IPv4 address."""
    names = [name for name, those in psutil.net_if_addrs().items() if any(a.address == address for a in those)]
    if not names:
        raise PeerLostError(f"no interface of this machine has the address {address} any more")
    return names[0]


def _own_address(towards: str) -> str:
    """The address of the interface by which `towards` is reached: that one, and no other, carries the group."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
