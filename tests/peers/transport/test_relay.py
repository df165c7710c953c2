"""Two peers between which no connection can be made: a third passes on what it cannot read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from dht import Identity
from meshcee.errors import JoinError, NotPermittedError
from peers.transport.base import Frame, Stream, StreamClosed
from peers.transport.memory import MemoryNetwork, MemoryTransport
from peers.transport.p2p.relay import MOST_OF_ONE, RECORD_BYTES, RELAY, RELAYED, Relayed
from tests.peers.transport.harness import KEY, SHORT, SMALL, echo, eventually, last_words, pair, same

LIMITS = replace(SMALL, streams_per_peer=2 * MOST_OF_ONE)
PATIENT = replace(SHORT, dial_s=30.0, handshake_s=30.0)


class Here(Relayed, MemoryTransport):
    """Of a network inside this process."""


class Mesh:
    """ann and ben are behind two routers, the relay is not."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(check=True)
        self.identities = [Identity.generate() for _ in range(3)]
        self.ann, self.ben, self.relay = (
            Here(self.network, identity.peer_id, KEY, timeouts=PATIENT, limits=LIMITS) for identity in self.identities
        )
        self.network.cut(self.ann.peer_id, self.ben.peer_id)

    def allow(self, *, passes_on: bool = True) -> None:
        seeds = [f"/ip4/192.0.2.1/tcp/4001/p2p/{self.relay.peer_id}"]
        self.ann.allow(self.identities[0], seeds, passes_on=True)
        self.ben.allow(self.identities[1], seeds, passes_on=True)
        self.relay.allow(self.identities[2], [], passes_on=passes_on)


@contextlib.asynccontextmanager
async def mesh(*, passes_on: bool = True) -> AsyncIterator[Mesh]:
    made = Mesh()
    made.allow(passes_on=passes_on)
    async with made.ann, made.ben, made.relay:
        yield made


async def test_frames_of_any_size_pass_both_ways_and_the_far_end_is_who_it_says() -> None:
    async with mesh() as m:
        near, far = await pair(m.ann, m.ben)
        assert (near.peer_id, far.peer_id) == (m.ben.peer_id, m.ann.peer_id)
        payloads = [bytes(range(256)) * 16384, b"", b"x" * (RECORD_BYTES + 1)]
        for source, target in ((near, far), (far, near)):
            sent = Frame("tensors", {"step": 3}, payloads)
            async with asyncio.TaskGroup() as group:
                group.create_task(source.send(sent))
                assert same(await target.recv(), sent)
        await near.aclose()
        with pytest.raises(StreamClosed):
            await far.recv()
        await eventually(lambda: not any(s.purpose in (RELAY, RELAYED) and not s.closed for s in m.relay.streams), 30.0)


@pytest.mark.parametrize("answers", [1, 20])
async def test_last_words_are_passed_on_though_the_other_end_keeps_sending(answers: int) -> None:
    async with mesh() as m:
        for _ in range(20):
            assert await last_words(m.ann, m.ben, answers) == list(range(answers))


async def test_what_the_relay_holds_has_nothing_of_what_is_said() -> None:
    seen: list[bytes] = []
    async with mesh() as m:
        await tapped(m, lambda payload: seen.append(bytes(payload)))
        near, far = await pair(m.ann, m.ben)
        await near.send(Frame("secret", {}, [b"a word that nobody else may read" * 100]))
        assert (await far.recv()).kind == "secret"
        assert sum(map(len, seen)) > 3200
        assert not any(b"a word" in record or b"secret" in record or b"hello" in record for record in seen)


async def tapped(m: Mesh, look: Callable[[memoryview], Any]) -> None:
    """The relay passes on as a malicious one might: `look` sees each record, and may change it in place."""

    async def one_way(source: Stream, target: Stream) -> None:
        with contextlib.suppress(StreamClosed):
            while True:
                frame = await source.recv()
                for payload in frame.payloads:
                    look(memoryview(payload))
                await target.send(frame)
        await target.aclose()

    async def pass_on(carrier: Stream) -> None:
        asked = (await carrier.recv()).header
        further = await m.relay.open(asked["peer"], RELAYED)
        await further.send(Frame("from", {"peer": carrier.peer_id, "key": asked["key"]}))
        async with asyncio.TaskGroup() as group:
            group.create_task(one_way(carrier, further))
            group.create_task(one_way(further, carrier))

    m.relay.serve(RELAY, pass_on)


