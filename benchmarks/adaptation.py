"""Adaptation in the WAN lab: a link drops to a quarter, recovers, flaps; and what replication costs (needs root).

The idea: real peers on an emulated network (`benchmarks/rehearsal.py` describes it), whose link is changed at given steps. A run
with the adapter is held against the same run without, and against fresh runs that start under the changed network. Rows are kept
in a JSON file, so a run that was stopped goes on; table and picture are drawn from the file.

    python -m benchmarks.adaptation [--out FILE] [--only drop|flaps|replication ...] [--table] [--svg FILE]    about 20 minutes
    python -m benchmarks.adaptation --repetitions 3       longer: every row three times
    python -m benchmarks.rehearsal                        what to expect, by the simulator; seconds, no root
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import adaptation_job, wan
from benchmarks.lab import why_not
from benchmarks.measure import machine, row
from benchmarks.rehearsal import POOR, REGIONS, SPEEDS, flaps, scenario
from benchmarks.rivals.launch import WARM, Bed, Run, Site, System, Weather, run
from meshcee.errors import MeshceeError, unwrap
from peers.mesh_view import named

FOLDER = Path(__file__).resolve().parent
HORIZON = 400  # steps that the job says it has, as most jobs are longer than what is watched of them
LATEST = 15  # steps after which throughput is to be back
WINDOW = 15  # steps that are watched then
DROPS, RECOVERS, ENDS = 15, 70, 105  # steps
FLAPS = {3: 54, 6: 54, 12: 60, 25: 75}  # period -> steps
MTU = 4000
REPLICATED_STEPS = 8


@dataclass(frozen=True)
class Row:
    """One kind of run: the link's share of its bandwidth step by step, whose plan it begins with ("": its own), and whether
    the adapter may leave that."""

    name: str
    factors: tuple[float, ...]
    plan: str = ""
    adapts: bool = False
    part: str = "drop"


def rows() -> list[Row]:
    found = [
        Row("fresh, good", (1.0,) * 14),
        Row("fresh, poor", (POOR,) * 14),
        Row("good plan, drop", (1.0,) * 6 + (POOR,) * 10, plan="fresh, good"),
        Row("poor plan, good", (1.0,) * 10, plan="fresh, poor"),
        Row("adapter", (1.0,) * DROPS + (POOR,) * (RECOVERS - DROPS) + (1.0,) * (ENDS - RECOVERS), "fresh, good", True),
    ]
    return found + [
        Row(f"flaps every {every}", tuple(flaps(every, steps)), "fresh, good", True, "flaps")
        for every, steps in FLAPS.items()
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


def weather_of(factors: Sequence[float]) -> Weather:
    """The lab begins with the first; the next step's holds from the end of the one before."""

    async def change(place: Site, run: Run) -> None:
        lab, done = place.lab, len(run.ends_s)
        if done < len(factors) and factors[done] != factors[done - 1]:
            for link in lab.network.links:
                if link.source != link.target and link.bandwidth_bytes_per_s is not None:
                    rate = link.bandwidth_bytes_per_s * factors[done] / factors[0]
                    await lab.set(replace(link, bandwidth_bytes_per_s=rate))

    return change


async def measure(wanted: Row, data: dict[str, Any], limit_s: float) -> dict[str, Any]:
    flags: tuple[str, ...] = ()
    with tempfile.TemporaryDirectory(prefix="adaptation-") as folder:
        if wanted.plan:
            flags = ("--plan", write_plan(Path(folder), data["rows"][wanted.plan][0]["plans"][0][1]))
        system = System(
            wanted.name,
            "meshcee",
            tuple(REGIONS),
            flags=flags,
            job=adaptation_job.__file__,
            environment={"ADAPT_STEPS": str(HORIZON), "ADAPT": str(int(wanted.adapts))},
            endless=True,
        )
        place = Bed(scenario(wanted.factors[0]), SPEEDS, [])
        result = await run(place, system, len(wanted.factors), limit_s, MTU, weather=weather_of(wanted.factors))
    return figures(wanted, result)


