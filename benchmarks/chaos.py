"""Peers are killed, hung, cut off or out of memory by the schedule of a seed, owners die, sleep or have no disk, while a job
trains; its losses are the plain loop's.

`python -m benchmarks.chaos [--seeds 20] [--first 0] [--steps 200] [--blows 5]` prints a JSON line for each seed: what was done
at which step, how far the run went back after each loss and from whose copies, how long each blow took to be noticed and each
loss until the next new step, and how it ended; the logs of a run that did not end as it should stay in /tmp/meshcee-chaos-SEED.
Six real peers, four stages, each process on a host of its own in the WAN lab, each owner's runs on a small disk of their own. Where
one of these cannot be (both need root), no blow falls on links, or none on disks, and the line says why. A seed takes two to four
minutes on two cores. `--kinds "disk full" "hung device"` strikes with these blows alone. After the seeds the times of each kind of
blow are printed as a table (benchmarks/blow_times.py). With `--virtual 2000` so many seeds
are run in one process on virtual time (benchmarks/virtual_chaos.py). With `--augmented` every read of a sample draws from
all three generators (benchmarks/augmented.py).

The idea: the seed says what happens and when; who is struck follows from the plan, the coordinator and the copies of that moment.
Most blows fall at a step. Some are aimed: at the first offer, at a peer's leaving while its work is handed over, at a checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
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
from benchmarks.blow_times import Blow, table
from benchmarks.going_back import Past, going_back
from benchmarks.lab import Lab, why_not
from benchmarks.wires import network_of
from meshcee._demo_job import VOCABULARY
from meshcee._demo_job import job as demo
from meshcee.eager import plain

PEERS, STAGES, CHECKPOINTS = 6, 4, 4
LEAST = 2  # peers that stay
LAST = 12  # steps without a blow
KILLS = (
    "kill a member",
    "kill the coordinator",
    "kill a keeper",
    "kill a holder and its keeper",
    "kill two",
    "lose a region",
)
HANG, OWNER_DIES, CLOCK = "hung device", "kill the owner", "clock step"
MEMORY, SLEEP, WATCHED_SLEEP = "out of memory", "suspend the owner", "suspend the owner beside a standby"
OFFER, HAND_OVER, CHECKPOINT = "at the first offer", "at a hand-over", "at a checkpoint"
AIMED = (OFFER, HAND_OVER, CHECKPOINT)
ANYWHERE = (*KILLS, "stop", "pause", "kill p2pd", "kill the owner's p2pd", "join", HANG, OWNER_DIES)
ON_OWNER = ("kill the owner's p2pd", OWNER_DIES, SLEEP, WATCHED_SLEEP, *disks.KINDS)
BLOWS = (*ANYWHERE, MEMORY, CLOCK, SLEEP, WATCHED_SLEEP, *AIMED)
AIM_WITH = ("kill a member", "kill the coordinator", "pause", "kill p2pd", MEMORY, SLEEP)
STAND_BY = (OWNER_DIES, WATCHED_SLEEP)  # in a run with these there is a standby from the beginning
ONCE = (OWNER_DIES, OFFER)
SLOW_LORIS = "slow loris"
ON_LINKS = ("cut", "partition", "halve", SLOW_LORIS)
# Shorter and longer than what a silent peer is given.
PAUSES_S = (1.0, 6.0), (12.0, 25.0)
HALVED_S = 10.0, 40.0
REFUSED_S = 5.0, 40.0
LORIS_S, LORIS_BYTES_PER_S = (5.0, 40.0), (1e3, 8e3)
CLOCK_STEP_S, CLOCK_OFF_S = (2.0, 3600.0), (1.0, 25.0)
FULL_S = 5.0, 40.0
LEAVING_S, SAVING_S = 10.0, 60.0  # that an aimed blow waits for its moment


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
            astray=CLOCK in drawn,
        )
        found |= await struck(arena, draw, steps, drawn)
        if found["outcome"] != "equal":
            keep(arena, seed)
    return {**found, "seconds": round(time.monotonic() - began_s, 1)}


def draw_kinds(draw: random.Random, possible: Sequence[str], blows: int) -> list[str]:
    """An owner dies once, as nobody stands by for the next one, and there is one first offer; members join instead."""
    drawn = draw.choices(possible, k=blows)
    drawn = ["join" if kind in ONCE and kind in drawn[:i] else kind for i, kind in enumerate(drawn)]
    return sorted(drawn, key=lambda kind: kind != OFFER)


async def struck(arena: Arena, draw: random.Random, steps: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Train under the blows, then look at all that is left."""
    when = sorted(draw.sample(range(2, steps - LAST), len(kinds)))
    done: list[str] = []
    struck_s: list[float] = []
    blows: list[Blow] = []
    outcome = ""
    try:
        async with arena:
            await arena.children.start_peers(PEERS, threads=1)
            await arena.train("--checkpoint-every", str(steps // CHECKPOINTS))
            if not set(STAND_BY).isdisjoint(kinds):
                await arena.stand_by()
            for number, (at, kind) in enumerate(zip(when, kinds, strict=True)):
                await arena.until(lambda at=at, kind=kind: arena.is_planned if kind == OFFER else arena.steps >= at)
                where = f" {kind}" if kind in AIMED and await aim(arena, draw, kind, steps) else ""
                await asyncio.sleep(draw.uniform(0, 0.5))  # so that it falls anywhere in a step
                struck_s.append(time.time())
                now = arena.steps
                name, what = await strike(arena, draw, draw.choice(AIM_WITH) if kind in AIMED else kind, number)
                done.append(f"step {now}: {what}{where}")
                blows.append(Blow(name + where))
            code = await arena.ends()
            written, whole = arena.run.reports(), not arena.refuses
    except* Exception as group:
        outcome = "; ".join(f"{type(error).__name__}: {error}" for error in virtual_chaos.leaves(group))
    if outcome:
        return {"blows": done, "outcome": outcome}
    # The log of a second owner does not begin with what the first one knew: its copies are not judged.
    slept = any("suspended the owner" in blow for blow in done)
    past, later = (going_back(arena.log(name), arena.names, slept=slept) for name in arena.owners)
    return {
        "blows": done,
        "outcome": judge(arena, steps, code, written, whole, past, await asyncio.to_thread(arena.orphans)),
        "back": [back.to_json() for back in [*past.backs, *later.backs]],
        "copies_every": past.every,
        "times": [blow.to_json() for blow in timed(arena, blows, struck_s)],
        **({"taken_over_s": round(over_s, 1)} if (over_s := arena.taken_over_s) is not None else {}),
    }


def timed(arena: Arena, blows: Sequence[Blow], struck_s: Sequence[float]) -> Sequence[Blow]:
    """Blows that fell at these times, with how long an owner took to notice each, and to get over what it noticed."""
    ends_s = [*struck_s[1:], float("inf")]
    recovered = arena.recovered_s()
    for blow, this_s, next_s in zip(blows, struck_s, ends_s, strict=True):
        noticed_s = arena.noticed_s(this_s)
        if noticed_s is not None and noticed_s < next_s:
            blow.detected_s = round(noticed_s - this_s, 2)
        blow.back_s = [round(took_s, 2) for at_s, took_s in recovered if this_s <= at_s < next_s]
    return blows


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


async def aim(arena: Arena, draw: random.Random, kind: str, steps: int) -> bool:
    """Wait for the moment of an aimed blow, or bring it about; False where too few peers are left for that."""
    if kind == HAND_OVER:
        members, said = [name for name in arena.members() if name in arena.living], arena.hand_overs
        if not members or len(arena.living) <= LEAST + 1:
            return False
        arena.leave(draw.choice(members))
        await arena.meanwhile(lambda: arena.hand_overs > said, LEAVING_S)
    if kind == CHECKPOINT:
        await arena.meanwhile(lambda: arena.saves or arena.steps > steps - LAST, SAVING_S)
    return True


async def strike(arena: Arena, draw: random.Random, kind: str, number: int) -> tuple[str, str]:
    """One blow: its kind, and in words; where it cannot be, a member joins instead."""
    if (what := await struck_with(arena, draw, kind)) is not None:
        return kind, what
    await arena.join(f"new-{number}")
    return "join", f"new-{number} joined"


async def struck_with(arena: Arena, draw: random.Random, kind: str) -> str | None:
    """In words; None where it would leave fewer peers than there must be, or no owner."""
    living, last_s = arena.living, draw.uniform(*draw.choice(PAUSES_S))
    members = [name for name in arena.members() if name in living] or living
    victims = [draw.choice(members)]
    if kind in KILLS:
        victims = list(dict.fromkeys(chosen(arena, draw, kind, members)))
    elif kind == "partition":
        victims = draw.sample(living, draw.randrange(1, max(2, len(living) - LEAST + 1)))
    elif kind == "cut":
        victims = draw.sample([*living, arena.owner.name], 2)
    if kind in ON_OWNER:
        return strike_owner(arena, draw, kind, last_s)
    who = " and ".join(victims)
    if kind == "kill p2pd":
        arena.kill_daemon(victims[0])
        return f"killed the p2pd of {who}"
    if kind == "halve":
        last_s = draw.uniform(*HALVED_S)
        await arena.halve(victims[0], last_s)
        return f"half the bandwidth for {who} for {last_s:.0f} s"
    if kind == SLOW_LORIS:
        last_s, rate = draw.uniform(*LORIS_S), draw.uniform(*LORIS_BYTES_PER_S)
        await arena.trickle(victims[0], rate, last_s)
        return f"{who} answers with {rate:.0f} bytes/s for {last_s:.0f} s"
    if kind == CLOCK:
        return step_clock(arena, draw, members)
    if kind == "join" or len(living) - len(victims) < (LEAST if arena.steps else STAGES):
        return None
    if kind == "stop":
        arena.stop(victims[0])
        return f"stopped {who}"
    if kind == HANG:
        arena.hang(victims[0])
        return f"hung the device of {who}"
    if kind == MEMORY:
        last_s = draw.uniform(*FULL_S)
        arena.fill(victims[0], last_s)
        return f"no more memory for {who} for {last_s:.0f} s"
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


def strike_owner(arena: Arena, draw: random.Random, kind: str, last_s: float) -> str | None:
    """The owner's blows; None where there would be no owner then, or none yet that it could befall."""
    if kind == "kill the owner's p2pd":
        arena.kill_daemon(None)
        return "killed the p2pd of the owner"
    if kind == OWNER_DIES and arena.can_lose_the_owner:
        arena.lose_owner()
        return "killed the owner"
    if kind in disks.KINDS and arena.can_refuse:
        last_s = draw.uniform(*REFUSED_S)
        arena.refuse(kind, last_s)
        return f"{kind} at the {arena.owner.name} for {last_s:.0f} s"
    if kind == SLEEP or (kind == WATCHED_SLEEP and arena.can_lose_the_owner):
        arena.suspend_owner(last_s)
        return f"suspended the {arena.owner.name} for {last_s:.0f} s" + " beside a standby" * arena.can_lose_the_owner
    return None


def step_clock(arena: Arena, draw: random.Random, members: Sequence[str]) -> str | None:
    """None before the first step: who types `meshcee train` is told of clocks that are apart, and the job is refused."""
    if not arena.steps:
        return None
    victim = draw.choice([*members, arena.owner.name])
    off_s = math.exp(draw.uniform(*map(math.log, CLOCK_STEP_S))) * draw.choice((-1, 1))
    last_s = draw.uniform(*CLOCK_OFF_S)
    arena.step_clock(victim, off_s, last_s)
    return f"the clock of {victim} is {off_s:+.0f} s off for {last_s:.0f} s"


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
    results = []
    for seed in range(options.first, options.first + (options.virtual or options.seeds)):
        if options.virtual:
            result = virtual_chaos.play(seed, options.augmented)
        else:
            result = asyncio.run(one(seed, options.steps, options.blows, options.augmented, options.kinds))
        print(json.dumps(result), flush=True)
        results.append(result)
    print(json.dumps(virtual_chaos.sums(results)) if options.virtual else table(results))
    sys.exit(any(result["outcome"] != "equal" for result in results))


if __name__ == "__main__":
    main()
