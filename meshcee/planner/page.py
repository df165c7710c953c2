"""A plan as one HTML page: the cluster with its regions and stages, and the Gantt chart of one step.

The idea: no script, no outside file; two SVG drawings and the text of `explain`.
"""

from __future__ import annotations

import math
from html import escape

from meshcee.plan import Plan
from meshcee.profile import Cluster
from meshcee.simulator import Timeline, simulate
from meshcee.workload import Workload

__all__ = ["page"]

COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "O": "#b279a2"}
NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradient", "O": "optimizer"}


def page(plan: Plan, cluster: Cluster, workload: Workload, text: str, title: str) -> str:
    """The whole document."""
    timeline = simulate(plan, cluster, workload, steps=3, record=True)
    legend = " ".join(f'<span style="color:{c}">&#9632;</span> {NAMES[k]}' for k, c in COLOURS.items())
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:2em;max-width:1240px}svg{width:100%;height:auto}"
        "pre{white-space:pre-wrap}text{font:11px system-ui,sans-serif}</style>"
        f"<h1>{escape(title)}</h1><h2>Cluster</h2>{_cluster(plan, cluster)}"
        f"<h2>One step</h2><p>{legend}</p>{_gantt(timeline)}<h2>Plan</h2><pre>{escape(text)}</pre></html>\n"
    )


def _cluster(plan: Plan, cluster: Cluster) -> str:
    stage_of = {
        peer: plan.label(p, j)
        for p, pipeline in enumerate(plan.pipelines)
        for j, stage in enumerate(pipeline.stages)
        for peer in stage.peers
    }
    regions = cluster.regions
    width, height, shapes = 1200, 520, []
    place: dict[str, tuple[float, float]] = {}
    for i, (region, peers) in enumerate(regions.items()):
        angle = 2 * math.pi * i / len(regions) - math.pi / 2
        reach = 0 if len(regions) == 1 else 1
        x, y = width / 2 + reach * 420 * math.cos(angle), height / 2 + reach * 180 * math.sin(angle)
        shapes.append(f'<ellipse cx="{x:.0f}" cy="{y:.0f}" rx="120" ry="70" fill="#f2f2f2" stroke="#999"/>')
        shapes.append(f'<text x="{x:.0f}" y="{y - 76:.0f}" text-anchor="middle">{escape(region)}</text>')
        columns = math.ceil(math.sqrt(2 * len(peers)))
        for k, peer in enumerate(peers):
            column, row = k % columns, k // columns
            rows = math.ceil(len(peers) / columns)
            place[peer] = (
                x + (column - (columns - 1) / 2) * 200 / max(columns, 3),
                y + (row - (rows - 1) / 2) * 100 / max(rows, 3),
            )
    for pipeline in plan.pipelines:
        for a, b in zip(pipeline.stages, pipeline.stages[1:]):
            for pa in a.peers:
                for pb in b.peers:
                    (x1, y1), (x2, y2) = place[pa], place[pb]
                    shapes.append(
                        f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#666" stroke-opacity="0.6"/>'
                    )
    for peer, (x, y) in place.items():
        used = peer in stage_of
        shapes.append(
            f'<g><title>{escape(peer)}</title><circle cx="{x:.0f}" cy="{y:.0f}" r="11" '
            f'fill="{"#4c78a8" if used else "#ffffff"}" stroke="#333"/>'
            f'<text x="{x:.0f}" y="{y + 4:.0f}" text-anchor="middle" fill="{"#fff" if used else "#999"}">'
            f"{stage_of.get(peer, '&#215;')}</text></g>"
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(shapes)}</svg>'


def _gantt(timeline: Timeline) -> str:
    """From the first F of the second step to the first F of the third."""
    begun = timeline.outcome.begun_s
    low, high = begun[1], begun[2]
    nodes = timeline.instance.nodes
    left, width, row = 190, 1000, 22
    scale = width / (high - low)
    shapes = [f'<text x="0" y="{(n + 0.7) * row:.0f}">{escape(node.peer)}</text>' for n, node in enumerate(nodes)]
    for span in timeline.outcome.spans:
        if span.kind not in COLOURS or span.end_s <= low or span.start_s >= high:
            continue
        start, end = max(span.start_s, low), min(span.end_s, high)
        shapes.append(
            f'<rect x="{left + (start - low) * scale:.2f}" y="{span.node * row + 2}" '
            f'width="{max((end - start) * scale, 0.2):.2f}" height="{row - 4}" fill="{COLOURS[span.kind]}">'
            f"<title>{span.kind}{span.micro} step {span.step + 1}</title></rect>"
        )
    bottom = len(nodes) * row
    for k in range(11):
        x = left + width * k / 10
        shapes.append(f'<line x1="{x:.0f}" y1="0" x2="{x:.0f}" y2="{bottom}" stroke="#ccc" stroke-width="0.5"/>')
        shapes.append(f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{(high - low) * k / 10:.3g} s</text>')
    return f'<svg viewBox="0 0 {left + width + 20} {bottom + 20}" role="img">{"".join(shapes)}</svg>'
