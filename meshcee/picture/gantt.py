"""One traced step as lanes: what the simulator expected of each member above what was measured.

The idea: the trace is the file that `train --trace` writes, Chrome's events, so any trace that is there can be drawn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshcee.picture.series import figure
from meshcee.picture.values import Gantt, Lane
from meshcee.simulator import Timeline

__all__ = ["expected_gantt", "gantt_of"]

MOST_SPANS = 20_000
MOST_LANES = 256
# By what a trace calls it. A stage may do its gradients in one piece, or all of a micro-batch.
KINDS = {**dict.fromkeys("FBW"), "FB": None, "BW": None, "FBW": None, "apply": "O", "encode": "code", "decode": "code"}
COMPUTE = ("F", "B", "W", "O")

Spans = list[tuple[str, int, float, float]]


def gantt_of(events: Sequence[Mapping[str, Any]]) -> Gantt | None:
    """Of the middle one of the steps that were traced; None where there is nothing to see. Whatever is no span is passed over."""
    names: dict[int, str] = {}
    found: dict[tuple[int, int], Spans] = {}  # (step, process) -> spans
    for event in events[:MOST_SPANS]:
        if not isinstance(event, Mapping) or not isinstance(args := event.get("args"), Mapping):
            continue
        process = event.get("pid")
        if not isinstance(process, int):
            continue
        if event.get("name") == "process_name" and len(names) < 2 * MOST_LANES:
            names[process] = str(args.get("name", ""))[:128]
        start, length = figure(event.get("ts")), figure(event.get("dur"))
        of, step, micro = str(event.get("cat")), args.get("step"), args.get("micro")
        if (
            of not in KINDS
            or start is None
            or length is None
            or not isinstance(step, int)
            or not isinstance(micro, int)
        ):
            continue
        span = (KINDS[of] or of, micro, round(start / 1e6, 7), round((start + length) / 1e6, 7))
        found.setdefault((step, process), []).append(span)
    steps = sorted({step for step, process in found if names.get(process, "").endswith(": measured")})
    if not steps:
        return None
    step = steps[len(steps) // 2]
    lanes: dict[str, dict[str, Spans]] = {}
    for process, name in sorted(names.items()):
        label, _, which = name.rpartition(": ")
        if label:
            lanes.setdefault(label, {})[which] = found.get((step, process), [])
    measured = _zero(lane.get("measured", []) for lane in lanes.values())
    expected = _zero(lane.get("predicted", []) for lane in lanes.values())
    drawn = [
        Lane(label, _moved(of.get("predicted", []), expected), _moved(of.get("measured", []), measured))
        for label, of in lanes.items()
    ]
    return _gantt(step, drawn)


def _gantt(step: int, lanes: Sequence[Lane]) -> Gantt:
    ends = [span[3] for lane in lanes for span in (*lane.expected, *lane.measured)]
    return Gantt(step, max(ends, default=0.0), tuple(lanes))


def _zero(lanes: Iterable[Spans]) -> float:
    return min((start for lane in lanes for kind, _, start, _ in lane if kind.startswith("F")), default=0.0)


def _moved(spans: Spans, zero_s: float) -> tuple[tuple[str, int, float, float], ...]:
    return tuple((kind, micro, round(a - zero_s, 7), round(b - zero_s, 7)) for kind, micro, a, b in spans)


def expected_gantt(timeline: Timeline, names: Mapping[str, str]) -> Gantt | None:
    """The second step of a timeline that was recorded, from its first forward to the next step's."""
    begun = timeline.outcome.begun_s
    if len(begun) < 3:
        return None
    low, high = begun[1], begun[2]
    spans: list[Spans] = [[] for _ in timeline.instance.nodes]
    for span in timeline.outcome.spans:
        if span.kind in COMPUTE and span.start_s < high and span.end_s > low:
            node = timeline.instance.nodes[span.node]
            start, end = max(span.start_s, low) - low, min(span.end_s, high) - low
            micro = -1 if span.kind == "O" else span.micro % node.num_micro
            spans[span.node].append((span.kind, micro, round(start, 7), round(end, 7)))
    lanes = []
    for node, of in zip(timeline.instance.nodes, spans):
        name = re.sub(r"\s+", " ", names.get(node.peer) or node.peer)
        lanes.append(Lane(f"stage {node.stage}, {name}", expected=tuple(of)))
    return _gantt(1, lanes)
