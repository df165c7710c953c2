"""A graph that crashes, hangs or grows while it is checked is an offer refused: the peer lives on and trains the next job."""

from __future__ import annotations

import asyncio
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
from meshcee.plan import Epoch, Term
from peers.device.compute import Compute
from peers.device.worker import Workers
from peers.owner.epoch import Owner, Report
from peers.owner.feed import Feed
from peers.state.keeping import Supplies
from peers.transport.base import Frame, StreamClosed
from peers.transport.memory import MemoryNetwork
from peers.wire import messages
from peers.wire.offer import Offer, Terms
from peers.wire.weights import StateSender
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


async def test_an_input_that_is_larger_than_its_micro_batch_ends_the_job_before_memory_is_spent() -> None:
    """Samples wait for their step, so an owner could fill a peer's memory with them."""
    job = make_job()
    captured, network = capture(job), MemoryNetwork()
    plan = even_plan(captured.train.num_blocks, 1, job.batch_size, MICRO)
    offer = Offer(
        Terms.of(job, captured, 1.0),
        plan,
        Epoch(1, 1),
        Term(1, "p0"),
        "p0",
        captured.train,
        None,
        {},
        run="r",
        owner="o",
    )
    async with members(network, 1, Limits()) as [member], network.transport("o") as owner:
        stream = await owner.open("p0", "job")
        for frame in (offer.frame(), *StateSender(captured.state).frames(offer.expected_state)):
            await stream.send(frame)
        while (frame := await stream.recv()).kind == messages.PONG:
            pass
        assert frame.kind == messages.READY
        size = offer.max_fed_bytes + 1
        swollen = {"round": 1, "micro": 0, "names": ["x"], "tensors": [["uint8", [size]]]}
        async with asyncio.timeout(Timeouts().silent_s / 2):  # else it is the owner's silence that ends the job
            with contextlib.suppress(StreamClosed):
                await stream.send(Frame(messages.INPUT, swollen, [bytes(size)]))
                while True:
                    await stream.recv()
            await member.wait_until_idle()
