"""Links that are cut and halved for a while, on a lab that only notes what it is asked for."""

from __future__ import annotations

from typing import Any

from benchmarks.lab import Link
from benchmarks.wires import BANDWIDTH, LATENCY_S, Wires, network_of

HOSTS = ("a", "b", "owner")


class Noted:
    def __init__(self) -> None:
        self.links: dict[tuple[str, str], Link] = {}

    async def set(self, link: Link) -> None:
        self.links[link.source, link.target] = link


def test_every_pair_of_hosts_has_a_link_of_its_own() -> None:
    network = network_of(HOSTS)
    assert {(link.source, link.target) for link in network.links} == {(x, y) for x in HOSTS for y in HOSTS}


async def test_what_overlaps_ends_with_the_last() -> None:
    lab: Any = Noted()
    wires = Wires(lab)
    await wires.cut([("b", "a")])
    await wires.cut([("a", "b"), ("a", "owner")])
    await wires.halve([("a", "b")])
    await wires.cut([("b", "a")], -1)
    assert lab.links["a", "b"] == Link("a", "b", LATENCY_S, BANDWIDTH / 2, loss=1.0)
    assert lab.links["b", "a"] == Link("b", "a", LATENCY_S, BANDWIDTH / 2, loss=1.0)
    await wires.cut([("a", "b"), ("a", "owner")], -1)
    await wires.halve([("a", "b")], -1)
    assert all(link == Link(*pair, LATENCY_S, BANDWIDTH) for pair, link in lab.links.items())
    assert len(lab.links) == 4
