"""Meshes of 10, 100 and 1,000 peers on virtual time: what it takes to find one another, elect, hear of a change, agree on a plan.

`python -m benchmarks.scale [--peers 10 100 1000]` prints JSON, and with `--table` the rows of docs/benchmarks.md. The peers are
the product's own (Agent, Directory, Elector, gossip, coordinator, Owner, Member) in one loop over the in-process network, every
link of 20 ms and 100 Mbit/s. Three things stand in: the store is a dictionary that takes 0.1 s for a read or write of one key,
where a DHT takes some hops; devices and links are told instead of measured, since measuring is not what this is about; and
records are decoded once for all peers instead of once by each. Seconds are of virtual time, but for planning, which is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks import crowd
from benchmarks.measure import machine, row
from dht.gossip import FANOUT, MORE_TURNS
from dht.records import LinkRecord, PeerRecord, open_sealed
from dht.signing import Identity, MeshKey
from dht.store import MemoryStore, SharedMemory
from meshcee.capture import capture
from meshcee.config import Limits, Timeouts
from meshcee.figures.profile import DeviceProfile, LinkProfile
from meshcee.job import Job
from meshcee.optim import Optimizer
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.service import Member
from peers.node.agent import Agent, AgentOptions
from peers.owner.epoch import Report
from peers.owner.feed import Feed
from peers.owner.job_run import own
from peers.planning.coordinator import PlanRequest, request_plan
from peers.planning.job_costs import costs_of
from peers.transport.base import Frame
from peers.transport.memory import Impairment, MemoryNetwork, MemoryTransport
from peers.transport.stream import FramedStream
from peers.wire import Offer
from tests.rig.virtual_time import quiet, run

LINK = Impairment(latency_s=0.02, bandwidth_bytes_per_s=12.5e6)
STORE_S = 0.1
STARTED_WITHIN_S = 2.0
NEIGHBOURS = 31  # whose links a peer tells of, as planner/regions.py has it
STAGES = 8
KEY = MeshKey.generate()


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class Tally:
    """What one peer has sent and read since the last `clear`."""

    frames: Counter[str] = field(default_factory=Counter)
    frame_bytes: Counter[str] = field(default_factory=Counter)  # with what comes around them
    last_s: dict[str, float] = field(default_factory=dict)
    store: Counter[str] = field(default_factory=Counter)  # "reads", "read_bytes", "writes", "written_bytes"

    def clear(self) -> None:
        for part in (self.frames, self.frame_bytes, self.last_s, self.store):
            part.clear()


class CountedStore(MemoryStore):
    """Takes STORE_S for a read or a write, and counts them."""

    def __init__(self, shared: SharedMemory, tally: Tally) -> None:
        super().__init__(shared)
        self._tally = tally.store

    async def put(self, key: str, subkey: str, value: bytes, expires_at: float, *, quick: bool = False) -> bool:
        await asyncio.sleep(STORE_S)
        self._tally.update(writes=1, written_bytes=len(value))
        return await super().put(key, subkey, value, expires_at)

    async def get(self, key: str, *, quick: bool = False) -> Mapping[str, tuple[bytes, float]]:
        await asyncio.sleep(STORE_S)
        found = await super().get(key)
        self._tally.update(reads=1, read_bytes=sum(len(value) for value, _ in found.values()))
        return found


class CountedTransport(MemoryTransport):
    """Counts the frames that its streams send, by kind."""

    tally: Tally

    def make_stream(self, peer_id: str, purpose: str = "", check: bool = True) -> FramedStream:
        stream = super().make_stream(peer_id, purpose, check)
        send, tally = stream.send, self.tally

        async def counted(frame: Frame) -> None:
            before = stream.sent_bytes
            await send(frame)
            tally.frames[frame.kind] += 1
            tally.frame_bytes[frame.kind] += stream.sent_bytes - before
            tally.last_s[frame.kind] = _now()

        stream.send = counted  # type: ignore[method-assign]
        return stream


class Peer:
    """An agent whose parts run without what it measures."""

    def __init__(self, mesh: Mesh, name: str, compute: Compute | None) -> None:
        identity = Identity.generate()
        self.tally = Tally()
        self.transport = CountedTransport(mesh.network, identity.peer_id, KEY.secret)
        self.transport.tally = self.tally
        self.store = CountedStore(mesh.memory, self.tally)
        self.agent = Agent(
            AgentOptions(name),
            identity,
            KEY,
            self.transport,
            self.store,
            compute,
            timeouts=Timeouts(),
            limits=Limits(),
            clock=_now,
            monotonic=_now,
        )
        self.id = self.agent.peer_id
        if compute is not None:
            Member(
                self.transport,
                compute,
                memory_bytes=1 << 30,
                timeouts=Timeouts(),
                graphs=Graphs(Limits()),
                accept=self._accept,
            )
        self._lends = compute is not None
        self._group = mesh.group
        self._tasks: list[asyncio.Task[None]] = []

    async def _accept(self, owner: str, offer: Offer) -> None:
        self.agent.elector.accept(offer.term)

    async def start(self, after_s: float = 0.0, links: Iterable[str] = ()) -> None:
        await asyncio.sleep(after_s)
        device = DeviceProfile("cpu", "told", 1 << 30, 1e9) if self._lends else None
        agent = self.agent
        await agent.directory.publish(PeerRecord(self.id, 0.0, agent.options.name, device=device))
        if links:
            await agent.directory.publish(self.links(links, LINK.bandwidth_bytes_per_s))
        for part in (agent.directory.announce_forever(), agent.directory.poll_forever(), agent.elector.run()):
            self._tasks.append(self._group.create_task(part))

    def links(self, to: Iterable[str], speed: float) -> LinkRecord:
        return LinkRecord(self.id, 0.0, tuple((peer, LinkProfile(LINK.latency_s, speed, _now())) for peer in to))

    def gossip(self) -> None:
        self._tasks.append(self._group.create_task(self.agent.gossip.run()))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def knows(self, count: int) -> bool:
        return len(self.agent.directory.peers) >= count


class Mesh:
    """So many peers, and one that owns a job. Lifetime is `async with`."""

    def __init__(self, count: int, compute: Compute) -> None:
        self.count = count
        self.network = MemoryNetwork(impairment=LINK)
        self.memory = SharedMemory(_now)
        self.group = asyncio.TaskGroup()
        self._compute = compute
        self._stack = contextlib.AsyncExitStack()
        self.peers: list[Peer] = []

    async def __aenter__(self) -> Mesh:
        await self._stack.enter_async_context(self.group)
        for i in range(self.count):
            self.peers.append(await self.peer(f"p{i}"))
        return self

    async def __aexit__(self, *error: Any) -> None:
        for peer in self.peers:
            peer.stop()
        await self._stack.__aexit__(*error)

    async def peer(self, name: str, *, lends: bool = True) -> Peer:
        peer = Peer(self, name, self._compute if lends else None)
        await self._stack.enter_async_context(peer.transport)
        return peer

    def clear(self) -> float:
        for peer in self.peers:
            peer.tally.clear()
        return _now()

    def agreed(self) -> bool:
        """Whether all believe in one coordinator, and it is one of them."""
        leases = {peer.agent.lease.term if peer.agent.lease else None for peer in self.peers}
        return (
            len(leases) == 1
            and {term[1] for term in leases if term} <= {p.id for p in self.peers}
            and None not in leases
        )

    def each(self, count: Callable[[Tally], float]) -> dict[str, float]:
        """Mean and most of a figure over the peers."""
        found = [count(peer.tally) for peer in self.peers]
        return {"mean": round(sum(found) / len(found), 1), "most": max(found)}

    # -- what is measured

    async def find_one_another(self) -> dict[str, Any]:
        began_s, chance = self.clear(), random.Random(self.count)
        ids = [peer.id for peer in self.peers]
        for i, peer in enumerate(self.peers):
            links = [ids[(i + k) % len(ids)] for k in range(1, 1 + min(NEIGHBOURS, len(ids) - 1))]
            self.group.create_task(peer.start(chance.random() * STARTED_WITHIN_S, links))
        elected_s = await until(self.agreed) - began_s
        known_s = await until(lambda: all(peer.knows(self.count) for peer in self.peers)) - began_s
        return {
            "elected_s": round(elected_s, 1),
            "known_s": round(known_s, 1),
            "read_bytes": self.each(lambda t: t.store["read_bytes"]),
            "written_bytes": self.each(lambda t: t.store["written_bytes"]),
        }

    async def join(self) -> dict[str, Any]:
        """One more."""
        new, others = await self.peer("new"), list(self.peers)
        began_s = self.clear()
        new.gossip()
        await new.start(0.0, [peer.id for peer in others[:NEIGHBOURS]])
        knows_s = await until(lambda: new.knows(len(others) + 1)) - began_s
        read = new.tally.store["read_bytes"]
        self.peers.append(new)
        known_s = await until(lambda: all(new.id in peer.agent.directory.peers for peer in others)) - began_s
        return {"knows_s": round(knows_s, 2), "known_s": round(known_s, 2), "read_bytes": read, **await self._told()}

    async def change(self) -> dict[str, Any]:
        """One peer's links have changed."""
        began_s, writer = self.clear(), self.peers[0]
        record = writer.links([peer.id for peer in self.peers[1 : 1 + NEIGHBOURS]], 1e6)
        await writer.agent.directory.publish(record)
        heard: list[float] = []

        def everywhere() -> bool:
            known = [peer.agent.directory.links.get(writer.id) for peer in self.peers[1:]]
            share = sum(link is not None and link.links == record.links for link in known) / len(known)
            if share >= 0.99 and not heard:
                heard.append(_now())
            return share == 1.0

        all_s = await until(everywhere) - began_s
        return {"nearly_all_s": round(heard[0] - began_s, 2), "all_s": round(all_s, 2), **await self._told()}

    async def _told(self) -> dict[str, Any]:
        """The messages of one change, once it has died out."""
        while True:
            before = sum(peer.tally.frames["news"] for peer in self.peers)
            await asyncio.sleep(2.0)
            if before == sum(peer.tally.frames["news"] for peer in self.peers):
                break
        at_most = FANOUT * (math.ceil(math.log2(len(self.peers))) + MORE_TURNS)
        return {
            "messages": self.each(lambda t: t.frames["news"]),
            "messages_at_most": at_most,
            "bytes": self.each(lambda t: t.frame_bytes["news"]),
        }

    async def elect(self) -> dict[str, Any]:
        """The coordinator is gone."""
        began_s, lease = self.clear(), self.peers[0].agent.lease
        assert lease is not None
        gone = next(peer for peer in self.peers if peer.id == lease.peer_id)
        gone.stop()
        self.network.kill(gone.id)
        gone.store.reachable = False
        self.peers.remove(gone)
        return {"elected_s": round(await until(self.agreed) - began_s, 1)}

    async def agree(self) -> dict[str, Any]:
        """An owner asks for a plan, offers it, and all of its members acknowledge what they were offered."""
        owner = await self.peer("owner", lends=False)
        await owner.start()
        await until(lambda: owner.knows(len(self.peers) + 1))
        self.peers.append(owner)
        job = job_of()
        captured = capture(job)
        began_s = self.clear()
        request = PlanRequest(costs_of(job, captured), stages=min(STAGES, captured.train.num_blocks))
        began_computing_s = time.perf_counter()
        planned = await request_plan(owner.agent, request)
        planning_s = time.perf_counter() - began_computing_s
        planned_s = _now() - began_s
        reports: list[Report] = []

        async def hear(report: Report) -> None:
            reports.append(report)

        plan = planned.plan
        owning = own(owner.agent, job, captured, plan, planned.term, (1, 1))
        await owning.train(Feed(job, captured, plan.micro_batch), hear)
        assert len(reports) == 1
        members = [peer.tally for peer in self.peers if peer.id in plan.peers]
        found = {
            "members": len(members),
            "planned_s": round(planned_s, 2),
            "acknowledged_s": round(max(t.last_s["ready"] for t in members) - began_s, 2),
            "computed_s": round(planning_s, 2),
            "plan_bytes": sum(peer.tally.frame_bytes["plan"] for peer in self.peers),
            "messages_to_a_member": owner.tally.frames["offer"] / len(members),
            "offer_bytes_a_member": owner.tally.frame_bytes["offer"] // len(members),
            "left_out": len(plan.left_out),
        }
        self.peers.remove(owner)
        owner.stop()
        return found


