"""What has come back of one step or evaluation, and what is told of it.

The idea: the owner fills a Walk as answers arrive in any order; a Report is made once it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshcee.codec import Measured
from meshcee.errors import ProtocolError, UsageError
from peers import messages
from peers.messages import Step, need

__all__ = ["Report", "Walk"]


@dataclass(frozen=True)
class Report:
    """One committed step. `loss` is the weighted sum over its micro-batches, in micro order."""

    step: int
    steps: int
    loss: float
    step_s: float
    samples_per_s: float
    eta_s: float
    limit: str  # what bounds the speed, in words
    norm: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    codecs: Mapping[str, Measured] = field(default_factory=dict)  # by boundary and direction, "0->1" or "1->0"


@dataclass
class Walk:
    """What has come back of one step or evaluation."""

    spec: Step
    members: int
    losses: dict[int, float] = field(default_factory=dict)
    applied: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    codecs: dict[str, Measured] = field(default_factory=dict)
    outputs: dict[int, Mapping[str, float]] = field(default_factory=dict)  # of an evaluation, as metrics already
    complete: asyncio.Event = field(default_factory=asyncio.Event)

    def new(self, micro: int) -> int:
        """The index of a micro-batch of this walk of which nothing has come back yet."""
        if not 0 <= micro < self.spec.num_micro or micro in self.losses or micro in self.outputs:
            raise ProtocolError(f"it answered for micro-batch {micro} of walk {self.spec.walk}, which is not awaited")
        return micro

    def apply(self, peer_id: str, stage: int, header: Mapping[str, Any]) -> None:
        """A member has applied the step; what it measured is checked."""
        need(header, "seconds", dict)
        for kind, target in ((messages.F, stage + 1), (messages.B, stage - 1)):
            measured = need(header, "codecs", dict).get(kind)
            if measured is not None:
                try:
                    self.codecs[f"{stage}->{target}"] = Measured.from_json(measured)
                except UsageError as error:
                    raise ProtocolError(f"it applied a step: {error}") from error
        self.applied[peer_id] = header

    def check(self) -> None:
        back = self.outputs if self.spec.forward_only else self.losses
        if len(back) == self.spec.num_micro and (self.spec.forward_only or len(self.applied) == self.members):
            self.complete.set()

    def loss(self) -> float:
        return sum(self.losses[m] * self.spec.weights[m] for m in range(self.spec.num_micro))

    def limit(self, stages: Sequence[tuple[str, str]]) -> str:
        """The busiest stage of these (peer id, name), or that none is busy: then links or the window limit."""
        shares = []
        for index, (peer_id, name) in enumerate(stages):
            seconds = self.applied[peer_id].get("seconds", {})
            total = float(seconds.get("total", 0)) or 1.0
            shares.append((1 - float(seconds.get("wait", 0)) / total, -index, name or peer_id[-6:]))
        share, index, name = max(shares)
        if share >= 0.7:
            return f"compute of {name} (stage {-index}, {share:.0%} busy)"
        return f"links: the busiest stage, {-index} on {name}, waits {1 - share:.0%}"
