"""The sum of a group's gradients through a torch process group: gloo between CPUs, NCCL between CUDA devices.

The idea: inside a region the fastest path is TCP between the members themselves, or NCCL. The group is built for one
epoch, without torch's default group: its leader opens a store on a free port and tells the others where, and the secret
prefix under which they meet, over their encrypted streams. It ends with the epoch. What travels through it is not
encrypted, so a job asks for it (`Job(direct_sums=True)`).

Torch's calls block a thread and gloo's cannot be ended from outside. So members tell each other over their streams when a
bucket is whole, and call torch only when all have: whoever is lost before that leaves nobody in a call, and what a call still
waits for is bytes on their way. The calls have a thread of their own, so that W computes on beside them, and that one which
hangs for its time-out does not keep the device from the next epoch.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed

from meshcee.errors import PeerLostError, ProtocolError
from peers import messages
from peers.buckets import BUCKET_BYTES, Bucket, Whole, buckets_of, flattened, presence_of, spread
from peers.compute import one_thread
from peers.links import Links
from peers.messages import need
from peers.spans import Spans
from peers.transport.base import Frame

__all__ = ["DirectSum", "host_of", "interface_of"]

distributed: Any = torch.distributed  # of what is used here torch declares no types

T = TypeVar("T")

TIMEOUT_S = 20.0  # of meeting, and of one sum that does not progress; a member that dies is noticed at once


def host_of(addresses: Sequence[str]) -> str:
    """The IPv4 address that others reach a peer by, from its multiaddresses; loopback when it names no other."""
    found = [m[1] for a in addresses if (m := re.match(r"/ip4/([0-9.]+)/", a))]
    return next((host for host in found if not host.startswith("127.")), "127.0.0.1")


class DirectSum:
    """As `GroupSum`. `host` is the leader's address; only the leader uses it."""

    def __init__(
        self,
        peer: str,
        group: Sequence[str],
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
        links: Links,
        spans: Spans,
        *,
        host: str,
        number: int = 0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._peer = peer
        self._number = number
        self._group = tuple(group)
        self._others = tuple(p for p in group if p != peer)
        self.parameters = dict(parameters)
        self._device = device
        self._links = links
        self._spans = spans
        self._host = host
        self.buckets = buckets_of(self.parameters, len(self._group), bucket_bytes)
        self._thread = one_thread(f"sum-{peer[-8:]}")
        self._meeting: tuple[str, int, str] | None = None  # host, port and prefix, as the leader tells them
        self._at_store: set[str] = set()  # who has found it
        self._told: dict[int, dict[tuple[int, str], list[bool]]] = {}  # walk -> (bucket, peer) -> which have a gradient
        self._done = -1
        self._changed = asyncio.Event()
        self._store: Any = None  # lives as long as the group that met in it
        self._process_group: Any = None

    async def run(self, walk: int, whole: Whole) -> None:
        """Replace the gradients by their sum over the group, each bucket once it is whole; none where no member has one."""
        told = self._told.setdefault(walk, {})
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell(walk, told, whole))
            for k, bucket in enumerate(self.buckets):
                await whole.until(k)
                start_s = time.perf_counter()
                await self._until(partial(told.keys().__ge__, {(k, peer) for peer in self._group}))
                if self._process_group is None:
                    await self._meet()
                present = [any(flags) for flags in zip(*(told[k, peer] for peer in self._group))]
                await self._call(self._reduce, bucket, present)
                self._spans.add("sum", -1, start_s, time.perf_counter())
        del self._told[walk]
        self._done = walk

    async def _tell(self, walk: int, told: dict[tuple[int, str], list[bool]], whole: Whole) -> None:
        for k, bucket in enumerate(self.buckets):
            await whole.until(k)
            present = [self.parameters[name].grad is not None for name in bucket.names]
            for peer in self._others:
                header = {"walk": walk, "micro": k, "sum": self._number, "present": present}
                await self._links.put(peer, Frame(messages.WHOLE, header))
            told[k, self._peer] = present
            self._changed.set()

    def take(self, peer: str, frame: Frame) -> None:
        """A WHOLE frame, or MEET: the leader's word where the group meets, and each other member's that it has found it."""
        header, leader = frame.header, self._group[0]
        if frame.kind == messages.WHOLE and peer in self._others:
            walk, k = need(header, "walk", int), need(header, "micro", int)
            told = self._told.setdefault(walk, {}) if self._done < walk <= self._done + 2 else None
            if told is None or not 0 <= k < len(self.buckets) or (k, peer) in told:
                raise ProtocolError(f"peer {peer} has bucket {k} of walk {walk}, which nobody sums now")
            told[k, peer] = presence_of(header, self.buckets[k])
        elif frame.kind == messages.MEET and peer == leader and self._meeting is None:
            host, port = need(header, "host", str), need(header, "port", int)
            if not re.fullmatch(r"[0-9.]{7,15}", host) or not 0 < port < 1 << 16:
                raise ProtocolError("a group meets at an IPv4 address and a port")
            self._meeting = host, port, need(header, "secret", str)
        elif frame.kind == messages.MEET and self._peer == leader and peer in self._others:
            self._at_store.add(peer)
        else:
            raise ProtocolError(f"peer {peer} sent a frame of kind {frame.kind!r}, which has no meaning here")
        self._changed.set()

    def close(self) -> None:
        """End of the epoch. Without the leader's store, whoever still meets in it gets an error."""
        group, self._process_group, self._store = self._process_group, None, None
        if group is not None:
            group.abort()  # ends a call of NCCL; gloo's end with their connections, or their time-out
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met():
            self._changed.clear()
            await self._changed.wait()

    # -- meeting -----------------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        leader = self._group[0]
        if self._peer == leader:
            secret = secrets.token_hex(16)
            self._store = await self._call(_store, self._host, 0, True)
            where = {"sum": self._number, "host": self._host, "port": self._store.port, "secret": secret}
            for peer in self._others:
                await self._links.put(peer, Frame(messages.MEET, where))
            await self._until(lambda: len(self._at_store) == len(self._others))
        else:
            await self._until(lambda: self._meeting is not None)
            assert self._meeting is not None
            host, port, secret = self._meeting
            self._store = await self._call(_store, host, port, False)
            await self._links.put(leader, Frame(messages.MEET, {"sum": self._number}))
        self._process_group = await self._call(self._build, self._store, secret)

    async def _call(self, call: Callable[..., T], *args: Any) -> T:
        """In our thread."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        except RuntimeError as error:  # what torch raises for a broken connection, and for a time-out
            raise PeerLostError(f"the sum over the group broke off: {str(error).splitlines()[0][:200]}") from error

    def _build(self, store: Any, secret: str) -> Any:
        rank, size = self._group.index(self._peer), len(self._group)
        prefixed, limit = distributed.PrefixStore(secret, store), datetime.timedelta(seconds=TIMEOUT_S)
        own = _own_address(store.host)
        if self._device.type == "cuda":
            os.environ["NCCL_SOCKET_IFNAME"] = f"={interface_of(own)}"  # NCCL would take the first one that it finds
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            return distributed.ProcessGroupNCCL(prefixed, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=own)]
        return distributed.ProcessGroupGloo(prefixed, rank, size, options)

    def _reduce(self, bucket: Bucket, present: Sequence[bool]) -> None:
        _, flat = flattened(self.parameters, bucket, self._device)
        wide = flat.float() if flat.dtype.itemsize < 4 else flat  # 16-bit numbers are added in 32 bits, rounded once
        self._process_group.allreduce([wide]).wait()  # sums, unless told otherwise
        spread(self.parameters, bucket, present, [wide.to(flat.dtype)])


def _store(host: str, port: int, leads: bool) -> Any:
    return distributed.TCPStore(
        host, port, None, leads, timeout=datetime.timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )


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
