"""A mesh of real peers is attacked while a job trains in it: what came of each attack, and what it cost the honest.

`python -m benchmarks.hostile [--quick] [--seconds 20] [--only WORDS] [--seed 0]` starts four peers on this machine, an owner
with a job in two stages, and four attackers with a p2pd each: a stranger, a former member, a member that may only compute, and
an owner. Each attack of benchmarks/attacks.py runs for some seconds, after and before as long a time of peace. A JSON line says
how many attempts there were, how the target answered, whether a process of the honest ended or met a bug, the largest answer,
how much the targets' memory grew, and the job's pace beside the attack as a share of its pace in peace. The last line has all of
them, and whether the job's losses are the plain loop's, bit for bit. Exit code 1 when a process crashed, an attack came about,
an answer was too large, or a loss differs.

The idea: attackers compute only while this machine has nothing else to do. So what is measured is what attacks make the honest do,
and not the cores that attackers take from them. They take a little all the same: caches, and the moment until they step back. The
first row says how much: its attacker computes and attacks nobody. The last line has the other paces as shares of its pace, too.

One idle peer checks graphs with a worker that does what tests/rig/hostile_work.py says: so graphs that crash torch are there
without a fault of torch's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import structlog
import torch

from benchmarks.arena import Arena
from benchmarks.attackers import Fault, Ground, Target, attackers, brief
from benchmarks.attacks import ATTACKS, CONTROL, Attack
from benchmarks.measure import machine
from meshcee._demo_job import job as demo
from meshcee.eager import plain

PEERS, STAGES, STEPS = 4, 2, 1_000_000
FOUNDER, IDLE = "peer-0", "hostile-work"
QUICK_S, SECONDS = 4.0, 20.0
WARM_STEPS = 10
MOST_TOLD = 6  # kinds of answers
LOOK_S = 0.5
BUGS = '"exception":', "Traceback (most recent call last)", "bug of ours"
LEAST_PACE = 0.9
# Of a peer that runs the product, but for the module that its workers check graphs with.
HOSTILE_WORK = """
import sys
from peers.device.worker import workers
workers.Workers.__init__.__defaults__ = ("tests.rig.hostile_work",)
from peers.cli.main import main
main()
"""


class Field(Arena):
    """An arena one of whose peers has a worker that does as graphs say."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STEPS, STAGES)
        with self._job.open("a") as job:
            job.write("job = replace(job, adapt=False)\n")
        spawn = self.children.spawn

        async def spawned(name: str, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
            if name == IDLE:
                command = [command[0], "-c", HOSTILE_WORK, *command[3:]]
            return await spawn(name, command, **options)

        self.children.spawn = spawned  # type: ignore[method-assign]

    def pace(self, first_s: float, end_s: float) -> float:
        """Steps that the owner told of in this time, per second."""
        told = [at_s for at_s, event in self.events if "report" in event and first_s <= at_s < end_s]
        return len(told) / (end_s - first_s)

    def gone(self) -> list[str]:
        """Honest processes that have ended."""
        owner = ["the owner"] if self.owner.is_over else []
        return owner + [name for name, process in self.children.processes.items() if process.returncode is not None]


class Logs:
    """Of the honest: what is new in them that tells of a bug."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.log"))

    def bugs(self) -> list[str]:
        found: list[str] = []
        for path in sorted(self._folder.glob("*.log")):
            text = path.read_bytes()[self._read.get(path, 0) :]
            whole = text[: text.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            found += [f"{path.stem}: {line[-600:]}" for line in lines if any(mark in line for mark in BUGS)]
        return found


def memory(processes: Mapping[str, psutil.Process]) -> dict[str, int]:
    """Resident bytes of each, its p2pd and workers beside it."""
    found: dict[str, int] = {}
    for name, process in processes.items():
        with suppress(psutil.Error):
            found[name] = process.memory_info().rss
            p2pd = [child for child in process.children(recursive=True) if child.name() == "p2pd"]
            found[f"{name}'s p2pd"] = sum(child.memory_info().rss for child in p2pd)
    return found


async def attacked(field: Field, ground: Ground, logs: Logs, attack: Attack, seconds: float) -> dict[str, Any]:
    """One attack, and the peace before and after it."""
    who, answers, faults = getattr(ground, attack.who), Counter[str](), list[str]()
    processes = {name: psutil.Process(process.pid) for name, process in field.children.processes.items()}
    ground.memory.clear()
    ground.memory["ports"] = ports(field)
    who.heard_bytes, logs_before = 0, logs.bugs()
    peace_s = time.monotonic()
    await asyncio.sleep(seconds)
    before, began_s, cpu_s, log_bytes = memory(processes), time.monotonic(), time.process_time(), logs.size
    most = dict(before)

    async def attempts() -> None:
        while time.monotonic() < began_s + seconds:
            try:
                answers[brief(await attack.attempt(ground))] += 1
            except Fault as fault:
                faults.append(str(fault)[:300])
            except Exception as error:  # of the attacker's own: it is no answer
                answers[f"the attacker failed: {brief(repr(error))}"] += 1
            await asyncio.sleep(0)

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for name, size in memory(processes).items():
                most[name] = max(most.get(name, 0), size)

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as group:
        for _ in range(attack.at_once):
            group.create_task(attempts())
    watching.cancel()
    who.let_go()
    end_s, cpu_s, log_bytes = time.monotonic(), time.process_time() - cpu_s, logs.size - log_bytes
    await asyncio.sleep(seconds)
    peace = statistics.mean((field.pace(peace_s, began_s), field.pace(end_s, time.monotonic())))
    grown = {name: most[name] - before[name] for name in before if most[name] - before[name] > 1 << 20}
    worst = max(grown, key=grown.__getitem__, default=None)
    told = dict(answers.most_common(MOST_TOLD))
    return {
        "who": attack.who,
        "attempts": sum(answers.values()) + len(faults),
        "answers": told | ({"others": answers.total() - sum(told.values())} if len(answers) > MOST_TOLD else {}),
        "faults": sorted(set(faults))[:3],
        "gone": field.gone(),
        "bugs": (logs_before + logs.bugs())[:3],
        "largest_answer_bytes": who.heard_bytes,
        "leaks": who.heard_bytes > attack.answer_bytes,
        "grown_mib": {worst: round(grown[worst] / 2**20, 1)} if worst is not None else {},
        "left_mib": round(sum(memory(processes).values()) / 2**20 - sum(before.values()) / 2**20, 1),
        "pace": round(field.pace(began_s, end_s) / peace, 3) if peace else None,
        "steps_per_s": round(peace, 2),
        "log_kib": round(log_bytes / 1024),
        "attacker_cpu_s": round(cpu_s, 1),
    }


def step_back() -> None:
    """From here on this process, and what it starts, computes in moments in which nobody else does."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def ports(field: Field) -> list[int]:
    """On which the honest listen: of libp2p, and for direct connections."""
    found: set[int] = set()
    for process in field.children.processes.values():
        with suppress(psutil.Error):
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            listening = (c for one in family for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
            found |= {connection.laddr.port for connection in listening}
    return sorted(found)


async def targets_of(field: Field) -> dict[str, Target]:
    """The founder, a member of the running plan, and the idle peer with a worker of its own kind."""
    command = [sys.executable, "-m", "meshcee", "status", "--join", field.children.token, "--json"]
    environment = {**os.environ, "MESHCEE_HOME": str(field.home.folder)}
    asked = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    told, _ = await asked.communicate()
    peers = {p["name"]: Target(p["name"], p["peer"], tuple(p["addresses"])) for p in json.loads(told)["peers"]}
    busy = next((name for name in field.members() if name not in (FOUNDER, IDLE)), field.members()[0])
    return {"founder": peers[FOUNDER], "busy": peers[busy], "idle": peers[IDLE]}


async def run(folder: Path, seconds: float, only: Sequence[str], seed: int) -> int:
    chosen = {name: attack for name, attack in ATTACKS.items() if any(word in name for word in only)}
    results: dict[str, dict[str, Any]] = {}
    async with Field(folder) as field:
        await field.children.start_peers(PEERS - 1, threads=1)
        await field.train()
        await field.until(lambda: field.steps >= WARM_STEPS)
        await field.join(IDLE)  # so that the job has no stage on it
        targets = await targets_of(field)
        step_back()
        logs = Logs(field.home.folder)
        async with attackers(field.home, folder, targets, seed) as ground:
            for name, attack in chosen.items():
                results[name] = await attacked(field, ground, logs, attack, seconds)
                print(json.dumps({"attack": name, **results[name]}), flush=True)
                if field.gone():
                    break
        bugs = logs.bugs()
        gone = field.gone()
        if not gone:
            assert field.owner.process is not None
            field.owner.process.send_signal(signal.SIGINT)
            await field.ends()
        equal, steps = as_plain(field)
    summary = summed_up(results, gone, bugs) | {"steps": steps, "losses_equal_the_plain_loop": equal}
    print(json.dumps({**summary, "seconds": seconds, "seed": seed, "machine": machine()}))
    return 0 if summary["crashes"] == summary["faults"] == summary["leaks"] == 0 and equal else 1


def as_plain(field: Field) -> tuple[bool, int]:
    """Whether the losses that the owner told are the plain loop's; of how many steps."""
    plan = next(event["plan"] for _, event in field.events if "plan" in event)
    losses = [report["loss"] for report in field.owner.told]
    torch.set_num_threads(1)
    return losses == plain(demo, len(losses), plan["micro_batch"]).losses, len(losses)


def summed_up(results: Mapping[str, Mapping[str, Any]], gone: Sequence[str], bugs: Sequence[str]) -> dict[str, Any]:
    paces = {name: result["pace"] for name, result in results.items() if result["pace"] is not None}
    beside = paces.pop(CONTROL, None)  # somebody who computes
    attacks = [result for name, result in results.items() if name != CONTROL]
    return {
        "attacks": len(attacks),
        "attempts": sum(result["attempts"] for result in attacks),
        "crashes": len(gone) + len(bugs) + sum(len(result["bugs"]) for result in results.values()),
        "faults": sum(len(result["faults"]) for result in results.values()),
        "leaks": sum(result["leaks"] for result in results.values()),
        "pace": round(statistics.mean(paces.values()), 3) if paces else None,
        "pace_beside_computing": beside,
        "share_of_that": round(statistics.mean(paces.values()) / beside, 3) if paces and beside else None,
        "slower_than_wanted": {name: pace for name, pace in paces.items() if pace < LEAST_PACE},
        "most_grown_mib": max((size for r in results.values() for size in r["grown_mib"].values()), default=0),
        **({"last_bugs": list(bugs)[:3]} if bugs else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_S:g} s for each attack")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    seconds = QUICK_S if options.quick else options.seconds
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the attackers' own
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="meshcee-hostile-") as folder:
        sys.exit(asyncio.run(run(Path(folder), seconds, options.only, options.seed)))


if __name__ == "__main__":
    main()
