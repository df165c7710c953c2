"""Real p2pd processes on machines with several devices: the link that works is found, and the nearer one; IPv6 alone will do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.lab import Host, Lab, Link, Network, why_not
from tests.lab.test_two_nats import Peer

REASON = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"the WAN lab cannot run here: {REASON}"),
]
NEAR_S, FAR_S, FAST, SLOW = 0.005, 0.06, 12.5e6, 1e6  # one way; bytes per second


def two_devices(first: Link, second: Link) -> Network:
    """Machines "here" and "there", and a link between the first devices of both, and one between the second ones."""
    hosts = (
        Host("here", "first"),
        Host("here-2", "second", inside="here"),
        Host("there", "first"),
        Host("there-2", "second", inside="there"),
    )
    return Network(hosts, (first, second, Link("first", "second", 0.0), Link("second", "first", 0.0)))


@pytest.mark.parametrize(
    "first",
    [Link("first", "first", NEAR_S, FAST, loss=1.0), Link("first", "first", FAR_S, SLOW)],
    ids=["dead", "far and slow"],
)
async def test_of_two_links_the_one_is_taken_that_serves_better(first: Link, tmp_path: Path) -> None:
    """The second one, which no order of addresses would name before the other."""
    second = Link("second", "second", NEAR_S, FAST)
    async with Lab(two_devices(first, second)) as lab:
        assert lab.addresses["there"].startswith("10.77.")
        assert lab.addresses["there-2"].startswith("10.78.")
        there = await Peer.start(lab, "there", tmp_path)
        announced = [address.split("/")[2] for address in there.said["addresses"]]
        assert sorted(announced) == sorted([lab.addresses["there"], lab.addresses["there-2"]])
        here = await Peer.start(lab, "here", tmp_path, *there.said["addresses"])
        found = await here.measures(there)
        assert found["sees"].split("/")[2] == lab.addresses["here-2"], found  # libp2p's own connection
        assert NEAR_S <= found["latency_s"] < FAR_S, found
        lines = (await lab.stats())["lines"]
        assert lines["second>second"]["bytes"] > 10 * lines.get("first>first", {"bytes": 0})["bytes"]
        await asyncio.gather(here.end(), there.end())


async def test_a_machine_that_has_ipv6_alone_and_one_that_has_both_reach_each_other(tmp_path: Path) -> None:
    hosts = (
        Host("both", "net"),
        Host("both-6", "net", inside="both", ipv6=True),
        Host("six", "net", ipv6=True),
        Host("six-2", "net", inside="six", ipv6=True),  # on the network of the other one's second device
    )
    async with Lab(Network(hosts, (Link("net", "net", NEAR_S, FAST),))) as lab:
        six = await Peer.start(lab, "six", tmp_path, "--ipv6")
        assert {address.split("/")[1] for address in six.said["addresses"]} == {"ip6"}
        both = await Peer.start(lab, "both", tmp_path, *six.said["addresses"])
        assert {address.split("/")[1] for address in both.said["addresses"]} == {"ip4"}
        for near, far in ((both, six), (six, both)):  # the second over the connection that the first has made
            found = await near.measures(far)
            assert found["latency_s"] >= NEAR_S, found
            assert found["bytes_per_s"] > 0, found
            assert found["sees"].startswith("/ip6/fd77:1::"), found
        await asyncio.gather(both.end(), six.end())


@pytest.mark.parametrize("near", ["ip4", "ip6"])
async def test_of_two_versions_of_ip_the_one_with_the_nearer_link_is_taken(near: str, tmp_path: Path) -> None:
    """Both ends listen on both; the other version takes a way round."""
    hosts = (
        Host("here", "ip4"),
        Host("here-6", "ip6", inside="here", ipv6=True),
        Host("there", "ip4"),
        Host("there-6", "ip6", inside="there", ipv6=True),
    )
    links = [Link(net, net, NEAR_S if net == near else FAR_S, FAST) for net in ("ip4", "ip6")]
    apart = (Link("ip4", "ip6", 0.0), Link("ip6", "ip4", 0.0))
    async with Lab(Network(hosts, (*links, *apart))) as lab:
        there = await Peer.start(lab, "there", tmp_path, "--both")
        assert {address.split("/")[1] for address in there.said["addresses"]} == {"ip4", "ip6"}
        here = await Peer.start(lab, "here", tmp_path, "--both", *there.said["addresses"])
        found = await here.measures(there)
        assert NEAR_S <= found["latency_s"] < FAR_S, found
        await asyncio.gather(here.end(), there.end())
