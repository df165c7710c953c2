"""Who attacks a mesh (benchmarks/hostile.py): a stranger, a former member, a member that only computes, and an owner.

Each has a p2pd of its own.

The idea: an attacker is the product's own transport with pieces in other places. It opens streams without shaking hands, shakes
hands with what is not its own, and writes bytes that are no frames. What comes back is counted, and searched for secrets.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from dht import Identity, Members, MeshKey, Role
from dht.kademlia import KademliaStore
from dht.records import LeaseRecord, open_sealed, topic
from meshcee.config import Timeouts
from meshcee.errors import JoinError, MeshceeError, ProtocolError
from meshcee.files.home import Home
from meshcee.plan import Term
from peers.node.admission import enrol
from peers.node.authority import Authority, authority_of
from peers.transport import Frame, StreamClosed, handshake
from peers.transport.p2p import Libp2pTransport, P2PDaemon
from peers.transport.stream import FramedStream

__all__ = ["Attacker", "Fault", "Ground", "Target", "attackers", "brief"]

ANSWER_S = 2.0  # that an attacker waits for an answer
QUICK = Timeouts(dial_s=10.0, handshake_s=5.0, join_s=20.0, shutdown_s=0.5)


class Fault(Exception):
    """The attack has come about: what must not be possible is."""


@dataclass(frozen=True)
class Target:
    """A peer that is attacked."""

    name: str
    peer_id: str
    addresses: tuple[str, ...]

    @property
    def port(self) -> int:
        """Of its p2pd."""
        return int(self.addresses[0].split("/")[4])


class Opener(Libp2pTransport):
    """Streams on which nothing has been said."""

    async def raw(self, target: Target) -> FramedStream:
        stream = self.make_stream(target.peer_id, "attack")
        try:
            async with asyncio.timeout(self.timeouts.dial_s):
                await self._connect(stream, target.addresses)
        except BaseException:
            stream.abort()
            raise
        return stream


@dataclass
class Attacker:
    """An identity with a p2pd; a member has its certificate and the mesh's key, and a node of the DHT."""

    identity: Identity
    daemon: P2PDaemon
    transport: Opener
    members: Members
    key: MeshKey
    store: KademliaStore
    secrets: tuple[bytes, ...]  # that nothing may contain which comes here
    held: list[FramedStream] = field(default_factory=list)
    heard_bytes: int = 0  # of the last attempt

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def raw(self, target: Target) -> FramedStream:
        return await self.transport.raw(target)

    async def opened(self, target: Target, purpose: str, members: Members | None = None) -> FramedStream:
        """Hands are shaken as the product does. Raises what it raises."""
        stream = await self.raw(target)
        try:
            async with asyncio.timeout(QUICK.handshake_s):
                shown = members or self.members
                await handshake.dial(stream, self.peer_id, purpose, self.key.secret, members=shown)
        except BaseException:
            self.heard_bytes = max(self.heard_bytes, stream.received_bytes)
            stream.abort()
            raise
        stream.establish(purpose)
        return stream

    async def answer(self, stream: FramedStream, limit_s: float = ANSWER_S, passing: str = "") -> str:
        """What the other side says next, in few words, but for frames of the kind `passing`; the stream is over then."""
        try:
            async with asyncio.timeout(limit_s):
                while (frame := await stream.recv()).kind == passing:
                    self.search(frame)
            self.search(frame)
            said = frame.header.get("message") or frame.header.get("reason") or ""
            return f"{frame.kind} {said}".strip()
        except TimeoutError:
            return "silence"
        except (StreamClosed, ProtocolError):
            return "hung up"
        finally:
            self.heard_bytes = max(self.heard_bytes, stream.received_bytes)
            stream.abort()

    def search(self, frame: Frame) -> None:
        """Fault where an answer holds what nobody may be told."""
        told = repr(dict(frame.header)).encode() + b"".join(bytes(payload) for payload in frame.payloads)
        if any(secret in told for secret in self.secrets):
            raise Fault(f"an answer of kind {frame.kind!r} holds a secret")

    async def tries(
        self, target: Target, purpose: str, *frames: Frame, members: Members | None = None, limit_s: float = ANSWER_S
    ) -> str:
        """Open a stream for a purpose, send frames, hear the answer. Who may wait longer passes over signs of life."""
        try:
            stream = await self.opened(target, purpose, members)
        except (MeshceeError, StreamClosed, TimeoutError) as error:
            return f"no stream: {error}"
        try:
            for frame in frames:
                async with asyncio.timeout(ANSWER_S):
                    await stream.send(frame)
        except (StreamClosed, TimeoutError):
            pass
        return await self.answer(stream, limit_s, "pong" if limit_s > ANSWER_S else "")

    async def says(self, target: Target, data: bytes) -> str:
        """Bytes in place of a hello."""
        try:
            stream = await self.raw(target)
        except (JoinError, TimeoutError) as error:
            return f"not reached: {error}"
        if stream.transport is not None:
            stream.write_bytes(data)
        return await self.answer(stream)

    def let_go(self) -> None:
        while self.held:
            self.held.pop().abort()


