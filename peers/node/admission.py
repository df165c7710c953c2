"""How a machine becomes a member and stays one: an invite is exchanged for a certificate, which is renewed and kept.

The idea: the exchange is one stream to the admin whose key has signed the invite. Both prove that they know the signature, which
never travels. The admin counts on its disk whom an invite has let in, before it answers. What a member was given lies beside its
identity, so it comes back without the admin.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import hmac
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from dht import (
    CERTIFICATE_S,
    ENROL,
    MAX_ADDRESSES,
    RENEWED_AFTER_S,
    ROLES,
    Certificate,
    Grant,
    Identity,
    Members,
    MeshKey,
    RevokedRecord,
    Role,
    Token,
    certify,
    invite_key,
    learn_list,
    seal,
    told_private,
)
from meshcee.config import Limits, Timeouts
from meshcee.errors import JoinError, MeshceeError, NotPermittedError, ProtocolError, UsageError
from meshcee.events import Event
from meshcee.files import disk, dumps, loads
from meshcee.files.home import Home
from peers.node.revoked import Revoked
from peers.transport import Frame, Stream, StreamClosed, Transport
from peers.wire import messages

if TYPE_CHECKING:
    from peers.mesh_view import MeshView

__all__ = ["Admin", "Membership", "enrol", "is_more", "ledger_of", "stay_member"]

log = structlog.get_logger()

RENEW = "renew"
ENROLLED = "enrolled"
TRIES = 3  # libp2p drops one of two connections that were dialled at the same moment
LOOK_FIRST_S, LOOK_EVERY_S = 30.0, 600.0
MAX_LISTS = 64
MOST_OF_ONE = 4  # addresses of another peer that are kept
LIST_S = CERTIFICATE_S + 1800.0  # that a list of who is revoked holds: for longer than the certificates that it ends


@dataclass
class Membership:
    """What a member was given: the mesh's key, its certificate, and who was revoked. `file` is None in tests."""

    root: str
    key: MeshKey
    certificate: bytes
    lists: tuple[bytes, ...] = ()
    file: Path | None = None
    addresses: tuple[str, ...] = ()  # of this peer, when it was last up
    others: tuple[str, ...] = ()  # of peers that it has seen last

    @staticmethod
    def place(identity: Path, root: str) -> Path:
        return Path(f"{identity}.{root[-8:]}.member")

    @property
    def identity(self) -> Path:
        """The file beside which this lies."""
        assert self.file is not None
        return Path(str(self.file).removesuffix(f".{self.root[-8:]}.member"))

    @staticmethod
    def files(home: Home) -> list[Path]:
        """Of all identities of this machine, in all meshes."""
        own = sorted((home.folder / "identities").glob("*.member"))
        chosen = (sorted(one.parent.glob(f"{glob.escape(one.name)}.*.member")) for one in home.identities_elsewhere())
        return [*own, *itertools.chain.from_iterable(chosen)]

    @classmethod
    def met(cls, home: Home, root: str) -> tuple[str, ...]:
        """Where peers of this mesh were, as those of this machine saw last, its own included."""
        kept = [one for file in cls.files(home) if (one := cls.read(file)) is not None and one.root == root]
        found = dict.fromkeys(a for one in kept for a in (*one.others, *one.addresses[:MOST_OF_ONE]))
        return tuple(itertools.islice(found, MAX_ADDRESSES))

    @classmethod
    def load(cls, identity: Path, root: str) -> Membership | None:
        """What this identity was given in this mesh."""
        found = cls.read(cls.place(identity, root))
        return found if found is not None and found.root == root else None

    @classmethod
    def read(cls, file: Path) -> Membership | None:
        """What a member's file says. A damaged one is as good as none: an invite brings another."""
        try:
            told = loads(file.read_text())
            key, certificate = MeshKey(bytes.fromhex(told["key"])), bytes.fromhex(told["certificate"])
            lists = tuple(bytes.fromhex(one) for one in told["lists"])
            addresses, others = (tuple(map(str, told.get(name, ()))) for name in ("addresses", "others"))
            return cls(str(told["root"]), key, certificate, lists, file, addresses, others)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, UsageError) as error:
            log.warning("what this peer was given when it joined cannot be read", file=str(file), error=repr(error))
            return None

    def save(self) -> None:
        if self.file is None:
            return
        data = {
            "root": self.root,
            "key": self.key.secret.hex(),
            "certificate": self.certificate.hex(),
            "lists": [one.hex() for one in self.lists],
            "addresses": list(self.addresses),
            "others": list(self.others),
        }
        disk.write_whole(self.file, dumps(data, indent=1).encode())

    def members(self, clock: Callable[[], float] = time.time) -> Members:
        """The same as verdicts are asked of it. A list that does not hold any more is left out."""
        found = Members(self.root, self.certificate, clock=clock)
        for data in self.lists:
            learn_list(data, self.key, Limits(), found, clock(), kept=True)
        return found

    def holds(self, peer_id: str, now: float) -> Certificate | None:
        """The certificate, while it is this peer's, has not ended, and no list that it knows of revokes it."""
        try:
            return self.vouch(peer_id, now)
        except (NotPermittedError, ProtocolError):
            return None

    def vouch(self, peer_id: str, now: float) -> Certificate | None:
        """The certificate, or why it does not hold: NotPermittedError or ProtocolError."""
        return self.members(lambda: now).vouch(peer_id, self.certificate, "compute", now, "")


