"""The exchange of an invite takes bounded time and memory on both sides, whoever is at the other end."""

from __future__ import annotations

import asyncio

import pytest

from dht import ENROL, Identity, Members
from meshcee.config import Timeouts
from meshcee.errors import JoinError
from peers.node import admission
from peers.node.admission import Admin, enrol
from peers.transport import Stream, StreamClosed, endpoint
from tests.mutation import breaks, changed
from tests.peers.node.test_members import SHORT, Office, office
from tests.rig.virtual_time import run

PATIENT = Timeouts(dial_s=30.0, handshake_s=30.0, join_s=60.0, shutdown_s=1.0)


async def stands(here: Office, after_s: float = 0.0) -> float:
    """A new identity proves the invite, and then says nothing; when its stream is over."""
    await asyncio.sleep(after_s)
    token, peer = here.invite(uses=None), Identity.generate()
    assert token.grant is not None
    shown = Members(here.root.peer_id, token.grant.pack())
    async with here.network.transport(peer.peer_id, token.key, timeouts=PATIENT, members=shown) as door:
        stream = await door.open(here.at, ENROL)
        with pytest.raises(StreamClosed):
            await stream.recv()
        return asyncio.get_running_loop().time()


def test_who_proves_an_invite_and_says_nothing_is_hung_up_on() -> None:
    async def hung_up() -> None:
        async with office() as here, asyncio.timeout(PATIENT.join_s):
            began_s = asyncio.get_running_loop().time()
            ended_s = await stands(here)
            assert ended_s - began_s == pytest.approx(SHORT.handshake_s, abs=0.1)

    run(hung_up())
    with changed(Admin, "async with asyncio.timeout(self._timeouts.handshake_s):", "if True:"):
        assert breaks(lambda: run(hung_up()))


def test_of_ever_new_identities_that_prove_one_invite_the_oldest_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_STRANGERS", 3)

    async def bounded() -> None:
        async with office() as here:
            began_s = asyncio.get_running_loop().time()
            ended_s = await asyncio.gather(*(stands(here, i / 8) for i in range(8)))
            assert sum(one < began_s + SHORT.handshake_s for one in ended_s) == 5

    run(bounded())
    with changed(endpoint.Endpoint, "if welcome.purpose != ENROL:", "if True:"):
        assert breaks(lambda: run(bounded()))


def test_a_newcomer_waits_no_longer_for_an_admin_that_says_nothing() -> None:
    async def waits() -> None:
        async with office() as here, asyncio.timeout(10 * PATIENT.join_s):
            transport = here.transport
            transport.serve(ENROL, silent)
            token, peer, loop = here.invite(), Identity.generate(), asyncio.get_running_loop()
            assert token.grant is not None
            shown = Members(here.root.peer_id, token.grant.pack())
            began_s = loop.time()
            async with here.network.transport(peer.peer_id, token.key, timeouts=PATIENT, members=shown) as door:
                with pytest.raises(JoinError, match="does not answer: nothing came within 60 s"):
                    await enrol(door, token, timeouts=PATIENT)
            assert loop.time() - began_s == pytest.approx(PATIENT.join_s, abs=1.5)

    run(waits())
    with changed(admission.enrol, "async with asyncio.timeout(within_s):", "if True:"):
        assert breaks(lambda: run(waits()))


async def silent(stream: Stream) -> None:
    await asyncio.sleep(3600)
