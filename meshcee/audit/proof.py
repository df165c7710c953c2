"""A member's proof of one step: what it received and sent, and what its stage was before and after, by hash alone.

The idea: each member tells its owner these few hashes after every step. Two members that share a link have said the same of it,
or one of them lies. A step that is computed again from the same beginning has the same proof, since a kernel class has the
same bits. Which steps that happens to depends on a secret seed, so nobody knows until the proof is given.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgpack
from msgspec import Meta

from meshcee.fields import read

__all__ = ["SIGNED", "Edge", "Proof", "Tally", "chance", "chosen", "frame_digest", "key_of", "root_of", "unequal"]

SIGNED = "signed"  # the field of a frame's header that is not part of its digest

Hex = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]*$")]


def frame_digest(kind: str, header: Mapping[str, Any], payloads: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """SHA-256 over all of a frame but its signature."""
    said = {name: value for name, value in header.items() if name != SIGNED}
    digest = hashlib.sha256(msgpack.packb([kind, said, [memoryview(payload).nbytes for payload in payloads]]))
    for payload in payloads:
        digest.update(payload)
    return digest.digest()


def root_of(*parts: Mapping[str, str]) -> str:
    """One hash for the digests of weights and of what the optimizer keeps."""
    return hashlib.sha256(msgpack.packb([sorted(part.items()) for part in parts])).hexdigest()


def key_of(kind: str, peer: str) -> str:
    """How a proof names one direction of a link."""
    return f"{kind} {peer}"


class Tally:
    """The running hash of each direction of each link, over a step's frames in their order."""

    def __init__(self) -> None:
        self._found: dict[str, bytes] = {}

    def add(self, kind: str, peer: str, digest: bytes) -> None:
        key = key_of(kind, peer)
        self._found[key] = hashlib.sha256(self._found.get(key, b"") + digest).digest()

    def hashes(self) -> dict[str, str]:
        return {key: digest.hex() for key, digest in self._found.items()}


@dataclass(frozen=True)
class Proof:
    """Of one member and step. `before` and `after` are the roots of its stage's state; `sent` and `received` are by `key_of`."""

    round: int
    before: Hex
    after: Hex
    sent: Mapping[str, Hex] = field(default_factory=dict)
    received: Mapping[str, Hex] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(self).items()}

    @classmethod
    def from_header(cls, header: Mapping[str, Any]) -> Proof:
        """What a member told; ProtocolError for anything else."""
        return read(header, cls, "a proof of a step")


class Edge(NamedTuple):
    """One direction of a link of which its ends say different things."""

    kind: str
    sender: str
    receiver: str


def unequal(proofs: Mapping[str, Proof]) -> Iterator[Edge]:
    """Every direction of which sender and receiver do not say the same, by the proofs of all members."""
    said: dict[Edge, list[str | None]] = {}
    for peer, proof in proofs.items():
        for end, table in enumerate((proof.sent, proof.received)):
            for key, digest in table.items():
                kind, _, other = key.partition(" ")
                edge = Edge(kind, *((other, peer) if end else (peer, other)))
                said.setdefault(edge, [None, None])[end] = digest
    return (edge for edge, (sent, received) in sorted(said.items()) if sent != received)


def chosen(seed: bytes, share: float, epoch: Iterable[int], step: int, peer: str) -> bool:
    """Whether this member's step is computed again: who does not know the seed cannot tell."""
    text = f"{':'.join(map(str, epoch))}:{step}:{peer}".encode()
    drawn = int.from_bytes(hmac.digest(seed, text, "sha256")[:8], "big")
    return drawn < share * 2.0**64


def chance(share: float, steps: int) -> float:
    """That a member which computes so many steps wrongly is found."""
    return float(1.0 - (1.0 - share) ** steps)
