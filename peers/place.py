"""Where a member stands in a plan: its stage, its rows of every micro-batch, and all peers that it talks to.

The idea: who sends what to whom is a function of the plan alone, so both ends of a link derive it by themselves and a
frame from anybody else is refused. The first member of a stage leads it: votes go up through the leaders, the commit
comes down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from meshcee.plan import Stage
from peers import messages

__all__ = ["Piece", "Place", "StageFlops", "rows_of"]


@dataclass(frozen=True)
class StageFlops:
    """Work of one micro-batch, forward and input-gradient and weight-gradient, that emulated devices are paced by."""

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0


@dataclass(frozen=True)
class Piece:
    """Rows [first, end) of a micro-batch that a peer of a neighbouring stage has in common with us; `rows` are all of its."""

    peer: str
    first: int
    end: int
    rows: tuple[int, int]


def rows_of(stage: Stage, samples: int) -> tuple[tuple[int, int], ...]:
    """Rows [first, end) of each member, in plan order; a micro-batch that is smaller than usual ends earlier."""
    ends = [sum(m.samples for m in stage.members[: i + 1]) for i in range(len(stage.members))]
    return tuple((min(a, samples), min(b, samples)) for a, b in zip([0, *ends], ends))


def _common(rows: tuple[int, int], stage: Stage, samples: int) -> tuple[Piece, ...]:
    found = []
    for peer, (first, end) in zip(stage.peers, rows_of(stage, samples)):
        a, b = max(first, rows[0]), min(end, rows[1])
        if a < b:
            found.append(Piece(peer, a, b, (first, end)))
    return tuple(found)


@dataclass(frozen=True)
class Place:
    """One member's place among the stages of its pipeline, and with whom it shares parameters.

    `partial_to` maps a shared parameter to the peer of an earlier stage that adds its own use; `partial_from` names the
    (parameter, peer) whose later uses must arrive first; `totals_to` maps a peer to the parameters whose total it
    needs; `totals_from` maps a parameter to the peer that its total comes from.
    """

    peer: str
    stages: tuple[Stage, ...]
    epoch: tuple[int, int]
    seed: int
    clip_norm: float | None
    norm_order: Mapping[str, int]  # parameter -> its place in named_parameters
    norm_dtype: torch.dtype = torch.float32  # in which norms are combined: what all gradients promote to
    partial_to: Mapping[str, str] = field(default_factory=dict)
    partial_from: frozenset[tuple[str, str]] = frozenset()
    totals_to: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    totals_from: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int = 1 << 30  # the most that one frame of a neighbour may unfold to
    meeting_host: str | None = None  # our address, when the group sums through a process group; None: over streams

    @cached_property
    def index(self) -> int:
        return next(i for i, stage in enumerate(self.stages) if self.peer in stage.peers)

    @property
    def stage(self) -> Stage:
        return self.stages[self.index]

    @property
    def group(self) -> tuple[str, ...]:
        """All members of the stage, in plan order."""
        return self.stage.peers

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == len(self.stages) - 1

    @property
    def fused(self) -> bool:
        """Split only where another stage waits for B: not on the first stage, nor where W feeds an earlier stage."""
        return self.stage.fused or self.is_first or bool(self.partial_to)

    @cached_property
    def member(self) -> int:
        """Our place in the group."""
        return self.group.index(self.peer)

    @property
    def arriving(self) -> dict[str, str]:
        """F and B -> the codec that the neighbouring stage sends by."""
        return {
            messages.F: "none" if self.is_first else self.stages[self.index - 1].codec_out,
            messages.B: "none" if self.is_last else self.stages[self.index + 1].codec_back,
        }

    # -- rows --------------------------------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[Piece, ...]]:
        return {}

    @cached_property
    def micro_batch(self) -> int:
        return sum(member.samples for member in self.stage.members)

    def rows(self, samples: int) -> tuple[int, int]:
        """Our rows of a micro-batch of so many samples."""
        return rows_of(self.stage, samples)[self.member]

    def sources(self, samples: int) -> tuple[Piece, ...]:
        """What comes from whom of the stage before, in the order of rows."""
        return self._pieces(self.index - 1, samples)

    def targets(self, samples: int) -> tuple[Piece, ...]:
        """What goes to whom of the stage behind, in the order of rows."""
        return self._pieces(self.index + 1, samples)

    def _pieces(self, index: int, samples: int) -> tuple[Piece, ...]:
        if (index, samples) not in self._known:  # the executor asks for each micro-batch; sizes are at most two
            inside = 0 <= index < len(self.stages)
            self._known[index, samples] = _common(self.rows(samples), self.stages[index], samples) if inside else ()
        return self._known[index, samples]

    # -- the end of a step -------------------------------------------------------------------------------------------

    @property
    def leader(self) -> str:
        return self.group[0]

    @cached_property
    def votes(self) -> bool:
        """Whether the commit waits for word from every member: for its norms, or that its group's sum is done.

        Otherwise the last B of the first stage says enough: every gradient of the step exists, each with its only owner.
        """
        return self.clip_norm is not None or any(len(stage.members) > 1 for stage in self.stages)

    @cached_property
    def above(self) -> str | None:
        """Who hears our vote and tells us of the commit; None at the head of the pipeline."""
        if self.peer != self.leader:
            return self.leader
        return None if self.is_first else self.stages[self.index - 1].peers[0]

    @cached_property
    def below(self) -> tuple[str, ...]:
        """Whose votes we wait for, and whom we tell of the commit."""
        if self.peer != self.leader:
            return ()
        return (*self.group[1:], *(() if self.is_last else self.stages[self.index + 1].peers[:1]))

    # -- links -------------------------------------------------------------------------------------------------------

    @cached_property
    def neighbours(self) -> tuple[str, ...]:
        """Every peer that we share a stream with, in plan order."""
        found = {piece.peer for piece in (*self.sources(self.micro_batch), *self.targets(self.micro_batch))}
        found |= {*self.group, *self.below, *self.partial_to.values(), *self.totals_to, *self.totals_from.values()}
        found |= {peer for _, peer in self.partial_from}
        if self.above is not None:
            found.add(self.above)
        return tuple(peer for stage in self.stages for peer in stage.peers if peer in found - {self.peer})

    @cached_property
    def links_to(self) -> tuple[str, ...]:
        """The neighbours to which we open the stream; those before us in plan order open it to us."""
        order = [peer for stage in self.stages for peer in stage.peers]
        return tuple(peer for peer in self.neighbours if order.index(peer) > order.index(self.peer))

    def stage_of(self, peer: str) -> int:
        return next(i for i, stage in enumerate(self.stages) if peer in stage.peers)
