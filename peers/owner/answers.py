"""What has come back of one step or evaluation, and what is told of it.

The idea: the owner fills its Answers as answers arrive in any order; a Report is made once it is complete.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import structlog

from meshcee.codec import Measured
from meshcee.errors import ProtocolError, UsageError
from meshcee.figures import Observed
from meshcee.plan import Plan
from meshcee.role import Place
from peers.owner.feed import Portion
from peers.wire import Round, messages, need

__all__ = ["Answers", "CodecNews", "Report"]

log = structlog.get_logger()

SHOWN_BYTES = 100_000  # in a queue: fewer hold nobody up
BUSY = 0.7  # of a step: who is busy for so long bounds it


@dataclass(frozen=True)
class Report:
    """One committed step. They count from 0, as `range(steps)` does. `loss` is the weighted sum over micro-batches in order.

    `tokens_per_s` is what Job.weight adds up to over the step, a second: tokens, where it counts them. None without a weight, and
    where the loss is a sum, which needs none.
    `bound_share` is `plan.predicted.lower_bound_s / step_s`: 1 were all devices busy all the time, as they were profiled, and links
    free. None where the plan has no prediction, as one of your own.
    `crossed_bytes` are activations and gradients that went from stage to stage, as their senders counted them behind the codec. The
    frames around them, inputs, copies of the state, and sums between pipelines or within groups are not in it.
    """

    step: int
    steps: int
    loss: float
    step_s: float
    samples_per_s: float
    eta_s: float
    limit: str  # what bounds the speed, in words
    norm: float | None = None  # of all gradients before clipping, where the job clips
    lr: float | None = None  # of the parameters that no pattern of the optimizer's groups names
    tokens_per_s: float | None = None
    bound_share: float | None = None
    crossed_bytes: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    terms: Mapping[str, float] = field(
        default_factory=dict
    )  # what the job's loss tells of beside it, added up as it is
    shares: tuple[int, ...] = ()  # micro-batches that each pipeline computed
    codecs: Mapping[str, Measured] = field(default_factory=dict)  # by boundary and direction: "0->1" or "1->0"
    observed: Observed = field(default_factory=Observed)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON object."""
        data = {name: value for name, value in vars(self).items() if name != "observed"}
        data["metrics"], data["terms"] = dict(self.metrics), dict(self.terms)
        data["codecs"] = {boundary: measured.to_json() for boundary, measured in self.codecs.items()}
        return data


