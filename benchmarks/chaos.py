"""Peers are killed, hung or cut off by the schedule of a seed, owners die or have no disk, while a job trains; its losses are the
plain loop's.

`python -m benchmarks.chaos [--seeds 20] [--first 0] [--steps 200] [--blows 5]` prints a JSON line for each seed: what was done
at which step, how far the run went back after each loss and from whose copies, how long each blow took to be noticed and each
loss until the next new step, and how it ended; the logs of a run that did not end as it should stay in /tmp/meshcee-chaos-SEED.
Six real peers, four stages, each process on a host of its own in the WAN lab, each owner's runs on a small disk of their own. Where
one of these cannot be (both need root), no blow falls on links, or none on disks, and the line says why. A seed takes two to four
minutes on two cores. `--kinds "disk full" "hung device"` strikes with these blows alone. With `--virtual 2000` so many seeds
are run in one process on virtual time (benchmarks/virtual_chaos.py). With `--augmented` every read of a sample draws from
all three generators (benchmarks/augmented.py).

The idea: the seed says what happens and when; who is struck follows from the plan, the coordinator and the copies of that moment.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import disks, virtual_chaos
from benchmarks.arena import HEIR, OWNER, Arena
from benchmarks.augmented import Augmented
from benchmarks.going_back import Past, going_back
from benchmarks.lab import Lab, why_not
from benchmarks.wires import network_of
from meshcee._demo_job import VOCABULARY
from meshcee._demo_job import job as demo
from meshcee.eager import plain

PEERS, STAGES, CHECKPOINTS = 6, 4, 4
LEAST = 2  # peers that stay
KILLS = (
    "kill a member",
    "kill the coordinator",
    "kill a keeper",
    "kill a holder and its keeper",
    "kill two",
    "lose a region",
)
HANG, OWNER_DIES = "hung device", "kill the owner"
BLOWS = (*KILLS, "stop", "pause", "kill p2pd", "kill the owner's p2pd", "join", HANG, OWNER_DIES)
ON_LINKS = ("cut", "partition", "halve")
# Shorter and longer than what a silent peer is given.
PAUSES_S = (1.0, 6.0), (12.0, 25.0)
HALVED_S = 10.0, 40.0
REFUSED_S = 5.0, 40.0


async def one(
    seed: int, steps: int, blows: int, augmented: bool = False, kinds: Sequence[str] | None = None
) -> dict[str, Any]:
    """A run under blows, of these kinds if any are given; "outcome" is "equal", or what went wrong."""
    found: dict[str, Any] = {"seed": seed}
    began_s = time.monotonic()
    possible = list(BLOWS)
    async with AsyncExitStack() as stack:
        lab = None
        if reason := await asyncio.to_thread(why_not):
            found["no blows on links"] = reason
        else:
            hosts = [*(f"peer-{i}" for i in range(PEERS)), *(f"new-{i}" for i in range(blows)), OWNER, HEIR]
            lab = await stack.enter_async_context(Lab(network_of(hosts)))
            possible += ON_LINKS
        if reason := await asyncio.to_thread(disks.why_not):
            found["no blows on disks"] = reason
        else:
            possible += disks.KINDS
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshcee-chaos-"))
        draw = random.Random(seed)
        drawn = draw_kinds(draw, [kind for kind in possible if kinds is None or kind in kinds], blows)
        arena = Arena(
            Path(folder),
            steps,
            STAGES,
            lab,
            augmented=augmented,
            disks=not {*drawn}.isdisjoint(disks.KINDS),
            paced=HANG in drawn,
        )
        found |= await struck(arena, draw, steps, drawn)
        if found["outcome"] != "equal":
            keep(arena, seed)
    return {**found, "seconds": round(time.monotonic() - began_s, 1)}


def draw_kinds(draw: random.Random, possible: Sequence[str], blows: int) -> list[str]:
    """An owner dies once, as nobody stands by for the next one; members join instead."""
    drawn = draw.choices(possible, k=blows)
    first = drawn.index(OWNER_DIES) if OWNER_DIES in drawn else blows
    return ["join" if kind == OWNER_DIES and i > first else kind for i, kind in enumerate(drawn)]


async def struck(arena: Arena, draw: random.Random, steps: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Train under the blows, then look at all that is left."""
    when = sorted(draw.sample(range(2, steps - 12), len(kinds)))
    done: list[str] = []
    struck_s: list[float] = []
    outcome = ""
    try:
        async with arena:
            await arena.children.start_peers(PEERS, threads=1)
            await arena.train("--checkpoint-every", str(steps // CHECKPOINTS))
            if OWNER_DIES in kinds:
                await arena.stand_by()
            for number, (at, kind) in enumerate(zip(when, kinds, strict=True)):
                await arena.until(lambda at=at: arena.steps >= at)
                await asyncio.sleep(draw.uniform(0, 0.5))  # so that it falls anywhere in a step
                struck_s.append(time.time())
                done.append(f"step {arena.steps}: {await strike(arena, draw, kind, number)}")
            code = await arena.ends()
            written, whole = arena.run.reports(), not arena.refuses
    except* Exception as group:
        outcome = "; ".join(f"{type(error).__name__}: {error}" for error in virtual_chaos.leaves(group))
    if outcome:
        return {"blows": done, "outcome": outcome}
    # The log of a second owner does not begin with what the first one knew: its copies are not judged.
    past, later = (going_back(arena.log(name), arena.names) for name in arena.owners)
    return {
        "blows": done,
        "outcome": judge(arena, steps, code, written, whole, past, await asyncio.to_thread(arena.orphans)),
        "back": [back.to_json() for back in [*past.backs, *later.backs]],
        "copies_every": past.every,
        "detected_s": detected(arena, struck_s),
        "back_s": [round(entry["seconds"]["new step"], 1) for entry in arena.recoveries()],
        **({"taken_over_s": round(over_s, 1)} if (over_s := arena.taken_over_s) is not None else {}),
    }


def detected(arena: Arena, struck_s: list[float]) -> list[float | None]:
    """For each blow how long the owner took to notice it; None where it missed nobody before the next blow."""
    found: list[float | None] = []
    for this_s, next_s in zip(struck_s, [*struck_s[1:], float("inf")]):
        noticed_s = arena.noticed_s(this_s)
        found.append(round(noticed_s - this_s, 2) if noticed_s is not None and noticed_s < next_s else None)
    return found


def judge(
    arena: Arena, steps: int, code: int, written: list[dict[str, Any]], whole: bool, past: Past, orphans: list[int]
) -> str:
    """ "equal", or what went wrong. `written` are the reports on the last owner's disk, `whole` unless it refused to the end."""
    if code != 0:
        return f"exit code {code}"
    plan = next(event["plan"] for _, event in arena.events if "plan" in event)
    losses = undisturbed(steps, plan["micro_batch"], arena.augmented)
    done = 0
    for owner in arena.owners.values():  # the second may tell again of what was told in the first one's last moments
        numbers = [report["step"] for report in owner.told]
        if numbers and (numbers[0] > done or numbers != list(range(numbers[0], numbers[-1] + 1))):
            return f"the {owner.name} lost steps or told of them twice"
        if [report["loss"] for report in owner.told] != [losses[step] for step in numbers]:
            return f"the {owner.name} has other losses"
        done = max([done, *(step + 1 for step in numbers)])
    if done != steps:
        return "steps were lost"
    if [r["step"] for r in written] != list(range(steps if whole else len(written))):
        return "on the disk steps are missing or told of twice"
    if [r["loss"] for r in written] != losses[: len(written)]:
        return "other losses on the disk"
    return "; ".join([*past.wrong, *([f"orphans: {orphans}"] if orphans else [])]) or "equal"


@functools.cache
def undisturbed(steps: int, micro_batch: int, augmented: bool) -> list[float]:
    """The plain loop's losses."""
    torch.set_num_threads(1)
    data = Augmented(demo.data, len(VOCABULARY)) if augmented else demo.data
    return plain(replace(demo, data=data), steps, micro_batch).losses


def keep(arena: Arena, seed: int) -> None:
    """The logs of a run that did not end as it should."""
    folder = Path(tempfile.gettempdir()) / f"meshcee-chaos-{seed}"
    folder.mkdir(exist_ok=True)
    for log in arena.home.folder.glob("*.log"):
        shutil.copy(log, folder)


async def strike(arena: Arena, draw: random.Random, kind: str, number: int) -> str:
    """One blow, in words; where it would leave fewer than LEAST peers, or no owner, one joins instead."""
    living, last_s = arena.living, draw.uniform(*draw.choice(PAUSES_S))
    members = [name for name in arena.members() if name in living] or living
    victims = [draw.choice(members)]
    if kind in KILLS:
        victims = list(dict.fromkeys(chosen(arena, draw, kind, members)))
    elif kind == "partition":
        victims = draw.sample(living, draw.randrange(1, max(2, len(living) - LEAST + 1)))
    elif kind == "cut":
        victims = draw.sample([*living, arena.owner.name], 2)
    who = " and ".join(victims)
    if kind == "kill the owner's p2pd":
        arena.kill_daemon(None)
        return "killed the p2pd of the owner"
    if kind == "kill p2pd":
        arena.kill_daemon(victims[0])
        return f"killed the p2pd of {who}"
    if kind == "halve":
        last_s = draw.uniform(*HALVED_S)
        await arena.halve(victims[0], last_s)
        return f"half the bandwidth for {who} for {last_s:.0f} s"
    if kind == OWNER_DIES and arena.can_lose_the_owner:
        arena.lose_owner()
        return "killed the owner"
    if kind in disks.KINDS and arena.can_refuse:
        last_s = draw.uniform(*REFUSED_S)
        arena.refuse(kind, last_s)
        return f"{kind} at the {arena.owner.name} for {last_s:.0f} s"
    if kind in ("join", OWNER_DIES, *disks.KINDS) or len(living) - len(victims) < LEAST:
        await arena.join(f"new-{number}")
        return f"new-{number} joined"
    if kind == "stop":
        arena.stop(victims[0])
        return f"stopped {who}"
    if kind == HANG:
        arena.hang(victims[0])
        return f"hung the device of {who}"
    if kind == "pause":
        arena.pause(victims[0], last_s)
        return f"paused {who} for {last_s:.0f} s"
    if kind == "cut":
        await arena.cut(victims[0], victims[1], last_s)
        return f"cut {who} off from each other for {last_s:.0f} s"
    if kind == "partition":
        await arena.part(victims, last_s)
        return f"cut {who} off from the others for {last_s:.0f} s"
    for victim in victims:
        await arena.kill(victim)
    return f"{kind}: {who}"


def chosen(arena: Arena, draw: random.Random, kind: str, members: list[str]) -> list[str]:
    """Who is killed, of those who live; any members where there is nobody of this kind."""
    living = set(arena.living)
    some = draw.sample(members, min(2, len(members)))
    if kind == "kill the coordinator":
        some = [name for name in [arena.coordinator()] if name is not None and name in living] or some[:1]
    elif kind == "lose a region":  # two beside each other in the plan
        first = draw.randrange(max(1, len(members) - 1))
        some = members[first : first + 2]
    elif kind == "kill two":
        pass
    elif kind == "kill a member" or not (stages := arena.copies()):
        some = some[:1]
    else:
        stage = draw.randrange(len(stages))
        holders = [name for name in stages[stage] if name in living]
        if kind == "kill a keeper":
            holders = [name for name in holders if arena.members()[stage : stage + 1] != [name]][:1]
        some = holders or some[:1]
    return some


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--blows", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=(*BLOWS, *ON_LINKS, *disks.KINDS))
    parser.add_argument("--virtual", type=int, metavar="SEEDS")
    parser.add_argument("--augmented", action="store_true")
    options = parser.parse_args()
    failed = 0
    for seed in range(options.first, options.first + (options.virtual or options.seeds)):
        if options.virtual:
            result = virtual_chaos.play(seed, options.augmented)
        else:
            result = asyncio.run(one(seed, options.steps, options.blows, options.augmented, options.kinds))
        print(json.dumps(result), flush=True)
        failed += result["outcome"] != "equal"
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
