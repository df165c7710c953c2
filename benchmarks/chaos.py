"""Peers are killed, stopped and replaced by a schedule from a seed while a job trains; its losses are held against the plain loop.

`python -m benchmarks.chaos [--seeds 3] [--first 0] [--steps 60] [--blows 5]` prints a JSON line for each seed: what was done at
which step, how long each loss took until the next new step, and how it ended; the logs of a run that did not end as it
should stay in /tmp/meshcee-chaos-SEED. Six real peers, four stages. A seed takes one to two minutes on two quiet cores. With
`--virtual 2000` so many seeds are run in one process on virtual time (benchmarks/virtual_chaos.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import virtual_chaos
from benchmarks.arena import Arena
from meshcee._demo_job import job as demo
from meshcee.eager import eager
from meshcee.errors import MeshceeError

PEERS, STAGES = 6, 4
BLOWS = ("kill a member", "kill any", "stop", "pause", "kill p2pd", "kill the owner's p2pd", "join", "kill two")
PAUSES_S = 1.0, 20.0  # shorter and longer than what a silent peer is given


async def one(seed: int, steps: int, blows: int) -> dict[str, Any]:
    """A run under blows; "outcome" is "equal", or what went wrong."""
    draw = random.Random(seed)
    when = sorted(draw.sample(range(2, steps - 5), blows))
    done: list[str] = []
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="meshcee-chaos-") as folder:
        async with Arena(Path(folder), steps=steps, stages=STAGES) as arena:
            await arena.children.start_peers(PEERS, threads=1)
            await arena.train("--checkpoint-every", "4")
            try:
                for at in when:
                    await arena.until(lambda at=at: arena.steps >= at)
                    done.append(f"step {at}: {await strike(arena, draw, len(done))}")
                code = await arena.ends()
            except (TimeoutError, RuntimeError, MeshceeError) as error:
                keep(arena, seed)
                return {"seed": seed, "blows": done, "outcome": f"{type(error).__name__}: {error}"}
            if code != 0:
                keep(arena, seed)
            reports, recoveries = arena.run.reports(), arena.recoveries()
            plan = next(event["plan"] for _, event in arena.events if "plan" in event)
        orphans = arena.orphans()
    torch.set_num_threads(1)
    losses, _ = eager(demo, steps, plan["micro_batch"])
    outcome = "equal"
    if code != 0:
        outcome = f"exit code {code}"
    elif [r["step"] for r in reports] != list(range(steps)):
        outcome = "steps were lost or told of twice"
    elif [r["loss"] for r in reports] != losses:
        outcome = "other losses"
    elif orphans:
        outcome = f"orphans: {orphans}"
    back_s = [round(r["seconds"]["new step"], 1) for r in recoveries]
    took_s = round(time.monotonic() - started_s, 1)
    return {"seed": seed, "blows": done, "outcome": outcome, "back_s": back_s, "seconds": took_s}


def keep(arena: Arena, seed: int) -> None:
    """The logs of a run that did not end as it should."""
    folder = Path(tempfile.gettempdir()) / f"meshcee-chaos-{seed}"
    folder.mkdir(exist_ok=True)
    for log in arena.home.folder.glob("*.log"):
        shutil.copy(log, folder)


async def strike(arena: Arena, draw: random.Random, number: int) -> str:
    """One blow; at least two peers stay."""
    kind = draw.choice(BLOWS)
    if len(arena.living) <= 3 or kind == "join":
        await arena.join(f"new-{number}")
        return f"new-{number} joined"
    members = [name for name in arena.members() if name in arena.living] or arena.living
    if kind == "stop":
        victim = draw.choice(members)
        arena.stop(victim)
        return f"stopped {victim}"
    if kind == "pause":
        victim, seconds = draw.choice(members), draw.uniform(*PAUSES_S)
        arena.pause(victim, seconds)
        return f"paused {victim} for {seconds:.0f} s"
    if kind == "kill the owner's p2pd":
        arena.kill_daemon(None)
        return "killed the p2pd of the owner"
    if kind == "kill p2pd":
        victim = draw.choice(members)
        arena.kill_daemon(victim)
        return f"killed the p2pd of {victim}"
    victims = (
        draw.sample(members, min(2, len(members)))
        if kind == "kill two"
        else [draw.choice(members if kind == "kill a member" else arena.living)]
    )
    for victim in victims:
        await arena.kill(victim)
    return "killed " + " and ".join(victims)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blows", type=int, default=5)
    parser.add_argument("--virtual", type=int, metavar="SEEDS")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.first, options.first + (options.virtual or options.seeds)):
        result = virtual_chaos.play(seed) if options.virtual else asyncio.run(one(seed, options.steps, options.blows))
        print(json.dumps(result), flush=True)
        failed += result["outcome"] != "equal"
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
