"""Looks at the mesh that --join names: clocks, versions, and who is reached from where.

The idea: an observer joins as `meshcee status` does, reads the records, measures a few links and dials once what peers announce.
What others measure of this machine's peers stands in their records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from dht import dialable
from meshcee.errors import unwrap
from meshcee.figures.kernels import class_of
from meshcee.files.home import Home
from peers.cli.doctor.facts import Mesh, Neighbour, Refused
from peers.cli.doctor.paths import doors, interfaces, with_paths
from peers.device import host_id
from peers.node import JoinOptions, join
from peers.node.agent import Agent

__all__ = ["dialled", "look_at_mesh", "neighbours"]

DIAL_S = 2.0
MOST_DIALLED = 32  # peers


async def look_at_mesh(token: str, home: Home) -> Mesh | Refused:
    """Why the mesh was not joined is a fact too."""
    try:
        async with join(JoinOptions(token=token, name="doctor", observes=True), home) as mesh:
            agent = mesh.agent
            await agent.directory.refresh()
            off = agent.directory.off
            found = neighbours(agent)
            found = dict(zip(found, await dialled(list(found.values())), strict=True))
            opened = await doors(agent, found)
            found_paths = await with_paths(agent, found)
            return Mesh(agent.members.root, found_paths, off or agent.directory.off, interfaces(), opened)
    except Exception as group:
        error = unwrap(group)
        return Refused(type(error).__name__, str(error) or repr(error))


def neighbours(agent: Agent) -> dict[str, Neighbour]:
    """Peers that lend a device, by id, as their records and those of links tell."""
    known, here = agent.directory.peers, host_id(agent.mesh_key.secret)
    measured = {(by, to) for by, record in agent.directory.links.items() for to, _ in record.links}
    devices = {peer: record.device for peer, record in known.items() if record.device is not None}
    return {
        peer: Neighbour(
            known[peer].name,
            device.host == here,
            device.versions,
            known[peer].addresses,
            measured_by=sum((other, peer) in measured for other, of in devices.items() if of.host != device.host),
            kernels=str(class_of(device)),
            prints=dict(device.fingerprints),
            busy=known[peer].busy,
        )
        for peer, device in sorted(devices.items(), key=lambda item: (known[item[0]].name, item[0]))
    }


async def dialled(peers: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
    """Whether peers of other machines answer at an address that they announce."""
    far = [peer for peer in peers if not peer.here][:MOST_DIALLED]
    answers = dict(zip(map(id, far), await asyncio.gather(*(_answers(peer.addresses) for peer in far)), strict=True))
    return tuple(replace(peer, answers=answers.get(id(peer))) for peer in peers)


async def _answers(addresses: Sequence[str]) -> bool | None:
    """By TCP, where the daemon listens; None where no such address is announced to other machines."""
    where = [address.split("/") for address in dialable(addresses)]
    places = [
        (parts[2], int(parts[4])) for parts in where if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal()
    ]
    return any(await asyncio.gather(*(_answers_at(*place) for place in places))) if places else None


async def _answers_at(host: str, port: int) -> bool:
    with suppress(OSError, ValueError):  # TimeoutError is an OSError, a host name that cannot be one a ValueError
        async with asyncio.timeout(DIAL_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    return False
