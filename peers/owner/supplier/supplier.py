"""Which peer supplies a run's samples: the one that `At(where, name)` means, or another of that region where it is gone.

The idea: peers say in their records which sets they have. Whichever has the set gives the same samples, as these follow from (seed,
step, index). So a run that has lost its supplier goes on with another, or waits for it to come back. A supplier that wants to leave
may do so at the end of a step where another has the set; else it stays for as long as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

import structlog

from meshcee.errors import JoinError, PeerLostError, UsageError
from meshcee.events import Event
from meshcee.job import At, Job
from meshcee.sampling import inputs_of_one
from peers.mesh_view import MeshView
from peers.planning import PlanRequest
from peers.planning.supplied import having, links_from, who_supplies
from peers.wire import unless_late

__all__ = ["Supplier"]

log = structlog.get_logger()


class Supplier:
    """Of one run, over all its epochs."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.data, At)
        self.at = job.data
        sample = inputs_of_one(job, self.at.like)
        # Of one sample, as the supplier is told it.
        self.inputs: list[tuple[str, str, tuple[int, ...]]] = [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:])) for name, tensor in sample.items()
        ]
        self.bytes = {name: tensor.nbytes // len(tensor) for name, tensor in sample.items()}
        self.peer = ""  # the newest
        self.name = ""
        self.addresses: tuple[str, ...] = ()
        self._lost: dict[str, float] = {}  # when each was, by the clock of records
        self._needed = ""  # who wants to leave and may not, as has been told
        self._clock: Callable[[], float] = lambda: 0.0

    async def meet(
        self, agent: MeshView, members: Collection[str], how_to_go_on: Callable[[JoinError, str], str]
    ) -> None:
        """Find it. UsageError where the mesh has none, PeerLostError where it has none any more."""
        self._clock = agent.clock
        limit_s = agent.timeouts.regroup_s if self.peer else agent.timeouts.announce_every_s
        try:
            await unless_late(
                partial(agent.directory.wait_for, lambda: bool(self._there(agent))), limit_s, agent.timeouts
            )
        except TimeoutError:
            told = f"no peer {self.at.where!r}, nor one of a region of that name, has a dataset {self.at.name!r}"
            if self.peer:
                lost = JoinError(f"{told} any more")
                raise PeerLostError(f"the data is gone; {how_to_go_on(lost, self._advice)}") from lost
            known = sorted(
                f"{name!r} at {record.name}"
                for record in agent.directory.peers.values()
                for name, _ in record.datasets or ()
            )
            others = f" (this mesh has {', '.join(known):.500})" if known else ""
            raise UsageError(
                f"{told}{others}: ask its owner for `meshcee peer --dataset {self.at.name}=FILE.py:make`, or mend At(...); "
                "peers of --local have none"
            ) from None
        there = self._there(agent)
        if self.at.samples not in there.values():
            peer, samples = min(there.items())
            who = agent.names().get(peer, peer)
            raise UsageError(
                f"dataset {self.at.name!r} of {who} has {samples} samples: write samples={samples} in At(...)"
            )
        self.peer = who_supplies(agent, self.at, self._lost, self.peer) or self.peer
        self.name, self.addresses = agent.names()[self.peer], agent.addresses_of([self.peer])[self.peer]
        for record in (agent.directory.peers[peer] for peer in members if peer in agent.directory.peers):
            if record.datasets is None:
                raise UsageError(
                    f"peer {record.name} runs an older meshcee ({record.software}), which takes samples from owners alone: upgrade "
                    "it with `pip install -U meshcee`"
                )

    @property
    def _advice(self) -> str:
        return f"start a peer of that name or region with `--dataset {self.at.name}=FILE.py:make`"

    def _there(self, agent: MeshView) -> dict[str, int]:
        """Peers that have a set of the name, with its number of samples; the one that wants to leave where nobody else has."""
        found = having(agent, self.at, self._lost)
        return found or ({self.peer: self.at.samples} if self._stays(agent) else {})

    def _stays(self, agent: MeshView) -> bool:
        """Whether the supplier wants to leave, and is still there."""
        record = agent.directory.peers.get(self.peer)
        return record is not None and record.leaving and self.peer not in self._lost

    def leaving(self, agent: MeshView, members: Collection[str]) -> frozenset[str]:
        """Of these, who want to leave the job, and of the supplier: who may. The supplier stays where nobody else has the set."""
        if not self._stays(agent):
            return frozenset(members)
        if who_supplies(agent, self.at, self._lost) is not None:
            return frozenset({*members, self.peer})
        if self._needed != self.peer:
            self._needed = self.peer
            why = f"no other peer {self.at.where!r}, nor one of a region of that name, has dataset {self.at.name!r}"
            log.warning(Event.MEMBERS_NEEDED, who=[self.name], why=f"{why}: {self._advice}")
        return frozenset(members) - {self.peer}

    def priced(self, agent: MeshView, request: PlanRequest) -> PlanRequest:
        """The same question, with the links of whoever supplies now; where nobody does, with those that it had."""
        feeds = links_from(agent, who_supplies(agent, self.at, self._lost, self.peer))
        return replace(request, feeds=feeds) if feeds else request

    def lose(self) -> None:
        """It is not to be asked again before it has announced itself anew."""
        self._lost[self.peer] = self._clock()