async def until(holds: Callable[[], bool], limit_s: float = 300.0) -> float:
    """When it holds, to a twentieth of a second; TimeoutError if it never does."""
    async with asyncio.timeout(limit_s):
        while True:
            if holds():
                return _now()
            await asyncio.sleep(0.05)


def job_of() -> Job:
    """So small that only the protocol counts."""
    torch.manual_seed(0)
    layers = [layer for _ in range(STAGES) for layer in (nn.Linear(16, 16), nn.Tanh())]
    data = [(torch.randn(16), torch.randn(16)) for _ in range(16)]
    return Job(
        model=nn.Sequential(*layers),
        loss=nn.functional.mse_loss,
        data=data,
        optimizer=Optimizer("SGD", lr=0.1),
        batch_size=16,
        micro_batch_size=4,
        steps=1,
    )


def decoded_once() -> Any:
    """A thousand machines each decode what they read; one that plays them all need not do so a thousand times."""
    cached = functools.lru_cache(maxsize=1 << 14)(open_sealed)

    def decode(
        kind: Any,
        subkey: str,
        data: bytes,
        key: MeshKey,
        limits: Any = None,
        *,
        now: float | None = None,
        members: Any = None,
    ) -> Any:
        return cached(kind, subkey, data, key, limits)

    return mock.patch("dht.directory.open_sealed", decode)


