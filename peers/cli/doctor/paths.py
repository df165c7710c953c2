"""The way from here to peers of other machines: how fast, how large a packet, and where it comes out.

The idea: a few peers are looked at, those first that answer, all within bounds. Probes come one after the other, as each needs the
line for itself. A peer that trains is not probed: its steps need the line.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil

from dht import dialable, host_of, is_public
from meshcee.errors import MeshceeError
from meshcee.figures import LinkProfile
from peers.cli.doctor.facts import FOR_TENSORS, Door, Link, Neighbour
from peers.measure.probe import LIGHT_S, probe_link
from peers.node.agent import Agent
from peers.transport import StreamClosed, Transport
from peers.transport.bundle import Bundle
from peers.transport.p2p.dial_back import MOST_PORTS, Knocked, knocked_from
from peers.transport.seen import seen_from

__all__ = ["doors", "interfaces", "mtu_to", "ports_here", "with_paths"]

MOST_PEERS = 4
ALL_S, EACH_S, SEEN_S = 12.0, 5.0, 10.0
MTU_WAIT_S = 0.2  # in which a router on the way says that the packet was too large for it
ALWAYS = 2  # of what "discover" is set to: packets are not cut
# On Linux: discover, MTU.
OPTIONS = {socket.AF_INET: (socket.IPPROTO_IP, 10, 14), socket.AF_INET6: (socket.IPPROTO_IPV6, 23, 24)}
LARGE_BYTES = 1472  # of UDP in a packet of 1500


def interfaces() -> tuple[str, ...]:
    """The addresses of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    entries = [entry for of in psutil.net_if_addrs().values() for entry in of if entry.family in families]
    return tuple(entry.address.partition("%")[0] for entry in entries)


async def with_paths(agent: Agent, peers: Mapping[str, Neighbour]) -> tuple[Neighbour, ...]:
    """The same peers, by id, with what was found out of the way to the first few of other machines."""
    far = _far(peers)
    told, found = _recorded(agent, peers), dict(peers)

    async def ask(peer: str) -> None:
        addresses = peers[peer].addresses
        mtu = await asyncio.to_thread(_mtu, addresses)
        sees, direct = "", None
        if peers[peer].answers:  # a stream that another passes on comes from nowhere
            sees = await _seen(agent.transport, peer, addresses)
            port = await _tensors(agent.transport, peer, addresses)
            direct = None if port is None else bool(port)
        found[peer] = replace(found[peer], sees=sees, mtu=mtu, direct=direct)

    await asyncio.gather(*map(ask, far))
    with suppress(TimeoutError):
        async with asyncio.timeout(ALL_S):
            for peer in far:
                link = told.get(peer, Link())
                if not peers[peer].busy:
                    link = await _probed(agent.transport, peer, peers[peer].addresses, link)
                found[peer] = replace(found[peer], link=link)
    return tuple(found.values())


def _far(peers: Mapping[str, Neighbour]) -> list[str]:
    """The first few of other machines, those that answer before those that do not."""
    others = (peer for peer, one in peers.items() if not one.here)
    return sorted(others, key=lambda peer: peers[peer].answers is not True)[:MOST_PEERS]


async def doors(agent: Agent, peers: Mapping[str, Neighbour]) -> tuple[Door, ...]:
    """Ports of this machine, dialled by peers of other machines."""
    here = [(peer, one) for peer, one in peers.items() if one.here and dialable(one.addresses)]
    found = await asyncio.gather(*(_tensors(agent.transport, peer, one.addresses) for peer, one in here))
    told = [replace(one, tensors=port or 0) for (_, one), port in zip(here, found, strict=True)]
    ports = ports_here(told, agent.transport.addresses)
    asked = [peer for peer in _far(peers) if peers[peer].answers]
    knocked = await asyncio.gather(
        *(_knocked(agent.transport, peer, peers[peer].addresses, list(ports)) for peer in asked)
    )
    said = [(peers[peer].name, one) for peer, one in zip(asked, knocked, strict=True) if one is not None and one.host]
    hosts = {name: one.host for name, one in said}
    return tuple(
        Door(port, of, next((hosts[name] for name in by or hosts), ""), tuple(hosts), by)
        for port, of in ports.items()
        for by in (tuple(name for name, one in said if port in one.answered),)
    )


