"""What peers publish of themselves, and the sealed envelope in which it crosses the network.

The idea: an envelope is signed by the peer whose name it is stored under and carries the mesh's MAC. Both cover the
kind, the content AND the time at which it expires. So a record cannot be forged by a stranger, kept alive by replaying
it, moved under another key or written over by another peer. Any node can check that without a clock.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, cast

import msgpack
from msgspec import Meta

from dht.addresses import MAX_ADDRESSES, checked
from dht.membership import CERTIFICATE_S, CLOCK_SKEW_S, MAX_CERTIFICATE_BYTES, Members, RevokedList
from dht.signing import Identity, MeshKey, public_key_of, verify
from meshcee.config import Limits
from meshcee.errors import ClockError, NotPermittedError, PlanError, ProtocolError
from meshcee.fields import Count, Finite, Name, Ordinal, ShortText, Small, read, refuse_deep, refuse_unprintable, unpack
from meshcee.figures import DeviceProfile, LinkProfile
from meshcee.files import loads
from meshcee.plan import Plan, Term

__all__ = [
    "CLOCK_SKEW_S",
    "MAX_DATASETS",
    "MAX_LINKS",
    "MAX_TTL_S",
    "Envelope",
    "LeaseRecord",
    "LinkRecord",
    "PeerRecord",
    "Record",
    "RevokedRecord",
    "RunRecord",
    "check",
    "date_of",
    "dated",
    "is_ahead",
    "learn_list",
    "open_sealed",
    "place",
    "seal",
    "told_ahead",
    "topic",
]

MAX_TTL_S = 3600.0
RunState = Literal["waiting", "running", "over"]
MAX_LINKS = 100  # of one peer: what fits into Limits.record_bytes
MAX_DATASETS = 16  # of one peer
MAX_REVOKED = 180  # peers, and invites, of one admin's list: the same
_Revoked = Annotated[tuple[ShortText, ...], Meta(max_length=MAX_REVOKED)]


@dataclass(frozen=True)
class Record:
    """Base. `kind` names the key that records of this class lie under; `sent_at` is the signer's wall clock."""

    kind: ClassVar[str] = ""
    peer_id: str
    sent_at: Finite

    def to_wire(self) -> dict[str, Any]:
        """Plain data; the peer id is in the envelope."""
        data = asdict(self)
        del data["peer_id"]
        return data

    @classmethod
    def from_wire(cls, body: Mapping[str, Any], signer: str, what: str) -> Self:
        """The checked record; ProtocolError names the field that is wrong or missing."""
        found = read({**body, "peer_id": signer}, cls, what)
        refuse_unprintable(found, what)
        return found

    def smaller(self) -> Self | None:
        """The same without what can be missed, for when it is too large to publish; None if nothing can."""
        return None


@dataclass(frozen=True)
class PeerRecord(Record):
    """A peer that is here. `device` is None for one that only owns jobs; `instance` tells two processes apart."""

    kind: ClassVar[str] = "peers"
    name: Name = ""
    addresses: Annotated[tuple[str, ...], Meta(max_length=MAX_ADDRESSES)] = ()
    region: Name | None = None  # a hint
    device: DeviceProfile | None = None
    busy: bool = False
    leaving: bool = False  # it holds a stage until its job goes on without it, and takes no other
    left: bool = False  # a last word
    started_at: Finite = 0.0  # wall clock; with `instance` filled in by the directory that publishes
    instance: ShortText = ""
    protocol: Annotated[int, Meta(ge=0, le=1 << 31)] = 0
    software: ShortText = ""
    # What the process that checks graphs of others has given up, () until it has; None: the one with the keys checks them.
    guards: Annotated[tuple[ShortText, ...], Meta(max_length=16)] | None = None
    # Sets that it reads for jobs of others: names and numbers of samples. None: an older peer, fed by owners alone.
    datasets: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=MAX_DATASETS)] | None = None

    @classmethod
    def from_wire(cls, body: Mapping[str, Any], signer: str, what: str) -> Self:
        if isinstance(device := body.get("device"), Mapping):  # an older peer's
            body = {**body, "device": {"fingerprints": (), **device}}
        found = super().from_wire({"datasets": None, **body}, signer, what)
        if found.name.startswith("12D3KooW"):
            raise ProtocolError(f"{what} has the 'name' {found.name!r}: only ids begin with 12D3KooW; take another")
        return replace(found, addresses=tuple(map(checked, found.addresses)))


