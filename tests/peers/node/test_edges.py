"""What a peer meets at the edges of its work: an owner that waits long, a closed port, a mesh without a head, a first epoch."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.virtual_chaos import captured_job, job_of
from meshcee.config import Limits, Timeouts
from meshcee.errors import ClockError, JoinError, ProtocolError
from meshcee.fields import plain
from peers.device import Graphs
from peers.measure.sounding import ASK_S, sound
from peers.node.early import JoinOptions
from peers.node.in_process import QUICK, InProcess
from peers.state.restoring import Lender
from peers.transport.base import Frame, Stream
from peers.transport.memory import MemoryNetwork
from peers.wire import messages
from peers.wire.offer import Terms
from tests.peers.transport.harness import mesh
from tests.rig.mesh_fixture import members
from tests.rig.virtual_time import virtual_time


@virtual_time
async def test_what_is_left_of_an_epoch_is_kept_for_as_long_as_its_owner_looks_for_peers_and_never_shorter() -> None:
    """`--regroup` is the owner's; members hear of it with the offer. A standby comes later than a short one, and needs it, too."""
    times, digest = Timeouts(), "00" * 32
    async with MemoryNetwork().transport("p0") as here:
        remains = Lender(here, times)
        for regroup_s, kept_s in ((10 * times.regroup_s, 10 * times.regroup_s), (0.0, times.regroup_s)):
            offer: Any = SimpleNamespace(
                run="run", owner="owner", resumes=True, terms=SimpleNamespace(regroup_s=regroup_s)
            )
            remains.for_epoch(offer).keep("p2", 3, {"weight": digest}, {digest: torch.zeros(1)})
            remains.over()
            await asyncio.sleep(0.9 * kept_s)
            assert remains.copies.find(digest) is not None
            await asyncio.sleep(0.2 * kept_s)
            assert remains.copies.find(digest) is None


def test_members_hear_how_long_the_owner_looks_for_peers_and_believe_no_more_than_a_day() -> None:
    said = plain(Terms.of(job_of(8), captured_job(), 7.5))
    assert Terms.from_json(said).regroup_s == 7.5
    assert Terms.from_json({**said, "regroup_s": 1e12}).regroup_s == 86400
    with pytest.raises(ProtocolError, match="regroup_s"):
        Terms.from_json({**said, "regroup_s": "long"})


async def test_a_link_is_asked_about_behind_a_firewall_that_drops_the_direct_port() -> None:
    heard: asyncio.Queue[Frame] = asyncio.Queue(maxsize=4)

    async def hear(stream: Stream) -> None:
        await heard.put(await stream.recv())

    async with mesh("direct", timeouts=Timeouts(direct_s=2 * ASK_S)) as (a, b):
        with socket.create_server(("127.0.0.1", 0)) as swallows:
            b.direct.ports = {4: swallows.getsockname()[1]}  # type: ignore[attr-defined]
            b.serve("sound", hear)
            asks: Any = SimpleNamespace(transport=a, addresses_of=lambda peers: dict.fromkeys(peers, b.addresses))
            for _ in range(2):
                await sound(asks, [(b.peer_id, "another")])
                async with asyncio.timeout(ASK_S):
                    assert (await heard.get()).header == {"peer": "another"}


async def test_a_mesh_that_nobody_coordinates_cannot_be_joined_and_says_so() -> None:
    async with InProcess(JoinOptions(), timeouts=replace(QUICK, join_s=0.2)) as here:
        alone = await here.start("alone", lends=False)
        with pytest.raises(JoinError, match=r"nobody has coordinated this mesh .* `meshcee status`"):
            await alone.see_the_mesh()


async def test_the_mesh_counts_on_a_device_once_its_graphs_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer that was needed at once made a recovery wait for what it imported."""
    ready, asked = asyncio.Event(), asyncio.Event()

    async def get_ready(self: Graphs) -> None:
        asked.set()
        await ready.wait()

    async with InProcess(JoinOptions()) as here:
        first = await here.start("first", lends=False)
        monkeypatch.setattr(Graphs, "get_ready", get_ready)
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            starting = group.create_task(here.start("late"))
            await asked.wait()
            await first.directory.refresh()
            assert "late" not in first.names().values()
            ready.set()
            late = await starting
            await first.wait_for_peers([late.peer_id])
            assert first.devices()


@pytest.mark.parametrize(
    ("off_s", "why"), [(-46.0, r"is 4\d s ahead of this machine's: set both by"), (137.0, "or this machine's ahead")]
)
async def test_a_machine_whose_clock_is_off_is_told_so_and_not_that_nobody_is_there(off_s: float, why: str) -> None:
    """Storms 65042 and 800444: the owner's clock was set before its first plan."""
    async with InProcess(JoinOptions(), timeouts=replace(QUICK, join_s=0.5)) as here:
        await here.start("right")
        late = await here.start("late", lends=False, clock=lambda: time.time() + off_s)
        with pytest.raises(ClockError, match=f"{why}.* then try again"):
            await late.see_the_mesh()


async def test_a_clock_that_is_set_right_in_the_last_moment_was_the_reason_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Storms 901267 and 9290149: their owners were told that nobody coordinates."""
    off_s = -46.0

    async def wait() -> None:
        nonlocal off_s
        await late.directory.refresh(everything=False)
        off_s = 0.0
        await late.directory.refresh(everything=False)
        await asyncio.get_running_loop().create_future()

    async with InProcess(JoinOptions(), timeouts=replace(QUICK, join_s=0.5)) as here:
        await here.start("right")
        late = await here.start("late", lends=False, clock=lambda: time.time() + off_s)
        monkeypatch.setattr(late, "coordinator", wait)
        with pytest.raises(ClockError, match=r"is 4\d s ahead of this machine's.*then try again"):
            await late.see_the_mesh()
        assert not late.directory.off


async def test_the_very_first_epoch_is_answered_in_words() -> None:
    network = MemoryNetwork()
    async with members(network, 1, Limits()), network.transport("owner") as owner:
        for number in range(2):
            stream = await owner.open("p0", "job")
            await stream.send(Frame(messages.OFFER, {"epoch": [0, number], "run": "run"}))
            async with asyncio.timeout(10):
                while (reply := await stream.recv()).kind == messages.PONG:
                    pass
            assert reply.kind == messages.REFUSED
            assert "is over" not in reply.header["message"]
            await stream.aclose()
