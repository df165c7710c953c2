"""Where a member stands in a plan: its stage, its rows of every micro-batch, and all peers that it talks to.

The idea: who sends what to whom is a function of the plan alone, so both ends of a link derive it by themselves. A
frame from anybody else is refused. The first member of a stage leads it. Votes go up through the leaders, from the heads
of further pipelines to that of the first one, and the commit comes down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from meshcee.job import Job
from meshcee.plan import Epoch, Plan, Stage
from meshcee.user_code import calling

__all__ = ["B", "F", "Piece", "Place", "StageFlops", "Sum", "loss_shares", "rows_of"]

F, B = "f", "b"  # values on their way to the next stage, gradients on theirs to the one before


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


@dataclass(frozen=True)
class Sum:
    """Parameters whose gradients these members add up, in plan order; `number` tells it from the plan's other sums.

    With `statistics` it is buffers whose statistics of batches they fold.
    """

    number: int
    peers: tuple[str, ...]
    names: tuple[str, ...]
    statistics: bool = False


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

    Within a pipeline a parameter may lie on several stages: `partial_to` and what follows say how they become one gradient,
    that of the first of them. `sums` are those that this member takes part in: over its group, over the pipelines, or both.

    `partial_to` maps a shared parameter to the peer of an earlier stage that adds its own use. `partial_from` names the
    (parameter, peer) whose later uses must arrive first. `totals_to` maps a peer to the parameters whose total it
    needs. `totals_from` maps a parameter to the peer that its total comes from.
    """

    peer: str
    plan: Plan
    epoch: Epoch
    seed: int
    clip_norm: float | None
    norm_order: Mapping[str, int]  # parameter -> its place in named_parameters
    norm_dtypes: tuple[torch.dtype, ...]  # of each parameter's norm, by that place
    partial_to: Mapping[str, str] = field(default_factory=dict)
    partial_from: frozenset[tuple[str, str]] = frozenset()
    totals_to: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    totals_from: Mapping[str, str] = field(default_factory=dict)
    sums: tuple[Sum, ...] = ()
    limit_bytes: int = 1 << 30  # the most that one frame of a neighbour may unfold to
    meeting_host: str | None = None  # another member's, where a process group sums; None: over streams

    @cached_property
    def pipeline(self) -> int:
        return self.plan.where(self.peer)[0]

    @cached_property
    def index(self) -> int:
        return self.plan.where(self.peer)[1]

    @property
    def number(self) -> int:
        """Of our stage among those of all pipelines."""
        return sum(len(p.stages) for p in self.plan.pipelines[: self.pipeline]) + self.index

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of our pipeline."""
        return self.plan.pipelines[self.pipeline].stages

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
            F: "none" if self.is_first else self.stages[self.index - 1].codec_out,
            B: "none" if self.is_last else self.stages[self.index + 1].codec_back,
        }

    # -- rows --------------------------------------------------------------------------------------------------------

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[Piece, ...]]:
        return {}

    @property
    def micro_batch(self) -> int:
        return self.plan.micro_batch

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

    @property
    def leads(self) -> bool:
        """Whether our state and our norms count for all that hold the same blocks."""
        return self.peer == self.leader and not self.pipeline

    @property
    def has_replicas(self) -> bool:
        """Whether other members hold what we hold, bit for bit."""
        return len(self.group) > 1 or len(self.plan.pipelines) > 1

    @cached_property
    def votes(self) -> bool:
        """Whether the commit waits for word from every member: for its norms, or that its sums are done.

        Otherwise the last B of the first stage says enough: every gradient of the step exists, each with its only owner.
        """
        return self.clip_norm is not None or self.plan.sums_gradients

    @cached_property
    def above(self) -> str | None:
        """Who hears our vote and tells us of the commit; None at the head of the first pipeline."""
        if self.peer != self.leader:
            return self.leader
        if self.is_first:
            return self._heads[0] if self.pipeline else None
        return self.stages[self.index - 1].peers[0]

    @cached_property
    def below(self) -> tuple[str, ...]:
        """Whose votes we wait for, and whom we tell of the commit."""
        if self.peer != self.leader:
            return ()
        behind = () if self.is_last else self.stages[self.index + 1].peers[:1]
        return (*self.group[1:], *behind, *(self._heads[1:] if self.above is None else ()))

    @property
    def _heads(self) -> tuple[str, ...]:
        return tuple(pipeline.stages[0].peers[0] for pipeline in self.plan.pipelines)

    # -- links -------------------------------------------------------------------------------------------------------

    @cached_property
    def neighbours(self) -> tuple[str, ...]:
        """Every peer that we share a stream with, in plan order."""
        found = {piece.peer for piece in (*self.sources(self.micro_batch), *self.targets(self.micro_batch))}
        found |= {*self.group, *self.below, *self.partial_to.values(), *self.totals_to, *self.totals_from.values()}
        found |= {peer for _, peer in self.partial_from} | {peer for one in self.sums for peer in one.peers}
        if self.above is not None:
            found.add(self.above)
        return tuple(peer for peer in self.plan.peers if peer in found - {self.peer})

    @cached_property
    def links_to(self) -> tuple[str, ...]:
        """The neighbours to which we open the stream; those before us in plan order open it to us."""
        order = self.plan.peers
        return tuple(peer for peer in self.neighbours if order.index(peer) > order.index(self.peer))

    def label_of(self, peer: str) -> str:
        """What people read of a member's stage."""
        return self.plan.label(*self.plan.where(peer))

    def apart(self, peer: str) -> int:
        """How many stages behind ours a member is, fewer than 0 before it; 0 in another pipeline too."""
        pipeline, index = self.plan.where(peer)
        return index - self.index if pipeline == self.pipeline else 0


def loss_shares(job: Job, rows: Sequence[tuple[int, int]], targets: Callable[[int, int], Any]) -> list[float]:
    """What the losses of these parts of a micro-batch count for in the loss of the whole.

    A mean is the mean of its parts by their samples, or by the job's own weights of their targets, which `targets(first,
    end)` returns; a sum is their sum.
    """
    if job.reduction == "sum":
        return [1.0] * len(rows)
    if job.weight is None:
        own = [float(end - first) for first, end in rows]
    else:
        with calling("Job.weight"):
            own = [float(job.weight(targets(first, end))) if first < end else 0.0 for first, end in rows]
    return [w / sum(own) if sum(own) > 0 else 0.0 for w in own]
