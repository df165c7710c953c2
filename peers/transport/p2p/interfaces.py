"""Where a peer listens, and which of its addresses it tells to others.

The idea: the port is chosen and reserved here before p2pd starts, because p2pd cannot announce a port that it does not
know yet. Also, libp2p listens with SO_REUSEPORT: two peers on one port would silently share each other's calls.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

import psutil

from dht import MAX_ADDRESSES, checked, dialable, host_of, is_public
from meshcee.errors import JoinError, ProtocolError, UsageError

__all__ = ["announced", "has_ipv6_alone", "multiaddress", "reserve"]

# Bridges to containers and virtual machines: the same addresses exist on other machines and mean other things there.
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "podman", "lxc", "lxd")


def multiaddress(where: str, port: int = 0) -> str:
    """HOST, HOST:PORT, [IPV6]:PORT or a multiaddress, as a multiaddress."""
    where = where.strip()
    if not where.startswith("/"):
        host, separator, number = where.rpartition(":")
        if not separator or (where.count(":") > 1 and not where.startswith("[")):
            host, number = where, str(port)
        host = host.strip("[]")
        try:
            kind = f"ip{ipaddress.ip_address(host).version}"
        except ValueError:
            kind = "dns" if ":" not in host else "ip6"
        where = f"/{kind}/{host}/tcp/{number}"
    try:
        return checked(where)
    except ProtocolError as error:
        raise UsageError(f"{error}; HOST:PORT will do, too") from error


def _free_port(kind: str, host: str, port: int, protocol: str) -> tuple[int, socket.socket]:
    """A port that nobody listens on, and a socket that keeps others from taking it while p2pd is (re)started."""
    family = socket.AF_INET6 if kind == "ip6" else socket.AF_INET
    type_ = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
    try:
        with socket.socket(family, type_) as probe:  # refused where the system has no such family
            if protocol == "tcp":  # a connection that is winding down does not count
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if kind == "ip6":
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind((host, port))
            port = probe.getsockname()[1]
    except OSError as error:
        raise JoinError(
            f"this peer cannot listen on {host} port {port} ({error.strerror}): choose another port or address"
        ) from error
    keeper = socket.socket(family, type_)
    try:
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            keeper.setsockopt(socket.SOL_SOCKET, option, 1)
        if kind == "ip6":
            keeper.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        keeper.bind((host, port))  # bound, never listening: it gets no connections
    except OSError as error:
        keeper.close()
        raise JoinError(f"port {port} was taken a moment ago ({error.strerror}): try again") from error
    return port, keeper


def _first_free(kind: str, host: str, ports: Sequence[int], protocol: str) -> tuple[int, socket.socket]:
    for port in ports[:-1]:
        with contextlib.suppress(JoinError):
            return _free_port(kind, host, port, protocol)
    return _free_port(kind, host, ports[-1], protocol)


def reserve(listen: Sequence[str]) -> tuple[tuple[str, ...], list[socket.socket]]:
    """The addresses with their ports filled in, and the sockets that hold them until closed.

    Each of `listen` is an address, or several with commas between. Where any port will do, IPv4 and IPv6 get the same if they can.
    """
    found: list[str] = []
    keepers: list[socket.socket] = []
    try:
        for where in ",".join(listen).split(","):
            parts = multiaddress(where).split("/")
            if len(parts) < 5 or parts[1] not in ("ip4", "ip6") or parts[3] not in ("tcp", "udp"):
                raise UsageError(
                    f"{where!r} is not an address to listen on: give an IP address and a port, e.g. 0.0.0.0:0"
                )
            _, kind, host, protocol, wanted, *_ = parts
            others = [int(a.split("/")[4]) for a in found if a.split("/")[1] != kind] if wanted == "0" else []
            port, keeper = _first_free(kind, host, (*others, int(wanted)), protocol)
            keepers.append(keeper)
            parts[4] = str(port)
            found.append("/".join(parts))
    except BaseException:
        for keeper in keepers:
            keeper.close()
        raise
    return tuple(found), keepers


def _machine_ips() -> list[str]:
    """This machine's addresses, real interfaces before bridges, loopback last."""
    stats = psutil.net_if_stats()
    rows: list[tuple[int, str]] = []
    for name, entries in psutil.net_if_addrs().items():
        if name in stats and not stats[name].isup:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                ip = ipaddress.ip_address(entry.address.partition("%")[0])
                if not ip.is_link_local:
                    rows.append((2 if ip.is_loopback else 1 if name.startswith(_VIRTUAL) else 0, str(ip)))
    best = min((rank for rank, _ in rows), default=2)
    return [ip for rank, ip in rows if rank == best]


def has_ipv6_alone() -> bool:
    """Whether other machines can dial this one by IPv6 and not by IPv4."""
    found = [ipaddress.ip_address(ip) for ip in _machine_ips()]
    return bool(found) and all(ip.version == 6 and not ip.is_loopback for ip in found)


def announced(listening: Sequence[str], announce: Sequence[str] = ()) -> tuple[str, ...]:
    """What others are told: what the user says, and the machine's own addresses in place of 0.0.0.0 and ::.

    Behind a router many reach the public address from outside alone, so it is told beside the machine's own. Another one that the
    user says is a choice among networks, and told alone. Public ones come first, and no more are told than a record may hold.
    Loopback is told only when there is nothing else; then nobody else can dial it anyway.
    """
    port = int(listening[0].split("/")[4])
    said = tuple(multiaddress(a, port) for a in announce)
    if any(re.search(r"/(tcp|udp)/0+(/|$)", one) for one in said):
        raise UsageError(
            f"--announce {','.join(announce)}: nobody can dial port 0; say the port that the router lets in"
        )
    if said and not any(map(is_public, said)):
        return said[:MAX_ADDRESSES]
    ips = _machine_ips()
    found: list[str] = []
    for address in listening:
        _, kind, host, *rest = address.split("/")
        if not ipaddress.ip_address(host).is_unspecified:
            found.append(address)
            continue
        version = 4 if kind == "ip4" else 6
        matching = [ip for ip in ips if ipaddress.ip_address(ip).version == version]
        found += ["/".join(["", kind, ip, *rest]) for ip in matching]
    if others := (*said, *dialable(found)):
        return tuple(dict.fromkeys(others))[:MAX_ADDRESSES]
    return tuple(dict.fromkeys(found)) or tuple(
        a.replace(host_of(a), "127.0.0.1", 1) for a in listening if a.startswith("/ip4/")
    )
