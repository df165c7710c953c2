"""What comes as a payload of names, digests, recipes or spans: each field of it, wrong in every way, is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import torch

from peers.groups.meeting import Meeting
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.spans import read_spans
from peers.wire.weights import StateReceiver, digests_in, names_of
from tests.rig.mutations import check_every_field

LAYOUT = {"a": (torch.float32, (2,)), "b": (torch.float32, ())}
DIGEST = b"d" * 32


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def follow(recipes: Any) -> None:
    StateReceiver(LAYOUT, recipes=True).follow(packed(recipes))


def described(value: Any) -> Any:
    return digests_in(Frame(messages.KEEP, {}, [packed(one) for one in value]), (LAYOUT, {}))


@pytest.mark.parametrize(
    ("message", "reading", "free"),
    [
        (["a", "b"], lambda value: names_of(Frame(messages.AGAIN, {}, [packed(value)]), 0, {"a", "b"}), ()),
        ([{"a": DIGEST, "b": DIGEST}, {}], described, ()),
        ({"a": [b"", "0" * 64]}, follow, (".a left out",)),
        ([["F", 0, 1.0, 2.0], ["wait", -1, 2.0, 2.5]], lambda value: read_spans([packed(value)]), ()),
        (["k", b"v"], lambda value: Meeting(lambda key, value: None, 1.0).hear(*value), ()),
    ],
    ids=["names", "digests", "recipes", "spans", "meeting"],
)
def test_each_field_of_a_payload_is_checked(
    message: Any, reading: Callable[[Any], object], free: tuple[str, ...]
) -> None:
    check_every_field(message, reading, free=free)
