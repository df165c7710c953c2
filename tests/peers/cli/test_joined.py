"""What a peer has joined, as a sentence: from records alone, and what is not known yet is said to be unknown or left out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dht import Identity, LinkRecord, PeerRecord
from meshcee.figures import FEW, DeviceProfile, LinkProfile
from peers.cli.joining.joined import Joined, joined, look
from peers.node.early import JoinOptions
from peers.node.in_process import InProcess
from tests.rig.virtual_time import virtual_time

ME, ANNA, BEN, CARL = (Identity.generate().peer_id for _ in range(4))
NAMES = {ME: "me", ANNA: "anna", BEN: "ben", CARL: "carl"}
DEVICE = DeviceProfile("cpu", "a", 1 << 30, 1e9)
NEAR, FAR = LinkProfile(0.0004, 1e8), LinkProfile(0.034, 1e7)


def peer(peer_id: str, region: str | None = None, *, lends: bool = True) -> PeerRecord:
    return PeerRecord(peer_id, 1.0, name=NAMES[peer_id], region=region, device=DEVICE if lends else None)


def links(found: Mapping[tuple[str, str], LinkProfile]) -> dict[str, LinkRecord]:
    sources = {source for source, _ in found}
    return {s: LinkRecord(s, 1.0, tuple((to, link) for (by, to), link in found.items() if by == s)) for s in sources}


def seen(
    found: Mapping[tuple[str, str], LinkProfile],
    *peers: PeerRecord,
    at: str = ANNA,
    coordinator: str | None = ANNA,
) -> Joined:
    return joined(ME, at, "4f3a9911", {p.peer_id: p for p in (peer(ME), *peers)}, links(found), coordinator)


def test_all_that_is_known_is_one_sentence() -> None:
    measured = {
        (ME, ANNA): NEAR,
        (ANNA, ME): NEAR,
        (ME, BEN): NEAR,
        (BEN, ME): NEAR,
        (ME, CARL): FAR,
        (CARL, ANNA): FAR,
    }
    found = seen(measured, peer(ANNA, "lab"), peer(BEN), peer(CARL, "home"))
    assert found.sentence() == (
        "joined the mesh of anna: 3 peers there besides this one, coordinator anna, you are in region lab with anna, ben (0.4 ms), "
        "reached by 2 of 3"
    )
    assert not found.is_whole
    assert found.advice() is None
    assert seen({**measured, (CARL, ME): FAR}, peer(ANNA), peer(BEN), peer(CARL)).is_whole


def test_without_hints_a_region_is_who_is_in_it_and_alone_the_nearest_is_named() -> None:
    assert "you are in a region with anna (0.4 ms)" in seen({(ANNA, ME): NEAR}, peer(ANNA)).sentence()
    far = {(ME, ANNA): FAR, (ANNA, ME): FAR, (ANNA, BEN): NEAR, (BEN, ME): FAR}
    alone = seen(far, peer(ANNA, "lab"), peer(BEN, "lab"))
    assert "nobody is near: anna is the nearest (34.0 ms), reached by 2 of 2" in alone.sentence()


def test_what_is_not_known_is_said_or_left_out() -> None:
    assert seen({}).sentence() == "joined mesh 4f3a9911: no other peer lends a device there yet"
    assert joined(ME, "", "", {}, {}, None).sentence().startswith("joined an open mesh: ")
    found = seen({}, peer(ANNA), peer(BEN, lends=False), coordinator=None)
    assert found.sentence() == (
        "joined the mesh of anna: 1 peer there besides this one, nobody coordinates yet, no link is measured yet, reached by 0 of 1"
    )
    assert not found.is_whole
    advice = str(found.advice())
    assert "--join LINE" in advice, "alone, the command would found another mesh"
    assert "--listen 0.0.0.0:4001 --announce PUBLIC-ADDRESS:4001 --direct-port 4002" in advice
    assert "4001 and 4002" in advice, "both are let in"
    assert "coordinator …" in seen({}, peer(ANNA), coordinator=CARL).sentence(), "its record has not come yet"


def test_in_a_large_mesh_not_everybody_measures_everybody() -> None:
    ids = [Identity.generate().peer_id for _ in range(FEW)]
    NAMES.update({p: p[-4:] for p in ids})
    found = seen({(ME, ids[0]): NEAR, (ids[0], ME): NEAR}, *map(peer, ids), at="", coordinator=ids[0])
    assert found.is_whole
    assert found.advice() is None


def test_a_script_reads_the_same_facts() -> None:
    told = seen({(ANNA, ME): NEAR}, peer(ANNA, "lab")).facts()["joined"]
    assert (told["founder"], told["others"], told["reached_by"], told["near"]) == ("anna", 1, 1, ("anna",))


@pytest.mark.parametrize("others", [0, 2])
@virtual_time
async def test_a_peer_waits_until_it_knows_and_no_longer(others: int) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    options = JoinOptions(measures=False)
    async with InProcess(options, clock=loop.time, monotonic=loop.time) as here:
        for i in range(others):
            await here.start(f"p{i}")
        me = await here.start("me")
        first = next(iter(here.agents.values()))
        start_s = loop.time()
        found = await look(me, first.peer_id, "4f3a9911", within_s=15.0)
        assert found.others == others
        assert found.coordinator is not None
        assert (loop.time() - start_s < 14) == found.is_whole == (not others), "nobody measures here"
