"""What a member shows of an audited step, and how both sides check it: the state before, and the frames with their signatures.

The idea: tensors and payloads go by digest over the stream `copies`, as all that training has changed. So what is shown is small,
and who computes the step again reads the bits from whoever has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgpack
import torch

from meshcee.audit import root_of
from meshcee.errors import ProtocolError
from meshcee.fields import read, unpack
from peers.transport import Frame
from peers.wire import messages
from peers.wire.offer import Offer
from peers.wire.weights import digest_of, digests_in, digests_of

__all__ = ["Evidence", "Said", "State", "most_bytes", "statement"]

FRAME_BYTES = 16 << 10  # that describe one frame, at most: names of shared parameters


def statement(offer: Offer, sender: str, receiver: str, digest: bytes) -> bytes:
    """What the sender of a frame signs: that it sent these bits to this peer, in this epoch of this run."""
    said = ["meshcee audit", offer.run, offer.owner, list(offer.epoch), sender, receiver, digest]
    found: bytes = msgpack.packb(said)
    return found


class State(NamedTuple):
    """A stage between two steps."""

    weights: Mapping[str, str]
    optimizer: Mapping[str, str]
    tensors: Mapping[str, torch.Tensor]  # by digest

    @property
    def root(self) -> str:
        return root_of(self.weights, self.optimizer)

    @classmethod
    def of(cls, offer: Offer, found: Mapping[str, torch.Tensor]) -> State:
        """Takes a second for a gigabyte."""
        weights, optimizer = offer.layouts
        layout = weights | optimizer
        tensors = {name: tensor.to(layout[name][0]) for name, tensor in found.items()}
        digests = {name: digest_of(tensor) for name, tensor in tensors.items()}
        parts = [{n: d for n, d in digests.items() if n in part} for part in (weights, optimizer)]
        return cls(parts[0], parts[1], {digest: tensors[name] for name, digest in digests.items()})


@dataclass(frozen=True)
class Said:
    """A frame as a neighbour sent it; of its payloads the digests."""

    peer: str
    kind: str
    header: Mapping[str, Any]
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Evidence:
    """What a member shows of a step: the state before it, and the frames that it received. Tensors and payloads go by digest."""

    weights: Mapping[str, str]
    optimizer: Mapping[str, str]
    frames: Sequence[Said]

    @property
    def root(self) -> str:
        return root_of(self.weights, self.optimizer)

    def frame(self, round: int) -> Frame:
        frames = [[said.peer, said.kind, dict(said.header), said.digests, said.sizes] for said in self.frames]
        payloads = [*digests_of(self.weights, self.optimizer), msgpack.packb(frames)]
        return Frame(messages.EVIDENCE, {"round": round}, payloads)

    @classmethod
    def from_frame(cls, frame: Frame, offer: Offer, num_micro: int) -> Evidence:
        """As a member showed it; ProtocolError for anything else, as for one digest of two shapes: no tensors have that."""
        if len(frame.payloads) != 3:
            raise ProtocolError("what a member shows of a step has three parts")
        weights, optimizer = digests_in(replace(frame, payloads=frame.payloads[:2]), offer.layouts)
        table = unpack(frame.payloads[2], most_bytes(offer, num_micro), "what a member received")
        frames = read(table, list[tuple[str, str, dict[str, Any], tuple[bytes, ...], tuple[int, ...]]], "its frames")
        found = [Said(*one) for one in frames]
        if len(found) > most_frames(offer, num_micro):
            raise ProtocolError("it shows more frames than its neighbours send in a step")
        seen: set[tuple[str, str, int]] = set()
        parts = zip((weights, optimizer), offer.layouts)
        claims = [(digest, layout[name]) for part, layout in parts for name, digest in part.items()]
        for said in found:
            sane = all(len(digest) == 32 for digest in said.digests) and len(said.digests) == len(said.sizes)
            micro = said.header.get("micro", 0)
            sane = sane and type(micro) is int and 0 <= micro < num_micro and said.peer in offer.place.neighbours
            if not sane or min(said.sizes, default=0) < 0 or sum(said.sizes) > offer.max_payload_bytes:
                raise ProtocolError("it shows a frame that no neighbour could have sent")
            if (key := (said.kind, said.peer, micro)) in seen:
                raise ProtocolError("it shows a frame twice")
            seen.add(key)
            claims += [(digest.hex(), (torch.uint8, (size,))) for digest, size in zip(said.digests, said.sizes)]
        if len(dict(claims)) != len(set(claims)):
            raise ProtocolError("it shows one digest for tensors of two shapes")
        return cls(weights, optimizer, found)


def most_frames(offer: Offer, num_micro: int) -> int:
    """That neighbours send in a step."""
    return (2 + 4 * num_micro) * max(1, len(offer.place.neighbours))


def most_bytes(offer: Offer, num_micro: int) -> int:
    """That can describe the frames of a step."""
    return most_frames(offer, num_micro) * FRAME_BYTES