def write_plan(folder: Path, plan: Mapping[str, Any]) -> str:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return str(path)


def figures(wanted: Row, result: Run) -> dict[str, Any]:
    """What is kept of a run; plans with hosts' names."""
    return {
        "factors": wanted.factors,
        "steps_s": [b - a for a, b in pairwise(result.ends_s)],  # of the second step and those after it
        "losses": result.losses,
        "plans": [(done, json.loads(named(json.dumps(plan), result.names))) for done, plan in result.plans],
        "load": os.getloadavg()[0],
    }


async def measure_all(options: argparse.Namespace, data: dict[str, Any]) -> None:
    parts = options.only or ["drop", "flaps", "replication"]
    for wanted in rows():
        if wanted.part not in parts:
            continue
        kept = data["rows"].setdefault(wanted.name, [])
        while len(kept) < options.repetitions:
            found = await measure(wanted, data, options.limit)
            kept.append(found)
            wan.save(options.out, data)
            told = f"{statistics.median(found['steps_s'][WARM - 1 :]):.2f} s a step, {len(found['plans']) - 1} changes"
            print(f"{wanted.name}: {told}", file=sys.stderr, flush=True)
    if "replication" in parts:
        await replication(options, data)


async def replication(options: argparse.Namespace, data: dict[str, Any]) -> None:
    """cee-small in the lab, by one plan, with checkpoints and copies as they are by default and without, in turns."""
    flops, _ = await asyncio.to_thread(wan.layer_flops)
    place = wan.bed_of("cee-small", flops, options.slower)
    kept = data["rows"].setdefault("replication", [])
    with tempfile.TemporaryDirectory(prefix="replication-") as folder:
        while len(kept) < 2 * (options.repetitions + 1):
            off = len(kept) % 2 == 1
            flags = ("--plan", write_plan(Path(folder), kept[0]["plan"])) if kept else ()
            system = System(
                "replication",
                "meshcee",
                tuple(place.hosts),
                flags=flags,
                module="benchmarks.uncopied" if off else "meshcee",
                environment={"WAN_STEPS": str(HORIZON)},
                endless=True,
            )
            result = await run(place, system, REPLICATED_STEPS + WARM, options.limit, MTU)
            assert result.plan is not None
            plan = json.loads(named(json.dumps(result.plan), result.names))
            steps_s = [b - a for a, b in pairwise(result.ends_s[WARM - 1 :])]
            kept.append({"replicates": not off, "plan": plan, "steps_s": steps_s, "load": os.getloadavg()[0]})
            wan.save(options.out, data)
            told = "without" if off else "with"
            print(f"{told} copies: {statistics.mean(steps_s):.2f} s a step", file=sys.stderr, flush=True)


# -- what it says ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fixed:
    """Seconds of a step under plans that stay: the one made for the good network, and the one made for the poor."""

    good_plan: Mapping[float, float]
    poor_plan: Mapping[float, float]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Fixed:
        def step_s(name: str, factor: float) -> float:
            return statistics.median(s for found in data["rows"][name] for s in steady(found, factor))

        return cls(
            {1.0: step_s("fresh, good", 1.0), POOR: step_s("good plan, drop", POOR)},
            {1.0: step_s("poor plan, good", 1.0), POOR: step_s("fresh, poor", POOR)},
        )

    def hindsight_s(self, factors: Sequence[float]) -> float:
        """All of these steps under the better plan."""
        return min(sum(plan[factor] for factor in factors) for plan in (self.good_plan, self.poor_plan))


def steady(found: Mapping[str, Any], factor: float) -> list[float]:
    """Seconds of the steps under this network, without those that warm up or come right after a change of it."""
    factors = found["factors"]
    return [
        seconds
        for step, seconds in enumerate(found["steps_s"], 1)
        if step > WARM and factors[step] == factors[step - 1] == factors[step - 2] == factor
    ]


