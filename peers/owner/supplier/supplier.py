"""Which peer supplies a run's samples: the one that `At(where, name)` means, or another of that region where it is gone.

The idea: peers say in their records which sets they have. Whichever has the set gives the same samples, as these follow from (seed,
step, index). So a run that has lost its supplier goes on with another, or waits for it to come back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

from dht import PeerRecord
from meshcee.errors import JoinError, PeerLostError, UsageError
from meshcee.job import At, Job
from meshcee.sampling import inputs_of_one
from peers.mesh_view import MeshView
from peers.wire import unless_late

__all__ = ["Supplier"]


class Supplier:
    """Of one run, over all its epochs."""

    def __init__(self, job: Job) -> None:
        assert isinstance(job.data, At)
        self.at = job.data
        # Of one sample, as the supplier is told it.
        self.inputs: list[tuple[str, str, tuple[int, ...]]] = [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
            for name, tensor in inputs_of_one(job, self.at.like).items()
        ]
        self.peer = ""  # the newest
        self.name = ""
        self.addresses: tuple[str, ...] = ()
        self._lost: dict[str, float] = {}  # when each was, by the clock of records
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
                first = f"start a peer of that name or region with `--dataset {self.at.name}=FILE.py:make`"
                raise PeerLostError(f"the data is gone; {how_to_go_on(lost, first)}") from lost
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
        right = sorted(peer for peer, samples in there.items() if samples == self.at.samples)
        self.peer = self.peer if self.peer in right else right[0]
        self.name, self.addresses = agent.names()[self.peer], agent.addresses_of([self.peer])[self.peer]
        for record in (agent.directory.peers[peer] for peer in members if peer in agent.directory.peers):
            if record.datasets is None:
                raise UsageError(
                    f"peer {record.name} runs an older meshcee ({record.software}), which takes samples from owners alone: upgrade "
                    "it with `pip install -U meshcee`"
                )

    def _there(self, agent: MeshView) -> dict[str, int]:
        """Peers that have a set of the name, with its number of samples."""

        def is_there(peer: str, record: PeerRecord) -> bool:
            is_meant = self.at.where in (peer, record.name, record.region)
            return is_meant and not record.leaving and record.sent_at > self._lost.get(peer, 0.0)

        found = {p: dict(r.datasets or ()) for p, r in agent.directory.peers.items() if is_there(p, r)}
        return {peer: sets[self.at.name] for peer, sets in found.items() if self.at.name in sets}

    def lose(self) -> None:
        """It is not to be asked again before it has announced itself anew."""
        self._lost[self.peer] = self._clock()
