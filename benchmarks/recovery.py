"""From kill -9 of a member to the next new step, beside a restart of the owner from its newest checkpoint.

`python -m benchmarks.recovery [--rounds 10] [--restarts 3]` prints JSON; a round takes about ten seconds on a quiet machine.
Real processes on loopback, the demo's GPT over four peers; the victim is the next stage's holder in each round, and a new
peer takes its place. Steps that are computed again are within the time, as no report is told of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arena import Arena
from benchmarks.measure import machine

PEERS = 4


async def measure(rounds: int, restarts: int, seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    recovered, restarted = [], []
    with tempfile.TemporaryDirectory(prefix="meshcee-recovery-") as folder:
        async with Arena(Path(folder), steps=1_000_000, stages=PEERS) as arena:
            await arena.children.start_peers(PEERS, threads=1)
            await arena.train()
            for number in range(rounds):
                await moments(arena, draw)
                victim = arena.members()[number % len(arena.members())]
                recovered.append(await until_new_step(arena, partial(arena.kill, victim)))
                print(f"{victim} killed: {recovered[-1]:.2f} s", file=sys.stderr)
                await arena.join(f"new-{number}")
            recoveries = arena.recoveries()
            for _ in range(restarts):
                await moments(arena, draw)

                async def restart() -> None:
                    arena.kill_owner()
                    await arena.train("--resume", "last")

                restarted.append(await until_new_step(arena, restart))
                print(f"restarted: {restarted[-1]:.2f} s", file=sys.stderr)
    found = {"recovered": summary(recovered), "course": course(recoveries), "restarted": summary(restarted)}
    return {"machine": machine(), "peers": PEERS, **found}


async def moments(arena: Arena, draw: random.Random) -> None:
    """Some steps, so that a blow may fall anywhere between two snapshots."""
    wanted = arena.steps + draw.randrange(6, 30)
    await arena.until(lambda: arena.steps >= wanted)


async def until_new_step(arena: Arena, blow: Callable[[], Awaitable[None]]) -> float:
    """Seconds from the blow to the first report behind the next plan."""
    seen = len(arena.events)
    struck_s = time.monotonic()
    await blow()

    def reported() -> list[float]:
        new = arena.events[seen:]
        at = next((i for i, (_, event) in enumerate(new) if "plan" in event), len(new))
        return [when for when, event in new[at:] if "report" in event]

    await arena.until(lambda: bool(reported()))
    return reported()[0] - struck_s


def course(recoveries: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of what the owner's log says: seconds from when the loss was noticed to each moment."""
    moments = list(dict.fromkeys(m for r in recoveries for m in r["seconds"]))
    found = {m: round(statistics.median(r["seconds"][m] for r in recoveries if m in r["seconds"]), 2) for m in moments}
    again = [r["steps_again"] for r in recoveries]
    return {"median_s": found, "steps_again": again}


def summary(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"rounds": 0}
    return {
        "rounds": len(seconds),
        "median_s": round(statistics.median(seconds), 2),
        "worst_s": round(max(seconds), 2),
        "seconds": [round(s, 2) for s in seconds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.rounds, options.restarts, options.seed)), indent=1))


if __name__ == "__main__":
    main()