async def test_a_changed_record_ends_the_stream() -> None:
    def flip(record: memoryview) -> None:
        if len(record) > 1000:
            record[500] ^= 1

    async with mesh() as m:
        await tapped(m, flip)
        near, far = await pair(m.ann, m.ben)
        await near.send(Frame("small"))
        assert (await far.recv()).kind == "small"
        await near.send(Frame("large", {}, [bytes(2000)]))
        with pytest.raises(StreamClosed):
            await far.recv()
        with pytest.raises(StreamClosed):
            await near.recv()


async def test_a_relay_cannot_answer_for_another_peer() -> None:
    async with mesh() as m:

        async def pretend(carrier: Stream) -> None:
            await carrier.recv()
            await carrier.send(Frame("through", {"key": bytes(range(32)), "signature": m.identities[2].sign(b"x")}))
            await carrier.recv()

        m.relay.serve(RELAY, pretend)
        with pytest.raises(JoinError, match="not from peer"):
            await m.ann.open(m.ben.peer_id, "test")


async def test_a_relay_cannot_come_as_another_peer() -> None:
    async with mesh() as m:
        m.ben.serve("test", echo)
        carrier = await m.relay.open(m.ben.peer_id, RELAYED)
        await carrier.send(Frame("from", {"peer": m.ann.peer_id, "key": bytes(range(32))}))
        assert (await carrier.recv()).kind == "through"
        await carrier.send(Frame("proof", {"signature": m.identities[2].sign(b"x")}))
        with pytest.raises(StreamClosed):
            await carrier.recv()


async def test_who_can_be_reached_is_not_relayed() -> None:
    async with mesh() as m:
        m.network.heal()
        await pair(m.ann, m.ben)
        assert not m.relay.streams


async def test_who_has_been_out_of_reach_is_dialled_again_once_it_has_dialled_itself() -> None:
    async with mesh() as m:
        await pair(m.ann, m.ben)
        m.network.heal()
        m.ben.serve("other", echo)
        m.network.kill(m.relay.peer_id)
        await eventually(lambda: not m.ann.streams or all(s.closed for s in m.ann.streams), 30.0)
        await pair(m.ben, m.ann, "back")
        stream = await m.ann.open(m.ben.peer_id, "other")
        await stream.send(Frame("ping"))
        assert (await stream.recv()).kind == "ping"


async def test_a_peer_that_passes_nothing_on_says_so_and_the_error_names_the_port() -> None:
    async with mesh(passes_on=False) as m:
        with pytest.raises(JoinError, match=r"passes on no more streams.*TCP port 4007 in at its router"):
            await m.ann.open(m.ben.peer_id, "test", [f"/ip4/10.0.0.3/tcp/4007/p2p/{m.ben.peer_id}"])


async def test_a_relay_that_passes_on_is_asked_though_the_token_names_two_peers_that_are_gone() -> None:
    m = Mesh()
    gone = [f"/ip4/192.0.2.1/tcp/4001/p2p/{Identity.generate().peer_id}" for _ in range(2)]
    for who, identity in ((m.ann, m.identities[0]), (m.ben, m.identities[1]), (m.relay, m.identities[2])):
        who.allow(identity, gone, passes_on=True)
    async with m.ann, m.ben, m.relay:
        await pair(m.ann, m.relay)
        await pair(m.ben, m.relay)
        near, far = await pair(m.ann, m.ben, "far")
        await near.send(Frame("ping"))
        assert (await far.recv()).kind == "ping"


async def test_a_refusal_of_the_far_end_is_told_as_it_is() -> None:
    async with mesh() as m:
        with pytest.raises(JoinError, match="refused the stream: this peer does not serve 'nothing'"):
            await m.ann.open(m.ben.peer_id, "nothing")


async def test_one_peer_has_so_many_streams_passed_on_and_no_more() -> None:
    async with mesh() as m:
        m.ben.serve("test", echo)
        streams = [await m.ann.open(m.ben.peer_id, "test") for _ in range(MOST_OF_ONE)]
        with pytest.raises(JoinError, match="passes on no more streams"):
            await m.ann.open(m.ben.peer_id, "test")
        await streams[0].aclose()
        await eventually(lambda: sum(s.purpose == RELAY and not s.closed for s in m.relay.streams) < MOST_OF_ONE, 30.0)
        await m.ann.open(m.ben.peer_id, "test")


async def test_nobody_is_relayed_who_does_not_know_the_mesh_key() -> None:
    async with mesh() as m:
        stranger = Identity.generate()
        other = Here(m.network, stranger.peer_id, b"another key", timeouts=PATIENT, limits=LIMITS)
        other.allow(stranger, [f"/ip4/192.0.2.1/tcp/4001/p2p/{m.relay.peer_id}"], passes_on=True)
        m.network.cut(other.peer_id, m.ben.peer_id)
        async with other:
            with pytest.raises(NotPermittedError):
                await other.open(m.ben.peer_id, "test")
