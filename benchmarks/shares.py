"""Replicas in motion, in the WAN lab: one is slowed down, its link sags, or it is killed (needs root, 8 minutes).

The idea: real peers on an emulated network, no flags, as in `benchmarks/replicas.py`. While a job of several pipelines runs,
something happens to one of them at the end of a step, or in the middle of one. The owner's reports tell which pipeline computed
how many micro-batches of each step. After a change, shares should soon be within 5 % of the best whole numbers, without a new
plan. Losses are held against the plain loop's.

    python -m benchmarks.shares [--out FILE] [--only CASE ...] [--table]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import replicas_job, wan
from benchmarks.lab import why_not
from benchmarks.measure import row
from benchmarks.replicas import FOLDER, MTU, bed_of, load, plain_losses, shape
from benchmarks.rivals.launch import Run, Site, System, run
from meshcee.errors import MeshceeError, unwrap
from meshcee.events import Event
from peers.mesh_view import named

AT = 8  # steps before it happens, by when shares have settled
AFTER = 12  # steps of a slow device or link
FEW_S = 0.4  # after the end of a step, when a peer is killed: in the middle of the next one
SLOWER = 2.0
SAGS_TO = 1.5e6  # bytes per second, of lines inside a site
NEAR = 1.05  # of the best whole shares

CASES = {  # -> the job and the bed, and what happens
    "a device at half its speed": ("lopsided", "slow"),
    "a link inside a pipeline sags": ("thin line", "sag"),
    "a replica is killed": ("lopsided", "kill first"),
    "the replica at the end of the sums is killed": ("lopsided", "kill last"),
}


@dataclass
class Blow:
    """Makes it happen once, and reads what the owner's log says of the run."""

    what: str
    victim: str = ""
    struck_s: float = 0.0  # by the loop's clock
    events: list[dict[str, Any]] = field(default_factory=list)

    async def __call__(self, place: Site, run: Run) -> None:
        if len(run.ends_s) == AT:
            await self.strike(place, run)
        elif len(run.ends_s) == AT + AFTER:
            self.events = list(events_of(place.folder / "owner.log"))

    async def strike(self, place: Site, run: Run) -> None:
        pipelines = (run.plan or {})["pipelines"]
        pipeline = pipelines[{"slow": 0, "sag": -1, "kill first": 0, "kill last": -1}[self.what]]
        self.victim = run.names[pipeline["stages"][0]["members"][0]["peer"]]
        if self.what == "slow":
            new = place.folder / "pace"
            new.write_text(str(SLOWER))
            new.rename(place.pace_file(self.victim))
        elif self.what == "sag":
            link = next(k for k in place.lab.network.links if k.source == k.target == self.victim[0])
            await place.lab.set(replace(link, bandwidth_bytes_per_s=SAGS_TO))
        else:
            await asyncio.sleep(FEW_S)
            place.peers[self.victim].kill()
        self.struck_s = asyncio.get_running_loop().time()


def events_of(log: Path) -> Iterator[dict[str, Any]]:
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            yield json.loads(line)


async def measure(case: str, limit_s: float) -> dict[str, Any]:
    on, what = CASES[case]
    bed, blow = bed_of(on), Blow(what)
    system = System(
        case,
        "meshcee",
        tuple(bed.hosts),
        job=replicas_job.__file__,
        environment={"REPLICAS_CASE": on, "MESHCEE_LOG": "info"},
        endless=True,
    )
    result = await run(bed, system, AT + AFTER, limit_s, MTU, weather=blow)
    plans = [(done, json.loads(named(json.dumps(plan), result.names))) for done, plan in result.plans]
    moved = [e for e in blow.events if e["event"] == Event.SHARES]
    back = next((e for e in blow.events if e["event"] == Event.RUN_GOES_ON), {})
    return {
        "victim": blow.victim,
        "steps_s": [b - a for a, b in pairwise(result.ends_s)],  # of the second step and those after it
        "struck_s": blow.struck_s - result.ends_s[AT - 1],
        "losses": result.losses,
        "shares": result.shares,
        "moved": [{key: e[key] for key in ("step", "shares", "took_s")} for e in moved],
        "plans": plans,
        "recovery_s": back.get("seconds", {}),
        "steps_again": back.get("steps_again"),
        "load": os.getloadavg()[0],
    }


