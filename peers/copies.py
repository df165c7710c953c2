"""The owner's side of buddies: who is whose, which copies there are and who holds them.

The idea: the owner never sees a copy, only what it is: a digest for each tensor, from the member that made it, and word from
the buddy that it holds the same. A step's copy counts when every stage has one; the last of these, and the one in the making,
are all that is kept.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from meshcee.errors import ProtocolError
from meshcee.plan import Plan
from meshcee.profile import LinkProfile
from peers import messages
from peers.buddy import digests_in, digests_of, layouts_of
from peers.cadence import CHUNK_BYTES, Cadence
from peers.link import Link
from peers.messages import need
from peers.transport.base import Frame

__all__ = ["Copied", "Copies", "Copying", "buddies", "chunk_seconds"]

log = structlog.get_logger()

TRIES = 2  # epochs that may begin with copies which are not found
NEAR = 3.0  # a link that takes at most so many times as long as the quickest one is as good


def chunk_seconds(links: Mapping[tuple[str, str], LinkProfile]) -> dict[tuple[str, str], float]:
    """What a chunk of a copy takes over each of these links."""
    return {pair: link.latency_s + CHUNK_BYTES / link.bandwidth_bytes_per_s for pair, link in links.items()}


def buddies(plan: Plan, seconds: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Who keeps the copies of each member that holds its blocks alone; members of a group, and pipelines, are copies of each
    other.

    `seconds` is what a chunk takes over each link that was measured, by sender and receiver. A buddy is the one
    with least to keep among those that are near; nobody has one when there is only one member.
    """
    peers = plan.peers
    load = dict.fromkeys(peers, 0)
    found: dict[str, str] = {}
    for stage in plan.pipelines[0].stages if len(plan.pipelines) == 1 else ():
        others = [peer for peer in peers if peer not in stage.peers]
        if len(stage.members) > 1 or not others:
            continue
        holder = stage.peers[0]
        takes = {peer: seconds.get((holder, peer), math.inf) for peer in others}
        near = [peer for peer in others if takes[peer] <= NEAR * min(takes.values())]
        after = {peer: (peers.index(peer) - peers.index(holder)) % len(peers) for peer in near}
        buddy = min(near, key=lambda peer: (load[peer], takes[peer], after[peer]))
        found[holder] = buddy
        load[buddy] += 1
    return found


@dataclass
class _StageCopy:
    """What a stage was before a step, by name, and the members that hold these bits."""

    weights: dict[str, str] = field(default_factory=dict)
    optimizer: dict[str, str] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)

    def clashes(self, weights: Mapping[str, str], optimizer: Mapping[str, str]) -> bool:
        """Whether it is other bits of what these are too."""
        own = ((self.weights, weights), (self.optimizer, optimizer))
        return any(name in mine and mine[name] != digest for mine, theirs in own for name, digest in theirs.items())


