"""What a device in a process of its own costs: two real peers with one each beside two without, step by step.

The idea: both meshes are up all the time and train the same job on the same plan in turns, so a machine that slows down slows
both. On loopback nothing shapes the links: every byte costs a core of this machine, which is the worst case for streams that are
passed on. With --mbit each process has a host of its own in the WAN lab, where bytes have to wait for the link.

    python -m benchmarks.device_process [--turns 7] [--steps 60] [--mbit 20] [--out docs/device_process.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, Network, why_not
from benchmarks.measure import Turns, machine, row
from benchmarks.one_host import END_S, JOB, environment, figures, meshcee
from benchmarks.wires import network_of

STAGES = 2
FORMS = {"in the peer": "--no-device-process", "in a process": "--device-process"}
RUN_S = 1200.0


@dataclass
class Ground:
    """One mesh: its files, and where its commands run."""

    name: str
    folder: Path
    lab: Lab | None
    token: str = ""

    async def start(self, host: str, *arguments: str) -> Process:
        log = (self.folder / f"{host}.log").open("a")
        options: dict[str, Any] = {"env": environment(self.folder), "stdout": PIPE, "stderr": log, "limit": 1 << 24}
        with log:
            if self.lab is not None:
                return await self.lab.run(f"{self.name}-{host}", meshcee(*arguments), **options)
            return await asyncio.create_subprocess_exec(*meshcee(*arguments), **options)

    async def lines(self, *arguments: str) -> list[dict[str, Any]]:
        """What a command of the owner's prints."""
        process = await self.start("owner", *arguments, "--join", self.token)
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"{arguments[0]} ended with {process.returncode}: {said[-1000:].decode()}")
        return [json.loads(line) for line in said.splitlines() if line.startswith(b"{")]

    async def join(self, stack: AsyncExitStack, place: int, *more: str) -> None:
        host = f"peer-{place}"
        where = "" if self.lab is None else self.lab.addresses[f"{self.name}-{host}"]
        listen = ("--listen", f"{where}:0") if where else ()
        joining = ("--join", self.token) if self.token else ()
        peer = await self.start(host, "peer", *joining, *listen, *more)
        stack.push_async_callback(_end, peer)
        assert peer.stdout is not None
        async with asyncio.timeout(END_S):
            line = await peer.stdout.readline()
        if b'"token"' not in line:
            raise SystemExit(f"a peer did not start:\n{(self.folder / f'{host}.log').read_text()[-2000:]}")
        self.token = self.token or str(json.loads(line)["token"])


async def _end(peer: Process) -> None:
    if peer.returncode is None:
        peer.terminate()
        try:
            async with asyncio.timeout(END_S):
                await peer.wait()
        except TimeoutError:
            peer.kill()
            await peer.wait()


def copy_of(job: Path, steps: int, folder: Path) -> Path:
    """The same job, of so many steps."""
    path = folder / "job.py"
    path.write_text(
        f"import runpy\nfrom dataclasses import replace\n"
        f"job = replace(runpy.run_path({str(job)!r})['job'], steps={steps}, threads=1, adapt=False)\n"
    )
    return path


async def plans(grounds: list[Ground]) -> None:
    """One plan of two stages, with the peers of each mesh in it, as plan.json in its folder."""
    peers = []
    for ground in grounds:
        [status] = await ground.lines("status")
        peers.append(sorted(peer["peer"] for peer in status["peers"]))
    [found] = await grounds[0].lines("plan", str(grounds[0].folder / "job.py"), "--stages", str(STAGES))
    for ground, names in zip(grounds, peers):
        text = json.dumps(found)
        for theirs, ours in zip(peers[0], names):
            text = text.replace(theirs, ours)
        (ground.folder / "plan.json").write_text(text)


def network(bandwidth_mbit: float) -> Network:
    hosts = [f"{form}-{host}" for form in "ab" for host in (*(f"peer-{k}" for k in range(STAGES)), "owner")]
    found = network_of(hosts)
    return replace(
        found, links=tuple(replace(link, bandwidth_bytes_per_s=bandwidth_mbit * 1e6 / 8) for link in found.links)
    )


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "job": options.job.name, "stages": STAGES, "turns": []}
    found["link_mbit"] = options.mbit
    async with AsyncExitStack() as stack:
        lab = None
        if options.mbit is not None:
            if reason := await asyncio.to_thread(why_not):
                raise SystemExit(f"no lab here: {reason}")
            lab = await stack.enter_async_context(Lab(network(options.mbit)))
        grounds = []
        for name, flag in zip("ab", FORMS.values()):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="meshcee-device-process-"))
            grounds.append(Ground(name, Path(folder), lab))
            copy_of(options.job, options.steps, Path(folder))
            for place in range(STAGES):
                await grounds[-1].join(stack, place, flag)
        await plans(grounds)
        print(row("turn", *(f"{form}, s a step" for form in FORMS), "ratio", "same losses"), flush=True)
        seconds: list[list[float]] = [[], []]
        for number in range(options.turns):
            losses: list[list[float]] = [[], []]
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                folder = grounds[which].folder
                said = await grounds[which].lines("train", str(folder / "job.py"), "--plan", str(folder / "plan.json"))
                one = figures(said)
                losses[which] = one.pop("losses")
                seconds[which].append(one["measured_s"])
                found["turns"].append({"form": list(FORMS)[which], **one})
            before, after = (taken[-1] for taken in seconds)
            same = losses[0] == losses[1]
            print(row(number, f"{before:.4f}", f"{after:.4f}", f"{after / before:.3f}", same), flush=True)
    found["process_over_peer"] = Turns(seconds[1], seconds[0]).to_json()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--job", type=Path, default=JOB)
    parser.add_argument("--mbit", type=float, help="links of so many Mbit/s and 1 ms in the WAN lab; else loopback")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    options = parser.parse_args()
    options.job = options.job.resolve()
    found = asyncio.run(measure(options))
    print(f"a step takes {found['process_over_peer']['ratio']:.3f} times as long with a process for each device")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
