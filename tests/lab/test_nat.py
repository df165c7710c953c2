"""A router with translation: addresses, checksums, and who may come in."""

from __future__ import annotations

import asyncio
import struct
import sys

import pytest

from benchmarks.lab import Host, Lab, Link, Network, why_not
from benchmarks.lab.nat import Nat

TCP, UDP = 6, 17
INSIDE, OUTSIDE, SERVER, OTHER = "10.77.0.1", "10.77.255.1", "10.77.0.9", "10.77.0.8"


def packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def checksum(data: bytes) -> int:
    total = sum(word for (word,) in struct.iter_unpack("!H", data + b"\0" * (len(data) % 2)))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(protocol: int, source: tuple[str, int], target: tuple[str, int], data: bytes = b"hello") -> bytes:
    ports = struct.pack("!HH", source[1], target[1])
    if protocol == TCP:
        body = bytearray(ports + struct.pack("!IIHHHH", 1, 2, 0x5010, 1000, 0, 0) + data)
    else:
        body = bytearray(ports + struct.pack("!HH", 8 + len(data), 0) + data)
    pseudo = packed(source[0]) + packed(target[0]) + struct.pack("!HH", protocol, len(body))
    struct.pack_into("!H", body, 16 if protocol == TCP else 6, checksum(pseudo + body))
    head = bytearray(struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(body), 7, 0x4000, 64, protocol, 0))
    head += packed(source[0]) + packed(target[0])
    struct.pack_into("!H", head, 10, checksum(head))
    return bytes(head + body)


def ends(data: bytes) -> tuple[tuple[str, int], tuple[str, int]]:
    source, target = struct.unpack_from("!HH", data, 20)
    return (".".join(map(str, data[12:16])), source), (".".join(map(str, data[16:20])), target)


@pytest.mark.parametrize("protocol", [TCP, UDP])
def test_what_goes_out_and_its_answer_are_whole_packets_of_other_addresses(protocol: int) -> None:
    nat = Nat(OUTSIDE)
    went = nat.out(packet(protocol, (INSIDE, 5000), (SERVER, 80)))
    assert went is not None
    (address, port), target = ends(went)
    assert (address, target) == (OUTSIDE, (SERVER, 80))
    assert went == packet(protocol, (OUTSIDE, port), (SERVER, 80))
    came = nat.into(packet(protocol, (SERVER, 80), (OUTSIDE, port)))
    assert came == packet(protocol, (SERVER, 80), (INSIDE, 5000))


def test_a_port_inside_keeps_one_outside_and_only_who_was_asked_comes_in() -> None:
    nat = Nat(OUTSIDE)
    first, again, other = (
        nat.out(packet(TCP, (INSIDE, port), (server, 80)))
        for port, server in ((5000, SERVER), (5000, OTHER), (5001, SERVER))
    )
    assert first
    assert again
    assert other
    assert ends(first)[0] == ends(again)[0] != ends(other)[0]
    port = ends(first)[0][1]
    assert nat.into(packet(TCP, (OTHER, 80), (OUTSIDE, port)))
    assert nat.into(packet(TCP, (OTHER, 81), (OUTSIDE, port))) is None
    assert nat.into(packet(TCP, (OTHER, 80), (OUTSIDE, ends(other)[0][1]))) is None
    assert nat.into(packet(UDP, (SERVER, 80), (OUTSIDE, port))) is None
    assert nat.out(packet(1, (INSIDE, 0), (SERVER, 0))) is None


REASON = why_not()
TALK = """
import socket, sys
def dial(address):
    try:
        with socket.create_connection((address, 9000), 2) as there:
            there.settimeout(30)
            return there.makefile().readline().strip()
    except OSError as error:
        return "nobody"
print(*map(dial, sys.argv[1:]))
"""
LISTEN = """
import socket
with socket.create_server(("0.0.0.0", 9000)) as server:
    print("up", flush=True)
    while True:
        one, (address, _) = server.accept()
        with one:
            one.sendall(address.encode() + b"\\n")
"""


def two_nats() -> Network:
    hosts = (Host("cloud", "net"), Host("ann", "net", behind="home"), Host("ben", "net", behind="office"))
    return Network(hosts, (Link("net", "net", 0.005),))


@pytest.mark.skipif(REASON is not None, reason=f"the WAN lab cannot run here: {REASON}")
async def test_behind_two_routers_all_reach_the_cloud_and_nobody_reaches_them() -> None:
    async with Lab(two_nats()) as lab:
        for host in lab.addresses:
            listening = await lab.run(host, [sys.executable, "-c", LISTEN], stdout=asyncio.subprocess.PIPE)
            assert listening.stdout is not None
            await listening.stdout.readline()
        heard = {}
        for host, others in (("ann", "cloud ben"), ("ben", "cloud ann"), ("cloud", "ann ben")):
            where = [lab.addresses[other] for other in others.split()]
            talk = await lab.run(host, [sys.executable, "-c", TALK, *where], stdout=asyncio.subprocess.PIPE)
            heard[host] = (await talk.communicate())[0].decode().split()
        assert heard == {"ann": ["10.77.255.1", "nobody"], "ben": ["10.77.255.2", "nobody"], "cloud": ["nobody"] * 2}
