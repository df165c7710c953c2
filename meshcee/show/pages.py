"""Pages that show a plan or a captured model: one HTML file each, which loads nothing.

A plan: the cluster with its regions and stages, and the Gantt chart of one step. A model: its blocks in order, what each costs, and
how much crosses each cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from meshcee.figures import BlockCost, Cluster, Workload
from meshcee.plan import Plan
from meshcee.simulator import Timeline, simulate

__all__ = ["FIGURES", "amount", "capture_page", "plan_page", "size"]

COLOURS = {"F": "#4c78a8", "B": "#f58518", "W": "#54a24b", "O": "#b279a2"}
NAMES = {"F": "forward", "B": "input gradient", "W": "weight gradient", "O": "optimizer"}


def plan_page(plan: Plan, cluster: Cluster, workload: Workload, text: str, title: str) -> str:
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


# What is said of a block: heading, field of BlockCost, whether it counts bytes.
FIGURES = (
    ("FLOPs", "flops", False),
    ("parameters", "parameter_bytes", True),
    ("activations", "activation_bytes", True),
    ("crosses the cut", "boundary_bytes", True),
)
_COLOURS = {"flops": "#4c78a8", "parameter_bytes": "#54a24b", "activation_bytes": "#b279a2"}
_ROW, _BAR, _LEFT = 64, 260, 200


def amount(number: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit in ("", " k", " M", " G", " T"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} P"


def size(count: float) -> str:
    """2048 -> "2 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def capture_page(costs: Sequence[BlockCost], title: str) -> str:
    """The whole document."""
    legend = " ".join(
        f'<span style="color:{_COLOURS[field]}">&#9632;</span> {heading}'
        for heading, field, _ in FIGURES
        if field in _COLOURS
    )
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{escape(title)}</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:2em;max-width:1100px}svg{width:100%;height:auto}"
        "text{font:11px system-ui,sans-serif}td,th{padding:2px 12px;text-align:right}"
        "td:nth-child(2),th:nth-child(2){text-align:left}</style>"
        f"<h1>{escape(title)}</h1><p>{legend}; dashed lines are cuts, with what crosses them per sample.</p>"
        f"{_drawing(costs)}<h2>Figures per sample</h2>{_table(costs)}</html>\n"
    )


def _drawing(costs: Sequence[BlockCost]) -> str:
    width, height = _LEFT + 3 * (_BAR + 20), _ROW * len(costs)
    most = {field: max(getattr(c, field) for c in costs) or 1 for field in _COLOURS}
    shapes = []
    for i, cost in enumerate(costs):
        top = _ROW * i
        name = cost.name if len(cost.name) <= 32 else cost.name[:31] + "…"
        shapes.append(
            f'<g><title>{escape(cost.name)}</title><rect x="2" y="{top + 8}" width="{width - 4}" height="{_ROW - 20}" '
            f'rx="6" fill="#f6f6f6" stroke="#999"/><text x="12" y="{top + 34}">{i} {escape(name)}</text></g>'
        )
        for k, (_, field, in_bytes) in enumerate(f for f in FIGURES if f[1] in _COLOURS):
            value = getattr(cost, field)
            x = _LEFT + k * (_BAR + 20)
            shapes.append(
                f'<rect x="{x}" y="{top + 16}" width="{_BAR * value / most[field]:.1f}" height="12" '
                f'fill="{_COLOURS[field]}"/>'
                f'<text x="{x}" y="{top + 42}">{size(value) if in_bytes else amount(value)}</text>'
            )
        if i + 1 < len(costs):
            y = top + _ROW - 2
            shapes.append(
                f'<line x1="0" y1="{y}" x2="{width}" y2="{y}" stroke="#e45756" stroke-dasharray="5 4"/>'
                f'<text x="{width - 8}" y="{y - 3}" text-anchor="end" fill="#e45756">{size(cost.boundary_bytes)}</text>'
            )
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(shapes)}</svg>'


def _table(costs: Sequence[BlockCost]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading, _, _ in FIGURES)
    rows = []
    for i, cost in enumerate(costs):
        figures = "".join(
            f"<td>{size(getattr(cost, field)) if in_bytes else amount(getattr(cost, field))}</td>"
            for _, field, in_bytes in FIGURES
        )
        rows.append(f"<tr><td>{i}</td><td>{escape(cost.name)}</td>{figures}</tr>")
    return f"<table><tr><th></th><th>block</th>{head}</tr>{''.join(rows)}</table>"
