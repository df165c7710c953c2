"""What a member shows of a step: a digest names one tensor, so evidence where it names two is refused before anything is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshcee.errors import ProtocolError
from peers.wire.audit import Evidence, Said
from peers.wire.offer import Offer

LAYOUTS = {"a": (torch.float32, (2,)), "b": (torch.float32, (3,))}, {"a/step": (torch.uint8, (5,))}
OFFER: Any = SimpleNamespace(layouts=LAYOUTS, place=SimpleNamespace(neighbours=("p1",)), max_payload_bytes=100)
ONE, TWO, THREE, NONE = b"1" * 32, b"2" * 32, b"3" * 32, bytes(32)


def read(digests: tuple[bytes, ...], sizes: tuple[int, ...], b: bytes = TWO) -> Evidence:
    offer: Offer = OFFER
    frames = [Said("p1", "F", {"micro": micro}, digests, sizes) for micro in range(2)]
    shown = Evidence({"a": ONE.hex(), "b": b.hex()}, {"a/step": THREE.hex()}, frames)
    return Evidence.from_frame(shown.frame(1), offer, 2)


@pytest.mark.parametrize(
    ("digests", "sizes"), [((b"x" * 32, b"x" * 32), (5, 5)), ((THREE, NONE, NONE), (5, 0, 0)), ((), ())]
)
def test_equal_tensors_have_one_digest(digests: tuple[bytes, ...], sizes: tuple[int, ...]) -> None:
    assert [(said.digests, said.sizes) for said in read(digests, sizes).frames] == [(digests, sizes)] * 2


@pytest.mark.parametrize(
    ("digests", "sizes", "b"),
    [((b"x" * 32, b"x" * 32), (5, 0), TWO), ((NONE, NONE), (5, 0), TWO), ((ONE,), (8,), TWO), ((), (), ONE)],
    ids=["two sizes", "a size and none", "a payload and the state", "two of the state"],
)
def test_a_digest_of_two_shapes_is_refused(digests: tuple[bytes, ...], sizes: tuple[int, ...], b: bytes) -> None:
    with pytest.raises(ProtocolError, match="one digest for tensors of two shapes"):
        read(digests, sizes, b)
