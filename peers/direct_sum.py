"""The sum of a group's gradients through a torch process group: gloo between CPUs, NCCL between CUDA devices.

The idea: inside a region the fastest path is TCP between the members themselves, or NCCL. The group is built for one
epoch, without torch's default group: its leader opens a store on a free port and tells the others where, and the secret
prefix under which they meet, over their encrypted streams. It ends with the epoch. What travels through it is not
encrypted, so a job asks for it (`Job(direct_sums=True)`).
"""

from __future__ import annotations

import asyncio
import datetime
import re
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from meshcee.errors import PeerLostError, ProtocolError
from peers import messages
from peers.collective import Bucket, buckets_of, flattened, spread
from peers.compute import Compute
from peers.links import Links
from peers.messages import need
from peers.transport.base import Frame

__all__ = ["DirectSum", "host_of"]

distributed: Any = torch.distributed  # of what is used here torch declares no types

TIMEOUT_S = 20.0  # of meeting, and of one sum that does not progress; a member that dies is noticed at once
BUCKET_BYTES = 64 << 20


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
        compute: Compute,
        links: Links,
        *,
        host: str,
    ) -> None:
        self._peer = peer
        self._group = tuple(group)
        self._parameters = dict(parameters)
        self._compute = compute
        self._links = links
        self._host = host
        self._buckets = buckets_of(self._parameters, len(self._group), BUCKET_BYTES)
        self._meeting: asyncio.Future[tuple[str, int, str]] = asyncio.get_running_loop().create_future()
        self._store: Any = None  # lives as long as the group that met in it
        self._process_group: Any = None
        self._closed = False

    async def run(self, walk: int) -> None:
        """Replace the gradients by their sum over the group; none where no member has one."""
        try:
            if self._process_group is None:
                await self._meet()
            for bucket in self._buckets:
                await self._compute.run(self._reduce, bucket)
        except RuntimeError as error:  # what torch raises for a broken connection, and for a time-out
            raise PeerLostError(f"the sum over the group broke off: {str(error).splitlines()[0][:200]}") from error

    def take(self, peer: str, frame: Frame) -> None:
        """The leader's word where the group meets."""
        if frame.kind != messages.MEET or peer != self._group[0] or self._meeting.done():
            raise ProtocolError(f"peer {peer} sent a frame of kind {frame.kind!r}, which has no meaning here")
        header = frame.header
        host, port = need(header, "host", str), need(header, "port", int)
        if not re.fullmatch(r"[0-9.]{7,15}", host) or not 0 < port < 1 << 16:
            raise ProtocolError("a group meets at an IPv4 address and a port")
        self._meeting.set_result((host, port, need(header, "secret", str)))

    def close(self) -> None:
        """End of the epoch: whoever still waits in a sum gets an error."""
        self._closed = True
        if self._process_group is not None:
            self._process_group.abort()
        self._process_group = self._store = None

    # -- meeting -----------------------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        if self._peer == self._group[0]:
            secret = secrets.token_hex(16)
            store = await asyncio.to_thread(_store, self._host, 0, leads=True)
            where = {"host": self._host, "port": store.port, "secret": secret}
            for peer in self._group[1:]:
                await self._links.put(peer, Frame(messages.MEET, where))
        else:
            host, port, secret = await self._meeting
            store = await asyncio.to_thread(_store, host, port, leads=False)
        made = await asyncio.to_thread(self._build, store, secret)
        if self._closed:
            made.abort()
            return
        self._store, self._process_group = store, made

    def _build(self, store: Any, secret: str) -> Any:
        rank, size = self._group.index(self._peer), len(self._group)
        prefixed, limit = distributed.PrefixStore(secret, store), datetime.timedelta(seconds=TIMEOUT_S)
        if self._compute.device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            return distributed.ProcessGroupNCCL(prefixed, rank, size, options)
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=_own_address(store.host))]
        return distributed.ProcessGroupGloo(prefixed, rank, size, options)

    # -- on the compute thread ---------------------------------------------------------------------------------------

    def _reduce(self, bucket: Bucket) -> None:
        present, flat = flattened(self._parameters, bucket, self._compute.device)
        flags = torch.tensor(present, dtype=torch.int32, device=self._compute.device)
        wide = flat.float() if flat.dtype.itemsize < 4 else flat  # 16-bit numbers are added in 32 bits, rounded once
        for tensor in (flags, wide):
            self._process_group.allreduce([tensor]).wait()  # sums, unless told otherwise
        spread(self._parameters, bucket, [bool(flag) for flag in flags.tolist()], [wide.to(flat.dtype)])


def _store(host: str, port: int, *, leads: bool) -> Any:
    return distributed.TCPStore(
        host, port, None, leads, timeout=datetime.timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )


def _own_address(towards: str) -> str:
    """The address of the interface by which `towards` is reached: that one, and no other, carries the group."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