def is_more(grant: Grant, known: Certificate) -> bool:
    """Whether an invite is worth more than what a member has: a higher role, or an admin's who can let others in at last. Who comes
    back by the invite that it came by needs nobody."""
    further = grant.role == "admin" and not known.lets_in and known.let_in_by[:1] != (grant.issuer,)
    return ROLES.index(known.role) < ROLES.index(grant.role) or further


def ledger_of(identity: Path, root: str) -> Path:
    """Whom the invites of this peer have let in."""
    return Path(f"{Membership.place(identity, root)}.invites.json")


class Admin:
    """Who can make members: with the root's key, or with its own and a certificate that makes it an admin.

    `at` is the peer where its invites are exchanged; `ledger` the file that says whom each has let in. Beside it lies, without an
    end, whom this admin has revoked. The list of these that it tells the mesh ends, and is sealed anew each day.
    """

    def __init__(
        self,
        key: Identity,
        root: str,
        above: Callable[[], bytes],
        at: str,
        ledger: Path | None,
        clock: Callable[[], float],
    ) -> None:
        self.key = key
        self.root = root
        self.at = at
        self._above = above
        self._ledger = ledger
        self._clock = clock
        self._let_in: dict[str, list[str]] = _read_ledger(ledger)
        self._revoked = Revoked(key.peer_id, ledger.with_suffix(".revoked.json") if ledger is not None else None)
        self._writing = asyncio.Lock()

    def certify(
        self,
        peer_id: str,
        role: Role,
        invite: str = "",
        life_s: float = CERTIFICATE_S,
        let_in_by: tuple[str, ...] = (),
    ) -> bytes:
        above = b"" if self.key.peer_id == self.root else self._above()
        return certify(self.key, above, self.root, peer_id, role, invite, self._clock(), life_s, let_in_by)

    def own_certificate(self) -> bytes:
        """Beside what the key itself signs."""
        return self.certify(self.root, "admin") if self.key.peer_id == self.root else self._above()

    def invites_of(self, peer_id: str) -> set[str]:
        """Those of this admin's by which the peer came."""
        return {invite for invite, let_in in self._let_in.items() if peer_id in let_in}

    @property
    def lets_in(self) -> bool:
        """Whether it can: an admin below two others cannot, and still revokes."""
        own = Members(self.root, self._above()).own
        return self.key.peer_id == self.root or (own is not None and own.lets_in)

    def _check_lets_in(self) -> None:
        if not self.lets_in:
            raise NotPermittedError(
                "this admin was let in by an admin whom another admin has let in, and can let nobody in: ask the founder of the "
                "mesh for an invite to admin (`meshcee invite --role admin`)"
            )

    def invite(self, addresses: Sequence[str], role: Role, uses: int | None, for_s: float) -> Token:
        """NotPermittedError where it would let nobody in."""
        self._check_lets_in()
        name = secrets.token_hex(8)
        grant = Grant(self.root, self.key.peer_id, self.at, name, role, uses, self._clock() + for_s)
        return Token.sign(self.key, addresses, grant)

    def is_list_due(self, members: Members) -> bool:
        """Whether the list that others know says something else than the one on the disk, or will end in some days."""
        return self._revoked.is_due(members.lists.get(self.key.peer_id), self._clock())

    def sealed_list(
        self,
        members: Members,
        mesh_key: MeshKey,
        limits: Limits,
        peers: Iterable[str] = (),
        invites: Iterable[str] = (),
    ) -> bytes:
        """All whom this admin has revoked, and these: on its disk, and sealed for others. A process that does the same waits."""

        def sealed(found: RevokedRecord) -> bytes:
            return seal(found, self.key, mesh_key, found.sent_at + LIST_S, limits, self.own_certificate())

        return self._revoked.add(members.lists.get(self.key.peer_id), peers, invites, self._clock(), sealed)

    def serve(
        self, transport: Transport, members: Members, mesh_key: MeshKey, timeouts: Timeouts | None = None
    ) -> None:
        """Let in who holds an invite of ours, and renew certificates."""
        self._members, self._mesh_key, self._timeouts = members, mesh_key, timeouts or Timeouts()
        members.invited = self._key_of
        transport.serve(ENROL, self._enrol)
        transport.serve(RENEW, self._renew)

    def _key_of(self, peer_id: str, shown: bytes) -> bytes:
        """What the holder of this invite has to prove. NotPermittedError where it lets nobody in."""
        return invite_key(self.key.sign(self._checked(peer_id, shown).pack()))

    def _checked(self, peer_id: str, shown: bytes) -> Grant:
        grant = Grant.unpack(shown)
        if (grant.root, grant.issuer) != (self.root, self.key.peer_id):
            raise NotPermittedError(
                "this invite is another admin's, or of another mesh: it is exchanged with who has made it"
            )
        Token((), grant).check_date(self._clock())
        self._check_lets_in()
        let_in = self._let_in.get(grant.id, [])
        is_cancelled = self._members.is_cancelled(grant.id) or grant.id in self._revoked.invites
        if is_cancelled or self._members.is_named(peer_id) or peer_id in self._revoked.peers:
            raise NotPermittedError(
                f"an admin has revoked this invite, or peer {peer_id}: ask for a new one (`meshcee invite`)"
            )
        if grant.uses is not None and peer_id not in let_in and len(let_in) >= grant.uses:
            raise NotPermittedError(
                f"this invite has let in {len(let_in)} peers, as many as it was made for (a command "
                "beside a peer of the same machine is one too): ask for a new one (`meshcee invite`)"
            )
        return grant

    async def _enrol(self, stream: Stream) -> None:
        """Of a stream whose handshake has proven an invite: it says here which, and proves that one."""
        stream.max_payload_bytes = 0
        try:
            async with asyncio.timeout(self._timeouts.handshake_s):
                frame = await stream.recv()
            shown, proof = (messages.need(frame.header, name, bytes) for name in ("invite", "proof"))
            async with self._writing:
                grant = self._checked(stream.peer_id, shown)
                if not hmac.compare_digest(proof, proven(self._key_of(stream.peer_id, shown), stream.peer_id)):
                    raise NotPermittedError("the holder of this invite does not know its signature")
                await self._count(grant.id, stream.peer_id)
            certificate = self.certify(stream.peer_id, grant.role, grant.id)
            log.info("a member", peer=stream.peer_id, role=grant.role, invite=grant.id)
            await stream.send(self._given(certificate))
        except MeshceeError as error:
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))

    async def _renew(self, stream: Stream) -> None:
        """Of a stream whose handshake has shown a certificate that holds."""
        known = self._members.known.get(stream.peer_id)
        if known is None:  # an open mesh
            raise ProtocolError("this peer has no certificate that could be renewed")
        if self.key.peer_id not in (self.root, *known.let_in_by):  # the member would go with this admin
            error = NotPermittedError(
                "another admin has let this peer in: that one renews its certificate, or the founder"
            )
            await stream.send(Frame(messages.REFUSED, messages.error_header(error)))
            return
        await stream.send(self._given(self.certify(known.peer_id, known.role, known.invite, let_in_by=known.let_in_by)))

    def _given(self, certificate: bytes) -> Frame:
        lists = [told.data for told in self._members.lists.values()][:MAX_LISTS]
        return Frame(ENROLLED, {}, [certificate, self._mesh_key.secret, *lists])

    async def _count(self, invite: str, peer_id: str) -> None:
        let_in = self._let_in.setdefault(invite, [])
        if peer_id in let_in:
            return
        let_in.append(peer_id)
        if self._ledger is not None:
            try:
                await asyncio.to_thread(disk.write_whole, self._ledger, dumps(self._let_in, indent=1).encode())
            except OSError as error:
                let_in.remove(peer_id)
                raise JoinError(
                    f"the admin cannot write down whom this invite lets in ({disk.refusal(error)})"
                ) from error


