"""Whose fault a failure was: one peer's, or that of the work, which would meet every peer.

The idea: an error that a peer meets by itself (a full device, an instruction that it lacks, a frame that it cannot read) is
the loss of that peer. Only where another peer has failed alike on the same work does the work itself fail, and then the run
ends and says so. "Alike" is the same error but for its numbers; "the same work" are blocks in common, in the same step.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from meshcee.errors import MeshceeError, NonFiniteLossError, NotPermittedError, PeerLostError, PlanError

__all__ = ["Fault", "Suspects", "is_own"]

MOST_FAULTS = 256
NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)*")


@dataclass(frozen=True)
class Fault:
    """Of one peer in an epoch; `blocks` are [first, end). `suspects` are who may be at fault: itself, and who sent what it met.

    `error` is told to people, `text` is the error as it was met.
    """

    peer: str
    error: MeshceeError
    text: str
    blocks: tuple[int, int]
    steps: range | None  # in which it may have been; None: while it was offered its stage
    suspects: frozenset[str]

    def is_like(self, other: Fault) -> bool:
        near = self.steps == other.steps
        if self.steps is not None and other.steps is not None:  # a neighbour may be a step ahead
            near = self.steps.start <= other.steps.stop and other.steps.start <= self.steps.stop
        overlap = max(self.blocks[0], other.blocks[0]) < min(self.blocks[1], other.blocks[1])
        return near and overlap and self._kind == other._kind

    @property
    def _kind(self) -> tuple[str, str]:
        return type(self.error).__name__, NUMBERS.sub("#", self.text)


def is_own(error: MeshceeError) -> bool:
    """Whether an error that a member reports is its own: not the loss of another, nor what any member would say of this work."""
    return not isinstance(error, PeerLostError | NonFiniteLossError | NotPermittedError | PlanError)


class Suspects:
    """Of one job."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def hear(self, faults: Collection[Fault]) -> set[str]:
        """Who is to be left out for these; raises the error that peers have in common, if no single one explains it."""
        found: set[str] = set()
        for fault in faults:
            alike = [known for known in self._faults if known.is_like(fault)]
            self._faults = [*self._faults[-MOST_FAULTS:], fault]
            common = fault.suspects.intersection(*(known.suspects for known in alike))
            if not common:
                peers = len({fault.peer, *(known.peer for known in alike)})
                raise type(fault.error)(f"{fault.error} ({peers} peers have failed alike on the same blocks)")
            found |= common if alike else {fault.peer}
        return found
