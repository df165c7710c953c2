"""A plan: which device holds which blocks, and how samples flow; checked on construction.

The idea: a plan is data. Whoever computed it, a plan that exists is complete (every block once per pipeline), feasible
in shape (samples add up). It has one canonical JSON form, whose hash the members acknowledge.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshcee.errors import PlanError, ProtocolError
from meshcee.fields import read

__all__ = ["MOST_THREADS", "Epoch", "LeftOut", "Member", "Pipeline", "Plan", "Predicted", "Stage", "Term"]

MOST_THREADS = 1 << 16


class Term(NamedTuple):
    """Of a coordinator; the greater is the newer."""

    counter: int
    peer: str


class Epoch(NamedTuple):
    """One life of one plan: the owner's incarnation, and the number of the plan in it."""

    incarnation: int
    number: int


@dataclass(frozen=True)
class Member:
    """A device of a group: its peer, and how many samples of every micro-batch it computes."""

    peer: str
    samples: int


@dataclass(frozen=True)
class Stage:
    """Blocks [first, end) on a group. `window` counts micro-batches from F to B, `live_cap` from F to W."""

    first: int
    end: int
    members: tuple[Member, ...]
    window: int
    live_cap: int
    codec_out: str = "none"  # activations to the next stage
    codec_back: str = "none"  # gradients to the previous stage
    recompute: bool = False
    fused: bool = False  # B and W in one, and the gradient leaves at its end: where splitting costs more than it fills

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise PlanError(f"a stage needs at least one block, got [{self.first}, {self.end})")
        if not self.members or any(m.samples < 1 for m in self.members):
            raise PlanError(f"stage [{self.first}, {self.end}) needs members with at least one sample each")
        if self.window < 1 or self.live_cap < self.window:
            raise PlanError(f"window {self.window} and live cap {self.live_cap} must satisfy 1 <= window <= live cap")

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(member.peer for member in self.members)


@dataclass(frozen=True)
class Pipeline:
    """Consecutive stages through which `num_micro` micro-batches of every step flow."""

    num_micro: int
    stages: tuple[Stage, ...]

    def __post_init__(self) -> None:
        if self.num_micro < 1 or not self.stages:
            raise PlanError("a pipeline needs at least one micro-batch and one stage")
        if self.stages[0].first != 0 or any(a.end != b.first for a, b in zip(self.stages, self.stages[1:])):
            raise PlanError("the stages of a pipeline must cover the blocks from 0 without gap or overlap")


@dataclass(frozen=True)
class Predicted:
    """What the simulator expects; `step_s` is the period of consecutive steps."""

    step_s: float
    samples_per_s: float
    lower_bound_s: float


@dataclass(frozen=True)
class LeftOut:
    """A device that the plan does not use, and the reason in words."""

    peer: str
    why: str