@dataclass
class Ground:
    """All that an attack may use: who attacks, and whom. `busy` computes for the honest job, `idle` does not, `founder` admits."""

    stranger: Attacker
    former: Attacker
    member: Attacker
    owner: Attacker
    founder: Target
    busy: Target
    idle: Target
    authority: Authority
    invite: str  # to compute
    term: Term  # of the mesh, when all began
    draw: Random
    memory: dict[str, Any] = field(default_factory=dict)  # of one attack, from attempt to attempt

    @property
    def targets(self) -> Sequence[Target]:
        return tuple({target.peer_id: target for target in (self.founder, self.busy, self.idle)}.values())


@asynccontextmanager
async def attacker(
    folder: Path,
    name: str,
    founder: Target,
    authority: Authority,
    role: Role | None,
    secrets: Sequence[bytes],
    key: MeshKey | None = None,
) -> AsyncIterator[Attacker]:
    """A stranger has no role, and a key of its own. A former member has no role any more, and the mesh's key."""
    identity = Identity.load_or_create(folder / f"{name}.key")
    async with P2PDaemon(identity, listen=["127.0.0.1:0"], seeds=founder.addresses, timeouts=QUICK) as daemon:
        members, key = Members(), key or MeshKey.generate()
        if role is not None:
            token = authority.admin.invite(founder.addresses, role, None, 3600.0)
            door = Opener(
                daemon.p2p,
                token.key,
                timeouts=QUICK,
                members=Members(authority.admin.root, token.grant.pack()),  # type: ignore[union-attr]
            )
            async with door:
                kept = await enrol(door, token)
            members, key = kept.members(), kept.key
        seeds = founder.addresses if role is not None else ()
        async with (
            Opener(daemon.p2p, key.secret, timeouts=QUICK, members=members) as transport,
            KademliaStore(daemon.p2p, seeds, identity=identity, mesh_key=key, timeouts=QUICK, members=members) as store,
        ):
            mine = Attacker(identity, daemon, transport, members, key, store, tuple(secrets))
            try:
                yield mine
            finally:
                mine.let_go()


@asynccontextmanager
async def attackers(home: Home, folder: Path, targets: dict[str, Target], seed: int) -> AsyncIterator[Ground]:
    """`targets` are the founder, one that is busy, one that is idle."""
    authority = authority_of(home, None)
    assert authority is not None
    founder = targets["founder"]
    key = authority.membership.key
    async with (
        attacker(folder, "stranger", founder, authority, None, [key.secret]) as stranger,
        attacker(folder, "former", founder, authority, None, [], key) as former,
        attacker(folder, "member", founder, authority, "compute", []) as member,
        attacker(folder, "owner", founder, authority, "own", []) as owner,
    ):
        invite = authority.admin.invite(founder.addresses, "compute", None, 3600.0).encode()
        term = await newest_term(owner)
        yield Ground(
            stranger,
            former,
            member,
            owner,
            founder,
            targets["busy"],
            targets["idle"],
            authority,
            invite,
            term,
            Random(seed),
        )


async def newest_term(owner: Attacker) -> Term:
    """Of the coordinator, as the records say."""
    claims = await owner.store.get(topic("lease", owner.key))
    found = [open_sealed(LeaseRecord, peer, data, owner.key) for peer, (data, _) in claims.items()]
    return max((claim.term for claim in found if claim.confirmed), default=Term(1, owner.peer_id))


def brief(text: str) -> str:
    """Of an answer: the same for all that differ in numbers and names only."""
    text = re.sub(r"12D3KooW\w+|\.\.\w{8}|[0-9a-f]{8,}", "ID", text)
    text = re.sub(r"\d[\d.]*", "N", text)
    return text.split(": ask")[0].split("\n")[0][:90]