def changes(found: Mapping[str, Any]) -> list[int]:
    """The steps before which another plan began."""
    return [done for done, _ in found["plans"][1:]]


def most_in(steps: Sequence[int], width: int) -> int:
    """The most changes that any so many steps in a row have."""
    return max((sum(first <= step < first + width for step in steps) for first in steps), default=0)


def after(found: Mapping[str, Any], change: int) -> tuple[float, float, int | None]:
    """(a step before the network changed, a step LATEST steps later, steps until the plan changed)

    Means: throughput is asked for, and steps may be short and long in turns.
    """
    steps_s = found["steps_s"]
    before = statistics.fmean(steps_s[max(WARM, change - 10) - 1 : change - 1])
    later = statistics.fmean(steps_s[change + LATEST - 1 : change + LATEST + WINDOW - 1])
    switches = [step - change for step in changes(found) if step >= change]
    return before, later, switches[0] if switches else None


def table(data: Mapping[str, Any]) -> str:
    lines: list[str] = []
    every = data["rows"]
    if all(every.get(r.name) for r in rows() if r.part == "drop"):
        fixed = Fixed.of(data)
        lines += _drop_table(every["adapter"], fixed)
        lines += _flap_table(every, fixed)
    pairs = [r["steps_s"] for r in every.get("replication", ())]
    if len(pairs) >= 2:
        ratios = [sum(off) / sum(on) for on, off in zip(pairs[::2], pairs[1::2])]
        lines += ["", row("cee-small", "with checkpoints and copies, s a step", "without", "throughput kept")]
        lines.append(row(*["---"] * 4))
        for k, (on, off) in enumerate(zip(pairs[::2], pairs[1::2]), 1):
            lines.append(
                row(f"pair {k}", f"{statistics.mean(on):.2f}", f"{statistics.mean(off):.2f}", f"{ratios[k - 1]:.3f}")
            )
        lines.append(row("median", "", "", f"{statistics.median(ratios):.3f}"))
    return "\n".join(lines)


def _drop_table(found: Sequence[Mapping[str, Any]], fixed: Fixed) -> list[str]:
    lines = [
        row(
            "the link",
            "before, s a step",
            "adapter off",
            f"adapter, after {LATEST} steps",
            "fresh run",
            "throughput of the fresh run",
            "off / adapter",
            "steps until the switch",
        ),
        row(*["---"] * 8),
    ]
    ends: tuple[tuple[str, int, float, float], ...] = (
        ("drops to a quarter", DROPS, fixed.good_plan[POOR], fixed.poor_plan[POOR]),
        ("recovers", RECOVERS, fixed.good_plan[1.0], fixed.good_plan[1.0]),
    )
    for name, change, off_s, fresh_s in ends:
        judged = [after(one, change) for one in found]
        before, later = (statistics.median(j[k] for j in judged) for k in (0, 1))
        switches = ", ".join("none" if j[2] is None else str(j[2]) for j in judged)
        ratios = (f"{fresh_s / later:.2f}", f"{off_s / later:.2f}")
        lines.append(row(name, *(f"{s:.2f}" for s in (before, off_s, later, fresh_s)), *ratios, switches))
    return lines


def _flap_table(every: Mapping[str, Any], fixed: Fixed) -> list[str]:
    lines = [
        "",
        row(
            "flaps every",
            "steps",
            "changes before",
            "most in 50 steps",
            "s in all",
            "best plan in hindsight",
            "ratio",
            "off / adapter",
        ),
        row(*["---"] * 8),
    ]
    for wanted in rows():
        for found in every.get(wanted.name, ()) if wanted.part == "flaps" else ():
            counted = found["factors"][WARM:]
            total_s, best_s = sum(found["steps_s"][WARM - 1 :]), fixed.hindsight_s(counted)
            off_s = sum(fixed.good_plan[factor] for factor in counted)
            steps = changes(found)
            lines.append(
                row(
                    wanted.name.removeprefix("flaps every "),
                    len(counted),
                    ", ".join(map(str, steps)) or "none",
                    most_in(steps, 50),
                    *(f"{s:.1f}" for s in (total_s, best_s)),
                    *(f"{s:.2f}" for s in (total_s / best_s, off_s / total_s)),
                )
            )
    return lines


