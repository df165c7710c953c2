"""A graph that crashes, hangs or grows while it is checked is an offer refused: the peer lives on and trains the next job."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from meshcee.capture import capture
from meshcee.config import Limits, Timeouts
from meshcee.eager import plain
from meshcee.errors import GraphError
from peers.device.compute import Compute
from peers.device.worker import Workers
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.state.keeping import Supplies
from peers.transport.base import Frame
from peers.transport.memory import MemoryNetwork
from peers.wire import messages
from peers.wire.offer import Offer
from tests.peers.measure.test_block_profiler import profiler, request_of
from tests.peers.member.test_training import make_job
from tests.rig.mesh_fixture import even_plan, members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")

MICRO = 4
DEEDS = {b"crash": r"\(SIGSEGV\)", b"without end": "more memory"}  # tests of workers have more


@contextlib.contextmanager
def offering(deed: bytes) -> Iterator[None]:
    """Owners send this in the place of their graph."""
    made = Offer.frame

    def hostile(offer: Offer, *args: object) -> Frame:
        frame = made(offer, *args)  # type: ignore[arg-type]
        return Frame(frame.kind, frame.header, [frame.payloads[0], deed])

    with mock.patch.object(Offer, "frame", hostile):
        yield


async def test_a_peer_survives_offers_and_profiles_that_end_the_check_and_trains_the_next_job() -> None:
    job = make_job()
    captured, network, limits = capture(job), MemoryNetwork(), replace(Limits(), check_s=0.5, check_bytes=256 << 20)
    plan, reports = even_plan(captured.train.num_blocks, 1, job.batch_size, MICRO), list[Report]()

    async def hear(report: Report) -> None:
        reports.append(report)

    async with (
        Workers(limits, Timeouts(), "tests.rig.hostile_work") as graphs,
        Compute() as compute,
        members(network, 1, limits, graphs=graphs) as [member],
        network.transport("owner") as owner,
        network.transport("measuring") as measuring,
    ):

        def epoch(number: int) -> Owner:
            ours = {"addresses": {}, "names": {}, "timeouts": Timeouts(), "limits": limits, "kept": Supplies()}
            return Owner(job, captured, plan, (1, "p0"), (1, number), owner, **ours)  # type: ignore[arg-type]

        for number, (deed, how) in enumerate(DEEDS.items(), start=1):
            with offering(deed), pytest.raises(GraphError) as refused:
                await epoch(number).train(Feed(job, captured, MICRO), hear)
            assert re.search(f"a graph .*{how}", str(refused.value)), refused.value
            await member.wait_until_idle()
        measuring.serve("profile", profiler(compute, graphs=graphs).serve)
        stream = await owner.open("measuring", "profile")
        request = request_of(job, captured).pack()
        await stream.send(Frame(messages.PROFILE, {"graph": hashlib.sha256(b"crash").hexdigest()}, [request]))
        assert (await stream.recv()).kind == messages.WANTED
        await stream.send(Frame(messages.GRAPH, {}, [b"crash"]))
        said = (await stream.recv()).header
        assert said["error"] == "GraphError"
        assert "SIGSEGV" in said["message"]
        assert reports == []
        await epoch(len(DEEDS) + 1).train(Feed(job, captured, MICRO), hear)
    assert [report.loss for report in reports] == plain(make_job(), 5, MICRO)[0]