def _read_ledger(path: Path | None) -> dict[str, list[str]]:
    try:
        told = loads(path.read_text()) if path is not None else {}
        return {str(invite): [str(peer) for peer in peers] for invite, peers in told.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UsageError(
            f"{path}, which says whom invites have let in, cannot be read ({error}): restore it, or remove it and each invite "
            "lets in as many peers again"
        ) from error


def proven(key: bytes, peer_id: str) -> bytes:
    """Beside the handshake: which of several streams of one peer an invite was proven on."""
    return hmac.digest(key, b"meshcee enrol " + peer_id.encode(), hashlib.sha256)


async def enrol(
    door: Transport, token: Token, file: Path | None = None, timeouts: Timeouts | None = None
) -> Membership:
    """Exchange the invite over a transport that shows it and proves its key. JoinError where its admin is not there."""
    grant = token.grant
    assert grant is not None
    token.check_date(time.time())
    where = [address for address in token.addresses if address.endswith(grant.at)]
    within_s = (timeouts or Timeouts()).join_s
    failed: Exception | None = None
    try:
        async with asyncio.timeout(within_s):
            for attempt in range(TRIES):
                await asyncio.sleep(0.2 * attempt)
                try:
                    stream = await door.open(grant.at, ENROL, where)
                    try:
                        proof = proven(token.key, door.peer_id)
                        await stream.send(Frame("enrol", {"invite": grant.pack(), "proof": proof}))
                        return _given(await stream.recv(), grant.root, door.peer_id, file)
                    finally:
                        stream.abort()
                except (JoinError, StreamClosed) as error:
                    failed = error
    except TimeoutError:
        failed = failed or JoinError(f"nothing came within {within_s:g} s")
    raise JoinError(
        f"the machine that has made this invite does not answer: {failed}. Who has joined before needs nobody; "
        "a new member needs the admin's machine to run and to be reachable from here, or an invite of another admin"
        + told_private(where)
    ) from failed


async def renewed(agent: MeshView, kept: Membership, admin: str) -> Membership:
    """A new certificate from this admin."""
    stream = await agent.transport.open(admin, RENEW, agent.addresses_of([admin]).get(admin, ()))
    try:
        given = _given(await stream.recv(), kept.root, agent.peer_id, kept.file)
        return replace(given, addresses=kept.addresses, others=kept.others)
    finally:
        stream.abort()


def _given(frame: Frame, root: str, peer_id: str, file: Path | None) -> Membership:
    if frame.kind == messages.REFUSED:
        raise messages.error_from(frame.header)
    if frame.kind != ENROLLED or not 2 <= len(frame.payloads) <= 2 + MAX_LISTS:
        raise ProtocolError(f"expected a certificate and the mesh's key, got a frame of kind {frame.kind!r}")
    certificate, secret, *lists = map(bytes, frame.payloads)
    if len(secret) != 32:
        raise ProtocolError("the mesh's key has 32 bytes")
    found = Membership(root, MeshKey(secret), certificate, tuple(lists), file)
    Members(root).vouch(peer_id, certificate, "compute", None, "")
    return found


async def stay_member(agent: MeshView, kept: Membership, admin: Admin | None = None) -> None:
    """As long as the peer runs: renew the certificate while an admin is there, and keep on disk what is learnt. An admin tells its
    list again. NotPermittedError once the peer is revoked."""
    news, members, was_told = asyncio.Event(), agent.members, False
    members.on_change.append(news.set)
    for wait_s in itertools.chain([LOOK_FIRST_S], itertools.repeat(LOOK_EVERY_S)):
        now, own = agent.clock(), kept.holds(agent.peer_id, agent.clock())
        # A certificate of an admin whose own ends soon is young, and ends soon as well.
        if own is None or now - own.issued_at >= RENEWED_AFTER_S or own.until - now < CERTIFICATE_S - RENEWED_AFTER_S:
            kept = await _renew(agent, kept, admin)
            members.shown = kept.certificate
        try:
            kept.vouch(agent.peer_id, agent.clock())
            was_told = False
        except (NotPermittedError, ProtocolError) as error:
            if not was_told:
                log.warning(Event.MEMBERSHIP_OVER, mesh=kept.root, why=str(error))
            was_told = True
        kept.lists = tuple(told.data for told in members.lists.values())
        kept.others = _seen(agent) or kept.others
        try:
            if admin is not None and admin.is_list_due(members):
                data = await asyncio.to_thread(admin.sealed_list, members, kept.key, agent.limits)
                await agent.directory.revoke(data)
            await asyncio.to_thread(kept.save)
        except OSError as error:
            log.warning("what this peer knows of the mesh's members is not on disk", why=disk.refusal(error))
        except UsageError as error:
            log.warning("this admin's list of who is revoked is not told again", why=str(error))
        if members.is_revoked(agent.peer_id, members.own):
            raise NotPermittedError(
                "an admin has revoked this peer: it is no member of this mesh any more, and leaves; ask an admin for a new invite "
                "(`meshcee invite`)"
            )
        try:
            async with asyncio.timeout(wait_s):
                await news.wait()
        except TimeoutError:
            pass
        news.clear()


def _seen(agent: MeshView) -> tuple[str, ...]:
    """Where others are, those that lend a device first: for whoever starts here while this peer or the first machine is down."""
    others = [record for peer, record in agent.directory.peers.items() if peer != agent.peer_id and record.addresses]
    others.sort(key=lambda record: record.device is None)
    return tuple(itertools.islice((a for one in others for a in one.addresses[:MOST_OF_ONE]), MAX_ADDRESSES))


async def _renew(agent: MeshView, kept: Membership, admin: Admin | None) -> Membership:
    """With a certificate that ends later, if anybody can be asked for one."""
    if admin is not None and admin.key.peer_id == kept.root:
        return replace(kept, certificate=admin.certify(agent.peer_id, "admin"))
    own = kept.holds(agent.peer_id, agent.clock())
    for peer in agent.members.admins(agent.directory.peers):
        if peer == agent.peer_id:
            continue
        try:
            async with asyncio.timeout(agent.timeouts.join_s):
                given = await renewed(agent, kept, peer)
        except (MeshceeError, StreamClosed, TimeoutError) as error:
            log.info("this admin has not renewed our certificate", admin=peer, error=str(error))
            continue
        found = given.holds(agent.peer_id, agent.clock())
        if found is not None and (own is None or found.until > own.until):
            return given
    return kept
