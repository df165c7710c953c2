"""A few steps as a picture: what every peer did, beside what the simulator expected of the same plan.

The idea: members tell their spans on their own clocks. A ping before each of the first steps tells how a member's clock
differs from the owner's, off by no more than half of the shortest round trip. The file is a list of Chrome trace events,
which chrome://tracing and ui.perfetto.dev open.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshcee.errors import PlanError
from meshcee.figures import JobCosts, Measured
from meshcee.files import disk, dumps
from meshcee.plan import Plan
from meshcee.planner import situation
from meshcee.simulator import simulate
from peers.transport import Buffer, Frame
from peers.wire import Outbox, Round, Span, messages, need, read_spans

__all__ = ["Clock", "Trace"]

FIRST, COUNT = 2, 3  # the first steps fill the pipeline and warm kernels up
COMPUTE, BESIDE = 0, 1  # lanes of a peer; messages, which may overlap, have none


@dataclass
class Clock:
    """How far a member's clock is ahead of ours, from the exchange with the shortest round trip."""

    offset_s: float = 0.0
    round_trip_s: float = float("inf")

    def hear(self, asked_s: float, there_s: float, now_s: float) -> None:
        if 0 <= now_s - asked_s < self.round_trip_s:
            self.round_trip_s = now_s - asked_s
            self.offset_s = there_s - (asked_s + now_s) / 2


class Trace:
    """Fed by the owner; `write` at the end. One plan: a new one starts it afresh."""

    def __init__(self) -> None:
        self._peers: list[tuple[str, str]] = []  # peer id, label
        self.clocks: dict[str, Clock] = {}
        self._measured: list[tuple[str, int, Span]] = []  # peer, step, span
        self._predicted: list[tuple[str, int, Span]] = []
        self._first = 0
        self.notes: list[str] = []

    def begin(self, plan: Plan, names: Mapping[str, str], first_step: int, steps: int) -> None:
        """Of the steps first_step .. steps - 1 a few after the first two, or as many as there are."""
        labels = [(p, f"stage {plan.label(*plan.where(p))}, {names.get(p, p[-6:])}") for p in plan.peers]
        self._peers, self.clocks = labels, {peer: Clock() for peer, _ in labels}
        self._measured.clear()
        self.notes.clear()  # the plan before has left no other trace either
        self._first = max(first_step, min(first_step + FIRST, steps - COUNT))

    @property
    def last(self) -> int:
        """The last step that is traced."""
        return self._first + COUNT - 1

    async def ask(self, round: Round, members: Sequence[Outbox]) -> Round:
        """The step as it goes to the members, traced or not; until the last traced one their clocks are asked first."""
        if round.step < self._first + COUNT:
            for outbox in members:
                await outbox.put(Frame(messages.CLOCK, {"asked_s": time.perf_counter()}))
        return replace(round, trace=self._first <= round.step < self._first + COUNT)

    def hear_clock(self, peer: str, header: Mapping[str, Any]) -> None:
        self.clocks[peer].hear(need(header, "asked_s", float), need(header, "there_s", float), time.perf_counter())

    def hear(self, peer: str, step: int, payloads: Sequence[Buffer]) -> None:
        """A member's spans of a step; ProtocolError if they are none."""
        self._measured += [(peer, step, span) for span in read_spans(payloads)]

    def predict(self, plan: Plan, measured: Measured, job: JobCosts) -> None:
        """The same steps in the simulator, from what the plan was made from."""
        self._predicted.clear()
        try:
            timeline = simulate(plan, *situation(measured, job), steps=FIRST + COUNT, record=True)
        except PlanError as error:
            self.notes.append(f"the trace has no prediction: {error}")
            return
        kinds = {"O": "apply", "out": "message F", "back": "message B", "ring": "message sum"}
        for span in timeline.outcome.spans:
            if span.step >= FIRST:
                node = timeline.instance.nodes[span.node]
                micro = -1 if span.kind == "O" else span.micro % node.num_micro  # there they count through all steps
                found = Span(kinds.get(span.kind, span.kind), micro, span.start_s, span.end_s)
                self._predicted.append((node.peer, span.step - FIRST, found))

    def events(self) -> list[dict[str, Any]]:
        """Measured and predicted peers in turns; both begin at time 0 with the first traced F."""
        ours = [
            (peer, step, span._replace(start_s=span.start_s - at, end_s=span.end_s - at))
            for peer, step, span in self._measured
            for at in (self.clocks[peer].offset_s,)
        ]
        told = [(peer, step + self._first, span) for peer, step, span in self._predicted]
        found: list[dict[str, Any]] = []
        for turn, (what, spans) in enumerate((("measured", ours), ("predicted", told))):
            zero_s = min((s.start_s for _, _, s in spans if s.kind.startswith("F")), default=0.0)
            for i, (peer, label) in enumerate(self._peers):
                found += _of_peer(2 * i + turn, f"{label}: {what}", [(n, s) for p, n, s in spans if p == peer], zero_s)
        return found

    def write(self, path: Path) -> None:
        clocks = {
            label: {"offset_s": self.clocks[peer].offset_s, "round_trip_s": self.clocks[peer].round_trip_s}
            for peer, label in self._peers
            if self.clocks[peer].round_trip_s < float("inf")
        }
        data = dumps({"traceEvents": self.events(), "displayTimeUnit": "ms", "otherData": {"clocks": clocks}})
        disk.publish(path, data.encode())


def _of_peer(pid: int, label: str, spans: Sequence[tuple[int, Span]], zero_s: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": label}},
        {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": COMPUTE, "args": {"name": "compute"}},
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": BESIDE, "args": {"name": "encode, decode"}},
    ]
    for number, (step, span) in enumerate(sorted(spans, key=lambda x: x[1].start_s)):
        category = span.kind.split(" ")[0]
        name = span.kind if span.micro < 0 else f"{span.kind} {span.micro}"
        common = {"name": name, "cat": category, "pid": pid, "args": {"step": step, "micro": span.micro}}
        start_us, end_us = ((s - zero_s) * 1e6 for s in (span.start_s, span.end_s))
        if category in ("send", "message", "sum"):  # several at once: asynchronous slices
            of = {**common, "tid": COMPUTE, "id": f"{pid}.{number}"}
            found += [{**of, "ph": "b", "ts": start_us}, {**of, "ph": "e", "ts": end_us}]
        elif category == "receive":
            found.append({**common, "tid": BESIDE, "ph": "i", "s": "p", "ts": end_us})
        else:
            tid = BESIDE if category in ("encode", "decode") else COMPUTE
            found.append({**common, "tid": tid, "ph": "X", "ts": start_us, "dur": end_us - start_us})
    return found
