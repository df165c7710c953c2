"""A router with address translation, as at home or in an office: who is behind it goes out by its address, and nobody comes in.

The idea: it is pure, packets in and packets out, so it is tested without a network. Each port inside keeps one port outside, and a
packet comes in only from an address and port to which that port has sent before: a port-restricted cone, as Linux masquerades.
TCP and UDP pass, whole packets only. Nothing is forgotten as long as the lab runs.
"""

from __future__ import annotations

import struct

__all__ = ["Nat"]

_CHECKSUM_AT = {6: 16, 17: 6}  # of TCP and UDP, behind the IPv4 header
_SOURCE, _TARGET = (12, 0), (16, 2)  # where an address is in the packet, and its port behind the header
_FIRST_PORT = 40_000


class Nat:
    """One, with this address outside."""

    def __init__(self, address: str) -> None:
        self.address = bytes(map(int, address.split(".")))
        self._outside: dict[tuple[int, bytes, bytes], bytes] = {}  # protocol, address and port inside -> port outside
        self._inside: dict[tuple[int, bytes], tuple[bytes, bytes]] = {}
        # protocol, port outside, address and port of the other
        self._asked: set[tuple[int, bytes, bytes, bytes]] = set()

    def out(self, packet: bytes) -> bytes | None:
        """The packet of somebody inside as it goes on; None when it does not."""
        if (ends := _ends(packet)) is None:
            return None
        protocol, source, port, target, target_port = ends
        inside = protocol, source, port
        if inside not in self._outside:
            self._outside[inside] = struct.pack("!H", _FIRST_PORT + len(self._outside))
            self._inside[protocol, self._outside[inside]] = source, port
        outside = self._outside[inside]
        self._asked.add((protocol, outside, target, target_port))
        return _rewritten(packet, _SOURCE, self.address, outside)

    def into(self, packet: bytes) -> bytes | None:
        """A packet to the address outside as it comes in; None when nobody inside has asked for it."""
        if (ends := _ends(packet)) is None:
            return None
        protocol, source, port, _, outside = ends
        if (protocol, outside, source, port) not in self._asked:
            return None
        return _rewritten(packet, _TARGET, *self._inside[protocol, outside])


def _ends(packet: bytes) -> tuple[int, bytes, bytes, bytes, bytes] | None:
    """Protocol, address and port of the source, address and port of the target."""
    start, protocol = (packet[0] & 15) * 4, packet[9]
    fragment = struct.unpack_from("!H", packet, 6)[0] & 0x3FFF
    if protocol not in _CHECKSUM_AT or fragment or len(packet) < start + 8:
        return None
    return protocol, packet[12:16], packet[start : start + 2], packet[16:20], packet[start + 2 : start + 4]


def _rewritten(packet: bytes, where: tuple[int, int], address: bytes, port: bytes) -> bytes:
    made = bytearray(packet)
    start = (made[0] & 15) * 4
    at, port_at = where[0], start + where[1]
    before_address, before_port = bytes(made[at : at + 4]), bytes(made[port_at : port_at + 2])
    made[at : at + 4], made[port_at : port_at + 2] = address, port
    _correct(made, 10, before_address, address)
    checksum_at = start + _CHECKSUM_AT[made[9]]
    if made[9] == 6 or made[checksum_at : checksum_at + 2] != b"\0\0":  # UDP may have none
        _correct(made, checksum_at, before_address + before_port, address + port)
    return bytes(made)


def _correct(packet: bytearray, at: int, before: bytes, after: bytes) -> None:
    """The checksum at this place, after some bytes that it covers have changed (RFC 1624)."""
    total = ~struct.unpack_from("!H", packet, at)[0] & 0xFFFF
    total += sum(~word & 0xFFFF for (word,) in struct.iter_unpack("!H", before))
    total += sum(word for (word,) in struct.iter_unpack("!H", after))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, at, ~total & 0xFFFF)
