"""The page that shows a captured model: one HTML file, which loads nothing.

Its blocks in order, what each costs, and how much crosses each cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshcee.figures import BlockCost
from meshcee.figures.amounts import amount, size

__all__ = ["FIGURES", "capture_page"]

# What is said of a block: heading, field of BlockCost, whether it counts bytes.
FIGURES = (
    ("FLOPs", "flops", False),
    ("parameters", "parameter_bytes", True),
    ("activations", "activation_bytes", True),
    ("crosses the cut", "boundary_bytes", True),
)
_COLOURS = {"flops": "#4c78a8", "parameter_bytes": "#54a24b", "activation_bytes": "#b279a2"}
_ROW, _BAR, _LEFT = 64, 260, 200


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
