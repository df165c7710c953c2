"""What an epoch begins with, and where it keeps what it does.

The idea: a member is sent names and how to come by their values, never told where the owner has them from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from meshcee.capture import Capture
from meshcee.files import Trouble
from meshcee.files.tensor_files import OnDemand
from peers.state.checkpoint import Checkpoint, CheckpointStore
from peers.state.manifest import CopySet, Manifest
from peers.state.policy import Cadence, Keepers
from peers.wire import Offer

__all__ = ["Kept", "Part", "state_for"]


@dataclass(frozen=True)
class Kept:
    """What an epoch begins with, and where it keeps what it does.

    `base` is the state to go on from, on the disk or with peers (None: the model as it was captured). `store` is the
    place for checkpoints (None: there are none), `least` the number of steps that were reported before. They are done again even if
    the user stops the run. `holders` are peers that may still have what they trained before. `copies` is what is copied
    to keepers (None: nothing is), and `keepers` who keeps them. `trouble` is told what the disk refuses.
    """

    base: Checkpoint | CopySet | None = None
    store: CheckpointStore | None = None
    cadence: Cadence = field(default_factory=Cadence)
    least: int = 0
    holders: frozenset[str] = frozenset()
    copies: Manifest | None = None
    keepers: Keepers = field(default_factory=Keepers)
    trouble: Trouble = field(default_factory=Trouble)


class Part(NamedTuple):
    """Some of what a member begins with: names, where their values are found, and the digests of those that are with peers."""

    names: Iterable[str]
    values: Mapping[str, torch.Tensor]
    digests: Mapping[str, str] = {}


def state_for(offer: Offer, captured: Capture, base: Checkpoint | CopySet | None) -> dict[str, Part]:
    """The weights that a member begins with, and, where a job goes on, what its optimizer has kept."""
    expected = offer.expected_state
    if base is None:
        return {"state": Part(expected, captured.state)}
    trainable = offer.specs[offer.index].trainable
    if isinstance(base, CopySet):
        weights, kept = base.digests(expected, trainable)
        return {"state": Part(expected, captured.state, weights), "optimizer": Part(kept, {}, kept)}
    weights_on_disk = base.weights(expected)
    optimizer = base.optimizer(trainable)
    return {
        "state": Part(expected, OnDemand(expected, lambda name: weights_on_disk[name].to(expected[name][0]))),
        "optimizer": Part(optimizer, optimizer),
    }
