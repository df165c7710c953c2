"""One epoch's copies: asked for, described by those who made them, kept by keepers, and then by far ones.

The idea: every member copies its stage between the same two steps; from there on each copy is a few messages, and none is
waited for.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence

import structlog

from meshcee.errors import ProtocolError
from meshcee.events import Event
from peers.state.manifest import CopySet, Manifest, StageCopy
from peers.state.policy import Keepers
from peers.transport import Frame
from peers.wire import Link, digests_in, digests_of, messages, need

__all__ = ["ClashError", "Copying", "FarCopying"]

log = structlog.get_logger()

LATE_STEPS = 10  # an owner that has slept hears of copies before it has told of so many
UNASKED = "it told of a copy that nobody asked for"


class ClashError(ProtocolError):
    """A member holds another state than these others, of whom each has described what they share.

    `of` is the only other one, if there is one: then either of the two may be wrong.
    """

    def __init__(self, text: str, others: Collection[str]) -> None:
        super().__init__(text)
        self.of: str | None = next(iter(others)) if len(others) == 1 else None


class Copying:
    """One epoch's copies. `hear` is called by the tasks that read from members. Without a manifest no copies outlive the epoch."""

    def __init__(self, manifest: Manifest | None, links: Sequence[Link], chosen: Keepers, start: int) -> None:
        self._keeps = manifest is not None
        self._copies = manifest or Manifest()
        self._links = {link.peer_id: link for link in links}
        self._keepers = dict(chosen.near)
        self._replicas = self._keeps and any(link.place.has_replicas for link in links)
        self._asked: dict[int, CopySet] = {}  # by step, until all members have described them
        self._making: CopySet | None = None  # what keepers are to have, or the next plan
        self._last: CopySet | None = None  # of the epoch's last steps: who asked compares its holders
        # Kind of frame, whose copy of which step -> who is to send it.
        self._awaited: dict[tuple[str, str, int], str] = {}
        # Copies that are made and not described: since which report, and when.
        self._owed: dict[int, tuple[int, float]] = {}
        self._took_s = self._read_s = 0.0
        self.handed_over = asyncio.Event()  # all members have described what they hand over
        self._since = self._copies.since(start)
        self.reported = start  # steps before this one have been
        self._copies.begin(start)
        self._copies.cadence.start(start, _now_s())
        self._far = FarCopying(self._copies, self._links, chosen.far, start)

    def is_due(self, next_step: int) -> bool:
        return self.can_begin(next_step) and self._copies.cadence.is_due(next_step, _now_s())

    def can_begin(self, next_step: int) -> bool:
        """Not before the last is whole, its steps are reported, and others know: until then the one before it is needed."""
        if not self._keepers and not self._replicas:
            return False  # all have refused
        found = self._copies.newest(next_step)
        known = found is None or (found.next_step <= self.reported and self._copies.is_told(found))
        return self._making is None and known

    def after(self, step: int) -> None:
        """This step has been reported."""
        self.reported = step + 1
        self._copies.tell_others(self.reported)

    def forget_before(self, step: int) -> None:
        self._copies.forget_before(step)

    def ask(self, next_step: int) -> CopySet:
        """Every member is asked for a copy."""
        stages = {link.place.number for link in self._links.values()}
        asked = self._asked[next_step] = CopySet(next_step, tuple(StageCopy() for _ in stages))
        self._awaited |= {(messages.COPIED, peer, next_step): peer for peer in self._links}
        return asked

    def ask_last(self, next_step: int) -> CopySet:
        """Nothing is trained from here on: these are the weights. Whether members agree on them is told by `check_replicas`."""
        self._last = self.ask(next_step)
        return self._last

    def begin(self, next_step: int) -> None:
        """Every member is asked for a copy, which keepers are to have."""
        self._copies.cadence.begun(next_step, _now_s())
        log.debug("copies are asked for", next_step=next_step)
        self._making = self.ask(next_step)
        self._took_s = self._read_s = 0.0

    @property
    def is_first_to_copy(self) -> bool:
        """Whether this plan was handed what it began with, and will have copies of its own, but has none yet."""
        return self._copies.were_handed and (self._replicas or bool(self._keepers))

    @property
    def can_hand_over(self) -> bool:
        """Not twice in a row: members would have to hold on to more copies than the plan has room for."""
        return self._keeps and not self._copies.were_handed

    def hand_over(self, next_step: int) -> None:
        """Nothing is trained from here on, and another plan goes on from this step: every member is asked for a copy, which no
        keeper keeps. One in the making is dropped; who was asked for it may still answer.
        """
        self._keepers = {}
        self._making = self.ask(next_step)
        self._making.handed = True

    def hand_over_last(self) -> bool:
        """Another plan goes on from the copies of `ask_last`, which all members still hold. Whether copies outlive this epoch."""
        if not self._keeps or self._last is None:
            return False
        self._last.handed = True
        self._whole(self._last)
        return True

    def late(self, limit_s: float) -> set[str]:
        """Who has computed on behind a copy and has not described it for so long, and some steps. Called after each report."""
        owed = {(p, step) for kind, p, step in self._awaited if kind == messages.COPIED and step < self.reported}
        self._owed = {step: self._owed.get(step, (self.reported, _now_s())) for _, step in owed}
        due = {n for n, (at, s) in self._owed.items() if self.reported - at > LATE_STEPS and _now_s() - s > limit_s}
        return {peer for peer, step in owed if step in due}

    @property
    def making(self) -> list[int]:
        """The step of those that are under way, if any are."""
        return [] if self._making is None else [self._making.next_step]

    @property
    def far_steps(self) -> list[int]:
        return self._far.steps

    @property
    def needed(self) -> list[int]:
        """The steps of near ones that somebody may have to go back to."""
        return self._copies.needed(self.reported)

    @property
    def since(self) -> int:
        """The step of the oldest of them; where there are none, the one that this epoch may need copies from."""
        return min(self.needed, default=self._since)

    def hear(self, link: Link, frame: Frame) -> CopySet | None:
        """COPIED from a holder, or KEPT from a keeper. The copies that all members have described by this."""
        if frame.kind == messages.KEPT and need(frame.header, "far", bool):
            self._far.hear(link, frame)
            return None
        next_step = need(frame.header, "next_step", int)
        source = link.peer_id if frame.kind == messages.COPIED else need(frame.header, "source", str)
        if self._awaited.get((frame.kind, source, next_step)) != link.peer_id:
            raise ProtocolError(UNASKED)
        making = self._making if self._making is not None and self._making.next_step == next_step else None
        if frame.kind == messages.COPIED:
            self._describe(link, frame, self._asked[next_step])
        elif making is not None:
            self._kept(link, frame, source, making.stages[self._links[source].place.number])
        del self._awaited[frame.kind, source, next_step]
        left = {kind for kind, _, step in self._awaited if step == next_step}
        if making is not None and not left:
            self._whole(making)
        return self._asked.pop(next_step) if frame.kind == messages.COPIED and messages.COPIED not in left else None

    def _whole(self, made: CopySet) -> None:
        """All who were asked have answered."""
        self._making = None
        if made.handed:
            self._copies.add(made)
            self._copies.tell_others(self.reported)  # soon: the next plan's first copies wait for that
            log.debug("copies are handed over", next_step=made.next_step, held_by=made.held_by)
            self.handed_over.set()
            return
        self._copies.cadence.ended(read_s=self._took_s + self._read_s, made_s=0.0)  # there is no disk to spare
        self._copies.stay_with(self._links if self._far.chosen else ())
        self._copies.add(made)
        self._copies.tell_others(self.reported)
        holders, far = [sorted(stage.holders) for stage in made.stages], bool(self._far.chosen)
        log.debug(Event.COPIES_MADE, next_step=made.next_step, holders=holders, held_by=made.held_by, far=far)
        self._far.take_up(made)

    def _describe(self, link: Link, frame: Frame, asked: CopySet) -> None:
        weights, optimizer = digests_in(frame, link.offer.layouts)
        stage = asked.stages[link.place.number]
        if asked is self._last:
            link.digests = weights
            if link.leads:
                stage.weights, stage.optimizer = weights, optimizer
                stage.holders.add(link.peer_id)
            return
        if stage.holders and (stage.weights, stage.optimizer) != (weights, optimizer):
            raise ClashError("it holds another state than the other members of its group", stage.holders)
        elsewhere = {o.place.number for o in self._links.values() if o.place.pipeline != link.place.pipeline}
        clashing = [asked.stages[at] for at in elsewhere if asked.stages[at].clashes(weights, optimizer)]
        if clashing:
            raise ClashError(
                "it holds another state than the other pipelines", set().union(*(other.holders for other in clashing))
            )
        stage.weights, stage.optimizer = weights, optimizer
        stage.holders.add(link.peer_id)
        took_s = _seconds(frame, "took_s")
        if asked is self._making:
            self._took_s = max(self._took_s, took_s)
            if (keeper := self._keepers.get(link.peer_id)) is not None:
                header = {"next_step": asked.next_step, "source": link.peer_id, "far": False}
                header |= {"since": self.since, "besides": self._far.steps}
                self._links[keeper].outbox.post(Frame(messages.KEEP, header, digests_of(weights, optimizer)))
                self._awaited[messages.KEPT, link.peer_id, asked.next_step] = keeper

    def _kept(self, link: Link, frame: Frame, source: str, stage: StageCopy) -> None:
        self._read_s = max(self._read_s, _seconds(frame, "read_s"))
        if need(frame.header, "kept", bool):
            stage.holders.add(link.peer_id)
        elif (missing := need(frame.header, "missing_bytes", int)) > 0:
            del self._keepers[source]
            log.warning(Event.NO_KEEPER, peer=link.peer_id, bytes=missing)
        else:
            log.info("a copy did not reach its keeper", holder=source, keeper=link.peer_id)


