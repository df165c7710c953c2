"""The mesh as one peer knows it: who is there, with which devices and links, who coordinates.

The idea: rooms that plan, own or measure ask this and never the whole peer; they cannot start, announce or end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from dht import Directory, Elector, Identity, LeaseRecord, Members, MeshKey, Store, Term, TermFile
from meshcee.config import Limits, Timeouts
from meshcee.errors import ClockError, JoinError, PeerLostError
from meshcee.figures import FEW, DeviceProfile, LinkProfile, Measured, class_of, without_links
from peers.transport import Transport
from peers.wire import unless_late

__all__ = ["MeshView", "named"]

T = TypeVar("T")

# That a peer which answers and fails is not planned with; twice as long each time. To try one that hangs takes two minutes.
SHUNNED_S, LONGEST_SHUNNED_S = 1200.0, 24 * 3600.0
LINK_TTL_S = 1800.0  # a figure older than this is not believed any more; half as old, it is measured again
LINKS_AWAITED_S = 6.0  # that a plan waits for the next link which nobody has measured yet


class MeshView(ABC):
    """What a peer sees through its directory and its elector. `beside` runs what belongs to the peer and ends with it."""

    def __init__(
        self,
        identity: Identity,
        mesh_key: MeshKey,
        transport: Transport,
        store: Store,
        *,
        may_coordinate: bool,
        host: str = "",
        timeouts: Timeouts,
        limits: Limits,
        terms: TermFile | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        members: Members | None = None,
    ) -> None:
        self.members = members or Members()
        self.sign = identity.sign
        self.measures = True  # links and blocks; else nobody is asked for figures, and plans are given
        self.host = host  # of peers that share cores and memory; "": this one shares with nobody
        self.transport = transport
        self.timeouts = timeouts
        self.limits = limits
        self.clock, self.monotonic = clock, monotonic
        self.directory = Directory(
            store,
            identity,
            mesh_key,
            timeouts=timeouts,
            limits=limits,
            clock=clock,
            monotonic=monotonic,
            members=self.members,
        )
        self.elector = Elector(
            self.directory,
            identity.peer_id,
            eligible=may_coordinate,
            terms=terms,
            ttl_s=timeouts.lease_ttl_s,
            confirm_s=timeouts.lease_confirm_s,
            clock=clock,
            monotonic=monotonic,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._group = asyncio.TaskGroup()
        self._cut_off: dict[tuple[str, str], float] = {}  # when members of our job told that they had lost each other
        # Peers that answer and fail: until when, how often they have, and which process of theirs it was.
        self._shunned: dict[str, tuple[float, int, str]] = {}

    @property
    def peer_id(self) -> str:
        return self.transport.peer_id

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this until it is done, cancelled, or the agent ends."""
        task = self._group.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    @property
    def lease(self) -> LeaseRecord | None:
        """The coordinator's lease as this peer sees it."""
        return self.elector.lease

    async def coordinator(self) -> LeaseRecord:
        """The lease, waiting for one if need be; time-outs are the caller's."""
        async with self.elector.changed:
            await self.elector.changed.wait_for(lambda: self.elector.lease is not None)
        assert self.elector.lease is not None
        return self.elector.lease

    @property
    def newest_term(self) -> Term:
        """Under which this peer plans what it does not ask the coordinator for; members refuse it if they know a newer one."""
        return max(self.elector.accepted, self.lease.term if self.lease is not None else Term(0, ""))

    async def later_than(self, term: Term) -> None:
        """Until the lease of a later term is known here; while a lease lasts, at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.lease_ttl_s), self.elector.changed:
                await self.elector.changed.wait_for(lambda: self.lease is not None and self.lease.term > term)

    def devices(self, free: Collection[str] = (), without: Collection[str] = ()) -> dict[str, DeviceProfile]:
        """Devices of the peers that are idle, or in `free`, and not in `without`; not of those that are leaving, or shunned."""
        without = self.shunned().union(without)
        return {
            p: r.device
            for p, r in self.directory.peers.items()
            if r.device is not None and p not in without and (p in free or not r.busy) and not r.leaving
        }

    def lent(self) -> dict[str, DeviceProfile]:
        """Devices of all peers, idle or not: who is busy takes cores of its host too."""
        return {p: r.device for p, r in self.directory.peers.items() if r.device is not None and not r.leaving}

    def busy(self, free: Collection[str] = (), without: Collection[str] = ()) -> tuple[str, ...]:
        """Peers whose devices are taken."""
        known = self.directory.peers.items()
        return tuple(p for p, r in known if r.device is not None and r.busy and p not in free and p not in without)

    def links(self, free: Collection[str] = (), without: Collection[str] = ()) -> dict[tuple[str, str], LinkProfile]:
        """What peers measured of the links between these devices, as far as it is not too old."""
        idle, now = self.devices(free, without), self.clock()
        found = {
            (source, target): link
            for source, record in self.directory.links.items()
            for target, link in record.links
            if source in idle and target in idle and source != target and now - link.measured_at < LINK_TTL_S
        }
        return without_links(found, [pair for pair in self.parted() if idle.keys() >= {*pair}])

    def shun(self, peers: Iterable[str]) -> None:
        """Plan no job of ours with these for a while: they answer, and fail."""
        for peer in set(peers) - self._liars:
            times = self._shunned[peer][1] if peer in self._shunned else 0
            until_s = self.monotonic() + min(SHUNNED_S * 2**times, LONGEST_SHUNNED_S)
            self._shunned[peer] = until_s, times + 1, self._instance(peer)

    def distrust(self, peers: Iterable[str]) -> None:
        """Plan nothing with these as long as this process lives: they have lied."""
        self._shunned |= dict.fromkeys(peers, (math.inf, 0, ""))

    @property
    def _liars(self) -> set[str]:
        return {peer for peer, (until_s, _, _) in self._shunned.items() if until_s == math.inf}

    @abstractmethod
    async def judge(self, *case: Any) -> Any:
        """A member's step computed again, as an audit wants it: by the peer (peers/member/audit), as here nothing computes."""

    def shunned(self) -> set[str]:
        return {peer for peer in self.failed() if self._shunned[peer][0] > self.monotonic()}

    def failed(self) -> set[str]:
        """Those who were shunned, however long ago, and not forgiven or started anew since: a run tries others first."""
        found = {p for p, (until_s, _, instance) in self._shunned.items() if until_s and instance == self._instance(p)}
        return found | self._liars

    def _instance(self, peer: str) -> str:
        return self.directory.peers[peer].instance if peer in self.directory.peers else ""

    def forgive(self) -> bool:
        """There is no plan without those who have failed: whether there are any. The next time counts as one more."""
        found = self.failed() - self._liars
        self._shunned |= {peer: (0.0, *self._shunned[peer][1:]) for peer in found}
        return bool(found)

    def cut_off(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Nothing crosses these links any more, though both ends are here."""
        self._cut_off |= dict.fromkeys(pairs, self.clock())

    def parted(self) -> tuple[tuple[str, str], ...]:
        """Those of them that nobody has measured since."""
        known = {(p, to): link.measured_at for p, r in self.directory.links.items() for to, link in r.links}
        self._cut_off = {pair: at for pair, at in self._cut_off.items() if known.get(pair, 0.0) <= at}
        return tuple(sorted(self._cut_off))

    def measured(self, free: Collection[str] = (), without: Collection[str] = ()) -> Measured:
        """Everything that a plan may be made from, but the job's own profiles."""
        hints = {p: r.region for p, r in self.directory.peers.items() if r.region is not None}
        return Measured(self.devices(free, without), self.links(free, without), {}, hints)

    async def wait_for_links(self) -> None:
        """While links between idle devices are being measured; when none has come for a while, the plan uses defaults."""
        known = -1
        with contextlib.suppress(TimeoutError):
            while known < (len(found := self.links())) < (count := len(self.devices())) * (min(count, FEW) - 1):
                known = len(found)
                async with asyncio.timeout(LINKS_AWAITED_S):
                    while len(self.links()) == known:
                        await asyncio.sleep(self.timeouts.directory_poll_s / 2)
                        await self.directory.refresh()

    async def wait_for_devices(self, count: int) -> None:
        """Until so many idle devices are known. Raises JoinError after join_s."""
        try:
            await self._in_time(lambda: self.directory.wait_for(lambda: len(self.devices()) >= count))
        except TimeoutError as error:
            raise JoinError(f"only {len(self.devices())} of {count} peers appeared in time") from error

    async def wait_for_peers(self, peers: Iterable[str]) -> None:
        """Until the records of all of these are known. Raises JoinError after join_s."""
        wanted = set(peers)
        try:
            await self._in_time(lambda: self.directory.wait_for(lambda: wanted <= self.directory.peers.keys()))
        except TimeoutError as error:
            missing = sorted(wanted - self.directory.peers.keys())
            raise JoinError(f"the plan uses peers that this one cannot see: {', '.join(missing)}; try again") from error

    async def see_the_mesh(self, wanted: Iterable[str] = ()) -> None:
        """Until somebody coordinates and `wanted` are seen, and a moment for the busy: a newcomer knows nobody at first."""
        began_s = self.monotonic()
        try:
            await self._in_time(self.coordinator)
        except TimeoutError as error:
            await self.directory.refresh(everything=False)
            if off := self.directory.off_since(
                began_s
            ):  # a clock that has been set right since was the reason all the same
                raise ClockError(f"{off}, then try again") from error
            raise JoinError(
                f"nobody has coordinated this mesh for {self.timeouts.join_s:.0f} s: see with `meshcee status` whether a peer that "
                "lends a device runs there, then try again"
            ) from error
        await self.directory.refresh()
        await self.wait_for_peers(wanted)
        await self.wait_for_idle()

    async def _in_time(self, work: Callable[[], Awaitable[T]]) -> T:
        """Within join_s of this machine's waking time."""
        return await unless_late(work, self.timeouts.join_s, self.timeouts)

    async def wait_for_idle(self) -> None:
        """A moment for peers whose job has just ended to say so; whoever is busy for longer is planned around."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeouts.announce_every_s):
                await self.directory.wait_for(
                    lambda: not any(r.busy and not r.leaving for r in self.directory.peers.values())
                )

    def device_of(self, peer_id: str) -> DeviceProfile:
        """The device of a peer that lends one, idle or not. PeerLostError where it has gone meanwhile."""
        record = self.directory.peers.get(peer_id)
        if record is None or record.device is None:
            raise PeerLostError(f"peer {peer_id} has left the mesh since it was planned with")
        return record.device

    def names(self) -> dict[str, str]:
        return {p: r.name for p, r in self.directory.peers.items()}

    def addresses_of(self, peers: Iterable[str]) -> dict[str, tuple[str, ...]]:
        known = self.directory.peers
        return {p: known[p].addresses for p in peers if p in known}

    async def status(self) -> dict[str, Any]:
        """All of it as plain data, for `meshcee status`."""
        await self.directory.refresh()
        await self.elector.look()
        return self.known()

    def known(self) -> dict[str, Any]:
        """The same, as far as it is known here, without asking anybody."""
        lease = self.elector.lease
        return {
            "peers": [
                {
                    "peer": p,
                    "name": r.name,
                    "addresses": list(r.addresses),
                    "region": r.region,
                    "device": asdict(r.device) if r.device else None,
                    "kernels": str(class_of(r.device)) if r.device else None,
                    "outside": r.device.versions.outside() if r.device and r.device.versions else None,
                    "state": "leaving" if r.leaving else "busy" if r.busy else "idle",
                    "software": r.software,
                    "guards": r.guards,
                    "datasets": dict(r.datasets or ()),
                }
                for p, r in sorted(self.directory.peers.items(), key=lambda item: item[1].name)
            ],
            "coordinator": {"peer": lease.peer_id, "term": lease.counter} if lease else None,
            "links": [
                {"from": p, "to": target, **asdict(link)}
                for p, record in sorted(self.directory.links.items())
                for target, link in record.links
                if target in self.directory.peers
            ],
            "runs": [
                {
                    "owner": p,
                    "job": r.job,
                    "state": r.state,
                    "epoch": list(r.epoch),
                    "step": r.step,
                    "loss": r.loss,
                    "plan": r.plan,
                }
                for p, r in sorted(self.directory.runs.items(), key=lambda item: (item[1].state, item[1].since))
            ],
        }


def named(text: str, names: Mapping[str, str]) -> str:
    """The text with peers' names in place of their ids."""
    for peer, name in names.items():
        text = text.replace(peer, name)
    return text