@dataclass
class Copied:
    """The state before a step, of which members hold copies, stage by stage of the plan that made it: of all pipelines."""

    next_step: int
    stages: tuple[_StageCopy, ...]
    missed: int = 0  # epochs that did not find all of it: a link may have failed, or it is gone

    @property
    def holders(self) -> set[str]:
        return set().union(*(stage.holders for stage in self.stages))

    @property
    def keepers(self) -> list[list[str]]:
        """Of every tensor those who hold it, in order and each set of them once: stages may share tensors, or have none."""
        found: dict[tuple[int, str], set[str]] = {}
        for stage in self.stages:
            for kind, names in enumerate((stage.weights, stage.optimizer)):
                for name in names:
                    found.setdefault((kind, name), set()).update(stage.holders)
        return [list(peers) for peers in sorted({tuple(sorted(peers)) for peers in found.values()})]

    @property
    def is_whole(self) -> bool:
        """Whether somebody holds everything."""
        return all(self.keepers)

    def digests(self, names: Collection[str], trainable: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
        """Of these weights, as far as training changes them, and of what the optimizer keeps for these parameters."""
        mine = set(trainable)
        weights = {n: d for stage in self.stages for n, d in stage.weights.items() if n in names}
        kept = {n: d for stage in self.stages for n, d in stage.optimizer.items() if n.rpartition("/")[0] in mine}
        return weights, kept

    def to_json(self) -> dict[str, Any]:
        stages = [[dict(s.weights), dict(s.optimizer), sorted(s.holders)] for s in self.stages]
        return {"next_step": self.next_step, "stages": stages}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Copied:
        """What `to_json` gave; ValueError, KeyError or TypeError for anything else."""
        stages = [_StageCopy(dict(weights), dict(kept), set(holders)) for weights, kept, holders in data["stages"]]
        return cls(int(data["next_step"]), tuple(stages))

    def sources(self, names: Collection[str]) -> tuple[str, ...]:
        """Who holds some of these weights."""
        return tuple(sorted({p for s in self.stages if any(n in names for n in s.weights) for p in s.holders}))


class Copies:
    """All that there are of one job, over its epochs. `tell` is called with those that count when there are others."""

    def __init__(self, tell: Callable[[Sequence[Copied]], None] = lambda found: None) -> None:
        self.cadence = Cadence()
        self._found: list[Copied] = []  # whole ones, oldest first
        self._tell = tell

    def add(self, copied: Copied) -> None:
        """It is whole; one older one is kept, which counts until the steps before this one have been reported."""
        self._found = [*[c for c in self._found if c.next_step < copied.next_step][-1:], copied]
        self._tell(self._found)

    def restore(self, found: Sequence[Copied], alive: Collection[str]) -> None:
        """What an owner that has died knew; of its holders these are there."""
        self._found = list(found)
        self.newest(0, set().union(*(copied.holders for copied in found)).difference(alive))

    def newest(self, done: int, gone: Collection[str] = ()) -> Copied | None:
        """The newest of no step after `done`, of which these who are gone do not hold the last copies.

        Who is gone has lost its copies, even if it comes back.
        """
        for copied in self._found:
            for stage in copied.stages:
                stage.holders.difference_update(gone)
        whole = [c for c in self._found if c.missed < TRIES and c.is_whole]
        return next((c for c in reversed(whole) if c.next_step <= done), None)

    def forget_before(self, step: int) -> None:
        """Members are about to."""
        self._found = [c for c in self._found if c.next_step >= step]


class Copying:
    """One epoch's copies. `hear` is called by the tasks that read from members."""

    def __init__(self, copies: Copies, links: Sequence[Link], chosen: Mapping[str, str], start: int) -> None:
        self._copies = copies
        self._links = {link.peer_id: link for link in links}
        self._buddies = dict(chosen)
        self._replicas = any(link.place.has_replicas for link in links)
        self._stages = 1 + max(link.place.number for link in links)
        self._making: Copied | None = None
        self._awaited: set[tuple[str, str]] = set()  # (kind of frame, whose copy it is about)
        self._took_s = self._read_s = 0.0
        self._since = start
        self.reported = start  # steps before this one have been
        copies.cadence.start(start, _now_s())

    def is_due(self, next_step: int) -> bool:
        """Not before the last is whole and its steps are reported: until then the one before it is needed."""
        if not self._buddies and not self._replicas:
            return False  # all have refused
        found = self._copies.newest(next_step)
        known = found is None or found.next_step <= self.reported
        return self._making is None and known and self._copies.cadence.is_due(next_step, _now_s())

    def forget_before(self, step: int) -> None:
        self._copies.forget_before(step)

    def begin(self, next_step: int) -> None:
        """Every member is asked for a copy."""
        self._copies.cadence.begun(next_step, _now_s())
        log.debug("copies are asked for", next_step=next_step)
        self._making = Copied(next_step, tuple(_StageCopy() for _ in range(self._stages)))
        self._awaited = {(messages.COPIED, peer) for peer in self._links}
        self._took_s = self._read_s = 0.0

    @property
    def reading(self) -> list[int]:
        """The step of those that are under way, if any."""
        return [] if self._making is None else [self._making.next_step]

    @property
    def since(self) -> int:
        """The step of the copies that this epoch may have to go back to."""
        found = self._copies.newest(self.reported)
        return max(self._since, found.next_step if found is not None else 0)

    def hear(self, link: Link, frame: Frame) -> None:
        """COPIED from a holder, or KEPT from a buddy."""
        making = self._making
        source = link.peer_id if frame.kind == messages.COPIED else need(frame.header, "source", str)
        expected = (frame.kind, source) in self._awaited
        if frame.kind == messages.KEPT:
            expected = expected and self._buddies.get(source) == link.peer_id
        if making is None or not expected or need(frame.header, "next_step", int) != making.next_step:
            raise ProtocolError("it told of a copy that nobody asked for")
        stage = making.stages[self._links[source].place.number]
        if frame.kind == messages.COPIED:
            self._copied(link, frame, making, stage)
        else:
            self._kept(link, frame, source, stage)
        self._awaited.remove((frame.kind, source))
        if not self._awaited:
            self._making = None
            self._copies.cadence.ended(read_s=self._took_s + self._read_s, made_s=0.0)  # there is no disk to spare
            self._copies.add(making)
            holders = [sorted(stage.holders) for stage in making.stages]
            log.debug("copies", next_step=making.next_step, holders=holders, keepers=making.keepers)

    def _copied(self, link: Link, frame: Frame, making: Copied, stage: _StageCopy) -> None:
        weights, optimizer = digests_in(frame, layouts_of(link.offer))
        if stage.holders and (stage.weights, stage.optimizer) != (weights, optimizer):
            raise ProtocolError("it holds another state than the other members of its group")
        elsewhere = {o.place.number for o in self._links.values() if o.place.pipeline != link.place.pipeline}
        if any(making.stages[at].clashes(weights, optimizer) for at in elsewhere):
            raise ProtocolError("it holds another state than the other pipelines")
        stage.weights, stage.optimizer = weights, optimizer
        stage.holders.add(link.peer_id)
        self._took_s = max(self._took_s, _seconds(frame, "took_s"))
        if (buddy := self._buddies.get(link.peer_id)) is not None:
            header = {"next_step": making.next_step, "source": link.peer_id, "since": self.since}
            self._links[buddy].outbox.post(Frame(messages.KEEP, header, digests_of(weights, optimizer)))
            self._awaited.add((messages.KEPT, link.peer_id))

    def _kept(self, link: Link, frame: Frame, source: str, stage: _StageCopy) -> None:
        self._read_s = max(self._read_s, _seconds(frame, "read_s"))
        if need(frame.header, "kept", bool):
            stage.holders.add(link.peer_id)
        elif (missing := need(frame.header, "missing_bytes", int)) > 0:
            del self._buddies[source]
            log.warning("a stage has no buddy: the peer has no memory for its copies", peer=link.peer_id, bytes=missing)
        else:
            log.info("a copy did not reach its buddy", holder=source, buddy=link.peer_id)


def _seconds(frame: Frame, name: str) -> float:
    value = need(frame.header, name, float)
    if not 0 <= value < math.inf:
        raise ProtocolError(f"header field {name!r} must be seconds, got {value!r}")
    return value


def _now_s() -> float:
    return asyncio.get_running_loop().time()