@dataclass(frozen=True)
class Plan:
    """The whole: every pipeline runs all blocks; their micro-batches add up to the global batch."""

    micro_batch: int
    pipelines: tuple[Pipeline, ...]
    predicted: Predicted | None = None
    left_out: tuple[LeftOut, ...] = field(default=())
    threads: int = 0  # that every CPU computes with; 0: each with its own number
    kernels: tuple[str, ...] = ()  # classes of the members' devices, in words

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or not self.pipelines:
            raise PlanError("a plan needs a positive micro-batch and at least one pipeline")
        if not 0 <= self.threads <= MOST_THREADS:
            raise PlanError(f"a plan has 0 to {MOST_THREADS} threads, got {self.threads}")
        if len({p.stages[-1].end for p in self.pipelines}) != 1:
            raise PlanError("all pipelines of a plan must run the same blocks")
        seen: set[str] = set()
        for stage in (s for p in self.pipelines for s in p.stages):
            if sum(m.samples for m in stage.members) != self.micro_batch:
                raise PlanError(f"stage [{stage.first}, {stage.end}): samples must add up to {self.micro_batch}")
            for peer in stage.peers:
                if peer in seen:
                    raise PlanError(f"peer {peer} appears twice in the plan")
                seen.add(peer)

    @property
    def num_blocks(self) -> int:
        return self.pipelines[0].stages[-1].end

    @property
    def global_batch(self) -> int:
        return self.micro_batch * sum(p.num_micro for p in self.pipelines)

    @property
    def peers(self) -> tuple[str, ...]:
        """Every member, in pipeline and stage order."""
        return tuple(peer for p in self.pipelines for s in p.stages for peer in s.peers)

    def where(self, peer: str) -> tuple[int, int]:
        """The pipeline and the stage that a member belongs to; PlanError for anybody else."""
        for i, pipeline in enumerate(self.pipelines):
            for j, stage in enumerate(pipeline.stages):
                if peer in stage.peers:
                    return i, j
        raise PlanError(f"peer {peer} is not part of the plan")

    def label(self, pipeline: int, stage: int) -> str:
        """What people read of a stage: its number, behind that of its pipeline where there are several, as in "1.0"."""
        return str(stage) if len(self.pipelines) == 1 else f"{pipeline}.{stage}"

    def shares_of(self, num_micro: int) -> tuple[tuple[int, int], ...]:
        """Micro-batches [first, end) of so many that each pipeline walks: one behind the other, in proportion to `num_micro`.

        Of a step these are exactly its own; of an evaluation, which may have fewer, perhaps none.
        """
        each = [p.num_micro for p in self.pipelines]
        ends = [num_micro * sum(each[: i + 1]) // sum(each) for i in range(len(each))]
        return tuple(zip([0, *ends], ends))

    @property
    def codecs(self) -> frozenset[str]:
        """Of all boundaries, but for the exact ones: where this is empty, nothing is rounded on its way."""
        stages = [s for p in self.pipelines for s in p.stages]
        return frozenset(c for s in stages for c in (s.codec_out, s.codec_back)) - {"none", "lossless"}

    @property
    def may_move_shares(self) -> bool:
        """Whether it changes no number which of its pipelines computes a micro-batch."""
        return len(self.pipelines) > 1 and not self.shares_samples and not self.codecs

    @property
    def shares_samples(self) -> bool:
        """Whether a group divides the samples of micro-batches: sums then have another order than the plain loop's."""
        return any(len(s.members) > 1 for p in self.pipelines for s in p.stages)

    @property
    def sums_gradients(self) -> bool:
        """Whether members add up gradients, in a group or over pipelines."""
        return len(self.pipelines) > 1 or self.shares_samples

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object of `meshcee plan --json`."""
        return {
            "micro_batch": self.micro_batch,
            "pipelines": [
                {
                    "num_micro": p.num_micro,
                    "stages": [
                        {
                            "blocks": [s.first, s.end],
                            "members": [{"peer": m.peer, "samples": m.samples} for m in s.members],
                            "codec_out": s.codec_out,
                            "codec_back": s.codec_back,
                            "window": s.window,
                            "live_cap": s.live_cap,
                            "recompute": s.recompute,
                            "fused": s.fused,
                        }
                        for s in p.stages
                    ],
                }
                for p in self.pipelines
            ],
            "predicted": None if self.predicted is None else vars(self.predicted),
            "left_out": [{"peer": x.peer, "why": x.why} for x in self.left_out],
            "threads": self.threads,
            "kernels": list(self.kernels),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of `to_json`; raises PlanError on anything that is not a plan."""
        try:
            pipelines = [
                {**p, "stages": [{**s, "first": s["blocks"][0], "end": s["blocks"][1]} for s in p["stages"]]}
                for p in data["pipelines"]
            ]
            return read({**data, "pipelines": pipelines}, cls, "this is not a plan", defaults=True)
        except (ProtocolError, KeyError, TypeError, IndexError) as error:
            raise PlanError(
                str(error) if isinstance(error, ProtocolError) else f"this is not a plan: {error!r}"
            ) from error

    def hash(self) -> str:
        """SHA-256 of the canonical JSON, predictions and reasons left out."""
        data = self.to_json()
        canonical = json.dumps({k: data[k] for k in ("micro_batch", "pipelines", "threads")}, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()
