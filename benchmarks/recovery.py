"""From kill -9 of a member to the next new step, beside a restart of the owner from its newest checkpoint.

`python -m benchmarks.recovery [--rounds 10] [--restarts 3]` or `[--blows 5]` prints JSON; a round takes about ten seconds on a
quiet machine.
Real processes on loopback, the demo's GPT over four peers; the victim is the next stage's holder in each round, and a new
peer takes its place. Steps that are computed again are within the time, as no report is told of them. With `--blows` so many
rounds are played with each kind of blow: the member is killed, ended politely (stop), paused for longer than a silent peer is
given, loses its p2pd, or, where the WAN lab can run (it needs root), is cut off from all others. "detection" is from the blow until
the owner noticed, by its log; "recovery" from then to the new step.
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
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.arena import OWNER, Arena
from benchmarks.lab import Lab, why_not
from benchmarks.measure import machine
from benchmarks.wires import network_of

PEERS = 4
KINDS = ("kill", "stop", "pause", "kill p2pd", "cut")
UNNOTICED_S = 60.0  # steps that go on for so long miss nobody
AWAY_S = 30.0  # that a pause or a cut lasts: longer than silence is borne


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


async def by_kind(rounds: int, seed: int) -> dict[str, Any]:
    """Detection and recovery for each kind of blow."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        async with AsyncExitStack() as stack:
            lab = None
            if kind == "cut":
                if reason := await asyncio.to_thread(why_not):
                    found[kind] = {"left out": reason}
                    continue
                hosts = [*(f"peer-{i}" for i in range(PEERS)), *(f"new-{i}" for i in range(rounds)), OWNER]
                lab = await stack.enter_async_context(Lab(network_of(hosts)))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshcee-recovery-"))
            arena = await stack.enter_async_context(Arena(Path(folder), 1_000_000, PEERS, lab))
            await arena.children.start_peers(PEERS, threads=1)
            await arena.train()
            found[kind] = await some_rounds(arena, kind, rounds, random.Random(seed))
    return {"machine": machine(), "peers": PEERS, "blows": found}


async def some_rounds(arena: Arena, kind: str, rounds: int, draw: random.Random) -> dict[str, Any]:
    detection, recovery, unnoticed = [], [], 0
    for number in range(rounds):
        await moments(arena, draw)
        members = arena.members()
        victim = members[number % len(members)]
        struck_s = time.time()
        await blow(arena, kind, victim)
        late_s = struck_s + UNNOTICED_S
        await arena.until(lambda a=struck_s, b=late_s: time.time() > b or went_on_s(arena, a) is not None)
        noticed_s, on_s = arena.noticed_s(struck_s), went_on_s(arena, struck_s)
        if noticed_s is None or on_s is None:  # streams between hosts that reach each other outlive a p2pd
            unnoticed += 1
            continue
        detection.append(noticed_s - struck_s)
        recovery.append(on_s - noticed_s)
        print(f"{kind} {victim}: noticed after {detection[-1]:.2f} s, +{recovery[-1]:.2f} s", file=sys.stderr)
        if kind in ("kill", "stop"):
            # Or the newcomer may be told to join through the one that leaves, and take its identity once that has ended.
            await arena.children.processes[victim].wait()
            await arena.join(f"new-{number}")
        elif kind in ("pause", "cut"):  # the next round begins with all
            await asyncio.sleep(max(0.0, struck_s + AWAY_S + 5.0 - time.time()))
    return {"detection": summary(detection), "recovery": summary(recovery), "missed nobody": unnoticed}


def went_on_s(arena: Arena, struck_s: float) -> float | None:
    """When the first new step was told of under the plan that came once a loss behind `struck_s` was noticed; wall clock."""
    noticed_s, ahead_s = arena.noticed_s(struck_s), time.time() - time.monotonic()
    planned = False
    for when_s, event in arena.events:
        if noticed_s is not None and when_s + ahead_s >= noticed_s:
            planned = planned or "plan" in event
            if planned and "report" in event:
                return when_s + ahead_s
    return None


async def blow(arena: Arena, kind: str, victim: str) -> None:
    if kind == "kill":
        await arena.kill(victim)
    elif kind == "stop":
        arena.children.processes[victim].terminate()
    elif kind == "pause":
        arena.pause(victim, AWAY_S)
    elif kind == "kill p2pd":
        arena.kill_daemon(victim)
    else:
        await arena.part([victim], AWAY_S)


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
    parser.add_argument("--blows", type=int, metavar="ROUNDS")
    options = parser.parse_args()
    if options.blows is not None:
        found = asyncio.run(by_kind(options.blows, options.seed))
    else:
        found = asyncio.run(measure(options.rounds, options.restarts, options.seed))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