async def one(count: int) -> dict[str, Any]:
    """All figures of a mesh of so many peers."""
    began_s = time.perf_counter()
    async with Compute() as compute, Mesh(count, compute) as mesh:
        found: dict[str, Any] = {"peers": count, "start": await mesh.find_one_another()}
        await asyncio.gather(*(peer.agent.directory.refresh() for peer in mesh.peers))  # so that the start is no news
        for peer in mesh.peers:
            peer.gossip()
        await asyncio.sleep(2.0)
        found["plan"] = await mesh.agree()
        found["join"] = await mesh.join()
        found["change"] = await mesh.change()
        found["elect"] = await mesh.elect()
    found["computed_s"] = round(time.perf_counter() - began_s, 1)
    print(json.dumps(found), file=sys.stderr)
    return found


def measure(counts: Iterable[int]) -> dict[str, Any]:
    """The figures of a mesh of each size, one after the other."""
    with decoded_once(), quiet():
        return {"machine": machine(), "meshes": [run(one(count)) for count in counts]}


def table(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for mesh in found["meshes"]:
        start, join, change, plan = (mesh[part] for part in ("start", "join", "change", "plan"))
        rows.append(
            row(
                mesh["peers"],
                start["known_s"],
                f"{start['read_bytes']['mean'] / 1e6:.2f}",
                f"{join['known_s']} ({join['read_bytes'] / 1e6:.2f})",
                f"{change['nearly_all_s']} / {change['all_s']}",
                f"{change['messages']['mean']} / {change['messages']['most']:.0f} / {change['messages_at_most']}",
                f"{change['bytes']['mean'] / 1e3:.0f}",
                f"{start['elected_s']} / {mesh['elect']['elected_s']}",
                f"{plan['planned_s']} + {plan['acknowledged_s'] - plan['planned_s']:.2f}",
                f"{plan['plan_bytes'] / 1e3:.1f}",
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--real", type=int, nargs="+", metavar="PEERS", help="processes in place of virtual time")
    options = parser.parse_args()
    if options.real:
        print(json.dumps(crowd.measure(options.real), indent=1))
        return
    found = measure(options.peers)
    print("\n".join(table(found)) if options.table else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
