"""Who may do what in a mesh: certificates say who is a member and as what, lists of an admin's say who is not any more.

The idea: one key, the root, is the mesh's own; what it has signed, and what admins have signed whom it has made, is a member.
A certificate names a peer, a role and an end, and says itself who vouches for it. So anybody can check it, at any time, with
nothing but the root's name and a clock. This file judges; it neither asks nor tells anybody.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgpack
from msgspec import Meta

from dht.signing import ROLES, Identity, Role, verify, when
from meshcee.errors import NotPermittedError
from meshcee.fields import Finite, ShortText, read, unpack

__all__ = [
    "CERTIFICATE_S",
    "CLOCK_SKEW_S",
    "ENROL",
    "MAX_CERTIFICATE_BYTES",
    "RENEWED_AFTER_S",
    "Certificate",
    "Members",
    "RevokedList",
    "by_invite",
    "certify",
]

CLOCK_SKEW_S = 10.0  # clocks of two peers may differ by so much; stored records outlive their ttl by it
CERTIFICATE_S = 7 * 86400.0  # that a certificate holds: so long does a mesh go on without an admin
RENEWED_AFTER_S = CERTIFICATE_S / 7
MAX_CHAIN = 3  # certificates from a member up to the root
MAX_CERTIFICATE_BYTES = 400 * MAX_CHAIN
MAX_LISTS = 64
MAX_KNOWN = 4096

# What takes more than to be a member. Streams that are opened, by their purpose:
OPENS: Mapping[str, Role] = dict.fromkeys(
    ("job", "plan", "profile", "sound", "follow", "journal", "shelf", "leave", "data"), "own"
)
# Records that are written, by their kind:
WRITES: Mapping[str, Role] = {"runs": "own", "revoked": "admin"}
ENROL = "enrol"  # the purpose of the one stream that is opened without a certificate


class _Signed(NamedTuple):
    """A certificate on its way. `above` is the signer's own, empty when that is the root. One of an older meshcee has no
    `let_in_by`: who has signed it counts as who has let the peer in.
    """

    peer_id: ShortText
    role: Role
    issued_at: Finite
    not_after: Finite
    invite: ShortText
    issuer: ShortText
    above: bytes
    signature: Annotated[bytes, Meta(max_length=64)]
    let_in_by: Annotated[tuple[ShortText, ...], Meta(max_length=MAX_CHAIN - 1)] | None = None


@dataclass(frozen=True)
class Certificate:
    """One whose signatures hold. `until` is when it, or one above it, ends. `let_in_by`: the admin that has let the peer in, who
    has let that one in, and so on below the root. Only they and the root sign certificates for it.
    """

    peer_id: str
    role: Role
    issued_at: float
    until: float
    invite: str
    let_in_by: tuple[str, ...]

    @property
    def lets_in(self) -> bool:
        """Whether what this peer signs is a certificate: it is an admin, and not as far below the root as members may be."""
        return self.role == "admin" and len(self.let_in_by) < MAX_CHAIN - 1


def _covered(root: str, told: tuple[str, str, float, float, str, str], let_in_by: tuple[str, ...] | None) -> bytes:
    head, more = ("meshcee certificate 1", ()) if let_in_by is None else ("meshcee certificate 2", (let_in_by,))
    return bytes(msgpack.packb([head, root, *told, *more]))


def certify(
    by: Identity,
    above: bytes,
    root: str,
    peer_id: str,
    role: Role,
    invite: str,
    now: float,
    life_s: float = CERTIFICATE_S,
    let_in_by: tuple[str, ...] = (),
) -> bytes:
    """A certificate; `by` is the root's key, or an admin's whose own certificate is `above`. `let_in_by` is of the one before."""
    told = (peer_id, role, now, now + life_s, invite, by.peer_id)
    if by.peer_id != root:
        below = itertools.takewhile(lambda admin: admin != by.peer_id, let_in_by)
        let_in_by = (*below, by.peer_id, *opened(above, root).let_in_by)
    return bytes(msgpack.packb([*told, above, by.sign(_covered(root, told, let_in_by)), let_in_by]))


@functools.lru_cache(maxsize=4096)  # a signature takes 0.1 ms to check, and each certificate is seen with every record
def opened(data: bytes, root: str, depth: int = MAX_CHAIN) -> Certificate:
    """The certificate, its signatures checked up to the root. NotPermittedError or ProtocolError; no clock is consulted."""
    what = "a member's certificate"
    told = read(unpack(data, MAX_CERTIFICATE_BYTES, what), _Signed, what)
    until = told.not_after
    signers: tuple[str, ...] = ()
    if told.issuer != root:
        if depth <= 1 or not told.above:
            raise NotPermittedError(f"the certificate of peer {told.peer_id} does not lead to the founder of this mesh")
        above = opened(told.above, root, depth - 1)
        if above.peer_id != told.issuer or above.role != "admin":
            raise NotPermittedError(f"the certificate of peer {told.peer_id} was signed by a peer that is no admin")
        until, signers = min(until, above.until), (told.issuer, *above.let_in_by)
    if not verify(told.issuer, _covered(root, told[:6], told.let_in_by), told.signature):
        raise NotPermittedError(f"the certificate of peer {told.peer_id} was not signed by an admin of this mesh")
    let_in_by = signers if told.let_in_by is None else told.let_in_by
    if not set(signers) <= set(let_in_by):
        raise NotPermittedError(f"the certificate of peer {told.peer_id} was signed by an admin that has not let it in")
    return Certificate(told.peer_id, told.role, told.issued_at, until, told.invite, let_in_by)


def by_invite(invite: str) -> str:
    """Whoever came by it, however many, as lists of revoked peers name them in one entry."""
    return f"invite {invite}"


@dataclass(frozen=True)
class RevokedList:
    """The list of one admin: peers that are no members any more, and invites that let nobody in any more. Among the peers,
    `by_invite` stands for all who came by an invite."""

    issuer: str
    sent_at: float
    peers: frozenset[str] = frozenset()
    invites: frozenset[str] = frozenset()
    data: bytes = field(default=b"", repr=False)  # sealed, for others

    def repeats(self, before: RevokedList | None) -> bool:
        """Whether it names the same as one that is known."""
        return before is not None and (self.peers, self.invites) == (before.peers, before.invites)


class Members:
    """What one peer knows of who belongs to its mesh. Without a root the mesh is open: everybody may do everything."""

    def __init__(self, root: str = "", shown: bytes = b"", *, clock: Callable[[], float] = time.time) -> None:
        self.root = root
        self.shown = shown  # our own certificate; an invite, while it is exchanged for one
        self.known: dict[str, Certificate] = {}  # the newest of each that was seen
        self.lists: dict[str, RevokedList] = {}
        self.on_change: list[Callable[[], None]] = []  # called when a list is news
        self.invited: Callable[[str, bytes], bytes] | None = None  # an admin's: the key that an invite's holder proves
        self._clock = clock

    # -- verdicts

    def admit(self, peer_id: str, shown: bytes, purpose: str = "") -> bytes | None:
        """A peer shakes hands, to open a stream if there is a purpose. The key that it has to prove if not the mesh's.

        NotPermittedError says in a sentence why it may not.
        """
        if purpose == ENROL:
            if self.invited is None:
                raise NotPermittedError(
                    "this peer is no admin: an invite is exchanged with the machine that has printed it"
                )
            return self.invited(peer_id, shown)
        self.vouch(peer_id, shown, OPENS.get(purpose, "compute"), self._clock(), f"opens no stream {purpose!r}")
        return None

    def may_write(self, peer_id: str, certificate: bytes, kind: str, now: float | None) -> None:
        """NotPermittedError when the peer may not write records of this kind. Without `now` no clock is consulted."""
        self.vouch(peer_id, certificate, WRITES.get(kind, "compute"), now, f"writes no {kind} record")

    def vouch(self, peer_id: str, data: bytes, needs: Role, now: float | None, may_not: str) -> Certificate | None:
        """The certificate; None in an open mesh."""
        if not self.root:
            return None
        if not data:
            raise NotPermittedError(
                f"peer {peer_id} shows no certificate: it is no member of this mesh, or an older meshcee"
            )
        found = opened(data, self.root)
        if found.peer_id != peer_id:
            raise NotPermittedError(f"peer {peer_id} shows the certificate of another, {found.peer_id}")
        if now is not None and found.until + CLOCK_SKEW_S <= now:
            raise NotPermittedError(
                f"the certificate of peer {peer_id} has ended on {when(found.until)}: join again with a new invite "
                "(`meshcee invite` on an admin's machine)"
            )
        if self.is_revoked(peer_id, found):
            raise NotPermittedError(f"an admin has revoked peer {peer_id}: it is no member of this mesh any more")
        if ROLES.index(found.role) < ROLES.index(needs):
            raise NotPermittedError(
                f"peer {peer_id} is here to {found.role} and {may_not}: that takes the role {needs} "
                f"(`meshcee invite --role {needs}`)"
            )
        self._note(found)
        return found

    def is_revoked(self, peer_id: str, certificate: Certificate | None = None) -> bool:
        """Whether it is, or all who came by its invite, or an admin that has let it in. An admin is revoked by the root only, and
        then revokes nobody."""
        certificate = certificate or self.known.get(peer_id)
        if certificate is None:
            return self._is_named(peer_id, "compute")
        own = (peer_id, by_invite(certificate.invite)) if certificate.invite else (peer_id,)
        return any(self._is_named(name, certificate.role) for name in own) or any(
            self._is_named(admin, "admin") for admin in certificate.let_in_by
        )

    def is_named(self, peer_id: str) -> bool:
        """Whether a list names the peer itself: then no other admin's invite helps it."""
        known = self.known.get(peer_id)
        return self._is_named(peer_id, known.role if known is not None else "compute")

    def _is_named(self, peer_id: str, role: Role) -> bool:
        if peer_id == self.root:
            return False
        naming = [told.issuer for told in self.lists.values() if peer_id in told.peers]
        return self.root in naming or (role != "admin" and any(not self._is_named(i, "admin") for i in naming))

    def is_cancelled(self, invite: str) -> bool:
        """Whether an admin has ended this invite."""
        return any(invite in told.invites and not self._is_named(told.issuer, "admin") for told in self.lists.values())

    @property
    def own(self) -> Certificate | None:
        """Our own."""
        return opened(self.shown, self.root) if self.root and self.shown else None

    def check_own(self, needs: Role, may_not: str) -> None:
        """NotPermittedError when we may not do this: everybody would refuse it, so our own user is told first."""
        own = self.own
        if own is not None and ROLES.index(own.role) < ROLES.index(needs):
            raise NotPermittedError(
                f"this machine came by an invite to {own.role} and {may_not}: ask an admin for one that may "
                f"(`meshcee invite --role {needs}`)"
            )

    def revoked(self) -> list[str]:
        """All peers that a list names with effect, and invites as `by_invite` gives them."""
        return sorted({p for told in self.lists.values() for p in told.peers if self.is_revoked(p)})

    # -- what changes

    def learn(self, told: RevokedList) -> bool:
        """A list whose seal was checked, its signer an admin; whether it is news. The newest of each signer counts."""
        if not self.root:
            return False
        before = self.lists.get(told.issuer)
        if before is not None and before.sent_at >= told.sent_at:
            return False
        if before is None and len(self.lists) >= MAX_LISTS and told.issuer != self.root:
            return False
        self.lists[told.issuer] = told
        for heard in self.on_change:
            heard()
        return True

    def _note(self, found: Certificate) -> None:
        """The newest counts, though an admin whose own ends soon has signed it; one that a list has ended counts for nothing."""
        before = self.known.get(found.peer_id)
        if before is None or before.issued_at <= found.issued_at or self.is_revoked(found.peer_id, before):
            self.known.pop(found.peer_id, None)
            self.known[found.peer_id] = found
        while len(self.known) > MAX_KNOWN:
            del self.known[next(iter(self.known))]

    def admins(self, among: Iterable[str]) -> list[str]:
        """Those of these peers whose certificates say so."""
        return [p for p in among if (known := self.known.get(p)) is not None and known.role == "admin"]