# -- the picture -------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, GAP = 760, 90, 60, 40


def svg(data: Mapping[str, Any]) -> str:
    """Seconds of each step, a panel a run: grey where the link has a quarter, a line where another plan begins."""
    shown = [(r.name, data["rows"][r.name][0]) for r in rows() if r.adapts and data["rows"].get(r.name)]
    fixed = Fixed.of(data)
    highest = max(max(found["steps_s"][WARM - 1 :]) for _, found in shown)
    tall = 30 + len(shown) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{tall}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{LEFT + WIDTH + 20}" height="{tall}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Seconds a step; grey: the link has a quarter of its bandwidth; red: '
        "another plan begins; dashed: without the adapter</text>",
    ]
    for k, (name, found) in enumerate(shown):
        parts += _panel(name, found, fixed.good_plan, 40 + k * (HEIGHT + GAP), highest)
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, found: Mapping[str, Any], off: Mapping[float, float], top: int, highest: float) -> list[str]:
    factors, count = found["factors"], len(found["factors"])

    def x(step: float) -> float:
        return LEFT + WIDTH * step / count

    def y(seconds: float) -> float:
        return top + HEIGHT * (1 - seconds / highest)

    def line(points: Sequence[tuple[float, float]], style: str) -> str:
        return f'<polyline points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}" fill="none" {style}/>'

    parts = [
        f'<rect x="{x(k):.1f}" y="{top}" width="{WIDTH / count:.2f}" height="{HEIGHT}" fill="#e4e4e4"/>'
        for k, factor in enumerate(factors)
        if factor < 1
    ]
    parts += [f'<rect x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    parts += [f'<text x="{LEFT}" y="{top - 5}">{name}</text>']
    for seconds in (0.0, highest):
        parts.append(f'<text x="{LEFT - 6}" y="{y(seconds) + 4:.1f}" text-anchor="end">{seconds:.1f}</text>')
    for step in range(0, count + 1, 10):
        parts.append(f'<text x="{x(step):.1f}" y="{top + HEIGHT + 14}" text-anchor="middle">{step}</text>')
    parts.append(line([(x(k + 0.5), y(off[f])) for k, f in enumerate(factors)], 'stroke="#888" stroke-dasharray="3 3"'))
    steps = enumerate(found["steps_s"][WARM - 1 :], WARM)
    parts.append(line([(x(k + 0.5), y(s)) for k, s in steps], 'stroke="#1f77b4" stroke-width="1.5"'))
    for step in changes(found):
        parts.append(line([(x(step), top), (x(step), top + HEIGHT)], 'stroke="#d62728"'))
    return parts


def load(path: Path) -> dict[str, Any]:
    if path.exists():
        data: dict[str, Any] = json.loads(path.read_text())
        return data
    return {"machine": machine(), "rows": {}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adaptation", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "adaptation.json", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=("drop", "flaps", "replication"), default=[])
    parser.add_argument("--repetitions", type=int, default=1, help="of every row; of replication one pair more")
    parser.add_argument("--slower", type=float, default=1.0, help="slow motion, for replication on a busier machine")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds that a run may take, start included")
    parser.add_argument("--table", action="store_true", help="measure nothing, draw the table")
    parser.add_argument("--svg", type=Path, help="draw the picture too")
    options = parser.parse_args()
    data = load(options.out)
    if not options.table:
        if reason := why_not():
            sys.exit(f"the benchmark needs the WAN lab, which cannot run here: {reason}")
        try:
            asyncio.run(measure_all(options, data))
        except (MeshceeError, BaseExceptionGroup) as error:
            sys.exit(str(unwrap(error)))
    print(table(data))
    if options.svg is not None:
        options.svg.write_text(svg(data))


if __name__ == "__main__":
    main()