async def measure_all(options: argparse.Namespace, data: dict[str, Any]) -> None:
    for case in options.only or list(CASES):
        job = CASES[case][0]
        if job not in data["plain"]:
            data["plain"][job] = await asyncio.to_thread(plain_losses, job, AT + AFTER)
        if case not in data["rows"]:
            found = data["rows"][case] = await measure(case, options.limit)
            wan.save(options.out, data)
            told = " ".join(f"{s:.2f}" for s in found["steps_s"])
            print(f"{case}: {told}; {found['shares'][AT - 1]} then {found['shares'][AT:]}", file=sys.stderr, flush=True)


# -- what it shows -----------------------------------------------------------------------------------------------------


def best_of(
    stages: Sequence[int], counts: Sequence[int], took_s: Sequence[float]
) -> tuple[tuple[int, ...], list[float]]:
    """The best whole shares of pipelines that took so long with `counts`, and each one's seconds a micro-batch.

    As one with s stages takes (n + s - 1) paces for n micro-batches, whole numbers are tried around those that end together.
    """
    paces = [s / (n + deep - 1) for s, n, deep in zip(took_s, counts, stages)]
    total = sum(counts)
    together = (total + sum(stages) - len(stages)) / sum(1 / p for p in paces)
    around = [range(max(1, int(together / p - d) - 1), int(together / p - d) + 4) for p, d in zip(paces, stages)]
    found = [shares for shares in itertools.product(*around) if sum(shares) == total]
    return min(found, key=lambda shares: ends_s(stages, shares, paces)), paces


def ends_s(stages: Sequence[int], shares: Sequence[int], paces: Sequence[float]) -> float:
    return max(p * (n + deep - 1) for p, n, deep in zip(paces, shares, stages))


def settled(found: Mapping[str, Any]) -> tuple[int | None, float]:
    """Steps after the change until shares are near the best ones, and how far the last shares are from them."""
    stages = [len(p["stages"]) for p in found["plans"][0][1]["pipelines"]]
    shown = next(e for e in found["moved"] if e["step"] >= AT)  # by this step the owner knew
    best, paces = best_of(stages, found["shares"][shown["step"]], shown["took_s"])
    far = [ends_s(stages, shares, paces) / ends_s(stages, best, paces) for shares in found["shares"][AT:]]
    return next((k for k, ratio in enumerate(far) if ratio <= NEAR), None), far[-1]


def table(data: Mapping[str, Any]) -> str:
    head = [
        "case",
        "plan",
        "s a step before",
        "after",
        "shares before",
        "after",
        "steps until near the best",
        "then over the best",
    ]
    lines = [row(*head, "new plans", "losses"), row(*["---"] * (len(head) + 2))]
    killed = [
        row(
            "case",
            "plan",
            "s a step before",
            "after",
            "s from the kill to the end of the step",
            "steps again",
            "losses",
        )
    ]
    killed.append(row(*["---"] * 7))
    for case, found in data["rows"].items():
        plain = data["plain"][CASES[case][0]]
        before_s, after_s = (statistics.median(found["steps_s"][a:b]) for a, b in ((AT - 4, AT - 1), (-4, None)))
        cells = [case, shape(found["plans"][0][1]), f"{before_s:.2f}", f"{after_s:.2f}"]
        equal = "equal" if found["losses"] == plain[: len(found["losses"])] else "**other**"
        if CASES[case][1].startswith("kill"):
            end_s = found["steps_s"][AT - 1] - found["struck_s"]
            killed.append(row(*cells, f"{end_s:.2f}", str(found["steps_again"]), equal))
            continue
        steps, far = settled(found)
        shares = ["/".join(map(str, found["shares"][k])) for k in (AT - 1, -1)]
        lines.append(row(*cells, *shares, str(steps), f"{far:.3f}", str(len(found["plans"]) - 1), equal))
    return "\n".join([*lines, "", *killed])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shares", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER / "shares.json", help="default: %(default)s")
    parser.add_argument("--only", action="append", choices=CASES, default=[])
    parser.add_argument("--limit", type=float, default=300, help="seconds for a row (default: %(default)s)")
    parser.add_argument("--table", action="store_true", help="print the tables of what is kept, and measure nothing")
    options = parser.parse_args()
    data = load(options.out)
    if not options.table:
        if (why := why_not()) is not None:
            sys.exit(f"error: the lab cannot run here: {why}")
        try:
            asyncio.run(measure_all(options, data))
        except* MeshceeError as errors:
            sys.exit(f"error: {unwrap(errors)}")
    print(table(data))


if __name__ == "__main__":
    main()
