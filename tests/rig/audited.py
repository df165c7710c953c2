"""A few members with keys and an owner that audits them, in one loop over the in-process network; the plan is given.

The idea: an owner that only notes whom it would throw out goes on to the next step, so one run has as many lies as it has steps.
"""

from __future__ import annotations

import functools
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dht.signing import Identity
from meshcee.capture import Capture
from meshcee.config import Limits, Timeouts
from meshcee.job import Job
from peers.device.compute import Compute
from peers.device.graphs import Graphs
from peers.member.audit import again
from peers.member.service import Member
from peers.owner.audit import Auditing
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.transport.memory import MemoryNetwork
from tests.rig.mesh_fixture import agreed, even_plan

__all__ = ["Noting", "Watched", "watch"]


@functools.cache
def identity(place: int) -> Identity:
    return Identity(Ed25519PrivateKey.from_private_bytes(bytes([place]) * 32))  # chance picks the steps: the same ones


class Noting(Owner):
    """`found` has each (peer, step, why); nobody is thrown out."""

    found: list[tuple[str, int, str]]

    def convict(self, peer: str, step: int, why: str) -> None:
        self.found.append((peer, step, why))

    def doubt(self, peer: str, step: int) -> None:
        self.found.append((peer, step, "doubted"))


@dataclass
class Watched:
    """What came of a run: whom the owner found, in the order of steps, and how many members' steps it computed again."""

    peers: list[str]
    found: list[tuple[str, int, str]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    judged: int = 0


async def watch(
    job: Job, captured: Capture, stages: int, micro: int, *, seed: bytes = b"secret", **more: Any
) -> Watched:
    """Train to the end while every lie is noted."""
    network, limits = MemoryNetwork(), Limits()
    names = [identity(place).peer_id for place in range(stages)]
    plan = replace(even_plan(captured.train.num_blocks, stages, job.batch_size, micro, peers=names), threads=1)
    watched = Watched(names)
    async with AsyncExitStack() as stack:
        for place, name in enumerate(names):
            transport = await stack.enter_async_context(network.transport(name))
            compute = await stack.enter_async_context(Compute())
            ours = {"memory_bytes": 1 << 30, "timeouts": Timeouts(), "graphs": Graphs(limits), "accept": agreed}
            Member(transport, compute, sign=identity(place).sign, **ours)
        transport = await stack.enter_async_context(network.transport("owner"))
        own = await stack.enter_async_context(Compute())

        async def judge(*case: Any) -> Any:
            return await again(own, *case)

        given = {"addresses": {}, "names": {}, "timeouts": Timeouts(), "limits": limits}
        owner = Noting(job, captured, plan, (1, names[0]), (1, 1), transport, **given, **more)
        owner.found = watched.found
        if job.audit:
            owner.audit = Auditing(job.audit, seed, judge)

        async def hear(report: Report) -> None:
            watched.losses.append(report.loss)

        await owner.train(Feed(job, captured, micro), hear)
        watched.judged = owner.audit.judged if owner.audit is not None else 0
    return watched