class _Figures(NamedTuple):
    """A link on its way: p10, p50 and p90 of latency and of bandwidth, and when it was measured."""

    low_s: Finite
    latency_s: Finite
    high_s: Finite
    least: Finite
    bandwidth: Finite
    most: Finite
    at: Finite


@dataclass(frozen=True)
class _Links:
    links: Annotated[tuple[tuple[ShortText, _Figures], ...], Meta(max_length=MAX_LINKS)]


@dataclass(frozen=True)
class LinkRecord(Record):
    """What a peer has measured of the links that start at it: pairs of another peer and the profile."""

    kind: ClassVar[str] = "links"
    links: tuple[tuple[str, LinkProfile], ...] = ()

    def to_wire(self) -> dict[str, Any]:
        links = []
        for to, link in self.links:
            fast = link.latency_range_s or (link.latency_s, link.latency_s)
            wide = link.bandwidth_range_bytes_per_s or (link.bandwidth_bytes_per_s, link.bandwidth_bytes_per_s)
            figures = [fast[0], link.latency_s, fast[1], wide[0], link.bandwidth_bytes_per_s, wide[1], link.measured_at]
            links.append([to, figures])
        return {"sent_at": self.sent_at, "links": links}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any], signer: str, what: str) -> Self:
        links = []
        for to, told in read(body, _Links, what).links:
            public_key_of(to)
            span_s = (told.low_s, told.high_s) if told.low_s != told.high_s else None
            span = (told.least, told.most) if told.least != told.most else None
            links.append((to, LinkProfile(told.latency_s, told.bandwidth, told.at, span_s, span)))
        return super().from_wire({**body, "links": links}, signer, what)

    def smaller(self) -> Self | None:
        """The newest half of the links."""
        newest = sorted(self.links, key=lambda pair: -pair[1].measured_at)
        return replace(self, links=tuple(newest[: len(newest) // 2])) if newest else None


@dataclass(frozen=True)
class LeaseRecord(Record):
    """A claim to be the coordinator. Terms are (counter, peer id), compared as pairs.

    Until it is confirmed, a claim only keeps others from claiming.
    """

    kind: ClassVar[str] = "lease"
    counter: Ordinal = 0
    confirmed: bool = False
    released: bool = False  # the holder leaves: others need not wait for the lease to run out

    @property
    def term(self) -> Term:
        return Term(self.counter, self.peer_id)


@dataclass(frozen=True)
class _RunTold:
    """What of a run crosses the network in another form: a loss that is not known as None, the plan as JSON."""

    loss: Finite | None
    plan: str


@dataclass(frozen=True)
class RunRecord(Record):
    """The job that an owner runs or wants to run: `since` is when it came, by the owner's clock, `state` a RunState. `claim` tells
    who knows the run that this owner does, too: it is of the run's key, the owner and its incarnation."""

    kind: ClassVar[str] = "runs"
    job: Name = ""
    epoch: tuple[Small, Small] = (0, 0)
    step: Count = 0
    loss: float = math.nan
    plan: Mapping[str, Any] | None = None
    since: Finite = 0.0
    state: RunState = "running"
    claim: Name = ""

    def to_wire(self) -> dict[str, Any]:
        data = super().to_wire()
        return {**data, "loss": self.loss if math.isfinite(self.loss) else None, "plan": json.dumps(data["plan"])}

    @classmethod
    def from_wire(cls, body: Mapping[str, Any], signer: str, what: str) -> Self:
        told = read(body, _RunTold, what)
        try:
            plan = loads(told.plan)  # the envelope has been bounded before
            refuse_deep(plan, what)
            if plan is not None:
                Plan.from_json(plan)  # which everybody who looks at the mesh is shown
        except (ValueError, PlanError) as error:
            raise ProtocolError(f"{what}: its plan cannot be read ({error})") from error
        loss = math.nan if told.loss is None else told.loss
        return super().from_wire({"claim": "", **body, "loss": loss, "plan": plan}, signer, what)

    def smaller(self) -> Self | None:
        return None if self.plan is None else replace(self, plan=None)


@dataclass(frozen=True)
class RevokedRecord(Record):
    """An admin's list: who is no member any more, and which invites let nobody in any more.

    It outlives the certificates that it ends, so that it holds while the admin is away.
    """

    kind: ClassVar[str] = "revoked"
    peers: _Revoked = ()
    invites: _Revoked = ()


R = TypeVar("R", bound=Record)
_KINDS = frozenset(kind.kind for kind in (PeerRecord, LinkRecord, LeaseRecord, RunRecord, RevokedRecord))
LIVES_S: Mapping[str, float] = {"revoked": CERTIFICATE_S + MAX_TTL_S}  # the longest, by kind; MAX_TTL_S of the others


def topic(kind: str, mesh_key: MeshKey) -> str:
    """The store's key for a kind of record; meshes that meet in one DHT do not read each other's."""
    return f"meshcee/2/{mesh_key.fingerprint}/{kind}"


@dataclass(frozen=True)
class Envelope:
    """What a checked signature and MAC vouch for; of the body only its date has been read yet.

    Whether the certificate beside it makes its signer a member, Members say.
    """

    kind: str
    signer: str
    sent_at: float
    expires_at: float
    body: bytes
    certificate: bytes


class _Sealed(NamedTuple):
    kind: str
    signer: str
    expires_at: Finite
    body: bytes
    signature: bytes
    certificate: Annotated[bytes, Meta(max_length=MAX_CERTIFICATE_BYTES)]
    mac: bytes


@dataclass(frozen=True)
class _Date:
    sent_at: Finite


def is_ahead(sent_at: float, now: float) -> bool:
    """Whether a record's date lies so far ahead of this clock that one of the two is wrong."""
    return sent_at > now + CLOCK_SKEW_S


def told_ahead(peer_id: str, sent_at: float, now: float) -> str:
    return (
        f"the clock of peer {peer_id} is {sent_at - now:.0f} s ahead of this machine's: set both by a time server (NTP)"
    )


def dated(now: float, last: float) -> float:
    """The date of a writer's next record, by its clock and the date of its last one: later than that, as nodes keep the
    value that expires last. Where the clock was set back since, the last date is one that nobody has taken."""
    later = max(now, last + 0.001)
    return now if is_ahead(later, now) else later


def _date(body: bytes) -> float:
    what = "a record's date"
    return read(unpack(body, len(body), what), _Date, what).sent_at


def date_of(data: bytes) -> float:
    """What a sealed record claims as its date; nothing is checked."""
    what = "a record's envelope"
    return _date(read(unpack(data, len(data), what), _Sealed, what).body)


def _covered(kind: str, signer: str, expires_at: float, body: bytes) -> bytes:
    return bytes(msgpack.packb(["meshcee record 2", kind, signer, expires_at, body]))


def _record(kind: type[R], body: bytes, signer: str, what: str) -> R:
    return cast(R, _decoded(kind, body, signer, what))  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=256)  # of a small mesh, whose peers poll often and read most records as they were
def _decoded(kind: type[Record], body: bytes, signer: str, what: str) -> Record:
    return kind.from_wire(read(unpack(body, 1 << 20, what), dict[str, Any], what), signer, what)


def seal(
    record: Record,
    identity: Identity,
    mesh_key: MeshKey,
    expires_at: float,
    limits: Limits | None = None,
    certificate: bytes = b"",
) -> bytes:
    """The record as it is stored: signed, with the signer's certificate, MACed, valid until then, less what does not fit.

    ProtocolError when others would refuse it, so that a name too long is told to whoever chose it.
    """
    if record.peer_id != identity.peer_id:
        raise ProtocolError(f"a record of {record.peer_id} cannot be signed by {identity.peer_id}")
    cap = (limits or Limits()).record_bytes
    what = f"our own {record.kind} record"
    _record(type(record), msgpack.packb(record.to_wire()), record.peer_id, what)
    found: Record | None = record
    while found is not None:
        body = bytes(msgpack.packb(found.to_wire()))
        covered = _covered(record.kind, record.peer_id, expires_at, body)
        signature = identity.sign(covered)
        mac = mesh_key.mac(covered + signature + certificate)
        data = bytes(msgpack.packb([record.kind, record.peer_id, expires_at, body, signature, certificate, mac]))
        if len(data) <= cap:
            return data
        found = found.smaller()
    raise ProtocolError(f"the {record.kind} record has more than {cap} bytes: shorten names and addresses")


@functools.lru_cache(maxsize=4096)  # every node sees each envelope many times, and a signature takes 0.1 ms to check
def _check(data: bytes, mesh_key: MeshKey) -> Envelope:
    what = "a record's envelope"
    kind, signer, expires_at, body, signature, certificate, mac = read(unpack(data, len(data), what), _Sealed, what)
    covered = _covered(kind, signer, expires_at, body)
    if not mesh_key.proves(covered + signature + certificate, mac):
        raise NotPermittedError("a record was sealed with the key of another mesh: its writer holds another token")
    if not verify(signer, covered, signature):
        raise NotPermittedError(f"a record in the name of {signer} was not signed by it")
    return Envelope(kind, signer, _date(body), expires_at, body, certificate)


def check(data: bytes, mesh_key: MeshKey, limits: Limits | None = None) -> Envelope:
    """Size, MAC and signature. NotPermittedError when these are another's, ProtocolError when it is no envelope."""
    cap = (limits or Limits()).record_bytes
    if len(data) > cap:
        raise ProtocolError(f"a record's envelope has {len(data)} bytes, more than {cap}")
    return _check(data, mesh_key)


def place(
    data: bytes, mesh_key: MeshKey, limits: Limits | None = None, members: Members | None = None
) -> tuple[str, str, float] | None:
    """Where alone these bytes may be stored, (key, subkey, expires_at); None: nowhere. Needs no clock."""
    try:
        envelope = check(data, mesh_key, limits)
        if members is not None:
            members.may_write(envelope.signer, envelope.certificate, envelope.kind, None)
    except (ProtocolError, NotPermittedError):
        return None
    if envelope.kind not in _KINDS or not 0 < envelope.expires_at - envelope.sent_at <= _life_s(envelope.kind):
        return None
    return topic(envelope.kind, mesh_key), envelope.signer, envelope.expires_at


def _life_s(kind: str) -> float:
    return LIVES_S.get(kind, MAX_TTL_S)


def learn_list(
    data: bytes, mesh_key: MeshKey, limits: Limits, members: Members, now: float | None, *, kept: bool = False
) -> bool:
    """Teach members an admin's list of who is revoked, from whoever has it; whether it is news. One that does not hold is none.

    An admin whose certificate has ended can date a list back. So its list says nothing new, unless it was `kept`: on this machine's
    disk, or by the admin that has let this peer in.
    """
    try:
        envelope = check(data, mesh_key, limits)
        issuer = envelope.signer
        found = open_sealed(RevokedRecord, issuer, data, mesh_key, limits, now=now, members=members)
        told = RevokedList(issuer, found.sent_at, frozenset(found.peers), frozenset(found.invites), data)
        if not kept and issuer != members.root and not told.repeats(members.lists.get(issuer)):
            members.may_write(issuer, envelope.certificate, envelope.kind, now)
    except (ProtocolError, NotPermittedError, ClockError):
        return False
    return members.learn(told)


def open_sealed(
    kind: type[R],
    subkey: str,
    data: bytes,
    mesh_key: MeshKey,
    limits: Limits | None = None,
    *,
    now: float | None = None,
    members: Members | None = None,
) -> R:
    """The record stored under the subkey of this kind's key, checked in every respect.

    NotPermittedError: forged, of another mesh or no member, or replayed under another name or key.
    ClockError: dated ahead, or expired. ProtocolError: malformed. `now` None consults no clock.
    """
    envelope = check(data, mesh_key, limits)
    if envelope.kind != kind.kind:
        raise NotPermittedError(f"a {envelope.kind} record of {envelope.signer} was stored among {kind.kind}")
    if envelope.signer != subkey:
        raise NotPermittedError(f"a record of {envelope.signer} was stored in the name of {subkey}")
    what = f"the {kind.kind} record of {subkey}"
    record = _record(kind, envelope.body, envelope.signer, what)
    life_s = _life_s(envelope.kind)
    if not 0 < envelope.expires_at - record.sent_at <= life_s:
        raise ProtocolError(f"{what} is not valid at all, or for longer than {life_s:g} s")
    if members is not None:
        # A list has to outlive the certificates that it ends, and so its admin's: that held when the list was made.
        then = min(now, record.sent_at) if now is not None and isinstance(record, RevokedRecord) else now
        members.may_write(envelope.signer, envelope.certificate, envelope.kind, then)
    if now is not None and is_ahead(record.sent_at, now):
        raise ClockError(told_ahead(subkey, record.sent_at, now))
    if now is not None and envelope.expires_at <= now:
        raise ClockError(
            f"{what} has expired: that peer's process was paused, or its clock is behind, or this machine's ahead; use NTP"
        )
    return record