class FarCopying:
    """One epoch's copies in other regions. What near keepers have just made whole is copied on, so members copy and
    hash nothing for it. It goes one stage after the other, each as gently as a reader in another region is.
    """

    def __init__(self, copies: Manifest, links: Mapping[str, Link], chosen: Mapping[str, str], start: int) -> None:
        self.chosen = dict(chosen)  # none: there is no such tier, or a far keeper has refused
        self._copies = copies
        self._links = links
        self._making: CopySet | None = None
        self._left: list[str] = []  # members whose stages are to be kept, the one that is being read first
        self._read_s = 0.0
        copies.far_cadence.start(start, _now_s())

    @property
    def steps(self) -> list[int]:
        """Of whole ones and of the one in the making."""
        return sorted({*self._copies.far_steps, *([] if self._making is None else [self._making.next_step])})

    def take_up(self, copied: CopySet) -> None:
        """These copies are whole: have them kept in other regions too, if that is due."""
        if (
            not self.chosen
            or self._making is not None
            or not self._copies.far_cadence.is_due(copied.next_step, _now_s())
        ):
            return
        self._copies.far_cadence.begun(copied.next_step, _now_s())
        members: list[set[str]] = [set() for _ in copied.stages]  # a near keeper keeps newer ones
        for peer, link in self._links.items():
            members[link.place.number].add(peer)
        stages = [
            StageCopy(s.weights, s.optimizer, s.holders & own) for s, own in zip(copied.stages, members, strict=True)
        ]
        self._making = CopySet(copied.next_step, tuple(stages), far=True)
        self._left, self._read_s = list(self.chosen), 0.0
        self._ask(self._making)

    def _ask(self, making: CopySet) -> None:
        source = self._left[0]
        stage = making.stages[self._links[source].place.number]
        header = {"next_step": making.next_step, "source": source, "far": True, "since": 0, "besides": self.steps}
        keeper = self._links[self.chosen[source]]
        keeper.outbox.post(Frame(messages.KEEP, header, digests_of(stage.weights, stage.optimizer)))

    def hear(self, link: Link, frame: Frame) -> None:
        """KEPT from a far keeper."""
        making, source = self._making, need(frame.header, "source", str)
        asked = making is not None and source == self._left[0] and self.chosen[source] == link.peer_id
        if making is None or not asked or need(frame.header, "next_step", int) != making.next_step:
            raise ProtocolError(UNASKED)
        self._read_s += _seconds(frame, "read_s")
        if need(frame.header, "kept", bool):
            making.stages[self._links[source].place.number].holders.add(link.peer_id)
            del self._left[0]
            if self._left:
                self._ask(making)
            else:
                self._whole(making)
            return
        self._making = None  # the last ones count on
        if (missing := need(frame.header, "missing_bytes", int)) > 0:
            self.chosen.clear()
            log.warning(Event.NO_FAR_COPIES, peer=link.peer_id, bytes=missing)
        else:
            log.info("a copy did not reach its far keeper", holder=source, keeper=link.peer_id)

    def _whole(self, making: CopySet) -> None:
        self._making = None
        self._copies.far_cadence.ended(read_s=self._read_s, made_s=0.0)
        self._copies.add(making)
        holders = [sorted(stage.holders) for stage in making.stages]
        log.debug(Event.FAR_COPIES_MADE, next_step=making.next_step, holders=holders, held_by=making.held_by)


def _seconds(frame: Frame, name: str) -> float:
    value = need(frame.header, name, float)
    if not 0 <= value < math.inf:
        raise ProtocolError(f"header field {name!r} must be seconds, got {value!r}")
    return value


def _now_s() -> float:
    return asyncio.get_running_loop().time()