@dataclass
class Answers:
    """What has come back of one step or evaluation, of all its pipelines' portions. Micro-batches count through all of them."""

    round: Round
    members: int
    portions: Sequence[Portion]
    losses: dict[tuple[int, int], Sequence[float]] = field(
        default_factory=dict
    )  # (loss, *terms), by micro-batch and member
    rows: dict[int, dict[int, list[Any]]] = field(default_factory=dict)  # of an evaluation, until all rows are here
    applied: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    codecs: dict[tuple[str, str], Measured] = field(default_factory=dict)  # (stage, target) -> what it measured
    outputs: dict[int, Mapping[str, float]] = field(default_factory=dict)  # of an evaluation, as metrics already
    data_s: float = 0.0  # that the user's data took
    fed_bytes: dict[str, int] = field(default_factory=dict)  # by peer: inputs that the owner or the supplier sent it
    feeder: str = "the owner"  # or the name of the supplier
    read_at: str = ""  # " at NAME (FILE:FUNCTION)" where a supplier reads
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    completed_s: float = 0.0  # when it was, by time.perf_counter

    def __post_init__(self) -> None:
        # By micro-batch: what the loss of each member of the last stage counts for.
        self._shares: list[tuple[float, ...]] = [
            row for portion in self.portions for row in zip(*portion.shares, strict=True)
        ]

    def new(self, place: Place, header: Mapping[str, Any]) -> int:
        """The micro-batch that a member of a last stage answers for, of which nothing has come back yet from it."""
        own, portion = need(header, "micro", int), self.portions[place.pipeline].round
        micro, member = portion.first + own, place.member
        heard = (micro, member) in self.losses or micro in self.outputs or member in self.rows.get(micro, {})
        if not 0 <= own < portion.num_micro or heard:
            raise ProtocolError(f"it answered for micro-batch {own} of round {self.round.number}, which is not awaited")
        return micro

    def apply(self, place: Place, header: Mapping[str, Any]) -> None:
        """A member has applied the step; what it measured is checked."""
        stage, *others = (place.plan.label(place.pipeline, place.index + n) for n in (0, 1, -1))
        for kind, target in zip((messages.F, messages.B), others):
            measured = need(header, "codecs", dict).get(kind)
            if measured is not None:
                try:
                    found = Measured.from_json(measured)
                except UsageError as error:
                    raise ProtocolError(f"it applied a step: {error}") from error
                known = self.codecs.get((stage, target))  # of another member of the group
                self.codecs[stage, target] = found if known is None else known + found
        if header.get("norm") is not None:
            need(header, "norm", float)
        figures: list[float] = [*need(header, "seconds", dict[str, float]).values()]
        for seen in need(header, "links", dict[str, tuple[float | None, float | None, float | None]]).values():
            figures += [figure for figure in seen if figure is not None]  # rates out and in, and what waited
        if (fed := header.get("fed")) is not None:
            figures.append(need(header, "fed", float))
            if not fed > 0:
                raise ProtocolError("what the owner sends comes at some rate")
        if header.get("memory") is not None:
            figures.append(need(header, "memory", int))
        if not all(0 <= x < math.inf for x in figures):
            raise ProtocolError("what it measured of a step is not finite and positive")
        self.applied[place.peer] = header

    def as_planned(self, plan: Plan, *, reads_ahead: bool = False) -> Observed:
        """What was observed, but how long members would have computed with the micro-batches that the plan has for them."""
        found = self.observed()
        share = [p.num_micro / portion.round.num_micro for p, portion in zip(plan.pipelines, self.portions)]
        compute_s = {peer: s * share[plan.where(peer)[0]] for peer, s in found.compute_s.items()}
        return replace(found, compute_s=compute_s, data_s=None if reads_ahead else self.data_s)

    def observed(self) -> Observed:
        """Once it is complete."""
        compute_s: dict[str, float] = {}
        rates: dict[tuple[str, str], float] = {}
        depths: dict[tuple[str, str], float] = {}
        for peer, header in self.applied.items():
            compute_s[peer] = sum(float(header["seconds"].get(kind, 0.0)) for kind in ("f", "b", "w"))
            for other, (out, into, depth) in header["links"].items():
                if other in self.applied:
                    if depth is not None:
                        depths[peer, other] = depth
                    # Of two ends that saw one direction, the slower view: the other saw a buffer fill.
                    for pair, rate in (((peer, other), out), ((other, peer), into)):
                        if rate:
                            rates[pair] = min(rate, rates.get(pair, rate))
        fed = {p: (size, rate) for p, size in self.fed_bytes.items() if (rate := self.applied[p].get("fed"))}
        seconds = {p: header["seconds"] for p, header in self.applied.items()}
        memory = {p: taken for p, header in self.applied.items() if (taken := header.get("memory")) is not None}
        return Observed(compute_s, rates, depths, fed, seconds, memory_bytes=memory)

    def heard_of(self, micro: int) -> bool:
        """Whether every member of its last stage has told its loss of this micro-batch."""
        return all((micro, k) in self.losses for k in range(len(self._shares[micro])))

    def check(self) -> None:
        if self.round.forward_only:
            done = len(self.outputs) == self.round.num_micro
        else:
            done = len(self.losses) == sum(map(len, self._shares)) and len(self.applied) == self.members
        if done and not self.complete.is_set():
            self.completed_s = time.perf_counter()
            self.complete.set()

    def sums(self) -> list[float]:
        """The step's loss, and its terms. Added one by one, as the plain loop does: from Python 3.12 on, `sum` carries what floats
        lose.
        """
        shares = {(m, k): share for m, row in enumerate(self._shares) for k, share in enumerate(row)}
        columns = zip(*([value * share for value in self.losses[at]] for at, share in shares.items()), strict=True)
        return [reduce(add, column, 0.0) for column in columns]

    def limit(self, plan: Plan, names: Mapping[str, str], step_s: float) -> str:
        """What bounded the step: the busiest member, or what the owner feeds, or that none is busy; then links or the window do."""
        found = []
        for peer in plan.peers:
            seconds = self.applied[peer].get("seconds", {})
            total = float(seconds.get("total", 0)) or 1.0
            ran_s = total - float(seconds.get("wait", 0))
            # Where a step is long for others, it waits before its own part of it begins, and does not say so.
            found.append((ran_s / max(total, step_s), peer))
        busy, peer = max(found, key=lambda one: one[0])
        label, name = plan.label(*plan.where(peer)), names.get(peer) or peer[-6:]
        if busy >= BUSY:
            return f"compute of {name} (stage {label}, {busy:.0%} busy)"
        if (fed := self._fed(plan, names, step_s)) is not None:
            return fed
        if len(plan.peers) == 1:  # no link carries anything but what the owner sends
            return f"the owner and the link to it: {name}, which has the whole model, waits {1 - busy:.0%}"
        told = f"links: the busiest stage, {label} on {name}, waits {1 - busy:.0%}"
        depths = self.observed().depths
        if (fullest := max(depths, key=depths.__getitem__, default=None)) is None or depths[fullest] < SHOWN_BYTES:
            return told
        a, b = (names.get(end) or end[-6:] for end in fullest)
        return f"{told}; up to {depths[fullest] / 1e6:.1f} MB queue from {a} to {b}"

    def feeds_s(self) -> dict[str, float]:
        """What the inputs of this step were on the way from the feeder to each member, as those saw them come."""
        return {peer: size / rate for peer, (size, rate) in self.observed().fed.items()}

    def _fed(self, plan: Plan, names: Mapping[str, str], step_s: float) -> str | None:
        """That the feeder was busy for most of the step: reading the user's data, or sending it."""
        feeds_s = self.feeds_s()
        peer = max(feeds_s, key=feeds_s.__getitem__, default="")
        sent_s = feeds_s.get(peer, 0.0)
        if max(sent_s, self.data_s) < BUSY * step_s:
            return None
        if self.data_s >= sent_s:
            return f"data: {plan.micro_batch * self.round.num_micro} samples take {self.data_s:.2g} s{self.read_at}"
        sent = f"{self.fed_bytes[peer] / 1e6:.2g} MB of inputs a step take {sent_s:.2g} s"
        return f"{self.feeder}'s link to {names.get(peer) or peer[-6:]}: {sent}"


class CodecNews:
    """A guard that has stepped back is told once."""

    def __init__(self, plan: Plan) -> None:
        self._known: dict[tuple[str, str], str] = {}  # (stage, target) -> the codec in use, as last heard
        for i, pipeline in enumerate(plan.pipelines):
            for j, of in enumerate(pipeline.stages):
                before, here, behind = (plan.label(i, j + n) for n in (-1, 0, 1))
                self._known |= {(here, behind): of.codec_out, (here, before): of.codec_back}

    def hear(self, answers: Answers) -> None:
        for where, found in answers.codecs.items():
            if (left := self._known[where]) != found.codec:
                at = {"step": answers.round.step, "stage": where[0], "target": where[1]}
                log.warning("a codec was too far off and has been left", **at, left=left, now=found.codec)
                self._known[where] = found.codec
