"""What peers publish of themselves, and the envelope that makes it believable.

The idea: every record is signed by the peer that it lies under and sealed with the mesh key, names the key that it was
written for, and is checked field by field before anyone sees it; whatever fails is set aside, never acted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import msgpack

from dht.signing import Identity, MeshKey, verify
from meshcee.config import Limits
from meshcee.errors import MeshceeError, NotPermittedError, ProtocolError
from meshcee.profile import DeviceProfile, LinkProfile

__all__ = ["LeaseRecord", "LinkRecord", "PeerRecord", "Record", "RunRecord", "open_sealed", "seal"]

R = TypeVar("R", bound="Record")

TEXT_CHARS = 256
MAX_ADDRESSES = 16
MAX_LINKS = 256


def _text(data: Mapping[str, Any], name: str, limit: int = TEXT_CHARS) -> str:
    value = data.get(name)
    if not isinstance(value, str) or len(value) > limit:
        raise ProtocolError(f"record field {name!r} must be a text of at most {limit} characters")
    return value


def _number(data: Mapping[str, Any], name: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise ProtocolError(f"record field {name!r} must be a number")
    return float(value)


def _integer(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if type(value) is not int:
        raise ProtocolError(f"record field {name!r} must be an integer")
    return value


@dataclass(frozen=True)
class Record:
    """Base: `kind` is the key that records of this class lie under, `sent_at` the signer's wall clock."""

    kind: ClassVar[str] = ""
    peer_id: str
    sent_at: float

    @classmethod
    def parse(cls: type[R], data: Mapping[str, Any]) -> R:
        raise ProtocolError(f"{cls.__name__} cannot be parsed")


@dataclass(frozen=True)
class PeerRecord(Record):
    """A peer that is here. `device` is None for one that only owns jobs; `instance` tells two processes apart."""

    kind: ClassVar[str] = "peers"
    name: str = ""
    addresses: tuple[str, ...] = ()
    region: str | None = None
    device: DeviceProfile | None = None
    busy: bool = False
    left: bool = False  # a last word: the peer is leaving
    instance: str = ""
    protocol: int = 0
    software: str = ""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> PeerRecord:
        addresses, device, region = data.get("addresses"), data.get("device"), data.get("region")
        if not isinstance(addresses, list) or len(addresses) > MAX_ADDRESSES:
            raise ProtocolError(f"a peer has at most {MAX_ADDRESSES} addresses")
        if device is not None and not isinstance(device, dict):
            raise ProtocolError("record field 'device' must be a mapping")
        return cls(
            peer_id=_text(data, "peer_id"),
            sent_at=_number(data, "sent_at"),
            name=_text(data, "name"),
            addresses=tuple(_text({"a": a}, "a") for a in addresses),
            region=None if region is None else _text(data, "region"),
            device=None if device is None else _device(device),
            busy=data.get("busy") is True,
            left=data.get("left") is True,
            instance=_text(data, "instance"),
            protocol=_integer(data, "protocol"),
            software=_text(data, "software"),
        )


def _device(data: Mapping[str, Any]) -> DeviceProfile:
    return DeviceProfile(
        kind=_text(data, "kind"),
        name=_text(data, "name"),
        memory_bytes=_integer(data, "memory_bytes"),
        speed_flops_per_s=_number(data, "speed_flops_per_s"),
        threads=_integer(data, "threads"),
    )


@dataclass(frozen=True)
class LinkRecord(Record):
    """What a peer has measured of its links to others."""

    kind: ClassVar[str] = "links"
    links: tuple[tuple[str, LinkProfile], ...] = ()

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> LinkRecord:
        links = data.get("links")
        if not isinstance(links, list) or len(links) > MAX_LINKS or not all(isinstance(x, list | tuple) and len(x) == 2 for x in links):
            raise ProtocolError(f"record field 'links' must hold at most {MAX_LINKS} pairs")
        found = []
        for target, profile in links:
            if not isinstance(profile, dict):
                raise ProtocolError("a link must be a mapping")
            figures = (_number(profile, n) for n in ("latency_s", "bandwidth_bytes_per_s", "measured_at"))
            found.append((_text({"t": target}, "t"), LinkProfile(*figures)))
        return cls(_text(data, "peer_id"), _number(data, "sent_at"), tuple(found))


