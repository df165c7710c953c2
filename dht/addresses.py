"""libp2p addresses as text: which peer, which of them others can dial.

The idea: an address is read and judged here without libp2p. So what arrives from the network or from a user's
clipboard is checked before any library sees it, and 127.0.0.1 is never offered to another machine.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from meshcee.errors import ProtocolError

__all__ = [
    "MAX_ADDRESSES",
    "MAX_ADDRESS_CHARS",
    "checked",
    "dialable",
    "host_of",
    "is_loopback",
    "is_public",
    "peer_of",
    "told_private",
]

MAX_ADDRESSES = 16  # of one peer
MAX_ADDRESS_CHARS = 256

_PEER = r"/p2p/[1-9A-HJ-NP-Za-km-z]{32,64}"
_ADDRESS = re.compile(
    r"(?:/(?:ip4|ip6)/[0-9A-Fa-f.:]{1,45}|/(?:dns|dns4|dns6|dnsaddr)/[0-9A-Za-z._-]{1,253})"
    r"(?:/(?:tcp|udp)/[0-9]{1,5})?(?:/(?:quic|quic-v1|ws|wss|tls))*"
    rf"(?:{_PEER}/p2p-circuit)?(?:{_PEER})?"
)


def checked(address: str) -> str:
    """The address itself, or ProtocolError that says what an address looks like."""
    if len(address) > MAX_ADDRESS_CHARS or not _ADDRESS.fullmatch(address):
        raise ProtocolError(
            f"{address[:80]!r} is not a multiaddress, which looks like /ip4/192.0.2.1/tcp/31337/p2p/12D3KooW..."
        )
    port = re.search(r"/(?:tcp|udp)/([0-9]+)", address)
    if port and not 0 <= int(port[1]) < 65536:
        raise ProtocolError(f"the port in {address!r} is not between 0 and 65535")
    kind, host = address.split("/")[1:3]
    if kind in ("ip4", "ip6"):
        try:
            parsed = ipaddress.ip_address(host)
        except ValueError as error:
            raise ProtocolError(f"{host!r} in {address!r} is not an IP address") from error
        if (kind == "ip4") != (parsed.version == 4):
            raise ProtocolError(f"{host!r} in {address!r} is not an {kind} address")
    return address


def peer_of(address: str) -> str | None:
    """The peer id at the end of an address: behind a relay, that of the peer and not of the relay."""
    match = re.search(r"/p2p/([1-9A-HJ-NP-Za-km-z]{32,64})$", address)
    return match[1] if match else None


def host_of(address: str) -> str:
    """The IP address or name in an address."""
    return address.split("/")[2]


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host_of(address))
    except ValueError:  # a name
        return None


def is_loopback(address: str) -> bool:
    ip = _ip(address)
    return host_of(address) == "localhost" if ip is None else ip.is_loopback


def is_public(address: str) -> bool:
    """Whether machines of other networks may dial it; a name counts as such."""
    ip = _ip(address)
    return not is_loopback(address) if ip is None else ip.is_global


def told_private(addresses: Sequence[str]) -> str:
    """What to add where none of these has answered; nothing where machines of other networks may dial one."""
    if not addresses or any(map(is_public, addresses)):
        return ""
    return (
        ". These addresses lead there from that machine's own network only; from elsewhere it takes `meshcee peer --announce "
        "PUBLIC-ADDRESS:PORT` on that machine, and a line that it has printed since"
    )


def dialable(addresses: Iterable[str]) -> Sequence[str]:
    """The addresses that another machine may dial, public ones first.

    When there is nothing but loopback the result is empty: the caller says so rather than print a useless address.
    """
    kept = []
    for address in dict.fromkeys(addresses):
        ip = _ip(address)
        if is_loopback(address) or (ip is not None and (ip.is_unspecified or ip.is_link_local or ip.is_multicast)):
            continue
        kept.append(address)
    return tuple(sorted(kept, key=is_public, reverse=True))
