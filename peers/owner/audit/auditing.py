"""The audit of one epoch: proofs are held against one another, and some members' steps are computed again.

The idea: what a member said before it knew whether it is audited is held against what its stage gives. Every step is compared
along the links, and with the copies that members describe, for that costs nothing. A member whose own words contradict each other
has lied, whoever else has.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import structlog
import torch

from meshcee.audit import SIGNED, Edge, Proof, Tally, chosen, frame_digest, key_of, root_of, unequal
from meshcee.capture import Capture
from meshcee.errors import NonFiniteLossError, ProtocolError
from meshcee.role import Place
from meshcee.stage import first_moments
from peers.owner.answers import Answers
from peers.state import Beginning, CopySet, Reader, state_for
from peers.state.checkpoint import Checkpoint
from peers.state.fetch import Fetch, Shape
from peers.transport import Frame
from peers.wire import Link, Offer, Round, digest_of, digests_in, messages, need
from peers.wire.audit import Evidence, Said, most_bytes, signed_by, statement

__all__ = ["Auditing", "Court", "Judge"]

log = structlog.get_logger()

AHEAD = 2  # steps that may be fed before what is wanted of an earlier one is here
COMPARED = 64  # steps after which a copy is described, at most
TRIES = 3  # to read what a member has shown
LEAST_BYTES_PER_S = 64 << 10  # at which it is read, beside the time that an offer may stand still

Frames = Sequence[tuple[str, Frame]]
# Of (offer, state, frames, inputs by micro-batch, round): the proof that is due of the member, and what a last stage tells.
Judge = Callable[..., Awaitable[tuple[Proof, dict[int, list[float]]]]]


class Court(Protocol):
    """Who acts upon what is found."""

    def convict(self, peer: str, step: int, why: str) -> None:
        """This member has lied."""

    def doubt(self, peer: str, step: int) -> None:
        """This member does not show what it must."""


def _offered(captured: Capture, base: Checkpoint | CopySet | None, offer: Offer) -> str:
    """The root of the state that a member begins with."""
    begins, (weights, optimizer) = state_for(offer, captured, base), offer.layouts
    if base is None:
        trained = {name: offer.expected_state[name] for name in offer.specs[offer.index].trainable}
        moments = first_moments(offer.terms.optimizer, trained)
        begins["optimizer"] = Beginning(moments, moments)
    state, kept = begins["state"], begins["optimizer"]

    def digests(part: Beginning, names: Iterable[str], layout: Mapping[str, Shape]) -> dict[str, str]:
        said = part.digests
        return {n: said[n] if n in said else digest_of(part.values[n].to(layout[n][0]).contiguous()) for n in names}

    return root_of(digests(state, weights, weights), digests(kept, kept.names, optimizer))


class _Found(Exception):
    """Somebody has lied, or shows nothing: no more is to be found out of this step."""


@dataclass
class _Step:
    """One that has been fed and is not judged."""

    answers: Answers
    chosen: frozenset[str]
    rounds: dict[str, Round] = field(default_factory=dict)  # as each member was told of it
    raw: dict[str, dict[int, Mapping[str, torch.Tensor]]] = field(default_factory=dict)  # of the chosen
    proofs: dict[str, Proof] = field(default_factory=dict)
    proved: asyncio.Event = field(default_factory=asyncio.Event)  # all members have given proof
    is_shown: bool = False  # what the chosen had of it is here

    @property
    def number(self) -> int:
        return self.answers.round.number

    @property
    def step(self) -> int:
        return self.answers.round.step


def directions_of(place: Place, *, sends: bool) -> set[str]:
    """What a member's proof must name: every direction of its links that the plan uses in a step."""
    around = place.targets(place.micro_batch), place.sources(place.micro_batch)
    forward, back = around if sends else around[::-1]
    found = {key_of(messages.F, piece.peer) for piece in forward} | {key_of(messages.B, piece.peer) for piece in back}
    partial = place.partial_to.values() if sends else [peer for _, peer in place.partial_from]
    totals = place.totals_to if sends else place.totals_from.values()
    above = [] if place.above is None else [place.above]
    votes, commits = (above, place.below) if sends else (place.below, above)
    found |= {key_of(messages.SHARED, peer) for peer in partial} | {key_of(messages.TOTAL, peer) for peer in totals}
    found |= {key_of(messages.NORMS, peer) for peer in votes if place.votes}
    return found | {key_of(messages.COMMIT, peer) for peer in commits}


