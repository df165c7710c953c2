"""An offer and the headers of frames: each field that is wrong is refused in a sentence, whoever sent it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

from meshcee.capture import decode_program
from meshcee.errors import MeshceeError, NonFiniteLossError, PlanError, ProtocolError, UsageError
from meshcee.fields import plain
from peers.member.inbox import TakeCopy, named_tensors
from peers.transport.base import Frame
from peers.wire import messages
from peers.wire.messages import Round, error_from, error_header
from peers.wire.offer import Offer
from peers.wire.progress import Doing
from tests.rig.mutations import check_every_field
from tests.rig.targets import offered

REFUSALS = (ProtocolError, PlanError, UsageError)


@pytest.mark.slow
def test_each_field_of_an_offer_is_checked() -> None:
    """A plan's own reader has defaults, and knows an optimizer's options; programs are tried in tests/capture."""
    offer, frame = offered()
    body = msgpack.unpackb(frame.payloads[0])
    programs = [decode_program(graph) for graph in Offer.graphs(frame)]

    def read(header: Any, body: Any) -> Offer:
        payloads = [msgpack.packb(body), *frame.payloads[1:]]
        return Offer.from_frame(Frame(frame.kind, header, payloads), programs, "b", "o")

    back = read(frame.header, body)
    assert (plain(back.terms), back.plan) == (plain(offer.terms), offer.plan)
    assert (back.addresses, back.sources, back.run) == (offer.addresses, offer.sources, offer.run)
    check_every_field(frame.header, lambda header: read(header, body), refusals=REFUSALS)
    optional = ("codec_out", "codec_back", "recompute", "fused")
    check_every_field(
        body,
        lambda body: read(frame.header, body),
        refusals=REFUSALS,
        free=(
            ".terms.clip_norm = None",
            ".terms.clip_norm = inf",
            ".terms.optimizer",
            ".addresses.a left out",
            *(f".plan.pipelines.0.stages.{i}.{name} left out" for i in (0, 1) for name in optional),
            *(f".plan.{name} left out" for name in ("predicted", "left_out", "threads", "kernels")),
            ".plan.predicted",
        ),
    )


@pytest.mark.parametrize(
    ("header", "reading"),
    [
        ({"epoch": [0, 1]}, messages.epoch_of),
        ({"term": [1, "a"]}, messages.term_of),
        ({"run": "r"}, messages.run_of),
        ({"besides": [1, 2]}, messages.besides_in),
        (error_header(NonFiniteLossError("x")), error_from),
        (
            Round(1, 0, (0.5, 0.25), ({"lr": 0.1},), tail=1).header(),
            lambda header: Round.from_header(header, forward_only=False, max_micro=8),
        ),
        ({"next_step": 1, "since": 0, "besides": [1]}, TakeCopy.from_header),
        (
            {"names": ["a", "b"]},
            lambda header: named_tensors(header, [torch.zeros(1), None], dict.fromkeys("ab", torch.zeros(1))),
        ),
        (Doing(1, True, 5, ("a",)).frame().header, Doing.from_header),
    ],
    ids=["epoch", "term", "run", "besides", "error", "step", "copy", "names", "doing"],
)
def test_each_field_of_a_header_is_checked(header: dict[str, Any], reading: Any) -> None:
    check_every_field(header, reading, free=(".tail = None", ".hyper.0.lr"))


def test_an_unknown_error_is_a_meshcee_error() -> None:
    assert type(error_from({"error": "Bucket", "message": "x"})) is MeshceeError
