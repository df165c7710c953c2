"""What a member notes of its own steps where its owner audits: hashes for every step, and for some steps what they are hashes of.

The idea: a frame between members carries its sender's signature, so of two who say different things of a link the receiver can
show what it was sent. A step's inputs and the state before it are held until the owner may no longer ask for them; after the
proof is told nothing of it can be changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from meshcee.audit import SIGNED, Proof, Tally, frame_digest
from meshcee.errors import ProtocolError
from meshcee.stage import StageRunner
from peers.state.store import CopyStore, stage_tensors
from peers.transport import Frame
from peers.wire import Offer, Outbox, Round, digest_of, messages, need
from peers.wire.audit import Evidence, Said, State, statement

__all__ = ["KEPT_STEPS", "StepWitness"]

KEPT_STEPS = 4  # whose inputs are held: an owner feeds no step before it has what it wants of the last but one

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]


@dataclass
class _Entry:
    """Of one step."""

    round: int
    sent: Tally = field(default_factory=Tally)
    received: Tally = field(default_factory=Tally)
    frames: list[tuple[str, Frame]] = field(default_factory=list)
    after: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the state, until it is hashed
    before: State | None = None
    promised: int = 0  # frames that are still being encoded
    encoded: asyncio.Event = field(default_factory=asyncio.Event)  # none is


class StepWitness:
    """Of one session. Without `verify` signatures are neither asked for nor looked at: frames are the past's."""

    def __init__(self, offer: Offer, held: CopyStore, sign: Sign, verify: Verify | None) -> None:
        self._offer = offer
        self._held = held
        self._sign, self._verify = sign, verify
        self.me = offer.peer_id
        self._entries: dict[int, _Entry] = {}  # by round, oldest first
        self._begun: list[int] = []
        self._unsigned: dict[int, str] = {}  # round -> who sent what is not signed
        self._first: Mapping[str, torch.Tensor] | None = None  # the state that the epoch began with
        self._state: State | None = None  # the newest that is hashed
        self._done: asyncio.Queue[_Entry] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    # -- during a step: the executor and the links tell

    def begin(self, round: Round) -> None:
        """A step: what is sent from now on belongs to it."""
        if (peer := self._unsigned.get(round.number)) is not None:
            self._refuse(peer)
        self._entry(round.number)
        self._begun.append(round.number)
        self._unsigned = {n: p for n, p in self._unsigned.items() if n > round.number}
        for number in [n for n in self._entries if n < self._begun[max(0, len(self._begun) - KEPT_STEPS)]]:
            del self._entries[number]
        del self._begun[:-KEPT_STEPS]

    def sent(self, peer: str, frame: Frame | Awaitable[Frame]) -> Frame | Awaitable[Frame]:
        """The frame as it goes out: of a step signed, of an evaluation as it is."""
        entry = self._entries.get(self._begun[-1]) if self._begun else None
        if isinstance(frame, Frame):
            return frame if entry is None else self._signed(entry, peer, frame)
        if entry is None:
            return frame
        entry.promised += 1
        return self._promised(entry, peer, frame)

    async def _promised(self, entry: _Entry, peer: str, frame: Awaitable[Frame]) -> Frame:
        found = self._signed(entry, peer, await frame)
        entry.promised -= 1
        if not entry.promised:
            entry.encoded.set()
        return found

    def _signed(self, entry: _Entry, peer: str, frame: Frame) -> Frame:
        if frame.header.get("round") != entry.round:
            return frame
        digest = frame_digest(frame.kind, frame.header, frame.payloads)
        entry.sent.add(frame.kind, peer, digest)
        signature = self._sign(statement(self._offer, self.me, peer, digest))
        return replace(frame, header={**frame.header, SIGNED: signature})

    def received(self, peer: str, frame: Frame) -> None:
        """Look at a frame's signature and note the frame, with a copy of its payloads: kernels may write to them."""
        round, signature = need(frame.header, "round", int), frame.header.get(SIGNED)
        if signature is None and self._verify is not None:
            if round in self._begun:
                self._refuse(peer)
            self._unsigned[round] = peer  # of an evaluation, or wrong as soon as the step begins
            return
        digest = frame_digest(frame.kind, frame.header, frame.payloads)
        if self._verify is not None:
            said = statement(self._offer, peer, self.me, digest)
            if not isinstance(signature, bytes) or not self._verify(peer, said, signature):
                self._refuse(peer)
        if self._begun and round < self._begun[0]:
            return
        entry = self._entry(round)
        entry.received.add(frame.kind, peer, digest)
        entry.frames.append((peer, replace(frame, payloads=[bytes(payload) for payload in frame.payloads])))

    def _refuse(self, peer: str) -> None:
        raise ProtocolError(f"peer {peer} sent a frame of an audited step without its signature")

    def _entry(self, round: int) -> _Entry:
        return self._entries.setdefault(round, _Entry(round))

    # -- at its end: on the compute thread

    def before(self, runner: StageRunner) -> None:
        if self._first is None:
            self._first = stage_tensors(runner)

    def after(self, round: Round, runner: StageRunner) -> None:
        entry = self._entries[round.number]
        entry.after = stage_tensors(runner)
        self._loop.call_soon_threadsafe(self._done.put_nowait, entry)

    # -- beside the steps

    async def run(self, outbox: Outbox) -> None:
        """Until cancelled: a proof of every step."""
        while True:
            await outbox.put(Frame(messages.PROOF, (await self.proof()).header()))

    async def proof(self) -> Proof:
        """Of the next step that is over."""
        entry = await self._done.get()
        while entry.promised:
            entry.encoded.clear()
            await entry.encoded.wait()
        if self._state is None:
            assert self._first is not None
            self._state = await asyncio.to_thread(State.of, self._offer, self._first)
            self._first = {}
        entry.before, entry_after = self._state, entry.after
        entry.after = {}
        self._state = await asyncio.to_thread(State.of, self._offer, entry_after)
        return Proof(
            entry.round, entry.before.root, self._state.root, dict(entry.sent.hashes()), dict(entry.received.hashes())
        )

    def show(self, round: int) -> Frame:
        """What the owner asks for, which `copies` lends by digest from now on, in the place of what it asked for before."""
        entry = self._entries.get(round)
        if entry is None or entry.before is None:
            raise ProtocolError(f"an audit asks for round {round}, of which nothing is held")
        lent, frames = dict(entry.before.tensors), []
        for peer, frame in entry.frames:
            tensors = [torch.frombuffer(bytearray(p), dtype=torch.uint8) for p in frame.payloads if len(p)]
            digests = {digest_of(tensor): tensor for tensor in tensors}
            lent |= digests
            found = iter(digest_of(tensor) for tensor in tensors)
            names = tuple(bytes.fromhex(next(found)) if len(p) else bytes(32) for p in frame.payloads)
            frames.append(Said(peer, frame.kind, frame.header, names, tuple(len(p) for p in frame.payloads)))
        self._held.evidence = lent
        return Evidence(entry.before.weights, entry.before.optimizer, frames).frame(round)