class Auditing:
    """Of one epoch. Rounds are steps here; `hear` and `copied` are called by the tasks that read from members."""

    def __init__(self, share: float, seed: bytes, judge: Judge) -> None:
        self._share, self._seed, self._judge = share, seed, judge
        self._links: dict[str, Link] = {}
        self._court: Court
        self._reader: Reader
        self._begun: tuple[Capture, Checkpoint | CopySet | None]  # what members have begun with
        self._steps: dict[int, _Step] = {}  # by round
        self._fed: asyncio.Queue[_Step] = asyncio.Queue()
        self._shown = asyncio.Event()  # of one step more, or all
        self._asked: dict[tuple[str, int], asyncio.Future[Evidence]] = {}
        self._state: dict[str, str] = {}  # the root of each member's state, as it has proved it last
        self._proved: dict[tuple[str, int], str] = {}  # of it before a step
        self._copied: dict[tuple[str, int], str] = {}  # as it has described a copy
        self.judged = 0  # members' steps that were computed again

    def begin(
        self, links: Sequence[Link], court: Court, reader: Reader, captured: Capture, base: Checkpoint | CopySet | None
    ) -> None:
        """All members are READY, each with its part of this state."""
        self._court, self._reader, self._begun = court, reader, (captured, base)
        self._links = {link.peer_id: link for link in links}

    @property
    def open(self) -> frozenset[str]:
        """Members of whose steps some are still to be judged."""
        return frozenset().union(*(step.chosen for step in self._steps.values()))

    # -- while steps are fed

    async def fed(self, answers: Answers) -> None:
        """This step is about to be fed; wait until members can have it beside those that they must still show."""
        while sum(not step.is_shown for step in self._steps.values()) >= AHEAD:
            self._shown.clear()
            await self._shown.wait()
        round = answers.round
        epoch = next(iter(self._links.values())).offer.epoch
        picked = frozenset(p for p in self._links if chosen(self._seed, self._share, epoch, round.step, p))
        step = self._steps[round.number] = _Step(answers, picked)
        self._fed.put_nowait(step)

    def inform(self, link: Link, round: Round) -> None:
        """A member is told of a step in these words."""
        if (step := self._steps.get(round.number)) is not None:
            step.rounds[link.peer_id] = round
            frames = most_bytes(link.offer, round.num_micro) + round.num_micro * 64
            link.stream.max_payload_bytes = max(link.stream.max_payload_bytes, frames)

    def gave(self, link: Link, number: int, micro: int, inputs: Mapping[str, torch.Tensor]) -> None:
        """A member is sent these inputs."""
        if (step := self._steps.get(number)) is not None and link.peer_id in step.chosen:
            step.raw.setdefault(link.peer_id, {})[micro] = inputs

    # -- what members tell

    def hear(self, link: Link, frame: Frame) -> bool:
        """Take a member's frame, if it is of an audit; whether it is."""
        if frame.kind not in (messages.PROOF, messages.EVIDENCE):
            return False
        number = need(frame.header, "round", int)
        step = self._steps.get(number)
        if step is None:
            raise ProtocolError(f"it proves round {number}, which is not running")
        if frame.kind == messages.EVIDENCE:
            asked = self._asked.pop((link.peer_id, number), None)
            if asked is None:
                raise ProtocolError("it shows a step that nobody has asked for")
            if not asked.done():
                num_micro = step.rounds[link.peer_id].num_micro
                asked.set_result(Evidence.from_frame(frame, link.offer, num_micro))
            return True
        if link.peer_id in step.proofs or link.peer_id not in step.rounds:
            raise ProtocolError(f"it proves round {number} twice, or before it was told of it")
        step.proofs[link.peer_id] = Proof.from_header(frame.header)
        if len(step.proofs) == len(self._links):
            step.proved.set()
        return True

    def copied(self, link: Link, frame: Frame) -> None:
        """A member has described a copy of its stage, which was looked at."""
        if frame.kind == messages.COPIED:
            where = link.peer_id, need(frame.header, "next_step", int)
            self._copied[where] = root_of(*digests_in(frame, link.offer.layouts))
            self._compare(*where)

    def _compare(self, peer: str, next_step: int) -> None:
        said, proved = (table.get((peer, next_step)) for table in (self._copied, self._proved))
        if said is not None and proved is not None and said != proved:
            self._court.convict(
                peer, max(0, next_step - 1), "the copy that it describes is of another state than it has proved"
            )

    # -- what comes of it

    async def run(self) -> None:
        """Until cancelled."""
        for peer, link in self._links.items():
            self._state[peer] = await asyncio.to_thread(_offered, *self._begun, link.offer)
        while True:
            step = await self._fed.get()
            with contextlib.suppress(_Found):
                await self._until_proved(step)
                await self._look_at(step)
            del self._steps[step.number]
            self._shown.set()

    async def _until_proved(self, step: _Step) -> None:
        """Who does not prove a step that all have applied is doubted, as who does not show one."""
        await step.answers.complete.wait()
        try:
            async with asyncio.timeout(self._reader.timeouts.offer_s):
                await step.proved.wait()
        except TimeoutError:
            self._state = {peer: proof.after for peer, proof in step.proofs.items()}
            for peer in self._links.keys() - step.proofs.keys():
                self._court.doubt(peer, step.step)
            raise _Found from None

    async def over(self) -> None:
        """Until everything that was fed is judged."""
        while self._steps:
            self._shown.clear()
            await self._shown.wait()

    async def _look_at(self, step: _Step) -> None:
        before = self._state
        self._state = {peer: proof.after for peer, proof in step.proofs.items()}
        for peer, proof in step.proofs.items():
            self._look_at_words(step, peer, proof, before.get(peer, proof.before))
        for edge in unequal(step.proofs):
            await self._settle(step, edge)
        cases = [(peer, *await self._case(step, peer)) for peer in sorted(step.chosen)]
        step.is_shown = True
        self._shown.set()
        for case in cases:
            await self._try(step, *case)

    def _look_at_words(self, step: _Step, peer: str, proof: Proof, before: str) -> None:
        """What a member says is what the plan has it do, and goes on from what it said last: `before`."""
        place = self._links[peer].place
        if proof.sent.keys() != directions_of(place, sends=True) or proof.received.keys() != directions_of(
            place, sends=False
        ):
            self._convict(peer, step, "it proves other links than the plan gives it")
        if proof.before != before:
            self._convict(peer, step, "it began with another state than it had")
        for next_step, root in ((step.step, proof.before), (step.step + 1, proof.after)):
            self._proved[peer, next_step] = root
            self._compare(peer, next_step)
        for table in (self._proved, self._copied):
            for old in [key for key in table if key[1] < step.step - COMPARED]:
                del table[old]

    def _convict(self, peer: str, step: _Step, why: str) -> NoReturn:
        self._court.convict(peer, step.step, why)
        raise _Found

    def _doubt(self, peer: str, step: _Step) -> NoReturn:
        self._court.doubt(peer, step.step)
        raise _Found

    async def _shows(self, step: _Step, peer: str) -> Evidence:
        """What a member has of a step. Who does not show it is left out."""
        asked = self._asked[peer, step.number] = asyncio.get_running_loop().create_future()
        await self._links[peer].outbox.put(Frame(messages.AUDIT, {"round": step.number}))
        try:
            async with asyncio.timeout(self._reader.timeouts.offer_s):
                shown: Evidence = await asked
                return shown
        except TimeoutError:
            self._doubt(peer, step)

    async def _settle(self, step: _Step, edge: Edge) -> None:
        """Of two members who say different things of their link, the receiver shows what the sender has signed."""
        kind, sender, receiver = edge
        shown = await self._shows(step, receiver)
        frames = [said for said in shown.frames if (said.peer, said.kind) == (sender, kind)]
        payloads = await self._read(step, receiver, {d: s for said in frames for d, s in zip(said.digests, said.sizes)})
        tally, micros = Tally(), []
        for said in frames:
            frame = _frame(said, payloads)
            digest = frame_digest(kind, frame.header, frame.payloads)
            tally.add(kind, sender, digest)
            micros.append(said.header.get("micro", 0))
            signature = said.header.get(SIGNED)
            text = statement(self._links[receiver].offer, sender, receiver, digest)
            if not isinstance(signature, bytes) or not signed_by(sender, text, signature):
                self._convict(receiver, step, "what it says that it received was not signed by the sender")
        many = step.rounds[receiver].num_micro if kind in (messages.F, messages.B, messages.SHARED) else 1
        if micros != list(range(many)) or any(said.header.get("round") != step.number for said in frames):
            self._convict(receiver, step, "it leaves out a part of what it received")
        if tally.hashes()[key_of(kind, sender)] != step.proofs[receiver].received[key_of(kind, sender)]:
            self._convict(receiver, step, "it shows other frames than it had said that it received")
        self._convict(sender, step, "it sent other numbers than it says that it sent")

    async def _case(self, step: _Step, peer: str) -> tuple[dict[str, torch.Tensor], Frames]:
        """A member's state before a step, and what it received: all is what it had said."""
        shown, proof, offer = await self._shows(step, peer), step.proofs[peer], self._links[peer].offer
        if shown.root != proof.before:
            self._convict(peer, step, "it shows another state than it had said that it began with")
        layout = {name: shape for part in offer.layouts for name, shape in part.items()}
        named = {**shown.weights, **shown.optimizer}
        payloads = {d: s for said in shown.frames for d, s in zip(said.digests, said.sizes)}
        found = await self._read(step, peer, payloads, {digest: layout[name] for name, digest in named.items()})
        frames = [(said.peer, _frame(said, found)) for said in shown.frames]
        tally = Tally()
        for sender, frame in frames:
            tally.add(frame.kind, sender, frame_digest(frame.kind, frame.header, frame.payloads))
        if tally.hashes() != proof.received:
            self._convict(peer, step, "it shows other frames than it had said that it received")
        state = {name: found[digest].clone() for name, digest in named.items()}
        counts = [float(state[name]) for name in shown.optimizer if name.endswith("/step")]
        if not all(0 <= count <= step.step for count in counts):  # NaN is neither
            self._convict(peer, step, "its optimizer counts steps that nobody has fed")
        return await asyncio.to_thread(self._constants, offer, state) | state, frames

    def _constants(self, offer: Offer, shown: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What no step changes, which no member shows: frozen parameters and constant buffers, as the owner has them."""
        captured, _ = self._begun
        expected = {name: shape for name, shape in offer.expected_state.items() if name not in shown}
        return {name: captured.state[name].to(dtype, copy=True) for name, (dtype, _) in expected.items()}

    async def _read(
        self, step: _Step, peer: str, payloads: Mapping[bytes, int], tensors: Mapping[str, Shape] | None = None
    ) -> dict[str, torch.Tensor]:
        """These by digest."""
        wanted = {d.hex(): (torch.uint8, (size,)) for d, size in payloads.items() if size} | dict(tensors or {})
        size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in wanted.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._reader.timeouts.offer_s + size / LEAST_BYTES_PER_S):
                for _ in range(TRIES):
                    fetch = Fetch(wanted, self._reader, gently=True)
                    await fetch.run([peer])
                    if not fetch.missing:
                        return fetch.found
        self._doubt(peer, step)

    async def _try(self, step: _Step, peer: str, state: Mapping[str, torch.Tensor], frames: Frames) -> None:
        """Compute it again."""
        offer, proof, round = self._links[peer].offer, step.proofs[peer], step.rounds[peer]
        try:
            right, losses = await self._judge(offer, state, frames, step.raw.get(peer, {}), round)
        except (ProtocolError, NonFiniteLossError) as error:
            self._convict(peer, step, str(error))
        except Exception as error:  # the state that it shows leads a kernel or the optimizer into any
            log.warning("a step could not be computed again", peer=peer, step=step.step, error=repr(error)[:500])
            if _is_no_memory(error):  # of this machine
                return
            self._doubt(peer, step)
        self.judged += 1
        for key in sorted(right.sent):
            if proof.sent[key] != right.sent[key]:
                kind, _, to = key.partition(" ")
                self._convict(peer, step, f"what it sent to stage {offer.place.label_of(to)} ({kind}) has other bits")
        told = {m: step.answers.losses.get((round.first + m, offer.place.member)) for m in losses}
        if repr(told) != repr(losses):  # as a term may be no number
            self._convict(peer, step, "the loss that it told is another one")
        if proof.after != right.after:
            self._convict(peer, step, "its weights, or what its optimizer keeps, have other bits after the step")


def _is_no_memory(error: Exception) -> bool:
    """On a CPU torch says so in words alone."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _frame(said: Said, found: Mapping[str, torch.Tensor]) -> Frame:
    payloads = [bytearray(found[d.hex()].numpy().tobytes() if s else b"") for d, s in zip(said.digests, said.sizes)]
    return Frame(said.kind, said.header, payloads)
