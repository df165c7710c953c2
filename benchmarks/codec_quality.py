"""What codecs cost in loss: a small character GPT for 1,000 steps with each, validated on text that it does not train on.

The idea: the same job, plan and seeds on four stages in one process; only what crosses the three boundaries differs, so
the curves differ by the codecs alone (and by chance, as any change of a rounding does: see --seeds).

`python benchmarks/codec_quality.py --out quality.json [--svg docs/codec_quality.svg]` is resumable: it runs what the file
does not hold yet. "(nearest)" rounds gradients to the nearest number instead of by chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measure import machine, row

import meshcee
import peers.member.coding
from peers.cli.session import load_job

__all__ = ["run", "svg"]

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt.py"
STEPS, EVERY, STAGES, WIDTH = 1000, 50, 4, 64
VALIDATION = 256  # windows of text
CODECS = ("none", "int4", "int8", "bf16", "int4 (nearest)")
COLOURS = ("#222222", "#d62728", "#2ca02c", "#1f77b4", "#ff9896")


class Part:
    """Samples [first, end) of a data set."""

    def __init__(self, data: Any, first: int, end: int) -> None:
        self.data, self.first, self.end = data, first, end

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, i: int) -> Any:
        return self.data[self.first + i]


async def run(codec: str, seed: int, steps: int) -> dict[str, Any]:
    """Train; the validation loss by step, bytes saved and errors as the coders measured them."""
    job = load_job(EXAMPLE)
    name, _, nearest = codec.partition(" ")
    count = len(job.data)
    torch.manual_seed(seed)
    job = replace(
        job,
        model=type(job.model)(width=WIDTH),
        micro_batch_size=8,
        data=Part(job.data, 0, count - VALIDATION),
        eval_data=Part(job.data, count - VALIDATION, count),
        eval_every=min(EVERY, steps),
        steps=steps,
        schedule=meshcee.Schedule("OneCycleLR", max_lr=3e-3, total_steps=steps, cycle_momentum=False),
        codec=name,
        seed=seed,
    )
    chance = peers.member.coding.noise_seed
    if nearest:
        peers.member.coding.noise_seed = lambda *where: None  # type: ignore[assignment]
    validation: list[tuple[int, float]] = []
    errors: dict[str, list[float]] = {}
    sizes = [0, 0]
    started_s = time.perf_counter()
    try:
        async with meshcee.join(local=STAGES) as mesh:
            async for report in mesh.train(job, stages=STAGES):
                for boundary, measured in report.codecs.items():
                    errors.setdefault(boundary, []).append(measured.error)
                    sizes[0] += measured.raw_bytes
                    sizes[1] += measured.wire_bytes
                    if measured.codec != name:
                        print(f"{codec}: {boundary} went to {measured.codec}", file=sys.stderr)
                if report.metrics:
                    validation.append((report.step + 1, report.metrics["loss"]))
                    print(f"{codec}, seed {seed}: {validation[-1]}", file=sys.stderr, flush=True)
            stages = len(mesh.result.plan.pipelines[0].stages) if mesh.result.plan else 0
    finally:
        peers.member.coding.noise_seed = chance
    return {
        "codec": codec,
        "seed": seed,
        "steps": steps,
        "stages": stages,
        "validation": validation,
        "ratio": sizes[0] / sizes[1] if sizes[1] else 1.0,
        "error": {boundary: statistics.median(found) for boundary, found in errors.items()},
        "largest_error": max((max(found) for found in errors.values()), default=0.0),
        "seconds": time.perf_counter() - started_s,
    }


def summary(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per codec: the mean of the last validation loss over seeds, and its distance from `none` seed by seed."""
    last = {(r["codec"], r["seed"]): r["validation"][-1][1] for r in runs}
    found = []
    for codec in CODECS:
        mine = {seed: loss for (name, seed), loss in last.items() if name == codec}
        if not mine:
            continue
        worse = [loss / last["none", seed] - 1 for seed, loss in mine.items() if ("none", seed) in last]
        found.append(
            {
                "codec": codec,
                "seeds": len(mine),
                "loss": statistics.mean(mine.values()),
                "worse": statistics.mean(worse) if worse else None,
                "worse_range": [min(worse), max(worse)] if worse else None,
                "ratio": statistics.mean(r["ratio"] for r in runs if r["codec"] == codec),
                "largest_error": max(r["largest_error"] for r in runs if r["codec"] == codec),
            }
        )
    return found


def svg(runs: list[dict[str, Any]]) -> str:
    """The curves of the first seed as a picture, the last half enlarged on the right."""
    curves = {r["codec"]: r["validation"] for r in runs if r["seed"] == min(r["seed"] for r in runs)}
    steps = max(step for curve in curves.values() for step, _ in curve)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="360" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="360" fill="white"/>',
        '<text x="50" y="20" font-size="14">Validation loss of a character GPT, four stages, by codec at the boundaries'
        "</text>",
    ]
    parts += _panel(curves, 50, 0, steps)
    parts += _panel(curves, 480, steps // 2, steps)
    for i, codec in enumerate(c for c in CODECS if c in curves):
        x = 60 + 150 * i
        colour = COLOURS[CODECS.index(codec)]
        parts.append(f'<line x1="{x}" y1="345" x2="{x + 25}" y2="345" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="349">{codec} {curves[codec][-1][1]:.4f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(curves: dict[str, list[tuple[int, float]]], left: int, first: int, last: int) -> list[str]:
    top, width, height = 40, 340, 260
    shown = {c: [(s, v) for s, v in curve if s >= first] for c, curve in curves.items()}
    values = [v for curve in shown.values() for _, v in curve]
    low, high = min(values), max(values)
    low, high = low - 0.03 * (high - low), high + 0.03 * (high - low)

    def at(step: int, value: float) -> str:
        x = left + width * (step - first) / (last - first)
        return f"{x:.1f},{top + height * (high - value) / (high - low):.1f}"

    parts = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for k in range(5):
        value, step = low + (high - low) * k / 4, first + (last - first) * k // 4
        y, x = top + height * (1 - k / 4), left + width * k / 4
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        parts.append(f'<text x="{x:.1f}" y="{top + height + 18}" text-anchor="middle">{step}</text>')
    for codec, curve in shown.items():
        points = " ".join(at(step, value) for step, value in curve)
        colour = COLOURS[CODECS.index(codec)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON; runs that it holds are not repeated")
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data: dict[str, Any] = {"machine": machine(), "runs": []}
    if options.out.exists():
        data["runs"] = json.loads(options.out.read_text())["runs"]
    for seed in range(options.seeds):
        for codec in CODECS:
            if any((r["codec"], r["seed"], r["steps"]) == (codec, seed, options.steps) for r in data["runs"]):
                continue
            data["runs"].append(asyncio.run(run(codec, seed, options.steps)))
            options.out.write_text(json.dumps(data))
    runs = [r for r in data["runs"] if r["steps"] == options.steps]
    data["summary"] = summary(runs)
    options.out.write_text(json.dumps(data))
    if options.svg is not None:
        options.svg.write_text(svg(runs))
    print(json.dumps({"machine": data["machine"], "summary": data["summary"]}, indent=2))
    print(row("codec", "bytes saved", "largest error", f"loss after {options.steps} steps", "against none"))
    print(row(*["---"] * 5))
    for found in data["summary"]:
        worse = "" if found["worse"] is None else f"{found['worse']:+.2%}"
        print(
            row(
                found["codec"], f"{found['ratio']:.2f}x", f"{found['largest_error']:.4f}", f"{found['loss']:.4f}", worse
            )
        )


if __name__ == "__main__":
    main()