def ports_here(here: Sequence[Neighbour], own: Sequence[str]) -> dict[int, str]:
    """TCP ports at which peers of this machine are reached, and the name of each peer. Where none runs, that of this command's own
    daemon, under "": a port that the system has chosen, as a peer's is that is told none."""
    found: dict[int, str] = {}
    for peer in here:
        outside = dialable(peer.addresses)  # a router may have another port than the machine behind it
        for address in [one for one in outside if is_public(one)] or outside:
            found[_tcp(address)] = peer.name
        found[peer.tensors] = peer.name + FOR_TENSORS
    if not here:
        found = {_tcp(address): "" for address in dialable(own)}
    return dict([(port, of) for port, of in found.items() if port][:MOST_PORTS])


def _tcp(address: str) -> int:
    parts = address.split("/")
    return int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[4].isdecimal() else 0


async def _knocked(transport: Transport, peer: str, addresses: Sequence[str], ports: Sequence[int]) -> Knocked | None:
    with suppress(TimeoutError, MeshceeError, StreamClosed):  # an older peer dials nobody
        async with asyncio.timeout(SEEN_S):
            return await knocked_from(transport, peer, addresses, ports)
    return None


async def _tensors(transport: Transport, peer: str, addresses: Sequence[str]) -> int | None:
    """The port at which a stream for tensors leaves libp2p's daemon; 0 where it stays inside, None where none is opened."""
    with suppress(TimeoutError, MeshceeError, StreamClosed):
        async with asyncio.timeout(SEEN_S):
            stream = await transport.open(peer, "probe", addresses)
        way = getattr(stream, "transport", None)
        port = int(way.get_extra_info("peername", (peer, 0))[1]) if isinstance(way, Bundle) else 0
        await stream.aclose()
        return port
    return None


def _recorded(agent: Agent, peers: Mapping[str, Neighbour]) -> dict[str, Link]:
    """What the newest record of a peer of this machine says of its link to each other one."""
    newest: dict[str, LinkProfile] = {}
    for source in (peer for peer, one in peers.items() if one.here):
        record = agent.directory.links.get(source)
        for target, link in record.links if record is not None else ():
            if target not in newest or newest[target].measured_at < link.measured_at:
                newest[target] = link
    now = agent.clock()
    return {
        to: Link(None, (link.latency_s, link.bandwidth_bytes_per_s), max(0.0, now - link.measured_at))
        for to, link in newest.items()
    }


async def _probed(transport: Transport, peer: str, addresses: Sequence[str], link: Link) -> Link:
    try:
        async with asyncio.timeout(EACH_S):
            found = (await probe_link(transport, peer, tuple(addresses), 0.0, target_s=LIGHT_S)).link
    except TimeoutError:
        return replace(link, problem=f"it takes longer than {EACH_S:.0f} s")
    except (MeshceeError, StreamClosed) as error:
        return replace(link, problem=str(error))
    return replace(link, now=(found.latency_s, found.bandwidth_bytes_per_s))


async def _seen(transport: Transport, peer: str, addresses: Sequence[str]) -> str:
    with suppress(TimeoutError, MeshceeError, StreamClosed):  # an older peer does not tell
        async with asyncio.timeout(SEEN_S):
            if address := await seen_from(transport, peer, addresses):
                return host_of(address)
    return ""


def _mtu(addresses: Sequence[str]) -> int | None:
    for address in dialable(addresses):
        kind, host, *rest = address.split("/")[1:]
        if kind in ("ip4", "ip6") and len(rest) > 1 and rest[1].isdecimal():
            return mtu_to(host, int(rest[1]))
    return None


def mtu_to(host: str, port: int) -> int | None:
    """Bytes of the largest packet that reaches this address whole, as far as the kernel knows; None where it does not tell.

    One datagram that must not be cut is sent there, so that a router on the way can object. Blocks for MTU_WAIT_S.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    level, discover, mtu = OPTIONS[family]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as there:
            there.setsockopt(level, discover, ALWAYS)
            there.connect((host, port))
            with suppress(OSError):  # too large for the device already
                there.send(bytes(LARGE_BYTES))
            there.settimeout(MTU_WAIT_S)
            with suppress(OSError):  # nobody answers, or its kernel that no such port is open
                there.recv(1)
            return there.getsockopt(level, mtu)
    except OSError:
        return None
