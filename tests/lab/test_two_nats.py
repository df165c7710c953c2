"""Real p2pd processes: one on the open network, and two behind a router each, which nobody can dial."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Host, Lab, Link, Network, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=f"the WAN lab cannot run here: {REASON}"),
]
ONE_WAY_S = 0.01  # between any two
NETWORK = Network(
    (Host("cloud", "net"), Host("ann", "net", behind="home"), Host("ben", "net", behind="office")),
    (Link("net", "net", ONE_WAY_S, 12.5e6),),
)


class Peer:
    """One of tests/lab/natted.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.said: dict[str, Any] = {}

    @classmethod
    async def start(cls, lab: Lab, host: str, folder: Path, *arguments: str) -> Peer:
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, "-m", "tests.lab.natted", str(folder / host), *arguments]
        made = cls(await lab.run(host, command, stdin=pipe, stdout=pipe, cwd=Path(__file__).parents[2]))
        made.said = await made.hear()
        return made

    async def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = b" "
        while line and not line.startswith(b"{"):  # what it logs is there too
            line = await self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line)
        return found

    async def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def measures(self, other: Peer) -> dict[str, Any]:
        assert self._process.stdin is not None
        order = json.dumps([other.said["peer"], other.said["addresses"]])
        self._process.stdin.write(order.encode() + b"\n")
        await self._process.stdin.drain()
        return await self.hear()


@pytest.mark.parametrize("passes_on", [True, False])
async def test_peers_behind_two_routers_reach_each_other_through_the_third(tmp_path: Path, passes_on: bool) -> None:
    async with Lab(NETWORK) as lab:
        cloud = await Peer.start(lab, "cloud", tmp_path, *([] if passes_on else ["--no-relay"]))
        seeds = cloud.said["addresses"]
        ann, ben = await asyncio.gather(*(Peer.start(lab, host, tmp_path, *seeds) for host in ("ann", "ben")))
        for near, far in ((ann, cloud), (cloud, ben)):  # over the connection that the one inside has made
            assert ONE_WAY_S <= (await near.measures(far))["latency_s"] < 2 * ONE_WAY_S + 1
        for near, far in ((ann, ben), (ben, ann)):
            found = await near.measures(far)
            if passes_on:
                assert found["latency_s"] >= 2 * ONE_WAY_S
                assert 0 < found["bytes_per_s"] <= 12.5e6
            else:
                assert "TCP port 4001 in at its router" in found["error"]
                assert far.said["peer"][-8:] in found["error"]
        await asyncio.gather(*(peer.end() for peer in (ann, ben, cloud)))