@dataclass(frozen=True)
class LeaseRecord(Record):
    """A claim to be the coordinator. Terms are (counter, peer id), compared as pairs."""

    kind: ClassVar[str] = "lease"
    counter: int = 0

    @property
    def term(self) -> tuple[int, str]:
        return (self.counter, self.peer_id)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> LeaseRecord:
        counter = _integer(data, "counter")
        if not 0 <= counter < 1 << 62:
            raise ProtocolError("a term's counter is absurd")
        return cls(_text(data, "peer_id"), _number(data, "sent_at"), counter)


@dataclass(frozen=True)
class RunRecord(Record):
    """The job that an owner runs, for `meshcee status`."""

    kind: ClassVar[str] = "runs"
    job: str = ""
    epoch: tuple[int, int] = (0, 0)
    step: int = 0
    loss: float = 0.0
    plan: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> RunRecord:
        epoch, plan = data.get("epoch"), data.get("plan")
        if not isinstance(epoch, list | tuple) or len(epoch) != 2 or not all(type(e) is int for e in epoch):
            raise ProtocolError("record field 'epoch' must be two integers")
        if not isinstance(plan, dict):
            raise ProtocolError("record field 'plan' must be a mapping")
        loss = data.get("loss")
        return cls(
            _text(data, "peer_id"),
            _number(data, "sent_at"),
            _text(data, "job"),
            (epoch[0], epoch[1]),
            _integer(data, "step"),
            float(loss) if isinstance(loss, int | float) else float("nan"),
            plan,
        )


def _signed_part(kind: str, body: bytes) -> bytes:
    return b"meshcee record\0" + kind.encode() + b"\0" + body


def seal(record: Record, identity: Identity, mesh_key: MeshKey) -> bytes:
    """The envelope: body, signature, MAC."""
    if record.peer_id != identity.peer_id:
        raise ProtocolError("a peer signs records of its own only")
    body = msgpack.packb(asdict(record))
    signed = _signed_part(record.kind, body)
    return bytes(msgpack.packb([body, identity.sign(signed), mesh_key.mac(signed)]))


def open_sealed(kind: type[R], subkey: str, data: bytes, mesh_key: MeshKey, limits: Limits) -> R:
    """The record, if it was signed by the peer that it lies under, for this key and this mesh.

    Raises NotPermittedError for a wrong signature or mesh, ProtocolError for anything malformed.
    """
    if len(data) > limits.record_bytes:
        raise ProtocolError(f"a record of {len(data)} bytes is larger than {limits.record_bytes}")
    try:
        envelope = msgpack.unpackb(data, raw=False)
        if not isinstance(envelope, list) or len(envelope) != 3 or not all(isinstance(x, bytes) for x in envelope):
            raise ProtocolError("a record's envelope holds body, signature and MAC")
        body, signature, mac = envelope
        signed = _signed_part(kind.kind, body)
        if not mesh_key.proves(signed, mac):
            raise NotPermittedError("a record was sealed with another mesh's key")
        if not verify(subkey, signed, signature):
            raise NotPermittedError(f"a record under {subkey} was not signed by that peer")
        fields = msgpack.unpackb(body, raw=False)
        if not isinstance(fields, dict):
            raise ProtocolError("a record's body is a mapping")
        record = kind.parse(fields)
    except MeshceeError:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a record is not what it should be: {error}") from error
    if record.peer_id != subkey:
        raise NotPermittedError(f"a record of {record.peer_id} lies under {subkey}")
    return record
